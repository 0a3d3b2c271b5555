//! ublk: a disk as a block device of this host.
//!
//! ```text
//!   control thread ─► /dev/ublk-control: add or take over, start, resize, stop
//!   reactors: queues ─► /dev/ublkcN: requests and answers
//!   programs, file systems ─► /dev/ublkbN
//! ```
//! In: a disk, and optionally the number of the device. Out: `/dev/ublkbN`.
//!
//! What must hold:
//! - If a device's server has died, only a server of the same disk takes the device over. No
//!   request is lost, because the kernel repeats the requests without an answer.
//! - A device that is in use when this program ends stays, and waits for the next server. The
//!   exception is a device of a user without privileges, because the driver has no recovery for
//!   such a device. That device ends with its server, which writes back what it can.

mod error;
mod files;
mod note;
mod params;
mod queue;
mod removal;
mod request;
mod takeover;
mod users;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockyard_disk::{ConnectedClient, Disk, OnEnospc};
use blockyard_image::SECTOR;
use blockyard_ring::ublk::abi::{self, DeviceInfo};
use blockyard_ring::ublk::{self, Control, Device, NumberLock, QueueError};
use rustix::io::Errno;

use crate::custody;
use crate::export::{LongestHold, Obstacle, STOP_TIME};
use crate::vhost_user::QueueShape;
use crate::{Client, Export, Handed, Reactors};
pub use error::{UblkError, is_too_old};
use files::{can_zero_copy, memory_alignment};
use queue::{QueueHandle, Shared};
use removal::{delete, is_left, stop_unused};
pub use removal::{remove, remove_left};
pub use takeover::{PARCELS, number_in};
pub use users::{KIND, answer, user_of};

/// Longest wait for a device node, or for the end of a server that was killed.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Longest wait at the start until this server's reactors have fetched. A loaded machine can stop a
/// thread for seconds. If a takeover gave up earlier, its device would have no server.
const MAX_START: Duration = Duration::from_secs(30);

/// How long requests of a user without privileges may be held. The driver kills the server of such
/// a device if a request takes 30 s.
const MAX_HOLD: Duration = Duration::from_secs(20);

/// The options of a device.
#[derive(Clone, Debug)]
pub struct UblkOptions {
    /// The N of /dev/ublkbN. `None`: the driver chooses it.
    pub id: Option<u32>,
    pub shape: QueueShape,
    /// Identifies the disk across runs of the program.
    pub identity: String,
    /// Distinguishes the image's file from a later file with the same path. `None`: the disk's
    /// identity is not a path.
    pub file: Option<u64>,
    /// Further identities of this disk, each with its file: an earlier server may have made the
    /// device with one of them.
    pub earlier: Vec<(String, Option<u64>)>,
}

/// Name of the export in counts.
const COUNTED: &str = "ublk";
const KERNEL: &str = "this host's kernel";

/// A device that is served. `stop` or drop ends it.
pub struct Ublk {
    control: Control,
    device: DeviceInfo,
    features: u64,
    queues: Vec<QueueHandle>,
    shared: Arc<Shared>,
    /// The kernel is a client as long as the device exists.
    _counted: ConnectedClient,
    /// Lock on the device's number, held while this server makes the device or takes it over.
    lock: Option<NumberLock>,
    /// Another server has left the device to this one.
    was_left: bool,
    /// The device stays for another server, also if it is not in use.
    stays: bool,
}

