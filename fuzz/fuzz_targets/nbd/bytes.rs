//! The fuzzer's bytes, taken from the front; zeroes when there are none left.

pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// The bytes of a number, the lowest first.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let some = self.some(N);
        bytes[..some.len()].copy_from_slice(some);
        bytes
    }

    /// So many of them, as far as they are there.
    pub fn some(&mut self, len: usize) -> &[u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }
}
