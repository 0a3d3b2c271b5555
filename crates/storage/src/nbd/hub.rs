//! A connection that all reactors share. A thread of its own holds it and runs their work.
//!
//! In: work from any reactor. Out: its result. Data are copied in between, because the memory of a
//! reactor stays on its thread.
//!
//! What must hold: every caller gets a result, or an error if there will be none.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::task::{Poll, Waker};

use blockyard_ring::sandbox::{self, Kind};
use blockyard_ring::{Executor, Remote, threads};

use super::client::Client;
use super::export::Export;

/// The thread that holds the connection; see the module documentation.
#[derive(Debug)]
pub struct Hub(Remote);

thread_local! {
    /// The client of a hub's thread.
    static CLIENT: RefCell<Option<Rc<Client>>> = const { RefCell::new(None) };
}

impl Hub {
    /// Starts the thread.
    pub fn start(export: &Arc<Export>) -> io::Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let export = export.clone();
        // A reactor calls this, and may not start threads itself.
        threads::spawn(std::thread::Builder::new().name("nbd".into()), move || {
            let executor = match Executor::new() {
                Ok(executor) => executor,
                Err(e) => return drop(sender.send(Err(e))),
            };
            sandbox::confine(Kind::Reactor);
            CLIENT.set(Some(Rc::new(Client::new(executor.handle(), &export))));
            let _ = sender.send(Ok(executor.remote()));
            if let Err(e) = executor.run() {
                tracing::error!("image {}: its thread has ended: {e}", export.uri);
            }
            CLIENT.take();
        })?;
        receiver
            .recv()
            .map_err(|_| io::Error::other("the thread of its connection has ended"))?
            .map(Hub)
    }

    /// Runs `work` on the hub's thread.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl AsyncFnOnce(Rc<Client>) -> T + Send + 'static,
    ) -> io::Result<T> {
        let answer = Arc::new(Answer::<T>::default());
        let promise = Promise(answer.clone());
        self.0.run(move |handle| {
            if let Some(client) = CLIENT.with_borrow(Option::clone) {
                handle.spawn(async move {
                    let value = work(client).await;
                    promise.0.state().value = Some(value);
                });
            }
        });
        poll_fn(|cx| {
            let mut state = answer.state();
            match state.value.take() {
                Some(value) => Poll::Ready(Ok(value)),
                None if state.ended => {
                    Poll::Ready(Err(io::Error::other("the connection's thread has ended")))
                }
                None => {
                    state.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.0.run(|handle| {
            CLIENT.take();
            handle.stop();
        });
    }
}

/// A result that one thread passes to another.
struct Answer<T>(Mutex<State<T>>);

struct State<T> {
    value: Option<T>,
    ended: bool,
    waker: Option<Waker>,
}

impl<T> Default for Answer<T> {
    fn default() -> Self {
        Answer(Mutex::new(State { value: None, ended: false, waker: None }))
    }
}

impl<T> Answer<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks the result as complete when it is dropped, with or without a value.
struct Promise<T>(Arc<Answer<T>>);

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.0.state();
            state.ended = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
