//! The size of a target's disk, and how its files are opened.

/// The size of a disk, and the unit in which it is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Size in bytes: a multiple of the granule, at most 2^62.
    pub size: u64,
    /// Unit in bytes: a power of two from 512 to 4 MiB. Blockyard asks a map for whole granules,
    /// and sends a device requests of whole granules.
    pub granule: u64,
}

/// Whether a file is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading. Other disks may read it, too.
    Read,
    /// For reading and writing. No other disk or program of Blockyard may use it.
    Write,
}
