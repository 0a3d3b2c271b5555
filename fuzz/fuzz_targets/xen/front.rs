//! A front end of the fuzzer's bytes: its domain, grants, ring and requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockyard_export::xen::parts::Abi;
use blockyard_ring::SharedSlice;
use blockyard_ring::xen::machine::{Domain, FrontChannel};

use crate::bytes::Bytes;

/// Pages of the domain: the first two are for the ring, the others for data.
pub const PAGES: usize = 24;
const FIRST_DATA: usize = 2;
const PAGE: usize = 4096;

/// Offsets in the ring's header.
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;
const HEADER: usize = 64;

const READ: u8 = 0;
const DISCARD: u8 = 5;
const INDIRECT: u8 = 6;

pub struct Front {
    pub domain: Arc<Domain>,
    pub abi: Abi,
    pub channel: FrontChannel,
    memory: SharedSlice,
    rings: Vec<u32>,
    references: Vec<u32>,
    entries: u32,
    written: u32,
    /// Nothing but `put` and the back end's answers can have written to the ring.
    tame: bool,
}

impl Front {
    pub fn new(domain: Arc<Domain>, bytes: &mut Bytes<'_>) -> Self {
        let shape = bytes.u8();
        let abi = if shape & 1 == 0 { Abi::X86_64 } else { Abi::X86_32 };
        let mut front = Self::with(domain, abi, 1 + usize::from(shape >> 1 & 1));
        for _ in 0..bytes.u8() % 32 {
            front.grant(bytes);
        }
        front
    }

    /// A front end that keeps to the protocol, with one page of data.
    pub fn good(domain: Arc<Domain>) -> Self {
        let mut front = Self::with(domain, Abi::X86_64, 1);
        front.references.push(front.domain.grant(FIRST_DATA, false));
        front
    }

    fn with(domain: Arc<Domain>, abi: Abi, pages: usize) -> Self {
        let rings = (0..pages).map(|page| domain.grant(page, false)).collect();
        let (memory, channel) = (domain.memory(), domain.channel().unwrap());
        memory.store_u32(REQ_EVENT, 1, Ordering::Relaxed);
        memory.store_u32(RSP_EVENT, 1, Ordering::Relaxed);
        let (entries, references) = (abi.entries(pages), Vec::new());
        Front { domain, abi, channel, memory, rings, references, entries, written: 0, tame: true }
    }

    pub fn rings(&self) -> &[u32] {
        &self.rings
    }

    /// Grants a page: mostly one of data, else one of the ring, or one that the domain does not
    /// have.
    fn grant(&mut self, bytes: &mut Bytes<'_>) {
        let (which, flags) = (usize::from(bytes.u8()), bytes.u8());
        let page = match flags {
            0xff => 1 << 20,
            0xfe => {
                self.tame = false;
                which % FIRST_DATA
            }
            _ => FIRST_DATA + which % (PAGES - FIRST_DATA),
        };
        self.references.push(self.domain.grant(page, flags & 1 == 1));
    }

    fn reference(&mut self, bytes: &mut Bytes<'_>) -> u32 {
        let which = bytes.u8();
        match self.references.get(usize::from(which) % self.references.len().max(1)) {
            Some(reference) if which < 0xf0 => *reference,
            _ => {
                // It may be that of a page of the ring.
                self.tame = false;
                u32::from_le_bytes(bytes.array())
            }
        }
    }

    fn segment(&mut self, bytes: &mut Bytes<'_>) -> [u8; 8] {
        let [a, b, c, d] = self.reference(bytes).to_le_bytes();
        let (first, last) = match bytes.u8() {
            0xff => (bytes.u8(), bytes.u8()),
            both => (both & 7, both >> 3 & 7),
        };
        [a, b, c, d, first, last, 0, 0]
    }

