//! Memory of others that goes away under us.
//!
//! A front end can cut short the file that it shares, and a pool of huge pages can run dry:
//! touching what is missing then raises SIGBUS, which would end the process and every other guest's
//! disk with it. The handler here puts zeroed memory of our own in the place of the whole mapping:
//! that guest's rings are lost, nothing else is. (The kernel's own accesses just fail, with
//! EFAULT.)
//!
//! What must hold: a mapping is noted before it is touched and forgotten before it is unmapped; the
//! handler allocates nothing and takes no lock; a fault that is not in a noted mapping ends the
//! process as it always did.

use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

const SLOTS: usize = 64;
/// Lines that are written of such losses in the life of the process.
const LINES: u32 = 10;

struct Slot {
    base: AtomicUsize,
    /// 0: the slot is free, or not ready yet.
    len: AtomicUsize,
}

/// A piece of the table of mappings; pieces are added, and never given back.
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
        // SAFETY: `next` is null or a block that was leaked.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }
}

static FIRST: Block = Block::new();

/// What stood in for SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping's entry; it ends when this is dropped.
pub struct Guard(&'static Slot);

impl Guard {
    /// Notes a mapping of `len` (not 0) bytes at `base`.
    pub fn new(base: NonNull<u8>, len: usize) -> Guard {
        BEFORE.get_or_init(install);
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
                    // SAFETY: just made, and given to the table for ever.
                    Ok(_) => unsafe { &*new },
                    Err(other) => {
                        // SAFETY: nobody but us has seen `new`; `other` is a block of the table.
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
    // SAFETY: all-zero sigactions are valid values of a plain C struct.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) =
        unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_fault as extern "C" fn(_, _, _) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both structs outlive the call; the handler does only what a signal handler may.
    unsafe { libc::sigaction(libc::SIGBUS, &action, &mut before) };
    before
}

extern "C" fn on_fault(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a SA_SIGINFO handler a valid siginfo, and SIGBUS has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut block = Some(&FIRST);
    while let Some(here) = block {
        for slot in &here.slots {
            let (base, len) = (slot.base.load(Ordering::Acquire), slot.len.load(Ordering::Acquire));
            // An entry that was given to another mapping meanwhile has another base now.
            let same = slot.base.load(Ordering::Acquire) == base;
            if same && address >= base && address - base < len && replace(base, len) {
                return;
            }
        }
        block = here.next();
    }
    if let Some(before) = BEFORE.get() {
        // SAFETY: what stood there before is put back; the access is then tried again, and meets
        // it.
        unsafe { libc::sigaction(libc::SIGBUS, before, null_mut()) };
    }
}

/// Zeroed memory in the place of a mapping.
fn replace(base: usize, len: usize) -> bool {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    );
    // SAFETY: errno is the thread's own; the code that was interrupted finds it as it was.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is exactly a mapping of ours, which the faulting thread holds; raw memory
    // stands in for raw memory there, and whoever reads it believes nothing of what it says anyway.
    let place = unsafe { libc::mmap(base as *mut _, len, protection, flags, -1, 0) };
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    if place != libc::MAP_FAILED && WRITTEN.fetch_add(1, Ordering::Relaxed) < LINES {
        let line = b" WARN blockyard_ring: a front end cut short the memory that it shares: its queues are lost\n";
        // SAFETY: write(2) may be called in a signal handler; the line outlives it.
        unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    place != libc::MAP_FAILED
}
