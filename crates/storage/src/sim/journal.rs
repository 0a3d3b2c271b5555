//! A journal of operations on real files, for programs whose threads and rings cannot run on
//! simulated disks.
//!
//! In: requests to real files and their answers ([`Recorded`]), from any thread. Out: a [`Replay`],
//! which goes through the journal line by line. At each line it returns what a power cut may leave
//! in each file, by the rules of the simulated disk.
//!
//! Code that can run on one simulated executor needs no journal of lines: a journal of
//! [`SimFiles`] puts the data of the files on simulated disks.
//!
//! What must hold: the journal records the start of an operation before it starts, and its end
//! after it has ended. So an order in the journal is the real order.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_ring::Segments;

use super::files::FilesId;
use super::media::Media;
use super::{Rng, SimFiles, SimImage};
use crate::Storage;

/// A journal of operations on files. Clones are the same journal.
#[derive(Clone, Debug, Default)]
pub struct Journal {
    state: Arc<Mutex<State>>,
    /// The simulated disks of the files. Then the journal has no lines.
    simulated: Option<FilesId>,
}

#[derive(Debug, Default)]
struct State {
    /// Files by path, with their initial contents.
    files: Vec<(PathBuf, Vec<u8>)>,
    lines: Vec<Line>,
    marks: u64,
}

#[derive(Clone, Debug)]
enum Line {
    Begins { op: usize, file: usize, effect: Effect },
    Ended { op: usize, ok: bool },
    Mark(u64),
}

#[derive(Clone, Debug)]
enum Effect {
    Write {
        offset: u64,
        data: Arc<Vec<u8>>,
        durable: bool,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    /// Extends the file to `end` if it is shorter.
    Reach {
        end: u64,
    },
    SetLen {
        len: u64,
    },
    Sync,
    /// Sets or removes the file's note (an extended attribute). The change is durable when the
    /// operation has ended.
    Note(Option<PathBuf>),
}

impl Journal {
    /// Returns the journal with which image files keep their data on the disks of `files`.
    pub fn simulated(files: &SimFiles) -> Self {
        Journal { state: Arc::default(), simulated: Some(files.id()) }
    }

    /// Returns the simulated disks of the files, if the journal has them.
    pub(crate) fn files(&self) -> Option<FilesId> {
        self.simulated
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the file's number. Reads the contents of a file that is new to the journal.
    fn file(&self, path: &Path) -> io::Result<usize> {
        let mut state = self.state();
        if let Some(known) = state.files.iter().position(|(known, _)| known == path) {
            return Ok(known);
        }
        state.files.push((path.into(), std::fs::read(path)?));
        Ok(state.files.len() - 1)
    }

    /// Adds a line whose meaning the caller defines. Returns its number.
    pub fn mark(&self) -> u64 {
        let mut state = self.state();
        state.marks += 1;
        let mark = state.marks;
        state.lines.push(Line::Mark(mark));
        mark
    }

    /// Records a change of the file's note (an extended attribute), which `keep` makes.
    pub fn note(
        &self,
        path: &Path,
        note: Option<&Path>,
        keep: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        if let Some(files) = self.simulated {
            return files.note(path, note, keep);
        }
        let op = self.begins(self.file(path)?, Effect::Note(note.map(PathBuf::from)));
        let kept = keep();
        self.ended(op, kept.is_ok());
        kept
    }

    fn begins(&self, file: usize, effect: Effect) -> usize {
        let mut state = self.state();
        let op = state.lines.len();
        state.lines.push(Line::Begins { op, file, effect });
        op
    }

    fn ended(&self, op: usize, ok: bool) {
        self.state().lines.push(Line::Ended { op, ok });
    }

    /// Returns the number of lines so far.
    pub fn len(&self) -> usize {
        self.state().lines.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a replay of the present contents of the journal.
    pub fn replay(&self, seed: u64) -> Replay {
        let state = self.state();
        let file = |(path, bytes): &(PathBuf, Vec<u8>)| {
            let media = Media::new(SimImage::from_bytes(bytes));
            ReplayedFile { path: path.clone(), media, in_flight: BTreeMap::new(), note: None }
        };
        let files = state.files.iter().map(file).collect();
        Replay {
            lines: state.lines.clone(),
            at: 0,
            files,
            file_of: BTreeMap::new(),
            rng: Rng::new(seed),
        }
    }
}

/// A storage whose operations are recorded in a journal.
#[derive(Clone)]
pub struct Recorded<S> {
    storage: S,
    journal: Journal,
    file: usize,
}

impl<S: Storage> Recorded<S> {
    pub fn new(storage: S, journal: &Journal, path: &Path) -> io::Result<Self> {
        Ok(Recorded { storage, file: journal.file(path)?, journal: journal.clone() })
    }

    async fn done(
        &self,
        effect: Effect,
        work: impl Future<Output = io::Result<()>>,
    ) -> io::Result<()> {
        let op = self.journal.begins(self.file, effect);
        let done = work.await;
        self.journal.ended(op, done.is_ok());
        done
    }
}

impl<S: Storage> Storage for Recorded<S> {
    forward! { { Recorded { storage, .. } => inline storage } read }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let mut data = vec![0; segments.len()];
        segments.copy_out(0, &mut data);
        let want = data.len();
        let op =
            self.journal.begins(self.file, Effect::Write { offset, data: Arc::new(data), durable });
        let (segments, written) = self.storage.write(segments, offset, durable).await;
        self.journal.ended(op, matches!(written, Ok(n) if n == want));
        (segments, written)
    }

    async fn sync(&self) -> io::Result<()> {
        self.done(Effect::Sync, self.storage.sync()).await
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.done(Effect::Zero { offset, len }, self.storage.discard(offset, len)).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.done(Effect::Zero { offset, len }, self.storage.zero(offset, len, unmap)).await
    }

    async fn zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.done(Effect::Zero { offset, len }, self.storage.zero_fast(offset, len, unmap)).await
    }

