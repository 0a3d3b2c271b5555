//! A client of the API: one call, one connection. A stream of events is a call, too.

use std::io;
use std::path::Path;
use std::time::Duration;

use axum::http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

use crate::events::{Event, QUIET, What};
use crate::json::problem::Problem;
use crate::json::types::{Job, JobState};

/// Time before a client asks again after a stream has ended or none was free.
const PAUSE: Duration = Duration::from_millis(200);
/// Status of a refusal because the server has too much to do.
const BUSY: u16 = 503;

/// Returns what a caller that cannot connect can do.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "call it as root, as the server's user, or as a member of its --socket-group"
        }
        _ => "start the server with --api, or name its socket",
    }
}

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("cannot connect to the API at {path}: {}", remedy(.source))]
    Connect { path: String, source: io::Error },
    #[error(
        "no answer: the server has ended, the caller has no access, or the socket is not that of \
         `serve --api`"
    )]
    Http(#[from] hyper::Error),
    #[error("cannot form the request")]
    Request(#[from] axum::http::Error),
    #[error("the answer is not JSON")]
    Answer(#[from] serde_json::Error),
    #[error("cannot start the client")]
    Runtime(io::Error),
    #[error("the server did not answer within {0:?}")]
    Timeout(Duration),
    /// Like `Timeout`, for a call that may change something.
    #[error(
        "the server did not answer within {0:?}, and the call may still run: `blockyard ctl show \
         DISK` and `blockyard ctl status` show what the server does; --timeout SECONDS waits longer"
    )]
    Unfinished(Duration),
    #[error("the connection to the server broke: it may have been killed")]
    Broken(#[source] hyper::Error),
    #[error("cannot handle an event")]
    Handling(#[source] io::Error),
    /// The server refused the call.
    #[error("{0}")]
    Problem(Problem),
}

/// Makes a call, and waits for its answer for at most `limit`.
///
/// `path`: the path of the call with its parameters, percent-encoded.
pub fn call(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<&Value>,
    limit: Duration,
) -> Result<Value, CallError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(CallError::Runtime)?;
    let late = if method == Method::GET { CallError::Timeout } else { CallError::Unfinished };
    let answer = async { tokio::time::timeout(limit, exchange(socket, method, path, body)).await };
    runtime.block_on(answer).unwrap_or_else(|_| Err(late(limit)))
}

/// Calls `each` with the events of a server, until the server ends. `since`: id of the last event
/// that the caller has; 0 for all that the server has. `limit`: for the begin of the answer.
pub fn follow(
    socket: &Path,
    since: Option<&str>,
    limit: Duration,
    mut each: impl FnMut(Event) -> io::Result<()>,
) -> Result<(), CallError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(CallError::Runtime)?.block_on(async {
        let mut events = Events::open(socket, since, limit).await?;
        // A server without events sends a comment each `QUIET`.
        while let Some(event) = events.next(2 * QUIET).await? {
            each(event).map_err(CallError::Handling)?;
        }
        Ok(())
    })
}

/// Waits until a job has ended, and returns it. Asks for the job once, then reads events. Asks
/// again only if events were lost, if the stream ended, or if the server has no stream free.
/// `limit`: for each answer.
pub fn wait_for_job(socket: &Path, number: u64, limit: Duration) -> Result<Job, CallError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(CallError::Runtime)?.block_on(async {
        let mut last = None;
        loop {
            // The stream begins before the server looks at the job, so that no end is missed.
            let events = match Events::open(socket, last.as_deref(), limit).await {
                Err(CallError::Problem(problem)) if problem.status == BUSY => None,
                opened => Some(opened?),
            };
            if let Some(job) = ended_job(socket, number, limit).await? {
                return Ok(job);
            }
            if let Some(events) = events
                && let Some(job) = end_of_job(events, number, limit, &mut last).await?
            {
                return Ok(job);
            }
            tokio::time::sleep(PAUSE).await;
        }
    })
}

