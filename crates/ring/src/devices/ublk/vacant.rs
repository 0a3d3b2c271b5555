//! Vacant queues: queues of a quiesced device that no thread has served since the last takeover
//! began.
//!
//! If a server is killed while it takes over a device, some queues may have all their commands, and
//! others may be vacant. When the next takeover begins, Linux 6.12 dereferences each queue's thread
//! pointer. A vacant queue has none, and the kernel crashes. So a short-lived thread first serves
//! every vacant queue, and then ends.
//!
//! In: the device. Out: each of its queues had a thread, which has ended. What must hold: the
//! driver hands out no request meanwhile, because the device is quiesced.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use io_uring::types::Fd;
use io_uring::{IoUring, opcode};

use super::abi;
use super::queue::Device;
use crate::uring::ublk_command::Command;

/// Serves each vacant queue of a quiesced device by a thread that ends. Returns the number of
/// vacant queues.
///
/// Needed from Linux 6.7 to 6.14; see the module documentation. Before 6.7, a device keeps the
/// commands of a thread that ended.
pub fn fill_vacant(device: Device) -> io::Result<usize> {
    // No pool can do this, because the thread must end. The caller waits for it, so each takeover
    // has one.
    let thread =
        std::thread::Builder::new().name("ublk-vacant".into()).spawn(move || fill(&device))?;
    thread
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the thread for vacant ublk queues has panicked")))
}

fn fill(device: &Device) -> io::Result<usize> {
    let depth = device.info().depth;
    let mut ring: IoUring =
        IoUring::builder().setup_clamp().setup_submit_all().build(depth.into())?;
    let mut vacant = 0;
    for queue in 0..device.info().queues {
        for tag in 0..depth {
            let sqe = fetch(device, queue, tag);
            // SAFETY: the command refers to no memory of this process: the driver has no request to
            // copy (see the module documentation).
            unsafe { ring.submission().push(&sqe) }.map_err(io::Error::other)?;
        }
        // Submit all commands of a queue by one system call: a kill between two calls would leave
        // the driver with some of them.
        ring.submit()?;
        // The driver refuses the commands if the queue had a thread.
        vacant += usize::from(ring.completion().count() == 0);
    }
    Ok(vacant)
}

fn fetch(device: &Device, queue: u16, tag: u16) -> io_uring::squeue::Entry {
    // The driver requires an address, but does not use it.
    let nowhere =
        libc::iovec { iov_base: NonNull::<libc::c_void>::dangling().as_ptr(), iov_len: 0 };
    let command = Command { op: abi::FETCH_REQ, queue, tag, result: 0, entry: None };
    let (bytes, address) = command.encode(&[nowhere]);
    opcode::UringCmd16::new(Fd(device.file().as_raw_fd()), command.op)
        .cmd(bytes)
        .addr(Some(address))
        .build()
}
