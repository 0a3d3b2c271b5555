//! The life cycle of an io_uring operation.
//!
//! ```text
//!   start ──► slot Pending ──► SQE pushed ──► kernel ──► CQE reaped ──► slot Done ──► slot Free
//!                  │                                         │
//!                  └── future dropped: slot Orphan ──────────┴──► slot Free, memory released
//! ```
//! The lifetime rules that all `unsafe` code in this file relies on:
//! 1. `user_data` is the index of a slot. A slot is freed only after its last CQE is reaped. So an
//!    index is never reused while the kernel may still complete its operation.
//! 2. The slot owns what the operation uses: the segments (the iovec and its memory) and the file.
//!    They leave the slot at the last completion only. If the future is dropped, they stay in the
//!    slot (`Orphan`).
//! 3. An SQE is pushed after its slot is filled. It points to the slot's iovec vector. The vector's
//!    heap block does not move when the slab grows.
//! 4. Registered buffers (see `buffers`) do not change rule 2: the slot also owns the memory of an
//!    operation that names a registered buffer. The buffer counts the operation from before its SQE
//!    is pushed until its last CQE is reaped, and stays unchanged that long.
//! 5. The ring is dropped after all slots are free, or it leaks the slots' memory. It never frees
//!    memory that the kernel may use.

pub mod doorbell;
mod enter;
pub(crate) mod file_slot;
mod setup;
mod silence;
pub(crate) mod ublk_command;

use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, FsyncFlags};
use io_uring::{IoUring, Submitter, cqueue, opcode, squeue};

use crate::mem::buffers::{self, Buffers};
use crate::mem::segments::Segments;
use crate::sandbox;
use enter::Entrance;
use file_slot::{FileSlot, FileTable};
use setup::Setup;
pub(crate) use setup::restrict;
use silence::Silence;
use ublk_command::Command;

/// Entries of the table of registered files.
const FILES: u32 = 256;

const CANCEL: u64 = u64::MAX;

/// BLOCK_URING_CMD_DISCARD, `_IO(0x12, 0)`. The start is in the SQE's `addr`, the length in its
/// `addr3`, which is the first half of the command bytes.
const BLOCK_DISCARD: u32 = 0x1200;

/// Most kernel workers of a ring that make calls on sockets. Peers decide how long these calls
/// take, and each worker competes with the reactor for a processor.
const MOST_SOCKET_WORKERS: u32 = 4;

/// Number of a task of an executor.
pub type TaskId = u32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Pending,
    Done,
    Orphan,
}

struct Slot<T: FileTable> {
    state: State,
    /// Whether the operation is multishot: it continues until a CQE without F_MORE.
    multi: bool,
    /// Whether the kernel never cancels the operation.
    stays: bool,
    /// Whether one of the kernel's workers does the operation.
    for_worker: bool,
    task: TaskId,
    result: i32,
    segments: Segments,
    file: Option<Rc<FileSlot<T>>>,
    /// The registered buffer that contains the segments, or [`buffers::NONE`].
    buffer: u16,
}

/// The kind of an operation; its memory is the slot's segments.
#[derive(Clone, Copy)]
pub(crate) enum Action {
    Read {
        offset: u64,
    },
    Write {
        offset: u64,
        rw_flags: i32,
    },
    Sync,
    Fallocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Discards a range of a block device.
    Discard {
        offset: u64,
        len: u64,
    },
    Poll {
        fd: i32,
    },
    /// Completes when the file is readable or has ended.
    Readable,
    /// Stays in the kernel until a request arrives; see `ublk_command`.
    Ublk(Command),
}

/// A ring, and the operations on it. `T`: the executor that uses the files of the operations.
pub(crate) struct Uring<T: FileTable> {
    /// Before `ring`, because fields are dropped in this order.
    entrance: Entrance,
    ring: IoUring,
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    free_files: Vec<u32>,
    buffers: Buffers,
    /// Number of operations that the kernel has not completed.
    in_flight: usize,
    /// Number of operations in flight that no future awaits, and that end only with the ring.
    left: usize,
    silence: Silence,
}

/// Returns the CPUs of the calling thread, for the kernel's worker threads (for fdatasync, and
/// writes that allocate).
///
/// Not the empty set, although idle workers would end then. The kernel keeps the last worker of a
/// ring, and wakes it every 5 s. If it ends instead, it can end while an operation is given to it,
/// and that operation never completes: from Linux 6.4 on, io-wq counts on each worker that is still
/// in the list of idle ones. A flush was lost so.
fn own_cpus() -> libc::cpu_set_t {
    // SAFETY: all zeroes is a valid value of this plain C bit set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most the size of `set`. If it fails, `set` stays empty, and the
    // kernel has a default.
    unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    set
}

