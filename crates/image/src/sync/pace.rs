//! Yields of long work on metadata. Work that finds all metadata in memory never waits, so it must
//! yield to the reactor's other tasks by itself.

use std::future::poll_fn;
use std::task::Poll;

use blockyard_ring::Segments;

/// Number of clusters after which work yields.
const CLUSTERS: u32 = 256;

/// Counts the clusters of one task's work.
#[derive(Default)]
pub struct Pace(u32);

impl Pace {
    /// Counts a cluster, and yields if many were counted since the last time.
    pub async fn step(&mut self) {
        self.0 += 1;
        if self.0 == CLUSTERS {
            self.0 = 0;
            yield_once().await;
        }
    }
}

/// Most bytes that are zeroed before work yields.
const ZEROED: usize = 1 << 20;

/// Zeroes consecutive segments in pieces, and yields between the pieces.
#[derive(Default)]
pub struct Zeroing(usize);

impl Zeroing {
    /// Zeroes all bytes of `segments`.
    #[inline]
    pub async fn zero(&mut self, segments: &Segments) {
        let (mut at, len) = (0, segments.len());
        while at < len {
            if self.0 == ZEROED {
                self.0 = 0;
                yield_once().await;
            }
            let here = (len - at).min(ZEROED - self.0);
            segments.zero(at, here);
            at += here;
            self.0 += here;
        }
    }
}

/// Yields once to the reactor's other tasks.
pub async fn yield_once() {
    let mut had = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut had, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
