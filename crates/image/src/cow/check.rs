//! `info` and `check` of a COW file. Both need the file exclusively, or at least without writers.
//!
//! Invariants: nothing is written unless a repair was requested; memory does not grow with the
//! number of errors.

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use super::bitmap::PAGE;
use super::{BITMAP, Header, read_header_and_len};
use crate::SECTOR;
use crate::error::ImageError;
use crate::raw::Raw;

/// Size of the bitmap pieces that are read, in bytes.
const PIECE: u64 = 64 * PAGE as u64;

/// Result of `info` and `check`.
#[derive(Debug)]
pub struct Report {
    pub header: Header,
    pub file_len: u64,
    /// Number of sectors that the overlay stores.
    pub own_sectors: u64,
    /// Corruptions, at most one of each kind.
    pub corruptions: Vec<ImageError>,
    /// Number of bytes in the file behind the disk's last sector. Nothing refers to them.
    pub leaked: u64,
    /// Corruptions and leaks that were repaired.
    pub repaired: Vec<ImageError>,
}

/// Which kinds of repair a check may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repair {
    /// Whether to cut off bytes that nothing refers to.
    pub leaks: bool,
    /// Whether to make the file openable. Lost data stay lost.
    pub corruptions: bool,
}

/// Reads the header, and counts the sectors that are stored in the file.
pub async fn info(file: &Raw) -> Result<Report, ImageError> {
    check(file, Repair::default()).await
}

/// Checks a COW file, and makes the repairs that `repair` permits.
pub async fn check(file: &Raw, repair: Repair) -> Result<Report, ImageError> {
    let (header, file_len) = read_header_and_len(file).await?;
    let disk_end = header.data_offset + header.sectors() * SECTOR;
    let mut report = Report {
        leaked: file_len.saturating_sub(disk_end),
        header,
        file_len,
        own_sectors: 0,
        corruptions: Vec::new(),
        repaired: Vec::new(),
    };
    let bits = count_bits(file, &report.header, file_len).await?;
    report.own_sectors = bits.own;
    report.judge_bits(file, &bits, repair).await?;
    report.judge_length(file, &bits, repair).await?;
    if repair.leaks && report.leaked > 0 {
        set_len(file, disk_end).await?;
        let what = format!("{} bytes behind the disk's end were cut off", report.leaked);
        report.repaired.push(ImageError::invalid("cow file", disk_end, what));
        (report.leaked, report.file_len) = (0, disk_end);
    }
    if !report.repaired.is_empty() {
        file.flush().await.map_err(|e| ImageError::io("cow file", None, "syncing", e))?;
    }
    Ok(report)
}

impl Report {
    async fn judge_bits(
        &mut self,
        file: &Raw,
        bits: &BitmapCounts,
        repair: Repair,
    ) -> Result<(), ImageError> {
        let Some(first) = bits.first_beyond else { return Ok(()) };
        let (beyond, sectors) = (bits.beyond, self.header.sectors());
        let what = format!("bits set beyond the disk's {sectors} sectors: {beyond}");
        let found = ImageError::invalid(BITMAP, self.header.bitmap_offset + first / 8, what);
        if repair.corruptions {
            clear_spare_bits(file, &self.header).await?;
            self.repaired.push(found);
        } else {
            self.corruptions.push(found);
        }
        Ok(())
    }

    /// Reports a truncated file. The repair extends it with zeroes, so that the remaining sectors
    /// can be used.
    async fn judge_length(
        &mut self,
        file: &Raw,
        bits: &BitmapCounts,
        repair: Repair,
    ) -> Result<(), ImageError> {
        let wanted = self.header.file_len();
        if self.file_len >= wanted {
            return Ok(());
        }
        let what = format!(
            "the file ends after {} bytes, and should have {wanted}: {} sectors of its own are \
             lost",
            self.file_len, bits.lost
        );
        let found = ImageError::invalid("cow data", self.file_len, what);
        if repair.corruptions {
            set_len(file, wanted).await?;
            self.file_len = wanted;
            self.repaired.push(found);
        } else {
            self.corruptions.push(found);
        }
        Ok(())
    }
}

