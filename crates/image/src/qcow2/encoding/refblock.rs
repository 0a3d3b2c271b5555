//! Refcounts in a refcount block: 1 to 64 bits each, big-endian. Those narrower than a byte start
//! at its lowest bit.

/// Width of an image's refcounts: 1 << order bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefcountWidth {
    order: u32,
}

impl RefcountWidth {
    /// Creates the width of refcounts with 1 << `order` bits. `order` must be 0 to 6; the header's
    /// parser checks it.
    pub fn new(order: u32) -> Self {
        assert!(order <= 6, "a refcount has at most 64 bits");
        RefcountWidth { order }
    }

    /// Returns log2 of the width in bits.
    pub fn order(self) -> u32 {
        self.order
    }

    pub fn bits(self) -> u32 {
        1 << self.order
    }

    /// Largest refcount that this width can store.
    pub fn max(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// Number of refcounts in a block of `cluster_size` bytes.
    pub fn per_block(self, cluster_size: u64) -> u64 {
        (cluster_size * 8) >> self.order
    }

    /// Returns the n-th refcount of `block`.
    #[inline]
    pub fn get(self, block: &[u8], n: usize) -> u64 {
        match self.order {
            0..=2 => {
                let (at, shift) = self.inside_byte(n);
                u64::from(block[at] >> shift) & self.max()
            }
            // The most common width.
            4 => u64::from(u16::from_be_bytes([block[n * 2], block[n * 2 + 1]])),
            _ => {
                let len = 1 << (self.order - 3);
                block[n * len..(n + 1) * len]
                    .iter()
                    .fold(0, |value, &byte| value << 8 | u64::from(byte))
            }
        }
    }

    /// Sets the n-th refcount; `value` must be at most [`max`](Self::max).
    #[inline]
    pub fn set(self, block: &mut [u8], n: usize, value: u64) {
        debug_assert!(value <= self.max());
        match self.order {
            0..=2 => {
                let (at, shift) = self.inside_byte(n);
                let mask = (self.max() as u8) << shift;
                block[at] = block[at] & !mask | (value as u8) << shift & mask;
            }
            _ => {
                let len = 1 << (self.order - 3);
                block[n * len..(n + 1) * len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
            }
        }
    }

    /// Returns the byte of the n-th refcount, and the refcount's lowest bit in it.
    fn inside_byte(self, n: usize) -> (usize, usize) {
        let bit = n << self.order;
        (bit / 8, bit % 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_every_width_lie_where_the_format_says() {
        let mut block = [0; 16];
        let cases: [(u32, usize, u64, &[u8]); 7] = [
            (0, 9, 1, &[0, 0b10]),
            (1, 5, 0b10, &[0, 0b1000]),
            (2, 3, 0xa, &[0, 0xa0]),
            (3, 1, 0x7f, &[0, 0x7f]),
            (4, 1, 0x0102, &[0, 0, 1, 2]),
            (5, 1, 0x0102_0304, &[0, 0, 0, 0, 1, 2, 3, 4]),
            (6, 1, 0x0102, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]),
        ];
        for (order, n, value, expected) in cases {
            let width = RefcountWidth::new(order);
            block.fill(0);
            width.set(&mut block, n, value);
            assert_eq!(&block[..expected.len()], expected, "order {order}");
            assert_eq!(width.get(&block, n), value, "order {order}");
        }
    }

    #[test]
    fn setting_a_refcount_keeps_its_neighbours() {
        for order in 0..=6 {
            let width = RefcountWidth::new(order);
            let counts = width.per_block(16) as usize;
            let mut block = [0xff; 16];
            width.set(&mut block, 1, 0);
            for n in 0..counts {
                assert_eq!(
                    width.get(&block, n),
                    if n == 1 { 0 } else { width.max() },
                    "order {order}, count {n}"
                );
            }
            width.set(&mut block, 1, width.max());
            assert_eq!(block, [0xff; 16], "order {order}");
        }
        assert_eq!(RefcountWidth::new(6).max(), u64::MAX);
        assert_eq!(RefcountWidth::new(0).per_block(512), 4096);
    }
}
