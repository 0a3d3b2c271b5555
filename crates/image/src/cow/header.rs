//! Header of a COW file: its four layouts, and where bitmap and data lie.
//!
//! In: the first bytes of a file. Out: a [`Header`] with all fields checked, or an error that names
//! the field and its offset. In the other direction: the bytes of a `Header`, for files that are
//! created or get another backing file.
//!
//! | layout   | name    | mtime | size | sector | align | format | length | byte order   |
//! |----------|---------|-------|------|--------|-------|--------|--------|--------------|
//! | 1        | 8+256   | 264   | 268  | 276    |       |        | 280    | the writer's |
//! | 2        | 8+4096  | 4104  | 4108 | 4116   |       |        | 4120   | big-endian   |
//! | 3        | 32+4096 | 8     | 12   | 20     | 24    | 28     | 4128   | big-endian   |
//! | 3 padded | 36+4096 | 8     | 16   | 24     | 28    | 32     | 4136   | big-endian   |
//!
//! `name` is the backing file's name; a field is given as offset, or as offset+length, in bytes.
//!
//! All begin with the magic number and the version. The padded layout was written by 64-bit
//! programs until 2005; it is recognised by the four zero bytes where version 3 has the name. The
//! specification is the kernel's `arch/um/drivers/cow_user.c`.

use crate::SECTOR;
use crate::error::ImageError;

const MAGIC: u32 = 0x4f4f_4f4d;

/// Size of the longest header, in bytes.
pub(super) const HEADER_MAX: usize = 4136;

/// Length in bytes of the mark of a journal.
pub(super) const MARK_LEN: usize = 40;

/// Name of the structure in errors.
pub(super) const HEADER: &str = "cow header";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderLayout {
    /// Version 1. Its numbers are in the native byte order of the program that wrote the file. The
    /// kernel reads them in its own byte order.
    One {
        little: bool,
    },
    Two,
    Three,
    ThreePadded,
}

/// Offsets of the fields in bytes.
struct Fields {
    name: usize,
    name_len: usize,
    mtime: usize,
    size: usize,
    sector: usize,
    /// Offset of the alignment; the format field follows it.
    alignment: Option<usize>,
    len: usize,
}

impl HeaderLayout {
    fn version(self) -> u32 {
        match self {
            HeaderLayout::One { .. } => 1,
            HeaderLayout::Two => 2,
            HeaderLayout::Three | HeaderLayout::ThreePadded => 3,
        }
    }

    fn fields(self) -> Fields {
        match self {
            HeaderLayout::One { .. } => Fields {
                name: 8,
                name_len: 256,
                mtime: 264,
                size: 268,
                sector: 276,
                alignment: None,
                len: 280,
            },
            HeaderLayout::Two => Fields {
                name: 8,
                name_len: 4096,
                mtime: 4104,
                size: 4108,
                sector: 4116,
                alignment: None,
                len: 4120,
            },
            HeaderLayout::Three => Fields {
                name: 32,
                name_len: 4096,
                mtime: 8,
                size: 12,
                sector: 20,
                alignment: Some(24),
                len: 4128,
            },
            HeaderLayout::ThreePadded => Fields {
                name: 36,
                name_len: 4096,
                mtime: 8,
                size: 16,
                sector: 24,
                alignment: Some(28),
                len: 4136,
            },
        }
    }

    fn little(self) -> bool {
        self == HeaderLayout::One { little: true }
    }

