//! The system calls that each kind of thread may make, enforced by seccomp.
//!
//! In: the kind of a thread. Out: a filter of the kernel for that thread. A refused call raises
//! SIGSYS; see `trap`.
//!
//! What must hold
//! - A list has what the thread's own work needs, and what the C library and the allocator need on
//!   any thread, also in an older or newer version.
//! - No kind may run programs, trace processes, mount, load code into the kernel, or change users.
//! - The calls of a request's way have no conditions. Then the kernel does not run the filter for
//!   them: it keeps a bitmap of calls that are always allowed. An exception is `ioctl`, which only
//!   Xen's queues call.

use std::io;
use std::ops::RangeInclusive;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

use super::arguments::{self, Rules, equal};

/// The kinds of threads that differ in the system calls that they make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any thread of a server: opens images, listens, connects, starts threads.
    Any,
    /// Runs requests. Creates and removes files (journals), makes no sockets, rings or threads, and
    /// maps no code.
    Reactor,
    /// Carries out calls of the API. Makes no sockets and maps no code.
    Control,
    /// Writes the log. Opens files for reading only.
    Log,
    /// Watches reactors, and reports to the supervisor on a socket that is connected.
    Watchdog,
    /// The process that looks for holders of locks; see `witness`.
    Witness,
}

/// Restricts the calling thread.
pub fn apply(kind: Kind) -> io::Result<()> {
    let failed = |e: &dyn std::fmt::Display| io::Error::other(e.to_string());
    let program = program(kind).map_err(|e| failed(&e))?;
    seccompiler::apply_filter(&program).map_err(|e| failed(&e))
}

/// Returns the filter of a kind.
fn program(kind: Kind) -> Result<BpfProgram, seccompiler::BackendError> {
    let arch = std::env::consts::ARCH.try_into()?;
    let mut rules = Rules::new();
    let lists: &[&[c_long]] = match kind {
        Kind::Any => &[MEMORY, THREAD, FILES, REQUESTS, SOCKETS, PATHS, NETWORK, STARTS, NEXT],
        Kind::Reactor => &[MEMORY, THREAD, FILES, REQUESTS, SOCKETS, JOURNALS],
        Kind::Control => &[MEMORY, THREAD, FILES, REQUESTS, SOCKETS, PATHS, STARTS, NEXT],
        Kind::Log => &[MEMORY, THREAD, FILES],
        Kind::Watchdog => &[MEMORY, THREAD, FILES, SOCKETS],
        Kind::Witness => &[MEMORY, THREAD, FILES],
    };
    rules.extend(lists.iter().flat_map(|list| list.iter()).map(|call| (*call, Vec::new())));
    // A tracer (strace --inject) replaces a call that it lets fail by this number.
    rules.insert(u32::MAX.into(), Vec::new());
    let maps_code = kind == Kind::Any;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, if maps_code { Vec::new() } else { vec![without(2, PROT_EXEC)?] });
    }
    let opens_all = matches!(kind, Kind::Any | Kind::Reactor | Kind::Control);
    let (at, plain) = (without(2, WRITES)?, without(1, WRITES)?);
    rules.insert(libc::SYS_openat, if opens_all { Vec::new() } else { vec![at] });
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, if opens_all { Vec::new() } else { vec![plain.clone()] });
    drop(plain);
    if matches!(kind, Kind::Any | Kind::Control) {
        // No new namespaces: they would give the process capabilities in them.
        rules.insert(libc::SYS_clone, vec![without(0, NAMESPACES)?]);
        // A next server that fails and does not end is killed.
        rules.insert(libc::SYS_pidfd_send_signal, vec![equal(1, libc::SIGKILL as u64)?]);
    }
    // Signals to this process only: an attached server ends itself, and an abort is a signal.
    let to_self = equal(0, std::process::id().into())?;
    // Signal 0 only tells whether a process lives: the last server of a ublk device.
    let lives = equal(1, 0)?;
    rules.insert(libc::SYS_kill, vec![to_self.clone(), lives]);
    rules.insert(libc::SYS_tgkill, vec![to_self]);
    arguments::add(&mut rules)?;
    let allow = SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, arch)?;
    let mut program = absent(&NEWER);
    if kind == Kind::Any {
        // The kernel cannot look at the flags of clone3, because they are in memory. The C library
        // uses clone if clone3 does not exist.
        program.extend(absent(&(libc::SYS_clone3..=libc::SYS_clone3)));
    }
    program.extend(BpfProgram::try_from(allow)?);
    Ok(program)
}

