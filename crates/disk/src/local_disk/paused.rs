//! Serves the requests that wait for space on the host; see [`crate::pause`].
//!
//! What must hold: a request waits with nothing but its own memory. Each attempt is admitted anew,
//! so it uses the image that the disk has at that time. A request that is withdrawn while it waits
//! goes back unanswered, because nothing of it is in flight and it may be repeated as a whole.

use blockyard_ring::probe::{self, Probed};

use super::admitting::Wanted;
use super::merge::Run;
use super::{Attempt, LocalDisk};
use crate::request::{Finished, Request, Token};

impl LocalDisk {
    /// Serves a request for which the host had no space. `resumed`: [`Pause::resumed`] before the
    /// attempt.
    ///
    /// [`Pause::resumed`]: crate::pause::Pause::resumed
    #[cold]
    pub(super) async fn serve_paused<T: Token>(
        &self,
        mut request: Request<T>,
        mut resumed: u64,
        probed: Probed<'_>,
    ) -> Finished<T> {
        loop {
            probe::request_paused(probed);
            let may_pause = self.wait_for_space(1, resumed, || request.may_wait()).await;
            if !may_pause && request.is_withdrawn() {
                return request.withdraw();
            }
            resumed = self.pause.resumed();
            let attempt = if may_pause {
                self.attempt(request, probed).await
            } else {
                // The queue drains, so the request must not wait for the throttle either.
                let Request { op, offset, len, .. } = request;
                let wanted = Wanted { op, offset, len, charged: len, requests: 1 };
                let admitted = self.enter_unlimited(&wanted).await;
                let served = self.serve_in(&admitted.image, request, false);
                admitted.image.measured(served, &admitted.file_io).await
            };
            match attempt {
                Attempt::Finished(finished) => return finished,
                Attempt::Paused(paused) => request = paused,
            }
        }
    }

    /// Serves the requests of a run for which the host had no space, each by itself.
    #[cold]
    pub(super) async fn serve_paused_run<T: Token>(
        &self,
        run: &mut Run<T>,
        mut resumed: u64,
        probed: Probed<'_>,
    ) {
        while let Some(wanted) = run.wanted(run.parts.iter().map(|part| part.len).sum()) {
            probe::request_paused(probed);
            let may_wait = || run.parts.iter().all(Request::may_wait);
            let count = wanted.requests.into();
            let may_pause = self.wait_for_space(count, resumed, may_wait).await;
            if !may_pause && run.parts.iter().all(Request::is_withdrawn) {
                return run.withdraw();
            }
            resumed = self.pause.resumed();
            let admitted = match (may_pause, run.parts.first()) {
                // All requests are of one queue, so they are withdrawn together.
                (true, Some(first)) => first.unless_withdrawn(self.enter_for(&wanted)).await,
                _ => Some(self.enter_unlimited(&wanted).await),
            };
            let Some(admitted) = admitted else { return run.withdraw() };
            let served = self.serve_each(&admitted.image, run, may_pause);
            admitted.image.measured(served, &admitted.file_io).await;
        }
    }

    /// Waits until the disk is resumed. Returns false if the requests must not wait any longer.
    async fn wait_for_space(&self, count: u64, seen: u64, may_wait: impl Fn() -> bool) -> bool {
        let may_wait = || may_wait() && !self.throttle.is_suspended();
        self.pause.wait(&self.disk, count, seen, may_wait).await
    }
}

#[cfg(test)]
mod tests;
