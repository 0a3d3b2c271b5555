//! Parses descriptor chains into requests (virtio 1.2, section 5.2.6).
//!
//! In: a chain's descriptors, already copied. Out: the request with its segments. Headers and
//! ranges are copied out of guest memory once, and the parser checks and uses only the copy.
//! Header, data and status may share descriptors.

use std::rc::Rc;

use blockyard_disk::{Failure, Op, Status};
use blockyard_image::SECTOR;
use blockyard_ring::{GuestMemory, Segments};

use super::config::{DISCARD_SECTORS, DISCARD_SEGMENTS, REQUEST_MAX};
use super::virtqueue::{Desc, RingError};

const HEADER: u64 = 16;
const ID_LEN: u64 = 20;
const RANGE: u64 = 16;
const RANGE_UNMAP: u32 = 1;
/// Maximum number of segments of one kernel operation (IOV_MAX).
const MAX_SEGMENTS: usize = 1024;

pub const S_OK: u8 = 0;
pub const S_IOERR: u8 = 1;
pub const S_UNSUPP: u8 = 2;

/// The operation that a chain requests.
#[derive(Debug)]
pub enum Action {
    /// One request for `len` bytes at `offset`, both in bytes.
    One { op: Op, offset: u64, len: u64 },
    /// Several ranges with one status. Each range is its offset and its length in bytes.
    Ranges { op: Op, ranges: Vec<(u64, u64)> },
    /// A chain that is answered at once (GET_ID, or an error). `op`: the refused operation, if the
    /// chain requests one.
    Now { status: Status, written: u32, op: Option<Op> },
}

impl Action {
    /// Returns the number of requests for the disk, or 1 if the chain is answered at once.
    #[inline]
    pub fn requests(&self) -> u32 {
        match self {
            Action::Ranges { ranges, .. } => ranges.len() as u32,
            Action::One { .. } | Action::Now { .. } => 1,
        }
    }
}

/// A parsed chain.
#[derive(Debug)]
pub struct Parsed {
    pub action: Action,
    /// Guest address of the status byte.
    pub status: u64,
}

/// Properties of the device that the parser needs.
#[derive(Clone, Copy)]
pub struct ParseContext<'a> {
    pub memory: &'a Rc<GuestMemory>,
    pub serial: &'a str,
    /// Writes must be durable before their answer, because the guest sees no write cache.
    pub fua: bool,
}

/// Parses a chain. `segments` is reset, and receives the data of reads and writes. Returns an error
/// if the chain cannot be answered, for example without a status byte.
#[inline]
pub fn parse(
    head: u16,
    descs: &[Desc],
    context: ParseContext<'_>,
    segments: &mut Segments,
) -> Result<Parsed, RingError> {
    let bad = |what| RingError::Request { head, what };
    let split = descs.partition_point(|d| !d.writable);
    let (readable, writable) = descs.split_at(split);
    let total = |descs: &[Desc]| descs.iter().map(|d| u64::from(d.len)).sum::<u64>();
    let (out_len, in_len) = (total(readable), total(writable));
    if out_len < HEADER {
        return Err(bad("it has no room for the request header of 16 bytes"));
    }
    let Some(last) = writable.iter().rfind(|d| d.len > 0) else {
        return Err(bad("it has no writable byte for the status"));
    };
    let status = last
        .addr
        .checked_add(u64::from(last.len) - 1)
        .ok_or(bad("its status byte is beyond 64 bits"))?;
    context.memory.slice(status, 1, 1)?;
    let mut header = [0; HEADER as usize];
    segments.reset(context.memory);
    gather(segments, readable, 0, HEADER)?;
    segments.copy_out(0, &mut header);
    segments.reset(context.memory);
    let (kind, sector) = (u32_at(&header, 0), u64_at(&header, 8));
    let (data_out, data_in) = (out_len - HEADER, in_len - 1);
    let action = match kind {
        // Data in the wrong direction is an error, because the device could only ignore it.
        0 if data_out > 0 => Err(Failure::Io),
        1 if data_in > 0 => Err(Failure::Io),
        0 => transfer(Op::Read, sector, writable, (0, data_in), segments),
        1 => {
            transfer(Op::Write { fua: context.fua }, sector, readable, (HEADER, data_out), segments)
        }
        4 => Ok(Action::One { op: Op::Flush, offset: 0, len: 0 }),
        8 => identify(context.serial, writable, data_in, segments),
        11 => ranges(false, context.fua, readable, data_out, segments),
        13 => ranges(true, context.fua, readable, data_out, segments),
        _ => Err(Failure::Unsupported),
    };
    // Data outside guest memory, or a wrong length, makes only this request fail. The ring stays
    // usable.
    let action = action.unwrap_or_else(|failure| {
        let op = match kind {
            0 => Some(Op::Read),
            1 => Some(Op::Write { fua: context.fua }),
            11 => Some(Op::Discard),
            13 => Some(Op::WriteZeroes { unmap: false, fua: context.fua, fast: false }),
            _ => None,
        };
        Action::Now { status: Err(failure), written: 1, op }
    });
    Ok(Parsed { action, status })
}

