//! The settings of a run, which its seed determines.

use std::io;

use blockyard_disk::Failure;
use blockyard_image::Alignment;
use blockyard_storage::sim::{Fault, OpKind, Rng, SECTOR};

/// Alignments: the page cache; O_DIRECT on 512-byte blocks, and on 4096-byte blocks under 512-byte
/// sectors.
pub const SHAPES: [Alignment; 3] = [
    Alignment { memory_align: 1, offset_align: 1 },
    Alignment { memory_align: 512, offset_align: 512 },
    Alignment { memory_align: 512, offset_align: 4096 },
];

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub shape: Alignment,
    /// Size of the guest's disk in bytes. The file is shorter by `missing` bytes at first.
    pub capacity: u64,
    pub missing: u64,
    pub reactors: usize,
    /// Number of lanes (requests in flight), and requests that each lane makes.
    pub lanes: usize,
    pub requests: usize,
    /// Whether every write is durable, as for a guest that sees no write cache.
    pub writethrough: bool,
    /// Largest write that the device makes atomically, in bytes.
    pub atomic: usize,
    pub discard_zeroes: bool,
    pub trouble: Option<Trouble>,
}

impl Plan {
    /// Returns a plan without faults, except the power cut.
    pub fn quiet(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x706c_616e);
        let atomic = *rng.pick(&[512, 512, 1024, 4096]);
        Plan {
            seed,
            shape: *rng.pick(&SHAPES),
            capacity: rng.between(24, 64) * SECTOR as u64,
            missing: if rng.one_in(2) { rng.below(SECTOR as u64) } else { 0 },
            reactors: rng.between(1, 2) as usize,
            lanes: rng.between(3, 8) as usize,
            requests: 8,
            writethrough: rng.one_in(4),
            atomic,
            discard_zeroes: rng.one_in(2),
            trouble: None,
        }
    }

    pub fn random(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7472_6f75);
        let trouble = rng.one_in(2).then(|| Trouble::random(&mut rng));
        Plan { trouble, ..Plan::quiet(seed) }
    }

    /// Returns about the number of events of a run. A smaller random number is likely to be within
    /// the run.
    pub fn events(&self) -> u64 {
        (self.lanes * self.requests) as u64 * 9 / 5
    }
}

/// A fault, and the failure that a guest may see.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub kind: OpKind,
    pub fault: Fault,
    /// None: the guest sees no failure.
    pub failure: Option<Failure>,
}

impl Trouble {
    pub fn new(kind: OpKind, error: io::ErrorKind) -> Self {
        let failure = match error {
            io::ErrorKind::Unsupported => None,
            error => Some(Failure::of(&error.into())),
        };
        Trouble { kind, fault: Fault::new(kind, error), failure }
    }

    pub fn after(self, operations: u64) -> Self {
        Trouble { fault: self.fault.after(operations), ..self }
    }

    fn random(rng: &mut Rng) -> Self {
        use io::ErrorKind::{Other, StorageFull, Unsupported};
        let kinds = [
            (OpKind::Read, Other),
            (OpKind::Write, Other),
            (OpKind::Write, StorageFull),
            (OpKind::Sync, Other),
            (OpKind::Zero, Other),
            (OpKind::Zero, Unsupported),
            (OpKind::Discard, Other),
            (OpKind::Discard, Unsupported),
        ];
        let (kind, error) = *rng.pick(&kinds);
        let trouble = Trouble::new(kind, error);
        let fault = trouble.fault.clone();
        let fault = match error {
            Unsupported => fault.always(),
            _ => fault.after(rng.below(8)).times(rng.between(1, 3)),
        };
        Trouble { fault, ..trouble }
    }
}