impl<T: FileTable> Uring<T> {
    pub fn new() -> io::Result<Self> {
        let restricted = sandbox::is_on();
        let (ring, setup) = Setup::newest(Setup::build)?;
        if setup != Setup::Deferred {
            tracing::info!(
                "io_uring lacks deferred task work (needs Linux 6.1): requests are slower"
            );
        }
        let files = ring.submitter().register_files_sparse(FILES);
        let free_files = match files {
            Ok(()) => (0..FILES).rev().collect(),
            Err(e) => {
                tracing::info!(
                    "cannot register files with io_uring ({e}): using plain descriptors"
                );
                Vec::new()
            }
        };
        let _ = ring.submitter().register_iowq_aff(&own_cpus());
        // A zero: the number of workers for files stays.
        let _ = ring.submitter().register_iowq_max_workers(&mut [0, MOST_SOCKET_WORKERS]);
        let entrance = Entrance::new(&ring);
        if restricted {
            setup.restrict(&ring)?;
        }
        ring.submitter().register_enable_rings()?;
        Ok(Uring {
            entrance,
            ring,
            slots: Vec::new(),
            free: Vec::new(),
            free_files,
            buffers: Buffers::new(),
            in_flight: 0,
            left: 0,
            silence: Silence::default(),
        })
    }

    /// Enters `fd` into the table of registered files. `None`: the table is full or missing.
    pub fn register_file(&mut self, fd: i32) -> Option<u32> {
        let index = self.free_files.pop()?;
        match self.ring.submitter().register_files_update(index, &[fd]) {
            Ok(_) => Some(index),
            Err(_) => {
                self.free_files.push(index);
                None
            }
        }
    }

    pub fn unregister_file(&mut self, index: u32) {
        if self.ring.submitter().register_files_update(index, &[-1]).is_ok() {
            self.free_files.push(index);
        }
    }

    /// Returns the registered buffers, and the submitter to change them.
    pub fn buffers(&mut self) -> (&mut Buffers, Submitter<'_>) {
        (&mut self.buffers, self.ring.submitter())
    }

