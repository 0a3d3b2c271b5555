//! Rules for calls of which only some arguments are allowed.
//!
//! In: the system calls of a kind of thread. Out: rules by call. What must hold: no rule allows a
//! call that changes another process, or a terminal. What the C library, the standard library and
//! the server itself need is allowed on each kind of thread.

use std::collections::BTreeMap;

use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use crate::devices::nbd_device;
use crate::devices::xen::abi::REQUESTS as XEN_REQUESTS;
use crate::files::block_device::BLKDISCARD;

/// Rules by system call. No rule means that the call is allowed with all arguments.
pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

type Result<T> = std::result::Result<T, seccompiler::BackendError>;

/// Requests of `ioctl`, besides those of devices: non-blocking mode, bytes to read, close at exec,
/// whether a descriptor is a terminal (TCGETS, TCGETS2), which the C library asks before it writes,
/// and the number of a network interface (SIOCGIFINDEX), which it asks for an IPv6 address with a
/// scope, also for one of a name server. Not among them: TIOCSTI and TIOCLINUX, which type into a
/// terminal.
const PLAIN: [u64; 7] =
    [libc::FIONBIO, libc::FIONREAD, libc::FIOCLEX, libc::TCGETS, TCGETS2, SIOCGIFINDEX, BLKDISCARD];

/// From the kernel's `sockios.h`.
const SIOCGIFINDEX: u64 = 0x8933;

/// `_IOR('T', 0x2a, struct termios2)`
const TCGETS2: u64 = 0x802c_542a;

/// Adds the rules.
pub(super) fn add(rules: &mut Rules) -> Result<()> {
    let devices = XEN_REQUESTS.iter().chain(&nbd_device::REQUESTS);
    // The kernel reads 32 bits of the request.
    let requests = PLAIN.iter().chain(devices).map(|request| equal(1, *request));
    rules.insert(libc::SYS_ioctl, requests.collect::<Result<_>>()?);
    // 0 is the calling process or thread.
    let own = u64::from(std::process::id());
    for call in [libc::SYS_prlimit64, libc::SYS_sched_setaffinity] {
        rules.insert(call, vec![equal(0, 0)?, equal(0, own)?]);
    }
    Ok(())
}

/// Returns a rule that allows a call if an argument of 32 bits has this value.
pub(super) fn equal(argument: u8, value: u64) -> Result<SeccompRule> {
    let (length, operation) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
    SeccompRule::new(vec![SeccompCondition::new(argument, length, operation, value)?])
}
