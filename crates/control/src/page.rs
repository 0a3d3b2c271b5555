//! What the metrics' address offers to every process of this host: `/metrics` and `/v1/figures`.
//!
//! What must hold: nothing here changes the server. A web page of another site cannot read the
//! answers: no answer allows other origins, and a request must name this host, because a name of
//! another site may point to it.

use axum::Router;
use axum::extract::Request;
use axum::http::{Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};

use crate::problem::{Kind, Problem};
use crate::scrape::Scrapes;

/// Returns the service of the metrics' address.
pub(crate) fn router(scrapes: Scrapes) -> Router {
    scrapes
        .router()
        .method_not_allowed_fallback(|request: Request| async move {
            let what = format!("{} has no method {}", request.uri().path(), request.method());
            Problem::new(Kind::Method, what)
        })
        .fallback(|request: Request| async move {
            let what = format!("there is no path {}: use /metrics", request.uri().path());
            Problem::new(Kind::NotFound, what)
        })
        .layer(middleware::from_fn(check_host))
}

/// Refuses requests that name another host.
async fn check_host(request: Request, next: Next) -> Response {
    let name = request.headers().get(header::HOST).and_then(|name| name.to_str().ok());
    match name {
        Some(name) if !is_this_host(name) => {
            let what = format!("the host {name} is not served here: use an address or localhost");
            Problem::new(Kind::Forbidden, what).into_response()
        }
        _ => next.run(request).await,
    }
}

/// Returns whether a name, with or without port, is an IP address or `localhost`.
fn is_this_host(name: &str) -> bool {
    let Ok(uri) = name.parse::<Uri>() else { return false };
    let host = uri.host().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || address.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_name_this_host() {
        for name in ["localhost", "LOCALHOST:80", "127.0.0.1:9184", "[::1]:9184", "192.0.2.7"] {
            assert!(is_this_host(name), "{name}");
        }
        for name in ["evil.example", "evil.example:9184", "localhost.evil.example", "", "127.1.x"] {
            assert!(!is_this_host(name), "{name}");
        }
    }
}
