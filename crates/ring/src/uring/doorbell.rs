//! Signals eventfds that another process owns, without ever blocking.
//!
//! In: the eventfd that a front end sent. Out: each ring adds one to its counter.
//!
//! What must hold: no call here blocks. A write to an eventfd blocks if its counter is at the
//! maximum and O_NONBLOCK is clear. Both belong to the open file, which the front end shares and
//! can change at any time. eventfds do not support `RWF_NOWAIT`. But a completion of io_uring
//! signals a registered eventfd inside the kernel, which never blocks. So a doorbell is an io_uring
//! of its own that completes an empty operation in one system call.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;

use io_uring::{IoUring, opcode, squeue};

use crate::sandbox;
use crate::uring::restrict;

/// Attempts to submit if the kernel is short of memory.
const ATTEMPTS: u32 = 8;

/// Calls of io_uring_register that a doorbell needs after its set-up; names as in
/// `linux/io_uring.h`.
const REGISTER: [u8; 2] = [
    4, // IORING_REGISTER_EVENTFD
    5, // IORING_UNREGISTER_EVENTFD
];

/// Signals an eventfd. It keeps the eventfd open: the caller may close its descriptor.
pub struct Doorbell(Box<IoUring>);

impl Doorbell {
    /// Creates a doorbell of an eventfd. Error `InvalidInput`: the descriptor is not an eventfd.
    pub fn new(eventfd: impl AsFd) -> io::Result<Self> {
        let bell = Doorbell::unattached()?;
        bell.attach(eventfd)?;
        Ok(bell)
    }

    /// Adds one to the eventfd's counter, or nothing if the counter is at its maximum.
    #[inline]
    pub fn ring(&mut self) {
        // SAFETY: a no-op refers to no memory. The submission queue has room because each
        // submission empties it.
        let _ = unsafe { self.0.submission().push(&opcode::Nop::new().build()) };
        for _ in 0..ATTEMPTS {
            if self.0.submit().is_ok() {
                break;
            }
        }
        self.0.completion().for_each(drop);
    }

    fn unattached() -> io::Result<Self> {
        if !sandbox::is_on() {
            return Ok(Doorbell(Box::new(IoUring::new(1)?)));
        }
        // io_uring's operations pass the filters of system calls.
        let ring = IoUring::builder().setup_r_disabled().build(1)?;
        restrict(&ring, &[opcode::Nop::CODE], &REGISTER, squeue::Flags::empty())?;
        ring.submitter().register_enable_rings()?;
        Ok(Doorbell(Box::new(ring)))
    }

    fn attach(&self, eventfd: impl AsFd) -> io::Result<()> {
        self.0.submitter().register_eventfd(eventfd.as_fd().as_raw_fd())
    }
}

/// A ring that tells eventfds from other descriptors, shared by all threads. Each user locks it for
/// a few system calls that never block.
static SHARED: Mutex<Option<Doorbell>> = Mutex::new(None);

fn shared<T>(work: impl FnOnce(&mut Doorbell) -> io::Result<T>) -> io::Result<T> {
    let mut bell = SHARED.lock().unwrap_or_else(|e| e.into_inner());
    match &mut *bell {
        Some(bell) => work(bell),
        None => work(bell.insert(Doorbell::unattached()?)),
    }
}

/// Creates the ring of [`is_eventfd`]. A lack of memory is then an error at start.
pub fn prepare() -> io::Result<()> {
    shared(|_| Ok(()))
}

/// Returns whether a descriptor is an eventfd. `fstat` cannot tell it from an epoll or a
/// userfaultfd, and polling those may wait for the process that owns them.
pub fn is_eventfd(fd: impl AsFd) -> io::Result<bool> {
    shared(|bell| match bell.attach(fd) {
        Ok(()) => bell.0.submitter().unregister_eventfd().map(|()| true),
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(e) => Err(e),
    })
}

#[cfg(test)]
impl Doorbell {
    /// Returns the result of a new socket, which no doorbell makes.
    pub fn result_of_socket(&mut self) -> i32 {
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        // SAFETY: the operation refers to no memory.
        unsafe { self.0.submission().push(&socket) }.unwrap();
        self.0.submit_and_wait(1).unwrap();
        self.0.completion().next().unwrap().result()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::testing::waits;

    fn count(event: &OwnedFd) -> u64 {
        rustix::io::ioctl_fionbio(event, true).unwrap();
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn each_ring_adds_one() {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let mut bell = Doorbell::new(&event).unwrap();
        (0..300).for_each(|_| bell.ring());
        assert_eq!(count(&event), 300);
    }

    #[test]
    fn a_ring_does_not_block_on_a_blocking_eventfd_at_its_maximum() {
        waits::within("no ring blocks", ring_at_the_maximum);
    }

    fn ring_at_the_maximum() {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let mut bell = Doorbell::new(&event).unwrap();
        (0..3).for_each(|_| bell.ring());
        assert!(count(&event) >= u64::MAX - 1);
        bell.ring();
        assert_eq!(count(&event), 1);
    }

    #[test]
    fn epolls_and_pipes_are_not_eventfds() {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let epoll =
            rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        assert!(is_eventfd(&event).unwrap() && is_eventfd(&event).unwrap());
        assert!(!is_eventfd(&epoll).unwrap() && !is_eventfd(&pipe).unwrap());
        assert_eq!(Doorbell::new(&epoll).err().unwrap().kind(), io::ErrorKind::InvalidInput);
    }
}
