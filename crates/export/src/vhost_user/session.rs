//! The handler of one front end's messages. It changes the session's state, and carries out the
//! effects on the reactors.
//!
//! In: messages, parsed by the `vhost` crate. Out: a [`SessionState`], and queues started, stopped
//! and changed on reactors. What must hold:
//! - A ring's addresses are resolved when the ring starts, with the memory table of that time.
//! - Removed memory stays mapped until the last request in it is answered (regions have reference
//!   counts).
//! - `GET_VRING_BASE` and the end of a session wait for the requests in flight.
//! - If a descriptor is refused, the state keeps the previous descriptor. Any other change stays in
//!   the state even if a reactor or the process cannot carry it out.

mod starting;

use std::cell::OnceCell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockyard_ring::{GuestMemory, MEMORY_SLOTS, Mapper, MemoryAlarm, MemoryError};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use super::caller::Caller;
use super::channel::BackChannel;
use super::config::{self, QueueShape};
use super::device::DeviceState;
use super::dirty_memory::{self, DirtyMemory};
use super::inflight::{self, InflightRegion};
use super::notify::{self, Call};
use super::pin::Pins;
use super::queue::QueueHandle;
use super::refusal::{Causes, no, unusable};
use super::state::{Change, Effect, InflightFile, LogFile, Parts, Refusal, SessionState, Vring};
use super::{Shared, Tuning};
use crate::{custody, keeper};

const NO_CALL: &str =
    "a call or error notifier that is neither an eventfd nor a Unix stream socket";

/// Waits for a time, or for a signal on the eventfd.
type Pause = Box<dyn Fn(&OwnedFd, Duration) + Send>;

/// A session. Only one thread uses it.
pub struct Session {
    pub(super) export: Arc<Shared>,
    pub(super) device: Arc<DeviceState>,
    shape: QueueShape,
    tuning: Tuning,
    /// The front end's process, if it is known.
    peer: Option<i32>,
    pub(super) state: SessionState,
    /// Maps what the front end shares.
    pub(super) mapper: Mapper,
    /// Is raised when the front end has truncated a file that it shares.
    pub(super) alarm: Arc<MemoryAlarm>,
    /// An eventfd that is signalled when the session must end.
    wake: Arc<OwnedFd>,
    /// How the session waits before a ring starts. Tests replace it.
    pause: Pause,
    /// The mapped memory table.
    pub(super) memory: GuestMemory,
    /// The log already says that the guest memory is in a file on a disk.
    pub(super) named_disk: bool,
    /// Registrations of the guest memory. `None`: guest memory is not pinned.
    pub(super) pins: Option<Pins>,
    /// The mapped in-flight region.
    pub(super) inflight: Option<InflightRegion>,
    /// The front end has exchanged the region while rings ran.
    is_exchanged: bool,
    pub(super) dirty: DirtyMemory,
    /// The session must end, because it cannot do what the front end relies on.
    pub(super) ends: bool,
    /// The next message may be one that a server has handled before it died.
    pub(super) may_repeat: bool,
    /// A ring that starts takes no request before [`Session::run_held`], because the keeper does
    /// not have its state yet, or because this process is not the owner.
    holds: bool,
    pub(super) caller: OnceCell<Arc<Caller>>,
    /// The running rings.
    queues: Vec<Option<QueueHandle>>,
}

impl Session {
    /// Returns a session that starts with `state`. The state is new, or another session has
    /// [released](Session::release) it. Maps its memory and starts its rings. `wake`: an eventfd
    /// that is signalled if the front end truncates memory that it shares, or if the export ends.
    pub fn new(
        export: Arc<Shared>,
        peer: Option<i32>,
        state: SessionState,
        wake: Arc<OwnedFd>,
    ) -> Result<Self> {
        let alarm = Arc::new(MemoryAlarm::new(wake.clone()));
        export.device.write_back.store(state.write_back, Ordering::Relaxed);
        let holds = custody::must_wait(&export.device.disk);
        let mut session = Session {
            device: export.device.clone(),
            tuning: export.tuning,
            peer,
            mapper: export.mapper.with_alarm(alarm.clone()),
            alarm,
            wake,
            pause: Box::new(starting::pause),
            shape: export.shape,
            memory: GuestMemory::default(),
            named_disk: false,
            pins: export.tuning.pin_memory.then(|| Pins::new(export.device.clone())),
            inflight: None,
            is_exchanged: false,
            dirty: DirtyMemory::default(),
            ends: false,
            may_repeat: false,
            holds,
            caller: OnceCell::new(),
            queues: state.vrings.iter().map(|_| None).collect(),
            state,
            export,
        };
        let begun = session.begin();
        if begun.is_err() {
            session.release();
        }
        session.holds = keeper::is_on();
        begun.map(|()| session)
    }

