//! Files with temporary names, `.NAME.PID.part`. They are removed when the command fails or a
//! signal ends it. If the process is killed, the next command for the same name removes them.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use blockyard_image::tools::open_file;
use blockyard_program::signals::not_ignored;
use rustix::process::{Pid, test_kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Files to remove when a signal ends the program.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A temporary name. Dropping it removes the file, unless `finish` renamed it.
pub struct Unfinished(PathBuf);

impl Unfinished {
    /// Creates a file with a temporary name in the folder of `path`, by `make`.
    pub fn add<T>(path: &Path, make: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<(Self, T)> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
        let mut list = unfinished();
        let made = make(&temporary)?;
        list.push(temporary.clone());
        Ok((Unfinished(temporary), made))
    }

    /// Gives the file its final name, by `rename`. This is atomic with respect to signals.
    pub fn finish(&self, rename: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let mut list = unfinished();
        rename(&self.0)?;
        list.retain(|path| *path != self.0);
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let mut list = unfinished();
        if list.contains(&self.0) {
            let _ = std::fs::remove_file(&self.0);
        }
        list.retain(|path| *path != self.0);
    }
}

/// Removes the files if a signal ends the program. Signals that the caller ignores stay ignored.
pub fn remove_on_signals() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let heeded = not_ignored([SIGINT, SIGTERM, SIGHUP]);
        let Ok(mut signals) = Signals::new(heeded) else { return };
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // Keep the lock until the end, so that no file gets its final name after this.
                let list = unfinished();
                for path in list.iter() {
                    let _ = std::fs::remove_file(path);
                }
                blockyard_program::output::note("blockyard: interrupted");
                // A shell ends its loop if the signal ended the command.
                let _ = signal_hook::low_level::emulate_default_handler(signal);
                std::process::exit(1);
            }
        });
    });
}

/// Removes temporary files that killed processes left for this name. Keeps files of running
/// processes, and locked files: their process may be on another host or in another PID namespace.
pub fn remove_left_behind(in_folder: &Path, name: &OsStr) {
    let Ok(entries) = std::fs::read_dir(in_folder) else { return };
    let prefix = format!(".{}.", name.to_string_lossy());
    for entry in entries.flatten() {
        let Ok(entry_name) = entry.file_name().into_string() else { continue };
        let process = entry_name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".part"));
        let Some(process) =
            process.and_then(|process| process.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        // A killed process of a container may have had this process's PID. This process has not
        // created a file yet.
        let is_gone = process == rustix::process::getpid()
            || test_kill_process(process) == Err(rustix::io::Errno::SRCH);
        if is_gone && open_file(&entry.path(), false).is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
