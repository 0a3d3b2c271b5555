//! A queue of a ublk device on one executor: fetches requests and commits their results.
//!
//! ```text
//!   fetch ─► (kernel) ─► request: descriptor, data ─► ... ─► commit, fetch next ─► (kernel) ─►
//! ```
//! Each tag repeats one command. The driver accepts all commands of a queue from one thread only:
//! the executor's.
//!
//! The order is: fetch for all tags of all queues, then [`Queue::map`], then start the device.
//! Linux 6.12 remembers the memory of the first process that maps a queue, and forgets it only
//! after a queue had all its commands. If the process dies between the two, the driver refuses
//! every later process. Linux 7.3 hands out requests that waited for a server as soon as all tags
//! fetch: then the first request maps its queue, if `Queue::map` has not.
//!
//! What must hold: with plain copy, a tag's memory stays alive while the driver may write to it,
//! and is at least as long as the longest request. Commands of dropped futures end with the
//! ring, or when the device is stopped.

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustix::mm::{MapFlags, ProtFlags};

use super::abi::{self, Descriptor, DeviceInfo};
use super::control::character_device;
use super::driver::{Driver, Started};
use crate::mem::buffers::Refusal;
use crate::mem::memory::{GuestMemory, Region};
use crate::mem::segments::{RequestData, Segments};
use crate::tasks::executor::Handle;
use crate::tasks::operation::Operation;
use crate::uring::Action;
use crate::uring::file_slot::FileSlot;
use crate::uring::ublk_command::Command;

/// The open character device.
#[derive(Clone)]
pub struct Device {
    file: Arc<OwnedFd>,
    info: DeviceInfo,
    /// The driver, if it is not the kernel's. Then `file` has only the descriptors.
    driver: Option<Arc<Driver>>,
}

impl Device {
    /// Opens the character device of `info`.
    pub fn open(info: &DeviceInfo) -> io::Result<Self> {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open(character_device(info.id), flags, rustix::fs::Mode::empty())?;
        Ok(Device { file: Arc::new(file), info: *info, driver: None })
    }

    pub(super) fn simulated(
        descriptors: Arc<OwnedFd>,
        info: &DeviceInfo,
        driver: Arc<Driver>,
    ) -> Self {
        Device { file: descriptors, info: *info, driver: Some(driver) }
    }

    /// Returns the description of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }
}

/// The request descriptors of a queue, written by the driver.
pub(super) struct Descriptors {
    base: NonNull<Descriptor>,
    bytes: usize,
}

