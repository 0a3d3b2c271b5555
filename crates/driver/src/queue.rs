//! Requests in slots. Each slot has a header, a data buffer and a status byte, which are described
//! in the ring once.
//!
//! In: a request type, a sector, and the direction of the data. Out: slots with their status. For
//! each request, the driver writes only the 16 bytes of the header, the status byte and the ring's
//! entry. It writes descriptors only if a slot's layout changes.
//!
//! What must hold: the driver does not touch a slot in flight until `reap` returns it. It checks
//! each id from the device against the slots in flight.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{
    Error,
    ErrorKind::{Late, Protocol},
    Result, ensure,
};
use blockyard_ring::SharedSlice;
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::io::Errno;

use super::connection::RingSetup;
use super::ring::{Buffer, Ring, RingOptions};
use super::{Memory, status};

/// Size of the space for header and status in each slot, in bytes. The size is a cache line, as in
/// a guest's request structure.
const LINE: u64 = 64;
const STATUS: u64 = 16;

/// The data of a request. Its length is in bytes from the start of its slot's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    None,
    ToDevice(u32),
    FromDevice(u32),
}

/// A queue of requests in slots, as a load generator uses it: a virtqueue, or a blkif ring. Request
/// types and statuses are those of virtio.
pub trait RequestQueue: Send + 'static {
    /// Why the queue cannot go on.
    type Error;

    /// Puts a request into a free slot. The back end sees it after `publish`.
    fn submit(&mut self, slot: u16, request: u32, sector: u64, data: Data);
    /// Makes submitted requests visible to the back end, and sends a notification if the back end
    /// wants one.
    fn publish(&mut self) -> Result<(), Self::Error>;
    /// Returns the next completed request: its slot and its status byte.
    fn reap(&mut self) -> Result<Option<(u16, u8)>, Self::Error>;
    /// Returns whether `reap` would return a request.
    fn ready(&self) -> bool;
    /// Returns the number of requests in flight.
    fn in_flight(&self) -> usize;
    /// Sleeps until the back end sends a notification, but at most for `limit`. May return early.
    fn sleep(&mut self, limit: Option<Duration>) -> Result<(), Self::Error>;
    /// Sends the back end a notification, even if it does not want one.
    fn kick(&mut self) -> Result<(), Self::Error>;
    /// Returns the number of notifications so far: those sent to the back end, and those received.
    fn notifications(&mut self) -> Result<(u64, u64), Self::Error>;
    /// Copies `bytes` to the start of a slot's data.
    fn write_data(&self, slot: u16, bytes: &[u8]);
    /// Copies the start of a slot's data to `bytes`.
    fn read_data(&self, slot: u16, bytes: &mut [u8]);
    /// Prepares the ring for the next back end. Returns the base to send to it (SET_VRING_BASE).
    /// `known`: whether the next back end knows which requests were in flight.
    fn resume_base(&mut self, known: bool) -> u32;
}

#[derive(Clone, Copy)]
struct Slot {
    laid: Option<Data>,
    in_flight: bool,
}

/// A virtqueue with requests in slots.
pub struct Queue<R> {
    pub ring: R,
    index: u16,
    slots: Vec<Slot>,
    lines_addr: u64,
    lines: SharedSlice,
    data_addr: u64,
    data_len: u32,
    data: SharedSlice,
    kick: Arc<OwnedFd>,
    call: Arc<OwnedFd>,
    /// An edge-triggered epoll that contains only `call`, so that a wake-up is one system call. A
    /// read of `call` would take two: back ends such as QEMU's make the eventfd non-blocking, and
    /// both sides share that flag.
    waiter: OwnedFd,
    in_flight: usize,
    /// Number of kicks sent, and of calls received (see `take_signals`).
    pub kicks: u64,
    pub signals: u64,
}

impl<R: Ring> Queue<R> {
    /// Returns the maximum number of bytes of guest memory that such a queue needs.
    pub fn memory_needed(options: RingOptions, data_len: u32) -> u64 {
        let slots = u64::from(options.slots);
        let stride = u64::from(data_len).next_multiple_of(4096);
        u64::from(options.size) * 26 + slots * (48 + LINE + stride) + 8 * 4096
    }

