//! What one layer of a chain says about a range of the guest's disk.

/// Where a range's bytes are, as far as one layer knows. Offsets are bytes of the layer's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the layer's file, from this offset on. (qcow2 with an external data file: in that.)
    Data(u64),
    /// They read as zeroes.
    Zero,
    /// In a compressed cluster; the descriptor is the format's own. The extent lies in that one cluster.
    Compressed(u64),
    /// The layer below knows.
    Absent,
}

/// A range whose bytes lie in one place: `len` bytes from the offset that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub len: u64,
    pub place: Place,
}