    /// Maps memory and starts rings as the state says.
    fn begin(&mut self) -> Result<()> {
        self.map_table()?;
        if let Some(recorded) = &self.state.inflight {
            let file = self.duplicate(&recorded.file)?;
            self.inflight =
                Some(self.map_inflight(file, (recorded.offset, recorded.len), recorded.queues)?);
        }
        self.map_log()?;
        *super::lock(&self.export.channel) = self.state.back_channel.clone();
        for index in 0..self.state.vrings.len() {
            if std::mem::take(&mut self.state.vrings[index].started) {
                self.start(index)?;
            }
        }
        Ok(())
    }

    /// Stops each queue after its requests in flight, and returns the state. The session then has
    /// the state of a new session.
    pub fn release(&mut self) -> SessionState {
        let _wait = self.export.own_wait();
        for index in 0..self.queues.len() {
            let started = self.state.vrings[index].started;
            self.stop(index, false);
            self.state.vrings[index].started = started;
        }
        // An error is in the log. The disk may stay active.
        let _ = self.deactivate();
        std::mem::replace(&mut self.state, self.export.new_state())
    }

    /// Stops a ring, if it runs, after its requests in flight. Returns false if the ring's reactor
    /// has ended, so that the ring's position is not known. `suspends`: requests that have not
    /// begun stay in the in-flight region.
    pub(super) fn stop(&mut self, index: usize, suspends: bool) -> bool {
        let Some(queue) = self.queues[index].take() else { return true };
        let base = queue.stop(suspends);
        self.state.vrings[index].stopped(base);
        base.is_some()
    }

    /// Returns the running rings.
    pub(super) fn queues(&self) -> impl Iterator<Item = &QueueHandle> {
        self.queues.iter().flatten()
    }

    /// Returns a ring if it runs.
    pub(super) fn running(&self, index: usize) -> Option<&QueueHandle> {
        self.queues.get(index)?.as_ref()
    }

    /// Logs why a message is refused, and returns the error for the front end.
    pub(super) fn refuse(&self, what: std::fmt::Arguments<'_>) -> Error {
        self.device.log.warn(self.device.disk.name(), None, format_args!("refused: {what}"));
        no()
    }

    /// As [`Session::refuse`], for what the front end has made unusable. A hand-over then goes on
    /// without this session.
    pub(super) fn reject(&self, what: std::fmt::Arguments<'_>) -> Error {
        self.refuse(what);
        unusable(what)
    }

    /// Logs why memory cannot be mapped, and returns the error for the front end.
    pub(super) fn unmapped(&self, what: &str, why: &MemoryError) -> Error {
        let what = format_args!("{what}: {}", Causes(why));
        if why.is_lack() { self.refuse(what) } else { self.reject(what) }
    }

    /// Returns a successful result unchanged. Logs a refusal, and converts it to an error for the
    /// front end.
    pub(super) fn allowed<T>(&self, outcome: std::result::Result<T, Refusal>) -> Result<T> {
        outcome.map_err(|why| self.refuse(format_args!("{why}")))
    }

