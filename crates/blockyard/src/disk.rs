//! A disk before it is served.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use blockyard_disk::OnEnospc;
use blockyard_image::journal::{CrashSafety, JournalStore, SafetyMode, StateFolder};
use blockyard_image::{ChainOptions, Format};
use blockyard_sched::{Knobs, Limit};
use blockyard_storage::CacheMode;
use blockyard_storage::targets::Target;

/// Most queues of a disk, because a message of vhost-user has one byte for the number of a queue.
const MOST_QUEUES: u16 = 256;

/// What the disk contains.
pub(crate) enum Content {
    Target(Target),
    Image(PathBuf),
}

/// How a disk is offered.
#[derive(Clone)]
pub(crate) enum Export {
    VhostUser(PathBuf),
    NbdUnix(PathBuf),
    NbdTcp(String, u16),
    Ublk(Option<u32>),
    Xen(u16, String),
}

impl Export {
    pub(crate) fn is_nbd(&self) -> bool {
        matches!(self, Export::NbdUnix(_) | Export::NbdTcp(..))
    }
}

/// A disk to serve: its contents, exports, share and limits.
#[must_use = "pass it to `Yard::serve`"]
pub struct Disk {
    pub(crate) name: String,
    pub(crate) content: Content,
    pub(crate) serial: Option<String>,
    pub(crate) cache: CacheMode,
    pub(crate) read_only: bool,
    pub(crate) queues: u16,
    pub(crate) knobs: Knobs,
    pub(crate) group: Option<String>,
    pub(crate) on_enospc: OnEnospc,
    pub(crate) exports: Vec<Export>,
}

impl Disk {
    /// Makes a disk of a target. `name` is unique in the yard.
    pub fn target(name: impl Into<String>, target: Target) -> Self {
        Disk::of(name.into(), Content::Target(target))
    }

    /// Makes a disk of an image file, as `blockyard serve` does. Its name decides on the format.
    ///
    /// If the process dies, no answered write of a qcow2 or COW image is lost: the next process, or
    /// `blockyard`, finds its changed metadata in a journal, in the folder that
    /// `BLOCKYARD_STATE_FOLDER` names for both, or else in the usual one. If the folder cannot be
    /// used, the log has a warning.
    pub fn image(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Disk::of(name.into(), Content::Image(path.into()))
    }

    fn of(name: String, content: Content) -> Self {
        let (serial, read_only, exports, group) = Default::default();
        let (cache, queues, knobs) = (CacheMode::default(), 1, Knobs::default());
        let on_enospc = OnEnospc::Error;
        Disk { name, content, serial, cache, read_only, queues, knobs, group, on_enospc, exports }
    }

    /// Offers the disk to a virtual machine, on a vhost-user-blk socket.
    pub fn vhost_user(self, socket: impl Into<PathBuf>) -> Self {
        self.export(Export::VhostUser(socket.into()))
    }

    /// Offers the disk to NBD clients of this host, under its name. Disks may share a socket.
    pub fn nbd_unix(self, socket: impl Into<PathBuf>) -> Self {
        self.export(Export::NbdUnix(socket.into()))
    }

    /// Offers the disk to NBD clients on the network, without TLS. Disks may share an address.
    pub fn nbd_tcp(self, host: impl Into<String>, port: u16) -> Self {
        self.export(Export::NbdTcp(host.into(), port))
    }

    /// Makes a block device of this host, `/dev/ublkbN`. None: the driver chooses N.
    pub fn ublk(self, number: Option<u32>) -> Self {
        self.export(Export::Ublk(number))
    }

    /// Makes a device of a Xen guest: its domain's number, and a name such as `xvda`. This host is
    /// then a Xen domain that may do so, as dom0.
    pub fn xen(self, domain: u16, device: impl Into<String>) -> Self {
        self.export(Export::Xen(domain, device.into()))
    }

    fn export(mut self, export: Export) -> Self {
        self.exports.push(export);
        self
    }

    /// Sets the serial number that guests see, of at most 20 bytes. Default: the disk's name.
    pub fn serial(mut self, serial: impl Into<String>) -> Self {
        self.serial = Some(serial.into());
        self
    }

