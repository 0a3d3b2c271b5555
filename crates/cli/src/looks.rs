//! Calls of file systems that may not answer, such as the one of a disk's image on NFS.
//!
//! In: a file, and a call that looks at it. Out: the answer of the call, or an error that names the
//! file. What must hold: no caller waits longer than its limit. A file system that does not answer
//! keeps few threads, however often a caller asks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// A call that has not ended within its limit.
struct Late {
    path: PathBuf,
    begun: Instant,
}

#[derive(Default)]
struct State {
    /// By the number of the call.
    late: BTreeMap<u64, Late>,
    calls: u64,
}

/// The calls of a server; see the module documentation.
#[derive(Clone, Default)]
pub struct Looks(Arc<Mutex<State>>);

impl Looks {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the answer of `look`, which runs on a thread of its own. Waits at most `limit` for
    /// it. After that the thread goes on, and further looks at the file fail until it has ended.
    pub fn look<T: Send + 'static>(
        &self,
        path: &Path,
        limit: Duration,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, LookError> {
        let number = {
            let mut state = self.state();
            if let Some(late) = state.obstacle(path) {
                let (path, since) = (path.to_path_buf(), late.begun.elapsed());
                return Err(LookError::Earlier { path, late: late.path.clone(), since });
            }
            state.calls += 1;
            state.calls
        };
        let (sender, receiver) = sync_channel(1);
        let (looks, begun) = (self.clone(), Instant::now());
        let body = move || {
            let answer = look();
            // Under the lock, so that a call that ends at its limit is not late for ever.
            let mut state = looks.state();
            state.late.remove(&number);
            let _ = sender.send(answer);
        };
        let failed = |error| LookError::Thread { path: path.into(), error };
        let thread = std::thread::Builder::new().name("look".into()).spawn(body).map_err(failed)?;
        let lost = || failed(std::io::Error::other("it has ended"));
        match receiver.recv_timeout(limit) {
            Ok(answer) => {
                // It ends at once.
                let _ = thread.join();
                return Ok(answer);
            }
            Err(RecvTimeoutError::Disconnected) => return Err(lost()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let mut state = self.state();
        if let Ok(answer) = receiver.try_recv() {
            return Ok(answer);
        }
        state.late.insert(number, Late { path: path.into(), begun });
        Err(LookError::Late { path: path.into(), limit })
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
    static ALL: std::sync::LazyLock<Looks> = std::sync::LazyLock::new(Looks::default);
    ALL.look(path, limit, look)
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

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
            let _ = starts.recv();
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
        let five = || hung.looks.look(Path::new("/good/a"), Duration::from_secs(60), || 5);
        assert_eq!(five().unwrap(), 5);
        (0..100).for_each(|folder| all(&format!("/{folder}")));
        assert_eq!(hung.begun(), MAX_LATE);
        assert!(five().is_err());

        *hung.gate.0.lock().unwrap() = true;
        hung.gate.1.notify_all();
        // The threads end one after the other.
        let until = Instant::now() + Duration::from_secs(60);
        while !hung.looks.state().late.is_empty() {
            assert!(Instant::now() < until, "the threads have not ended");
            std::thread::yield_now();
        }
        assert_eq!(five().unwrap(), 5);
    }
}
