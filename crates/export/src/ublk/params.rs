//! What the kernel is told of the disk.

use blockyard_disk::{Disk, Source};
use blockyard_image::SECTOR;
use blockyard_ring::host::{self, RequestLimits};
use blockyard_ring::ublk::abi::{self, Basic, Discard, Params};

/// The longest discard, or range of zeroes, in sectors: 1 GiB.
const RANGE_SECTORS: u32 = (1 << 30) / SECTOR as u32;
/// The kernel's pages on x86: no limit may be less.
const PAGE: u32 = 4096;
/// The kernel's own limit, where a device tells none.
const SEGMENT_BOUNDARY: u64 = u32::MAX as u64;

/// `max_io`: bytes of a request, at most. `alignment`: the pages of whoever asks are what the image
/// is read into and written from, and this is what it needs of them, in bytes.
pub(super) fn params(disk: &Disk, max_io: u32, alignment: Option<u32>) -> Params {
    let (source, options) = (disk.source(), disk.options());
    let geometry = source.geometry();
    let logical = source.logical_block();
    let physical = geometry.physical_block.max(logical);
    let minimum = geometry.minimum_io.max(physical);
    // The driver has powers of two only: another stripe is not told, rather than told wrong.
    let optimal = if geometry.optimal_io.is_power_of_two() {
        geometry.optimal_io.max(minimum)
    } else {
        minimum
    };
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
    if let Some(alignment) = alignment {
        params.types |= abi::PARAM_DMA_ALIGN;
        params.dma_alignment = alignment.clamp(1, 2048).next_power_of_two() - 1;
        if let Some(limits) = limits(&source) {
            limit(&mut params, &limits);
        }
    }
    params
}

/// Those of the device that is the image: requests reach it as they are.
fn limits(source: &Source) -> Option<RequestLimits> {
    let file = match source {
        Source::Chain(chain) => chain.top().data.as_ref().unwrap_or(&chain.top().file),
        source => source.file()?,
    };
    host::request_limits(file.fd()?)
}

/// The kernel refuses to split on the way what may not wait, and leaves it to a worker: so it is
/// split before.
fn limit(params: &mut Params, limits: &RequestLimits) {
    let bytes = limits.bytes.clamp(PAGE.into(), u32::MAX.into()) as u32 / PAGE * PAGE;
    params.basic.max_sectors = params.basic.max_sectors.min(bytes / SECTOR as u32);
    params.types |= abi::PARAM_SEGMENT;
    params.segment.boundary = SEGMENT_BOUNDARY;
    params.segment.max_bytes = limits.segment_bytes.max(PAGE);
    params.segment.max_segments = limits.segments;
}

/// Of the power of two that holds `n`.
fn shift(n: u32) -> u8 {
    n.max(1).next_power_of_two().ilog2() as u8
}
