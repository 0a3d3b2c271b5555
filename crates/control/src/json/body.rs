//! JSON bodies and query parameters of requests, with errors as problem documents.

use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::problem::{Kind, Problem};
use super::wrong_type::wrong_type;
use crate::bounds::limits::ClientLimits;

/// Maximum size of a body in bytes.
const MAX_BODY: usize = 64 << 10;

/// A body of JSON. Its content type does not matter, so that `curl --data` needs no header.
pub(crate) struct Body<T>(pub T);

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let limits = request.extensions().get::<ClientLimits>().copied().unwrap_or_default();
        let whole = Limited::new(request.into_body(), MAX_BODY).collect();
        let bytes = match tokio::time::timeout(limits.body, whole).await {
            Ok(Ok(collected)) => collected.to_bytes(),
            Ok(Err(e)) if e.is::<LengthLimitError>() => {
                let detail = format!("the body has more than {MAX_BODY} bytes: send a smaller one");
                return Err(Problem::new(Kind::TooLarge, detail));
            }
            Ok(Err(e)) => return Err(Problem::new(Kind::Malformed, format!("the body: {e}"))),
            Err(_) => {
                let detail = format!("the body did not arrive within {:?}", limits.body);
                return Err(Problem::new(Kind::Timeout, detail));
            }
        };
        parse(&bytes).map(Body)
    }
}

/// Parses a body.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value =
        serde_path_to_error::deserialize(&mut json).map_err(|e| match e.inner().classify() {
            Category::Data => {
                let what = e.inner().to_string();
                invalid(&e.path().to_string(), &wrong_type(&what, "an object").unwrap_or(what))
            }
            _ => malformed(e.inner()),
        })?;
    json.end().map_err(|e| malformed(&e))?;
    Ok(value)
}

fn malformed(error: &serde_json::Error) -> Problem {
    Problem::new(Kind::Malformed, format!("the body is not JSON: {error}"))
}

/// Returns the problem of a field with a wrong name, type or value. `path` is `.` for the body.
pub fn invalid(path: &str, what: &str) -> Problem {
    if path == "." || path.is_empty() {
        return Problem::new(Kind::Invalid, format!("the body: {what}"));
    }
    Problem::new(Kind::Invalid, format!("{path}: {what}")).in_field(path)
}

/// Query parameters.
pub(crate) struct Parameters<T>(pub T);

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Parameters<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(value)) => Ok(Parameters(value)),
            Err(e) => Err(Problem::new(Kind::Malformed, e.body_text())),
        }
    }
}