/// Returns the virtio status byte for the disk's status.
pub fn wire_status(status: Status) -> u8 {
    match status {
        Ok(()) => S_OK,
        Err(Failure::Unsupported) => S_UNSUPP,
        Err(_) => S_IOERR,
    }
}

#[inline]
fn transfer(
    op: Op,
    sector: u64,
    descs: &[Desc],
    (skip, len): (u64, u64),
    segments: &mut Segments,
) -> Result<Action, Failure> {
    if !len.is_multiple_of(SECTOR) || len > REQUEST_MAX {
        return Err(Failure::Io);
    }
    let offset = sector.checked_mul(SECTOR).ok_or(Failure::OutOfRange)?;
    gather(segments, descs, skip, len).map_err(|_| Failure::Io)?;
    Ok(Action::One { op, offset, len })
}

fn identify(
    serial: &str,
    writable: &[Desc],
    data_in: u64,
    segments: &mut Segments,
) -> Result<Action, Failure> {
    let len = data_in.min(ID_LEN);
    gather(segments, writable, 0, len).map_err(|_| Failure::Io)?;
    let mut id = [0; ID_LEN as usize];
    let serial = &serial.as_bytes()[..serial.len().min(id.len())];
    id[..serial.len()].copy_from_slice(serial);
    segments.copy_in(0, &id[..len as usize]);
    Ok(Action::Now { status: Ok(()), written: len as u32 + 1, op: None })
}

fn ranges(
    zeroes: bool,
    fua: bool,
    readable: &[Desc],
    data: u64,
    segments: &mut Segments,
) -> Result<Action, Failure> {
    let count = data / RANGE;
    if data == 0 || !data.is_multiple_of(RANGE) || count > u64::from(DISCARD_SEGMENTS) {
        return Err(Failure::Io);
    }
    gather(segments, readable, HEADER, data).map_err(|_| Failure::Io)?;
    let mut ranges = Vec::with_capacity(count as usize);
    let mut unmap = true;
    for index in 0..count {
        let mut range = [0; RANGE as usize];
        segments.copy_out((index * RANGE) as usize, &mut range);
        let (sector, sectors, flags) = (u64_at(&range, 0), u32_at(&range, 8), u32_at(&range, 12));
        // 5.2.6.2: other flags are unsupported, and unmap in a discard is too.
        if flags & !RANGE_UNMAP != 0 || (!zeroes && flags != 0) {
            return Err(Failure::Unsupported);
        }
        if sectors > DISCARD_SECTORS {
            return Err(Failure::Io);
        }
        unmap &= flags & RANGE_UNMAP != 0;
        ranges.push((
            sector.checked_mul(SECTOR).ok_or(Failure::OutOfRange)?,
            u64::from(sectors) * SECTOR,
        ));
    }
    segments.release();
    let op = if zeroes { Op::WriteZeroes { unmap, fua, fast: false } } else { Op::Discard };
    Ok(match ranges[..] {
        [(offset, len)] => Action::One { op, offset, len },
        _ => Action::Ranges { op, ranges },
    })
}

