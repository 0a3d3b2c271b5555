//! The parameters of the disk for the kernel's driver.

use blockyard_disk::{Disk, Source};
use blockyard_image::SECTOR;
use blockyard_ring::host::{self, RequestLimits};
use blockyard_ring::ublk::abi::{self, Basic, Discard, Params};

/// Maximum number of sectors in a discard or a write of zeroes: 1 GiB.
const RANGE_SECTORS: u32 = (1 << 30) / SECTOR as u32;
/// Page size in bytes on x86. No limit may be less than a page.
const PAGE: u32 = 4096;
/// The kernel's default limit for devices that report none.
const SEGMENT_BOUNDARY: u64 = u32::MAX as u64;

/// Returns the parameters. `max_io`: maximum number of bytes of a request. `alignment`: with zero
/// copy, the alignment in bytes that the image's files require of the pages.
pub(super) fn params(disk: &Disk, max_io: u32, alignment: Option<u32>) -> Params {
    let (source, options) = (disk.source(), disk.options());
    let geometry = source.geometry();
    let logical = source.logical_block();
    let physical = geometry.physical_block.max(logical);
    let minimum = geometry.minimum_io.max(physical);
    // The driver accepts only powers of two, so another optimal size is not reported.
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
        params.dma_alignment = alignment.clamp(1, max_alignment()).next_power_of_two() - 1;
        if let Some(limits) = limits(&source) {
            limit(&mut params, &limits);
        }
    }
    params
}

/// Returns the largest alignment of memory in bytes that the driver accepts: a page.
pub(super) fn max_alignment() -> u32 {
    rustix::param::page_size() as u32
}

/// Returns the limits of the device that holds the image, because requests reach it unchanged.
fn limits(source: &Source) -> Option<RequestLimits> {
    let file = match source {
        Source::Chain(chain) => chain.top().data.as_ref().unwrap_or(&chain.top().file),
        source => source.file()?,
    };
    host::request_limits(file.fd()?)
}

/// Makes the kernel split requests by the limits of the image's device. If a lower layer must split
/// a request, io_uring cannot submit it without waiting, and gives it to a worker thread.
fn limit(params: &mut Params, limits: &RequestLimits) {
    let bytes = limits.bytes.clamp(PAGE.into(), u32::MAX.into()) as u32 / PAGE * PAGE;
    params.basic.max_sectors = params.basic.max_sectors.min(bytes / SECTOR as u32);
    params.types |= abi::PARAM_SEGMENT;
    params.segment.boundary = SEGMENT_BOUNDARY;
    params.segment.max_bytes = limits.segment_bytes.max(PAGE);
    params.segment.max_segments = limits.segments;
}

/// Returns the exponent of the least power of two that is at least `n`.
fn shift(n: u32) -> u8 {
    n.max(1).next_power_of_two().ilog2() as u8
}

#[cfg(test)]
mod tests {
    use blockyard_disk::DiskOptions;
    use blockyard_image::{CacheMode, ChainOptions};

    use super::*;

    /// The driver refuses a mask of a page or more. A server that takes the device over refuses an
    /// alignment that is less than its files need.
    #[test]
    fn a_device_has_the_alignment_that_its_files_need() {
        let options = DiskOptions {
            name: "aligned".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk = Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap());
        let page = max_alignment();
        for needed in [1, 512, 2048, page] {
            let params = params(&disk, 1 << 20, Some(needed));
            assert!(params.memory_alignment() >= needed, "{needed}");
            assert!(params.dma_alignment < page, "{needed}");
        }
    }
}
