//! Drivers with no virtual machine: of vhost-user-blk, a front end's connection, memory, and
//! virtqueues as a guest has them; and of Xen's blkif (`xen`).
//!
//! ```text
//!   session      path + plan -> connected, memory shared, queues running; the same again after a crash of the back end
//!   connection   the vhost-user messages, also raw ones          queue   requests in slots, kicks, signals
//!   memory       one shared region, handed out in pieces         split, packed   the rings' layouts (`Ring`)
//! ```
//!
//! In: a socket's path and what to negotiate. Out: requests' status bytes and data. What must hold:
//! between the ring and the back end stands only the virtio 1.2 specification; nothing here assumes
//! our own back end. Every part can be used by itself and holds back nothing: tests write whatever
//! descriptors, indices and messages they like.

pub mod connection;
#[cfg(test)]
mod device;
pub mod memory;
pub mod packed;
pub mod queue;
pub mod ring;
pub mod session;
pub mod split;
pub mod xen;

pub use connection::{BlockConfig, Connection, Inflight, RingSetup};
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

    /// Names of feature bits, for messages; bits that have none here by number.
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

    /// What a present-day guest takes of a disk, less the layout of the ring.
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
}

/// Status bytes of virtio-blk.
pub mod status {
    pub const OK: u8 = 0;
    pub const IOERR: u8 = 1;
    pub const UNSUPP: u8 = 2;
    /// What this driver writes there before it submits: a back end that answers without a status
    /// shows.
    pub const NONE: u8 = 0xff;
}