    async fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.done(Effect::Reach { end: offset + len }, self.storage.allocate(offset, len)).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.done(Effect::SetLen { len }, self.storage.set_len(len)).await
    }

    forward! { { Recorded { storage, .. } => inline storage }
        len next_data next_data_within allocated lost keeps_unsynced lookups geometry capabilities
        alignment
    }
}

struct ReplayedFile {
    path: PathBuf,
    media: Media,
    /// Operations in flight. With each one: the operations in flight when it began, and the end of
    /// the journal of lengths then. A sync needs them.
    in_flight: BTreeMap<usize, (Effect, Vec<usize>, u64)>,
    note: Option<PathBuf>,
}

/// Goes through a journal; see the module documentation.
pub struct Replay {
    lines: Vec<Line>,
    at: usize,
    files: Vec<ReplayedFile>,
    /// The file of each operation in flight.
    file_of: BTreeMap<usize, usize>,
    rng: Rng,
}

/// A file after a power cut.
pub struct LeftFile {
    pub path: PathBuf,
    pub image: SimImage,
    pub note: Option<PathBuf>,
}

impl Replay {
    /// Returns the number of lines.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Applies the next line. Returns the mark if it is one.
    pub fn step(&mut self) -> Option<u64> {
        let line = self.lines.get(self.at)?.clone();
        self.at += 1;
        match line {
            Line::Mark(mark) => return Some(mark),
            Line::Begins { op, file, effect } => {
                let state = &mut self.files[file];
                let others = state.in_flight.keys().copied().collect();
                state.in_flight.insert(op, (effect, others, state.media.journal_end()));
                self.file_of.insert(op, file);
            }
            Line::Ended { op, ok } => {
                let file = self.file_of.remove(&op).expect("an operation that has begun");
                self.files[file].ended(op, ok, &mut self.rng);
            }
        }
        None
    }

    /// Returns one of the possible states of the files after a power cut here.
    pub fn power_cut(&mut self) -> Vec<LeftFile> {
        self.files.iter().map(|file| file.power_cut(&mut self.rng)).collect()
    }
}

impl ReplayedFile {
    fn ended(&mut self, op: usize, ok: bool, rng: &mut Rng) {
        let (effect, others, journal_end) = self.in_flight.remove(&op).expect("it is in flight");
        match effect {
            // The file system may not support these operations. All others must succeed.
            Effect::Zero { .. } | Effect::Reach { .. } if !ok => {}
            effect if !ok => panic!("{}: {effect:?} has failed", self.path.display()),
            Effect::Sync => {
                let covered = |other: u64| other < op as u64 && !others.contains(&(other as usize));
                self.media.sync(covered, journal_end, rng);
            }
            Effect::Note(note) => self.note = note,
            effect => land(&mut self.media, op, &effect),
        }
    }

    fn power_cut(&self, rng: &mut Rng) -> LeftFile {
        let (mut media, mut note) = (self.media.clone(), self.note.clone());
        let mut order: Vec<_> = self.in_flight.iter().collect();
        rng.shuffle(&mut order);
        for (&op, (effect, ..)) in order {
            match effect {
                Effect::Note(new) if rng.one_in(2) => note.clone_from(new),
                Effect::Write { offset, data, .. } => {
                    // Handle it like a write that is not durable, because it may be torn.
                    let effect =
                        Effect::Write { offset: *offset, data: data.clone(), durable: false };
                    land(&mut media, op, &effect);
                }
                effect => land(&mut media, op, effect),
            }
        }
        LeftFile { path: self.path.clone(), image: media.crash(rng), note }
    }
}

fn land(media: &mut Media, op: usize, effect: &Effect) {
    let number = op as u64;
    match effect {
        Effect::Write { offset, data, durable } if !data.is_empty() => {
            let bytes = Rc::new(data.as_ref().clone());
            for sector in media.sectors(*offset, bytes.len() as u64) {
                media.write(number, sector, *offset, &bytes);
            }
            if *durable {
                media.write_through(number, *offset, bytes.len() as u64);
            }
        }
        Effect::Zero { offset, len } => {
            for sector in media.sectors_in_use(*offset, *len) {
                media.zero(number, sector, *offset, *len);
            }
        }
        Effect::Reach { end } if *end > media.len() => media.set_len(number, *end),
        Effect::SetLen { len } => media.set_len(number, *len),
        Effect::Write { .. } | Effect::Reach { .. } | Effect::Sync | Effect::Note(_) => {}
    }
}
