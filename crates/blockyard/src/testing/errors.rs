//! Which operations of the files fail.

use blockyard_storage::sim::{Fault, OpKind, Rng, SimDisk};
use rustix::io::Errno;

/// Lets one to `most` operations of the files fail. `requests`: number of requests of a client.
pub(super) fn plan(disks: &[SimDisk], most: u64, requests: u64, mut rng: Rng) {
    if disks.is_empty() {
        return; // The target has no files.
    }
    for _ in 0..rng.between(1, most) {
        let (kind, error) = match rng.below(6) {
            0 | 1 => (OpKind::Write, Errno::IO),
            2 => (OpKind::Write, Errno::NOSPC),
            3 | 4 => (OpKind::Sync, Errno::IO),
            _ => (OpKind::Read, Errno::IO),
        };
        // Most of them come while clients use the disk: there are fewer syncs than others.
        let operations = if kind == OpKind::Sync { requests / 2 } else { requests * 2 };
        let fault = Fault::new(kind, error.raw_os_error()).after(rng.below(operations.max(1)));
        disks[rng.below(disks.len() as u64) as usize].fail(fault);
    }
}
