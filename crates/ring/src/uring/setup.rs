//! Set-up of a reactor's ring: what the kernel can do, and what the ring may do in a sandbox.

use std::io;

use io_uring::register::{Probe, Restriction};
use io_uring::{IoUring, opcode, squeue};

/// Entries of the submission queue. A full queue is submitted early, so it limits a batch, not the
/// operations in flight.
const SQ_ENTRIES: u32 = 256;
const CQ_ENTRIES: u32 = 4096;
/// Calls of io_uring_register that a ring needs after its set-up; names as in `linux/io_uring.h`.
const REGISTER: [u8; 4] = [
    6,  // IORING_REGISTER_FILES_UPDATE
    8,  // IORING_REGISTER_PROBE
    15, // IORING_REGISTER_BUFFERS2
    16, // IORING_REGISTER_BUFFERS_UPDATE
];
/// The same, for a kernel that can enter a ring by its index (5.18).
const REGISTER_RINGS: [u8; 2] = [
    20, // IORING_REGISTER_RING_FDS
    21, // IORING_UNREGISTER_RING_FDS
];

/// Operations that [`super::build`] and [`super::Uring`] make.
const OPERATIONS: [u8; 14] = [
    opcode::AsyncCancel::CODE,
    opcode::Fallocate::CODE,
    opcode::Fsync::CODE,
    opcode::Nop::CODE,
    opcode::PollAdd::CODE,
    opcode::Read::CODE,
    opcode::ReadFixed::CODE,
    opcode::Readv::CODE,
    opcode::ReadvFixed::CODE,
    opcode::UringCmd16::CODE,
    opcode::Write::CODE,
    opcode::WriteFixed::CODE,
    opcode::Writev::CODE,
    opcode::WritevFixed::CODE,
];

/// What a kernel's rings can do. Older ones do the same with more system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// Deferred task work: Linux 6.1.
    Deferred,
    /// A submission goes on after an operation that is refused: Linux 5.18.
    SubmitAll,
    /// Linux 5.15. A submission may end early, and [`super::Uring`] enters the ring again.
    Oldest,
}

impl Setup {
    pub fn build(self) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(CQ_ENTRIES).setup_clamp().setup_r_disabled();
        if self != Setup::Oldest {
            builder.setup_submit_all();
        }
        if self == Setup::Deferred {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        }
        builder.build(SQ_ENTRIES)
    }

    /// Builds the newest kind of ring that the kernel does not refuse (EINVAL).
    pub fn newest<T>(build: impl Fn(Setup) -> io::Result<T>) -> io::Result<(T, Setup)> {
        let mut refused = None;
        for setup in [Setup::Deferred, Setup::SubmitAll, Setup::Oldest] {
            match build(setup) {
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => refused = Some(e),
                built => return built.map(|ring| (ring, setup)),
            }
        }
        Err(refused.unwrap_or_else(|| io::ErrorKind::InvalidInput.into()))
    }

    /// Restricts a ring of a reactor to the operations and calls that it makes.
    pub fn restrict(self, ring: &IoUring) -> io::Result<()> {
        let mut probe = Probe::new();
        let is_probed = ring.submitter().register_probe(&mut probe).is_ok();
        let known = |code: &u8| !is_probed || probe.is_supported(*code);
        let operations: Vec<_> = OPERATIONS.into_iter().filter(known).collect();
        let rings = REGISTER_RINGS.into_iter().filter(|_| self != Setup::Oldest);
        let registers: Vec<_> = REGISTER.into_iter().chain(rings).collect();
        restrict(ring, &operations, &registers, squeue::Flags::ASYNC | squeue::Flags::FIXED_FILE)
    }
}

/// Says for good what a ring may do: operations, calls of io_uring_register, flags of operations.
/// The kernel refuses all else with EACCES. It also refuses restrictions with operations and calls
/// that it does not know.
pub fn restrict(
    ring: &IoUring,
    operations: &[u8],
    registers: &[u8],
    flags: squeue::Flags,
) -> io::Result<()> {
    let registers = registers.iter().copied().map(Restriction::register_op);
    let operations = operations.iter().copied().map(Restriction::sqe_op);
    let flags = Restriction::sqe_flags_allowed(flags.bits());
    let mut all: Vec<_> = registers.chain(operations).chain([flags]).collect();
    ring.submitter().register_restrictions(&mut all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_kernel_gets_the_newest_ring_that_it_has() {
        let kernel = |known: &'static [Setup]| {
            move |setup: Setup| match known.contains(&setup) {
                true => Ok(()),
                false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            }
        };
        let all = [Setup::Oldest, Setup::SubmitAll, Setup::Deferred];
        for known in [&[Setup::Oldest][..], &[Setup::Oldest, Setup::SubmitAll]] {
            let (_, setup) = Setup::newest(kernel(known)).unwrap();
            assert_eq!(Some(&setup), known.last());
        }
        assert_eq!(Setup::newest(kernel(&[])).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let lacks = Setup::newest::<()>(|_| Err(io::Error::from_raw_os_error(libc::ENOMEM)));
        assert_eq!(lacks.unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        // This kernel has all of them.
        all.iter().for_each(|setup| drop(setup.build().unwrap()));
    }
}
