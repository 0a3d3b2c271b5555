//! The thread on which SIGHUP reloads the configuration. A reload may wait for the storage of a
//! disk, and SIGTERM must not wait with it.
//!
//! In: requests. Out: calls of the work, one after the other. What must hold: a request is followed
//! by a whole call that began after it. Requests that come during a call share the next one.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

pub struct Reloader {
    wake: SyncSender<()>,
    /// Is disconnected when the thread ends.
    ended: Receiver<()>,
}

impl Reloader {
    pub fn start(mut work: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (wake, woken) = sync_channel(1);
        let (end, ended) = sync_channel(0);
        std::thread::Builder::new().name("reload".into()).spawn(move || {
            woken.iter().for_each(|()| work());
            drop(end);
        })?;
        Ok(Reloader { wake, ended })
    }

    /// Requests a reload, and does not wait for it.
    pub fn request(&self) {
        // A request that has not begun covers this one.
        let _ = self.wake.try_send(());
    }

    /// Waits for the reloads that were requested, but not longer than `limit`.
    pub fn finish(self, limit: Duration) {
        drop(self.wake);
        let _ = self.ended.recv_timeout(limit);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;
    use crate::process::awaited::{HANG, next};

    #[test]
    fn a_request_waits_for_no_reload_and_is_followed_by_one() {
        let (begun, begins) = channel();
        let (go_on, gate) = channel();
        let reloader = Reloader::start(move || {
            begun.send(()).unwrap();
            let _ = gate.recv();
        });
        let reloader = reloader.unwrap();
        reloader.request();
        next(&begins);
        // The storage of a disk does not answer.
        reloader.request();
        reloader.request();
        assert!(begins.try_recv().is_err(), "one at a time");
        go_on.send(()).unwrap();
        next(&begins);
        reloader.finish(Duration::ZERO);
        drop(go_on);
        let last = begins.recv_timeout(HANG);
        assert_eq!(last, Err(RecvTimeoutError::Disconnected), "the last requests share a reload");
    }
}
