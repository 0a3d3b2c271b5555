//! mirror: writes to two files, reads from one. It goes on if one of them fails.
//!
//! `mirror SOCKET ONE OTHER` serves two files of one size on a vhost-user socket. A half that has
//! failed is out of date. The file ONE.failed has its number, 0 or 1, before the next write is
//! answered. The mirror then starts with the other half only. Of a half that is lost, make an empty
//! file and ONE.failed. To repair the mirror, copy the good half over the other one and remove
//! ONE.failed. After a power cut the halves may differ in writes that no flush covers: without
//! ONE.failed, copy ONE over OTHER before the next start.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::{fs, io};

use blockyard::{Access, Device, Disk, Lent, OwnFile, Shape, Target, Yard};

pub struct Mirror {
    halves: [OwnFile; 2],
    /// The half that has failed.
    failed: Cell<Option<usize>>,
    note: PathBuf,
}

impl Mirror {
    /// Does `work` on all halves that are up to date. Notes the first failure durably.
    async fn on_both(&self, work: impl AsyncFn(&OwnFile) -> io::Result<()>) -> io::Result<()> {
        for (number, half) in self.halves.iter().enumerate() {
            if self.failed.get() == Some(number) {
                continue;
            }
            let Err(error) = work(half).await else { continue };
            match self.failed.get() {
                Some(failed) if failed != number => return Err(error),
                Some(_) => {}
                None => {
                    note(&self.note, number)?;
                    self.failed.set(Some(number));
                }
            }
        }
        Ok(())
    }
}

impl Device for Mirror {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let first = self.failed.get().map_or(0, |failed| 1 - failed);
        match self.halves[first].read_into(&data, offset).await {
            Err(_) if self.failed.get().is_none() => {
                self.halves[1 - first].read_into(&data, offset).await
            }
            read => read,
        }
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        let data = data.to_vec()?; // Both get the same bytes, even if the guest changes them.
        self.on_both(async |half| half.write_at(&data, offset).await).await
    }

    async fn flush(&self) -> io::Result<()> {
        self.on_both(async |half| half.sync().await).await
    }
}

pub fn note(path: &Path, failed: usize) -> io::Result<()> {
    let file = fs::File::create(path)?;
    io::Write::write_all(&mut &file, failed.to_string().as_bytes())?;
    file.sync_all()?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

pub fn target([one, other]: [&str; 2], access: [Access; 2]) -> io::Result<Target> {
    let note = PathBuf::from(format!("{one}.failed"));
    let failed = match fs::read_to_string(&note).as_deref().map(str::trim) {
        Ok("0") => Some(0),
        Ok("1") => Some(1),
        Ok("") => None, // A power cut, before a write with one half was answered.
        Ok(_) => return Err(io::Error::other("ONE.failed is neither 0 nor 1")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e.kind().into()),
    };
    let sizes = [fs::metadata(one)?.len(), fs::metadata(other)?.len()];
    let size = failed.map_or(sizes[0].min(sizes[1]), |failed: usize| sizes[1 - failed]);
    let shape = Shape { size: size / 4096 * 4096, granule: 4096 };
    let target = Target::device("mirror", shape, async move |files, _| {
        let halves = [files.own[0].clone(), files.own[1].clone()];
        Ok(Mirror { halves, failed: Cell::new(failed), note })
    });
    Ok(target.file(one, access[0]).file(other, access[1]))
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
