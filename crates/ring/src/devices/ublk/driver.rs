//! A ublk driver in this process, without the kernel: for tests of queues.
//!
//! In: requests of a block device, from a test. Out: descriptors in memory, and completions of the
//! commands that fetch and commit. A queue uses it through the same types as the kernel's driver.
//!
//! What must hold, as in the kernel (`drivers/block/ublk_drv.c`)
//! - A command that fetches completes when its tag gets a request, or when the device is stopped.
//! - A request that was given to a server waits for its commit, and no other server gets it.
//! - A tag with a command accepts no other one. A commit needs a request that was given.
//!
//! It has no control commands, no block device and no registered buffers: for zero copy, the
//! kernel puts pages of a request into the ring's table of buffers.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::abi::{self, Descriptor, DeviceInfo};
use super::queue::{Descriptors, Device};
use crate::mem::segments::Segments;
use crate::uring::ublk_command::Command;

/// The driver of one device; see the module documentation.
pub struct Driver {
    info: DeviceInfo,
    /// The descriptors of all queues, as in the character device.
    descriptors: Arc<OwnedFd>,
    state: Mutex<State>,
}

/// A request that a server has committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// The number from [`Driver::submit`].
    pub number: u64,
    /// The bytes transferred, or a negative errno.
    pub result: i32,
    /// The data of a read.
    pub data: Vec<u8>,
}

struct State {
    is_stopped: bool,
    /// Error of the next command.
    refusal: Option<Errno>,
    /// The tags of all queues.
    tags: Vec<Tag>,
    /// Requests that wait for a tag, with the number of their queue.
    waiting: VecDeque<(u16, Request)>,
    done: Vec<Done>,
}

#[derive(Clone)]
struct Request {
    number: u64,
    descriptor: Descriptor,
    data: Vec<u8>,
}

#[derive(Clone, Default)]
enum Tag {
    /// No server has a command for the tag.
    #[default]
    Vacant,
    Fetching(Option<Waker>),
    /// A server has the request, or its command is complete.
    Given(Request),
}

impl Driver {
    /// Creates a device that copies data (without zero copy), and its driver.
    pub fn device(info: &DeviceInfo) -> io::Result<(Arc<Driver>, Device)> {
        assert_eq!(info.flags & abi::F_AUTO_BUF_REG, 0, "only the kernel registers buffers");
        let file = rustix::fs::memfd_create("ublk-descriptors", MemfdFlags::CLOEXEC)?;
        let (end, _) = Descriptors::place(info.depth, info.queues, rustix::param::page_size());
        rustix::fs::ftruncate(&file, end)?;
        let tags = vec![Tag::default(); usize::from(info.queues) * usize::from(info.depth)];
        let (waiting, done, refusal) = Default::default();
        let state = State { is_stopped: false, refusal, tags, waiting, done };
        let descriptors = Arc::new(file);
        let driver = Driver { info: *info, descriptors: descriptors.clone(), state: state.into() };
        let driver = Arc::new(driver);
        Ok((driver.clone(), Device::simulated(descriptors, info, driver)))
    }

    /// Gives a request to a queue. If no tag is free, the request waits. `data`: what a write
    /// transfers.
    pub fn submit(&self, queue: u16, number: u64, descriptor: Descriptor, data: &[u8]) {
        let request = Request { number, descriptor, data: data.to_vec() };
        let mut state = self.state();
        state.waiting.push_back((queue, request));
        self.give(&mut state);
    }

    /// Returns the requests that were committed since the last call, in the order of their commits.
    pub fn take_done(&self) -> Vec<Done> {
        std::mem::take(&mut self.state().done)
    }

    /// Returns the number of tags with a command that waits for a request, of tags with a request
    /// that was given, and of requests that wait for a tag.
    pub fn counts(&self) -> (usize, usize, usize) {
        let state = self.state();
        let count = |of: fn(&Tag) -> bool| state.tags.iter().filter(|tag| of(tag)).count();
        let fetching = count(|tag| matches!(tag, Tag::Fetching(_)));
        (fetching, count(|tag| matches!(tag, Tag::Given(_))), state.waiting.len())
    }

    /// Stops the device: all commands that wait for a request end.
    pub fn stop(&self) {
        let mut state = self.state();
        state.is_stopped = true;
        for tag in &mut state.tags {
            if let Tag::Fetching(waker) = tag {
                waker.take().into_iter().for_each(Waker::wake);
            }
        }
    }

    /// Refuses the next command with `error`. A commit still counts.
    pub fn refuse(&self, error: Errno) {
        self.state().refusal = Some(error);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, queue: u16, tag: u16) -> usize {
        usize::from(queue) * usize::from(self.info.depth) + usize::from(tag)
    }

