//! Blocks of 4096 bytes, which a guest writes and reads. It connects for each call.

use std::path::Path;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};

use crate::common::SOON;

/// Bytes of a block.
pub const BLOCK: usize = 4096;

/// Fills a block with a byte.
#[track_caller]
pub fn write(socket: &Path, block: u64, byte: u8) {
    let mut guest = Session::<SplitRing>::start(socket, &Plan::default()).unwrap();
    write_by(&mut guest, block, byte);
}

/// Like [`write`], by a guest that stays connected.
#[track_caller]
pub fn write_by(guest: &mut Session<SplitRing>, block: u64, byte: u8) {
    let (data, mut bytes) = (Data::ToDevice(BLOCK as u32), [byte; BLOCK]);
    let queue = &mut guest.queues[0];
    let written = queue.call(request::OUT, block * 8, data, &mut bytes, SOON).unwrap();
    assert_eq!(written, status::OK);
}

/// Returns the byte that fills a block.
#[track_caller]
pub fn read(socket: &Path, block: u64) -> u8 {
    let mut guest = Session::<SplitRing>::start(socket, &Plan::default()).unwrap();
    let (data, mut bytes) = (Data::FromDevice(BLOCK as u32), [0xee; BLOCK]);
    let queue = &mut guest.queues[0];
    let done = queue.call(request::IN, block * 8, data, &mut bytes, SOON).unwrap();
    assert_eq!(done, status::OK);
    byte_of(&bytes)
}

/// Returns the byte that fills a block of a file's bytes.
#[track_caller]
pub fn byte_of(block: &[u8]) -> u8 {
    assert!(block.iter().all(|byte| *byte == block[0]), "a block of two writes");
    block[0]
}
