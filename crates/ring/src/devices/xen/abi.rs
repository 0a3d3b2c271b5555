//! Constants and structures of the kernel's Xen devices (`include/uapi/xen/{evtchn,gntdev}.h`), and
//! of xenstore's wire protocol (`xen/include/public/io/xs_wire.h`), in the byte order of x86.
//!
//! What must hold: every structure consists of integers without padding.

/// Size of a granted page in bytes. On x86, Xen has only this size for grants.
pub const PAGE: usize = 4096;

/// Returns the number of an ioctl: `_IOC(_IOC_NONE, kind, number, size)`.
const fn ioctl(kind: u8, number: u32, size: usize) -> libc::c_ulong {
    ((size as u32) << 16 | (kind as u32) << 8 | number) as libc::c_ulong
}

pub(super) const EVTCHN_BIND_INTERDOMAIN: libc::c_ulong =
    ioctl(b'E', 1, size_of::<BindInterdomain>());
pub(super) const EVTCHN_UNBIND: libc::c_ulong = ioctl(b'E', 3, size_of::<u32>());
pub(super) const EVTCHN_NOTIFY: libc::c_ulong = ioctl(b'E', 4, size_of::<u32>());
pub(super) const EVTCHN_RESTRICT_DOMID: libc::c_ulong = ioctl(b'E', 6, size_of::<u16>());
pub(super) const GNTDEV_MAP_GRANT_REF: libc::c_ulong = ioctl(b'G', 0, MAP_WORDS * 8);
pub(super) const GNTDEV_UNMAP_GRANT_REF: libc::c_ulong = ioctl(b'G', 1, size_of::<Unmap>());
pub(super) const GNTDEV_GRANT_COPY: libc::c_ulong = ioctl(b'G', 8, size_of::<Copy>());

/// The requests of `ioctl` that these modules make.
pub const REQUESTS: [u64; 7] = [
    EVTCHN_NOTIFY,
    GNTDEV_GRANT_COPY,
    GNTDEV_MAP_GRANT_REF,
    GNTDEV_UNMAP_GRANT_REF,
    EVTCHN_BIND_INTERDOMAIN,
    EVTCHN_UNBIND,
    EVTCHN_RESTRICT_DOMID,
];

/// `struct ioctl_evtchn_bind_interdomain`.
#[repr(C)]
pub(super) struct BindInterdomain {
    pub domain: u32,
    pub port: u32,
}

/// Number of words of a `struct ioctl_gntdev_map_grant_ref` with one grant. The structure has any
/// number of grants, so it is represented as words: count, index (set by the kernel), and domain
/// and reference of each grant.
pub(super) const MAP_WORDS: usize = 3;

/// Returns the words of a request to map `references` of `domain`.
pub(super) fn map_words(domain: u16, references: &[u32]) -> Vec<u64> {
    let grants = references.iter().map(|reference| u64::from(domain) | u64::from(*reference) << 32);
    [references.len() as u64, 0].into_iter().chain(grants).collect()
}

/// `struct ioctl_gntdev_unmap_grant_ref`.
#[repr(C)]
pub(super) struct Unmap {
    pub index: u64,
    pub count: u32,
    pub pad: u32,
}

/// `struct ioctl_gntdev_grant_copy`.
#[repr(C)]
pub(super) struct Copy {
    pub count: u32,
    pub pad: u32,
    pub segments: u64,
}

/// `struct gntdev_grant_copy_segment`. `source` and `target` are addresses of this process, or
/// [`foreign`] pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CopySegment {
    pub source: u64,
    pub target: u64,
    pub len: u16,
    pub flags: u16,
    pub status: i16,
    pub pad: u16,
}

pub(super) const COPY_FROM_GRANT: u16 = 1;
pub(super) const COPY_TO_GRANT: u16 = 2;

/// Returns a position in a granted page, from reference, offset and domain.
pub(super) fn foreign(domain: u16, reference: u32, offset: u16) -> u64 {
    u64::from(reference) | u64::from(offset) << 32 | u64::from(domain) << 48
}

/// Types of xenstore's messages.
pub mod message {
    pub const DIRECTORY: u32 = 1;
    pub const READ: u32 = 2;
    pub const GET_PERMS: u32 = 3;
    pub const WATCH: u32 = 4;
    pub const UNWATCH: u32 = 5;
    pub const TRANSACTION_START: u32 = 6;
    pub const TRANSACTION_END: u32 = 7;
    pub const GET_DOMAIN_PATH: u32 = 10;
    pub const WRITE: u32 = 11;
    pub const MKDIR: u32 = 12;
    pub const RM: u32 = 13;
    pub const SET_PERMS: u32 = 14;
    pub const WATCH_EVENT: u32 = 15;
    pub const ERROR: u32 = 16;
    pub const DIRECTORY_PART: u32 = 22;
}

/// Largest body of a message in bytes.
pub const PAYLOAD_MAX: usize = 4096;

/// Header of a message: `struct xsd_sockmsg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: u32,
    pub request: u32,
    pub transaction: u32,
    pub len: u32,
}

impl Header {
    pub const BYTES: usize = 16;

    pub fn bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (at, word) in
            [self.kind, self.request, self.transaction, self.len].into_iter().enumerate()
        {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn parse(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Header { kind: word(0), request: word(4), transaction: word(8), len: word(12) }
    }
}

const _: () = assert!(
    size_of::<BindInterdomain>() == 8
        && size_of::<Unmap>() == 16
        && size_of::<Copy>() == 16
        && size_of::<CopySegment>() == 24
        && std::mem::offset_of!(CopySegment, len) == 16
        && std::mem::offset_of!(CopySegment, status) == 20
);

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are those that a C compiler computes from the kernel's headers.
    #[test]
    fn ioctl_numbers_match_the_kernel_headers() {
        assert_eq!(
            [EVTCHN_BIND_INTERDOMAIN, EVTCHN_UNBIND, EVTCHN_NOTIFY],
            [0x84501, 0x44503, 0x44504]
        );
        assert_eq!(EVTCHN_RESTRICT_DOMID, 0x24506);
        assert_eq!(
            [GNTDEV_MAP_GRANT_REF, GNTDEV_UNMAP_GRANT_REF, GNTDEV_GRANT_COPY],
            [0x18_4700, 0x10_4701, 0x10_4708]
        );
    }

    #[test]
    fn structures_are_encoded_as_in_the_headers() {
        assert_eq!(map_words(0x102, &[3, 4]), [2, 0, 0x3_0000_0102, 0x4_0000_0102]);
        assert_eq!(foreign(0x0102, 0x0304_0506, 0x0708).to_le_bytes(), [6, 5, 4, 3, 8, 7, 2, 1]);
        let header = Header { kind: 0x0102, request: 3, transaction: 4, len: 5 };
        assert_eq!(header.bytes(), [2, 1, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0]);
        assert_eq!(Header::parse(&header.bytes()), header);
    }
}
