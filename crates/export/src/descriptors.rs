//! File descriptors: a reserve that clients cannot use up.
//!
//! What must hold: while clients have all descriptors that they may have, a reload still opens its
//! configuration, certificates and images.

use blockyard_ring::host;

/// Descriptors that clients leave to the server itself, but no more than a quarter of all.
const RESERVE: u64 = 64;

/// The number of descriptors that are left, and the limit, if no client may take one.
pub fn too_few() -> Option<(u64, u64)> {
    let limit = host::descriptor_limit();
    let left = limit.saturating_sub(host::open_descriptors().ok()?);
    (left < reserve(limit)).then_some((left, limit))
}

fn reserve(limit: u64) -> u64 {
    RESERVE.min(limit / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_low_limit_leaves_clients_most_of_it() {
        assert_eq!(reserve(40), 10);
        assert_eq!(reserve(1024), 64);
        assert_eq!(reserve(u64::MAX), 64);
    }
}