impl Ublk {
    /// Makes a device for `disk`, or takes over the device that an earlier server of this disk
    /// left. If another process removes the device, any thread may call `ended`.
    pub fn start(
        disk: Arc<Disk>,
        options: &UblkOptions,
        reactors: &Reactors,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, UblkError> {
        let mut control = Control::open().map_err(UblkError::Control)?;
        let features = control.features().map_err(UblkError::Control)?;
        if let Err(e) = blockyard_ring::resident::lock() {
            tracing::debug!(
                "cannot lock this process in memory, so do not swap to its devices: {e}"
            );
        }
        let (live, requests, bytes, copied) = Default::default();
        let durable = AtomicBool::new(!disk.options().cache.write_back());
        let shared = Arc::new(Shared {
            disk,
            durable,
            live,
            requests,
            bytes,
            copied,
            ended: Box::new(ended),
        });
        // Hold the lock until the device is served. Other servers of the disk then find a device
        // that has a server.
        let (mut left, mut lock) = takeover::find(&mut control, options)?;
        if let Some(device) = left.take_if(|device| note::is_other_file(device, options)) {
            removal::replace(&mut control, &device)?;
            // Without a requested number, the driver chooses one, which may be the number of the
            // old device.
            lock = lock.filter(|_| options.id.is_some());
        }
        let mut export = Ublk {
            control,
            device: left.unwrap_or_default(),
            features,
            queues: Vec::new(),
            _counted: shared.disk.client(COUNTED, Client::described(KERNEL.into()).id()),
            shared,
            lock,
            was_left: left.is_some(),
            stays: false,
        };
        if left.is_some() {
            export.take_over(reactors)?;
        } else if let Err(e) = export.make(options, reactors, true) {
            let UblkError::Queue { source: QueueError::Entries(why), .. } = &e else {
                return Err(e);
            };
            tracing::info!(disk = export.name(), "no zero copy: {why}");
            export.make(options, reactors, false)?;
        }
        export.lock = None;
        export.log_start(left.is_some());
        Ok(export)
    }

    fn name(&self) -> &str {
        self.shared.disk.name()
    }

    fn error(&self, what: &'static str) -> impl Fn(io::Error) -> UblkError + use<> {
        let id = self.device.id;
        move |source| UblkError::Device { id, what, source }
    }

    /// Returns the path of the block device.
    pub fn path(&self) -> PathBuf {
        ublk::block_device(self.device.id)
    }

    /// Returns the N of /dev/ublkbN.
    pub fn id(&self) -> u32 {
        self.device.id
    }

    fn zero_copy(&self) -> bool {
        self.device.flags & abi::F_AUTO_BUF_REG != 0
    }

    fn log_start(&self, taken_over: bool) {
        let how = match (self.zero_copy(), self.is_unprivileged()) {
            (true, _) => "zero copy",
            (false, true) => "data are copied, because the user has no privileges",
            (false, false) => "data are copied",
        };
        let what = if taken_over { "taken over" } else { "made" };
        let (queues, depth) = (self.device.queues, self.device.depth);
        tracing::info!(
            disk = self.name(),
            queues,
            depth,
            "{} {what}: {how}",
            self.path().display()
        );
    }

    /// Makes a new device.
    fn make(
        &mut self,
        options: &UblkOptions,
        reactors: &Reactors,
        zero_copy: bool,
    ) -> Result<(), UblkError> {
        self.add(options, zero_copy)?;
        let made = self.set_up(reactors);
        if made.is_err() {
            let _ = self.control.stop(&self.device);
            self.queues.drain(..).for_each(|queue| queue.wait());
            let _ = self.control.delete(&self.device);
        }
        made
    }

    fn add(&mut self, options: &UblkOptions, zero_copy: bool) -> Result<(), UblkError> {
        if options.id.is_none() {
            // The driver may choose the number of a device that was just deleted. This process must
            // not hold the lock on that number already.
            self.lock = None;
            let lock = takeover::lock_new(|| {
                self.add_device(options, zero_copy).map(|()| self.device.id)
            })?;
            self.lock = lock;
            return Ok(());
        }
        self.add_device(options, zero_copy)
    }

    fn add_device(&mut self, options: &UblkOptions, zero_copy: bool) -> Result<(), UblkError> {
        let zero_copy = zero_copy && can_zero_copy(&self.shared.disk);
        let mut want = params::device(options, self.features, zero_copy);
        let mut added = self.add_when_free(&want);
        if matches!(&added, Err(e) if Errno::from_io_error(e) == Some(Errno::PERM)) {
            if self.shared.disk.options().on_enospc == OnEnospc::Pause {
                return Err(UblkError::Pauses);
            }
            want = params::unprivileged(want);
            added = self.add_when_free(&want);
        }
        self.device.id = want.id;
        let id = want.id;
        self.device = added.map_err(|e| match (options.id, Errno::from_io_error(&e)) {
            (Some(_), Some(Errno::EXIST)) => UblkError::StillOpen { id, by: removal::by(id) },
            (Some(_), _) => self.error("adding it")(e),
            (None, _) => UblkError::Control(e),
        })?;
        Ok(())
    }

    /// Adds a device. The number of a removed device becomes free only when the last process has
    /// closed the device. The driver may need a moment for that, even if this server had the
    /// device.
    fn add_when_free(&mut self, want: &DeviceInfo) -> io::Result<DeviceInfo> {
        let (start, mut waits) = (Instant::now(), false);
        loop {
            match self.control.add(want) {
                Err(e)
                    if Errno::from_io_error(&e) == Some(Errno::EXIST)
                        && start.elapsed() < MAX_WAIT =>
                {
                    if !std::mem::replace(&mut waits, true) {
                        tracing::debug!("ublkb{} is not free yet: waiting for its close", want.id);
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                done => return done,
            }
        }
    }

    fn set_up(&mut self, reactors: &Reactors) -> Result<(), UblkError> {
        let device = self.open()?;
        // The page cache accepts any alignment, but the next server of this device may use
        // O_DIRECT.
        let alignment =
            self.zero_copy().then(|| memory_alignment(&self.shared.disk).unwrap_or(SECTOR as u32));
        let params = params::params(&self.shared.disk, self.device.max_io_bytes, alignment);
        self.control
            .set_params(&self.device, &params)
            .map_err(self.error("cannot set its parameters"))?;
        self.start_queues(&device, reactors)?;
        drop(device);
        self.control.start(&self.device).map_err(self.error("starting it"))
    }

    /// Takes over a device after its server has died. If the takeover fails, the device stays
    /// unchanged, so that a later server can try again.
    fn take_over(&mut self, reactors: &Reactors) -> Result<(), UblkError> {
        let params =
            self.control.params(&self.device).map_err(self.error("cannot read its parameters"))?;
        let durable = takeover::check(&self.shared.disk, self.zero_copy(), &params)
            .map_err(self.error("this disk cannot take it over (blockyard detach removes it)"))?;
        self.shared.durable.store(durable, Ordering::SeqCst);
        if takeover::has_vacant_queues() {
            let vacant =
                ublk::fill_vacant(self.open()?).map_err(self.error("cannot take it over"))?;
            tracing::debug!(
                disk = self.name(),
                vacant,
                "some queues had no server since the last takeover"
            );
        }
        takeover::begin(&mut self.control, &self.device)
            .map_err(self.error("cannot take it over"))?;
        let device = self.open()?;
        if let Err(e) = self.start_queues(&device, reactors) {
            self.queues.drain(..).for_each(|queue| queue.leave());
            return Err(e);
        }
        drop(device);
        self.control.end_recovery(&self.device).map_err(self.error("cannot take it over"))?;
        if params.basic.sectors != self.shared.disk.capacity() / SECTOR {
            self.set_size();
        }
        Ok(())
    }

    /// Opens the character device. udev may need a moment to make the node, or to set its owner.
    fn open(&self) -> Result<Device, UblkError> {
        let start = Instant::now();
        loop {
            match Device::open(&self.device) {
                Ok(device) => return Ok(device),
                Err(e) => {
                    let wait = matches!(
                        Errno::from_io_error(&e),
                        Some(Errno::NOENT | Errno::ACCESS | Errno::BUSY)
                    );
                    if !wait || start.elapsed() > MAX_WAIT {
                        return Err(self.error("cannot open its character device")(e));
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    fn start_queues(&mut self, device: &Device, reactors: &Reactors) -> Result<(), UblkError> {
        let id = self.device.id;
        let error = |queue: u16| move |source| UblkError::Queue { id, queue, source };
        for number in 0..self.device.queues {
            let queue = QueueHandle::new(reactors.next(), device, number, &self.shared);
            self.queues.push(queue.map_err(error(number))?);
        }
        // All queues fetch before the first one is mapped: see `blockyard_ring::ublk::Queue`.
        let fetching: Vec<_> = self.queues.iter().map(QueueHandle::fetch).collect();
        let until = Instant::now() + MAX_START;
        for (number, fetched) in (0..).zip(fetching) {
            fetched.until(until).map_err(|e| error(number)(io::Error::other(e).into()))?;
        }
        (0..)
            .zip(&self.queues)
            .try_for_each(|(number, queue)| queue.map().map_err(|e| error(number)(e.into())))
    }

    fn set_size(&mut self) {
        let capacity = self.shared.disk.capacity();
        let changed = if self.device.flags & abi::F_UPDATE_SIZE == 0 {
            Err(io::Error::other(
                "only Linux 6.16 or later can change the size of a ublk device; on older kernels \
                 remove the device and make it again",
            ))
        } else if self.would_truncate(capacity) {
            Err(io::Error::other(
                "it is in use, and the image is smaller now; make the image as large as it was",
            ))
        } else {
            self.control.update_size(&self.device, capacity / SECTOR)
        };
        let (disk, path) = (self.name(), self.path());
        match changed {
            Ok(()) => tracing::info!(disk, bytes = capacity, "{} has its size", path.display()),
            Err(e) => {
                tracing::warn!(disk, bytes = capacity, "{} keeps its size: {e}", path.display())
            }
        }
    }

    /// Returns whether the device is in use and `capacity` is less than its current size in bytes.
    /// If this process cannot check the use, the device counts as used.
    fn would_truncate(&mut self, capacity: u64) -> bool {
        let smaller =
            self.control.params(&self.device).map(|p| capacity / SECTOR < p.basic.sectors);
        smaller.unwrap_or(true) && users::check_unused(self.device.id).is_err()
    }

    /// Returns whether the driver keeps the device for another server. The driver does not do so
    /// for users without privileges.
    fn recovers(&self) -> bool {
        self.device.flags & abi::F_USER_RECOVERY != 0
    }

    /// Returns whether another process has removed the device, because no queue is live. Its number
    /// may already belong to a device of another disk.
    fn is_removed(&self) -> bool {
        self.shared.live.load(Ordering::SeqCst) == 0
    }

    fn is_unprivileged(&self) -> bool {
        self.device.flags & abi::F_UNPRIVILEGED_DEV != 0
    }

    /// Stops the device if it is not in use, or if it would end with this process anyway. Returns
    /// whether the device is stopped.
    fn stop_if_unused(&mut self) -> bool {
        let mut stopped = stop_unused(&mut self.control, &self.device);
        if let Err(e) = &stopped
            && !self.recovers()
            && let Some(why @ (Errno::BUSY | Errno::ACCESS)) = Errno::from_io_error(e)
        {
            if why == Errno::BUSY {
                tracing::warn!(
                    disk = self.name(),
                    "{} is in use, and ends with its server",
                    self.path().display()
                );
            }
            // The device is still served. A file system on it can write back its cache only until
            // the stop.
            stopped = self.control.stop(&self.device);
        }
        match stopped.map_err(|e| (Errno::from_io_error(&e), e)) {
            Ok(()) | Err((Some(Errno::NODEV | Errno::NXIO | Errno::NOENT), _)) => true,
            Err((Some(Errno::BUSY), _)) => false,
            Err((_, e)) => {
                tracing::warn!(disk = self.name(), "cannot stop {}: {e}", self.path().display());
                false
            }
        }
    }
}

impl Export for Ublk {
    fn resize(&mut self) {
        if self.shared.live.load(Ordering::SeqCst) > 0 {
            self.set_size();
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        if self.is_removed() {
            return Some(Obstacle::DeviceRemoved(self.path()));
        }
        let can_stay = self.recovers() && self.device.flags & abi::F_QUIESCE != 0;
        (!can_stay).then(|| Obstacle::EndsWithServer(self.path()))
    }

    /// Leaves the device to the next server. Older ones find it by the disk's identity.
    fn hand_over(&mut self) -> Option<Handed> {
        self.stays = true;
        let is_removed = self.is_removed();
        self.stop(Instant::now() + STOP_TIME);
        (!is_removed).then(|| Handed { kind: PARCELS, parcel: takeover::parcel(self.device.id) })
    }

    /// Removes the device if it is not in use. If it is in use, leaves it to the next server of the
    /// disk. In both cases, requests that have begun are answered.
    fn stop(&mut self, deadline: Instant) {
        if self.queues.is_empty() {
            return;
        }
        self.queues.iter().for_each(QueueHandle::drain);
        // The server from which this one takes the device over gets it back.
        self.stays |= self.was_left && !custody::is_owner();
        let removed = self.is_removed();
        let stopped = removed || (!self.stays && self.stop_if_unused());
        let quiesces = !stopped && self.recovers() && self.device.flags & abi::F_QUIESCE != 0;
        if quiesces {
            let quiesced = takeover::quiesce(&mut self.control, &self.device, deadline);
            let _ = quiesced.inspect_err(|e| {
                tracing::warn!(disk = self.name(), "cannot quiesce its device: {e}")
            });
        }
        for queue in self.queues.drain(..) {
            if stopped { queue.wait() } else { queue.leave() }
        }
        if quiesces && !takeover::wait_quiesced(&mut self.control, &self.device, deadline) {
            let (disk, path) = (self.name(), self.path());
            tracing::warn!(disk, "{} has no other server before this process ends", path.display());
        }
        let number = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let (requests, bytes, copied) = (
            number(&self.shared.requests),
            number(&self.shared.bytes),
            number(&self.shared.copied),
        );
        // Without zero copy, the driver copies all bytes between the kernel's pages and this
        // process.
        let copied = if self.zero_copy() { copied } else { bytes };
        let path = self.path();
        tracing::info!(
            disk = self.name(),
            requests,
            bytes,
            copied,
            "{} is not served any more",
            path.display()
        );
        if self.stays && !stopped {
            // The search for a user would take time, and the guest's requests wait.
            let disk = self.name();
            tracing::info!(disk, "{} is kept for the next server", path.display());
            return;
        }
        if !stopped {
            let id = self.device.id;
            tracing::warn!(
                disk = self.name(),
                "{} is in use{}: it is kept, and waits for --ublk={id}",
                path.display(),
                removal::by(id)
            );
            return;
        }
        if removed || !is_left(&mut self.control, &self.device) {
            return;
        }
        if let Err(e) = delete(&mut self.control, &self.device) {
            tracing::warn!(disk = self.name(), "{} is not removed: {e}", path.display());
        }
    }

    fn clients(&self) -> Vec<Client> {
        if self.is_removed() {
            return Vec::new();
        }
        vec![Client::described(format!("{KERNEL}, as {}", self.path().display()))]
    }

    fn longest_hold(&self) -> Option<LongestHold> {
        let why = "it has a ublk device of a user without privileges, and the kernel kills the \
                   server of such a device if a request takes 30 s";
        self.is_unprivileged().then_some(LongestHold { time: MAX_HOLD, why })
    }

    fn device(&self) -> Option<PathBuf> {
        Some(self.path())
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        self.stop(Instant::now() + STOP_TIME);
    }
}
