//! Checks the answers of a map, because a map may be wrong.
//!
//! In: what a map answered. Out: extents that lie in the data files and follow one another, or the
//! reason why the answer is refused.

use std::ops::Range;

use super::map::{Extent, Fill, Place};

/// Most extents of one answer.
pub(super) const MOST_EXTENTS: usize = 65536;

/// Purpose of a question to a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
    Discard,
}

/// What an answer may refer to.
pub(super) struct Bounds<'a> {
    pub(super) granule: u64,
    /// Size of the disk in bytes.
    pub(super) size: u64,
    /// Length in bytes of each data file, and whether it may be written.
    pub(super) files: &'a [(u64, bool)],
}

/// Why an answer is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("it has no extent")]
    Empty,
    #[error("it has more than {MOST_EXTENTS} extents")]
    TooMany,
    #[error("an extent has {0} bytes, which is no multiple of the granule")]
    Length(u64),
    #[error("it goes on behind the end of the disk")]
    Size,
    #[error("there is no data file {0}")]
    NoFile(usize),
    #[error("{len} bytes at {offset} are outside data file {file}, which has {size} bytes")]
    Outside { file: usize, offset: u64, len: u64, size: u64 },
    #[error("offset {offset} of data file {file} is no multiple of {unit}")]
    Unaligned { file: usize, offset: u64, unit: u64 },
    #[error("data file {0} is open for reading only")]
    ReadOnly(usize),
    #[error("it has zeroes or no new place for a write")]
    ZeroForWrite,
    #[error("it has a new place, and the question is not for a write")]
    NewForRead,
    #[error("it goes on behind the range to discard")]
    Behind,
    #[error("two of its extents overlap in data file {0}")]
    Overlap(usize),
}

/// Checks the answer to a question. `unit`: what offsets in files must be multiples of.
pub(super) fn check(
    range: &Range<u64>,
    purpose: Use,
    extents: &[Extent],
    bounds: &Bounds<'_>,
    unit: u64,
) -> Result<(), Refused> {
    if extents.is_empty() {
        return Err(Refused::Empty);
    }
    if extents.len() > MOST_EXTENTS {
        return Err(Refused::TooMany);
    }
    let (mut at, mut written) = (range.start, Vec::new());
    for Extent { len, place } in extents {
        if *len == 0 || !len.is_multiple_of(bounds.granule) {
            return Err(Refused::Length(*len));
        }
        at = at.checked_add(*len).filter(|end| *end <= bounds.size).ok_or(Refused::Size)?;
        let inside = |file: usize, offset: u64, write: bool| {
            let (size, writable) = *bounds.files.get(file).ok_or(Refused::NoFile(file))?;
            if offset.checked_add(*len).is_none_or(|end| end > size) {
                return Err(Refused::Outside { file, offset, len: *len, size });
            }
            if !offset.is_multiple_of(unit) {
                return Err(Refused::Unaligned { file, offset, unit });
            }
            if write && !writable { Err(Refused::ReadOnly(file)) } else { Ok(()) }
        };
        match *place {
            // The map has freed more than the range.
            _ if purpose == Use::Discard && at > range.end => return Err(Refused::Behind),
            Place::Zero if purpose == Use::Write => return Err(Refused::ZeroForWrite),
            Place::New { .. } if purpose != Use::Write => return Err(Refused::NewForRead),
            Place::Zero => {}
            Place::At { file, offset } => inside(file, offset, purpose != Use::Read)?,
            Place::New { file, offset, fill } => {
                inside(file, offset, true)?;
                if let Fill::From { file, offset } = fill {
                    inside(file, offset, false)?;
                }
            }
        }
        if let (true, Place::At { file, offset } | Place::New { file, offset, .. }) =
            (purpose != Use::Read, *place)
        {
            written.push((file, offset, offset + len));
        }
    }
    written.sort_unstable();
    match written.windows(2).find(|two| two[0].0 == two[1].0 && two[0].2 > two[1].1) {
        Some(two) => Err(Refused::Overlap(two[0].0)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(write: bool, extents: &[Extent]) -> Result<(), Refused> {
        asked(if write { Use::Write } else { Use::Read }, extents)
    }

    fn asked(purpose: Use, extents: &[Extent]) -> Result<(), Refused> {
        let files = [(1 << 20, false), (1 << 20, true)];
        let bounds = Bounds { granule: 4096, size: 1 << 20, files: &files };
        check(&(8192..16384), purpose, extents, &bounds, 512)
    }

    fn at(file: usize, offset: u64, len: u64) -> Extent {
        Extent { len, place: Place::At { file, offset } }
    }

    #[test]
    fn only_answers_inside_the_files_are_accepted() {
        assert_eq!(checked(false, &[at(0, 0, 4096), at(1, 512, 8192)]), Ok(()));
        assert_eq!(checked(true, &[at(1, 0, 4096), at(1, 4096, 4096)]), Ok(()));
        assert_eq!(checked(false, &[]), Err(Refused::Empty));
        assert_eq!(checked(false, &[at(0, 0, 512)]), Err(Refused::Length(512)));
        assert_eq!(checked(false, &[at(0, 0, 0)]), Err(Refused::Length(0)));
        assert_eq!(checked(false, &[at(2, 0, 4096)]), Err(Refused::NoFile(2)));
        assert_eq!(checked(true, &[at(0, 0, 4096)]), Err(Refused::ReadOnly(0)));
        assert_eq!(checked(false, &[at(0, 0, 1 << 20)]), Err(Refused::Size));
        assert!(matches!(checked(false, &[at(0, 1 << 20, 4096)]), Err(Refused::Outside { .. })));
        assert!(matches!(checked(false, &[at(0, u64::MAX, 4096)]), Err(Refused::Outside { .. })));
        assert!(matches!(checked(false, &[at(0, 7, 4096)]), Err(Refused::Unaligned { .. })));
        let overlap = [at(1, 0, 8192), at(1, 4096, 4096)];
        assert_eq!(checked(true, &overlap), Err(Refused::Overlap(1)));
        assert_eq!(checked(false, &overlap), Ok(()), "two parts may share blocks that are read");
        let zero = Extent { len: 4096, place: Place::Zero };
        assert_eq!(checked(true, &[zero]), Err(Refused::ZeroForWrite));
        let new = Place::New { file: 1, offset: 0, fill: Fill::From { file: 0, offset: 1 << 20 } };
        let new = Extent { len: 4096, place: new };
        assert_eq!(checked(false, &[new]), Err(Refused::NewForRead));
        assert!(matches!(checked(true, &[new]), Err(Refused::Outside { .. })));
        assert_eq!(asked(Use::Discard, &[zero, at(1, 0, 4096)]), Ok(()));
        assert_eq!(asked(Use::Discard, &[at(0, 0, 4096)]), Err(Refused::ReadOnly(0)));
        assert_eq!(asked(Use::Discard, &[new]), Err(Refused::NewForRead));
        let more = Extent { len: 12288, place: Place::Zero };
        assert_eq!(asked(Use::Discard, &[more]), Err(Refused::Behind));
    }
}
