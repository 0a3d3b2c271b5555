//! The connections of a listener: a bounded number, and which of them makes room for another one.
//!
//! In: connections, and when each begins and ends a request. Out: permits for new connections. What
//! must hold: a client that keeps connections without complete requests shuts no other client out.
//! If all places are taken and another client has connected, the connection that has waited longest
//! for a complete request is closed. A connection with a request that runs is never closed for
//! another one.

use std::future::pending;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use hyper::body::{Body as _, Bytes, Frame, SizeHint};
use hyper::service::Service;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Maximum number of connections of a listener. Further ones wait in the socket's queue.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// The connections of a listener. Clones are of the same listener.
#[derive(Clone)]
pub(crate) struct Connections {
    places: Arc<Semaphore>,
    open: Arc<Mutex<Vec<Arc<Activity>>>>,
    /// A connection waits for a request again.
    waits: Arc<Notify>,
    /// Number of accepted connections without a place.
    without: Arc<AtomicUsize>,
}

/// What a connection does.
struct Activity {
    phase: Mutex<Phase>,
    closed: Notify,
    waits: Arc<Notify>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It waits for a complete request since then.
    Waits(Instant),
    /// A request runs, or its answer is sent.
    Runs,
    /// It makes room for another connection. No further request runs.
    Closes,
}

/// An open connection. Dropping it frees its place.
pub(crate) struct Connection {
    activity: Arc<Activity>,
    connections: Connections,
    _place: OwnedSemaphorePermit,
}

impl Connections {
    pub fn new() -> Self {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        Connections { places, open: Arc::default(), waits: Arc::default(), without: Arc::default() }
    }

    fn open(&self) -> MutexGuard<'_, Vec<Arc<Activity>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn are_none(&self) -> bool {
        self.places.available_permits() == MAX_CONNECTIONS
            && self.without.load(Ordering::SeqCst) == 0
    }

    /// Waits for a place for a connection that was accepted, and closes another one if there is
    /// none. [`Connections::accepted`] has counted the connection.
    pub async fn place(&self, _accepted: Accepted) -> Option<OwnedSemaphorePermit> {
        let free = self.places.clone().acquire_owned();
        tokio::select! {
            biased;
            place = free => place.ok(),
            place = self.make_place() => place,
        }
    }

    /// Counts a connection that has no place yet.
    pub fn accepted(&self) -> Accepted {
        self.without.fetch_add(1, Ordering::SeqCst);
        Accepted(self.without.clone())
    }

    async fn make_place(&self) -> Option<OwnedSemaphorePermit> {
        loop {
            let waits = self.waits.notified();
            if let Some(longest) = self.take_longest() {
                longest.closed.notify_one();
                break;
            }
            waits.await;
        }
        // The connection that was closed gives its place up.
        self.places.clone().acquire_owned().await.ok()
    }

    /// Takes the connection that has waited longest for a complete request out of the list.
    fn take_longest(&self) -> Option<Arc<Activity>> {
        let mut open = self.open();
        loop {
            let waiting = open.iter().enumerate();
            let waiting = waiting.filter_map(|(at, activity)| Some((activity.since()?, at)));
            let (_, at) = waiting.min()?;
            // A request may have begun meanwhile.
            if open[at].closes() {
                return Some(open.swap_remove(at));
            }
        }
    }

    /// Notes a connection that was accepted.
    pub fn add(&self, place: OwnedSemaphorePermit) -> Connection {
        let phase = Mutex::new(Phase::Waits(Instant::now()));
        let activity = Activity { phase, closed: Notify::new(), waits: self.waits.clone() };
        let activity = Arc::new(activity);
        self.open().push(activity.clone());
        self.waits.notify_one();
        Connection { activity, connections: self.clone(), _place: place }
    }
}

/// A connection that was accepted, and that has no place yet.
pub(crate) struct Accepted(Arc<AtomicUsize>);

