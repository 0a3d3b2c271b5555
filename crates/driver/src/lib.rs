//! Drivers without a virtual machine. For vhost-user-blk: the connection, memory and virtqueues of
//! a front end. For Xen's blkif (`xen`): the nodes, granted pages and rings of a front end.
//!
//! ```text
//!   session      path + plan -> connected, queues running; also after a crash of the back end
//!   connection   vhost-user messages, also raw ones     queue          requests in slots
//!   memory       one shared region and its allocator    split, packed  the ring layouts (`Ring`)
//! ```
//!
//! In: a socket's path, and the features to negotiate. Out: status bytes and data of requests.
//!
//! What must hold
//! - The driver follows only the virtio 1.2 specification, and assumes nothing about Blockyard's
//!   back end.
//! - Every module can be used alone and checks nothing: tests write any descriptors, indices and
//!   messages.

pub mod connection;
#[cfg(test)]
mod device;
mod error;
pub mod memory;
pub mod packed;
pub mod queue;
pub mod ring;
pub mod session;
pub mod split;
pub mod xen;

pub use connection::{BlockConfig, Connection, Inflight, RingSetup};
pub use error::{Error, ErrorKind};
pub use memory::Memory;
pub use packed::PackedRing;
pub use queue::{Data, Queue, RequestQueue};
pub use ring::{Buffer, Ring, RingAddresses};
pub use session::{Link, Plan, Session};
pub use split::SplitRing;

/// Feature bits of virtio-blk and of virtio that this driver knows.
pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const READ_ONLY: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;

    /// Returns the names of feature bits, for error messages. Bits without a name appear as
    /// numbers.
    pub fn names(bits: u64) -> String {
        const NAMES: [(u64, &str); 14] = [
            (SEG_MAX, "VIRTIO_BLK_F_SEG_MAX"),
            (READ_ONLY, "VIRTIO_BLK_F_RO"),
            (BLK_SIZE, "VIRTIO_BLK_F_BLK_SIZE"),
            (FLUSH, "VIRTIO_BLK_F_FLUSH"),
            (TOPOLOGY, "VIRTIO_BLK_F_TOPOLOGY"),
            (CONFIG_WCE, "VIRTIO_BLK_F_CONFIG_WCE"),
            (MQ, "VIRTIO_BLK_F_MQ"),
            (DISCARD, "VIRTIO_BLK_F_DISCARD"),
            (WRITE_ZEROES, "VIRTIO_BLK_F_WRITE_ZEROES"),
            (INDIRECT_DESC, "VIRTIO_F_INDIRECT_DESC"),
            (EVENT_IDX, "VIRTIO_F_EVENT_IDX"),
            (PROTOCOL_FEATURES, "VHOST_USER_F_PROTOCOL_FEATURES"),
            (VERSION_1, "VIRTIO_F_VERSION_1"),
            (RING_PACKED, "VIRTIO_F_RING_PACKED"),
        ];
        let each = (0..64).map(|bit| 1 << bit).filter(|bit| bits & bit != 0);
        let name = |bit: u64| match NAMES.iter().find(|n| n.0 == bit) {
            Some((_, name)) => (*name).to_string(),
            None => format!("{bit:#x}"),
        };
        each.map(name).collect::<Vec<_>>().join(", ")
    }

    /// The features that a current guest accepts for a disk, except those of the ring layout.
    pub const GUEST: u64 = SEG_MAX
        | READ_ONLY
        | BLK_SIZE
        | FLUSH
        | TOPOLOGY
        | CONFIG_WCE
        | MQ
        | DISCARD
        | WRITE_ZEROES
        | EVENT_IDX
        | PROTOCOL_FEATURES
        | VERSION_1;
}

/// Request types of virtio-blk (the header's first field).
pub mod request {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;

    /// Size in bytes of a range, which is the data of a DISCARD or WRITE_ZEROES.
    pub const RANGE: usize = 16;

    /// Returns the data of a DISCARD of one range. The units are sectors of 512 bytes.
    pub fn range(sector: u64, sectors: u32) -> [u8; RANGE] {
        (u128::from(sector) | u128::from(sectors) << 64).to_le_bytes()
    }

    /// Returns the first sector and the number of sectors of a range.
    pub fn parse_range(bytes: [u8; RANGE]) -> (u64, u32) {
        let range = u128::from_le_bytes(bytes);
        (range as u64, (range >> 64) as u32)
    }
}

/// Status bytes of virtio-blk.
pub mod status {
    pub const OK: u8 = 0;
    pub const IOERR: u8 = 1;
    pub const UNSUPP: u8 = 2;
    /// Status byte that this driver writes before it submits a request, so that a missing status is
    /// visible.
    pub const NONE: u8 = 0xff;
}

#[cfg(test)]
mod tests {
    use super::request::{parse_range, range};

    #[test]
    fn a_range_has_the_layout_of_the_specification() {
        let bytes = range(0x0102, 3);
        assert_eq!(bytes, [2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(parse_range(bytes), (0x0102, 3));
        assert_eq!(parse_range(range(u64::MAX, u32::MAX)), (u64::MAX, u32::MAX));
    }
}