    /// Makes one change of the state, and carries out the effect of the change.
    pub(super) fn apply(&mut self, change: Change) -> Result<()> {
        let effect = self.state.apply(change);
        match self.allowed(effect)? {
            Effect::None => Ok(()),
            Effect::Features { before } => {
                self.reset_write_cache(before);
                if before != self.state.features {
                    self.drop_own_region();
                }
                self.log_all_changed(before)
            }
            Effect::Marks(index) => {
                self.extend_log(self.state.logged_ring(index));
                self.update_marks(index..index + 1)
            }
            Effect::Restart(index) => self.restart(index),
            Effect::Call(index) => {
                let call = self.call(index)?;
                self.in_effect(self.running(index).map(|queue| queue.set_call(call)))
            }
            Effect::Error(index) => {
                let error = self.copy(&self.state.vrings[index].error)?;
                self.in_effect(self.running(index).map(|queue| queue.set_error(error)))
            }
            Effect::Enable(index) => {
                let enabled = self.state.vrings[index].enabled;
                self.in_effect(self.running(index).map(|queue| queue.set_enabled(enabled)))
            }
        }
    }

    /// Changes a ring's descriptor. If the change is refused, puts the old descriptor back.
    fn exchange(
        &mut self,
        index: u8,
        descriptor: fn(&mut Vring) -> &mut Option<OwnedFd>,
        change: Change,
    ) -> Result<()> {
        let index = usize::from(index);
        let before = self.state.vrings.get_mut(index).and_then(|vring| descriptor(vring).take());
        let outcome = self.apply(change);
        if outcome.is_err()
            && let Some(vring) = self.state.vrings.get_mut(index)
        {
            *descriptor(vring) = before;
        }
        outcome
    }

    fn call(&self, index: usize) -> Result<Call> {
        Ok(match (self.copy(&self.state.vrings[index].call)?, &self.state.back_channel) {
            (Some(fd), _) => Call::fd(fd, &self.device.signals).map_err(|e| {
                self.refuse(format_args!("queue {index}: cannot use its call descriptor: {e}"))
            })?,
            (None, Some(channel)) if self.state.in_band() => {
                let caller = self.caller(channel).map_err(|e| {
                    self.refuse(format_args!("cannot start a thread for in-band calls: {e}"))
                })?;
                Call::InBand { caller, index: index as u16 }
            }
            (None, _) => Call::None,
        })
    }

