//! Big-endian numbers in byte slices; reads and writes of byte vectors.

use std::io;
use std::ops::Range;

use blockyard_ring::Segments;

use crate::raw::Raw;

/// Reads a big-endian number at `at`. Its bytes must lie inside `bytes`. The same holds for the
/// functions below.
pub fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

pub fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

pub fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// Returns the big-endian 64-bit numbers up to the last one that is not 0.
pub fn used_words(bytes: &[u8]) -> &[u8] {
    let used = bytes.chunks_exact(8).rposition(|word| word != [0; 8]).map_or(0, |last| last + 1);
    &bytes[..used * 8]
}

/// Returns the big-endian words of a table, numbered.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    (0..).zip(bytes.chunks_exact(8).map(|word| be64(word, 0)))
}

/// Reads `len` bytes at `offset`; bytes behind the end of the file are zeroes.
pub async fn read(file: &Raw, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    if len > 0 {
        let (segments, result) = file.read(Segments::buffer(len), offset).await;
        result?;
        segments.copy_out(0, &mut bytes);
    }
    Ok(bytes)
}

/// Like [`read`], but returns no bytes for a range that is a hole. A crafted sparse file can name
/// millions of tables that are holes, and to read them would take hours.
pub async fn read_data(file: &Raw, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    match file.data_or_hole(offset, len as u64).await {
        Ok((false, hole)) if hole == len as u64 => Ok(Vec::new()),
        _ => read(file, offset, len).await,
    }
}

/// The hole of a file that was found last. If many tables lie in one hole, only the first one costs
/// calls. After a write to a table, this must not be used for that table again.
#[derive(Default)]
pub struct LastHole(Range<u64>);

impl LastHole {
    /// Returns whether `len` bytes at `offset` are a hole. The search for the hole's end stops at
    /// `file_len`, the end of the file. An error counts as data, because a read reports it.
    pub async fn covers(&mut self, file: &Raw, offset: u64, len: u64, file_len: u64) -> bool {
        let end = offset.saturating_add(len);
        if self.0.start <= offset && end <= self.0.end {
            return true;
        }
        // A server answers a question about a long range with all of its extents. So ask about the
        // rest of the file only behind a hole.
        match file.data_or_hole(offset, len).await {
            Ok((false, hole)) if hole == len => {}
            _ => return false,
        }
        self.0 = offset..end;
        let rest = file_len.saturating_sub(end);
        if rest > 0
            && let Ok((false, more)) = file.data_or_hole(end, rest).await
        {
            self.0.end = end.saturating_add(more);
        }
        true
    }

    /// Like [`read_data`].
    pub async fn read_data(
        &mut self,
        file: &Raw,
        offset: u64,
        len: usize,
        file_len: u64,
    ) -> io::Result<Vec<u8>> {
        match self.covers(file, offset, len as u64, file_len).await {
            true => Ok(Vec::new()),
            false => read(file, offset, len).await,
        }
    }
}

/// Writes bytes at `offset`. Durable after a later flush.
pub async fn write(file: &Raw, offset: u64, bytes: &[u8]) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let buffer = Segments::buffer(bytes.len());
    buffer.copy_in(0, bytes);
    file.write(buffer, offset, false).await.1
}