    /// Returns the layout of a file that begins with `bytes`.
    fn of(bytes: &[u8]) -> Result<Self, ImageError> {
        let too_short =
            || ImageError::invalid(HEADER, 0, format!("the file ends after {} bytes", bytes.len()));
        let (Some(magic), Some(version)) = (number(bytes, 0, false), number(bytes, 4, false))
        else {
            return Err(too_short());
        };
        let version = match magic {
            MAGIC => version,
            // Version 1 was written in native byte order. The kernel accepts that for versions 2
            // and 3 too.
            _ if magic == MAGIC.swap_bytes() => version.swap_bytes(),
            _ => {
                return Err(ImageError::invalid(
                    HEADER,
                    0,
                    "it does not begin with the magic number OOOM",
                ));
            }
        };
        let layout = match version {
            // The kernel uses its own byte order for version 1, whatever that of the magic number
            // is. The sector size shows which order the fields have.
            1 if number(bytes, 276, true) == Some(SECTOR as u32) => {
                HeaderLayout::One { little: true }
            }
            1 => HeaderLayout::One { little: false },
            2 => HeaderLayout::Two,
            3 if bytes.get(32..36) == Some(&[0; 4]) => HeaderLayout::ThreePadded,
            3 => HeaderLayout::Three,
            other => {
                let what = format!("version {other} is not known: supported are 1 to 3");
                return Err(ImageError {
                    offset: Some(4),
                    ..ImageError::unsupported(HEADER, what)
                });
            }
        };
        if bytes.len() < layout.fields().len { Err(too_short()) } else { Ok(layout) }
    }
}

fn number(bytes: &[u8], at: usize, little: bool) -> Option<u32> {
    let field = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(if little { u32::from_le_bytes(field) } else { u32::from_be_bytes(field) })
}

/// Contents of a COW file's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    layout: HeaderLayout,
    /// Name of the backing file as stored: usually an absolute path.
    pub backing: String,
    /// Size in bytes and mtime in seconds of the backing file when the COW file was made.
    pub backing_size: u64,
    pub backing_mtime: u32,
    pub alignment: u32,
    pub bitmap_offset: u64,
    /// Size of the bitmap in bytes: one bit a sector, lowest bit of a byte first.
    pub bitmap_len: u64,
    pub data_offset: u64,
}

/// Backing file, as a new header stores it.
#[derive(Clone, Copy, Debug)]
pub struct Backing<'a> {
    pub name: &'a str,
    pub size: u64,
    /// Seconds since 1970, as `stat` returns them; the header stores the low 32 bits.
    pub mtime: i64,
}

