//! Requests in slots: a header, a data buffer and a status byte each, laid out in the ring once.
//!
//! In: a request type, a sector, what data goes which way. Out: slots with their status. A request
//! costs the header's 16 bytes, the status byte and the ring's entry; descriptors are only written
//! when a slot changes its shape.
//!
//! What must hold: a slot that is in flight is not touched until `reap` has given it back; an id
//! from the device is checked against the slots in flight before it is believed.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockyard_ring::SharedSlice;
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::io::Errno;

use super::connection::RingSetup;
use super::ring::{Buffer, Ring, RingOptions};
use super::{Memory, status};

/// A slot's header and status share a line of their own, as in a guest's request structure.
const LINE: u64 = 64;
const STATUS: u64 = 16;

/// The data of a request, in bytes from the start of its slot's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    None,
    ToDevice(u32),
    FromDevice(u32),
}

/// Requests in slots, as a load uses them: over a virtqueue, or over a ring of blkif. Request types
/// and statuses are virtio's.
pub trait RequestQueue: Send + 'static {
    /// Puts a request into a free slot; the back end sees it after `publish`.
    fn submit(&mut self, slot: u16, request: u32, sector: u64, data: Data);
    /// Shows the back end what was submitted, and notifies it if it wants that.
    fn publish(&mut self) -> Result<()>;
    /// The next finished request: its slot and its status byte.
    fn reap(&mut self) -> Result<Option<(u16, u8)>>;
    /// Whether `reap` would give something.
    fn ready(&self) -> bool;
    fn in_flight(&self) -> usize;
    /// Sleeps until the back end notifies, or for `limit`. May return early.
    fn sleep(&mut self, limit: Option<Duration>) -> Result<()>;
    /// Notifies the back end, wanted or not.
    fn kick(&mut self) -> Result<()>;
    /// Notifications so far: sent to the back end, and received.
    fn notifications(&mut self) -> Result<(u64, u64)>;
    /// Copies `bytes` to the start of a slot's data, or out of it.
    fn write_data(&self, slot: u16, bytes: &[u8]);
    fn read_data(&self, slot: u16, bytes: &mut [u8]);
    /// Prepares the ring for the next back end. Returns the setup to send to it.
    fn resume_base(&mut self, known: bool) -> u32;
}

#[derive(Clone, Copy)]
struct Slot {
    laid: Option<Data>,
    in_flight: bool,
}

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
    /// An edge-triggered epoll of `call` alone: a wake-up is one system call. (Reading `call` would
    /// be two, because back ends make it non-blocking, QEMU's for one, and that flag is shared.)
    waiter: OwnedFd,
    in_flight: usize,
    /// Notifications so far: kicks that we sent, signals that the back end sent (see
    /// `take_signals`).
    pub kicks: u64,
    pub signals: u64,
}

impl<R: Ring> Queue<R> {
    /// Guest memory that such a queue takes at most.
    pub fn memory_needed(options: RingOptions, data_len: u32) -> u64 {
        let slots = u64::from(options.slots);
        let stride = u64::from(data_len).next_multiple_of(4096);
        u64::from(options.size) * 26 + slots * (48 + LINE + stride) + 8 * 4096
    }

    /// A queue whose slots have `data_len` bytes for data each.
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

    /// What the back end is told of this queue.
    pub fn setup(&self) -> RingSetup {
        RingSetup {
            index: self.index,
            size: self.ring.size(),
            addresses: self.ring.addresses(),
            kick: self.kick.clone(),
            call: self.call.clone(),
        }
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Copies `bytes` to the start of a slot's data.
    pub fn write_data(&self, slot: u16, bytes: &[u8]) {
        assert!(bytes.len() <= self.data_len as usize, "a slot holds {} bytes", self.data_len);
        self.data.write(slot as usize * self.data_len as usize, bytes);
    }

    /// Copies the start of a slot's data out.
    pub fn read_data(&self, slot: u16, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.data_len as usize, "a slot holds {} bytes", self.data_len);
        self.data.read(slot as usize * self.data_len as usize, bytes);
    }

    /// Puts a request into a free slot and the slot into the ring; the device sees it after
    /// `publish`.
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

    /// Shows the device what was submitted, and kicks it if it wants that.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        if self.ring.publish() { self.kick() } else { Ok(()) }
    }

    /// Kicks, asked for or not.
    pub fn kick(&mut self) -> Result<()> {
        self.kicks += 1;
        rustix::io::write(&*self.kick, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// The next finished request: its slot and its status byte.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<(u16, u8)>> {
        let Some((id, _)) = self.ring.reap() else { return Ok(None) };
        match self.slots.get_mut(id as usize) {
            Some(slot) if slot.in_flight => slot.in_flight = false,
            _ => anyhow::bail!(
                "queue {}: the back end has used descriptor {id}, which is not in flight",
                self.index
            ),
        }
        self.in_flight -= 1;
        let [status] = self.lines.copy_out(id as usize * LINE as usize + STATUS as usize);
        Ok(Some((id as u16, status)))
    }

    /// Sleeps until the device signals a used chain (or somebody else writes the call eventfd), or
    /// for `limit`. May return for nothing.
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

    /// Brings `signals` up to date. The eventfd keeps count: nothing is read while requests run.
    pub fn take_signals(&mut self) -> Result<()> {
        let mut count = [0; 8];
        match rustix::io::read(&*self.call, &mut count) {
            Ok(_) => self.signals += u64::from_ne_bytes(count),
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Makes the ring ready for the next back end, and gives its SET_VRING_BASE. `known`: that back
    /// end finds in the in-flight buffer what its predecessor had taken. Else the ring is emptied
    /// and everything in flight submitted again, as a guest does that resets the device. The last
    /// one is gone, and all it has used is reaped.
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

    /// One request, waited for: its status byte. `data` goes to the device or comes from it, as
    /// `request` has it.
    pub fn call(
        &mut self,
        request: u32,
        sector: u64,
        data: Data,
        bytes: &mut [u8],
        limit: Duration,
    ) -> Result<u8> {
        anyhow::ensure!(self.in_flight == 0, "a single request wants the queue for itself");
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
            self.sleep(Some(
                left.ok_or_else(|| anyhow::anyhow!("no answer to a request for {limit:?}"))?,
            ))?;
        }
    }
}

impl<R: Ring> RequestQueue for Queue<R> {
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
