//! An event channel that is bound to another domain's port.
//!
//! In: the number of the other domain's port. Out: a descriptor that a reactor watches, and events
//! for the other domain.
//!
//! What must hold: after an event the port stays masked until [`Channel::take`] unmasks it. So a
//! guest that notifies endlessly causes one event at a time. No call blocks.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::abi::{self, BindInterdomain};
use super::machine::Domain;

/// A bound event channel. Dropping it unbinds the channel.
pub struct Channel(EventDevice);

enum EventDevice {
    /// A file of /dev/xen/evtchn that is bound to this port only.
    Kernel { file: OwnedFd, port: u32 },
    /// Without a hypervisor: two eventfds, one for each direction.
    Simulated { mine: Arc<OwnedFd>, theirs: Arc<OwnedFd>, domain: Arc<Domain>, port: u32 },
}

impl Drop for Channel {
    /// Unbinds explicitly, because the file may stay open for a while: io_uring still watches it.
    fn drop(&mut self) {
        match &self.0 {
            // SAFETY: the kernel reads a structure that consists of one number.
            EventDevice::Kernel { file, port } => unsafe {
                libc::ioctl(file.as_raw_fd(), abi::EVTCHN_UNBIND, &raw const *port);
            },
            EventDevice::Simulated { domain, port, .. } => domain.unbind(*port),
        }
    }
}

impl Channel {
    /// Binds port `port` of `domain`.
    pub(super) fn bind(domain: u16, port: u32) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open("/dev/xen/evtchn", flags, Mode::empty())?;
        let request = BindInterdomain { domain: domain.into(), port };
        // SAFETY: the kernel reads a structure of this size, which outlives the call.
        let local = unsafe {
            libc::ioctl(file.as_raw_fd(), abi::EVTCHN_BIND_INTERDOMAIN, &raw const request)
        };
        if local < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above, for a number of 16 bits. After this call the file can bind to no other
        // domain. (Kernels before 4.10 refuse the call.)
        unsafe { libc::ioctl(file.as_raw_fd(), abi::EVTCHN_RESTRICT_DOMID, &raw const domain) };
        Ok(Channel(EventDevice::Kernel { file, port: local as u32 }))
    }

    pub(super) fn pair(
        mine: Arc<OwnedFd>,
        theirs: Arc<OwnedFd>,
        domain: Arc<Domain>,
        port: u32,
    ) -> Self {
        Channel(EventDevice::Simulated { mine, theirs, domain, port })
    }

    /// Returns a descriptor that becomes readable with each event, for [`crate::Handle::watch`].
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        match &self.0 {
            EventDevice::Kernel { file, .. } => file.try_clone(),
            EventDevice::Simulated { mine, .. } => mine.try_clone(),
        }
    }

    /// Takes an event and unmasks the next one. Returns whether there was one.
    pub fn take(&self) -> io::Result<bool> {
        match &self.0 {
            EventDevice::Kernel { file, port } => {
                let mut ports = [0; 4];
                match rustix::io::read(file, &mut ports) {
                    Ok(4) => {}
                    Ok(_) | Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                    Err(e) => return Err(e.into()),
                }
                rustix::io::write(file, &port.to_ne_bytes())?;
                Ok(true)
            }
            EventDevice::Simulated { mine, .. } => match rustix::io::read(mine, &mut [0; 8]) {
                Ok(_) => Ok(true),
                Err(Errno::AGAIN | Errno::INTR) => Ok(false),
                Err(e) => Err(e.into()),
            },
        }
    }

    /// Sends an event to the other domain.
    pub fn notify(&self) -> io::Result<()> {
        match &self.0 {
            EventDevice::Kernel { file, port } => {
                // SAFETY: the kernel reads a structure that consists of one number.
                let done =
                    unsafe { libc::ioctl(file.as_raw_fd(), abi::EVTCHN_NOTIFY, &raw const *port) };
                if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            }
            EventDevice::Simulated { theirs, .. } => {
                match rustix::io::write(theirs, &1u64.to_ne_bytes()) {
                    // If the counter is full, an event is pending already.
                    Ok(_) | Err(Errno::AGAIN) => Ok(()),
                    Err(e) => Err(e.into()),
                }
            }
        }
    }
}
