//! Watches a connection: its server is to answer in time, and to be there also while nothing is
//! asked for.
//!
//! In: the requests that are on their way, and when something last came. Out: why the connection is
//! of no more use. What must hold: an idle connection wakes nobody, and its end is seen within
//! twice [`LOOK`]; who asks for one thing after another pays for a timer a second.

use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::state::{Inner, changes};
use blockyard_nbd::link::Link;

/// How often it is looked while there are requests; without any for so long a connection is idle.
const LOOK: Duration = Duration::from_secs(1);
/// Times the limit of silence for which one request may stay unanswered while others are.
const PASSED_OVER: u32 = 4;

impl Inner {
    /// Ends when the server falls silent, or goes while nothing is asked for.
    pub(super) async fn watch(&self, socket: &Link) -> String {
        let limit = self.export.options.timeout;
        let mut seen = u64::MAX;
        loop {
            let (busy, sent) = (self.slots.borrow().busy(), self.slots.borrow().sent());
            let look = Instant::now() + LOOK.min(limit);
            if busy == 0 {
                if std::mem::replace(&mut seen, sent) != sent {
                    self.handle.sleep_until(look).await;
                } else if let Some(why) = self.rest(socket).await {
                    return why;
                }
                continue;
            }
            // Nothing is heard, or one request is passed over while others are answered.
            let oldest = self.slots.borrow().oldest().unwrap_or_else(Instant::now);
            let until = (self.progress.get().max(oldest) + limit).min(oldest + PASSED_OVER * limit);
            if Instant::now() < until {
                self.handle.sleep_until(until.min(look)).await;
                continue;
            }
            if self.slots.borrow().any_sent(changes) {
                self.export.lose(&format!(
                    "the server has not answered a write for {} s",
                    limit.as_secs_f32()
                ));
            }
            return format!("the server has not answered for {} s", limit.as_secs_f32());
        }
    }

    /// While nothing is asked for. Some: the connection is of no more use.
    async fn rest(&self, socket: &Link) -> Option<String> {
        let mut watch = match socket.watch(&self.handle) {
            Ok(watch) => watch,
            // Then its end is seen by the next request.
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
