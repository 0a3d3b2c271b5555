//! The parameters of the disk for the kernel's driver.

use blockyard_disk::{Disk, Source};
use blockyard_image::SECTOR;
use blockyard_ring::host::{self, RequestLimits};
use blockyard_ring::ublk::abi::{self, Basic, DeviceInfo, Discard, Params};

use super::{UblkOptions, note};

/// Maximum number of bytes of a request with zero copy.
const MAX_IO: u32 = 1 << 20;
/// Maximum number of bytes of a request without zero copy. Each tag has a buffer of this size.
const MAX_IO_COPIED: u32 = 512 << 10;
/// Maximum number of sectors in a discard or a write of zeroes: 1 GiB.
const RANGE_SECTORS: u32 = (1 << 30) / SECTOR as u32;
/// Page size in bytes on x86. No limit may be less than a page.
const PAGE: u32 = 4096;
/// The kernel's default limit for devices that report none.
const SEGMENT_BOUNDARY: u64 = u32::MAX as u64;

/// Flags of a device with zero copy.
const COPIES_NONE: u64 = abi::F_SUPPORT_ZERO_COPY | abi::F_AUTO_BUF_REG | abi::F_USER_COPY;

/// Returns the device to ask the driver for. `features`: the flags that this kernel's driver knows.
/// `zero_copy`: the image can use zero copy, if the driver can.
pub(super) fn device(options: &UblkOptions, features: u64, zero_copy: bool) -> DeviceInfo {
    let always = abi::F_CMD_IOCTL_ENCODE | abi::F_USER_RECOVERY | abi::F_USER_RECOVERY_REISSUE;
    let sometimes = abi::F_UPDATE_SIZE | abi::F_QUIESCE | abi::F_SAFE_STOP_DEV;
    let zero_copy = zero_copy && features & COPIES_NONE == COPIES_NONE;
    DeviceInfo {
        queues: options.shape.queues,
        depth: options.shape.size.min(abi::MAX_DEPTH),
        max_io_bytes: if zero_copy { MAX_IO } else { MAX_IO_COPIED },
        id: options.id.unwrap_or(u32::MAX),
        flags: always | sometimes & features | if zero_copy { COPIES_NONE } else { 0 },
        note: note::of(options),
        ..DeviceInfo::default()
    }
}

