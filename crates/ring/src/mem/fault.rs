//! Survives SIGBUS in memory that another process shares.
//!
//! A front end can truncate the file that it shares, and a pool of huge pages can run dry. Touching
//! the missing pages then raises SIGBUS, which would end the process, and with it the disks of all
//! guests. The handler here loses that mapping for good, and raises its [`MemoryAlarm`]:
//! - It maps an empty file over the whole mapping. Reads and writes of the kernel fail with EFAULT
//!   there, so no data are transferred any more.
//! - It maps zeroed memory, a window, at the faulting access, so that the thread goes on. The
//!   process has a fixed number of windows. A new one replaces the oldest, which shows the empty
//!   file again.
//!
//! What must hold
//! - A mapping is entered in the table before it is touched, and removed before it is unmapped.
//! - The handler allocates nothing and takes no lock.
//! - Lost mappings use at most 64 MiB ([`WINDOWS`] times [`WINDOW_LEN`]), whatever accesses they
//!   see.
//! - The handler changes a mapping only while its guard exists: the faulting thread keeps its own
//!   mapping alive, and [`Slot::users`] delays the guard of another mapping.
//! - A fault outside these mappings ends the process as without the handler.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};

const SLOTS: usize = 64;
/// Maximum number of log lines about lost mappings in the life of the process.
const LINES: u32 = 10;
/// Maximum number of windows of all lost mappings together. One instruction touches at most four
/// pages. So this is more than all threads need at the same time.
const WINDOWS: usize = 256;
/// Bytes of a window: several pages, so that a copy of much data does not fault for each page.
const WINDOW_LEN: usize = 256 << 10;

/// Reports that memory of one front end is lost.
#[derive(Debug)]
pub struct MemoryAlarm {
    raised: AtomicBool,
    /// An eventfd of this process alone, which is signalled.
    event: Arc<OwnedFd>,
}

impl MemoryAlarm {
    /// `event`: an eventfd that does not block, which no other process has.
    pub fn new(event: Arc<OwnedFd>) -> Self {
        MemoryAlarm { raised: AtomicBool::new(false), event }
    }

    /// Returns whether memory is lost.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Relaxed)
    }

    /// Async-signal-safe.
    fn raise(&self) {
        self.raised.store(true, SeqCst);
        let one = 1u64.to_ne_bytes();
        // SAFETY: write(2) is async-signal-safe; the bytes outlive the call.
        unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

struct Slot {
    base: AtomicUsize,
    /// 0: the slot is free, or being filled.
    len: AtomicUsize,
    /// The alarm of the mapping, or null. The guard keeps it alive.
    alarm: AtomicPtr<MemoryAlarm>,
    /// The empty file is mapped over the whole mapping.
    lost: AtomicBool,
    /// Number of guards that have had this slot.
    number: AtomicU64,
    /// Number of threads that replace a window which may be in the slot's mapping.
    users: AtomicUsize,
}

/// A part of a lost mapping that shows memory instead of the empty file.
struct Window {
    /// A thread changes the window. Other threads take another one.
    busy: AtomicBool,
    slot: AtomicPtr<Slot>,
    /// [`Slot::number`] of the mapping that has the window.
    number: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
}

#[expect(
    clippy::declare_interior_mutable_const,
    reason = "an array's initialiser, copied and never used itself"
)]
const CLOSED: Window = Window {
    busy: AtomicBool::new(false),
    slot: AtomicPtr::new(null_mut()),
    number: AtomicU64::new(0),
    start: AtomicUsize::new(0),
    len: AtomicUsize::new(0),
};

static OPEN: [Window; WINDOWS] = [CLOSED; WINDOWS];

/// Number of windows that were opened. The next one replaces the oldest.
static OPENED: AtomicUsize = AtomicUsize::new(0);

/// A part of the table of mappings. Blocks are added, and never freed.
struct Block {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        #[expect(
            clippy::declare_interior_mutable_const,
            reason = "an array's initialiser, copied and never used itself"
        )]
        const FREE: Slot = Slot {
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            alarm: AtomicPtr::new(null_mut()),
            lost: AtomicBool::new(false),
            number: AtomicU64::new(0),
            users: AtomicUsize::new(0),
        };
        Block { slots: [FREE; SLOTS], next: AtomicPtr::new(null_mut()) }
    }

    fn next(&self) -> Option<&'static Block> {
        // SAFETY: `next` is null or a leaked block.
        unsafe { self.next.load(Acquire).as_ref() }
    }
}

