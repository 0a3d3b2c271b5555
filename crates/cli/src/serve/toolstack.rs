//! Disks that Xen toolstacks request: `serve --xen-watch`, `[xen]` in the configuration.
//!
//! ```text
//!   Watch (a thread for each type) ─► Yard::add_then: open the image, Xen::take
//!                                     ended ─► Yard::remove_then: close the image
//! ```
//! In: targets, as toolstacks write them to XenStore. Out: disks that are served, or the reason of
//! a refusal. What must hold:
//! - No image outside the configured folders is opened, whatever the path or its links are.
//! - An image that blocks while the yard opens it delays no disk that is served. The yard opens
//!   eight images at a time, so eight blocked ones delay all further ones.
//! - The server reports a device as closed only after its image is closed.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::{Context, bail};
use blockyard_disk::Disk;
use blockyard_export::xen::{
    ToolstackDevice, Wanted, Watch, WatchOptions, Xen, XenData, XenOptions,
};
use blockyard_export::{Export, Reactors};
use blockyard_image::Format;
use blockyard_ring::xen::Host;
use blockyard_yard::{DiskSettings, Way, WayError, Yard, YardError};

use crate::disks::{check, log_end, settings};
use crate::options::disk::DiskArgs;
use crate::options::xen::{XenArgs, XenDefaults, XenDevice};

/// Hotplug script that marks xl's disks as ours: contrib/block-blockyard.
const SCRIPT: &str = "block-blockyard";

/// Type of back end that libxl uses for disks with a script.
const VBD: &str = "vbd";

/// Time after which the server retries to open an image that is in use.
const RETRY: Duration = Duration::from_secs(10);

/// Returns the disk that a toolstack requests, as if it came from a `[[disk]]` table.
fn disk_of(args: &XenArgs, wanted: &Wanted) -> anyhow::Result<DiskArgs> {
    let Target { format, path } = Target::parse(&wanted.target, &args.folders)?;
    let ToolstackDevice { domain, device, .. } = &wanted.device;
    let mut table = toml::Table::new();
    let image = path.to_str().context("its path is not UTF-8")?;
    table.insert("image".into(), image.into());
    table.insert("name".into(), format!("{domain}:{device}").into());
    let disk: DiskArgs = table.try_into()?;
    let mut disk = DiskArgs {
        format,
        read_only: wanted.read_only,
        xen: Some(XenDevice { domain: *domain, name: *device }),
        ..disk
    };
    if let Some(defaults) = &args.defaults {
        let XenDefaults { cache, xen_data, queues, l2_cache, ref group, .. } = *defaults;
        let group = group.clone();
        disk =
            DiskArgs { cache, xen_data, queues, l2_cache, group, ..disk }.with(&defaults.knobs());
    }
    if disk.format() == Ok(Format::Raw) {
        disk.l2_cache = None;
    } else {
        disk.backing_folders = args.folders.clone();
    }
    check(&disk)?;
    Ok(disk)
}

/// Parsed target of a toolstack: `[FORMAT:]PATH`.
#[derive(Debug, PartialEq)]
struct Target {
    format: Option<Format>,
    path: PathBuf,
}

impl Target {
    fn parse(text: &str, folders: &[PathBuf]) -> anyhow::Result<Self> {
        let prefixed = text.split_once(':').filter(|(prefix, _)| !prefix.contains('/'));
        let (format, path) = match prefixed {
            None => (None, text),
            Some((prefix, path)) => {
                let known = Format::NAMES.iter().find(|(name, _)| *name == prefix);
                let (_, format) = known
                    .with_context(|| format!("target {text:?}: write [FORMAT:]PATH of a file"))?;
                (Some(*format), path)
            }
        };
        if !path.starts_with('/') {
            bail!("target {text:?}: write [FORMAT:]PATH of a file; the path begins with /");
        }
        let named = Path::new(path);
        // The extension of the given path decides the format, not that of a link's target.
        let format = format.or_else(|| Format::of_name(named));
        Ok(Target { format, path: allowed(named, folders)? })
    }
}

/// Returns the real path of a file, with links resolved. Returns an error if that is not in or
/// below one of the folders.
fn allowed(path: &Path, folders: &[PathBuf]) -> anyhow::Result<PathBuf> {
    let real = std::fs::canonicalize(path).with_context(|| format!("image {path:?}"))?;
    let is_below = |real: &Path| {
        let real_folders = folders.iter().filter_map(|folder| std::fs::canonicalize(folder).ok());
        real_folders.into_iter().any(|folder| real.starts_with(folder))
    };
    if is_below(&real) || (is_link_to_device(path) && is_below(&folder_of(path)?)) {
        return Ok(real);
    }
    bail!("image {path:?} is outside the folders for toolstacks (--xen-folder)")
}

/// Returns whether the path is a link of root to a block device, as udev makes them in /dev/vg0.
fn is_link_to_device(path: &Path) -> bool {
    let is_roots_link =
        std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink() && meta.uid() == 0);
    is_roots_link && std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

fn folder_of(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path.parent().unwrap_or(Path::new("/")))
}

/// The watches for disks of toolstacks. The yard owns the disks, with names such as `3:xvda`.
#[derive(Default)]
pub struct Toolstacks(Option<Arc<Shared>>);