impl Header {
    /// Decodes and checks a header.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ImageError> {
        let layout = HeaderLayout::of(bytes)?;
        let fields = layout.fields();
        let little = layout.little();
        let at = |offset: usize| number(bytes, offset, little).unwrap_or_default();
        let (first, second) = (u64::from(at(fields.size)), u64::from(at(fields.size + 4)));
        let size = if little { second << 32 | first } else { first << 32 | second };
        let wrong =
            |offset: usize, what: String| Err(ImageError::invalid(HEADER, offset as u64, what));
        if u64::from(at(fields.sector)) != SECTOR {
            let what = format!(
                "sectors of {} bytes: only {SECTOR} bytes are supported",
                at(fields.sector)
            );
            return wrong(fields.sector, what);
        }
        let alignment = fields.alignment.map_or(SECTOR as u32, at);
        if let Some(offset) = fields.alignment {
            if alignment == 0 {
                return wrong(offset, "the alignment is 0".into());
            }
            let format = at(offset + 4);
            if format != 0 {
                let what = format!("format {format} is not known: only 0 (bitmap) is supported");
                return Err(ImageError {
                    offset: Some(offset as u64 + 4),
                    ..ImageError::unsupported(HEADER, what)
                });
            }
        }
        let name = bytes[fields.name..fields.name + fields.name_len]
            .split(|&b| b == 0)
            .next()
            .unwrap_or_default();
        if name.is_empty() || name.len() == fields.name_len {
            return wrong(fields.name, "the backing file's name is empty, or has no end".into());
        }
        let Ok(name) = std::str::from_utf8(name) else {
            return wrong(fields.name, "the backing file's name is not UTF-8".into());
        };
        Self::lay_out(layout, name, size, at(fields.mtime), alignment)
    }

    /// Returns the header of a new file.
    pub fn new(version: u32, alignment: u32, backing: &Backing<'_>) -> Result<Self, ImageError> {
        let layout = match version {
            1 => HeaderLayout::One { little: true },
            2 => HeaderLayout::Two,
            3 => HeaderLayout::Three,
            other => {
                return Err(ImageError::refused(
                    HEADER,
                    format!("there is no version {other}: 1, 2 or 3"),
                ));
            }
        };
        if alignment == 0 || (version < 3 && u64::from(alignment) != SECTOR) {
            let what = format!(
                "an alignment of {alignment} bytes is not allowed: at least 1, and {SECTOR} in \
                 versions 1, 2"
            );
            return Err(ImageError::refused(HEADER, what));
        }
        Self::check_name(layout, backing.name)?;
        let header =
            Self::lay_out(layout, backing.name, backing.size, backing.mtime as u32, alignment)?;
        if header.unrecorded() > 0 {
            let what = "in versions 1 and 2 the backing file's size must be a multiple of 4096: \
                use version 3";
            return Err(ImageError::refused(HEADER, what));
        }
        Ok(header)
    }

    /// Returns where the mark of a journal lies: at the end of the name's field, in one sector, so
    /// that a death of the process leaves the old mark or the new one. `None`: the name leaves no
    /// room.
    pub(super) fn mark_offset(&self) -> Option<u64> {
        let Fields { name, name_len, .. } = self.layout.fields();
        let (sector, field_end) = (SECTOR as usize, name + name_len);
        let crosses = field_end % sector > 0 && field_end % sector < MARK_LEN;
        let end = if crosses { field_end / sector * sector } else { field_end };
        let at = end - MARK_LEN;
        // A zero byte ends the name.
        (name + self.backing.len() < at).then_some(at as u64)
    }

    /// Returns the header with another backing file of the same number of sectors.
    pub(super) fn over(&self, backing: &Backing<'_>) -> Result<Self, ImageError> {
        Self::check_name(self.layout, backing.name)?;
        let header = Self::lay_out(
            self.layout,
            backing.name,
            backing.size,
            backing.mtime as u32,
            self.alignment,
        )?;
        if header.sectors() != self.sectors() {
            let what = format!(
                "the backing file {} has {} bytes; it must have as many sectors as before, {}",
                backing.name,
                backing.size,
                self.sectors()
            );
            return Err(ImageError::refused(HEADER, what));
        }
        Ok(header)
    }

    fn check_name(layout: HeaderLayout, name: &str) -> Result<(), ImageError> {
        let longest = layout.fields().name_len - 1;
        if name.is_empty() || name.len() > longest || name.contains('\0') {
            let what = format!(
                "a backing file's name has 1 to {longest} bytes, none of them zero: {name:?}"
            );
            return Err(ImageError::refused(HEADER, what));
        }
        Ok(())
    }

    /// Computes where bitmap and data lie, as the kernel does. Refuses values with which the
    /// kernel's computation would overflow.
    fn lay_out(
        layout: HeaderLayout,
        name: &str,
        size: u64,
        mtime: u32,
        alignment: u32,
    ) -> Result<Self, ImageError> {
        let fields = layout.fields();
        let too_large = || {
            let what = format!(
                "{size} bytes with an alignment of {alignment}: the kernel's offsets end at 2 GiB"
            );
            ImageError::invalid(HEADER, fields.size as u64, what)
        };
        // Bounds the sums below: none of them overflows.
        if size > i64::MAX as u64 - (1 << 33) {
            return Err(too_large());
        }
        let (header_len, align) = (fields.len as u64, u64::from(alignment));
        let (bitmap_offset, bitmap_len, data_offset) = if layout.version() < 3 {
            // The kernel rounds down: up to 7 sectors at the end may have no bit.
            let len = (size + SECTOR - 1) / (8 * SECTOR);
            (header_len, len, (header_len + len).next_multiple_of(SECTOR))
        } else {
            let (offset, len) =
                (header_len.next_multiple_of(align), size.div_ceil(SECTOR).div_ceil(8));
            (offset, len, (offset + len).next_multiple_of(align))
        };
        if data_offset > i32::MAX as u64 {
            return Err(too_large());
        }
        Ok(Header {
            layout,
            backing: name.into(),
            backing_size: size,
            backing_mtime: mtime,
            alignment,
            bitmap_offset,
            bitmap_len,
            data_offset,
        })
    }

    /// Returns the version: 1, 2 or 3.
    pub fn version(&self) -> u32 {
        self.layout.version()
    }

    /// Returns true for version 3 as 64-bit programs wrote it until 2005.
    pub fn is_padded(&self) -> bool {
        self.layout == HeaderLayout::ThreePadded
    }

    /// Number of sectors of the guest's disk; a partial last sector counts.
    pub fn sectors(&self) -> u64 {
        self.backing_size.div_ceil(SECTOR)
    }

    /// Number of sectors at the end without a bit, because versions 1 and 2 round down. They always
    /// read from the backing file.
    pub fn unrecorded(&self) -> u64 {
        self.sectors().saturating_sub(self.bitmap_len * 8)
    }

    /// Minimum length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.data_offset + self.backing_size
    }

    /// Returns the header's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (fields, little) = (self.layout.fields(), self.layout.little());
        let mut bytes = vec![0; fields.len];
        let mut put = |at: usize, n: u32| {
            let field = if little { n.to_le_bytes() } else { n.to_be_bytes() };
            bytes[at..at + 4].copy_from_slice(&field);
        };
        put(0, MAGIC);
        put(4, self.version());
        put(fields.mtime, self.backing_mtime);
        let (high, low) = ((self.backing_size >> 32) as u32, self.backing_size as u32);
        put(fields.size, if little { low } else { high });
        put(fields.size + 4, if little { high } else { low });
        put(fields.sector, SECTOR as u32);
        if let Some(at) = fields.alignment {
            put(at, self.alignment);
        }
        bytes[fields.name..][..self.backing.len()].copy_from_slice(self.backing.as_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKING: Backing<'static> =
        Backing { name: "/base/root.img", size: 10 << 20, mtime: 0x6b01_5dcb };

    fn padded(alignment: u32) -> Header {
        Header::lay_out(
            HeaderLayout::ThreePadded,
            BACKING.name,
            BACKING.size,
            BACKING.mtime as u32,
            alignment,
        )
        .unwrap()
    }

    #[test]
    fn the_mark_of_a_journal_is_in_one_sector() {
        for (version, alignment) in [(1, 512), (2, 512), (3, 4096), (3, 1)] {
            let header = Header::new(version, alignment, &BACKING).unwrap();
            let Fields { name, name_len, .. } = header.layout.fields();
            let at = header.mark_offset().unwrap();
            let end = at + MARK_LEN as u64;
            assert_eq!(at / SECTOR, (end - 1) / SECTOR, "version {version}");
            assert!(at > (name + BACKING.name.len()) as u64 && end <= (name + name_len) as u64);
            // A name of this length leaves no room for the zero byte that ends it.
            let long = "n".repeat(at as usize - name);
            let backing = Backing { name: &long, ..BACKING };
            assert_eq!(Header::new(version, alignment, &backing).unwrap().mark_offset(), None);
        }
    }

    #[test]
    fn encoded_headers_decode_to_the_same_fields() {
        let one = Header::new(1, 512, &BACKING).unwrap();
        let big = Header { layout: HeaderLayout::One { little: false }, ..one.clone() };
        let two = Header::new(2, 512, &BACKING).unwrap();
        let all = [
            one,
            big,
            two,
            Header::new(3, 4096, &BACKING).unwrap(),
            Header::new(3, 1, &BACKING).unwrap(),
        ];
        for header in all.into_iter().chain([padded(4096)]) {
            let mut bytes = header.encode();
            assert_eq!(Header::decode(&bytes).unwrap(), header);
            bytes.resize(HEADER_MAX, 0xee);
            assert_eq!(
                Header::decode(&bytes).unwrap(),
                header,
                "bytes behind the header are ignored"
            );
        }
    }

    #[test]
    fn bitmap_and_data_offsets_match_the_kernel() {
        let places = |h: &Header| (h.bitmap_offset, h.bitmap_len, h.data_offset);
        assert_eq!(places(&Header::new(1, 512, &BACKING).unwrap()), (280, 2560, 3072));
        assert_eq!(places(&Header::new(2, 512, &BACKING).unwrap()), (4120, 2560, 7168));
        assert_eq!(places(&Header::new(3, 4096, &BACKING).unwrap()), (8192, 2560, 12288));
        assert_eq!(places(&Header::new(3, 1, &BACKING).unwrap()), (4128, 2560, 6688));
        assert_eq!(places(&Header::new(3, 3000, &BACKING).unwrap()), (6000, 2560, 9000));
        assert_eq!(places(&padded(4)), (4136, 2560, 6696));
        // A partial sector has a bit; in versions 1 and 2 the last bits may be missing.
        let odd = Backing { size: 9 * 512 + 1, ..BACKING };
        assert_eq!(places(&Header::new(3, 512, &odd).unwrap()), (4608, 2, 5120));
        assert_eq!(Header::new(3, 512, &odd).unwrap().sectors(), 10);
        let old = Header::lay_out(HeaderLayout::Two, "x", odd.size, 0, 512).unwrap();
        assert_eq!((places(&old), old.unrecorded()), ((4120, 1, 4608), 2));
        assert!(Header::new(2, 512, &odd).unwrap_err().to_string().contains("multiple of 4096"));
    }

    #[test]
    fn errors_name_the_wrong_field_and_its_offset() {
        let good = Header::new(3, 4096, &BACKING).unwrap().encode();
        let with = |at: usize, bytes: &[u8]| {
            let mut all = good.clone();
            all[at..at + bytes.len()].copy_from_slice(bytes);
            Header::decode(&all).unwrap_err().to_string()
        };
        assert_eq!(
            with(0, b"QFI"),
            "cow header at offset 0: it does not begin with the magic number OOOM"
        );
        assert_eq!(
            with(4, &[0, 0, 0, 9]),
            "cow header at offset 4: version 9 is not known: supported are 1 to 3"
        );
        assert_eq!(
            with(20, &[0, 0, 0x10, 0]),
            "cow header at offset 20: sectors of 4096 bytes: only 512 bytes are supported"
        );
        assert_eq!(with(24, &[0; 4]), "cow header at offset 24: the alignment is 0");
        assert_eq!(
            with(28, &[0, 0, 0, 1]),
            "cow header at offset 28: format 1 is not known: only 0 (bitmap) is supported"
        );
        assert!(
            with(12, &[0xff; 8]).starts_with("cow header at offset 12: 18446744073709551615 bytes")
        );
        assert!(with(12, &[0, 0, 8]).ends_with("the kernel's offsets end at 2 GiB"));
        assert!(with(24, &[0xff; 4]).ends_with("the kernel's offsets end at 2 GiB"));
        assert!(with(32, &[0xff; 4096]).contains("has no end"));
        assert!(with(32, &[0xff; 4]).contains("not UTF-8"));
        // Four zero bytes at the name select the padded layout.
        assert_eq!(with(32, &[0; 4]), "cow header at offset 0: the file ends after 4128 bytes");
        for len in [0, 7, 8, 279, 4127] {
            let error = Header::decode(&good[..len]).unwrap_err().to_string();
            assert_eq!(error, format!("cow header at offset 0: the file ends after {len} bytes"));
        }
    }

    #[test]
    fn another_backing_file_must_have_the_same_number_of_sectors() {
        let header = Header::new(3, 4096, &BACKING).unwrap();
        let over = |size| header.over(&Backing { name: "other.img", size, mtime: 5 });
        let other = over(BACKING.size - 100).unwrap();
        assert_eq!((other.backing.as_str(), other.backing_mtime), ("other.img", 5));
        assert_eq!(
            (other.bitmap_offset, other.data_offset),
            (header.bitmap_offset, header.data_offset)
        );
        assert!(
            over(BACKING.size - 512)
                .unwrap_err()
                .to_string()
                .contains("as many sectors as before, 20480")
        );
        let long = Backing { name: &"n".repeat(4096), ..BACKING };
        assert!(header.over(&long).unwrap_err().to_string().contains("1 to 4095 bytes"));
    }
}
