//! Parses the driver's requests, and converts a status to the driver's.

use blockyard_disk::{Failure, Op};
use blockyard_image::SECTOR;
use blockyard_ring::ublk::abi::{self, Descriptor};
use rustix::io::Errno;

/// Returns the operation, and its offset and length in bytes. `most`: maximum number of bytes of a
/// transfer. `fua`: writes must be durable before their answer.
pub(super) fn parse(
    descriptor: &Descriptor,
    most: usize,
    fua: bool,
) -> Result<(Op, u64, u64), Errno> {
    let flag = |bit| descriptor.op_flags & bit != 0;
    let fua = fua || flag(abi::IO_FUA);
    let op = match descriptor.op_flags as u8 {
        abi::OP_READ => Op::Read,
        abi::OP_WRITE => Op::Write { fua },
        abi::OP_FLUSH => return Ok((Op::Flush, 0, 0)),
        abi::OP_DISCARD => Op::Discard,
        abi::OP_WRITE_ZEROES => Op::WriteZeroes { unmap: !flag(abi::IO_NOUNMAP), fua, fast: false },
        _ => return Err(Errno::OPNOTSUPP),
    };
    let offset = descriptor.start.checked_mul(SECTOR).ok_or(Errno::INVAL)?;
    let len = u64::from(descriptor.sectors) * SECTOR;
    if matches!(op, Op::Read | Op::Write { .. }) && len > most as u64 {
        return Err(Errno::INVAL);
    }
    Ok((op, offset, len))
}

/// Returns the errno that the driver converts to the status of the request.
pub(super) fn errno(failure: Failure) -> Errno {
    match failure {
        Failure::NoSpace => Errno::NOSPC,
        Failure::Unsupported => Errno::OPNOTSUPP,
        Failure::Io | Failure::ReadOnly | Failure::OutOfRange | Failure::Poisoned => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(op: u8, flags: u32, sectors: u32, start: u64) -> Result<(Op, u64, u64), Errno> {
        parse(
            &Descriptor { op_flags: u32::from(op) | flags, sectors, start, addr: 0 },
            1 << 20,
            false,
        )
    }

    #[test]
    fn requests_are_parsed() {
        assert_eq!(ask(abi::OP_READ, 0, 8, 3), Ok((Op::Read, 1536, 4096)));
        assert_eq!(
            ask(abi::OP_WRITE, abi::IO_FUA, 2048, 0),
            Ok((Op::Write { fua: true }, 0, 1 << 20))
        );
        assert_eq!(ask(abi::OP_WRITE, 1 << 16, 1, 1), Ok((Op::Write { fua: false }, 512, 512)));
        assert_eq!(ask(abi::OP_FLUSH, 0, 0, u64::MAX), Ok((Op::Flush, 0, 0)));
        assert_eq!(ask(abi::OP_DISCARD, 0, 1 << 21, 8), Ok((Op::Discard, 4096, 1 << 30)));
        let zeroes = |unmap| Ok((Op::WriteZeroes { unmap, fua: false, fast: false }, 0, 512));
        assert_eq!(ask(abi::OP_WRITE_ZEROES, 0, 1, 0), zeroes(true));
        assert_eq!(ask(abi::OP_WRITE_ZEROES, abi::IO_NOUNMAP, 1, 0), zeroes(false));
    }

    #[test]
    fn impossible_requests_are_refused() {
        assert_eq!(ask(abi::OP_READ, 0, 2049, 0), Err(Errno::INVAL));
        assert_eq!(ask(abi::OP_READ, 0, 1, 1 << 60), Err(Errno::INVAL));
        for op in [4, 10, 15, 18, 255] {
            assert_eq!(ask(op, 0, 1, 0), Err(Errno::OPNOTSUPP), "{op}");
        }
    }
}
