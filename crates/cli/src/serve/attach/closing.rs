//! Whether the server of a device has closed its image, for `detach`.
//!
//! Only its parent learns how a process has ended, and `detach` is not the parent of the server. So
//! the server has a memory file with a known name, and writes one byte to it when the image is
//! closed. `detach` opens the file through /proc before the server ends, and reads it afterwards.
//! What must hold: `detach` reports success only if all writes are in the image.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;
use blockyard_program::output;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::process::Pid;

/// Name of the memory file.
const NAME: &str = "blockyard-closed";

/// How long the server of a device may take to flush the image and exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(120);

const AGAIN: &str = "attach and detach the image again, so that all writes are in it";

/// The server's memory file.
pub struct Closing(File);

impl Closing {
    pub fn new() -> io::Result<Self> {
        Ok(Closing(rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC)?.into()))
    }

    /// Reports that all writes are in the image and that it is closed.
    pub fn report(mut self) {
        // If this fails, `detach` reports an error.
        let _ = self.0.write_all(b"\n");
    }
}

/// The process that served a device, as `detach` sees it.
pub enum Server {
    /// It serves this one device, and ends with it. The file is missing if it cannot be opened.
    Attached(Pid, Option<File>),
    /// It may serve other disks, and goes on.
    Shared,
    /// It had ended before the device was stopped.
    Ended,
}

impl Server {
    /// Must be called before the device is stopped.
    pub fn watch(pid: Option<Pid>) -> Self {
        match pid {
            None => Server::Ended,
            Some(pid) if serves_one_device(pid) => Server::Attached(pid, closing_of(pid)),
            Some(_) => Server::Shared,
        }
    }

    /// Waits until all writes are in the image. `device`: its path, for the error.
    pub fn finish(self, device: &Path) -> anyhow::Result<()> {
        let device = device.display();
        let (pid, closing) = match self {
            Server::Attached(pid, closing) => (pid, closing),
            Server::Shared => return Ok(()),
            Server::Ended => {
                output::note(format_args!(
                    "{device} had no server. If its server was killed, {AGAIN}"
                ));
                return Ok(());
            }
        };
        let number = pid.as_raw_nonzero();
        let start = Instant::now();
        while is_alive(pid) && serves_one_device(pid) {
            if start.elapsed() > EXIT_TIMEOUT {
                bail!("the device is removed, but its server, process {number}, does not exit");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Some(closing) = closing else {
            bail!(
                "{device} is removed, but it is not known whether its server, process {number}, \
                 has closed the image: the files of that process cannot be read. As the user of \
                 the server or as root, {AGAIN}"
            );
        };
        if !closing.metadata().is_ok_and(|file| file.size() > 0) {
            bail!(
                "{device} is removed, but its server, process {number}, ended before it had closed \
                 the image: {AGAIN}"
            );
        }
        Ok(())
    }
}

/// Returns whether a process exists. It may belong to another user, which is `EPERM`.
fn is_alive(pid: Pid) -> bool {
    rustix::process::test_kill_process(pid) != Err(Errno::SRCH)
}

pub fn serves_one_device(pid: Pid) -> bool {
    let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    line.split(|b| *b == 0).any(|argument| argument == b"--attached")
}

/// Opens the memory file of a server. Fails if the server has ended, or belongs to another user.
fn closing_of(pid: Pid) -> Option<File> {
    let name = format!("/memfd:{NAME} (deleted)");
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).ok()?;
    let mut paths = descriptors.flatten().map(|entry| entry.path());
    let path =
        paths.find(|path| std::fs::read_link(path).is_ok_and(|to| to == Path::new(&name)))?;
    File::open(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::awaited::end_of;

    #[test]
    fn only_the_servers_report_proves_that_the_image_is_closed() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_child(&child);
        end_of(&mut child);
        let finish = |closing| {
            let done = Server::Attached(pid, closing).finish(Path::new("/dev/ublkb7"));
            done.map_err(|e| e.to_string())
        };
        let silent = Closing::new().unwrap();
        assert!(finish(Some(silent.0)).unwrap_err().contains("ended before it had closed"));
        assert!(finish(None).unwrap_err().contains("it is not known"));
        let closing = Closing::new().unwrap();
        let seen = closing.0.try_clone().unwrap();
        closing.report();
        finish(Some(seen)).unwrap();
    }

    /// Without privileges, signals to the first process are refused.
    #[test]
    fn a_process_of_another_user_is_alive() {
        assert!(is_alive(Pid::INIT));
    }
}
