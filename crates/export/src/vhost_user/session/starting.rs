//! Starts the rings of a session.
//!
//! What must hold
//! - The keeper of sessions gets a ring's state before the ring takes a request. So a server that
//!   follows a dead one knows of each ring that has taken requests.
//! - A front end cannot keep a reactor busy with the starts of rings. Before a start that a message
//!   asks for, the session waits until earlier starts are paid ([`crate::budget::StartDebt`]).

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use vhost::vhost_user::Result;

use super::Session;
use crate::start::StartKind;
use crate::vhost_user::config;
use crate::vhost_user::queue::{QueueHandle, QueueSetup};
use crate::vhost_user::refusal::no;
use crate::vhost_user::state::Parts;

impl Session {
    /// Starts a ring if it does not run. Returns an error if the front end has not set everything
    /// that the ring needs.
    pub(in crate::vhost_user) fn start(&mut self, index: usize) -> Result<()> {
        let Some(vring) = self.state.vrings.get(index) else { return Err(no()) };
        if vring.started {
            return Ok(());
        }
        self.ensure_region()?;
        let setup = self.setup(index)?;
        self.start_with(index, setup)
    }

    /// Returns the settings with which a ring starts. Returns an error if the front end has not set
    /// all of them.
    fn setup(&self, index: usize) -> Result<QueueSetup> {
        let vring = &self.state.vrings[index];
        let Some(Parts { descriptors, available, used }) = vring.parts else {
            return Err(
                self.reject(format_args!("queue {index} is started before its addresses are set"))
            );
        };
        let guest = |address: u64| {
            self.memory.guest_address(address).ok_or_else(|| {
                self.reject(format_args!(
                    "queue {index}: ring address {address:#x} is not in the memory table"
                ))
            })
        };
        Ok(QueueSetup {
            index: index as u16,
            device: self.device.clone(),
            memory: self.memory.clone(),
            alarm: Some(self.alarm.clone()),
            size: vring.size,
            parts: (guest(descriptors)?, guest(available)?, guest(used)?),
            base: vring.base,
            packed: self.state.has(config::F_PACKED),
            event_idx: self.state.has(config::F_EVENT_IDX),
            inflight: self.inflight.clone(),
            is_base_valid: vring.is_base_valid,
            is_base_lost: vring.is_base_lost,
            kick: self.copy(&vring.kick)?,
            in_band: self.state.in_band(),
            call: self.call(index)?,
            error: self.copy(&vring.error)?,
            // Without protocol features, rings are enabled from the start.
            enabled: vring.enabled || !self.state.has(config::F_PROTOCOL),
            marks: self.marks(index)?,
            poll: self.tuning.poll,
            held: self.holds,
            peer: self.peer,
        })
    }

    fn start_with(&mut self, index: usize, setup: QueueSetup) -> Result<()> {
        let _wait = self.export.own_wait();
        self.activate()?;
        let reactor = self.export.reactors.next();
        if let Some(pins) = &mut self.pins {
            pins.join(&reactor, &self.memory);
        }
        let queue = QueueHandle::start(reactor, setup);
        let queue = queue.map_err(|e| {
            let what = format_args!("queue {index} cannot start: {e}");
            // The front end decides what is in a ring and its in-flight region.
            if e.kind == StartKind::Ring { self.reject(what) } else { self.refuse(what) }
        })?;
        self.queues[index] = Some(queue);
        self.state.vrings[index].started = true;
        Ok(())
    }

    /// Stops and starts a ring. A new kick descriptor for a running ring requires this (QEMU sends
    /// one when it switches to another notifier). The ring goes on where it was, unless the front
    /// end has set another base since it disabled the ring. If the ring cannot start again, it is
    /// not stopped.
    pub(super) fn restart(&mut self, index: usize) -> Result<()> {
        // The ring still runs meanwhile.
        self.pause_before_start();
        self.ensure_region()?;
        let mut setup = self.setup(index)?;
        let ran = self.running(index).is_some();
        let wait = self.export.own_wait();
        let is_stopped = self.stop(index, false);
        drop(wait);
        if !is_stopped {
            return Err(self.refuse(format_args!("queue {index}: its reactor has ended")));
        }
        let vring = &mut self.state.vrings[index];
        let next_base = vring.next_base.take();
        vring.base = next_base.unwrap_or(vring.base);
        // The in-flight region has the position of a ring that ran. To format the region would
        // leave the next server the base that the keeper has, which is old. But if the front end
        // has set another base, the region's position is the old one.
        let formats = !ran || self.is_exchanged || next_base.is_some();
        (setup.base, setup.is_base_valid) = (vring.base, vring.is_base_valid && formats);
        setup.is_base_lost = false;
        self.start_with(index, setup)
    }

    /// Waits until a ring may start, for a second at most. The end of the export ends the wait.
    pub(in crate::vhost_user) fn pause_before_start(&self) {
        let _wait = self.export.own_wait();
        let time = self.device.wait_before_start(Instant::now());
        if !time.is_zero() && !self.export.stop.load(Ordering::SeqCst) {
            (self.pause)(&self.wake, time);
        }
    }

    /// Lets rings that have started take requests, because the keeper has their state.
    pub(in crate::vhost_user) fn run_held(&mut self) {
        for queue in self.queues.iter_mut().flatten() {
            queue.release();
        }
    }
}

/// Waits for `time`, or for a signal on `wake`.
pub(super) fn pause(wake: &OwnedFd, time: Duration) {
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    let mut fds = [PollFd::new(wake, PollFlags::IN)];
    let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&time)));
}
