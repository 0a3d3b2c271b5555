//! Data that proves where and when it was written.
//!
//! In: blocks to write, blocks that were read. Out: contents, or the first error in them. Every
//! block written carries a header (magic, offset, generation, seed, length), filler made from
//! those, and a CRC32C of it all.
//!
//! A block that this run has not written must not change: each later read must find the CRC32C of
//! the first one.
//!
//! What must hold: a block in a write is in no other request, and a block in a read is in no write
//! (`claim`). So a read must always find one known generation.

use anyhow::{Result, bail};

use super::workload::{Operation, RequestKind};

const MAGIC: u64 = u64::from_le_bytes(*b"BlkYdVfy");
/// magic, offset, seed: 8 bytes each; generation, length, CRC: 4 bytes each.
const HEADER: usize = 36;
const CRC: usize = 32;
/// Marks a block with a write in flight. Other values are the number of reads in flight.
const WRITING: u16 = u16::MAX;
/// The run has not read the block.
const UNREAD: u32 = 0;
/// A write of the block has failed. Its contents may be the old or the new ones, or both.
const UNKNOWN: u32 = 1;

pub struct Verifier {
    seed: u64,
    block_size: usize,
    first: u64,
    /// Number of the last write of each block. 0: this run has not written the block.
    generations: Vec<u32>,
    /// Checksum of each block that this run has not written, from its first good read. Or one of
    /// [`UNREAD`] and [`UNKNOWN`].
    unwritten: Vec<u32>,
    busy: Vec<u16>,
    expected: Vec<u8>,
    found: Vec<u8>,
    /// Number of blocks that were compared.
    pub checked: u64,
}

impl Verifier {
    /// Creates the record of `blocks` blocks from block `first` on.
    pub fn new(seed: u64, block_size: usize, first: u64, blocks: u64) -> Self {
        Verifier {
            seed,
            block_size,
            first,
            generations: vec![0; blocks as usize],
            unwritten: vec![UNREAD; blocks as usize],
            busy: vec![0; blocks as usize],
            expected: vec![0; block_size],
            found: vec![0; block_size],
            checked: 0,
        }
    }

    fn at(&self, block: u64) -> usize {
        (block - self.first) as usize
    }

    /// Moves the operation to the next block without a conflicting request, and claims it. There
    /// are more blocks than slots.
    pub fn claim(&mut self, mut operation: Operation) -> Operation {
        if !operation.kind.moves() {
            return operation;
        }
        let write = operation.kind == RequestKind::Write;
        let mut at = self.at(operation.block);
        while self.busy[at] == WRITING || write && self.busy[at] > 0 {
            at = (at + 1) % self.busy.len();
        }
        if write {
            self.busy[at] = WRITING;
            self.generations[at] = self.generations[at].wrapping_add(1).max(1);
        } else {
            self.busy[at] += 1;
        }
        operation.block = self.first + at as u64;
        operation
    }

    /// Ends the claim. After a failed write the contents of the block are unknown.
    pub fn release(&mut self, operation: Operation, ok: bool) {
        if !operation.kind.moves() {
            return;
        }
        let at = self.at(operation.block);
        match operation.kind {
            RequestKind::Flush | RequestKind::Discard => {}
            RequestKind::Read => self.busy[at] -= 1,
            RequestKind::Write => {
                self.busy[at] = 0;
                if !ok {
                    self.generations[at] = 0;
                    self.unwritten[at] = UNKNOWN;
                }
            }
        }
    }

    /// Returns the next block at or after `from` that has known contents: this run has written or
    /// read it.
    pub fn known_from(&self, from: u64) -> Option<u64> {
        let start = self.at(from.max(self.first)).min(self.generations.len());
        let known = |at: &usize| self.generations[*at] != 0 || self.unwritten[*at] > UNKNOWN;
        let found = (start..self.generations.len()).find(known)?;
        Some(self.first + found as u64)
    }

    /// Fills the buffer of a claimed write.
    pub fn contents(&mut self, block: u64) -> &[u8] {
        let generation = self.generations[self.at(block)];
        self.fill(block, generation);
        &self.expected
    }

    fn fill(&mut self, block: u64, generation: u32) {
        let offset = block * self.block_size as u64;
        let bytes = &mut self.expected;
        let mut state = super::workload::Random::new(self.seed ^ offset, generation.into());
        for word in bytes[HEADER..].chunks_mut(8) {
            word.copy_from_slice(&state.word().to_le_bytes()[..word.len()]);
        }
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..16].copy_from_slice(&offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.seed.to_le_bytes());
        bytes[24..28].copy_from_slice(&generation.to_le_bytes());
        bytes[28..32].copy_from_slice(&(self.block_size as u32).to_le_bytes());
        let crc = checksum(bytes);
        bytes[CRC..HEADER].copy_from_slice(&crc.to_le_bytes());
    }

    /// Checks the data of a completed read. `read` copies the data into a buffer.
    pub fn check_read(&mut self, block: u64, read: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut found = std::mem::take(&mut self.found);
        read(&mut found);
        let checked = self.check(block, &found);
        self.found = found;
        checked
    }

    /// Checks that a block has the contents that were written last. A block that this run has not
    /// written must have the contents of its first read.
    pub fn check(&mut self, block: u64, found: &[u8]) -> Result<()> {
        let generation = self.generations[self.at(block)];
        if generation == 0 {
            return self.check_unwritten(block, found);
        }
        self.checked += 1;
        let offset = block * self.block_size as u64;
        let whole = checksum(found) == u32_at(found, CRC);
        let ours = u64_at(found, 0) == MAGIC && u64_at(found, 16) == self.seed;
        if whole && ours && u64_at(found, 8) == offset && u32_at(found, 24) == generation {
            return Ok(());
        }
        self.fill(block, generation);
        let at = self.expected.iter().zip(found).position(|(a, b)| a != b).unwrap_or(0);
        bail!(
            "wrong data at offset {offset}: expected generation {generation}, found {}; the first wrong byte is at {}",
            describe(found, whole, self.seed),
            offset + at as u64
        );
    }

    fn check_unwritten(&mut self, block: u64, found: &[u8]) -> Result<()> {
        let at = self.at(block);
        let crc = crc32c::crc32c(found).max(UNKNOWN + 1);
        match self.unwritten[at] {
            UNKNOWN => {}
            UNREAD => self.unwritten[at] = crc,
            before => {
                self.checked += 1;
                anyhow::ensure!(
                    before == crc,
                    "wrong data at offset {}: this run has not written the block, and its contents have changed since the first read: CRC32C {before:08x}, now {crc:08x}, found {}",
                    block * self.block_size as u64,
                    describe(found, checksum(found) == u32_at(found, CRC), self.seed)
                );
            }
        }
        Ok(())
    }
}

