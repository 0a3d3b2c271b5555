//! In-flight regions of garbage, as a front end may hand to a back end that begins: recovered, and
//! gone on from.
//!
//! Input: the ring's shape, the region's length, how much of the rest is region; the rest is the
//! guest's memory.

#![no_main]

#[path = "guest.rs"]
mod guest;

use std::rc::Rc;

use blockyard_export::vhost_user::parts::{Inflight, InflightRegion, MAX_CHAIN, Ring, queue_bytes};
use blockyard_ring::{Mapper, Region};
use guest::{Bytes, Shape, memory};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let shape = Shape::of(&mut bytes);
    let (entries, queues, index) =
        (bytes.u16() % 200, u16::from(bytes.u8() % 4), u16::from(bytes.u8() % 4));
    let len = (queue_bytes(entries, shape.packed) * u64::from(queues.max(1))).max(1);
    let (content, rest) = bytes.0.split_at(bytes.0.len().min(len as usize));
    let (_, fd) = Region::memfd("fuzz", 0, 0, len).unwrap();
    let believed = bytes_of(content, shape.packed, len / u64::from(queues.max(1)) & !63);
    assert_eq!(rustix::io::pwrite(&fd, &believed, 0).unwrap(), believed.len());
    let region = InflightRegion::map(&Mapper::new(false), fd, (0, len), queues).unwrap();
    let Ok(Some(mut inflight)) = region.queue(index, shape.packed) else { return };
    // What the daemon itself refuses before it looks further.
    if inflight.size() < shape.size {
        return;
    }
    let memory = Rc::new(memory(rest));
    let Ok(mut ring) = shape.ring(&memory) else { return };
    recover(&mut ring, &mut inflight);
    // And again: what was recovered is consistent.
    if let Ok(Some(mut inflight)) = region.queue(index, shape.packed) {
        let Ok(mut ring) = shape.ring(&memory) else { return };
        recover(&mut ring, &mut inflight);
    }
});

/// The first queue's header is mostly one that is believed: else the region is only formatted.
fn bytes_of(content: &[u8], packed: bool, queue_bytes: u64) -> Vec<u8> {
    let mut bytes = content.to_vec();
    let (header, entry) = if packed { (32, 32) } else { (16, 16) };
    if bytes.len() > 12 && bytes[0] != 0xff && queue_bytes > header {
        bytes[..8].fill(0);
        bytes[8..10].copy_from_slice(&1u16.to_le_bytes());
        bytes[10..12].copy_from_slice(&(((queue_bytes - header) / entry) as u16).to_le_bytes());
    }
    bytes
}

fn recover(ring: &mut Ring, inflight: &mut Inflight) {
    let size = inflight.size();
    let mut descs = Vec::new();
    match ring {
        Ring::Split(ring) => {
            let heads = inflight.recover_split(ring.used_index());
            assert!(heads.len() <= usize::from(size) && heads.iter().all(|h| *h < size));
            ring.restore(heads.len() as u16);
            for head in heads {
                descs.clear();
                if ring.chain(head, &mut descs).is_ok() {
                    assert!(descs.len() <= 2 * MAX_CHAIN);
                    inflight.pushed_split(head);
                }
            }
            inflight.published_split(ring.used_index());
            inflight.taken_split(0);
        }
        Ring::Packed(ring) => {
            let Ok((chains, used)) =
                inflight.recover_packed(|index, wrap| ring.was_used(index, wrap))
            else {
                return;
            };
            let total: usize = chains.iter().map(|c| c.raw.len()).sum();
            assert!(total <= usize::from(size));
            if ring.restore(used, total as u16).is_err() {
                return;
            }
            for chain in chains {
                let Ok(head) = ring.retake(&chain.raw, &mut descs) else { return };
                assert!(descs.len() <= usize::from(size) * (MAX_CHAIN + 1));
                ring.push_used(head, 1);
                inflight.pushed_packed(chain.entry);
            }
            let (index, wrap) = ring.used_position();
            inflight.publishing_packed(index, wrap);
            ring.publish();
            inflight.published_packed();
            inflight.taken_packed(&[[0; 16]; 3]);
        }
    }
}
