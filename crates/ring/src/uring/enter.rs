//! The system calls that submit to an io_uring and wait for its completions.
//!
//! The kernel looks up the ring's descriptor in each call, which takes 55 ns in a process with
//! several threads. If the thread has registered the ring, the kernel looks in a short table of the
//! thread instead. Crate io-uring keeps the registered index in its `Submitter`, which borrows the
//! ring; this module keeps it beside the ring. A timeout takes another 55 ns, because the kernel
//! copies it, unless it lies in memory that the ring has registered.
//!
//! In: a ring, the number of entries to submit, and how long to wait. Out: a system call. What must
//! hold: only the thread that made an [`Entrance`] uses it, because the table belongs to it.

use std::cell::UnsafeCell;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use io_uring::{EnterFlags, IoUring};

/// Calls of io_uring_register; names as in `linux/io_uring.h`.
const REGISTER_RING_FDS: libc::c_uint = 20;
const UNREGISTER_RING_FDS: libc::c_uint = 21;
const REGISTER_MEM_REGION: libc::c_uint = 34;

/// `struct io_uring_rsrc_update`.
#[repr(C)]
struct Update {
    /// Index in the table of the thread. u32::MAX: the kernel chooses a free one.
    offset: u32,
    reserved: u32,
    data: u64,
}

/// `struct io_uring_getevents_arg`.
#[repr(C)]
struct WaitArguments {
    signals: u64,
    signals_len: u32,
    min_wait_us: u32,
    timeout: u64,
}

/// `struct __kernel_timespec`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Timeout {
    seconds: i64,
    nanoseconds: i64,
}

impl From<Duration> for Timeout {
    fn from(duration: Duration) -> Self {
        Timeout {
            seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: duration.subsec_nanos().into(),
        }
    }
}

/// `struct io_uring_reg_wait`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RegisteredWait {
    timeout: Timeout,
    min_wait_us: u32,
    /// 1 (IORING_REG_WAIT_TS): `timeout` is set.
    flags: u32,
    signals: u64,
    signals_len: u32,
    reserved: [u32; 7],
}

/// The page that holds the registered wait; the kernel registers whole pages.
#[repr(C, align(4096))]
struct WaitPage(UnsafeCell<RegisteredWait>);

/// How a ring's thread enters it.
pub(crate) struct Entrance {
    ring: RawFd,
    /// The ring's index in the table of its thread. None: the kernel has no room, or is older than
    /// Linux 5.18.
    index: Option<u32>,
    /// Registered memory for the timeout. None: the kernel is older than Linux 6.13.
    wait_page: Option<Box<WaitPage>>,
    /// The table belongs to one thread, so this type is not `Send`.
    one_thread: PhantomData<Rc<()>>,
}

impl Entrance {
    /// Registers the ring with the calling thread, and memory for the timeout with the ring. The
    /// kernel accepts this memory only while the ring is disabled. The result must be dropped
    /// before the ring.
    pub fn new(ring: &IoUring) -> Self {
        let fd = ring.as_raw_fd();
        let page = Box::new(WaitPage(UnsafeCell::default()));
        let wait_page = register_wait(fd, &page).is_ok().then_some(page);
        let index = register(fd, REGISTER_RING_FDS, u32::MAX, fd as u64).ok();
        Entrance { ring: fd, index, wait_page, one_thread: PhantomData }
    }

    /// Submits the queued entries and waits for a completion, if `wait` is set, for at most that
    /// time. Without `wait`, makes a call only if there is something to submit or to reap.
    pub fn enter(&self, ring: &mut IoUring, wait: Option<Option<Duration>>) -> io::Result<()> {
        let queue = ring.submission();
        let (queued, has_work) = (queue.len() as u32, queue.taskrun() || queue.cq_overflow());
        // Dropping it shows the new entries to the kernel.
        drop(queue);
        let Some(timeout) = wait else {
            let flags = if has_work { EnterFlags::GETEVENTS } else { EnterFlags::empty() };
            return if queued > 0 || has_work { self.call(queued, 0, flags, None) } else { Ok(()) };
        };
        // A wait of no time would still program a timer of the processor, which takes microseconds
        // on a virtual machine.
        let (least, timeout) =
            if timeout == Some(Duration::ZERO) { (0, None) } else { (1, timeout) };
        self.call(queued, least, EnterFlags::GETEVENTS, timeout)
    }