struct Shared {
    args: XenArgs,
    host: Host,
    yard: Yard,
    records: Option<PathBuf>,
    /// Back-end types (the KIND in `backend/KIND`) and their watches. Set once all watches have
    /// started. A watch may report disks before that.
    watches: OnceLock<Vec<(String, Watch)>>,
}

impl Toolstacks {
    /// Starts a watch for each type. `records`: returns the folder for requests in flight, as in
    /// [`XenOptions`].
    pub fn start(
        args: XenArgs,
        host: &Host,
        records: impl FnOnce() -> Option<PathBuf>,
        yard: &Yard,
    ) -> anyhow::Result<Self> {
        if args.watch.is_empty() {
            return Ok(Toolstacks(None));
        }
        let (host, yard) = (host.clone(), yard.clone());
        let shared =
            Arc::new(Shared { args, host, yard, records: records(), watches: OnceLock::new() });
        let mut watches = Vec::new();
        for kind in &shared.args.watch {
            let script = (kind == VBD).then(|| SCRIPT.to_string());
            let options = WatchOptions {
                kind: kind.clone(),
                script,
                queues: shared.args.queues(),
                retry: RETRY,
            };
            let disks = Arc::downgrade(&shared);
            let watch = Watch::start(options, &shared.host, move |wanted| {
                disks.upgrade().iter().for_each(|shared| shared.add(wanted.clone()));
            });
            watches.push((kind.clone(), watch?));
            tracing::info!("serving the disks that toolstacks request in backend/{kind}");
        }
        let _ = shared.watches.set(watches);
        Ok(Toolstacks(Some(shared)))
    }

    /// Ends the watches. The next server takes the devices over after the yard closes their images.
    pub fn finish(&self) {
        let watches = self.0.iter().filter_map(|shared| shared.watches.get()).flatten();
        watches.for_each(|(_, watch)| watch.finish());
    }
}

impl Shared {
    /// Adds the disk that a toolstack requests.
    fn add(self: &Arc<Self>, wanted: Wanted) {
        let (shared, requested) = (self.clone(), wanted.clone());
        let settings = move || shared.settings(requested).map_err(WayError::caller);
        let (shared, device) = (self.clone(), wanted.device.clone());
        self.yard.add_then(name(&wanted.device), settings, move |added| match added {
            // If the yard closes, this server ends. The next server takes the device over.
            Ok(()) | Err(YardError::Closing) => {}
            Err(e) => {
                shared.watch(&device).refuse(&device, &format!("{:#}", anyhow::Error::from(e)))
            }
        });
    }

    /// Removes a disk that its toolstack detaches, or has removed already.
    fn remove(self: &Arc<Self>, device: ToolstackDevice) {
        let shared = self.clone();
        self.yard.remove_then(name(&device), move |removed| {
            // An error means that the disk was released already.
            if let Ok(ended) = removed {
                log_end(&ended);
                shared.watch(&device).release(&device);
            }
        });
    }

    fn watch(&self, device: &ToolstackDevice) -> &Watch {
        let watches = self.watches.wait();
        let (_, watch) = watches
            .iter()
            .find(|(kind, _)| **kind == *device.kind)
            .expect("a watch reports its own type");
        watch
    }

    fn settings(self: &Arc<Self>, wanted: Wanted) -> anyhow::Result<DiskSettings> {
        if &*wanted.device.kind == VBD && Path::new("/sys/bus/xen-backend/drivers/vbd").exists() {
            bail!("the kernel's own back end serves backend/vbd: rmmod xen_blkback");
        }
        let args = disk_of(&self.args, &wanted)?;
        let (queues, data) = (args.queues, args.xen_data);
        let way = ToolstackWay { shared: Arc::downgrade(self), wanted, queues, data };
        Ok(settings(&args, vec![Arc::new(way)]))
    }
}

/// Returns the name of a toolstack's disk in the yard.
fn name(device: &ToolstackDevice) -> String {
    format!("{}:{}", device.domain, device.device)
}

/// Export of a disk as the device that a toolstack requests.
struct ToolstackWay {
    shared: Weak<Shared>,
    wanted: Wanted,
    queues: u16,
    data: XenData,
}

impl Way for ToolstackWay {
    fn describe(&self) -> String {
        self.wanted.device.to_string()
    }

    fn start(
        &self,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
    ) -> Result<Box<dyn Export>, WayError> {
        let shared = self.shared.upgrade().ok_or(WayError::Closing)?;
        let ToolstackDevice { domain, device, .. } = self.wanted.device;
        let records = shared.records.clone();
        let options = XenOptions { domain, device, queues: self.queues, data: self.data, records };
        let (of, device) = (self.shared.clone(), self.wanted.device.clone());
        let ended = move || of.upgrade().iter().for_each(|shared| shared.remove(device.clone()));
        let (disk, reactors) = (disk.clone(), reactors.clone());
        let xen = Xen::take(disk, &options, &self.wanted, &shared.host, reactors, ended);
        Ok(Box::new(xen.map_err(WayError::caller)?))
    }
}

#[cfg(test)]
mod tests;
