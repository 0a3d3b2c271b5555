//! What the metrics' address offers to every process of this host: a web page, `/metrics` and
//! `/v1/figures`.
//!
//! The page is one file. It draws charts of the figures that it reads every two seconds.
//!
//! What must hold: nothing here changes the server. A web page of another site cannot read the
//! answers: no answer allows other origins, and a request must name this host, because a name of
//! another site may point to it. The page runs no script but its own, and loads nothing from
//! elsewhere, even if a disk has the name of a script: its policy has the digests of its parts.

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use base64::Engine;

use super::scrape::Scrapes;
use crate::json::problem::{Kind, Problem};

const PAGE: &str = include_str!("page.html");

/// Returns the service of the metrics' address.
pub(crate) fn router(scrapes: Scrapes) -> Router {
    let headers = headers();
    scrapes
        .router()
        .route("/", get(move || async move { (headers, PAGE) }))
        .method_not_allowed_fallback(|request: Request| async move {
            let what = format!("{} has no method {}", request.uri().path(), request.method());
            Problem::new(Kind::Method, what)
        })
        .fallback(|request: Request| async move {
            let what = format!("there is no path {}: use / or /metrics", request.uri().path());
            Problem::new(Kind::NotFound, what)
        })
        .layer(middleware::from_fn(check_host))
}

/// Returns the headers of the page.
fn headers() -> [(HeaderName, String); 5] {
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        digest(part("script")),
        digest(part("style"))
    );
    [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".into()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".into()),
        (header::REFERRER_POLICY, "no-referrer".into()),
        (header::CACHE_CONTROL, "no-cache".into()),
    ]
}

/// Returns the text of the page's only element of this name.
fn part(name: &str) -> &'static str {
    let begin = PAGE.split_once(&format!("<{name}>")).map_or("", |(_, rest)| rest);
    begin.split_once(&format!("</{name}>")).map_or("", |(part, _)| part)
}

/// Returns a digest as a source of a Content-Security-Policy.
fn digest(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    format!("sha256-{}", base64::prelude::BASE64_STANDARD.encode(digest))
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
    fn the_page_is_one_file_and_its_policy_names_its_parts_only() {
        assert!(part("script").contains("fetch(\"/v1/figures\"") && part("style").len() > 500);
        // The names of SVG are no address that a browser opens.
        let text = PAGE.replace("http://www.w3.org/2000/svg", "");
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "innerHTML"] {
            assert!(!text.contains(outside), "{outside}");
        }
        assert_eq!(PAGE.matches("<script").count() + PAGE.matches("<style").count(), 2);
        assert!(!text.contains("style=") && !text.contains("onclick="));
        let [_, (_, policy), ..] = headers();
        assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        // SHA-256 of the empty text, from FIPS 180-4's test vectors.
        assert_eq!(digest(""), "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
    }

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