    /// Creates a queue with a data buffer of `data_len` bytes in each slot.
    pub fn new(
        memory: &mut Memory,
        index: u16,
        options: RingOptions,
        data_len: u32,
    ) -> Result<Self> {
        let ring = R::new(memory, options)?;
        let slots = u64::from(options.slots);
        let (lines_addr, lines) = memory.piece(LINE * slots, 4096)?;
        let stride = data_len.next_multiple_of(4096);
        let (data_addr, data) = memory.piece(u64::from(stride) * slots, 4096)?;
        let event = || {
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new)
        };
        let (kick, call) = (event()?, event()?);
        let waiter = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &waiter,
            &*call,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        Ok(Queue {
            ring,
            index,
            slots: vec![Slot { laid: None, in_flight: false }; options.slots.into()],
            lines_addr,
            lines,
            data_addr,
            data_len: stride,
            data,
            kick,
            call,
            waiter,
            in_flight: 0,
            kicks: 0,
            signals: 0,
        })
    }

    /// Returns the description of this queue for the back end.
    pub fn setup(&self) -> RingSetup {
        RingSetup {
            index: self.index,
            size: self.ring.size(),
            addresses: self.ring.addresses(),
            kick: self.kick.clone(),
            call: self.call.clone(),
        }
    }

    /// Returns the guest addresses of a slot's data and of its status byte.
    pub fn addresses(&self, slot: u16) -> (u64, u64) {
        let slot = u64::from(slot);
        (self.data_addr + slot * u64::from(self.data_len), self.lines_addr + slot * LINE + STATUS)
    }

    /// Returns the eventfd by which the device notifies the driver. A write to it ends a sleep.
    pub fn call_eventfd(&self) -> Arc<OwnedFd> {
        self.call.clone()
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Copies `bytes` to the start of a slot's data.
    pub fn write_data(&self, slot: u16, bytes: &[u8]) {
        assert!(bytes.len() <= self.data_len as usize, "a slot holds {} bytes", self.data_len);
        self.data.write(slot as usize * self.data_len as usize, bytes);
    }

    /// Copies the start of a slot's data to `bytes`.
    pub fn read_data(&self, slot: u16, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.data_len as usize, "a slot holds {} bytes", self.data_len);
        self.data.read(slot as usize * self.data_len as usize, bytes);
    }

    /// Puts a request into a free slot, and the slot into the ring. The device sees the request
    /// after `publish`.
    #[inline]
    pub fn submit(&mut self, slot: u16, request: u32, sector: u64, data: Data) {
        let state = &mut self.slots[slot as usize];
        assert!(!state.in_flight, "slot {slot} is in flight");
        state.in_flight = true;
        self.in_flight += 1;
        if state.laid != Some(data) {
            state.laid = Some(data);
            self.lay(slot, data);
        }
        let line = slot as usize * LINE as usize;
        let header = u128::from(request) | u128::from(sector) << 64;
        self.lines.copy_in(line, header.to_le_bytes());
        self.lines.copy_in(line + STATUS as usize, [status::NONE]);
        self.ring.submit(slot);
    }

    fn lay(&mut self, slot: u16, data: Data) {
        let line = self.lines_addr + u64::from(slot) * LINE;
        let header = Buffer { addr: line, len: 16, device_writes: false };
        let status = Buffer { addr: line + STATUS, len: 1, device_writes: true };
        let addr = self.data_addr + u64::from(slot) * u64::from(self.data_len);
        let (len, device_writes) = match data {
            Data::None => return self.ring.lay(slot, &[header, status]),
            Data::ToDevice(len) => (len, false),
            Data::FromDevice(len) => (len, true),
        };
        assert!(len <= self.data_len, "a slot holds {} bytes", self.data_len);
        self.ring.lay(slot, &[header, Buffer { addr, len, device_writes }, status]);
    }

    /// Makes submitted requests visible to the device, and sends a kick if the device wants one.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        if self.ring.publish() { self.kick() } else { Ok(()) }
    }

    /// Kicks the device, even if the device does not want a kick.
    pub fn kick(&mut self) -> Result<()> {
        self.kicks += 1;
        rustix::io::write(&*self.kick, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// Returns the next completed request: its slot and its status byte.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<(u16, u8)>> {
        let Some((id, _)) = self.ring.reap() else { return Ok(None) };
        match self.slots.get_mut(id as usize) {
            Some(slot) if slot.in_flight => slot.in_flight = false,
            _ => {
                let what = "which is not in flight";
                let index = self.index;
                let what = format!("queue {index}: the back end has used descriptor {id}, {what}");
                return Err(Error::new(Protocol, what));
            }
        }
        self.in_flight -= 1;
        let [status] = self.lines.copy_out(id as usize * LINE as usize + STATUS as usize);
        Ok(Some((id as u16, status)))
    }

    /// Sleeps until the device signals `call`, but at most for `limit`. May return early.
    pub fn sleep(&mut self, limit: Option<Duration>) -> Result<()> {
        if !self.ring.arm() {
            let limit = limit
                .map(|l| Timespec { tv_sec: l.as_secs() as _, tv_nsec: l.subsec_nanos().into() });
            let mut events = [MaybeUninit::uninit()];
            rustix::io::retry_on_intr(|| {
                epoll::wait(&self.waiter, &mut events, limit.as_ref()).map(|_| ())
            })?;
        }
        self.ring.disarm();
        Ok(())
    }

    /// Updates `signals` from the eventfd's counter. The driver does not read this counter while
    /// requests run.
    pub fn take_signals(&mut self) -> Result<()> {
        let mut count = [0; 8];
        match rustix::io::read(&*self.call, &mut count) {
            Ok(_) => self.signals += u64::from_ne_bytes(count),
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Prepares the ring for the next back end, and returns the SET_VRING_BASE value for it. The
    /// last back end must be gone, and all used chains reaped. `known`: the next back end finds the
    /// chains in flight in the in-flight buffer. If it does not, this empties the ring and submits
    /// everything in flight again, like a guest that resets the device.
    pub fn resume_base(&mut self, known: bool) -> u32 {
        if known {
            return self.ring.base();
        }
        self.ring.reset();
        for slot in (0..self.slots.len() as u16).filter(|s| self.slots[*s as usize].in_flight) {
            self.ring.submit(slot);
        }
        self.ring.fresh_base()
    }

    /// Makes one request and waits for its completion. Returns its status byte. `data` has the
    /// direction and length of the data, `bytes` its content.
    pub fn call(
        &mut self,
        request: u32,
        sector: u64,
        data: Data,
        bytes: &mut [u8],
        limit: Duration,
    ) -> Result<u8> {
        ensure!(self.in_flight == 0, Usage, "a single request needs an idle queue");
        if let Data::ToDevice(_) = data {
            self.write_data(0, bytes);
        }
        self.submit(0, request, sector, data);
        self.publish()?;
        let start = std::time::Instant::now();
        loop {
            if let Some((slot, status)) = self.reap()? {
                if let Data::FromDevice(_) = data {
                    self.read_data(slot, bytes);
                }
                return Ok(status);
            }
            let left = limit.checked_sub(start.elapsed());
            let late = || Error::new(Late, format!("a request has not completed for {limit:?}"));
            self.sleep(Some(left.ok_or_else(late)?))?;
        }
    }
}

impl<R: Ring> RequestQueue for Queue<R> {
    type Error = Error;

    #[inline]
    fn submit(&mut self, slot: u16, request: u32, sector: u64, data: Data) {
        Queue::submit(self, slot, request, sector, data);
    }

    #[inline]
    fn publish(&mut self) -> Result<()> {
        Queue::publish(self)
    }

    #[inline]
    fn reap(&mut self) -> Result<Option<(u16, u8)>> {
        Queue::reap(self)
    }

    #[inline]
    fn ready(&self) -> bool {
        self.ring.ready()
    }

    fn in_flight(&self) -> usize {
        Queue::in_flight(self)
    }

    fn sleep(&mut self, limit: Option<Duration>) -> Result<()> {
        Queue::sleep(self, limit)
    }

    fn kick(&mut self) -> Result<()> {
        Queue::kick(self)
    }

    fn notifications(&mut self) -> Result<(u64, u64)> {
        self.take_signals()?;
        Ok((self.kicks, self.signals))
    }

    fn write_data(&self, slot: u16, bytes: &[u8]) {
        Queue::write_data(self, slot, bytes);
    }

    fn read_data(&self, slot: u16, bytes: &mut [u8]) {
        Queue::read_data(self, slot, bytes);
    }

    fn resume_base(&mut self, known: bool) -> u32 {
        Queue::resume_base(self, known)
    }
}
