//! What a Xen back end needs from its domain's kernel: xenstore, event channels and grants of
//! guests' pages.
//!
//! ```text
//!   abi      constants and structures of /dev/xen/{xenbus,evtchn,gntdev}
//!   store    xenstore: nodes, transactions, watches
//!   channel  an event channel: a descriptor that a reactor watches
//!   grants   pages of a guest: mapped, or copied
//!   machine  all of these without a hypervisor, for tests, fuzzing and benchmarks
//! ```
//!
//! In: numbers that a guest wrote into xenstore or into its ring. Out: memory, events, nodes; or an
//! error. What must hold: an invalid number from a guest causes an error, and nothing else. See the
//! modules for more.

pub mod abi;
mod channel;
mod grants;
pub mod machine;
mod store;

use std::io;
use std::sync::Arc;

pub use channel::Channel;
pub use grants::{CopyBatch, CopyStatus, Grants};
pub use machine::Machine;
pub use store::{Access, Node, Store, StoreError, Transaction};

/// Where a back end runs: in a domain of Xen, or in a simulated machine in this process. The only
/// place that distinguishes the two.
#[derive(Clone, Default)]
pub enum Host {
    /// The devices of this domain's kernel.
    #[default]
    Xen,
    Machine(Arc<Machine>),
}

impl Host {
    /// Opens a connection to xenstore.
    pub fn store(&self) -> io::Result<Store> {
        match self {
            Host::Xen => Store::open(),
            Host::Machine(machine) => machine.own_store(),
        }
    }

    /// Binds port `port` of domain `domain`.
    pub fn channel(&self, domain: u16, port: u32) -> io::Result<Channel> {
        match self {
            Host::Xen => Channel::bind(domain, port),
            Host::Machine(machine) => machine.bind(domain, port),
        }
    }

    /// Opens the grants of domain `domain`.
    pub fn grants(&self, domain: u16) -> io::Result<Grants> {
        match self {
            Host::Xen => Grants::open(domain),
            Host::Machine(machine) => machine.grants(domain).map(Grants::of),
        }
    }
}
