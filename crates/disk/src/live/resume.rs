//! Resume: lets requests go on that a drain holds, or that wait for space on the host.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::disk::Disk;
use crate::local_disk::LocalDisk;
use crate::on_enospc::OnEnospc;

/// Longest wait for the end of a drain's thread. That thread only lets the requests go on then.
const END_OF_DRAIN: Duration = Duration::from_secs(2);

impl Disk {
    /// Ends a drain, and lets the requests that wait for space try again, on all reactors. Returns
    /// whether the disk was drained, and the number of requests that waited for space. If the disk
    /// was drained, waits for the thread of the drain, at most for [`END_OF_DRAIN`], so that the
    /// caller can drain the disk again at once.
    pub fn resume(self: &Arc<Self>) -> (bool, u64) {
        let drained = self.drain.resume();
        let paused = self.retry();
        if let Some(ended) = drained {
            self.drain.wait_for_end(ended, END_OF_DRAIN);
        }
        (drained.is_some(), paused)
    }

    fn retry(self: &Arc<Self>) -> u64 {
        let paused = self.paused();
        for reactor in self.serving_state().reactors.clone() {
            let disk = self.clone();
            reactor.run(move |handle| {
                if let Some(local_disk) = LocalDisk::known(handle, &disk) {
                    local_disk.pause.resume();
                }
            });
        }
        paused
    }

    /// Changes what happens to requests without space on the host. With `Error`, requests that wait
    /// try again, and fail if there is still no space.
    pub fn set_on_enospc(self: &Arc<Self>, on_enospc: OnEnospc) {
        self.pauses.store(on_enospc == OnEnospc::Pause, Ordering::SeqCst);
        if on_enospc == OnEnospc::Error {
            self.retry();
        }
    }
}
