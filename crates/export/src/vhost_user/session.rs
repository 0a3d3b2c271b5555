//! One front end's session: the state that vhost-user messages build up, and the queues that come of it.
//!
//! In: messages, parsed by the `vhost` crate. Out: queues started, stopped and changed on reactors.
//! What must hold: a ring's addresses are resolved when it starts, against the memory table of that time; memory that is
//! removed stays mapped until the last request in it is answered (regions are counted); `GET_VRING_BASE` and the end of
//! a session wait for what is in flight.

use std::cell::OnceCell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockyard_ring::{GuestMemory, MEMORY_SLOTS};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use super::caller::Caller;
use super::channel::BackChannel;
use super::config::{self, QueueShape};
use super::inflight::{self, InflightRegion};
use super::memory::Causes;
use super::notify::{self, Call};
use super::pin::Pins;
use super::queue::{DeviceState, QueueHandle, QueueSetup};
use super::{Shared, Tuning};

const NO_CALL: &str = "a call or error notifier that is neither an eventfd nor a Unix stream socket";

/// What a ring is told before it starts.
#[derive(Default)]
pub(super) struct Vring {
    size: u32,
    /// Addresses in the front end's own process: descriptors, available (driver), used (device).
    pub(super) parts: Option<(u64, u64, u64)>,
    base: u32,
    /// This session has stopped the ring after its last request, so nothing of it is in flight, and what the front end says
    /// of its base is true. (After the death of a back end only the in-flight region knows.)
    is_settled: bool,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    enabled: bool,
    running: Option<QueueHandle>,
}

impl Vring {
    /// Stops the ring, if it runs, after what it has in flight. False: its reactor has ended, and nothing is known of it.
    fn stop(&mut self) -> bool {
        let Some(queue) = self.running.take() else { return true };
        let base = queue.stop();
        self.is_settled = base.is_some();
        self.base = base.unwrap_or(self.base);
        base.is_some()
    }
}

/// Our own refusal, which the front end hears of: the crate's errors come without an answer.
pub(super) fn no() -> Error {
    Error::ReqHandlerError(std::io::ErrorKind::InvalidInput.into())
}

/// The session's state; one thread works on it.
pub struct Session {
    pub(super) export: Arc<Shared>,
    pub(super) device: Arc<DeviceState>,
    shape: QueueShape,
    tuning: Tuning,
    /// The front end's process.
    peer: Option<i32>,
    pub(super) memory: GuestMemory,
    /// The log says that memory is in a file on a disk.
    pub(super) named_disk: bool,
    /// None: it is not pinned.
    pub(super) pins: Option<Pins>,
    pub(super) features: u64,
    pub(super) protocol: VhostUserProtocolFeatures,
    pub(super) inflight: Option<InflightRegion>,
    pub(super) channel: Option<Arc<BackChannel>>,
    pub(super) caller: OnceCell<Arc<Caller>>,
    vrings: Vec<Vring>,
}

impl Session {
    pub fn new(export: Arc<Shared>, peer: Option<i32>) -> Self {
        let shape = export.shape;
        export.device.write_back.store(export.device.disk.options().cache.write_back(), Ordering::Relaxed);
        Session {
            device: export.device.clone(),
            tuning: export.tuning,
            peer,
            shape,
            memory: GuestMemory::default(),
            named_disk: false,
            pins: export.tuning.pin_memory.then(|| Pins::new(export.device.clone())),
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            inflight: None,
            channel: None,
            caller: OnceCell::new(),
            vrings: (0..shape.queues).map(|_| Vring::default()).collect(),
            export,
        }
    }

    /// Stops all queues, each after what it has in flight.
    pub fn stop(&mut self) {
        let _wait = self.export.own_wait();
        for vring in &mut self.vrings {
            vring.stop();
        }
    }

    fn in_band(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::INBAND_NOTIFICATIONS)
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = &QueueHandle> {
        self.vrings.iter().filter_map(|vring| vring.running.as_ref())
    }

    pub(super) fn running(&self, index: u32) -> Option<&QueueHandle> {
        self.vrings.get(index as usize)?.running.as_ref()
    }

