//! What a thread gets of a request's memory.

use std::io;
use std::sync::Arc;

use super::Segments;
use super::loan::Shared;

/// The memory of a request, lent to a device until its method returns. It may be a guest's memory
/// itself. After the request was answered, each use is an error.
///
/// A guest may change its memory at any time, also between two copies of the same bytes. So copy
/// once, and check the copy.
#[derive(Clone)]
pub struct Lent {
    shared: Arc<Shared>,
    start: usize,
    len: usize,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lent({} bytes)", self.len)
    }
}

impl Lent {
    pub(super) fn new(shared: Arc<Shared>, len: usize) -> Self {
        Lent { shared, start: 0, len }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `len` bytes of it from `start`. Panics beyond the end.
    pub fn slice(&self, start: usize, len: usize) -> Lent {
        assert!(start <= self.len && len <= self.len - start, "{start}+{len} of {}", self.len);
        Lent { shared: self.shared.clone(), start: self.start + start, len }
    }

    /// Returns its parts of `len` bytes. The last one may be shorter.
    pub fn pieces(&self, len: usize) -> impl Iterator<Item = Lent> + '_ {
        (0..self.len).step_by(len).map(move |at| self.slice(at, len.min(self.len - at)))
    }

    /// Copies `bytes` into it, at `start`. Panics beyond the end.
    pub fn copy_from(&self, start: usize, bytes: &[u8]) -> io::Result<()> {
        self.slice(start, bytes.len()).segments()?.copy_in(0, bytes);
        Ok(())
    }

    /// Copies bytes from `start` on, until `bytes` is full. Panics beyond the end.
    pub fn copy_to(&self, start: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.slice(start, bytes.len()).segments()?.copy_out(0, bytes);
        Ok(())
    }

    /// Returns a copy of all bytes.
    pub fn to_vec(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.len];
        self.copy_to(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns segments for an operation on the calling thread. The request is not answered before
    /// they are dropped. It is public for the files of a target only, because [`Segments`] are no
    /// part of the library.
    #[doc(hidden)]
    pub fn segments(&self) -> io::Result<Segments> {
        self.shared.segments(self.start, self.len)
    }
}
