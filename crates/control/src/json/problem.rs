//! Errors of calls, as problem documents (RFC 9457).

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The content type of problem documents.
pub(crate) const PROBLEM: &str = "application/problem+json";

/// Answer of a call.
pub type Answer<T> = Result<T, Problem>;

/// What is wrong with a call. Each kind has a status and a title.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The body is not JSON, or a parameter cannot be parsed.
    Malformed,
    /// The peer may not use the API.
    Forbidden,
    /// There is no such disk, job or path.
    NotFound,
    /// The path exists, but not with this method.
    Method,
    /// The body did not arrive in time.
    Timeout,
    /// The state of the server or of the disk does not permit the call.
    Conflict,
    /// The body is too large.
    TooLarge,
    /// A field is unknown, has the wrong type, or has an impossible value.
    Invalid,
    /// The server could not do what was requested, for example because an image is missing.
    Failed,
    /// Too many calls run, or the server is ending.
    Busy,
}

impl Kind {
    /// Returns the last part of the problem's type, its status and its title.
    fn parts(self) -> (&'static str, StatusCode, &'static str) {
        match self {
            Kind::Malformed => ("malformed", StatusCode::BAD_REQUEST, "The request is malformed"),
            Kind::Forbidden => ("forbidden", StatusCode::FORBIDDEN, "The caller has no access"),
            Kind::NotFound => ("not-found", StatusCode::NOT_FOUND, "There is no such object"),
            Kind::Method => {
                ("method", StatusCode::METHOD_NOT_ALLOWED, "The path has no such method")
            }
            Kind::Timeout => {
                ("timeout", StatusCode::REQUEST_TIMEOUT, "The body did not arrive in time")
            }
            Kind::Conflict => ("conflict", StatusCode::CONFLICT, "The present state forbids it"),
            Kind::TooLarge => ("too-large", StatusCode::PAYLOAD_TOO_LARGE, "The body is too large"),
            Kind::Invalid => {
                ("invalid", StatusCode::UNPROCESSABLE_ENTITY, "A field of the body is wrong")
            }
            Kind::Failed => {
                ("failed", StatusCode::UNPROCESSABLE_ENTITY, "The command could not be carried out")
            }
            Kind::Busy => {
                ("busy", StatusCode::SERVICE_UNAVAILABLE, "The server takes no such call now")
            }
        }
    }
}

/// An error of a call.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema, thiserror::Error)]
#[error("{detail}")]
pub struct Problem {
    /// `urn:blockyard:` and the kind of the problem.
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    /// The status of the answer.
    pub status: u16,
    /// What happened, and what to do.
    pub detail: String,
    /// The field of the body that is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

impl Problem {
    pub fn new(kind: Kind, detail: impl Into<String>) -> Self {
        let (name, status, title) = kind.parts();
        Problem {
            kind: format!("urn:blockyard:{name}"),
            title: title.into(),
            status: status.as_u16(),
            detail: detail.into(),
            field: None,
        }
    }

    /// Adds the name of the field that is wrong.
    pub fn in_field(self, field: impl Into<String>) -> Self {
        Problem { field: Some(field.into()), ..self }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::BAD_REQUEST);
        let mut response = (status, axum::Json(self)).into_response();
        let json = HeaderValue::from_static(PROBLEM);
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }
}
