//! Survives SIGBUS in memory that another process shares.
//!
//! A front end can truncate the file that it shares, and a pool of huge pages can run dry. Touching
//! the missing pages then raises SIGBUS, which would end the process, and with it the disks of all
//! guests. The handler here maps zeroed memory over the whole mapping: that guest's virtqueues are
//! lost, and nothing else. (The kernel's own accesses fail with EFAULT.)
//!
//! What must hold
//! - A mapping is entered in the table before it is touched, and removed before it is unmapped.
//! - The handler allocates nothing and takes no lock.
//! - A fault outside these mappings ends the process as without the handler.

use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

const SLOTS: usize = 64;
/// Maximum number of log lines about lost mappings in the life of the process.
const LINES: u32 = 10;

struct Slot {
    base: AtomicUsize,
    /// 0: the slot is free, or being filled.
    len: AtomicUsize,
}

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
        const FREE: Slot = Slot { base: AtomicUsize::new(0), len: AtomicUsize::new(0) };
        Block { slots: [FREE; SLOTS], next: AtomicPtr::new(null_mut()) }
    }

    fn next(&self) -> Option<&'static Block> {
        // SAFETY: `next` is null or a leaked block.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }
}

static FIRST: Block = Block::new();

/// The SIGBUS action from before `install`.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping's entry in the table. Dropping it removes the entry.
pub struct Guard(&'static Slot);

impl Guard {
    /// Registers a mapping of `len` (not 0) bytes at `base` with the fault handler until the guard
    /// is dropped.
    pub fn new(base: NonNull<u8>, len: usize) -> Guard {
        PREVIOUS.get_or_init(install);
        let base = base.as_ptr() as usize;
        let mut block = &FIRST;
        loop {
            let taken = |s: &&Slot| {
                s.base.compare_exchange(0, base, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            };
            if let Some(slot) = block.slots.iter().find(taken) {
                slot.len.store(len, Ordering::Release);
                return Guard(slot);
            }
            block = block.next().unwrap_or_else(|| {
                let new = Box::into_raw(Box::new(Block::new()));
                match block.next.compare_exchange(
                    null_mut(),
                    new,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
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
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.len.store(0, Ordering::Release);
        self.0.base.store(0, Ordering::Release);
    }
}

fn install() -> libc::sigaction {
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
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler, and SIGBUS has an
    // address.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut block = Some(&FIRST);
    while let Some(here) = block {
        for slot in &here.slots {
            let (base, len) = (slot.base.load(Ordering::Acquire), slot.len.load(Ordering::Acquire));
            // If the slot was reused for another mapping meanwhile, its base has changed.
            let same = slot.base.load(Ordering::Acquire) == base;
            if same && address >= base && address - base < len && replace(base, len) {
                return;
            }
        }
        block = here.next();
    }
    if let Some(previous) = PREVIOUS.get() {
        // SAFETY: this restores the previous action. The faulting access is then repeated, and the
        // previous action handles it.
        unsafe { libc::sigaction(libc::SIGBUS, previous, null_mut()) };
    }
}

/// Maps zeroed memory over a mapping.
fn replace(base: usize, len: usize) -> bool {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    );
    // SAFETY: errno is thread-local. The interrupted code must find it unchanged.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is exactly one of our mappings, which the faulting thread keeps alive. Raw
    // memory replaces raw memory, and readers never trust its content.
    let place = unsafe { libc::mmap(base as *mut _, len, protection, flags, -1, 0) };
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    if place != libc::MAP_FAILED && WRITTEN.fetch_add(1, Ordering::Relaxed) < LINES {
        let line = b" WARN blockyard_ring: a front end truncated the memory that it shares; \
                     its virtqueues are lost\n";
        // SAFETY: write(2) is async-signal-safe; the line outlives the call.
        unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    place != libc::MAP_FAILED
}
