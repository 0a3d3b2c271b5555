//! A queue over memory of the test instead of a back end, with faults on demand.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use blockyard_driver::{Data, RequestQueue, request, status};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::scratch::HANG;

/// What is wrong with a back end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Fault {
    #[default]
    Nothing,
    /// It answers no request.
    Hangs,
    /// It answers each tenth request with an I/O error.
    Fails,
    /// It returns wrong data after this number of requests.
    Corrupts(u64),
    /// The queue itself fails.
    Breaks,
}

pub struct FakeQueue {
    disk: Arc<Mutex<Vec<u8>>>,
    fault: Fault,
    slots: Mutex<Vec<Vec<u8>>>,
    submitted: VecDeque<(u16, u32, u64, Data)>,
    /// Requests that the back end sees.
    published: VecDeque<(u16, u32, u64, Data)>,
    answered: u64,
    kicks: u64,
    call: Arc<OwnedFd>,
}

/// The base that the queue has for the next back end.
pub const BASE: u32 = 77;

impl FakeQueue {
    /// Creates a queue of `slots` slots with `bytes` bytes each. Several queues may have one disk.
    pub fn new(disk: &Arc<Mutex<Vec<u8>>>, fault: Fault, slots: u16, bytes: usize) -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        FakeQueue {
            disk: disk.clone(),
            fault,
            slots: Mutex::new(vec![vec![0; bytes]; slots.into()]),
            submitted: VecDeque::new(),
            published: VecDeque::new(),
            answered: 0,
            kicks: 0,
            call: Arc::new(rustix::event::eventfd(0, flags).unwrap()),
        }
    }

    /// Returns an eventfd that ends the sleep of the queue.
    pub fn call(&self) -> std::io::Result<OwnedFd> {
        self.call.try_clone()
    }

    fn serve(&self, slot: u16, kind: u32, sector: u64, data: Data) -> u8 {
        let (mut disk, mut slots) = (self.disk.lock().unwrap(), self.slots.lock().unwrap());
        let (slot, at) = (&mut slots[slot as usize], sector as usize * 512);
        match (kind, data) {
            (request::IN, Data::FromDevice(len)) => {
                slot[..len as usize].copy_from_slice(&disk[at..][..len as usize]);
                if matches!(self.fault, Fault::Corrupts(after) if self.answered >= after) {
                    slot[len as usize - 1] ^= 1;
                }
            }
            (request::OUT, Data::ToDevice(len)) => {
                disk[at..][..len as usize].copy_from_slice(&slot[..len as usize]);
            }
            (request::DISCARD, Data::ToDevice(_)) => {
                let range = slot[..request::RANGE].try_into().unwrap();
                let (sector, sectors) = request::parse_range(range);
                disk[sector as usize * 512..][..sectors as usize * 512].fill(0);
            }
            (request::FLUSH, Data::None) => {}
            other => panic!("{other:?}"),
        }
        status::OK
    }
}

impl RequestQueue for FakeQueue {
    type Error = anyhow::Error;

    fn submit(&mut self, slot: u16, request: u32, sector: u64, data: Data) {
        self.submitted.push_back((slot, request, sector, data));
    }

    fn publish(&mut self) -> Result<()> {
        self.kicks += u64::from(!self.submitted.is_empty());
        self.published.append(&mut self.submitted);
        Ok(())
    }

    fn reap(&mut self) -> Result<Option<(u16, u8)>> {
        anyhow::ensure!(self.fault != Fault::Breaks, "the ring has an impossible index");
        if self.fault == Fault::Hangs {
            return Ok(None);
        }
        let Some((slot, kind, sector, data)) = self.published.pop_front() else { return Ok(None) };
        self.answered += 1;
        if self.fault == Fault::Fails && self.answered.is_multiple_of(10) {
            return Ok(Some((slot, status::IOERR)));
        }
        Ok(Some((slot, self.serve(slot, kind, sector, data))))
    }

    fn ready(&self) -> bool {
        !self.published.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.submitted.len() + self.published.len()
    }

    fn sleep(&mut self, limit: Option<Duration>) -> Result<()> {
        // The back end answers at once, so its notification has come already.
        if self.ready() && self.fault != Fault::Hangs {
            return Ok(());
        }
        let limit = Timespec::try_from(limit.unwrap_or(HANG).min(HANG)).unwrap();
        let mut fds = [PollFd::new(&*self.call, PollFlags::IN)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&limit)))?;
        Ok(())
    }

    fn kick(&mut self) -> Result<()> {
        self.kicks += 1;
        Ok(())
    }

    fn notifications(&mut self) -> Result<(u64, u64)> {
        Ok((self.kicks, self.answered))
    }

    fn write_data(&self, slot: u16, bytes: &[u8]) {
        self.slots.lock().unwrap()[slot as usize][..bytes.len()].copy_from_slice(bytes);
    }

    fn read_data(&self, slot: u16, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.slots.lock().unwrap()[slot as usize][..bytes.len()]);
    }

    fn resume_base(&mut self, _known: bool) -> u32 {
        BASE
    }
}