impl Descriptors {
    fn map(device: &Device, queue: u16) -> io::Result<Self> {
        let (offset, bytes) = Self::place(device.info.depth, queue, rustix::param::page_size());
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                flags,
                device.file.as_fd(),
                offset,
            )
        }?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Descriptors { base, bytes })
    }

    /// Returns the offset of a queue's descriptors in the character device, and their bytes: whole
    /// host pages. The driver reserves space for the largest depth per queue.
    pub(super) fn place(depth: u16, queue: u16, page: usize) -> (u64, usize) {
        let bytes =
            |depth: u16| (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(page);
        ((usize::from(queue) * bytes(abi::MAX_DEPTH)) as u64, bytes(depth))
    }

    fn read(&self, tag: u16) -> Descriptor {
        let at = usize::from(tag);
        assert!((at + 1) * size_of::<Descriptor>() <= self.bytes, "tag {at} is beyond the queue");
        // SAFETY: inside the mapping, which is page-aligned; the driver wrote it before it
        // completed the command.
        unsafe { self.base.as_ptr().add(at).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: base and bytes come from mmap; only `read` dereferences the pointer.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Where the data of requests are.
enum Data {
    /// In this process's memory, a range for each tag: the driver copies.
    Copied(Rc<GuestMemory>),
    /// In the kernel: entries of the ring's table of buffers.
    Registered(Vec<u16>),
}

/// A queue of a ublk device; see the module documentation.
pub struct Queue {
    handle: Handle,
    file: Rc<FileSlot<Handle>>,
    descriptors: OnceCell<Descriptors>,
    device: Device,
    number: u16,
    data: Data,
}

/// Why a queue cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("cannot reserve entries in the ring's table of buffers: {0}")]
    Entries(Refusal),
}

impl Queue {
    /// Creates queue `number` of `device` on the executor of this thread.
    pub fn new(handle: &Handle, device: &Device, number: u16) -> Result<Rc<Self>, QueueError> {
        let info = &device.info;
        let data = if info.flags & abi::F_AUTO_BUF_REG != 0 {
            let entries =
                handle.buffers(|buffers, submitter| buffers.reserve(submitter, info.depth));
            Data::Registered(entries.map_err(QueueError::Entries)?)
        } else {
            let bytes = u64::from(info.max_io_bytes) * u64::from(info.depth);
            let (region, _) = Region::memfd("ublk", 0, 0, bytes).map_err(io::Error::other)?;
            region.keep_resident();
            let memory = GuestMemory::default().with(region).map_err(io::Error::other)?;
            Data::Copied(Rc::new(memory))
        };
        let file = Rc::new(FileSlot::uncounted(handle, device.file.clone()));
        let (handle, device, descriptors) = (handle.clone(), device.clone(), OnceCell::new());
        Ok(Rc::new(Queue { handle, file, descriptors, device, number, data }))
    }

    /// Maps the queue's descriptors, unless they are mapped already. All tags of all queues of the
    /// device must have a fetch command before this call.
    pub fn map(&self) -> io::Result<()> {
        self.descriptors().map(|_| ())
    }

    fn descriptors(&self) -> io::Result<&Descriptors> {
        if let Some(descriptors) = self.descriptors.get() {
            return Ok(descriptors);
        }
        let mapped = Descriptors::map(&self.device, self.number)?;
        Ok(self.descriptors.get_or_init(|| mapped))
    }

    /// Returns the number of tags.
    pub fn depth(&self) -> u16 {
        self.device.info.depth
    }

    /// Returns the number of the queue.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns the tag `number`, below the depth.
    pub fn tag(self: &Rc<Self>, number: u16) -> Tag {
        assert!(number < self.depth());
        let data = match &self.data {
            Data::Copied(_) => None,
            Data::Registered(entries) => {
                let position = abi::data_position(self.number, number);
                let entry = entries[usize::from(number)];
                Some(Rc::new(RequestData::new(entry, self.device.file.clone(), position)))
            }
        };
        Tag { queue: self.clone(), number, data }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // If a command is still in the ring, the driver may fill the entries at any time: then they
        // are never reused.
        if let Data::Registered(entries) = &mut self.data
            && Rc::strong_count(&self.file) == 1
        {
            let entries = std::mem::take(entries);
            self.handle.buffers(|buffers, _| buffers.give_back(entries));
        }
    }
}

/// One of a queue's concurrent requests.
pub struct Tag {
    queue: Rc<Queue>,
    number: u16,
    data: Option<Rc<RequestData>>,
}

impl Tag {
    /// Fetches the first request.
    pub fn fetch(&self) -> Fetch {
        self.command(abi::FETCH_REQ, 0)
    }

    /// Commits the result of the request, and fetches the next one. `result`: the bytes
    /// transferred, or a negative errno.
    pub fn commit(&self, result: i32) -> Fetch {
        self.command(abi::COMMIT_AND_FETCH_REQ, result)
    }

    fn command(&self, op: u32, result: i32) -> Fetch {
        let queue = &self.queue;
        let mut memory = Segments::default();
        if self.data.is_none() {
            self.fill(&mut memory, self.most());
        }
        let entry = self.data.as_ref().map(|data| data.entry());
        let command = Command { op, queue: queue.number, tag: self.number, result, entry };
        Fetch(match &queue.device.driver {
            None => {
                let action = Action::Ublk(command);
                Pending::Kernel(queue.handle.operation(action, memory, queue.file.clone()))
            }
            Some(driver) => Pending::Simulated(driver.start(command, memory)),
        })
    }

    /// Returns the fetched request.
    pub fn descriptor(&self) -> io::Result<Descriptor> {
        Ok(self.queue.descriptors()?.read(self.number))
    }

    /// Returns the size of the largest request in bytes.
    pub fn most(&self) -> usize {
        self.queue.device.info.max_io_bytes as usize
    }

    /// Makes `segments` the data of a request of `len` bytes.
    pub fn fill(&self, segments: &mut Segments, len: usize) {
        assert!(len <= self.most(), "a request of {len} bytes");
        match (&self.queue.data, &self.data) {
            (_, Some(data)) => segments.reset_request(data, len),
            (Data::Copied(memory), None) => {
                segments.reset(memory);
                let at = u64::from(self.number) * self.most() as u64;
                segments
                    .push_guest(at, len as u64)
                    .expect("a tag's range lies in the queue's memory");
            }
            (Data::Registered(_), None) => {
                unreachable!("a tag has data if its queue registers them")
            }
        }
    }

    /// Returns whether copying the request's data has failed, and the number of bytes copied, since
    /// the last call.
    pub fn take_outcome(&self) -> (bool, u64) {
        self.data.as_ref().map_or((false, 0), |data| data.take_outcome())
    }
}

/// A future request. If it is dropped, the command stays in the ring.
pub struct Fetch(Pending);

enum Pending {
    Kernel(Operation),
    Simulated(Started),
}

impl Future for Fetch {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let operation = match &mut self.0 {
            Pending::Kernel(operation) => operation,
            Pending::Simulated(command) => return command.poll(cx),
        };
        Pin::new(operation).poll(cx).map(|(result, _)| match result {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.checked_neg().unwrap_or(libc::EIO))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::executor::Executor;

    /// Linux 7.3 hands out a new request as soon as its queue has all commands, and the main thread
    /// maps the queue later.
    #[test]
    fn a_request_before_the_queue_is_mapped_is_read() {
        let file = rustix::fs::memfd_create("requests", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let (tag, sectors) = (2, 8u32);
        let second_word = u64::from(tag) * size_of::<Descriptor>() as u64 + 4;
        rustix::io::pwrite(&file, &sectors.to_ne_bytes(), second_word).unwrap();
        let info = DeviceInfo { queues: 1, depth: 4, max_io_bytes: 4096, ..DeviceInfo::default() };
        let device = Device { file: Arc::new(file), info, driver: None };
        let executor = Executor::new().unwrap();
        let queue = Queue::new(executor.handle(), &device, 0).unwrap();
        assert_eq!(queue.tag(tag).descriptor().unwrap().sectors, sectors);
        queue.map().unwrap();
    }

    /// The driver rounds a queue's descriptors up to host pages: 24 bytes a request, at most 4096
    /// requests.
    #[test]
    fn descriptors_of_a_queue_are_aligned_to_host_pages() {
        assert_eq!(Descriptors::place(64, 0, 4096), (0, 4096));
        assert_eq!(Descriptors::place(256, 3, 4096), (3 * 98_304, 8192));
        assert_eq!(Descriptors::place(256, 3, 16 << 10), (3 * 98_304, 16 << 10));
        assert_eq!(Descriptors::place(256, 3, 64 << 10), (3 * (128 << 10), 64 << 10));
    }
}