async fn set_len(file: &Raw, len: u64) -> Result<(), ImageError> {
    file.storage()
        .set_len(len)
        .await
        .map_err(|e| ImageError::io("cow file", None, "setting its length", e))
}

#[derive(Default)]
struct BitmapCounts {
    own: u64,
    /// Number of sectors, among those counted in `own`, whose data lie behind the file's end.
    lost: u64,
    /// Bits set beyond the last sector.
    beyond: u64,
    first_beyond: Option<u64>,
}

impl BitmapCounts {
    /// Counts the bits of `bytes`; `first` is the sector of the first bit. Most of a large bitmap
    /// is zeroes: whole zero pieces are skipped by one comparison.
    fn count(&mut self, header: &Header, file_len: u64, first: u64, bytes: &[u8]) {
        const ZEROES: [u8; 512] = [0; 512];
        let held = file_len.saturating_sub(header.data_offset) / SECTOR;
        for (n, piece) in (0..).zip(bytes.chunks(ZEROES.len())) {
            if *piece != ZEROES[..piece.len()] {
                self.count_piece(header, held, first + n * ZEROES.len() as u64 * 8, piece);
            }
        }
    }

    /// Counts the bits of a piece of the bitmap. `held`: number of sectors with data inside the
    /// file.
    fn count_piece(&mut self, header: &Header, held: u64, first: u64, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let sector = first + i as u64 * 8 + bit;
                if sector >= header.sectors() {
                    self.beyond += 1;
                    self.first_beyond.get_or_insert(sector);
                    continue;
                }
                self.own += 1;
                self.lost += u64::from(sector >= held);
            }
        }
    }
}

async fn count_bits(
    file: &Raw,
    header: &Header,
    file_len: u64,
) -> Result<BitmapCounts, ImageError> {
    let mut bits = BitmapCounts::default();
    // Bits behind the file's end read as zeroes.
    let end = header.bitmap_len.min(file_len.saturating_sub(header.bitmap_offset));
    let mut at = 0;
    while at < end {
        let bytes = read_bits(file, header.bitmap_offset + at, (end - at).min(PIECE)).await?;
        bits.count(header, file_len, at * 8, &bytes);
        at += bytes.len() as u64;
    }
    Ok(bits)
}

async fn read_bits(file: &Raw, offset: u64, len: u64) -> Result<Vec<u8>, ImageError> {
    let (segments, result) = file.read(Segments::buffer(len as usize), offset).await;
    result.map_err(|e| ImageError::io(BITMAP, offset, "reading", e))?;
    let mut bytes = vec![0; len as usize];
    segments.copy_out(0, &mut bytes);
    Ok(bytes)
}

/// Returns the offset of the bitmap's last byte and a mask of its bits that describe no sector.
/// Only the last byte can have such bits.
fn spare_bits(header: &Header) -> Option<(u64, u8)> {
    let spare = (header.bitmap_len * 8).checked_sub(header.sectors()).filter(|&spare| spare > 0)?;
    Some((header.bitmap_offset + header.bitmap_len - 1, !(!0u8 >> spare)))
}

/// Refuses a file with bits set beyond the last sector, because the header's size cannot be the
/// size with which the file was made.
pub(super) async fn check_spare_bits(file: &Raw, header: &Header) -> Result<(), ImageError> {
    let Some((last, spare)) = spare_bits(header) else { return Ok(()) };
    if read_bits(file, last, 1).await?[0] & spare == 0 {
        return Ok(());
    }
    let what = format!(
        "bits are set beyond the disk's {} sectors: the file can be read, not written; repair it \
         (blockyard image check --repair all)",
        header.sectors()
    );
    Err(ImageError::invalid(BITMAP, last, what))
}

async fn clear_spare_bits(file: &Raw, header: &Header) -> Result<(), ImageError> {
    let Some((last, spare)) = spare_bits(header) else { return Ok(()) };
    let byte = read_bits(file, last, 1).await?[0] & !spare;
    let (_, result) = file.write(Segments::from_bytes(&[byte]), last, false).await;
    result.map_err(|e| ImageError::io(BITMAP, last, "writing", e))
}