    /// Sets how the image, or the data files of a map, use the host's page cache.
    pub fn cache(mut self, cache: CacheMode) -> Self {
        self.cache = cache;
        self
    }

    /// Refuses writes.
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Sets the number of queues of vhost-user, ublk and Xen: 1 to 256. Default: 1.
    pub fn queues(mut self, queues: u16) -> Self {
        self.queues = queues.clamp(1, MOST_QUEUES);
        self
    }

    /// Sets the disk's share of its device, relative to other disks: 1 to 10000. Default: 100.
    pub fn weight(mut self, weight: u32) -> Self {
        self.knobs.weight = weight.clamp(1, Knobs::MAX_WEIGHT);
        self
    }

    /// Limits the requests a second.
    pub fn iops(mut self, rate: u64) -> Self {
        self.knobs.limits.iops = Some(Limit::of(rate.max(1)));
        self
    }

    /// Limits the bytes a second.
    pub fn bytes_per_second(mut self, rate: u64) -> Self {
        self.knobs.limits.bps = Some(Limit::of(rate.max(1)));
        self
    }

    /// Guarantees these requests a second, before shares apply.
    pub fn reserve_iops(mut self, rate: u64) -> Self {
        self.knobs.reserve_iops = Some(rate.max(1));
        self
    }

    /// Guarantees these bytes a second, before shares apply.
    pub fn reserve_bytes_per_second(mut self, rate: u64) -> Self {
        self.knobs.reserve_bps = Some(rate.max(1));
        self
    }

    /// Sets the mean service time that the disk gets while it stays within its share, also at the
    /// cost of its neighbours' shares.
    pub fn latency_target(mut self, time: Duration) -> Self {
        self.knobs.latency_target = Some(time);
        self
    }

    /// Puts the disk into a group. The disks of a group share its weight, its limits and its
    /// guarantees ([`Yard::limit_group`]), and keep their own limits.
    ///
    /// [`Yard::limit_group`]: crate::Yard::limit_group
    pub fn group(mut self, name: impl Into<String>) -> Self {
        self.group = Some(name.into());
        self
    }

    /// Lets requests wait for which the host has no space, until [`Yard::resume`]. Else they fail.
    ///
    /// [`Yard::resume`]: crate::Yard::resume
    pub fn wait_for_space(mut self) -> Self {
        self.on_enospc = OnEnospc::Pause;
        self
    }

    /// Returns the options with which the disk's image is opened.
    pub(crate) fn image_options(&self) -> ChainOptions {
        let options = match &self.content {
            Content::Image(path) if !self.read_only => {
                ChainOptions { crash_safety: crash_safety(path), ..ChainOptions::new(path) }
            }
            Content::Image(path) => ChainOptions::new(path),
            Content::Target(_) => ChainOptions::new(&self.name),
        };
        ChainOptions { read_only: self.read_only, cache: self.cache, ..options }
    }
}

/// Returns how the changed metadata of an image survive the death of this process.
fn crash_safety(image: &Path) -> CrashSafety {
    static STORE: Mutex<Option<JournalStore>> = Mutex::new(None);
    if !matches!(Format::of_name(image), Some(Format::Qcow2 | Format::Cow)) {
        return CrashSafety::default(); // It has no metadata.
    }
    let mut store = STORE.lock().unwrap_or_else(PoisonError::into_inner);
    if store.is_none() {
        // A folder that could not be used may be there for the next image.
        match StateFolder::open(StateFolder::default_path()) {
            Ok(folder) => *store = Some(folder.into()),
            Err(e) => tracing::warn!(
                "image {}: {e}; without a journal, it loses answered writes that are not flushed \
                 if this process dies (BLOCKYARD_STATE_FOLDER names another folder)",
                image.display()
            ),
        }
    }
    let mode = if store.is_some() { SafetyMode::Journal } else { SafetyMode::Off };
    CrashSafety { mode, store: store.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_queues_has_bounds() {
        let queues = |number| Disk::image("a", "a.img").queues(number).queues;
        assert_eq!([0, 1, 256, 257, u16::MAX].map(queues), [1, 1, 256, 256, 256]);
    }
}
