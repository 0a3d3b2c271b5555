//! The parameters of a run, derived from its seed.

use std::io::ErrorKind::{Other, StorageFull, Unsupported};

use blockyard_image::Alignment;
use blockyard_storage::sim::{Fault, OpKind, Rng};

/// Alignments: page cache, O_DIRECT with 512-byte blocks, and with 4096-byte blocks.
const SHAPES: [Alignment; 3] = [
    Alignment { memory_align: 1, offset_align: 1 },
    Alignment { memory_align: 512, offset_align: 512 },
    Alignment { memory_align: 512, offset_align: 4096 },
];

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub version: u32,
    pub alignment: u32,
    pub shape: Alignment,
    /// Number of areas of the disk that clients use. They are 16 MiB apart, so that each has its
    /// own bitmap page.
    pub spots: u64,
    /// Size of the bitmap cache, in bytes.
    pub memory: u64,
    pub reactors: usize,
    /// Number of clients of all queues together. Each has one request in flight.
    pub clients: usize,
    /// Number of requests that each client makes.
    pub requests: usize,
    /// Largest write that the device makes atomically, in bytes.
    pub atomic: usize,
    pub discard_zeroes: bool,
    /// Operations of the COW file that fail during loads.
    pub trouble: Option<(OpKind, Fault)>,
    /// Whether the process dies in some boots, instead of a power cut, with a journal.
    pub dies: bool,
}

impl Plan {
    /// Returns a plan with power cuts but no other errors.
    pub fn quiet(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x706c_616e);
        let version = *rng.pick(&[1, 2, 3, 3, 3]);
        let alignment = if version == 3 { *rng.pick(&[512, 4096, 4096, 65536]) } else { 512 };
        let spots = rng.between(1, 12);
        Plan {
            seed,
            version,
            alignment,
            shape: *rng.pick(&SHAPES),
            spots,
            // The bitmap cache holds eight pages, or the whole bitmap.
            memory: if rng.one_in(2) { 1 } else { u64::MAX },
            reactors: rng.between(1, 2) as usize,
            clients: rng.between(1, 7) as usize,
            requests: 9,
            atomic: *rng.pick(&[512, 512, 1024, 4096]),
            discard_zeroes: rng.one_in(2),
            trouble: None,
            dies: false,
        }
    }

    pub fn random(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7472_6f75);
        let trouble = rng.one_in(3).then(|| {
            let kinds = [
                (OpKind::Read, Other),
                (OpKind::Write, Other),
                (OpKind::Write, StorageFull),
                (OpKind::Sync, Other),
                (OpKind::Sync, Other),
                (OpKind::Zero, Unsupported),
                (OpKind::Discard, Other),
            ];
            let (kind, error) = *rng.pick(&kinds);
            let fault = Fault::new(kind, error);
            (
                kind,
                if error == Unsupported {
                    fault.always()
                } else {
                    fault.after(rng.below(12)).times(rng.between(1, 3))
                },
            )
        });
        Plan { trouble, ..Plan::quiet(seed) }
    }
}
