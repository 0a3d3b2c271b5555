//! The interface between the program and an export of any protocol.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use blockyard_ring::parcel::Parcel;

use crate::client::Client;

/// How long an export that stops may wait for clients, the kernel and other programs.
pub const STOP_TIME: Duration = Duration::from_secs(10);

/// How long such a wait may last at least, if it begins after the storage has answered late.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// Why a client was disconnected, in reports.
pub(crate) const BY_OPERATOR: &str = "an operator disconnected it";

/// What the next server needs to continue an export.
pub struct Handed {
    /// The protocol, such as `vhost-user`.
    pub kind: &'static str,
    pub parcel: Parcel,
}

/// Why an export cannot be handed over to another server.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The hand-over copies the descriptors of clients.
    #[error("only {left} of {limit} descriptors are left (ulimit -n)")]
    FewDescriptors { left: u64, limit: u64 },
    #[error("{} ends with its server", .0.display())]
    EndsWithServer(PathBuf),
    #[error("another program has removed {}: remove the disk, or restart the server", .0.display())]
    DeviceRemoved(PathBuf),
}

/// For how long an export's requests may be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongestHold {
    pub time: Duration,
    /// Why there is a limit, as a sentence about the disk.
    pub why: &'static str,
}

/// One disk, served by one protocol, from its start until `stop` or drop.
///
/// Draining belongs to the disk ([`blockyard_disk::Disk::drain`] holds the requests of all its
/// exports), and `blockyard_yard::Way::start` starts an export.
///
/// What must hold: no call waits for a client without a time limit, because clients can be hostile.
pub trait Export: Send {
    /// Notifies clients that the disk has a new size. A client that cannot take a new size keeps
    /// the old one, and the log says so.
    fn resize(&mut self);

    /// Stops the export: takes no more requests, and answers the requests that were taken. Requests
    /// that wait for a throttle are admitted at once. Requests that the storage works on have no
    /// deadline, because they use the memory of clients. Waits for clients, the kernel and other
    /// programs end at `deadline`, or at most 5 s after the storage has answered. A call of another
    /// program that has begun keeps its own limit. A second call does nothing.
    fn stop(&mut self, deadline: Instant);

    /// Returns why the export cannot be handed over to another server, if it cannot.
    fn obstacle(&self) -> Option<Obstacle> {
        None
    }

    /// Returns whether the next server of a hand-over answers no request of the export before it is
    /// the owner (see [`crate::custody`]), if a program decides where the disk's data lie.
    fn waits_for_owner(&self) -> bool {
        false
    }

    /// Stops the export like `stop`, but keeps the connections of its clients for another server.
    /// Returns `None` if the export has nothing that another server could continue. Then its
    /// clients connect again.
    fn hand_over(&mut self) -> Option<Handed> {
        self.stop(Instant::now() + STOP_TIME);
        None
    }

    /// Restricts the disk to clients with one of these names in their certificate. An empty list
    /// admits no client. `None` admits every client. Exports without certificates ignore this.
    fn allow(&mut self, _names: Option<&[String]>) {}

    /// Returns each connected client.
    fn clients(&self) -> Vec<Client>;

    /// Begins to disconnect the clients with this description, or all clients. The requests that
    /// were taken are answered first. The clients may connect again. Returns the clients that will
    /// leave. Exports without connections ignore this, and return none.
    fn disconnect(&mut self, _description: Option<&str>) -> Vec<Client> {
        Vec::new()
    }

    /// Returns the longest time for which the requests of the export may be held, if it has such a
    /// limit.
    fn longest_hold(&self) -> Option<LongestHold> {
        None
    }

    /// Notes for the next server which images the disk has now, after work that has exchanged them.
    /// Exports that keep nothing for the next server ignore this.
    fn keep_images(&mut self) {}

    /// Returns the block device of this host that the export has made, if it has made one.
    fn device(&self) -> Option<PathBuf> {
        None
    }
}