/// Returns the begin of a filter: calls in this range fail with ENOSYS. The filter goes on with the
/// others. (A filter of `seccompiler` has one answer for all listed calls. A second filter would
/// take longer: the kernel runs a filter once for each call when a thread installs it.)
fn absent(calls: &RangeInclusive<i64>) -> BpfProgram {
    let jump = |condition, value: i64, jt, jf| {
        let code = (libc::BPF_JMP | libc::BPF_K | condition) as u16;
        sock_filter { code, jt, jf, k: value as u32 }
    };
    let plain = |code: u32, k| sock_filter { code: code as u16, jt: 0, jf: 0, k };
    vec![
        plain(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, NUMBER_AT),
        // Below the range, or above it: over the rest.
        jump(libc::BPF_JGE, *calls.start(), 0, 2),
        jump(libc::BPF_JGT, *calls.end(), 1, 0),
        plain(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

/// Returns a rule that allows a call if none of these bits is set in an argument.
fn without(argument: u8, bits: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let operation = SeccompCmpOp::MaskedEq(bits);
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operation, 0)?;
    SeccompRule::new(vec![condition])
}

/// Calls that are newer than these lists (after Linux 6.5). They fail as on an older kernel,
/// because a newer C library tries them first, and then uses the older ones.
const NEWER: RangeInclusive<i64> = 452..=511;

/// Offset of a call's number in what a filter reads (`struct seccomp_data`).
const NUMBER_AT: u32 = 0;

const PROT_EXEC: u64 = libc::PROT_EXEC as u64;

/// Flags of an open for writing. O_TMPFILE needs one of them.
const WRITES: u64 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC) as u64;

/// Flags of clone that make namespaces.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Memory. `mmap` and `mprotect` have conditions.
const MEMORY: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_munmap,
];

/// What every thread needs: locks, time, signals, its end, and facts about itself. `prlimit64` and
/// `sched_setaffinity` have conditions.
const THREAD: &[c_long] = &[
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_membarrier,
    libc::SYS_nanosleep,
    libc::SYS_prctl,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    // The kernel may run the handler of a signal on any thread. It wakes the main thread by `send`.
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// Open files: read, write, wait, properties. And names that are only looked at. `ioctl` has
/// conditions.
const FILES: &[c_long] = &[
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pselect6,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    libc::SYS_write,
    libc::SYS_writev,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_pipe,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
];

/// Operations of requests on open files.
const REQUESTS: &[c_long] = &[
    libc::SYS_copy_file_range,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flock,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_sync_file_range,
    libc::SYS_utimensat,
];

/// Sockets that are connected or listen.
const SOCKETS: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
];

/// Removal and renaming of journals. A reactor creates one at the first change of an image's
/// metadata, and sets the journal of another image aside that has its place.
const JOURNALS: &[c_long] = &[
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
];

/// Changes of files by their names.
const PATHS: &[c_long] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_flistxattr,
    libc::SYS_getcwd,
    libc::SYS_getxattr,
    libc::SYS_linkat,
    libc::SYS_mkdirat,
    libc::SYS_openat2,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_link,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
];

/// New sockets, and the resolution of names.
const NETWORK: &[c_long] = &[
    libc::SYS_accept,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_socket,
    libc::SYS_socketpair,
];

/// New threads with their rings and filters. `clone` has a condition.
const STARTS: &[c_long] = &[
    libc::SYS_clone3,
    libc::SYS_io_uring_setup,
    libc::SYS_landlock_restrict_self,
    libc::SYS_seccomp,
    libc::SYS_set_tid_address,
];

/// Hand-over to the next server: a connection for it, and a descriptor to wait for its end. The end
/// of programs that were started before the sandbox closed. `pidfd_send_signal` has a condition.
const NEXT: &[c_long] =
    &[libc::SYS_pidfd_open, libc::SYS_socketpair, libc::SYS_wait4, libc::SYS_waitid];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_filter_that_the_kernel_accepts_in_size() {
        // BPF_MAXINSNS
        for kind in
            [Kind::Any, Kind::Reactor, Kind::Control, Kind::Log, Kind::Watchdog, Kind::Witness]
        {
            let program = program(kind).unwrap();
            assert!(!program.is_empty() && program.len() < 4096, "{kind:?}");
        }
    }

    #[test]
    fn no_list_has_a_newer_call() {
        let lists =
            [MEMORY, THREAD, FILES, REQUESTS, SOCKETS, JOURNALS, PATHS, NETWORK, STARTS, NEXT];
        assert!(lists.iter().all(|list| list.iter().all(|call| !NEWER.contains(call))));
    }

    #[test]
    fn no_list_has_calls_that_run_programs_or_change_users() {
        let lists = [MEMORY, THREAD, FILES, REQUESTS, SOCKETS, PATHS, NETWORK, STARTS];
        let never = [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_mount,
            libc::SYS_setuid,
            libc::SYS_bpf,
            libc::SYS_open_by_handle_at,
            libc::SYS_unshare,
        ];
        assert!(never.iter().all(|call| lists.iter().all(|list| !list.contains(call))));
    }
}
