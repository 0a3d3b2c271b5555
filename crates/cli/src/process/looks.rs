//! Calls of file systems that may not answer, such as the one of a disk's image on NFS.
//!
//! In: files, and a call that looks at them. Out: the answer of the call, or an error that names
//! the file. What must hold: no caller waits longer than its limit. A file system that does not
//! answer keeps few threads, however often a caller asks. The threads open images, so they have the
//! restrictions of such threads ([`blockyard_ring::threads`]).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait for the file system of an image.
pub const LIMIT: Duration = Duration::from_secs(10);

/// The same for each further image, when others have used up that time.
pub const SHORT_LIMIT: Duration = Duration::from_secs(1);

/// Maximum number of late calls. Each keeps a thread.
pub const MAX_LATE: usize = 32;

/// Maximum number of late calls for the files of a folder. The files of a folder are mostly on one
/// file system, and must leave threads to others.
pub const MAX_LATE_OF_FOLDER: usize = 4;

/// Time for which one idle thread waits for further calls. A server that starts makes a call for
/// each of its disks.
const KEPT: Duration = Duration::from_millis(100);

/// Why a look at a file has no answer.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    #[error(
        "{}: its file system has not answered for {} s: try again when it does",
        path.display(),
        limit.as_secs()
    )]
    Late { path: PathBuf, limit: Duration },
    #[error(
        "{}: not looked at, because a call for {} still waits for the file system after {} s: try \
         again when it answers",
        path.display(),
        late.display(),
        since.as_secs()
    )]
    Earlier { path: PathBuf, late: PathBuf, since: Duration },
    #[error("{}: not looked at, because no thread can start: {error}", path.display())]
    Thread { path: PathBuf, error: std::io::Error },
}

impl LookError {
    /// Returns the file that the call has not seen.
    pub fn path(&self) -> &Path {
        let (LookError::Late { path, .. }
        | LookError::Earlier { path, .. }
        | LookError::Thread { path, .. }) = self;
        path
    }
}

/// A call that has not ended within its limit.
struct Late {
    path: PathBuf,
    begun: Instant,
}

/// Which of its files a call looks at now.
#[derive(Clone, Default)]
pub struct Position(Arc<AtomicUsize>);

impl Position {
    /// `file`: its place in the list of the call's files.
    pub fn is_at(&self, file: usize) {
        self.0.store(file, Ordering::Relaxed);
    }
}

/// A call. Returns whether its thread now waits for further calls.
type Work = Box<dyn FnOnce(&Shared) -> bool + Send>;

#[derive(Default)]
struct State {
    /// By the number of the call.
    late: BTreeMap<u64, Late>,
    calls: u64,
    /// Whether a thread waits for further calls.
    is_one_idle: bool,
}

struct Shared {
    state: Mutex<State>,
    /// Calls for the idle thread.
    next: Sender<Work>,
    /// The idle thread holds it.
    waiting: Mutex<Receiver<Work>>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next call for the idle thread, or `None` if the thread is to end.
    fn next_call(&self) -> Option<Work> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(work) = waiting.recv_timeout(KEPT) {
            return Some(work);
        }
        let is_idle = std::mem::take(&mut self.state().is_one_idle);
        // If a caller has taken this thread meanwhile, its call is in the channel.
        if is_idle { None } else { waiting.recv().ok() }
    }

    fn run(&self, work: Work) {
        let mut next = Some(work);
        while let Some(work) = next {
            next = if work(self) { self.next_call() } else { None };
        }
    }
}

/// The calls of a server; see the module documentation.
#[derive(Clone)]
pub struct Looks(Arc<Shared>);

impl Default for Looks {
    fn default() -> Self {
        let (next, waiting) = channel();
        let (state, waiting) = (Mutex::default(), Mutex::new(waiting));
        Looks(Arc::new(Shared { state, next, waiting }))
    }
}

impl Looks {
    /// Returns the answer of `look`, which runs on another thread. Waits at most `limit` for it.
    /// After that the thread goes on, and further looks at the file fail until it has ended.
    pub fn look<T: Send + 'static>(
        &self,
        path: &Path,
        limit: Duration,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, LookError> {
        self.look_at(vec![path.to_path_buf()], limit, move |_| look())
    }

