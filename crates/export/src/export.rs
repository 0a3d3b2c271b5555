//! What the program does with any export, whatever its protocol.

use std::path::PathBuf;

/// One disk, offered by one protocol: from its start until `stop`, or drop.
///
/// What must hold: no call waits for a client without a bound, because clients can be hostile.
pub trait Export: Send {
    /// Notifies clients that the disk has a new size. Those that cannot take it keep the old one,
    /// and the log says so.
    fn resize(&mut self);

    /// Takes no more requests, answers those that were taken, and ends. Requests that wait for a
    /// limit pass. A second call does nothing.
    fn stop(&mut self);

    /// Lets a client connect from now on only if its certificate has one of these names. No name:
    /// every client may. Exports without certificates do nothing.
    fn allow(&mut self, _names: &[String]) {}

    /// Describes each client that is connected, for people: `process 4711`, `192.0.2.7:40312`,
    /// `domain 3`.
    fn clients(&self) -> Vec<String>;

    /// The block device of this host that the export has made.
    fn device(&self) -> Option<PathBuf> {
        None
    }
}