static FIRST: Block = Block::new();

/// What the handler needs.
struct Installed {
    /// The SIGBUS action from before.
    previous: libc::sigaction,
    /// A file without a byte.
    empty: OwnedFd,
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// A mapping's entry in the table. Dropping it removes the entry.
pub struct Guard {
    slot: &'static Slot,
    _alarm: Option<Arc<MemoryAlarm>>,
}

impl Guard {
    /// Registers a mapping of `len` (not 0) bytes at `base` with the fault handler until the guard
    /// is dropped. `alarm`: is raised when the mapping is lost. Fails if the process has no
    /// descriptor or memory left.
    pub fn new(
        base: NonNull<u8>,
        len: usize,
        alarm: Option<Arc<MemoryAlarm>>,
    ) -> io::Result<Guard> {
        install()?;
        let slot = Slot::taken(base.as_ptr() as usize);
        let pointer = alarm.as_ref().map_or(null_mut(), |alarm| Arc::as_ptr(alarm).cast_mut());
        slot.alarm.store(pointer, Relaxed);
        slot.lost.store(false, Relaxed);
        slot.len.store(len, Release);
        Ok(Guard { slot, _alarm: alarm })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // From here on no thread begins to change the mapping. SeqCst: a thread that has not seen
        // the new number is seen here.
        self.slot.number.fetch_add(1, SeqCst);
        while self.slot.users.load(SeqCst) > 0 {
            // A handler on another thread makes one system call.
            std::thread::yield_now();
        }
        self.slot.len.store(0, Release);
        self.slot.base.store(0, Release);
    }
}

impl Slot {
    /// Returns a free slot, which the caller has from now on.
    fn taken(base: usize) -> &'static Slot {
        let is_taken = |s: &&Slot| s.base.compare_exchange(0, base, AcqRel, Relaxed).is_ok();
        let mut block = &FIRST;
        loop {
            if let Some(slot) = block.slots.iter().find(is_taken) {
                return slot;
            }
            block = block.next().unwrap_or_else(|| {
                let new = Box::into_raw(Box::new(Block::new()));
                match block.next.compare_exchange(null_mut(), new, AcqRel, Acquire) {
                    // SAFETY: `new` was just allocated, and is never freed once it is in the table.
                    Ok(_) => unsafe { &*new },
                    Err(other) => {
                        // SAFETY: no other thread has seen `new`; `other` is a block of the table.
                        unsafe {
                            drop(Box::from_raw(new));
                            &*other
                        }
                    }
                }
            });
        }
    }

    /// Maps the empty file over the slot's mapping, and raises its alarm. Several threads may do
    /// that at the same time; then one of them faults again. Returns false if that fails.
    fn lose(&self, base: usize, len: usize, empty: RawFd) -> bool {
        if self.lost.load(Acquire) {
            return true;
        }
        if !show_empty(base, len, 0, empty) {
            return false;
        }
        if !self.lost.swap(true, AcqRel) {
            // SAFETY: the faulting thread keeps the mapping alive, and with it the guard, which
            // keeps the alarm alive.
            if let Some(alarm) = unsafe { self.alarm.load(Relaxed).as_ref() } {
                alarm.raise();
            }
            report();
        }
        true
    }
}

impl Window {
    /// Returns the oldest window, or the next one if another thread changes that.
    fn oldest() -> &'static Window {
        loop {
            let window = &OPEN[OPENED.fetch_add(1, Relaxed) % WINDOWS];
            if !window.busy.swap(true, Acquire) {
                return window;
            }
        }
    }

    /// Shows the empty file in place of the window, unless its mapping is gone.
    fn close(&self, empty: RawFd) -> bool {
        // SAFETY: null, or a slot of a block, which is never freed.
        let Some(slot) = (unsafe { self.slot.load(Relaxed).as_ref() }) else { return true };
        slot.users.fetch_add(1, SeqCst);
        let (start, len) = (self.start.load(Relaxed), self.len.load(Relaxed));
        let is_gone = slot.number.load(SeqCst) != self.number.load(Relaxed);
        // The offset lets the kernel join the window with the rest of the mapping.
        let offset = start.saturating_sub(slot.base.load(Relaxed));
        let done = is_gone || show_empty(start, len, offset, empty);
        slot.users.fetch_sub(1, SeqCst);
        self.slot.store(null_mut(), Relaxed);
        done
    }

    /// Shows zeroed memory at `address`, which is in the mapping of `slot`.
    fn open(&self, slot: &'static Slot, (base, len): (usize, usize), address: usize) -> bool {
        let start = (address & !(WINDOW_LEN - 1)).max(base);
        let len = ((address | (WINDOW_LEN - 1)).saturating_add(1)).min(base + len) - start;
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: the range is in a mapping of ours, which the faulting thread keeps alive. Raw
        // memory replaces raw memory, and readers never trust its content.
        let place = unsafe { libc::mmap(start as *mut _, len, protection, flags, -1, 0) };
        if place == libc::MAP_FAILED {
            return false;
        }
        self.start.store(start, Relaxed);
        self.len.store(len, Relaxed);
        self.number.store(slot.number.load(Relaxed), Relaxed);
        self.slot.store(std::ptr::from_ref(slot).cast_mut(), Relaxed);
        true
    }
}

