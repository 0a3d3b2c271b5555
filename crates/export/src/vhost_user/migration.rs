//! Live migration: the log of changed guest memory, and the device's state.
//!
//! ```text
//!   SET_LOG_BASE, SET_FEATURES, SET_VRING_ADDR ──► what each queue marks (queue/marks.rs)
//!   SET_DEVICE_STATE_FD, CHECK_DEVICE_STATE        an empty state: all of it is in the rings
//!   first ring starts, last ring stops       ──► the disk is activated, deactivated
//! ```
//! What must hold: a message is acknowledged only when each running queue has changed what it
//! marks. Nothing that a queue writes while the front end asks for a log is lost: what was written
//! before the log came is made up for by marking all memory.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockyard_disk::{Why, WorkError};
use blockyard_ring::DirtyLog;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use rustix::io::{Errno, ReadWriteFlags};
use vhost::vhost_user::Result;
use vhost::vhost_user::message::{VhostTransferStateDirection, VhostUserProtocolFeatures};

use super::config;
use super::dirty_memory::{DirtyMemory, SKIP_DRAIN};
use super::notify::{self, Call};
use super::queue::Marks;
use super::refusal::Causes;
use super::session::Session;
use super::state::LogFile;

/// Longest wait for the end of a state, which the front end has closed before it asks.
const STATE_TIME: Duration = Duration::from_secs(5);

impl Session {
    /// Opens the image of a disk that is active only while rings run. The session ends if that
    /// fails, because the front end starts rings without asking for an answer. It may try again.
    pub(super) fn activate(&mut self) -> Result<()> {
        let export = self.export.clone();
        let disk = &export.device.disk;
        let activated = disk.activate(|| !export.stop.load(Ordering::SeqCst));
        activated.map_err(|e| {
            self.ends = true;
            self.refuse(format_args!("a ring that cannot run: {e}"))
        })
    }

    /// Closes the image of such a disk if no ring runs. After an error the image is still locked.
    pub(super) fn deactivate(&self) -> Result<()> {
        if self.queues().next().is_some() {
            return Ok(());
        }
        match self.device.disk.deactivate() {
            Ok(()) => Ok(()),
            Err(WorkError { why, .. }) if why.is_busy() || matches!(*why, Why::Ended) => {
                let what = format_args!("the image stays open and locked: {why}");
                self.device.log.warn(self.device.disk.name(), None, what);
                Ok(())
            }
            Err(e) => Err(self.refuse(format_args!("the image stays open and locked: {e}"))),
        }
    }

    /// Returns whether GET_VRING_BASE may leave requests in the in-flight region. QEMU 11.0 means
    /// that if it accepts bit 20. Later versions accept bit 23 too, and use a message of its own.
    pub(super) fn suspends_on_stop(&self) -> bool {
        let accepted = self.state.protocol;
        accepted.contains(VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT)
            && !accepted.contains(SKIP_DRAIN)
    }

    /// Stops a ring without waiting for requests that have not begun (GET_VRING_BASE_SKIP_DRAIN).
    /// They stay in the in-flight region.
    pub(super) fn stop_without_drain(&mut self, index: u32) -> Result<u32> {
        self.allowed(self.state.negotiated(SKIP_DRAIN))?;
        self.stop_ring(index, true)
    }

    /// Stops a ring and returns its base (GET_VRING_BASE, GET_VRING_BASE_SKIP_DRAIN).
    pub(super) fn stop_ring(&mut self, index: u32, suspends: bool) -> Result<u32> {
        let found = self.state.vring(index).map(|(at, _)| at);
        let at = self.allowed(found)?;
        let wait = self.export.own_wait();
        let is_stopped = self.stop(at, suspends);
        let vring = &mut self.state.vrings[at];
        (vring.kick, vring.call, vring.error) = (None, None, None);
        vring.next_base = None;
        let base = vring.base;
        if !is_stopped {
            // The reactor has ended, so the ring's position is not known.
            return Err(self.refuse(format_args!("queue {index}: its reactor has ended")));
        }
        // Before the answer, because the destination of a migration opens the image after it.
        self.deactivate()?;
        drop(wait);
        Ok(base)
    }