/// Returns the same device for a user without privileges. The driver copies its data.
pub(super) fn unprivileged(device: DeviceInfo) -> DeviceInfo {
    let flags = device.flags & !COPIES_NONE | abi::F_UNPRIVILEGED_DEV;
    DeviceInfo { flags, max_io_bytes: MAX_IO_COPIED, ..device }
}

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
    use crate::vhost_user::QueueShape;

    const ALL: u64 = u64::MAX;

    fn options(id: Option<u32>) -> UblkOptions {
        UblkOptions {
            id,
            shape: QueueShape { queues: 3, size: u16::MAX },
            identity: "disk".into(),
            file: None,
            earlier: Vec::new(),
        }
    }

    fn disk(read_only: bool, cache: CacheMode) -> Disk {
        let options = DiskOptions {
            name: "disk".into(),
            serial: String::new(),
            read_only,
            cache,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap())
    }

    #[test]
    fn a_device_has_what_the_driver_and_the_image_can() {
        let all = device(&options(None), ALL, true);
        assert_eq!((all.id, all.queues, all.depth), (u32::MAX, 3, abi::MAX_DEPTH));
        assert_eq!((all.flags & COPIES_NONE, all.max_io_bytes), (COPIES_NONE, 1 << 20));
        assert_eq!(all.note, note::of(&options(None)));
        assert_eq!(device(&options(Some(7)), ALL, true).id, 7);
        // Each part of zero copy is needed.
        for (features, zero_copy) in [
            (ALL, false),
            (ALL & !abi::F_AUTO_BUF_REG, true),
            (ALL & !abi::F_SUPPORT_ZERO_COPY, true),
            (ALL & !abi::F_USER_COPY, true),
        ] {
            let copied = device(&options(None), features, zero_copy);
            assert_eq!((copied.flags & COPIES_NONE, copied.max_io_bytes), (0, 512 << 10));
        }
        // An old driver still has recovery. No device asks for what its driver does not know.
        let recovery = abi::F_USER_RECOVERY | abi::F_USER_RECOVERY_REISSUE;
        let old = device(&options(None), 0, true);
        assert_eq!(old.flags, recovery | abi::F_CMD_IOCTL_ENCODE);
        for flag in [abi::F_UPDATE_SIZE, abi::F_QUIESCE, abi::F_SAFE_STOP_DEV] {
            let flags = |features| device(&options(None), features, true).flags & flag;
            assert_eq!((flags(flag), flags(!flag)), (flag, 0));
        }
    }

    #[test]
    fn a_user_without_privileges_has_no_zero_copy() {
        let before = device(&options(Some(7)), ALL, true);
        let after = unprivileged(before);
        assert_eq!(after.flags & (COPIES_NONE | abi::F_UNPRIVILEGED_DEV), abi::F_UNPRIVILEGED_DEV);
        assert_eq!(after.flags & !abi::F_UNPRIVILEGED_DEV, before.flags & !COPIES_NONE);
        assert_eq!((after.max_io_bytes, after.id, after.note), (512 << 10, 7, before.note));
    }

    #[test]
    fn the_kernel_gets_the_properties_of_the_disk() {
        let of = |read_only, cache| params(&disk(read_only, cache), 1 << 20, None);
        let usual = of(false, CacheMode::None);
        assert_eq!(usual.basic.attrs, abi::ATTR_VOLATILE_CACHE | abi::ATTR_FUA);
        assert_eq!((usual.basic.sectors, usual.basic.max_sectors), (2048, 2048));
        assert_eq!(usual.types, abi::PARAM_BASIC | abi::PARAM_DISCARD);
        assert!(usual.discard.granularity.is_power_of_two() && usual.discard.max_segments == 1);
        // The kernel must not flush a write-through disk, or discard from a read-only one.
        assert_eq!(of(false, CacheMode::Writethrough).basic.attrs, 0);
        let read_only = of(true, CacheMode::None);
        assert_ne!(read_only.basic.attrs & abi::ATTR_READ_ONLY, 0);
        assert_eq!(read_only.types, abi::PARAM_BASIC);
    }

    #[test]
    fn requests_are_limited_as_the_device_of_the_image_limits_them() {
        let limited = |bytes| {
            let mut params = params(&disk(false, CacheMode::None), 1 << 20, None);
            limit(&mut params, &RequestLimits { bytes, segment_bytes: 512, segments: 9 });
            params
        };
        for (bytes, sectors) in [(65536 + 512, 128), (1 << 40, 2048), (512, 8)] {
            assert_eq!(limited(bytes).basic.max_sectors, sectors, "{bytes}");
        }
        // No limit is less than a page.
        let segment = limited(1 << 20).segment;
        assert_eq!((segment.max_bytes, segment.max_segments), (PAGE, 9));
    }

    #[test]
    fn sizes_become_exponents() {
        for (size, exponent) in [(0, 0), (1, 0), (512, 9), (513, 10), (4096, 12), (1 << 31, 31)] {
            assert_eq!(shift(size), exponent, "{size}");
        }
    }

    /// The driver refuses a mask of a page or more. A server that takes the device over refuses an
    /// alignment that is less than its files need.
    #[test]
    fn a_device_has_the_alignment_that_its_files_need() {
        let disk = disk(false, CacheMode::None);
        let page = max_alignment();
        for needed in [1, 512, 2048, page] {
            let params = params(&disk, 1 << 20, Some(needed));
            assert!(params.memory_alignment() >= needed, "{needed}");
            assert!(params.dma_alignment < page, "{needed}");
        }
    }
}
