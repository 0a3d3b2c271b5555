//! `GET /v1/events`: a stream of server-sent events.
//!
//! What must hold: a stream has at most three events in memory besides the ring. Its task ends when
//! its client disconnects, and when the server ends.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use hyper::body::{Bytes, Frame};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use utoipa::openapi::OpenApi as Description;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Event, EventLog, EventsQuery, MAX_STREAMS, Next, Place, QUIET};
use crate::json::body::Parameters;
use crate::json::problem::{Answer, Kind, Problem};

const LAST_ID: &str = "last-event-id";

/// Returns the path of the stream and its description.
pub(crate) fn parts() -> (Router<Arc<EventLog>>, Description) {
    OpenApiRouter::new().routes(routes!(events)).split_for_parts()
}

/// Streams the events of the server as server-sent events, until the server ends. The data of each
/// one is an `Event` as JSON.
#[utoipa::path(get, path = "/v1/events", params(EventsQuery,
    ("Last-Event-ID" = Option<String>, Header, description = "Id of the client's last event.")),
    responses((status = OK, body = Event, content_type = "text/event-stream"),
        (status = BAD_REQUEST, body = Problem), (status = SERVICE_UNAVAILABLE, body = Problem)))]
async fn events(
    State(log): State<Arc<EventLog>>,
    Parameters(query): Parameters<EventsQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    let malformed = |what: String| Problem::new(Kind::Malformed, what);
    let header = headers.get(LAST_ID).map(HeaderValue::to_str).transpose();
    let header = header.map_err(|_| malformed("Last-Event-ID: it is not text".into()))?;
    let id = header.or(query.since.as_deref());
    let place = log.place(id).map_err(|e| malformed(e.to_string()))?;
    let Ok(permit) = log.streams.clone().try_acquire_owned() else {
        let detail = format!("{MAX_STREAMS} clients read events already: end one of them");
        return Err(Problem::new(Kind::Busy, detail));
    };
    let (sender, texts) = mpsc::channel(1);
    tokio::spawn(send(log, place, sender));
    let mut response = Response::new(Body::new(Stream { texts, _permit: permit }));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// Sends events until the client is gone or the server ends.
async fn send(log: Arc<EventLog>, mut place: Place, texts: mpsc::Sender<Bytes>) {
    let mut news = log.news.subscribe();
    // A comment, so that the client gets the header of the answer at once.
    let mut text = Bytes::from_static(b": events follow\n\n");
    loop {
        if texts.send(text).await.is_err() {
            return;
        }
        text = loop {
            news.mark_unchanged();
            match log.next(&mut place) {
                Next::Text(text) => break text,
                Next::End => return,
                Next::Wait => {}
            }
            tokio::select! {
                _ = news.changed() => {}
                () = texts.closed() => return,
                () = tokio::time::sleep(QUIET) => break Bytes::from_static(b":\n\n"),
            }
        };
    }
}

/// The body of the answer.
struct Stream {
    texts: mpsc::Receiver<Bytes>,
    _permit: OwnedSemaphorePermit,
}

impl hyper::body::Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.texts.poll_recv(cx).map(|text| text.map(|text| Ok(Frame::data(text))))
    }
}
