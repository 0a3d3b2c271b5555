//! A position in segments, for many consecutive slices.

use super::Segments;

/// Takes consecutive slices. Unlike [`Segments::slice`], it does not search the iovec from its
/// start.
pub struct Cursor<'a> {
    pub(super) segments: &'a Segments,
    /// The iovec's entry, and the number of bytes of it that are taken.
    pub(super) entry: usize,
    pub(super) inside: usize,
}

impl Cursor<'_> {
    /// Returns the next `len` bytes as segments that share the owner. Panics beyond the end:
    /// callers pass lengths that they computed, never a guest's.
    pub fn take(&mut self, len: usize) -> Segments {
        let parts = self.segments.parts();
        let (mut iov, mut left) = (Vec::new(), len);
        while left > 0 {
            let v = &parts.iov[self.entry];
            let here = left.min(v.iov_len - self.inside);
            let base = v.iov_base.cast::<u8>().wrapping_add(self.inside);
            if here > 0 {
                iov.push(libc::iovec { iov_base: base.cast(), iov_len: here });
            }
            left -= here;
            self.inside += here;
            if self.inside == v.iov_len {
                (self.entry, self.inside) = (self.entry + 1, 0);
            }
        }
        Segments::new(iov, len, parts.owner.clone())
    }
}