    /// Writes a request, whose number is how many there were before; `publish` shows it.
    pub fn put(&mut self, bytes: &mut Bytes<'_>) {
        let (operation, count) = (bytes.u8(), bytes.u8());
        let (id, sector, rest) = match self.abi {
            Abi::X86_64 => (8, 16, 24),
            Abi::X86_32 => (4, 12, 20),
        };
        let mut entry = [0; 112];
        if operation >= 0xf0 {
            self.tame = false;
            entry = bytes.array();
        } else {
            let operation = operation % 7;
            entry[..2].copy_from_slice(&[operation, count % 13]);
            let place = match bytes.u8() {
                0xff => u64::from_le_bytes(bytes.array()),
                place => u64::from(place) << 3,
            };
            entry[sector..sector + 8].copy_from_slice(&place.to_le_bytes());
            match operation {
                DISCARD => {
                    let sectors = if count == 0xff {
                        u64::from_le_bytes(bytes.array())
                    } else {
                        count.into()
                    };
                    entry[rest..rest + 8].copy_from_slice(&sectors.to_le_bytes());
                }
                INDIRECT => {
                    // The page of its segments may change, or be read from the disk: it may name
                    // pages of the ring.
                    self.tame = false;
                    entry[1..4].copy_from_slice(&[
                        bytes.u8() % 3,
                        count,
                        u8::from(bytes.u8() == 0xff),
                    ]);
                    let table = self.reference(bytes);
                    entry[rest + 4..rest + 8].copy_from_slice(&table.to_le_bytes());
                    let page = FIRST_DATA + usize::from(bytes.u8()) % (PAGES - FIRST_DATA);
                    for at in 0..usize::from(count % 32) {
                        let segment = self.segment(bytes);
                        self.memory.write(page * PAGE + at * 8, &segment);
                    }
                }
                _ => {
                    for at in 0..usize::from(count % 13).min(11) {
                        let segment = self.segment(bytes);
                        entry[rest + at * 8..rest + at * 8 + 8].copy_from_slice(&segment);
                    }
                }
            }
        }
        entry[id..id + 8].copy_from_slice(&u64::from(self.written).to_le_bytes());
        self.write(&entry);
    }

    /// A read of the first page of the disk.
    pub fn put_good(&mut self) {
        let mut entry = [0; 112];
        entry[..2].copy_from_slice(&[READ, 1]);
        entry[24..28].copy_from_slice(&self.references[0].to_le_bytes());
        entry[29] = 7;
        self.write(&entry);
        self.publish();
    }

    fn write(&mut self, entry: &[u8; 112]) {
        // A ring that is full is written to all the same: its answers are lost.
        let in_ring = self.written.wrapping_sub(self.answers());
        self.tame &= in_ring < self.entries;
        self.memory.write(self.place(self.written), &entry[..self.abi.entry()]);
        self.written += 1;
    }

    fn place(&self, index: u32) -> usize {
        HEADER + (index & (self.entries - 1)) as usize * self.abi.entry()
    }

    pub fn publish(&self) {
        self.memory.store_u32(REQ_PROD, self.written, Ordering::SeqCst);
        self.channel.notify();
    }

    /// Changes something while the back end runs.
    pub fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() % 8 {
            0 => {
                let at = usize::from(u16::from_le_bytes(bytes.array()));
                // Mostly in the ring's entries, at times in pages of data.
                let at = if at < 0x8000 { at % (FIRST_DATA * PAGE) } else { at % (PAGES * PAGE) };
                self.tame &= at >= FIRST_DATA * PAGE;
                self.memory.write(at, &[bytes.u8()]);
            }
            1 => {
                self.tame = false;
                let index = match bytes.u8() {
                    0xff => u32::from_le_bytes(bytes.array()),
                    few => self.written.wrapping_add(u32::from(few)).wrapping_sub(16),
                };
                self.memory.store_u32(REQ_PROD, index, Ordering::SeqCst);
                self.channel.notify();
            }
            2 => {
                let reference = self.reference(bytes);
                let _ = self.domain.revoke(reference);
            }
            3 => self.grant(bytes),
            4 => self.memory.store_u32(
                RSP_EVENT,
                u32::from_le_bytes(bytes.array()),
                Ordering::SeqCst,
            ),
            5 | 6 => {
                self.put(bytes);
                self.publish();
            }
            _ => self.channel.notify(),
        }
    }

    /// The bytes that are left fill the pages of data.
    pub fn fill(&self, bytes: &Bytes<'_>) {
        let len = bytes.0.len().min((PAGES - FIRST_DATA) * PAGE);
        self.memory.write(FIRST_DATA * PAGE, &bytes.0[..len]);
    }

    pub fn answers(&self) -> u32 {
        self.memory.load_u32(RSP_PROD, Ordering::Acquire)
    }

    /// Status of the first answer.
    pub fn status(&self) -> i16 {
        i16::from_le_bytes(self.memory.copy_out(HEADER + 10))
    }

    /// The queue has stopped.
    pub fn judge(&self) {
        assert_eq!(self.domain.mapped(), 0, "pages that stay mapped");
        if !self.tame {
            return;
        }
        let answers = self.answers();
        assert!(answers <= self.written, "{answers} answers to {} requests", self.written);
        // Later requests have overwritten older answers.
        let first =
            answers.saturating_sub(self.entries).max(self.written.saturating_sub(self.entries));
        let mut seen = Vec::new();
        for index in first..answers {
            let bytes = self.memory.copy_out::<12>(self.place(index));
            let id = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let status = i16::from_le_bytes([bytes[10], bytes[11]]);
            assert!(
                id < self.written.into() && !seen.contains(&id),
                "answer {index} is for {id}, after {seen:?}"
            );
            assert!((-2..=0).contains(&status), "status {status}");
            seen.push(id);
        }
    }
}
