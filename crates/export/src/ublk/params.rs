//! What the kernel is told of the disk.

use blockyard_disk::Disk;
use blockyard_image::SECTOR;
use blockyard_ring::ublk::abi::{self, Basic, Discard, Params};

/// The longest discard, or range of zeroes, in sectors: 1 GiB.
const RANGE_SECTORS: u32 = (1 << 30) / SECTOR as u32;

/// `max_io`: bytes of a request, at most. `direct`: pages of whoever asks are what the image is read into and written from.
pub(super) fn params(disk: &Disk, max_io: u32, direct: bool) -> Params {
    let (source, options) = (disk.source(), disk.options());
    let geometry = source.geometry();
    let logical = source.logical_block();
    let physical = geometry.physical_block.max(logical);
    let minimum = geometry.minimum_io.max(physical);
    // The driver has powers of two only: another stripe is not told, rather than told wrong.
    let optimal = if geometry.optimal_io.is_power_of_two() { geometry.optimal_io.max(minimum) } else { minimum };
    let mut attrs = 0;
    if options.read_only {
        attrs |= abi::ATTR_READ_ONLY;
    }
    if geometry.rotational {
        attrs |= abi::ATTR_ROTATIONAL;
    }
    if options.cache.write_back() {
        attrs |= abi::ATTR_VOLATILE_CACHE | abi::ATTR_FUA;
    }
    let basic = Basic {
        attrs,
        logical_shift: shift(logical),
        physical_shift: shift(physical),
        optimal_shift: shift(optimal),
        minimum_shift: shift(minimum),
        max_sectors: max_io / SECTOR as u32,
        sectors: disk.capacity() / SECTOR,
        ..Basic::default()
    };
    let discard = Discard {
        granularity: source.discard_unit().max(logical),
        max_sectors: RANGE_SECTORS,
        max_zeroes_sectors: RANGE_SECTORS,
        max_segments: 1,
        ..Discard::default()
    };
    let mut params = Params { types: abi::PARAM_BASIC, basic, discard, ..Params::default() };
    if !options.read_only {
        params.types |= abi::PARAM_DISCARD;
    }
    if direct {
        params.types |= abi::PARAM_DMA_ALIGN;
        params.dma_alignment = geometry.direct_memory.clamp(1, 2048).next_power_of_two() - 1;
    }
    params
}

/// Of the power of two that holds `n`.
fn shift(n: u32) -> u8 {
    n.max(1).next_power_of_two().ilog2() as u8
}
