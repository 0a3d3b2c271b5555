//! blkif ring entries: requests of a front end, and responses (`xen/include/public/io/blkif.h`).
//!
//! In: bytes that were copied out of the ring once. Out: a parsed request. What must hold: this
//! module never reads the ring, so the values that it checks are the values that the back end uses.

use blockyard_image::SECTOR;

/// Operations.
const READ: u8 = 0;
const WRITE: u8 = 1;
const WRITE_BARRIER: u8 = 2;
const FLUSH: u8 = 3;
const DISCARD: u8 = 5;
const INDIRECT: u8 = 6;
/// Flag of a discard: the data must become unreadable.
const DISCARD_SECURE: u8 = 1;

/// Limits: segments of a direct request, and pages and segments of an indirect one.
pub const SEGMENTS: usize = 11;
pub const INDIRECT_PAGES: usize = 8;
pub const INDIRECT_SEGMENTS: usize = 256;
/// Number of segments that one page describes.
pub const SEGMENTS_OF_PAGE: usize = 512;
pub const SEGMENT_BYTES: usize = 8;
/// Number of the last sector of a page.
const LAST: u8 = 7;

/// Size of the ring's header in bytes.
pub const HEADER: usize = 64;

/// Status values of a response.
pub const OK: i16 = 0;
pub const ERROR: i16 = -1;
pub const UNSUPPORTED: i16 = -2;

/// Layout of the front end's ring entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    X86_64,
    X86_32,
}

/// Size of the longest entry in bytes.
pub const ENTRY_MOST: usize = 112;

impl Abi {
    /// Parses the node `protocol`. Without the node, the front end uses the back end's own layout.
    pub fn of(protocol: Option<&str>) -> Option<Self> {
        match protocol {
            None | Some("" | "x86_64-abi") => Some(Abi::X86_64),
            Some("x86_32-abi") => Some(Abi::X86_32),
            Some(_) => None,
        }
    }

    /// Returns the size of an entry in bytes.
    pub fn entry(self) -> usize {
        match self {
            Abi::X86_64 => ENTRY_MOST,
            Abi::X86_32 => 108,
        }
    }

    /// Returns the byte offsets of the request's id, of its first sector, and of the fields after
    /// the first sector.
    fn places(self) -> (usize, usize, usize) {
        match self {
            Abi::X86_64 => (8, 16, 24),
            Abi::X86_32 => (4, 12, 20),
        }
    }

    /// Returns the number of entries of a ring of `pages` pages.
    pub fn entries(self, pages: usize) -> u32 {
        let all = ((pages * 4096 - HEADER) / self.entry()) as u32;
        1 << all.ilog2()
    }
}

/// A part of one page: its first and last sector, both inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub reference: u32,
    first: u8,
    last: u8,
}

impl Segment {
    /// Parses a segment. Its values are not checked.
    pub fn parse(bytes: &[u8; SEGMENT_BYTES]) -> Self {
        Segment { reference: u32_at(bytes, 0), first: bytes[4], last: bytes[5] }
    }

    /// Returns the segment's offset and length in bytes, or `None` if the segment is not inside a
    /// page.
    pub fn range(self) -> Option<(u16, u16)> {
        let inside = self.first <= self.last && self.last <= LAST;
        inside.then(|| (u16::from(self.first) * 512, u16::from(self.last - self.first + 1) * 512))
    }
}

/// The parsed operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    Read,
    Write,
    /// A durable write that begins after all earlier requests are complete. Later requests wait for
    /// it.
    Barrier,
    Flush,
    /// Length in bytes.
    Discard(u64),
    /// A discard with BLKIF_DISCARD_SECURE, which the back end refuses.
    SecureDiscard,
    /// An operation that this back end does not support.
    Unknown,
    /// An indirect request whose inner operation is neither read nor write, or a request with
    /// invalid numbers.
    Bad,
}

/// Where the descriptions of a request's segments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Here([Segment; SEGMENTS]),
    /// The descriptions are in guest pages with these grant references (an indirect request).
    Pages([u32; INDIRECT_PAGES]),
}

