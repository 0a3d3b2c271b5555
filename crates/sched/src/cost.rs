//! What an operation costs a device: nanoseconds of the device's time, of which a device that is
//! busy gives a second a second.
//!
//! The linear model of Linux's blk-iocost: a base by type, and by whether it follows the one
//! before, and so much a byte.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

/// What is asked of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub kind: OperationKind,
    pub bytes: u64,
    /// It begins where one before it ended.
    pub sequential: bool,
    /// The guest's requests in it: more than one where neighbours go as one operation.
    pub requests: u32,
}

impl Operation {
    /// Bytes that it is charged for, beside its base: a discard, or zeroes that are not written,
    /// move none.
    #[inline]
    pub fn moves(&self) -> u64 {
        match self.kind {
            OperationKind::Read | OperationKind::Write => self.bytes,
            OperationKind::Flush | OperationKind::Discard | OperationKind::WriteZeroes => 0,
        }
    }
}

/// No operation costs more: 17 s, so that virtual times stay far from their range.
const MOST: u64 = 1 << 34;

/// The figures of a device, in nanoseconds; `per_mib` for each MiB beyond nothing.
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

/// What is known of a device before it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    pub costs: Costs,
    /// Cost on the way, in nanoseconds, with which the device is busy.
    pub window: Option<u64>,
    /// Nanoseconds that an operation of 4 KiB takes by itself; 0: unknown.
    pub alone_read: u64,
    pub alone_write: u64,
}

impl Calibration {
    pub const fn of(costs: Costs) -> Self {
        Calibration { costs, window: None, alone_read: 0, alone_write: 0 }
    }
}

impl Costs {
    /// A virtual or SATA flash disk of today: 80 thousand random reads a second, 1 GiB/s.
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

    /// A disk that turns: 120 seeks a second, 180 MiB/s.
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

    /// What a request is charged when it comes: of a flush little, for several of them may share
    /// one sync of the device. That is charged when it is done.
    #[inline]
    pub(crate) fn of_request(&self, operation: &Operation) -> u64 {
        if operation.kind == OperationKind::Flush {
            self.write_sequential.max(1)
        } else {
            self.of(operation)
        }
    }

    /// What writes of metadata and copies cost.
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

    /// At least 1.
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
    fn base_and_bytes() {
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