    /// Returns the sender of in-band calls, and starts it at the first use.
    fn caller(&self, channel: &Arc<BackChannel>) -> std::io::Result<Arc<Caller>> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller.clone());
        }
        let caller = Caller::start(channel.clone(), self.shape.queues)?;
        Ok(self.caller.get_or_init(|| caller).clone())
    }

    /// Duplicates a descriptor for a running queue. The state keeps the original.
    fn copy(&self, fd: &Option<OwnedFd>) -> Result<Option<OwnedFd>> {
        fd.as_ref().map(|fd| self.duplicate(fd)).transpose()
    }

    /// Duplicates a descriptor. Fails if the process has no free descriptor.
    pub(super) fn duplicate(&self, fd: &OwnedFd) -> Result<OwnedFd> {
        fd.try_clone().map_err(|e| self.refuse(format_args!("cannot duplicate a descriptor: {e}")))
    }

    /// Returns a descriptor that a reactor may wait for or signal, because no other process can
    /// make the reactor block with it.
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
            Err(e) => Err(self.refuse(format_args!(
                "cannot check that the descriptor of a kick, call or error is an eventfd: {e}"
            ))),
        }
    }

    fn reset(&mut self) {
        let wait = self.export.own_wait();
        for index in 0..self.queues.len() {
            self.stop(index, false);
        }
        let _ = self.deactivate();
        drop(wait);
        // The driver begins with fresh rings, so chains that were not answered mean nothing there.
        if let Some(region) = &self.inflight {
            region.forget();
        }
        self.state.reset();
        self.drop_own_region();
        self.switch_write_cache(self.device.disk.options().cache.write_back());
    }

    pub(super) fn map_inflight(
        &self,
        file: OwnedFd,
        layout: (u64, u64),
        queues: u16,
    ) -> Result<InflightRegion> {
        let region = InflightRegion::map(&self.mapper, file, layout, queues);
        region.map_err(|e| self.unmapped("in-flight region", &e))
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
        self.apply(Change::Features {
            accepted: features,
            offered: config::features(&self.device.disk),
        })?;
        if let Some(connection) = &mut *super::lock(&self.export.connection) {
            connection.client.features = Some(features);
        }
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
        self.apply(Change::Size { index, entries: num })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let parts = Parts { descriptors, available, used };
        self.apply(Change::Addresses { index, flags: flags.bits(), parts, log })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.apply(Change::Base { index, base })
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let suspends = self.suspends_on_stop();
        self.stop_ring(index, suspends).map(|base| VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = self.notifier(fd, notify::is_kick, "a kick descriptor that is no eventfd")?;
        self.exchange(index, |ring| &mut ring.kick, Change::Kick { index: index.into(), fd })
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = self.notifier(fd, notify::is_call, NO_CALL)?;
        self.exchange(index, |ring| &mut ring.call, Change::Call { index: index.into(), fd })
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = self.notifier(fd, notify::is_call, NO_CALL)?;
        self.exchange(index, |ring| &mut ring.error, Change::Error { index: index.into(), fd })
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let base = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | dirty_memory::PROTOCOL;
        // User Mode Linux accepts all offered features, and an in-band kick is many times slower
        // than an eventfd. So offer in-band notifications only if the user enables them.
        let in_band = VhostUserProtocolFeatures::INBAND_NOTIFICATIONS;
        Ok(if self.tuning.in_band { base | in_band } else { base })
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()?;
        self.apply(Change::Protocol { accepted: features, offered })
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.shape.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.apply(Change::Enable { index, state: enable.into() })
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let mut space = config::space(&self.device.disk, self.shape, self.state.write_back);
        // Front ends ask for the fields that they know. Fields beyond this device's configuration
        // space are zero.
        let (offset, end) = (offset as usize, offset as usize + size as usize);
        space.resize(space.len().max(end), 0);
        Ok(space[offset..end].to_vec())
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let at = config::WCE_OFFSET.checked_sub(offset as usize);
        let Some(byte) = at.and_then(|at| buf.get(at)) else {
            return Err(self.refuse(format_args!(
                "the guest writes {} bytes at offset {offset} of the configuration space, but can \
                 write only the write cache byte at offset {}",
                buf.len(),
                config::WCE_OFFSET
            )));
        };
        if !self.state.has(config::F_CONFIG_WCE) {
            return Err(self.refuse(format_args!(
                "the guest switches the write cache, but CONFIG_WCE was not negotiated"
            )));
        }
        let write_back = *byte != 0;
        if self.switch_write_cache(write_back) && !write_back {
            // Earlier writes must become durable before the guest relies on a write-through cache.
            let _wait = self.export.own_wait();
            if !self.export.sync() {
                return Err(self.refuse(format_args!(
                    "the write cache is off, but earlier writes cannot be synced"
                )));
            }
        }
        Ok(())
    }

    fn get_inflight_fd(
        &mut self,
        inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        self.allowed(self.state.check_inflight_shape(inflight))?;
        let (queues, size) = (inflight.num_queues, inflight.queue_size);
        let made = inflight::allocate(queues, size, self.state.has(config::F_PACKED));
        let (fd, len) = made.map_err(|e| self.refuse(format_args!("in-flight region: {e}")))?;
        let reply = VhostUserInflight {
            mmap_size: len,
            mmap_offset: 0,
            num_queues: queues,
            queue_size: size,
        };
        Ok((reply, fd.into()))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        self.allowed(self.state.check_inflight_room(inflight))?;
        let (offset, len, queues) = (inflight.mmap_offset, inflight.mmap_size, inflight.num_queues);
        let file = OwnedFd::from(file);
        let region = self.map_inflight(self.duplicate(&file)?, (offset, len), queues)?;
        self.take_over_write_cache(&region);
        let runs = self.queues().next().is_some();
        self.is_exchanged |= runs;
        self.inflight = Some(region);
        self.state.inflight = Some(InflightFile { file, offset, len, queues, own: None });
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
        self.add_region(region, file).map(|()| None)
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
        direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        file: File,
    ) -> Result<Option<File>> {
        self.transfer_state(direction, file.into()).map(|()| None)
    }

    fn check_device_state(&mut self) -> Result<()> {
        self.check_transferred_state()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("there is no shared memory region"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let (offset, len) = (log.mmap_offset, log.mmap_size);
        self.use_log(LogFile { file: file.into(), offset, len })
    }
}

#[cfg(test)]
mod tests;
