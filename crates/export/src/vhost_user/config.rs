//! The device as the guest sees it: feature bits and the configuration space (virtio 1.2, section
//! 5.2).

use blockyard_disk::Disk;
use blockyard_image::SECTOR;

pub const F_SIZE_MAX: u64 = 1 << 1;
pub const F_SEG_MAX: u64 = 1 << 2;
pub const F_RO: u64 = 1 << 5;
pub const F_BLK_SIZE: u64 = 1 << 6;
pub const F_FLUSH: u64 = 1 << 9;
pub const F_TOPOLOGY: u64 = 1 << 10;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_MQ: u64 = 1 << 12;
pub const F_DISCARD: u64 = 1 << 13;
pub const F_WRITE_ZEROES: u64 = 1 << 14;
/// The back end logs what it writes into guest memory (VHOST_F_LOG_ALL).
pub const F_LOG_ALL: u64 = 1 << 26;
pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_PROTOCOL: u64 = 1 << 30;
pub const F_VERSION_1: u64 = 1 << 32;
pub const F_PACKED: u64 = 1 << 34;

/// Offset of the write-cache byte in the configuration space.
pub const WCE_OFFSET: usize = 32;

/// Largest memory segment of a request, in bytes.
const SIZE_MAX: u32 = 16 << 20;
/// Maximum number of bytes of a request, far more than guests send. This bounds the memory and the
/// time of one operation.
pub const REQUEST_MAX: u64 = 256 << 20;
/// Maximum number of ranges in a discard or write-zeroes request, and of sectors in a range.
pub const DISCARD_SEGMENTS: u32 = 64;
pub const DISCARD_SECTORS: u32 = (1 << 30) / SECTOR as u32;

/// Number and size of a device's queues.
#[derive(Clone, Copy, Debug)]
pub struct QueueShape {
    pub queues: u16,
    /// Expected number of entries of a queue. The maximum number of segments that the device offers
    /// depends on it.
    pub size: u16,
}

/// Returns the feature bits offered for `disk`.
pub fn features(disk: &Disk) -> u64 {
    let base = F_SIZE_MAX
        | F_SEG_MAX
        | F_BLK_SIZE
        | F_FLUSH
        | F_TOPOLOGY
        | F_CONFIG_WCE
        | F_MQ
        | F_LOG_ALL
        | F_INDIRECT
        | F_EVENT_IDX
        | F_PROTOCOL
        | F_VERSION_1
        | F_PACKED;
    base | if disk.options().read_only { F_RO } else { F_DISCARD | F_WRITE_ZEROES }
}

/// Returns the configuration space, `struct virtio_blk_config`, little-endian.
pub fn space(disk: &Disk, shape: QueueShape, write_back: bool) -> Vec<u8> {
    let geometry = disk.source().geometry();
    let logical = disk.source().logical_block();
    let physical = geometry.physical_block.max(logical);
    let in_blocks = |bytes: u32| bytes / logical;
    let discard_align = disk.source().discard_unit() / SECTOR as u32;
    let mut space = Vec::with_capacity(72);
    space.extend((disk.capacity() / SECTOR).to_le_bytes());
    space.extend(SIZE_MAX.to_le_bytes());
    space.extend(u32::from(shape.size.saturating_sub(2).clamp(1, 1024)).to_le_bytes());
    // Cylinders, heads and sectors are not reported.
    space.extend([0; 4]);
    space.extend(logical.to_le_bytes());
    space.push((physical / logical).max(1).ilog2() as u8);
    space.push(in_blocks(geometry.alignment_offset) as u8);
    space.extend((in_blocks(geometry.minimum_io).min(u32::from(u16::MAX)) as u16).to_le_bytes());
    space.extend(in_blocks(geometry.optimal_io).to_le_bytes());
    debug_assert_eq!(space.len(), WCE_OFFSET);
    space.push(u8::from(write_back));
    space.push(0);
    space.extend(shape.queues.to_le_bytes());
    space.extend(DISCARD_SECTORS.to_le_bytes());
    space.extend(DISCARD_SEGMENTS.to_le_bytes());
    space.extend(discard_align.to_le_bytes());
    space.extend(DISCARD_SECTORS.to_le_bytes());
    space.extend(DISCARD_SEGMENTS.to_le_bytes());
    // A write of zeroes may unmap the range.
    space.push(1);
    space.extend([0; 3]);
    space
}

#[cfg(test)]
mod tests {
    use blockyard_disk::{DiskOptions, Source};
    use blockyard_image::{CacheMode, ChainOptions};

    use super::*;

    /// Virtio 1.2, section 5.2.4.
    #[test]
    fn each_field_of_the_configuration_space_has_its_place() {
        let options = DiskOptions {
            name: "disk".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk = Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap());
        let space = space(&disk, QueueShape { queues: 3, size: 64 }, true);
        let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(space.len(), 60);
        assert_eq!((word(0), word(4)), (2048, 0), "the capacity in sectors");
        assert_eq!((word(8), word(12), word(20)), (SIZE_MAX, 62, 512));
        assert_eq!(space[32..36], [1, 0, 3, 0], "the write cache, and the number of queues");
        assert_eq!((word(36), word(40)), (DISCARD_SECTORS, DISCARD_SEGMENTS));
        assert_eq!((word(48), word(52)), (DISCARD_SECTORS, DISCARD_SEGMENTS));
        assert_eq!(space[56..], [1, 0, 0, 0], "zeroes may unmap");
    }
}