    /// Maps the log of the state, which another session has filled.
    pub(super) fn map_log(&mut self) -> Result<()> {
        if let Some(log) = &self.state.log {
            self.dirty.log = Some(self.mapped(log)?);
        } else {
            // The front end asks for a log that it has not sent. The other session may have written
            // something meanwhile.
            let logs = self.state.vrings.iter().any(|vring| vring.log.is_some());
            let missed = logs || self.state.has(config::F_LOG_ALL);
            self.dirty.missed.store(missed, Ordering::SeqCst);
        }
        Ok(())
    }

    fn mapped(&self, log: &LogFile) -> Result<Arc<DirtyLog>> {
        // Not by the session's mapper: a log that the front end truncates is lost alone.
        let mapped = DirtyLog::map(&self.export.mapper, &log.file, log.offset, log.len);
        let populated = mapped.and_then(|mapped| {
            self.state.logged().try_for_each(|(addr, len)| mapped.populate(addr, len))?;
            Ok(Arc::new(mapped))
        });
        populated.map_err(|e| self.unmapped("SET_LOG_BASE", &e))
    }

    /// Allocates the log's pages for these guest addresses (address, length in bytes), which are
    /// logged from now on. A failure costs only a migration.
    pub(super) fn extend_log(&self, logged: impl IntoIterator<Item = (u64, u64)>) {
        let Some(log) = &self.dirty.log else { return };
        let extended = logged.into_iter().try_for_each(|(addr, len)| log.populate(addr, len));
        if let Err(e) = extended {
            self.device.log.warn(
                self.device.disk.name(),
                None,
                format_args!(
                    "the log of changed memory cannot be extended: {}: a migration would miss \
                     changes unless the front end sends another log (SET_LOG_BASE)",
                    Causes(&e)
                ),
            );
        }
    }

    /// Uses a log (SET_LOG_BASE). The old log, if there is one, gets no bit after that.
    pub(super) fn use_log(&mut self, log: LogFile) -> Result<()> {
        self.allowed(self.state.check_log_room(log.len))?;
        let mapped = self.mapped(&log)?;
        self.dirty.log = Some(mapped.clone());
        self.state.log = Some(log);
        self.update_marks(0..self.state.vrings.len())?;
        if self.dirty.missed.swap(false, Ordering::SeqCst) {
            for region in self.memory.regions() {
                mapped.mark(region.guest(), region.size());
            }
        }
        Ok(())
    }

    /// Sets the descriptor that is signalled after changes of the log (SET_LOG_FD).
    pub(super) fn set_log_event(&mut self, fd: Option<OwnedFd>) -> Result<()> {
        if let Some(fd) = &fd {
            let is_good = notify::is_call(fd).unwrap_or(false);
            if !is_good {
                return Err(self.refuse(format_args!("a SET_LOG_FD that is no eventfd")));
            }
        }
        self.state.log_event = fd;
        self.update_marks(0..self.state.vrings.len())
    }

    /// Starts or stops the log of data after SET_FEATURES.
    pub(super) fn log_all_changed(&mut self, before: u64) -> Result<()> {
        if (before ^ self.state.features) & config::F_LOG_ALL == 0 {
            return Ok(());
        }
        self.warn_if_log_is_small();
        self.update_marks(0..self.state.vrings.len())
    }

    /// Gives running rings what they mark now.
    pub(super) fn update_marks(&self, rings: Range<usize>) -> Result<()> {
        let mut changes = Vec::new();
        for index in rings {
            if let Some(queue) = self.running(index) {
                changes.push(queue.set_marks(self.marks(index)?));
            }
        }
        self.in_effect(changes)
    }

