//! A result that one thread passes to another, with a limit in time.
//!
//! What must hold: every wait ends with a value or an error. A result that arrives after the end of
//! the wait is dropped.

use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Error of a wait that has reached its limit. The call may still have its effect.
#[derive(Debug, thiserror::Error)]
#[error("the target did not answer in time")]
struct Late;

/// Returns whether a call has begun and may still happen, although it has failed.
pub(super) fn is_late(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Late>())
}

/// Where a result arrives.
pub(super) struct Answer<T>(Mutex<State<T>>);

struct State<T> {
    value: Option<T>,
    /// Set when no value will arrive, or no task waits for it.
    ended: Option<Ending>,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The thread that owes the result has dropped the promise.
    Dropped,
    Late,
    /// The value was taken.
    Taken,
}

/// Owed by the thread that computes the result.
pub(super) struct Promise<T>(Arc<Answer<T>>);

/// A wait that can be ended.
pub(super) trait Expires: Send + Sync {
    fn is_over(&self) -> bool;
    fn expire(&self);
}

pub(super) fn promise<T>() -> (Promise<T>, Arc<Answer<T>>) {
    let state = State { value: None, ended: None, waker: None };
    let answer = Arc::new(Answer(Mutex::new(state)));
    (Promise(answer.clone()), answer)
}

impl<T> Answer<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn wait(&self) -> io::Result<T> {
        poll_fn(|cx| {
            let mut state = self.state();
            if let Some(value) = state.value.take() {
                state.ended = Some(Ending::Taken);
                return Poll::Ready(Ok(value));
            }
            match state.ended {
                None => {
                    state.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
                Some(Ending::Late) => {
                    Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, Late)))
                }
                Some(_) => Poll::Ready(Err(io::Error::other("the target has ended"))),
            }
        })
        .await
    }

    fn end(&self, ending: Ending, value: Option<T>) {
        let waker = {
            let mut state = self.state();
            if state.ended.is_some() || state.value.is_some() {
                return;
            }
            match value {
                Some(value) => state.value = Some(value),
                None => state.ended = Some(ending),
            }
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T: Send> Expires for Answer<T> {
    fn is_over(&self) -> bool {
        let state = self.state();
        state.ended.is_some() || state.value.is_some()
    }

    fn expire(&self) {
        self.end(Ending::Late, None);
    }
}

impl<T> Promise<T> {
    pub(super) fn keep(self, value: T) {
        self.0.end(Ending::Taken, Some(value));
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.0.end(Ending::Dropped, None);
    }
}
