//! Log lines about calls and connections, within bounds.
//!
//! In: calls that may change something, and connections that are refused. Out: log lines. What must
//! hold: each change is logged, with its caller. Calls that fail and connections that are refused
//! cannot fill the log, at any rate. Failed calls of a user suppress no lines about other users.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use blockyard_ring::log_budget::{Budget, Withheld};

use super::access::{AccessError, Peer};

/// Maximum number of users with a limit of their own. Further ones share one.
const MAX_USERS: usize = 64;

/// Limits on the lines about failed calls.
#[derive(Clone, Default)]
pub(crate) struct FailedCalls(Arc<Mutex<HashMap<Option<u32>, Arc<Budget>>>>);

impl FailedCalls {
    /// Returns the limit of a user.
    fn of(&self, user: u32) -> Arc<Budget> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has_own = users.contains_key(&Some(user)) || users.len() < MAX_USERS;
        users.entry(has_own.then_some(user)).or_default().clone()
    }

    /// Returns the number of lines that were suppressed before a line about a call, or `None` if
    /// this line is suppressed too.
    fn admit(&self, status: StatusCode, user: u32, now: Instant) -> Option<u64> {
        if status.is_client_error() || status.is_server_error() {
            return self.of(user).admit(now);
        }
        Some(0)
    }
}

/// Logs calls that may change something, and their callers.
pub(crate) async fn changes(
    State(failed): State<FailedCalls>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return next.run(request).await;
    }
    let (method, path, begin) = (request.method().clone(), request.uri().clone(), Instant::now());
    let response = next.run(request).await;
    let (status, now) = (response.status(), Instant::now());
    if let Some(withheld) = failed.admit(status, peer.uid, now) {
        let (status, ms) = (status.as_u16(), now.saturating_duration_since(begin).as_millis());
        let withheld = Withheld(withheld);
        tracing::info!("api: {method} {path} by {peer}: status {status} after {ms} ms{withheld}");
    }
    response
}

/// Limits on the lines about the connections of a listener.
#[derive(Default)]
pub(crate) struct ConnectionLog {
    refused: Budget,
    failed: Budget,
}

impl ConnectionLog {
    /// Logs that a process may not connect.
    pub fn refused(&self, error: &AccessError) {
        if let Some(withheld) = self.refused.admit(Instant::now()) {
            tracing::warn!("api: refused {error}{}", Withheld(withheld));
        }
    }

    /// Logs that a connection cannot be accepted.
    pub fn failed(&self, what: &str, error: &std::io::Error) {
        if let Some(withheld) = self.failed.admit(Instant::now()) {
            tracing::warn!("{what}: cannot accept a connection: {error}{}", Withheld(withheld));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_calls_of_a_user_suppress_no_lines_about_changes_and_other_users() {
        let (failed, now) = (FailedCalls::default(), Instant::now());
        let lines = |user: u32, status: StatusCode| {
            (0..100).filter(|_| failed.admit(status, user, now).is_some()).count()
        };
        assert_eq!(lines(1, StatusCode::CONFLICT), 10);
        assert_eq!(lines(1, StatusCode::SERVICE_UNAVAILABLE), 0);
        assert_eq!(lines(1, StatusCode::CREATED), 100);
        assert_eq!(lines(2, StatusCode::NOT_FOUND), 10);
        let others: usize = (3..1000).map(|user| lines(user, StatusCode::NOT_FOUND)).sum();
        assert_eq!(others, (MAX_USERS - 2 + 1) * 10);
    }
}