    /// Starts an operation for `task`. Returns its slot.
    #[inline]
    pub fn start(
        &mut self,
        task: TaskId,
        action: Action,
        segments: Segments,
        file: Option<Rc<FileSlot<T>>>,
    ) -> u32 {
        let multi = matches!(action, Action::Poll { .. });
        let fixed = file.as_ref().and_then(|f| f.registered());
        let fd = file.as_ref().map_or(-1, |f| f.raw());
        let buffer = match action {
            Action::Read { .. } | Action::Write { .. } if segments.request().is_none() => {
                self.buffers.take(segments.iovecs(), segments.len())
            }
            _ => buffers::NONE,
        };
        // Zero-copy data is registered by the ublk driver, in an entry that the driver manages.
        let sqe_buffer = segments.request().map_or(buffer, |data| data.entry());
        let stays = matches!(action, Action::Ublk(_));
        let moves = matches!(action, Action::Read { .. } | Action::Write { .. });
        let to_worker = moves && file.as_ref().is_some_and(|f| f.leaves_to_worker(segments.len()));
        let for_worker = to_worker
            || matches!(action, Action::Sync | Action::Fallocate { .. } | Action::Discard { .. });
        if for_worker {
            self.silence.started();
        }
        let (state, result) = (State::Pending, 0);
        let slot = Slot { state, multi, stays, for_worker, task, result, segments, file, buffer };
        let key = match self.free.pop() {
            Some(key) => {
                self.slots[key as usize] = slot;
                key
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        let iov = self.slots[key as usize].segments.iovecs();
        macro_rules! on_file {
            ($op:expr) => {
                match fixed {
                    Some(index) => $op(squeue_target::Target::Fixed(Fixed(index))),
                    None => $op(squeue_target::Target::Fd(Fd(fd))),
                }
            };
        }
        let sqe =
            on_file!(|target| build(action, iov, sqe_buffer, target)).user_data(u64::from(key));
        let sqe = if to_worker { sqe.flags(squeue::Flags::ASYNC) } else { sqe };
        self.push(&sqe);
        self.in_flight += 1;
        key
    }

    #[inline]
    fn push(&mut self, sqe: &squeue::Entry) {
        loop {
            // SAFETY: rules 1 to 3 of this module: the slot keeps what the entry points to until
            // the completion.
            if unsafe { self.ring.submission().push(sqe) }.is_ok() {
                return;
            }
            // The queue is full: submit it. On errors (EBUSY, EAGAIN, EINTR) try again.
            let _ = self.ring.submit();
        }
    }

    /// Returns the result and the segments of a completed operation, and frees its slot. `None`:
    /// the operation is pending.
    #[inline]
    pub fn take(&mut self, key: u32) -> Option<(i32, Segments)> {
        let slot = &mut self.slots[key as usize];
        if slot.state != State::Done {
            return None;
        }
        slot.state = State::Free;
        slot.file = None;
        let result = (slot.result, std::mem::take(&mut slot.segments));
        self.free.push(key);
        Some(result)
    }

    /// Sets the task to wake at the completion (a future may move to another task before its first
    /// poll).
    #[inline]
    pub fn set_task(&mut self, key: u32, task: TaskId) {
        self.slots[key as usize].task = task;
    }

    /// Handles a dropped future: the slot is freed when the kernel completes the operation.
    pub fn abandon(&mut self, key: u32) {
        let slot = &mut self.slots[key as usize];
        match slot.state {
            State::Pending => {
                slot.state = State::Orphan;
                let multi = slot.multi;
                self.left += usize::from(slot.stays);
                if multi {
                    let cancel = opcode::AsyncCancel::new(u64::from(key)).build().user_data(CANCEL);
                    self.push(&cancel);
                }
            }
            State::Done => {
                self.take(key);
            }
            State::Free | State::Orphan => {}
        }
    }

    /// Asks the kernel to end the operations in flight on a file. They complete as usual, with
    /// ECANCELED if they have done nothing.
    pub fn cancel(&mut self, file: &Rc<FileSlot<T>>) {
        let uses = |slot: &Slot<T>| {
            slot.state == State::Pending
                && slot.file.as_ref().is_some_and(|of| Rc::ptr_eq(of, file))
        };
        let slots = (0u64..).zip(&self.slots).filter(|(_, slot)| uses(slot));
        let keys: Vec<u64> = slots.map(|(key, _)| key).collect();
        // An operation that gets the same key later is submitted behind the cancellation.
        for key in keys {
            self.push(&opcode::AsyncCancel::new(key).build().user_data(CANCEL));
        }
    }

    /// Submits, and waits for a completion if `wait` is set (for at most that time). Then reaps
    /// completions, and calls `wake` for their tasks. The wait may end earlier.
    pub fn submit_and_reap(
        &mut self,
        wait: Option<Option<Duration>>,
        now: Instant,
        wake: impl FnMut(TaskId),
    ) -> io::Result<()> {
        if self.silence.is_too_long(now) {
            tracing::debug!("io_uring: the kernel's workers complete nothing: asking them again");
            self.push(&opcode::Nop::new().build().flags(squeue::Flags::ASYNC).user_data(CANCEL));
        }
        let wait = wait.map(|limit| self.silence.bound(limit, now));
        let result = self.entrance.enter(&mut self.ring, wait);
        self.reap(wake);
        match result.map_err(|e| (e.raw_os_error(), e)) {
            Ok(_) => Ok(()),
            // A signal, the timeout, or a kernel short of memory or completion entries: the next
            // iteration tries again.
            Err((
                Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY | libc::ENOMEM),
                _,
            )) => Ok(()),
            Err((_, e)) => Err(e),
        }
    }

    #[inline]
    fn reap(&mut self, mut wake: impl FnMut(TaskId)) {
        for cqe in self.ring.completion() {
            if cqe.user_data() == CANCEL {
                continue;
            }
            let key = cqe.user_data() as u32;
            let slot = &mut self.slots[key as usize];
            slot.result = cqe.result();
            let last = !cqueue::more(cqe.flags());
            if last {
                self.in_flight -= 1;
                if slot.for_worker {
                    self.silence.completed();
                }
                self.buffers.done(slot.buffer);
            }
            match slot.state {
                State::Pending => {
                    // A multishot operation that continues wakes its task, and stays pending.
                    if last {
                        slot.state = State::Done;
                    }
                    wake(slot.task);
                }
                State::Orphan if last => {
                    slot.state = State::Free;
                    self.left -= usize::from(slot.stays);
                    slot.file = None;
                    slot.segments = Segments::default();
                    self.free.push(key);
                }
                State::Orphan => {}
                State::Free | State::Done => {
                    debug_assert!(false, "unexpected completion of a slot")
                }
            }
        }
        if self.buffers.has_clearable() {
            // One only, because to unpin memory takes long: see `has_to_clear`.
            self.buffers.clear_one(&self.ring.submitter());
        }
    }

    /// Returns whether the next iteration must follow at once, because there are registered buffers
    /// to clear.
    #[inline]
    pub fn has_to_clear(&self) -> bool {
        self.buffers.has_clearable()
    }

    /// Returns the number of operations that complete without further action.
    pub fn in_flight(&self) -> usize {
        self.in_flight - self.left
    }
}

#[cfg(test)]
impl<T: FileTable> Uring<T> {
    /// Returns the number of operations that the kernel's workers have.
    pub fn for_workers(&self) -> usize {
        self.slots
            .iter()
            .filter(|slot| slot.for_worker && matches!(slot.state, State::Pending))
            .count()
    }