/// Maps the empty file from `offset` over `len` bytes at `base`, which are a mapping of ours.
fn show_empty(base: usize, len: usize, offset: usize, empty: RawFd) -> bool {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_FIXED | libc::MAP_SHARED | libc::MAP_NORESERVE,
    );
    // SAFETY: the range is in one of our mappings, which cannot be unmapped now (see the top of the
    // file). Raw memory replaces raw memory, and readers never trust its content.
    let place =
        unsafe { libc::mmap(base as *mut _, len, protection, flags, empty, offset as libc::off_t) };
    place != libc::MAP_FAILED
}

/// Installs the handler, once in the life of the process. The first mapping does it, too. A lack of
/// descriptors is then an error at start.
pub fn install() -> io::Result<()> {
    if INSTALLED.get().is_none() {
        let empty = rustix::fs::memfd_create("lost-memory", rustix::fs::MemfdFlags::CLOEXEC)?;
        INSTALLED.get_or_init(|| Installed { previous: handle_faults(), empty });
    }
    Ok(())
}

fn handle_faults() -> libc::sigaction {
    // SAFETY: an all-zero sigaction is a valid value of this plain C struct.
    let (mut action, mut previous): (libc::sigaction, libc::sigaction) =
        unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_fault as extern "C" fn(_, _, _) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both structs outlive the call; the handler is async-signal-safe.
    unsafe { libc::sigaction(libc::SIGBUS, &action, &mut previous) };
    previous
}

extern "C" fn on_fault(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let Some(installed) = INSTALLED.get() else { return };
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler, and SIGBUS has an
    // address.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut block = Some(&FIRST);
    while let Some(here) = block {
        for slot in &here.slots {
            let (base, len) = (slot.base.load(Acquire), slot.len.load(Acquire));
            // If the slot was reused for another mapping meanwhile, its base has changed.
            let same = slot.base.load(Acquire) == base;
            if same
                && address >= base
                && address - base < len
                && replace(slot, (base, len), address, installed)
            {
                return;
            }
        }
        block = here.next();
    }
    // SAFETY: this restores the previous action. The faulting access is then repeated, and the
    // previous action handles it.
    unsafe { libc::sigaction(libc::SIGBUS, &installed.previous, null_mut()) };
}

/// Loses the mapping of a slot, and opens a window for the access to `address`.
fn replace(
    slot: &'static Slot,
    (base, len): (usize, usize),
    address: usize,
    installed: &Installed,
) -> bool {
    // SAFETY: errno is thread-local. The interrupted code must find it unchanged.
    let errno = unsafe { *libc::__errno_location() };
    let empty = installed.empty.as_raw_fd();
    let done = slot.lose(base, len, empty) && {
        let window = Window::oldest();
        let done = window.close(empty) && window.open(slot, (base, len), address);
        window.busy.store(false, Release);
        done
    };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    done
}

fn report() {
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    if WRITTEN.fetch_add(1, Relaxed) < LINES {
        let line = b" WARN blockyard_ring: a front end truncated memory that it shares\n";
        let mut ready = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
        // The thread may be a reactor, and must not wait for the reader of standard error. A pipe
        // that is ready has room for PIPE_BUF bytes, so for the line.
        // SAFETY: poll(2) and write(2) are async-signal-safe. `ready` is one pollfd, and the line
        // outlives the call.
        unsafe {
            if libc::poll(&mut ready, 1, 0) > 0 && ready.revents & libc::POLLOUT != 0 {
                libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
            }
        }
    }
}