    /// Gives the waiting requests to tags with a command.
    fn give(&self, state: &mut State) {
        let waiting = std::mem::take(&mut state.waiting);
        for (queue, request) in waiting {
            let mut tags = 0..self.info.depth;
            let is_free = |tag: &u16| {
                matches!(state.tags[self.index(queue, *tag)], Tag::Fetching(_)) && !state.is_stopped
            };
            let Some(tag) = tags.find(is_free) else {
                state.waiting.push_back((queue, request));
                continue;
            };
            self.write(queue, tag, &request.descriptor);
            let place = &mut state.tags[self.index(queue, tag)];
            if let Tag::Fetching(Some(waker)) = std::mem::replace(place, Tag::Given(request)) {
                waker.wake();
            }
        }
    }

    /// Writes the descriptor of a tag.
    fn write(&self, queue: u16, tag: u16, descriptor: &Descriptor) {
        let Descriptor { op_flags, sectors, start, addr } = descriptor;
        let mut bytes = [0; size_of::<Descriptor>()];
        bytes[..4].copy_from_slice(&op_flags.to_ne_bytes());
        bytes[4..8].copy_from_slice(&sectors.to_ne_bytes());
        bytes[8..16].copy_from_slice(&start.to_ne_bytes());
        bytes[16..].copy_from_slice(&addr.to_ne_bytes());
        let (first, _) = Descriptors::place(self.info.depth, queue, rustix::param::page_size());
        let at = first + u64::from(tag) * bytes.len() as u64;
        rustix::io::pwrite(&self.descriptors, &bytes, at).expect("the memory has room");
    }

    /// Starts a command. `memory`: where the data of the tag are.
    pub(super) fn start(self: &Arc<Self>, command: Command, memory: Segments) -> Started {
        let index = self.index(command.queue, command.tag);
        let mut state = self.state();
        let error = state.begin(index, &command, &memory).err();
        drop(state);
        let (is_submitted, ended) = (false, false);
        Started { driver: self.clone(), index, memory, error, is_submitted, ended }
    }
}

impl State {
    fn begin(&mut self, index: usize, command: &Command, memory: &Segments) -> Result<(), Errno> {
        match (&self.tags[index], command.op) {
            (Tag::Vacant, abi::FETCH_REQ) => {}
            (Tag::Given(request), abi::COMMIT_AND_FETCH_REQ) => {
                let reads = request.descriptor.op_flags as u8 == abi::OP_READ;
                let len = if reads { command.result.max(0) as usize } else { 0 };
                let mut data = vec![0; len];
                memory.copy_out(0, &mut data);
                self.done.push(Done { number: request.number, result: command.result, data });
            }
            (Tag::Fetching(_), _) => return Err(Errno::BUSY),
            _ => return Err(Errno::INVAL),
        }
        self.tags[index] = Tag::Vacant;
        if let Some(error) = self.refusal.take() {
            return Err(error);
        }
        self.tags[index] = Tag::Fetching(None);
        Ok(())
    }
}

/// A command of a queue. If it is dropped, its tag accepts another command, as after the end of the
/// ring.
pub(super) struct Started {
    driver: Arc<Driver>,
    index: usize,
    memory: Segments,
    /// The driver has refused the command.
    error: Option<Errno>,
    /// The ring submits a command at the end of the iteration. So a waiting request does not
    /// complete the command at its first poll.
    is_submitted: bool,
    ended: bool,
}

impl Started {
    /// Returns the result of the command, if it is complete.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.driver.state();
        if self.is_submitted {
            self.driver.give(&mut state);
        }
        let is_stopped = state.is_stopped;
        let result = match (self.error, &mut state.tags[self.index]) {
            (Some(error), _) => Err(error.into()),
            (None, Tag::Given(request)) => {
                self.memory.copy_in(0, &request.data);
                Ok(())
            }
            (None, tag) if is_stopped => {
                *tag = Tag::Vacant;
                Err(Errno::NODEV.into())
            }
            (None, Tag::Fetching(waker)) => {
                *waker = Some(cx.waker().clone());
                if !std::mem::replace(&mut self.is_submitted, true) {
                    cx.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
            (None, Tag::Vacant) => unreachable!("the tag has this command"),
        };
        self.ended = true;
        Poll::Ready(result)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.ended || self.error.is_some() {
            return;
        }
        let mut state = self.driver.state();
        if matches!(state.tags[self.index], Tag::Fetching(_)) {
            state.tags[self.index] = Tag::Vacant;
        }
    }
}
