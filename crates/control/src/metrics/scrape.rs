//! `GET /metrics` and `GET /v1/figures`: collects figures, and sends their text within bounds.
//!
//! What must hold
//! - One thread collects at a time, and collecting takes at most a quarter of the time. So clients
//!   that ask without a pause do not occupy the reactors or a processor.
//! - A text may have megabytes. At most `MAX_TEXTS` of a listener are in memory, each for at most
//!   [`ClientLimits::text`]. So clients that read slowly do not occupy memory.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinHandle;
use utoipa::openapi::OpenApi as Description;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::bounds::limits::ClientLimits;
use crate::figures::Figures;
use crate::json::problem::{Answer, Kind, Problem};
use crate::metrics;
use crate::operator::Operator;

/// Maximum number of texts of a listener in memory.
const MAX_TEXTS: usize = 4;

/// Size of the pieces of a text. The connection takes a piece when its buffer has space.
const PIECE: usize = 16 << 10;

/// Pause after a collection, as a multiple of the time that it took.
const PAUSE: u32 = 3;

/// The scrapes of a listener.
#[derive(Clone)]
pub(crate) struct Scrapes {
    operator: Arc<dyn Operator>,
    /// Shared by all listeners.
    collecting: Arc<Semaphore>,
    texts: Arc<Semaphore>,
    limits: ClientLimits,
}

impl Scrapes {
    pub fn new(operator: Arc<dyn Operator>, limits: ClientLimits) -> Self {
        let (collecting, texts) =
            (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(MAX_TEXTS)));
        Scrapes { operator, collecting, texts, limits }
    }

    /// Returns the scrapes of another listener.
    pub fn of_other_listener(&self) -> Self {
        Scrapes { texts: Arc::new(Semaphore::new(MAX_TEXTS)), ..self.clone() }
    }

    /// Returns the service of the scrapes' paths.
    pub fn router(self) -> Router {
        parts().0.with_state(self)
    }

    /// Collects figures and sends the text that `render` makes of them.
    async fn answer(
        self,
        cutoff: &Cutoff,
        content_type: &'static str,
        render: impl FnOnce(Figures) -> String + Send + 'static,
    ) -> Answer<Response> {
        let slot = permit(self.texts, self.limits.wait).await?;
        let turn = permit(self.collecting, self.limits.wait).await?;
        let operator = self.operator;
        // The collection goes on if its client disconnects. Only its end lets the next one begin.
        let (sender, receiver) = oneshot::channel();
        tokio::spawn(async move {
            let begun = Instant::now();
            let collect = move || operator.figures().map(render);
            let collected = tokio::task::spawn_blocking(collect).await;
            let _ = sender.send(collected);
            tokio::time::sleep(begun.elapsed() * PAUSE).await;
            drop(turn);
        });
        let Ok(Ok(collected)) = receiver.await else {
            return Err(Problem::new(Kind::Busy, "the server is ending"));
        };
        let text = collected?;
        let deadline = cutoff.after(self.limits.text);
        let body = Text { rest: Bytes::from(text), _slot: slot, _deadline: deadline };
        let mut response = Response::new(Body::new(body));
        let content_type = HeaderValue::from_static(content_type);
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
        Ok(response)
    }
}

/// Returns the scrapes' paths and their description.
pub(crate) fn parts() -> (Router<Scrapes>, Description) {
    OpenApiRouter::new().routes(routes!(metrics)).routes(routes!(figures)).split_for_parts()
}

/// Returns the metrics in Prometheus' text format, version 0.0.4.
#[utoipa::path(get, path = "/metrics", responses((status = OK, body = String,
    content_type = "text/plain"), (status = SERVICE_UNAVAILABLE, body = Problem)))]
async fn metrics(
    State(scrapes): State<Scrapes>,
    Extension(cutoff): Extension<Cutoff>,
) -> Answer<Response> {
    scrapes.answer(&cutoff, metrics::CONTENT_TYPE, |figures| metrics::render(&figures)).await
}

/// Returns the figures behind the metrics as JSON.
#[utoipa::path(get, path = "/v1/figures", responses((status = OK, body = Figures),
    (status = SERVICE_UNAVAILABLE, body = Problem)))]
async fn figures(
    State(scrapes): State<Scrapes>,
    Extension(cutoff): Extension<Cutoff>,
) -> Answer<Response> {
    let render = |figures| serde_json::to_string(&figures).unwrap_or_default();
    scrapes.answer(&cutoff, "application/json", render).await
}

async fn permit(semaphore: Arc<Semaphore>, wait: Duration) -> Answer<OwnedSemaphorePermit> {
    match tokio::time::timeout(wait, semaphore.acquire_owned()).await {
        Ok(Ok(permit)) => Ok(permit),
        _ => Err(Problem::new(Kind::Busy, "too many clients read metrics: try again later")),
    }
}

/// Closes a connection if its client reads too slowly.
#[derive(Clone, Default)]
pub(crate) struct Cutoff(Arc<Notify>);

impl Cutoff {
    /// Waits until the connection must be closed.
    pub async fn reached(&self) {
        self.0.notified().await;
    }

    fn after(&self, time: Duration) -> Deadline {
        let notify = self.0.clone();
        Deadline(tokio::spawn(async move {
            tokio::time::sleep(time).await;
            notify.notify_one();
        }))
    }
}

/// The time until which a text must be read. Dropping it lets the connection live on.
struct Deadline(JoinHandle<()>);

impl Drop for Deadline {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A text that is sent in pieces. The connection drops it after the last piece.
struct Text {
    rest: Bytes,
    _slot: OwnedSemaphorePermit,
    _deadline: Deadline,
}

impl hyper::body::Body for Text {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let len = self.rest.len().min(PIECE);
        // A copy, because a part of the whole text would keep it in memory.
        let piece = Bytes::copy_from_slice(&self.rest.split_to(len));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}
