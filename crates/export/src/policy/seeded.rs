//! Random numbers for tests. The same seed gives the same numbers.

/// A generator of pseudo-random numbers from 0 to 1 (splitmix64).
pub struct Seeded(pub u64);

impl Seeded {
    /// Returns the next number.
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
