//! A blkif front end without a hypervisor: a domain of a [`Machine`], its nodes in xenstore, its
//! rings and granted pages.
//!
//! ```text
//!   session   machine + plan -> connected, queues with slots   queue   requests in slots
//!   front     nodes and states, negotiated terms               ring    entries, indices, events
//!   request   ring entries in both layouts
//! ```
//! In: a machine, the number of a device, and the features to negotiate. Out: responses and data.
//!
//! What must hold
//! - The driver follows only Xen's `blkif.h`, and assumes nothing about Blockyard's back end.
//! - Every module can be used alone and checks nothing: tests write any nodes, entries and indices.
//!
//! [`Machine`]: blockyard_ring::xen::Machine

pub mod front;
pub mod queue;
pub mod request;
pub mod ring;
pub mod session;

pub use front::{Front, Terms, wait_for_node};
pub use queue::{Queue, QueueOptions};
pub use request::{Abi, Entry, operation, segment, status};
pub use ring::{FrontRing, Response};
pub use session::{Offer, Plan, Session};

/// Sizes of a page and of a blkif sector, in bytes.
pub const PAGE: usize = 4096;
pub const SECTOR: usize = 512;

/// States of either side (`enum xenbus_state`).
pub mod state {
    pub const INITIALISING: u8 = 1;
    pub const INIT_WAIT: u8 = 2;
    pub const INITIALISED: u8 = 3;
    pub const CONNECTED: u8 = 4;
    pub const CLOSING: u8 = 5;
    pub const CLOSED: u8 = 6;
}
