//! Errors to inject: which operations fail, how often, and with which error.

use std::io;
use std::ops::Range;

use super::OpKind;

/// The error of an injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultError {
    Kind(io::ErrorKind),
    Errno(i32),
}

impl From<io::ErrorKind> for FaultError {
    fn from(kind: io::ErrorKind) -> Self {
        FaultError::Kind(kind)
    }
}

impl From<i32> for FaultError {
    fn from(errno: i32) -> Self {
        FaultError::Errno(errno)
    }
}

impl FaultError {
    fn error(self) -> io::Error {
        match self {
            FaultError::Kind(kind) => kind.into(),
            FaultError::Errno(errno) => io::Error::from_raw_os_error(errno),
        }
    }
}

/// Operations that fail: by default only the next one of `kind`.
///
/// A failed write, zero or discard has changed some of its sectors. One that fails with
/// `Unsupported` has changed nothing.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: OpKind,
    range: Option<Range<u64>>,
    skip: u64,
    times: u64,
    error: FaultError,
}

impl Fault {
    pub fn new(kind: OpKind, error: impl Into<FaultError>) -> Self {
        Fault { kind, range: None, skip: 0, times: 1, error: error.into() }
    }

    /// Limits the fault to operations that touch these bytes.
    pub fn within(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Lets the first `operations` matching operations succeed.
    pub fn after(mut self, operations: u64) -> Self {
        self.skip = operations;
        self
    }

    /// Fails `operations` operations.
    pub fn times(mut self, operations: u64) -> Self {
        self.times = operations;
        self
    }

    /// Fails every matching operation.
    pub fn always(self) -> Self {
        self.times(u64::MAX)
    }

    /// Returns the error for an operation that starts now, if it must fail.
    pub(super) fn strikes(&mut self, kind: OpKind, offset: u64, len: u64) -> Option<io::Error> {
        let misses = |r: &Range<u64>| offset >= r.end || offset.saturating_add(len) <= r.start;
        if kind != self.kind || self.times == 0 || self.range.as_ref().is_some_and(misses) {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        if self.times != u64::MAX {
            self.times -= 1;
        }
        Some(self.error.error())
    }
}
