//! The state of a disk in the yard.

/// The state of a disk in the yard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// The disk's image is being opened, or its exports start.
    Opening,
    Serving,
    /// A command works on the disk. Clients do not notice.
    Busy,
    /// The disk's exports end, and its image is flushed and closed.
    Closing,
}