    /// Returns the result of a shutdown of a socket, which [`build`] never makes.
    pub fn result_of_shutdown(&mut self) -> i32 {
        self.push(&opcode::Shutdown::new(Fd(-1), 0).build());
        self.ring.submit_and_wait(1).unwrap();
        self.ring.completion().next().unwrap().result()
    }
}

impl<T: FileTable> Drop for Uring<T> {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // Rule 5: the kernel may still write to this memory, so it is leaked.
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}

mod squeue_target {
    pub enum Target {
        Fixed(io_uring::types::Fixed),
        Fd(io_uring::types::Fd),
    }
}

/// Evaluates the expression with the target's type of `io_uring`.
macro_rules! with {
    ($target:ident, |$fd:ident| $body:expr) => {
        match $target {
            squeue_target::Target::Fixed($fd) => $body,
            squeue_target::Target::Fd($fd) => $body,
        }
    };
}

/// Builds the SQE of a read or write. `buffer`: the registered buffer that contains all of `iov`,
/// or [`buffers::NONE`]. `rw_flags`: `None` for a read.
#[inline]
fn build_transfer(
    (offset, rw_flags): (u64, Option<i32>),
    iov: &[libc::iovec],
    buffer: u16,
    target: squeue_target::Target,
) -> squeue::Entry {
    let registered = buffer != buffers::NONE;
    // A single segment needs no iovec import in the kernel.
    let single = match iov {
        [one] if registered || one.iov_len <= u32::MAX as usize => {
            Some((one.iov_base.cast::<u8>(), one.iov_len as u32))
        }
        _ => None,
    };
    let (vector, count) = (iov.as_ptr(), iov.len() as u32);
    match (rw_flags, registered, single) {
        (None, true, Some((base, len))) => with!(target, |fd| {
            opcode::ReadFixed::new(fd, base, len, buffer).offset(offset).build()
        }),
        (Some(flags), true, Some((base, len))) => with!(target, |fd| {
            opcode::WriteFixed::new(fd, base, len, buffer).offset(offset).rw_flags(flags).build()
        }),
        (None, true, None) => with!(target, |fd| {
            opcode::ReadvFixed::new(fd, vector, count, buffer).offset(offset).build()
        }),
        (Some(flags), true, None) => with!(target, |fd| {
            opcode::WritevFixed::new(fd, vector, count, buffer)
                .offset(offset)
                .rw_flags(flags)
                .build()
        }),
        (None, false, Some((base, len))) => {
            with!(target, |fd| opcode::Read::new(fd, base, len).offset(offset).build())
        }
        (Some(flags), false, Some((base, len))) => with!(target, |fd| {
            opcode::Write::new(fd, base, len).offset(offset).rw_flags(flags).build()
        }),
        (None, false, None) => {
            with!(target, |fd| opcode::Readv::new(fd, vector, count).offset(offset).build())
        }
        (Some(flags), false, None) => with!(target, |fd| {
            opcode::Writev::new(fd, vector, count).offset(offset).rw_flags(flags).build()
        }),
    }
}

/// Builds the SQE. `buffer`: the registered buffer that contains all of `iov`, or
/// [`buffers::NONE`].
fn build(
    action: Action,
    iov: &[libc::iovec],
    buffer: u16,
    target: squeue_target::Target,
) -> squeue::Entry {
    match action {
        Action::Read { offset } => build_transfer((offset, None), iov, buffer, target),
        Action::Write { offset, rw_flags } => {
            build_transfer((offset, Some(rw_flags)), iov, buffer, target)
        }
        Action::Sync => {
            with!(target, |fd| opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build())
        }
        Action::Fallocate { mode, offset, len } => {
            with!(target, |fd| opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build())
        }
        Action::Discard { offset, len } => {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&len.to_ne_bytes());
            with!(target, |fd| opcode::UringCmd16::new(fd, BLOCK_DISCARD)
                .cmd(bytes)
                .addr(Some(offset))
                .build())
        }
        Action::Ublk(command) => {
            let (bytes, address) = command.encode(iov);
            with!(target, |fd| opcode::UringCmd16::new(fd, command.op)
                .cmd(bytes)
                .addr(Some(address))
                .build())
        }
        Action::Readable => {
            with!(target, |fd| opcode::PollAdd::new(fd, libc::POLLIN as u32).build())
        }
        Action::Poll { fd } => {
            opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true).build()
        }
    }
}