/// Appends `len` bytes of the descriptors' memory to `segments`, after the first `skip` bytes.
#[inline]
fn gather(
    segments: &mut Segments,
    descs: &[Desc],
    mut skip: u64,
    mut len: u64,
) -> Result<(), RingError> {
    for desc in descs {
        if len == 0 {
            break;
        }
        let here = u64::from(desc.len);
        if skip >= here {
            skip -= here;
            continue;
        }
        let take = (here - skip).min(len);
        let bad = blockyard_ring::MemoryError::OutOfRange { addr: desc.addr, len: here };
        segments.push_guest(desc.addr.checked_add(skip).ok_or(bad)?, take)?;
        // Only a hostile guest uses so many descriptors, or memory regions so small that its data
        // spans so many of them.
        if segments.count() > MAX_SEGMENTS {
            return Err(RingError::Segments(MAX_SEGMENTS));
        }
        skip = 0;
        len -= take;
    }
    Ok(())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_ring::Region;
    use proptest::prelude::*;

    /// Two adjacent regions, a gap, and `bytes` regions of one byte each.
    fn memory(bytes: u64) -> Rc<GuestMemory> {
        let region = |at, len| Region::memfd("test", at, at, len).unwrap().0;
        let mut memory = GuestMemory::default()
            .with(region(0, 0x1000))
            .unwrap()
            .with(region(0x1000, 0x1000))
            .unwrap();
        for at in 0..bytes {
            memory = memory.with(region(0x4000 + at, 1)).unwrap();
        }
        Rc::new(memory)
    }

    fn ask(
        memory: &Rc<GuestMemory>,
        descs: &[Desc],
        segments: &mut Segments,
    ) -> Result<Parsed, RingError> {
        parse(
            0,
            descs,
            ParseContext { memory, serial: "a serial of more than twenty bytes", fua: true },
            segments,
        )
    }

    fn desc(addr: u64, len: u32, writable: bool) -> Desc {
        Desc { addr, len, writable }
    }

    /// The budget of an iteration counts each range.
    #[test]
    fn a_chain_of_ranges_counts_as_many_requests() {
        let memory = memory(0);
        let (header, ranges) = (memory.slice(0, 16, 1).unwrap(), memory.slice(64, 48, 1).unwrap());
        header.copy_in(0, 11u32.to_le_bytes());
        for (at, sector) in [(0, 0u64), (16, 8), (32, 16)] {
            ranges.copy_in(at, sector.to_le_bytes());
            ranges.copy_in(at + 8, 8u32.to_le_bytes());
        }
        let descs = [desc(0, 16, false), desc(64, 48, false), desc(0x1fff, 1, true)];
        let parsed = ask(&memory, &descs, &mut Segments::default()).unwrap();
        assert!(matches!(parsed.action, Action::Ranges { op: Op::Discard, .. }));
        assert_eq!(parsed.action.requests(), 3);
    }

    /// Returns the descriptors of a request with its header at 0, and ranges at 64: sector, number
    /// of sectors, flags. The status is at 0x1fff.
    fn of_ranges(memory: &Rc<GuestMemory>, kind: u32, ranges: &[(u64, u32, u32)]) -> Vec<Desc> {
        memory.slice(0, 16, 1).unwrap().write(0, &u128::from(kind).to_le_bytes());
        for (at, (sector, sectors, flags)) in ranges.iter().enumerate() {
            let range = u128::from(*sector) | u128::from(*sectors) << 64 | u128::from(*flags) << 96;
            memory.slice(64 + 16 * at as u64, 16, 1).unwrap().write(0, &range.to_le_bytes());
        }
        let bytes = 16 * ranges.len() as u32;
        vec![desc(0, 16, false), desc(64, bytes, false), desc(0x1fff, 1, true)]
    }

    #[test]
    fn zeroes_unmap_only_if_each_range_allows_it() {
        let memory = memory(0);
        for (flags, unmap) in [([1, 1], true), ([0, 1], false), ([1, 0], false), ([0, 0], false)] {
            let descs = of_ranges(&memory, 13, &[(0, 8, flags[0]), (8, 8, flags[1])]);
            let parsed = ask(&memory, &descs, &mut Segments::default()).unwrap();
            let op = Op::WriteZeroes { unmap, fua: true, fast: false };
            assert!(
                matches!(parsed.action, Action::Ranges { op: got, .. } if got == op),
                "{flags:?}: {:?}",
                parsed.action
            );
        }
    }

    /// The limits are those of the configuration space.
    #[test]
    fn ranges_have_a_largest_number_and_length() {
        let memory = memory(0);
        let is_io = |ranges: &[(u64, u32, u32)]| {
            let descs = of_ranges(&memory, 11, ranges);
            let parsed = ask(&memory, &descs, &mut Segments::default()).unwrap();
            matches!(parsed.action, Action::Now { status: Err(Failure::Io), .. })
        };
        let most = DISCARD_SEGMENTS as usize;
        assert!(!is_io(&vec![(0, 8, 0); most]) && is_io(&vec![(0, 8, 0); most + 1]));
        assert!(!is_io(&[(0, DISCARD_SECTORS, 0)]) && is_io(&[(0, DISCARD_SECTORS + 1, 0)]));
    }

    /// Virtio 1.2, section 2.7.4: descriptors need not follow the parts of a request.
    #[test]
    fn data_begin_behind_the_header_and_the_status_is_the_last_byte() {
        let memory = memory(0);
        let bytes: Vec<u8> = (0..512).map(|at| at as u8 ^ 0x5a).collect();
        memory.slice(0, 16, 1).unwrap().write(0, &(1u128 | 3 << 64).to_le_bytes());
        memory.slice(16, 100, 1).unwrap().write(0, &bytes[..100]);
        memory.slice(0x400, 412, 1).unwrap().write(0, &bytes[100..]);
        let descs = [
            desc(0, 116, false),
            desc(0x400, 412, false),
            desc(0x1000, 1, true),
            desc(0x1800, 0, true),
        ];
        let mut segments = Segments::default();
        let parsed = ask(&memory, &descs, &mut segments).unwrap();
        let write = Op::Write { fua: true };
        assert!(
            matches!(parsed.action, Action::One { op, offset: 1536, len: 512 } if op == write),
            "{parsed:?}"
        );
        let mut got = vec![0; 512];
        segments.copy_out(0, &mut got);
        assert_eq!((got, parsed.status), (bytes, 0x1000));
        // Of a read, the last of several writable descriptors has the status.
        memory.slice(0, 16, 1).unwrap().write(0, &(3u128 << 64).to_le_bytes());
        let descs = [desc(0, 16, false), desc(0x400, 300, true), desc(0x800, 213, true)];
        let parsed = ask(&memory, &descs, &mut segments).unwrap();
        assert!(matches!(parsed.action, Action::One { op: Op::Read, len: 512, .. }), "{parsed:?}");
        assert_eq!((segments.len(), parsed.status), (512, 0x800 + 212));
    }

    #[test]
    fn data_in_the_wrong_direction_are_an_error() {
        let memory = memory(0);
        for (kind, data) in [(0u32, desc(0x400, 512, false)), (1, desc(0x400, 512, true))] {
            memory.slice(0, 16, 1).unwrap().write(0, &u128::from(kind).to_le_bytes());
            let mut descs = vec![desc(0, 16, false), data, desc(0x1000, 513, true)];
            if kind == 1 {
                descs.insert(1, desc(0x600, 512, false));
            }
            let parsed = ask(&memory, &descs, &mut Segments::default()).unwrap();
            assert!(
                matches!(parsed.action, Action::Now { status: Err(Failure::Io), .. }),
                "{kind}: {parsed:?}"
            );
        }
    }

    /// Virtio 1.2, section 5.2.6.2.
    #[test]
    fn only_zeroes_may_unmap_and_other_flags_are_unsupported() {
        let memory = memory(0);
        let (header, range) = (memory.slice(0, 16, 1).unwrap(), memory.slice(64, 16, 1).unwrap());
        range.copy_in(8, 8u32.to_le_bytes());
        let descs = [desc(0, 16, false), desc(64, 16, false), desc(0x1fff, 1, true)];
        let (discard, zeroes) = (11u32, 13u32);
        let unmaps = |unmap| Some(Op::WriteZeroes { unmap, fua: true, fast: false });
        for (kind, flags, expected) in [
            (discard, 0u32, Some(Op::Discard)),
            (discard, 1, None),
            (zeroes, 0, unmaps(false)),
            (zeroes, 1, unmaps(true)),
            (zeroes, 2, None),
            (zeroes, 3, None),
        ] {
            header.copy_in(0, kind.to_le_bytes());
            range.copy_in(12, flags.to_le_bytes());
            let parsed = ask(&memory, &descs, &mut Segments::default()).unwrap();
            let got = match parsed.action {
                Action::One { op, offset: 0, len: 4096 } => Some(op),
                Action::Now { status: Err(Failure::Unsupported), .. } => None,
                other => panic!("{kind} with flags {flags}: {other:?}"),
            };
            assert_eq!(got, expected, "{kind} with flags {flags}");
        }
    }

    #[test]
    fn a_request_across_many_regions_has_a_bounded_number_of_segments() {
        let memory = memory(500);
        let data = std::iter::repeat_n(desc(0x4000, 500, true), 1000);
        let descs: Vec<_> =
            [desc(0, 16, false)].into_iter().chain(data).chain([desc(0xfff, 1, true)]).collect();
        // 500000 bytes are not a multiple of the sector size, but 500288 bytes are.
        let mut segments = Segments::default();
        let descs = [&descs[..1001], &[desc(0x4000, 288, true)], &descs[1001..]].concat();
        let parsed = ask(&memory, &descs, &mut segments).unwrap();
        assert!(
            matches!(
                parsed.action,
                Action::Now { status: Err(Failure::Io), written: 1, op: Some(Op::Read) }
            ),
            "{parsed:?}"
        );
        assert!(segments.count() <= MAX_SEGMENTS + 500, "{} segments", segments.count());
    }

    #[test]
    fn a_serial_is_cut_to_the_size_of_the_buffer() {
        let memory = memory(0);
        memory.slice(0, 16, 1).unwrap().write(0, &8u128.to_le_bytes());
        for (room, len) in [(0, 0), (5, 5), (20, 20), (30, 20)] {
            let descs = [desc(0, 16, false), desc(0x100, room, true), desc(0x200, 1, true)];
            let parsed = ask(&memory, &descs, &mut Segments::default()).unwrap();
            assert!(
                matches!(
                    parsed.action,
                    Action::Now { status: Ok(()), written, op: None } if written == len + 1
                ),
                "{parsed:?}"
            );
        }
        assert_eq!(&memory.slice(0x100, 21, 1).unwrap().copy_out(0), b"a serial of more tha\0");
    }

    fn descs() -> impl Strategy<Value = Vec<Desc>> {
        let addr = prop_oneof![0..0x2100u64, 0x3f00..0x4040u64, any::<u64>()];
        let len = prop_oneof![0..40u32, Just(512), Just(1024), any::<u32>()];
        let one = (addr, len);
        let some = |most| prop::collection::vec(one.clone(), 0..most);
        (some(6), some(6)).prop_map(|(out, into)| {
            let out = out.into_iter().map(|(addr, len)| desc(addr, len, false));
            out.chain(into.into_iter().map(|(addr, len)| desc(addr, len, true))).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None, ..ProptestConfig::default()
        })]

        /// Whatever a chain contains, the parsed request has valid lengths and lies in guest
        /// memory.
        #[test]
        fn every_chain_is_parsed_or_refused(
            descs in descs(),
            kind in 0..15u32,
            sector in prop_oneof![0..99u64, any::<u64>()],
            tail: [u8; 64],
        ) {
            let memory = memory(8);
            let header = u128::from(kind) | u128::from(sector) << 64;
            for at in [0x10, 0x500, 0x1ff0] {
                memory.slice(at, 16, 1).unwrap().write(0, &header.to_le_bytes());
            }
            memory.slice(0x520, 64, 1).unwrap().write(0, &tail);
            let mut segments = Segments::default();
            for first in [0x10, 0x500, 0xffc] {
                let head = desc(first, 16 + 16 * u32::from(tail[0] % 5), false);
                let descs = [&[head], &descs[..]].concat();
                let Ok(parsed) = ask(&memory, &descs, &mut segments) else { continue };
                prop_assert!(memory.slice(parsed.status, 1, 1).is_ok());
                match parsed.action {
                    Action::One { op: Op::Read | Op::Write { .. }, offset, len } => {
                        prop_assert_eq!(segments.len() as u64, len);
                        prop_assert!(offset % SECTOR == 0 && len % SECTOR == 0);
                        prop_assert!(len <= REQUEST_MAX);
                        let mut bytes = vec![0; len as usize];
                        segments.copy_out(0, &mut bytes);
                    }
                    Action::One { op: Op::Flush, offset, len } => {
                        prop_assert_eq!((offset, len), (0, 0))
                    }
                    Action::One { offset, len, .. } => {
                        prop_assert!(offset % SECTOR == 0 && len <= 1 << 30)
                    }
                    Action::Ranges { ranges, .. } => prop_assert!((2..=64).contains(&ranges.len())),
                    Action::Now { written, .. } => prop_assert!((1..=21).contains(&written)),
                }
            }
        }
    }
}
