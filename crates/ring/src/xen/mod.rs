//! What a back end of Xen needs of its domain's kernel: xenstore, event channels and grants of
//! guests' pages.
//!
//! ```text
//!   abi      numbers and structures of /dev/xen/{xenbus,evtchn,gntdev}      store    xenstore: nodes, transactions, watches
//!   channel  an event channel: a descriptor that a reactor watches          grants   pages of a guest: mapped, or copied
//!   machine  all three without a hypervisor, in this process: for tests, fuzzing and benchmarks
//! ```
//! In: numbers that a guest wrote into xenstore or into its ring. Out: memory, events, nodes; or an
//! error. What must hold: see the parts. No number that a guest gives makes more than an error.

pub mod abi;
mod channel;
mod grants;
pub mod machine;
mod store;

use std::io;
use std::sync::Arc;

pub use channel::Channel;
pub(crate) use grants::Release;
pub use grants::{CopyBatch, CopyStatus, Grants};
pub use machine::Machine;
pub use store::{Access, Node, Store, StoreError, Transaction};

/// Where a back end runs: in a domain of Xen, or beside a front end of our own. The one choice
/// between the two.
#[derive(Clone, Default)]
pub enum Host {
    /// The devices of this domain's kernel.
    #[default]
    Xen,
    Machine(Arc<Machine>),
}

impl Host {
    /// A connection to xenstore.
    pub fn store(&self) -> io::Result<Store> {
        match self {
            Host::Xen => Store::open(),
            Host::Machine(machine) => machine.own_store(),
        }
    }

    /// Binds the channel that domain `domain` offers by its number `port`.
    pub fn channel(&self, domain: u16, port: u32) -> io::Result<Channel> {
        match self {
            Host::Xen => Channel::bind(domain, port),
            Host::Machine(machine) => machine.bind(domain, port),
        }
    }

    /// The pages that domain `domain` grants.
    pub fn grants(&self, domain: u16) -> io::Result<Grants> {
        match self {
            Host::Xen => Grants::open(domain),
            Host::Machine(machine) => machine.grants(domain).map(Grants::of),
        }
    }
}
