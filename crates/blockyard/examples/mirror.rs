//! mirror: writes to two files, reads from one. It goes on if one of them fails.
//!
//! `mirror SOCKET ONE OTHER` serves two files of one size on a vhost-user socket. A half that has
//! failed is out of date. The file ONE.failed, empty at first, has its number, 0 or 1, before the
//! next write is answered. The mirror then starts with the other half only. Of a half that is lost,
//! make an empty file and write ONE.failed. To repair the mirror, copy the good half over the other
//! one and remove ONE.failed. After a power cut or a death of the process the halves may differ in
//! writes that no flush covers: if ONE.failed is empty, copy ONE over OTHER before the next start.

use std::cell::Cell;
use std::path::Path;
use std::{fs, io};

use blockyard::{Access, Device, Disk, Files, Lent, Lock, OwnFile, Shape, Target, Yard};

pub struct Mirror {
    halves: [OwnFile; 2],
    /// The half that has failed.
    failed: Cell<Option<usize>>,
    note: OwnFile,
    /// Whether the note of the failed half is durable.
    noted: Lock<bool>,
}

impl Mirror {
    pub async fn open(files: Files) -> io::Result<Self> {
        let [one, other, note] = [0, 1, 2].map(|number| files.own[number].clone());
        let mut byte = [0];
        note.read_at(&mut byte, 0).await?;
        let failed = Cell::new([b'0', b'1'].iter().position(|half| *half == byte[0]));
        Ok(Mirror { halves: [one, other], failed, note, noted: Lock::new(false) })
    }

    /// Does `work` on all halves that are up to date. Then the first failure is noted durably.
    async fn on_both(&self, work: impl AsyncFn(&OwnFile) -> io::Result<()>) -> io::Result<()> {
        for (number, half) in self.halves.iter().enumerate() {
            if self.failed.get() == Some(number) {
                continue;
            }
            let Err(error) = work(half).await else { continue };
            match self.failed.get() {
                Some(failed) if failed != number => return Err(error),
                _ => self.failed.set(Some(number)),
            }
        }
        let Some(failed) = self.failed.get() else { return Ok(()) };
        let mut noted = self.noted.lock().await;
        if !*noted {
            self.note.write_at(failed.to_string().as_bytes(), 0).await?;
            self.note.sync().await?;
            *noted = true;
        }
        Ok(())
    }
}

impl Device for Mirror {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let first = self.failed.get().map_or(0, |failed| 1 - failed);
        let mut read = Ok(());
        for half in [first, 1 - first].into_iter().filter(|half| self.failed.get() != Some(*half)) {
            read = self.halves[half].read_into(&data, offset).await;
            // If the half has failed meanwhile, it is out of date.
            if read.is_ok() && self.failed.get() != Some(half) {
                return Ok(());
            }
        }
        read.and(Err(io::ErrorKind::Other.into()))
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        let data = data.to_vec()?; // Both get the same bytes, even if the guest changes them.
        self.on_both(async |half| half.write_at(&data, offset).await).await
    }

    async fn flush(&self) -> io::Result<()> {
        self.on_both(async |half| half.sync().await).await
    }
}

pub fn target([one, other]: [&str; 2], access: [Access; 2]) -> io::Result<Target> {
    let note = format!("{one}.failed");
    fs::File::options().append(true).create(true).open(&note)?; // empty: both are good
    let folder = Path::new(&note).parent().filter(|folder| !folder.as_os_str().is_empty());
    fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    let failed: Option<usize> = match fs::read(&note)?.trim_ascii() {
        b"" => None,
        b"0" => Some(0),
        b"1" => Some(1),
        _ => return Err(io::Error::other("ONE.failed is neither 0 nor 1")),
    };
    let sizes = [fs::metadata(one)?.len(), fs::metadata(other)?.len()];
    let size = failed.map_or(sizes[0].min(sizes[1]), |failed| sizes[1 - failed]);
    let shape = Shape { size: size / 4096 * 4096, granule: 4096 };
    let target = Target::device("mirror", shape, async |files, _| Mirror::open(files).await);
    Ok(target.file(one, access[0]).file(other, access[1]).file(note, Access::Write))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [socket, one, other] = &names[..] else { return Err("mirror SOCKET ONE OTHER".into()) };
    let yard = Yard::start(1)?;
    yard.serve(
        Disk::target("mirror", target([one, other], [Access::Write; 2])?).vhost_user(socket),
    )?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