    pub(super) fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let queues = self.shape.queues;
        self.vrings.get_mut(index as usize).ok_or_else(|| {
            let device = &self.device;
            device.log.warn(device.disk.name(), None, format_args!("the front end names queue {index} of {queues}"));
            no()
        })
    }

    pub(super) fn refuse(&self, what: std::fmt::Arguments<'_>) -> Error {
        self.device.log.warn(self.device.disk.name(), None, format_args!("refused: {what}"));
        no()
    }

    fn call(&self, index: usize) -> Result<Call> {
        Ok(match (self.copy(&self.vrings[index].call)?, &self.channel) {
            (Some(fd), _) => {
                Call::fd(fd).map_err(|e| self.refuse(format_args!("queue {index}: signalling its calls: {e}")))?
            }
            (None, Some(channel)) if self.in_band() => {
                let caller = self.caller(channel).map_err(|e| self.refuse(format_args!("a thread for calls: {e}")))?;
                Call::InBand { caller, index: index as u16 }
            }
            (None, _) => Call::None,
        })
    }

    /// What sends calls by messages on the channel of today.
    fn caller(&self, channel: &Arc<BackChannel>) -> std::io::Result<Arc<Caller>> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller.clone());
        }
        let caller = Caller::start(channel.clone(), self.shape.queues)?;
        Ok(self.caller.get_or_init(|| caller).clone())
    }

    /// A running queue has descriptors of its own: it may be started anew with the same ones.
    fn copy(&self, fd: &Option<OwnedFd>) -> Result<Option<OwnedFd>> {
        let copy = fd.as_ref().map(OwnedFd::try_clone).transpose();
        copy.map_err(|e| self.refuse(format_args!("copying a descriptor: {e}")))
    }

    /// A descriptor that a reactor may wait for or signal: no other user of it can make the reactor sleep.
    fn notifier(
        &self,
        fd: Option<File>,
        is_good: fn(&OwnedFd) -> std::io::Result<bool>,
        wrong: &str,
    ) -> Result<Option<OwnedFd>> {
        let Some(fd) = fd.map(OwnedFd::from) else { return Ok(None) };
        match is_good(&fd) {
            Ok(true) => Ok(Some(fd)),
            Ok(false) => Err(self.refuse(format_args!("{wrong}"))),
            Err(e) => Err(self.refuse(format_args!("looking at a notifier: {e}"))),
        }
    }

    /// Starts a ring if it is not running; all it needs must have been told.
    pub(super) fn start(&mut self, index: usize) -> Result<()> {
        let Some(vring) = self.vrings.get_mut(index) else { return Err(no()) };
        if vring.running.is_some() {
            return Ok(());
        }
        let Some(parts) = vring.parts else {
            return Err(self.refuse(format_args!("queue {index} is started before its addresses are set")));
        };
        let kick = vring.kick.take();
        let (size, base, enabled) = (vring.size, vring.base, vring.enabled);
        let guest = |address: u64| {
            self.memory.guest_address(address).ok_or_else(|| {
                self.refuse(format_args!("queue {index}: ring address {address:#x} is not in the memory table"))
            })
        };
        let parts = (guest(parts.0)?, guest(parts.1)?, guest(parts.2)?);
        let (call, error) = (self.call(index)?, self.copy(&self.vrings[index].error)?);
        let setup = QueueSetup {
            index: index as u16,
            device: self.device.clone(),
            memory: self.memory.clone(),
            size,
            parts,
            base,
            packed: self.features & config::F_PACKED != 0,
            event_idx: self.features & config::F_EVENT_IDX != 0,
            inflight: self.inflight.clone(),
            is_settled: self.vrings[index].is_settled,
            kick,
            in_band: self.in_band(),
            call,
            error,
            // Without protocol features rings are enabled from the start.
            enabled: enabled || self.features & config::F_PROTOCOL == 0,
            poll: self.tuning.poll,
            coalesce: self.tuning.coalesce,
            peer: self.peer,
        };
        let _wait = self.export.own_wait();
        let reactor = self.export.reactors.next();
        if let Some(pins) = &mut self.pins {
            pins.join(&reactor, &self.memory);
        }
        match QueueHandle::start(reactor, setup) {
            Ok(queue) => {
                self.vrings[index].running = Some(queue);
                Ok(())
            }
            Err(e) => Err(self.refuse(format_args!("queue {index} cannot start: {e}"))),
        }
    }

    fn reset(&mut self) {
        self.stop();
        for vring in &mut self.vrings {
            *vring = Vring { is_settled: true, ..Vring::default() };
        }
        self.features = 0;
        self.switch_write_cache(self.device.disk.options().cache.write_back());
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(&self.device.disk))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !config::features(&self.device.disk);
        if unknown != 0 {
            return Err(self.refuse(format_args!("features {unknown:#x} were not offered")));
        }
        let before = std::mem::replace(&mut self.features, features);
        self.settle_write_cache(before);
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<vhost::VhostUserMemoryRegionBase>>> {
        self.set_table(regions, files).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if num == 0 || num > 32768 {
            return Err(self.refuse(format_args!("queue {index} of {num} entries")));
        }
        self.vring(index)?.size = num;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.vring(index)?.parts = Some((descriptor, available, used));
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.vring(index)?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let wait = self.export.own_wait();
        let vring = self.vring(index)?;
        let is_stopped = vring.stop();
        drop(wait);
        (vring.kick, vring.call, vring.error) = (None, None, None);
        let base = vring.base;
        if !is_stopped {
            // What the ring has come to is not known.
            return Err(self.refuse(format_args!("queue {index}: its reactor has ended")));
        }
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = self.notifier(fd, notify::is_kick, "a kick that is no eventfd")?;
        let wait = self.export.own_wait();
        let vring = self.vring(index.into())?;
        vring.kick = fd;
        // A new kick for a running ring: it is a new start (QEMU does this when it switches to another notifier).
        let is_stopped = vring.stop();
        drop(wait);
        if !is_stopped {
            return Err(self.refuse(format_args!("queue {index}: its reactor has ended")));
        }
        self.start(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = self.notifier(fd, notify::is_call, NO_CALL)?;
        self.vring(index.into())?.call = fd;
        let call = self.call(index.into())?;
        let change = self.running(index.into()).map(|queue| queue.set_call(call));
        self.in_effect(change)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = self.notifier(fd, notify::is_call, NO_CALL)?;
        let error = self.copy(&fd)?;
        let vring = self.vring(index.into())?;
        vring.error = fd;
        let change = self.running(index.into()).map(|queue| queue.set_error(error));
        self.in_effect(change)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let base = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        // User Mode Linux takes whatever is offered, and a message a kick is many times slower than an eventfd.
        let in_band = VhostUserProtocolFeatures::INBAND_NOTIFICATIONS;
        Ok(if self.tuning.in_band { base | in_band } else { base })
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.protocol = VhostUserProtocolFeatures::from_bits_truncate(features);
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.shape.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let vring = self.vring(index)?;
        vring.enabled = enable;
        let change = self.running(index).map(|queue| queue.set_enabled(enable));
        self.in_effect(change)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let mut space = config::space(&self.device.disk, self.shape, self.device.write_back.load(Ordering::Relaxed));
        // Front ends ask for as much as they know of; what lies beyond our fields is zero.
        let (offset, end) = (offset as usize, offset as usize + size as usize);
        space.resize(space.len().max(end), 0);
        Ok(space[offset..end].to_vec())
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let at = config::WCE_OFFSET.checked_sub(offset as usize);
        let Some(byte) = at.and_then(|at| buf.get(at)) else {
            return Err(
                self.refuse(format_args!("the guest writes {} bytes at {offset} of its configuration", buf.len()))
            );
        };
        if self.features & config::F_CONFIG_WCE == 0 {
            return Err(self.refuse(format_args!("the write cache is switched, but CONFIG_WCE was not negotiated")));
        }
        let write_back = *byte != 0;
        if self.switch_write_cache(write_back) && !write_back {
            // What was written under the old promise must be durable under the new one.
            let _wait = self.export.own_wait();
            if !self.export.settle() {
                return Err(self.refuse(format_args!("the write cache is off, and what was written cannot be synced")));
            }
        }
        Ok(())
    }

    fn get_inflight_fd(&mut self, inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let packed = self.features & config::F_PACKED != 0;
        let (queues, size) = (inflight.num_queues, inflight.queue_size);
        if queues == 0 || queues > self.shape.queues || size == 0 || size > 32768 {
            return Err(self.refuse(format_args!("an in-flight region for {queues} queues of {size} entries")));
        }
        let made = inflight::allocate(queues, size, packed);
        let (fd, len) = made.map_err(|e| self.refuse(format_args!("in-flight region: {e}")))?;
        let reply = VhostUserInflight { mmap_size: len, mmap_offset: 0, num_queues: queues, queue_size: size };
        Ok((reply, fd.into()))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, size) = (inflight.num_queues, inflight.queue_size);
        let packed = self.features & config::F_PACKED != 0;
        let need = inflight::queue_bytes(size, packed) * u64::from(queues);
        if queues == 0 || size == 0 || inflight.mmap_size < need {
            return Err(self
                .refuse(format_args!("in-flight region of {} bytes for {queues} queues of {size} entries", {
                    inflight.mmap_size
                })));
        }
        let layout = (inflight.mmap_offset, inflight.mmap_size);
        let region = InflightRegion::map(&self.export.mapper, file.into(), layout, queues);
        let region = region.map_err(|e| self.refuse(format_args!("in-flight region: {}", Causes(&e))))?;
        self.take_over_write_cache(&region);
        self.inflight = Some(region);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MEMORY_SLOTS)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<vhost::VhostUserMemoryRegionBase>> {
        self.add_region(region, &file).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.remove_region(region.guest_phys_addr, region.memory_size)
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("this is a block device"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("this is a block device"))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("device state is not transferred"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("device state is not transferred"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("there is no shared memory region"))
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(Error::InvalidOperation("dirty memory is not logged"))
    }
}