impl Ask {
    /// Returns whether a request has pages.
    pub fn moves(self) -> bool {
        matches!(self, Ask::Read | Ask::Write | Ask::Barrier | Ask::Flush)
    }
}

/// A request that was copied out of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The front end's id of the request. Its response repeats it.
    pub id: u64,
    /// The operation as the response repeats it: for an indirect request, the inner one.
    pub operation: u8,
    pub ask: Ask,
    /// Offset in bytes. An overflow of 64 bits saturates, because that offset is beyond any disk.
    pub offset: u64,
    pub segments: usize,
    pub place: Place,
    /// Slot of the request in the record of requests in flight.
    pub slot: u32,
}

impl Request {
    /// Returns the pages that describe the segments: their references, and the number of segments
    /// in each.
    pub fn tables(&self) -> impl Iterator<Item = (u32, usize)> {
        let references: &[u32] = match &self.place {
            Place::Pages(references) => &references[..self.segments.div_ceil(SEGMENTS_OF_PAGE)],
            Place::Here(_) => &[],
        };
        let segments = self.segments;
        let here = move |at: usize| (segments - at * SEGMENTS_OF_PAGE).min(SEGMENTS_OF_PAGE);
        references.iter().enumerate().map(move |(at, reference)| (*reference, here(at)))
    }

    /// Parses an entry. Invalid requests become `Ask::Bad`.
    pub fn parse(abi: Abi, bytes: &[u8; ENTRY_MOST]) -> Self {
        let (id, sector, rest) = abi.places();
        let operation = bytes[0];
        let offset = u64_at(bytes, sector).saturating_mul(SECTOR);
        let mut request = Request {
            id: u64_at(bytes, id),
            operation,
            ask: Ask::Unknown,
            offset,
            segments: 0,
            place: direct_segments(bytes, rest),
            slot: 0,
        };
        let direct = |operation| match operation {
            READ => Ask::Read,
            WRITE => Ask::Write,
            WRITE_BARRIER => Ask::Barrier,
            _ => Ask::Flush,
        };
        match operation {
            READ | WRITE | WRITE_BARRIER | FLUSH => {
                request.segments = bytes[1].into();
                request.ask =
                    if request.segments <= SEGMENTS { direct(operation) } else { Ask::Bad };
            }
            DISCARD if bytes[1] & DISCARD_SECURE != 0 => request.ask = Ask::SecureDiscard,
            DISCARD => {
                let len = u64_at(bytes, rest).checked_mul(SECTOR);
                request.ask = len.map_or(Ask::Bad, Ask::Discard);
            }
            INDIRECT => {
                request.operation = bytes[1];
                request.segments = u16::from_le_bytes([bytes[2], bytes[3]]).into();
                let mut pages = [0; INDIRECT_PAGES];
                for (at, page) in pages.iter_mut().enumerate() {
                    *page = u32_at(bytes, rest + 4 + at * 4);
                }
                request.place = Place::Pages(pages);
                let good = matches!(bytes[1], READ | WRITE)
                    && (1..=INDIRECT_SEGMENTS).contains(&request.segments);
                request.ask = if good { direct(bytes[1]) } else { Ask::Bad };
            }
            _ => {}
        }
        if matches!(request.ask, Ask::Read | Ask::Write) && request.segments == 0 {
            request.ask = Ask::Bad;
        }
        request
    }
}

