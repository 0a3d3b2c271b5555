//! A client of the API: one call, one connection.

use std::io;
use std::path::Path;
use std::time::Duration;

use axum::http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

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

async fn exchange(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Value, CallError> {
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
    let is_good = response.status().is_success();
    let bytes = response.into_body().collect().await?.to_bytes();
    if is_good {
        Ok(serde_json::from_slice(&bytes)?)
    } else {
        Err(CallError::Problem(serde_json::from_slice(&bytes)?))
    }
}

/// Encodes a name as one segment of a path.
pub fn segment(name: &str) -> String {
    let is_plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_.~".contains(b);
    name.bytes()
        .map(|b| if is_plain(&b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}
