//! A reserve of file descriptors that clients cannot use up.
//!
//! What must hold: if clients hold as many descriptors as they may, the server can still reload,
//! which opens its configuration, certificates and images.

use blockyard_ring::host;

use crate::export::Obstacle;

/// Number of descriptors kept for the server itself, or a quarter of the limit if that is less.
const RESERVE: u64 = 64;

/// Returns the number of free descriptors and the limit, if too few descriptors are left for
/// another client. Returns `None` if there are enough.
pub fn too_few() -> Option<(u64, u64)> {
    let limit = host::descriptor_limit();
    let left = limit.saturating_sub(host::open_descriptors().ok()?);
    (left < reserve(limit)).then_some((left, limit))
}

/// Returns the obstacle of a hand-over, which copies the descriptors of clients.
pub fn obstacle() -> Option<Obstacle> {
    too_few().map(|(left, limit)| Obstacle::FewDescriptors { left, limit })
}

fn reserve(limit: u64) -> u64 {
    RESERVE.min(limit / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_at_most_a_quarter_of_the_limit() {
        assert_eq!(reserve(40), 10);
        assert_eq!(reserve(1024), 64);
        assert_eq!(reserve(u64::MAX), 64);
    }
}
