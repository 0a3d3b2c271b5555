//! Cost of an operation, in nanoseconds of device time. A busy device completes one second of cost
//! a second.
//!
//! The linear model of Linux's blk-iocost: a base cost by type and by whether the operation is
//! sequential, and a cost for each byte.

/// The kind of an operation on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

/// An operation on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub kind: OperationKind,
    pub bytes: u64,
    /// Whether the operation begins where an earlier one ended.
    pub sequential: bool,
    /// Number of guest requests in the operation: more than 1 if adjacent requests were merged.
    pub requests: u32,
}

impl Operation {
    /// Returns the number of bytes that the operation is charged for, in addition to its base cost.
    /// It is 0 for a discard, and for zeroes that are not written.
    #[inline]
    pub fn moves(&self) -> u64 {
        match self.kind {
            OperationKind::Read | OperationKind::Write => self.bytes,
            OperationKind::Flush | OperationKind::Discard | OperationKind::WriteZeroes => 0,
        }
    }

    #[inline]
    pub(crate) fn reserved(&self) -> Reserved {
        let bytes = self.moves();
        Reserved { operations: u64::from(self.requests).max(bytes.div_ceil(RESERVED_BYTES)), bytes }
    }

    /// Returns whether the cost says little about the operation's time, which depends on the device
    /// and on the range.
    #[inline]
    pub(crate) fn is_of_unknown_time(&self) -> bool {
        matches!(self.kind, OperationKind::Discard | OperationKind::WriteZeroes)
    }
}

/// Bytes for which an operation counts as one against a reservation. A larger one counts as
/// several, so that a reserved rate of operations bounds what it can take from other disks.
const RESERVED_BYTES: u64 = 256 << 10;

/// What an operation counts for against a reservation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserved {
    pub operations: u64,
    pub bytes: u64,
}

/// Largest cost of one operation: 17 s. It keeps the distances of virtual times far below half of
/// their range.
const MOST: u64 = 1 << 34;

/// Cost model of a device, in nanoseconds. `*_per_mib`: cost of each MiB in addition to the base
/// cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    pub read: u64,
    pub read_sequential: u64,
    pub read_per_mib: u64,
    pub write: u64,
    pub write_sequential: u64,
    pub write_per_mib: u64,
    pub flush: u64,
    pub discard: u64,
    pub write_zeroes: u64,
}

/// Calibration of a device, measured before it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    pub costs: Costs,
    /// Cost in flight that keeps the device busy, in nanoseconds. None: unknown.
    pub window_ns: Option<u64>,
    /// Service times of a 4 KiB read and a 4 KiB write on a device without other operations, in
    /// nanoseconds. 0: unknown.
    pub baseline_read_ns: u64,
    pub baseline_write_ns: u64,
}

impl Calibration {
    /// Returns a calibration with only a cost model.
    pub const fn of(costs: Costs) -> Self {
        Calibration { costs, window_ns: None, baseline_read_ns: 0, baseline_write_ns: 0 }
    }
}

impl Costs {
    /// A typical virtual or SATA flash disk: 80,000 random reads a second, 1 GiB/s.
    pub const FLASH: Costs = Costs {
        read: 9_000,
        read_sequential: 6_000,
        read_per_mib: 900_000,
        write: 15_000,
        write_sequential: 10_000,
        write_per_mib: 900_000,
        flush: 100_000,
        discard: 50_000,
        write_zeroes: 50_000,
    };

    /// A rotational disk: 120 seeks a second, 180 MiB/s.
    pub const ROTATIONAL: Costs = Costs {
        read: 8_000_000,
        read_sequential: 20_000,
        read_per_mib: 5_500_000,
        write: 8_000_000,
        write_sequential: 20_000,
        write_per_mib: 5_500_000,
        flush: 16_000_000,
        discard: 20_000_000,
        write_zeroes: 20_000_000,
    };

    /// Returns what a request is charged on admission. A flush is charged little, because several
    /// flushes may share one sync of the device; the sync is charged when it begins.
    #[inline]
    pub(crate) fn of_request(&self, operation: &Operation) -> u64 {
        if operation.kind == OperationKind::Flush {
            self.write_sequential.max(1)
        } else {
            self.of(operation)
        }
    }

    /// Returns the cost of metadata writes and copies that the image makes on its own.
    pub(crate) fn of_more(&self, operations: u64, bytes: u64) -> u64 {
        let of = |bytes| {
            self.of(&Operation {
                kind: OperationKind::Write,
                bytes,
                sequential: false,
                requests: 1,
            })
        };
        of(0).saturating_mul(operations).saturating_add(of(bytes) - of(0)).min(MOST)
    }

    /// Returns the full cost of an operation in nanoseconds, at least 1.
    #[inline]
    pub fn of(&self, operation: &Operation) -> u64 {
        let (base, per_mib) = match (operation.kind, operation.sequential) {
            (OperationKind::Read, false) => (self.read, self.read_per_mib),
            (OperationKind::Read, true) => (self.read_sequential, self.read_per_mib),
            (OperationKind::Write, false) => (self.write, self.write_per_mib),
            (OperationKind::Write, true) => (self.write_sequential, self.write_per_mib),
            (OperationKind::Flush, _) => (self.flush, 0),
            (OperationKind::Discard, _) => (self.discard, 0),
            (OperationKind::WriteZeroes, _) => (self.write_zeroes, 0),
        };
        let bytes = (u128::from(operation.bytes) * u128::from(per_mib)) >> 20;
        base.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX)).clamp(1, MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_operation_counts_as_several_against_a_reservation() {
        let of = |kind, bytes, requests| {
            let reserved = Operation { kind, bytes, sequential: false, requests }.reserved();
            (reserved.operations, reserved.bytes)
        };
        assert_eq!(of(OperationKind::Read, 4096, 1), (1, 4096));
        assert_eq!(of(OperationKind::Write, 256 << 10, 1), (1, 256 << 10));
        assert_eq!(of(OperationKind::Write, 32 << 20, 1), (128, 32 << 20));
        assert_eq!(of(OperationKind::Write, 64 << 10, 16), (16, 64 << 10), "merged requests");
        // A discard of a terabyte must not use up the reservation of an hour.
        assert_eq!(of(OperationKind::Discard, 1 << 40, 1), (1, 0));
        assert_eq!(of(OperationKind::Flush, 0, 0), (0, 0));
    }

    #[test]
    fn a_cost_is_a_base_and_a_cost_for_each_byte() {
        let read = |bytes, sequential| Operation {
            kind: OperationKind::Read,
            bytes,
            sequential,
            requests: 1,
        };
        assert_eq!(Costs::FLASH.of(&read(4096, false)), 9_000 + 900_000 / 256);
        assert_eq!(Costs::FLASH.of(&read(1 << 20, true)), 906_000);
        assert_eq!(
            Costs::FLASH.of(&Operation { kind: OperationKind::Flush, ..read(0, false) }),
            100_000
        );
        assert_eq!(Costs::FLASH.of(&read(u64::MAX, false)), MOST, "no length overflows");
        assert_eq!(Costs::FLASH.of_more(3, 1 << 20), 45_000 + 900_000);
        assert_eq!(Costs::FLASH.of_more(0, 1 << 20), 900_000);
        assert_eq!(Costs::FLASH.of_more(u64::MAX, u64::MAX), MOST);
        for (kind, moves) in [
            (OperationKind::Write, 512),
            (OperationKind::Discard, 0),
            (OperationKind::WriteZeroes, 0),
            (OperationKind::Flush, 0),
        ] {
            assert_eq!(Operation { kind, ..read(512, false) }.moves(), moves);
        }
    }
}