fn direct_segments(bytes: &[u8; ENTRY_MOST], rest: usize) -> Place {
    let mut segments = [Segment { reference: 0, first: 0, last: 0 }; SEGMENTS];
    for (segment, bytes) in segments.iter_mut().zip(bytes[rest..].chunks_exact(SEGMENT_BYTES)) {
        *segment = Segment { reference: u32_at(bytes, 0), first: bytes[4], last: bytes[5] };
    }
    Place::Here(segments)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an entry with these fields at these byte offsets.
    fn entry(fields: &[(usize, &[u8])]) -> [u8; ENTRY_MOST] {
        let mut bytes = [0; ENTRY_MOST];
        for (at, field) in fields {
            bytes[*at..at + field.len()].copy_from_slice(field);
        }
        bytes
    }

    #[test]
    fn rings_have_the_number_of_entries_of_blkif_h() {
        for (pages, entries) in [(1, 32), (2, 64), (4, 128), (8, 256), (16, 512)] {
            assert_eq!(
                (Abi::X86_64.entries(pages), Abi::X86_32.entries(pages)),
                (entries, entries)
            );
        }
        assert_eq!(Abi::of(None), Some(Abi::X86_64));
        assert_eq!(Abi::of(Some("x86_32-abi")), Some(Abi::X86_32));
        assert_eq!(Abi::of(Some("arm-abi")), None);
    }

    #[test]
    fn a_write_is_parsed_in_both_layouts() {
        for (abi, id, sector, segment) in [(Abi::X86_64, 8, 16, 24), (Abi::X86_32, 4, 12, 20)] {
            let bytes = entry(&[
                (0, &[1, 2]),
                (id, &7u64.to_le_bytes()),
                (sector, &9u64.to_le_bytes()),
                (segment, &[5, 0, 0, 0, 1, 7]),
                (segment + 8, &[6, 0, 0, 0, 0, 0]),
            ]);
            let request = Request::parse(abi, &bytes);
            assert_eq!(
                (request.id, request.ask, request.offset, request.segments),
                (7, Ask::Write, 9 * 512, 2)
            );
            let Place::Here(segments) = request.place else { panic!() };
            assert_eq!((segments[0].reference, segments[0].range()), (5, Some((512, 7 * 512))));
            assert_eq!((segments[1].reference, segments[1].range()), (6, Some((0, 512))));
        }
    }

    #[test]
    fn discards_and_indirect_requests_are_parsed() {
        for (abi, rest) in [(Abi::X86_64, 24), (Abi::X86_32, 20)] {
            let discard = |flag| entry(&[(0, &[5, flag]), (rest, &16u64.to_le_bytes())]);
            assert_eq!(Request::parse(abi, &discard(0)).ask, Ask::Discard(8192));
            assert_eq!(Request::parse(abi, &discard(1)).ask, Ask::SecureDiscard);
            let endless = entry(&[(0, &[5, 0]), (rest, &u64::MAX.to_le_bytes())]);
            assert_eq!(Request::parse(abi, &endless).ask, Ask::Bad);
            let indirect = |of, segments: u16| {
                let [low, high] = segments.to_le_bytes();
                entry(&[
                    (0, &[6, of, low, high]),
                    (rest + 4, &[1, 0, 0, 0, 2, 0, 0, 0]),
                    (rest + 32, &[8]),
                ])
            };
            let request = Request::parse(abi, &indirect(1, 256));
            assert_eq!((request.ask, request.segments, request.operation), (Ask::Write, 256, 1));
            assert_eq!(request.place, Place::Pages([1, 2, 0, 0, 0, 0, 0, 8]));
            for (of, segments) in [(1, 257), (1, 0), (2, 1), (3, 1), (5, 1), (6, 1), (0, u16::MAX)]
            {
                assert_eq!(
                    Request::parse(abi, &indirect(of, segments)).ask,
                    Ask::Bad,
                    "{of} {segments}"
                );
            }
        }
    }

    #[test]
    fn invalid_requests_are_recognised() {
        let ask = |operation, segments| {
            Request::parse(Abi::X86_64, &entry(&[(0, &[operation, segments])])).ask
        };
        assert_eq!([ask(0, 0), ask(1, 0), ask(0, 12), ask(1, 255), ask(3, 12)], [Ask::Bad; 5]);
        assert_eq!([ask(3, 0), ask(3, 1), ask(2, 0)], [Ask::Flush, Ask::Flush, Ask::Barrier]);
        assert_eq!([ask(4, 0), ask(7, 1), ask(255, 1)], [Ask::Unknown; 3]);
        let far = entry(&[(0, &[0, 1]), (16, &u64::MAX.to_le_bytes())]);
        assert_eq!(Request::parse(Abi::X86_64, &far).offset, u64::MAX);
        for (first, last) in [(0, 8), (3, 2), (8, 8), (0, 255), (255, 0)] {
            assert_eq!(Segment { reference: 0, first, last }.range(), None);
        }
    }
}