    /// Like `look`, for several files. `look` tells which one it looks at.
    pub fn look_at<T: Send + 'static>(
        &self,
        mut paths: Vec<PathBuf>,
        limit: Duration,
        look: impl FnOnce(&Position) -> T + Send + 'static,
    ) -> Result<T, LookError> {
        let (position, begun) = (Position::default(), Instant::now());
        let (sender, receiver) = sync_channel(1);
        let current = position.clone();
        let number = self.start(&paths, move |number| {
            Box::new(move |shared| {
                let answer = look(&current);
                // Under the lock, so that a call that ends at its limit is not late for ever.
                let mut state = shared.state();
                state.late.remove(&number);
                // Before the answer, so that the caller's next call finds this thread.
                let is_idle = !std::mem::replace(&mut state.is_one_idle, true);
                let _ = sender.send(answer);
                is_idle
            })
        })?;
        let mut path = || paths.swap_remove(position.0.load(Ordering::Relaxed));
        match receiver.recv_timeout(limit) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => {
                let error = std::io::Error::other("it has ended");
                return Err(LookError::Thread { path: path(), error });
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let mut state = self.0.state();
        if let Ok(answer) = receiver.try_recv() {
            return Ok(answer);
        }
        let path = path();
        state.late.insert(number, Late { path: path.clone(), begun });
        Err(LookError::Late { path, limit })
    }

    /// Starts a call on the idle thread, or else on a new one. Returns its number.
    fn start(&self, paths: &[PathBuf], work: impl FnOnce(u64) -> Work) -> Result<u64, LookError> {
        let mut state = self.0.state();
        for path in paths {
            if let Some(late) = state.obstacle(path) {
                let (path, since) = (path.clone(), late.begun.elapsed());
                return Err(LookError::Earlier { path, late: late.path.clone(), since });
            }
        }
        state.calls += 1;
        let (number, has_idle) = (state.calls, std::mem::take(&mut state.is_one_idle));
        drop(state);
        let (work, shared) = (work(number), self.0.clone());
        if has_idle {
            // The receiver exists as long as the sender.
            let _ = shared.next.send(work);
            return Ok(number);
        }
        let thread = std::thread::Builder::new().name("look".into());
        let started = blockyard_ring::threads::spawn(thread, move || shared.run(work));
        let failed = |error| LookError::Thread { path: paths[0].clone(), error };
        started.map(|_| number).map_err(failed)
    }
}

impl State {
    /// Returns the late call because of which no further thread may wait for this file.
    fn obstacle(&self, path: &Path) -> Option<&Late> {
        let same_file = self.late.values().find(|late| late.path == path);
        let in_folder = || self.late.values().filter(|late| late.path.parent() == path.parent());
        let same_folder =
            || in_folder().next().filter(|_| in_folder().count() >= MAX_LATE_OF_FOLDER);
        let any = || self.late.values().next().filter(|_| self.late.len() >= MAX_LATE);
        same_file.or_else(same_folder).or_else(any)
    }
}

/// Returns the answer of `look` about a file of a disk; see [`Looks::look`]. All calls of this
/// process share the threads.
pub fn look<T: Send + 'static>(
    path: &Path,
    limit: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Result<T, LookError> {
    all().look(path, limit, look)
}

/// Like [`look`], for several files; see [`Looks::look_at`].
pub fn look_at<T: Send + 'static>(
    paths: Vec<PathBuf>,
    limit: Duration,
    look: impl FnOnce(&Position) -> T + Send + 'static,
) -> Result<T, LookError> {
    all().look_at(paths, limit, look)
}

fn all() -> &'static Looks {
    static ALL: LazyLock<Looks> = LazyLock::new(Looks::default);
    &ALL
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::process::awaited::HANG;

    /// Looks that do not end before they are released.
    #[derive(Default)]
    struct Hung {
        looks: Looks,
        begun: Arc<AtomicUsize>,
        gate: Arc<(Mutex<bool>, Condvar)>,
    }

    impl Hung {
        fn look(&self, path: &str) -> Result<(), LookError> {
            let (begun, gate) = (self.begun.clone(), self.gate.clone());
            // The call counts when its thread starts.
            let (started, starts) = std::sync::mpsc::channel();
            let hang = move || {
                begun.fetch_add(1, Ordering::Relaxed);
                let _ = started.send(());
                let mut is_open = gate.0.lock().unwrap();
                while !*is_open {
                    is_open = gate.1.wait(is_open).unwrap();
                }
            };
            let done = self.looks.look(Path::new(path), Duration::ZERO, hang);
            // Ends at once if no thread has started.
            let started = starts.recv_timeout(HANG);
            assert_ne!(started, Err(RecvTimeoutError::Timeout), "the thread does not start");
            done
        }

        fn begun(&self) -> usize {
            self.begun.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_file_system_that_does_not_answer_keeps_few_threads() {
        let hung = Hung::default();
        let error = hung.look("/nfs/a").unwrap_err().to_string();
        assert!(error.contains("/nfs/a: its file system has not answered for 0 s"), "{error}");
        for _ in 0..100 {
            let error = hung.look("/nfs/a").unwrap_err().to_string();
            assert!(error.contains("a call for /nfs/a still waits"), "{error}");
        }
        assert_eq!(hung.begun(), 1);
        let all = |folder: &str| (0..100).for_each(|n| drop(hung.look(&format!("{folder}/{n}"))));
        all("/nfs");
        assert_eq!(hung.begun(), MAX_LATE_OF_FOLDER);
        let error = hung.look("/nfs/last").unwrap_err().to_string();
        assert!(error.contains("/nfs/last: not looked at") && error.contains("/nfs/a"), "{error}");
        // Another file system answers meanwhile.
        let five = || hung.looks.look(Path::new("/good/a"), HANG, || 5);
        assert_eq!(five().unwrap(), 5);
        (0..100).for_each(|folder| all(&format!("/{folder}")));
        assert_eq!(hung.begun(), MAX_LATE);
        assert!(five().is_err());

        *hung.gate.0.lock().unwrap() = true;
        hung.gate.1.notify_all();
        // The threads end one after the other.
        let until = Instant::now() + HANG;
        while !hung.looks.0.state().late.is_empty() {
            assert!(Instant::now() < until, "the threads have not ended");
            std::thread::yield_now();
        }
        assert_eq!(five().unwrap(), 5);
    }
}
