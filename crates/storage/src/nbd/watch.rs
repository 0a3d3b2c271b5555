//! Watches a connection: the server must answer in time, and must stay connected even without
//! requests.
//!
//! In: the requests in flight, and the time of the last progress. Out: the reason why the
//! connection is unusable.
//!
//! What must hold: an idle connection causes no wake-ups, and its end is seen within twice
//! [`CHECK_PERIOD`]. A busy connection costs one timer a second.

use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::state::{Inner, changes};
use blockyard_nbd::link::Link;
use blockyard_nbd::{NbdError, NbdErrorKind};

/// Time between two checks while there are requests. A connection without requests for this long is
/// idle.
const CHECK_PERIOD: Duration = Duration::from_secs(1);
/// One request may stay unanswered for this many times the timeout, while others are answered.
const PASSED_OVER: u32 = 4;

impl Inner {
    /// Returns the reason when the server falls silent, or closes an idle connection.
    pub(super) async fn watch(&self, socket: &Link) -> NbdError {
        let limit = self.export.options.timeout;
        let mut seen = u64::MAX;
        loop {
            let (busy, sent) = (self.slots.borrow().busy(), self.slots.borrow().sent());
            let next_check = Instant::now() + CHECK_PERIOD.min(limit);
            if busy == 0 {
                if std::mem::replace(&mut seen, sent) != sent {
                    self.handle.sleep_until(next_check).await;
                } else if let Some(why) = self.wait_while_idle(socket).await {
                    return why;
                }
                continue;
            }
            // The deadline: nothing arrives, or one request is passed over while others are
            // answered. If requests wait and none is in flight, the server takes no bytes.
            let oldest = self.slots.borrow().oldest().unwrap_or_else(|| self.progress.get());
            let until = (self.progress.get().max(oldest) + limit).min(oldest + PASSED_OVER * limit);
            if Instant::now() < until {
                self.handle.sleep_until(until.min(next_check)).await;
                continue;
            }
            if self.slots.borrow().any_sent(changes) {
                self.export.lose(&format!(
                    "the server has not answered a write for {} s",
                    limit.as_secs_f32()
                ));
            }
            let what = format!("the server has not answered for {} s", limit.as_secs_f32());
            return NbdError::new(NbdErrorKind::Silent, what);
        }
    }

    /// Waits while there are no requests. Returns a reason if the connection is unusable.
    async fn wait_while_idle(&self, socket: &Link) -> Option<NbdError> {
        let mut watch = match socket.watch(&self.handle) {
            Ok(watch) => watch,
            // Without a watch, only the next request detects the end of the connection.
            Err(_) => {
                self.watch.wait().await;
                return None;
            }
        };
        self.watch.clear();
        poll_fn(|_| {
            let asked = self.watch.arm() || self.slots.borrow().busy() > 0;
            if asked {
                return Poll::Ready(None);
            }
            watch.arm();
            socket.has_ended().map_or(Poll::Pending, |why| Poll::Ready(Some(why)))
        })
        .await
    }
}
