//! Constants and structures of ublk (`linux/ublk_cmd.h`, as of 7.x), in the host's byte order.
//!
//! What must hold: every structure consists of integers without padding, so that it can be passed
//! as bytes (`Plain`).

/// Feature flags of the driver and of a device.
pub const F_SUPPORT_ZERO_COPY: u64 = 1 << 0;
pub const F_USER_RECOVERY: u64 = 1 << 3;
pub const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
pub const F_UNPRIVILEGED_DEV: u64 = 1 << 5;
pub const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
pub const F_USER_COPY: u64 = 1 << 7;
pub const F_UPDATE_SIZE: u64 = 1 << 10;
pub const F_AUTO_BUF_REG: u64 = 1 << 11;
pub const F_QUIESCE: u64 = 1 << 12;
pub const F_SAFE_STOP_DEV: u64 = 1 << 17;

/// States of a device. Dead: not served, and cannot be. Live: served. Quiesced: its server died,
/// and another one may take over.
pub const S_DEAD: u16 = 0;
pub const S_LIVE: u16 = 1;
pub const S_QUIESCED: u16 = 2;

/// Operation of a request (the low byte of [`Descriptor::op_flags`]), and its flags.
pub const OP_READ: u8 = 0;
pub const OP_WRITE: u8 = 1;
pub const OP_FLUSH: u8 = 2;
pub const OP_DISCARD: u8 = 3;
pub const OP_WRITE_ZEROES: u8 = 5;
pub const IO_FUA: u32 = 1 << 13;
pub const IO_NOUNMAP: u32 = 1 << 15;

/// Attributes of a disk ([`Basic::attrs`]).
pub const ATTR_READ_ONLY: u32 = 1 << 0;
pub const ATTR_ROTATIONAL: u32 = 1 << 1;
pub const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
pub const ATTR_FUA: u32 = 1 << 3;

/// Which parts of [`Params`] are set.
pub const PARAM_BASIC: u32 = 1 << 0;
pub const PARAM_DISCARD: u32 = 1 << 1;
pub const PARAM_DMA_ALIGN: u32 = 1 << 4;
pub const PARAM_SEGMENT: u32 = 1 << 5;

/// Largest queue depth, and bytes of the largest request.
pub const MAX_DEPTH: u16 = 4096;
pub const MAX_IO_BYTES: u32 = 32 << 20;

/// Position of request data in the character device; see [`data_position`].
const IO_BUF_OFFSET: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = TAG_SHIFT + 16;

/// Returns the position of the data of request `tag` of queue `queue` in the character device.
pub(super) fn data_position(queue: u16, tag: u16) -> u64 {
    IO_BUF_OFFSET + (u64::from(queue) << QUEUE_SHIFT) + (u64::from(tag) << TAG_SHIFT)
}

/// Numbers of ioctls: `_IOR('u', nr, T)` and `_IOWR('u', nr, T)`.
const fn encode(direction: u32, nr: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | nr
}

const fn control(direction: u32, nr: u32) -> u32 {
    encode(direction, nr, size_of::<ControlCommand>())
}

pub(super) const ADD_DEV: u32 = control(3, 0x04);
pub(super) const DEL_DEV: u32 = control(3, 0x05);
pub(super) const START_DEV: u32 = control(3, 0x06);
pub(super) const STOP_DEV: u32 = control(3, 0x07);
pub(super) const SET_PARAMS: u32 = control(3, 0x08);
pub(super) const GET_PARAMS: u32 = control(2, 0x09);
pub(super) const START_USER_RECOVERY: u32 = control(3, 0x10);
pub(super) const END_USER_RECOVERY: u32 = control(3, 0x11);
pub(super) const GET_DEV_INFO2: u32 = control(2, 0x12);
pub(super) const GET_FEATURES: u32 = control(2, 0x13);
pub(super) const DEL_DEV_ASYNC: u32 = control(2, 0x14);
pub(super) const UPDATE_SIZE: u32 = control(3, 0x15);
pub(super) const QUIESCE_DEV: u32 = control(3, 0x16);
pub(super) const TRY_STOP_DEV: u32 = control(3, 0x17);

