//! The history of a simulated disk.

use std::fmt;

/// The kind of an operation on the simulated disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    Read,
    Write,
    Sync,
    Discard,
    Zero,
    SetLen,
}

/// A line of a disk's history, to compare runs and to find out why one failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Number of steps of the disk so far.
    pub step: u64,
    pub op: u64,
    pub kind: OpKind,
    pub phase: Phase,
    pub offset: u64,
    pub len: u64,
}

/// What happened to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Started,
    Answered,
    Failed,
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trace { step, op, kind, phase, offset, len } = self;
        write!(f, "{step:>6}  #{op:<4} {kind:?} {offset:#x}+{len:#x} {phase:?}")
    }
}
