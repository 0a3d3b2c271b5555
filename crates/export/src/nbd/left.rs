//! A connection between two servers: the state that one leaves and the next continues with.

use std::os::fd::OwnedFd;
use std::time::SystemTime;

use blockyard_nbd::wire::Headers;

use super::block_status::Contexts;
use super::stream::Remains;

/// A connection that another server continues, or has handed over.
#[derive(Debug)]
pub struct LeftConnection {
    pub stream: OwnedFd,
    pub headers: Headers,
    pub contexts: Contexts,
    pub since: Option<SystemTime>,
    pub remains: Remains,
}
