//! The interface between the program and an export of any protocol.

use std::path::PathBuf;

use crate::client::Client;

/// One disk, served by one protocol, from its start until `stop` or drop.
///
/// What must hold: no call waits for a client without a time limit, because clients can be hostile.
pub trait Export: Send {
    /// Notifies clients that the disk has a new size. A client that cannot take a new size keeps
    /// the old one, and the log says so.
    fn resize(&mut self);

    /// Stops the export: takes no more requests, and answers the requests that were taken. Requests
    /// that wait for a throttle are admitted at once. A second call does nothing.
    fn stop(&mut self);

    /// Restricts new connections to clients whose certificate has one of these names. An
    /// empty list admits every client. Exports without certificates ignore this.
    fn allow(&mut self, _names: &[String]) {}

    /// Returns each connected client.
    fn clients(&self) -> Vec<Client>;

    /// Returns the block device of this host that the export has made, if it has made one.
    fn device(&self) -> Option<PathBuf> {
        None
    }
}
