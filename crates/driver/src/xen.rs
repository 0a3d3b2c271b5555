//! A blkif front end with no hypervisor: a domain of a [`Machine`], its nodes in xenstore, its
//! rings and granted pages.
//!
//! ```text
//!   session   machine + plan -> connected, queues with slots     queue     requests in slots, at a depth
//!   front     nodes and states, negotiated terms                 ring      entries, indices, events (req_event, rsp_event)
//!   request   entries in both layouts
//! ```
//! In: a machine, the number of a device, and what to negotiate. Out: answers and data. What must
//! hold: between the ring and the back end stands only Xen's `blkif.h`; nothing here assumes our
//! own back end. Every part can be used by itself and holds back nothing: tests write whatever
//! nodes, entries and indices they like.
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
pub use ring::{Answer, FrontRing};
pub use session::{Offer, Plan, Session};

/// Bytes of a page, and of a sector as blkif counts them.
pub const PAGE: usize = 4096;
pub const SECTOR: usize = 512;

/// States of either side.
pub mod state {
    pub const INITIALISING: u8 = 1;
    pub const INIT_WAIT: u8 = 2;
    pub const INITIALISED: u8 = 3;
    pub const CONNECTED: u8 = 4;
    pub const CLOSING: u8 = 5;
    pub const CLOSED: u8 = 6;
}