fn describe(found: &[u8], whole: bool, seed: u64) -> String {
    if found.iter().all(|b| *b == 0) {
        return "zeroes".into();
    }
    if u64_at(found, 0) != MAGIC {
        return format!("{:02x?}..., which this program did not write", &found[..16]);
    }
    let (offset, generation) = (u64_at(found, 8), u32_at(found, 24));
    let run = if u64_at(found, 16) == seed { "" } else { " of another run" };
    let state = if whole { "" } else { ", damaged (CRC32C does not match)" };
    format!("generation {generation} of offset {offset}{run}{state}")
}

/// Returns the CRC32C of a block, computed with zeroes in the CRC field.
fn checksum(block: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&block[..CRC]);
    let crc = crc32c::crc32c_append(crc, &[0; HEADER - CRC]);
    crc32c::crc32c_append(crc, &block[HEADER..])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 512;

    fn write(verifier: &mut Verifier, block: u64) -> Vec<u8> {
        let operation = verifier.claim(Operation::one(RequestKind::Write, block));
        assert_eq!(operation.block, block);
        let bytes = verifier.contents(block).to_vec();
        verifier.release(operation, true);
        bytes
    }

    fn verifier() -> Verifier {
        Verifier::new(42, SIZE, 10, 8)
    }

    #[test]
    fn an_unwritten_block_must_stay_as_it_was_read_first() {
        let mut v = verifier();
        v.check(13, &[7; SIZE]).unwrap();
        assert_eq!((v.checked, v.known_from(0)), (0, Some(13)), "read back at the end");
        v.check(13, &[7; SIZE]).unwrap();
        assert_eq!(v.checked, 1);
        let mut bad = [7; SIZE];
        bad[SIZE - 1] ^= 1;
        let error = v.check(13, &bad).unwrap_err().to_string();
        assert!(error.contains("wrong data at offset 6656: this run has not written"), "{error}");
        // After a write the new contents count.
        let bytes = write(&mut v, 13);
        v.check(13, &bytes).unwrap();
        // After a failed write any contents pass.
        let failed = v.claim(Operation::one(RequestKind::Write, 13));
        v.release(failed, false);
        v.check(13, &[7; SIZE]).unwrap();
        v.check(13, &bytes).unwrap();
        assert_eq!((v.checked, v.known_from(0)), (3, None));
    }

    #[test]
    fn what_was_written_passes_and_is_read_back() {
        let mut v = verifier();
        let bytes = write(&mut v, 12);
        v.check(12, &bytes).unwrap();
        assert_eq!(v.checked, 1);
        assert_eq!(
            (v.known_from(0), v.known_from(12), v.known_from(13)),
            (Some(12), Some(12), None)
        );
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let mut v = verifier();
        let bytes = write(&mut v, 12);
        for at in 0..SIZE {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            let error = v.check(12, &bad).unwrap_err().to_string();
            assert!(
                error.contains("offset 6144")
                    && error.contains(&format!("byte is at {}", 6144 + at)),
                "{error}"
            );
        }
    }

    #[test]
    fn stale_misplaced_zeroed_and_foreign_blocks_are_found() {
        let mut v = verifier();
        let old = write(&mut v, 12);
        let new = write(&mut v, 12);
        let other = write(&mut v, 13);
        v.check(12, &new).unwrap();
        let mut fails = |bytes: &[u8], want: &str| {
            let error = v.check(12, bytes).unwrap_err().to_string();
            assert!(error.contains("expected generation 2") && error.contains(want), "{error}");
        };
        fails(&old, "found generation 1 of offset 6144;");
        fails(&other, "found generation 1 of offset 6656;");
        fails(&[0; SIZE], "found zeroes");
        fails(&[1; SIZE], "did not write");
        let mut foreign = Verifier::new(43, SIZE, 10, 8);
        write(&mut foreign, 12);
        fails(&write(&mut foreign, 12), "generation 2 of offset 6144 of another run");
    }

    #[test]
    fn writes_are_alone_and_reads_share() {
        let mut v = verifier();
        let read = |block| Operation::one(RequestKind::Read, block);
        let write = |block| Operation::one(RequestKind::Write, block);
        assert_eq!(v.claim(read(17)).block, 17);
        assert_eq!(v.claim(read(17)).block, 17);
        assert_eq!(v.claim(write(17)).block, 10, "past the end it goes on at the start");
        assert_eq!(v.claim(read(10)).block, 11);
        v.release(write(10), false);
        assert_eq!(v.known_from(0), None, "a failed write leaves nothing to expect");
        assert_eq!(v.claim(write(10)).block, 10);
    }
}