    /// Returns what a ring marks: nothing, unless the front end asks for a log.
    pub(super) fn marks(&self, index: usize) -> Result<Option<Marks>> {
        let (data, used) = (self.state.has(config::F_LOG_ALL), self.state.vrings[index].log);
        if !data && used.is_none() {
            return Ok(None);
        }
        let changed = match &self.state.log_event {
            Some(event) => Call::fd(self.duplicate(event)?, &self.device.signals)
                .map_err(|e| self.refuse(format_args!("SET_LOG_FD: {e}")))?,
            None => Call::None,
        };
        let DirtyMemory { log, missed, .. } = &self.dirty;
        Ok(Some(Marks { log: log.clone(), data, used, missed: missed.clone(), changed }))
    }

    /// Logs a warning if the front end asks for a log of memory that its log has no bits for. A
    /// front end sends a larger log before it needs it.
    pub(super) fn warn_if_log_is_small(&self) {
        let Some(log) = self.dirty.log.as_ref().filter(|_| self.state.has(config::F_LOG_ALL))
        else {
            return;
        };
        let covered = |r: &&Arc<blockyard_ring::Region>| log.covers(r.guest(), r.size());
        if !self.memory.regions().iter().all(|region| covered(&region)) {
            let what = format_args!(
                "the log of changed memory is smaller than the guest's memory: a migration would \
                 miss changes unless the front end sends a larger one (SET_LOG_BASE)"
            );
            self.device.log.warn(self.device.disk.name(), None, what);
        }
    }

    /// Begins the transfer of the device's state (SET_DEVICE_STATE_FD). The state is empty: rings,
    /// in-flight region and image contain everything.
    pub(super) fn transfer_state(
        &mut self,
        direction: VhostTransferStateDirection,
        pipe: OwnedFd,
    ) -> Result<()> {
        self.allowed(self.state.negotiated(VhostUserProtocolFeatures::DEVICE_STATE))?;
        if self.queues().next().is_some() {
            return Err(self.refuse(format_args!(
                "SET_DEVICE_STATE_FD while rings run: stop them first (GET_VRING_BASE)"
            )));
        }
        self.dirty.state = match direction {
            // Closing the pipe is the end of the state.
            VhostTransferStateDirection::SAVE => None,
            VhostTransferStateDirection::LOAD => {
                let mode = rustix::fs::fstat(&pipe).map(|stat| stat.st_mode);
                if !mode.is_ok_and(|mode| FileType::from_raw_mode(mode) == FileType::Fifo) {
                    return Err(self.refuse(format_args!("a device state that is no pipe")));
                }
                Some(pipe)
            }
        };
        Ok(())
    }

    /// Returns an error if the state that the front end sent is not the empty state
    /// (CHECK_DEVICE_STATE).
    pub(super) fn check_transferred_state(&mut self) -> Result<()> {
        self.allowed(self.state.negotiated(VhostUserProtocolFeatures::DEVICE_STATE))?;
        let Some(pipe) = self.dirty.state.take() else { return Ok(()) };
        match read_end(&pipe) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.refuse(format_args!(
                "a device state with content: it comes from another back end, or from a newer one"
            ))),
            Err(e) => Err(self.refuse(format_args!("the device state does not end: {e}"))),
        }
    }
}

/// Returns whether a pipe ends without a byte. Waits for a bounded time.
fn read_end(pipe: &OwnedFd) -> std::result::Result<bool, Errno> {
    let time = Timespec { tv_sec: STATE_TIME.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(pipe, PollFlags::IN)];
    if rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&time)))? == 0 {
        return Err(Errno::TIMEDOUT);
    }
    let mut byte = [0; 1];
    let mut buffers = [std::io::IoSliceMut::new(&mut byte)];
    // The front end may have another reader. NOWAIT: the call never waits for the next byte. The
    // offset of all ones means the file's own position.
    let read = rustix::io::preadv2(pipe.as_fd(), &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT)?;
    Ok(read == 0)
}
