//! Reconnects to xenstore after the connection was lost, because xenstored was too slow or has
//! ended.
//!
//! What must hold: a thread that waits for a connection stops when its service stops. If the
//! connection is lost again and again, the pauses between attempts become longer.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_ring::xen::{Host, Store, StoreError};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::Control;

/// Pause after the first failed attempt. The pause doubles with each further failure, up to the
/// longest pause.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// The attempts of one thread.
#[derive(Default)]
pub(super) struct Reopen {
    pause: Duration,
    /// Time of the last successful attempt.
    last: Option<Instant>,
}

impl Reopen {
    /// Opens a connection and sets the watches with `watch`. Each [`Control::ring`] during a pause
    /// causes an extra attempt. Returns `None` if the service is stopping.
    pub fn open(
        &mut self,
        host: &Host,
        control: &Control,
        watch: impl Fn(&mut Store) -> Result<(), StoreError>,
    ) -> Option<Store> {
        // If a connection is lost again soon, pause before the first attempt too.
        if self.last.is_none_or(|last| last.elapsed() > LONGEST) {
            self.pause = Duration::ZERO;
        }
        loop {
            control.pause(self.pause);
            if control.stop.load(Ordering::SeqCst) {
                return None;
            }
            self.pause = next(self.pause);
            let Ok(mut store) = host.store() else { continue };
            store.share_limit(&control.deadline);
            if watch(&mut store).is_ok() {
                self.last = Some(Instant::now());
                return Some(store);
            }
        }
    }
}

fn next(pause: Duration) -> Duration {
    (pause * 2).clamp(FIRST, LONGEST)
}

impl Control {
    /// Waits for `time`, or until [`Control::ring`].
    pub fn pause(&self, time: Duration) {
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut polled = [PollFd::new(&self.wake, PollFlags::IN)];
        let _ = rustix::event::poll(&mut polled, Some(&time));
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut pause = Duration::ZERO;
        let pauses: Vec<_> = (0..7)
            .map(|_| {
                pause = next(pause);
                pause.as_secs()
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
    }
}