    fn call(
        &self,
        submit: u32,
        wait: u32,
        mut flags: EnterFlags,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        let timeout = timeout.map(Timeout::from);
        let arguments = timeout.as_ref().map(|timeout| WaitArguments {
            signals: 0,
            signals_len: 0,
            min_wait_us: 0,
            timeout: std::ptr::from_ref(timeout).expose_provenance() as u64,
        });
        let (pointer, len) = match (&arguments, timeout, &self.wait_page) {
            (_, Some(timeout), Some(page)) => {
                flags |= EnterFlags::EXT_ARG | EnterFlags::EXT_ARG_REG;
                let wait = RegisteredWait { timeout, flags: 1, ..RegisteredWait::default() };
                // SAFETY: only this thread and, during the call below, the kernel access the page.
                unsafe { page.0.get().write_volatile(wait) };
                // Offset 0 in the registered memory.
                (std::ptr::null(), size_of::<RegisteredWait>())
            }
            (Some(arguments), ..) => {
                flags |= EnterFlags::EXT_ARG;
                (std::ptr::from_ref(arguments), size_of::<WaitArguments>())
            }
            (None, ..) => (std::ptr::null(), 0),
        };
        let ring = match self.index {
            Some(index) => {
                flags |= EnterFlags::REGISTERED_RING;
                index as libc::c_int
            }
            None => self.ring,
        };
        // SAFETY: the arguments and the timeout live until the call returns, and have the layout
        // that `linux/io_uring.h` states. The entries to submit were pushed by `Uring::push`, which
        // states why what they point to stays valid.
        let result = unsafe {
            libc::syscall(libc::SYS_io_uring_enter, ring, submit, wait, flags.bits(), pointer, len)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
        // The table of a thread has 16 entries, and the thread may open other rings later.
        if let Some(index) = self.index {
            let _ = register(self.ring, UNREGISTER_RING_FDS, index, 0);
        }
    }
}

/// Registers the page for [`RegisteredWait`] with a disabled ring.
fn register_wait(ring: RawFd, page: &WaitPage) -> io::Result<()> {
    /// `struct io_uring_region_desc`.
    #[repr(C)]
    struct Region {
        address: u64,
        len: u64,
        /// 1 (IORING_MEM_REGION_TYPE_USER): the memory is the caller's.
        flags: u32,
        id: u32,
        map_offset: u64,
        reserved: [u64; 4],
    }
    /// `struct io_uring_mem_region_reg`.
    #[repr(C)]
    struct Registration {
        region: u64,
        /// 1 (IORING_MEM_REGION_REG_WAIT_ARG): for arguments of waits.
        flags: u64,
        reserved: [u64; 2],
    }
    let address = page.0.get().expose_provenance() as u64;
    let len = size_of::<WaitPage>() as u64;
    let region = Region { address, len, flags: 1, id: 0, map_offset: 0, reserved: [0; 4] };
    let region = std::ptr::from_ref(&region).expose_provenance() as u64;
    let registration = Registration { region, flags: 1, reserved: [0; 2] };
    // SAFETY: the kernel reads both structs before the call returns; they have the layout that
    // `linux/io_uring.h` states. It pins the page until the ring ends, so it
    // never reads other memory, and it reads the page only during the calls of `Entrance::call`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring,
            REGISTER_MEM_REGION,
            &raw const registration,
            1u32,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Changes one entry of the calling thread's table of rings. Returns the entry's index.
fn register(ring: RawFd, operation: libc::c_uint, offset: u32, data: u64) -> io::Result<u32> {
    let mut update = Update { offset, reserved: 0, data };
    // SAFETY: the kernel reads and writes one `Update`, which has the layout that
    // `linux/io_uring.h` states, before the call returns.
    let changed = unsafe {
        libc::syscall(libc::SYS_io_uring_register, ring, operation, &raw mut update, 1u32)
    };
    if changed < 0 { Err(io::Error::last_os_error()) } else { Ok(update.offset) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_can_open_rings_without_end_one_after_another() {
        for _ in 0..40 {
            let ring = disabled();
            assert!(Entrance::new(&ring).index.is_some(), "the table has 16 entries");
        }
    }

    #[test]
    fn a_full_table_leaves_the_plain_descriptor() {
        let rings: Vec<_> = (0..20).map(|_| disabled()).collect();
        let entrances: Vec<_> = rings.iter().map(Entrance::new).collect();
        let registered = entrances.iter().filter(|entrance| entrance.index.is_some()).count();
        assert_eq!(registered, 16);
        rings.into_iter().zip(entrances).for_each(|(ring, entrance)| works(ring, &entrance));
    }

    #[test]
    fn timeouts_need_no_registered_memory() {
        let ring = disabled();
        let mut entrance = Entrance::new(&ring);
        entrance.wait_page = None;
        works(ring, &entrance);
    }

    fn disabled() -> IoUring {
        IoUring::builder().setup_r_disabled().build(8).unwrap()
    }

    /// Checks that the ring submits and waits, and that a wait without a completion ends in time.
    fn works(mut ring: IoUring, entrance: &Entrance) {
        ring.submitter().register_enable_rings().unwrap();
        // SAFETY: a no-op uses no memory.
        unsafe { ring.submission().push(&io_uring::opcode::Nop::new().build()) }.unwrap();
        entrance.enter(&mut ring, Some(Some(Duration::from_secs(30)))).unwrap();
        assert_eq!(ring.completion().count(), 1);
        let error = loop {
            let ended = entrance.enter(&mut ring, Some(Some(Duration::from_millis(1))));
            match ended.unwrap_err().raw_os_error() {
                // A stopped process that continues.
                Some(libc::EINTR) => {}
                error => break error,
            }
        };
        assert_eq!(error, Some(libc::ETIME));
        entrance.enter(&mut ring, Some(Some(Duration::ZERO))).unwrap();
        entrance.enter(&mut ring, None).unwrap();
    }
}