/// Returns the job when its end is an event. Returns None if events are missing. `last`: id of the
/// last event.
async fn end_of_job(
    mut events: Events,
    number: u64,
    limit: Duration,
    last: &mut Option<String>,
) -> Result<Option<Job>, CallError> {
    let limit = limit.max(2 * QUIET);
    loop {
        let event = match events.next(limit).await {
            Ok(Some(event)) => event,
            // The server has ended, or closed the connection. Another one may have taken over.
            Ok(None) | Err(CallError::Broken(_)) => return Ok(None),
            Err(e) => return Err(e),
        };
        *last = Some(event.id);
        match event.what {
            What::JobEnded { job } if job.number == number => return Ok(Some(job)),
            What::Lost { .. } => return Ok(None),
            _ => {}
        }
    }
}

/// Returns the job if it has ended.
async fn ended_job(socket: &Path, number: u64, limit: Duration) -> Result<Option<Job>, CallError> {
    let path = format!("/v1/jobs/{number}");
    let answer = tokio::time::timeout(limit, exchange(socket, Method::GET, &path, None)).await;
    let job: Job = serde_json::from_value(answer.unwrap_or(Err(CallError::Timeout(limit)))?)?;
    Ok((job.state != JobState::Running).then_some(job))
}

/// A stream of events.
struct Events {
    body: Incoming,
    /// Received text without its complete lines.
    text: Vec<u8>,
}

impl Events {
    async fn open(socket: &Path, since: Option<&str>, limit: Duration) -> Result<Self, CallError> {
        let since = since.map(|id| format!("?since={}", segment(id))).unwrap_or_default();
        let path = format!("/v1/events{since}");
        let answer = tokio::time::timeout(limit, send(socket, Method::GET, &path, None)).await;
        let body = answer.unwrap_or(Err(CallError::Timeout(limit)))?;
        Ok(Events { body, text: Vec::new() })
    }

    /// Returns the next event, or None at the end of the stream. Fails if the server sends nothing,
    /// not even a comment, within `limit`.
    async fn next(&mut self, limit: Duration) -> Result<Option<Event>, CallError> {
        loop {
            while let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.text.drain(..=end).collect();
                if let Some(json) = line.strip_prefix(b"data: ") {
                    return Ok(Some(serde_json::from_slice(json)?));
                }
            }
            let frame = tokio::time::timeout(limit, self.body.frame()).await;
            let Some(frame) = frame.map_err(|_| CallError::Timeout(limit))? else {
                return Ok(None);
            };
            if let Ok(data) = frame.map_err(CallError::Broken)?.into_data() {
                self.text.extend_from_slice(&data);
            }
        }
    }
}

async fn exchange(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Value, CallError> {
    let body = send(socket, method, path, body).await?;
    Ok(serde_json::from_slice(&body.collect().await?.to_bytes())?)
}

/// Returns the body of a good answer.
async fn send(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Incoming, CallError> {
    let stream = UnixStream::connect(socket).await;
    let stream = stream
        .map_err(|source| CallError::Connect { path: socket.display().to_string(), source })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))?;
    let response = sender.send_request(request).await?;
    if response.status().is_success() {
        return Ok(response.into_body());
    }
    let bytes = response.into_body().collect().await?.to_bytes();
    Err(CallError::Problem(serde_json::from_slice(&bytes)?))
}

/// Encodes a name as one segment of a path.
pub fn segment(name: &str) -> String {
    let is_plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_.~".contains(b);
    name.bytes()
        .map(|b| if is_plain(&b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_without_access_is_told_how_to_get_it() {
        let message = |kind: io::ErrorKind| {
            CallError::Connect { path: "api.sock".into(), source: kind.into() }.to_string()
        };
        assert!(message(io::ErrorKind::PermissionDenied).contains("--socket-group"));
        assert!(message(io::ErrorKind::NotFound).contains("start the server with --api"));
    }
}