impl Drop for Accepted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Activity {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns since when the connection waits for a complete request.
    fn since(&self) -> Option<Instant> {
        match *self.phase() {
            Phase::Waits(since) => Some(since),
            Phase::Runs | Phase::Closes => None,
        }
    }

    /// Notes that a request runs. Returns false if none may.
    fn runs(&self) -> bool {
        let mut phase = self.phase();
        if *phase != Phase::Closes {
            *phase = Phase::Runs;
        }
        *phase == Phase::Runs
    }

    /// Notes that an answer was sent.
    fn waits(&self) {
        let mut phase = self.phase();
        if *phase != Phase::Closes {
            *phase = Phase::Waits(Instant::now());
            drop(phase);
            self.waits.notify_one();
        }
    }

    /// Lets no further request run. Returns false if one runs.
    fn closes(&self) -> bool {
        let mut phase = self.phase();
        if *phase != Phase::Runs {
            *phase = Phase::Closes;
        }
        *phase == Phase::Closes
    }
}

impl Connection {
    /// Waits until the connection must make room for another one.
    pub async fn closed(&self) {
        self.activity.closed.notified().await;
    }

    /// Returns what [`follow`] needs.
    pub fn activity(&self) -> Followed {
        Followed(self.activity.clone())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.open().retain(|other| !Arc::ptr_eq(other, &self.activity));
    }
}

/// The activity of a connection, for [`follow`].
#[derive(Clone)]
pub(crate) struct Followed(Arc<Activity>);

/// Lets `service` answer a request. Notes when the request is complete, and when its answer was
/// sent.
pub(crate) async fn follow<S>(
    Followed(activity): Followed,
    request: Request,
    service: S,
) -> Result<Response, S::Error>
where
    S: Service<Request, Response = Response>,
{
    if request.body().is_end_stream() && !activity.runs() {
        // The connection is about to end.
        return pending().await;
    }
    let received = |body| Body::new(Received { body, activity: activity.clone() });
    let response = service.call(request.map(received)).await?;
    activity.runs();
    Ok(response.map(|body| Body::new(Sent { body, activity })))
}

/// The body of a request. At its end the request is complete.
struct Received {
    body: Body,
    activity: Arc<Activity>,
}

/// The body of an answer. The connection drops it when it has sent the last part.
struct Sent {
    body: Body,
    activity: Arc<Activity>,
}

type Part = Option<Result<Frame<Bytes>, axum::Error>>;

impl hyper::body::Body for Received {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Part> {
        let part = Pin::new(&mut self.body).poll_frame(context);
        let is_complete = matches!(part, Poll::Ready(None)) || self.body.is_end_stream();
        // The request does not run on a connection that is about to end.
        if is_complete && !self.activity.runs() { Poll::Pending } else { part }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl hyper::body::Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Part> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.activity.waits();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_client_waits_if_all_others_have_requests_that_run() {
        let connections = Connections::new();
        let mut all = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let place = connections.place(connections.accepted()).await.unwrap();
            all.push(connections.add(place));
        }
        assert!(all.iter().all(|connection| connection.activity.runs()));
        let mut place = Box::pin(connections.place(connections.accepted()));
        let waited = tokio::time::timeout(Duration::ZERO, &mut place).await;
        assert!(waited.is_err() && all.iter().all(|connection| connection.activity.runs()));
        drop(all.pop());
        let added = connections.add(place.await.unwrap());
        assert!(added.activity.runs());
        // The next client needs the place of a connection that waits for a request.
        all[5].activity.waits();
        let mut place = Box::pin(connections.place(connections.accepted()));
        let waited = tokio::time::timeout(Duration::ZERO, &mut place).await;
        assert!(waited.is_err() && !all[5].activity.runs(), "it starts no request");
        all[5].closed().await;
        drop(all.swap_remove(5));
        drop(place.await.unwrap());
        drop((all, added));
        assert!(connections.are_none());
    }
}