pub(super) const FETCH_REQ: u32 = encode(3, 0x20, 16);
pub(super) const COMMIT_AND_FETCH_REQ: u32 = encode(3, 0x21, 16);

/// Types that can be passed as bytes.
///
/// # Safety
/// `repr(C)`, integers only, no padding: any bytes are a valid value, and all its bytes may be
/// read.
pub(super) unsafe trait Plain: Default {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the implementor guarantees that all its bytes may be read.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of_val(self)) }
    }

    /// Reads a value from the first bytes of `bytes`, which must be long enough.
    fn parse(bytes: &[u8]) -> Self
    where
        Self: Sized,
    {
        assert!(bytes.len() >= size_of::<Self>());
        // SAFETY: the slice is long enough; any bytes are a valid value; the read is unaligned.
        unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() }
    }
}

/// A control command: `struct ublksrv_ctrl_cmd`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ControlCommand {
    pub id: u32,
    pub queue: u16,
    pub len: u16,
    pub addr: u64,
    pub data: u64,
    pub path_len: u16,
    pub pad: u16,
    pub reserved: u32,
}

/// A device: `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    pub queues: u16,
    pub depth: u16,
    pub state: u16,
    pub pad0: u16,
    pub max_io_bytes: u32,
    pub id: u32,
    /// Process number of the server.
    pub server: i32,
    pub pad1: u32,
    pub flags: u64,
    /// A value that the driver stores for the server, and does not use.
    pub note: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub reserved: [u64; 2],
}

/// `struct ublk_param_basic`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Basic {
    pub attrs: u32,
    pub logical_shift: u8,
    pub physical_shift: u8,
    pub optimal_shift: u8,
    pub minimum_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub sectors: u64,
    pub virt_boundary: u64,
}

/// `struct ublk_param_discard`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Discard {
    pub alignment: u32,
    pub granularity: u32,
    pub max_sectors: u32,
    pub max_zeroes_sectors: u32,
    pub max_segments: u16,
    pub reserved: u16,
}

/// Limits of a request's memory segments.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment {
    /// No segment crosses a multiple of this mask plus one.
    pub boundary: u64,
    pub max_bytes: u32,
    pub max_segments: u16,
    pub reserved: u16,
}

/// `struct ublk_params`, as far as it is used here.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Params {
    pub len: u32,
    pub types: u32,
    pub basic: Basic,
    pub discard: Discard,
    pub device_numbers: [u32; 4],
    pub zoned: [u32; 8],
    /// Addresses are multiples of this mask plus one.
    pub dma_alignment: u32,
    pub dma_pad: u32,
    pub segment_pad: u32,
    pub segment: Segment,
}

impl Params {
    /// Returns the alignment of the memory of requests in bytes. (4 is the driver's default.)
    pub fn memory_alignment(&self) -> u32 {
        if self.types & PARAM_DMA_ALIGN != 0 { self.dma_alignment.saturating_add(1) } else { 4 }
    }
}

/// A request from the driver: `struct ublksrv_io_desc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor {
    pub op_flags: u32,
    pub sectors: u32,
    pub start: u64,
    pub addr: u64,
}

// SAFETY: repr(C), integers, no padding (the sizes are checked below).
unsafe impl Plain for ControlCommand {}
// SAFETY: as above.
unsafe impl Plain for DeviceInfo {}
// SAFETY: as above.
unsafe impl Plain for Params {}

const _: () = assert!(
    size_of::<ControlCommand>() == 32
        && size_of::<DeviceInfo>() == 64
        && size_of::<Basic>() == 32
        && size_of::<Discard>() == 20
        && size_of::<Params>() == 8 + 32 + 20 + 16 + 32 + 8 + 4 + 16
        && size_of::<Descriptor>() == 24
);
