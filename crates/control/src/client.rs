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

use crate::events::Event;
use crate::problem::Problem;

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("cannot connect to the API at {path}: start the server with --api, or name its socket")]
    Connect { path: String, source: io::Error },
    #[error("the server did not answer")]
    Http(#[from] hyper::Error),
    #[error("cannot form the request")]
    Request(#[from] axum::http::Error),
    #[error("the answer is not JSON")]
    Answer(#[from] serde_json::Error),
    #[error("cannot start the client")]
    Runtime(io::Error),
    #[error("the server did not answer within {0:?}")]
    Timeout(Duration),
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
    let answer = async { tokio::time::timeout(limit, exchange(socket, method, path, body)).await };
    runtime.block_on(answer).unwrap_or(Err(CallError::Timeout(limit)))
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
    let runtime = runtime.map_err(CallError::Runtime)?;
    let since = since.map(|id| format!("?since={}", segment(id))).unwrap_or_default();
    let path = format!("/v1/events{since}");
    runtime.block_on(async {
        let answer = send(socket, Method::GET, &path, None);
        let answer = tokio::time::timeout(limit, answer).await;
        let mut body = answer.unwrap_or(Err(CallError::Timeout(limit)))?;
        let mut text = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(CallError::Broken)?.into_data() else { continue };
            text.extend_from_slice(&data);
            while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = text.drain(..=end).collect();
                if let Some(json) = line.strip_prefix(b"data: ") {
                    each(serde_json::from_slice(json)?).map_err(CallError::Handling)?;
                }
            }
        }
        Ok(())
    })
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
