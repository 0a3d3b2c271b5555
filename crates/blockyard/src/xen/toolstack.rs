//! Disks that toolstacks of Xen ask for: `serve --xen-watch`, `[xen]` in the configuration.
//!
//! ```text
//!   Watch (a thread for each type) ─► Yard::add_then: open the image, Xen::take ─► ended ─► Yard::remove_then: close, release
//! ```
//! In: targets, as toolstacks write them. Out: disks that are served, or a reason why not.
//! What must hold
//! - No image outside the configured folders is opened, wherever names and links lead.
//! - An image that does not open delays no disk that is served. The yard opens four at a time: four that do not open delay all
//!   further ones.
//! - A device is reported closed to its toolstack after its image is closed.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use blockyard_disk::Disk;
use blockyard_export::xen::{ToolstackDevice, Wanted, Watch, WatchOptions, Xen, XenData, XenOptions};
use blockyard_export::{Export, Reactors};
use blockyard_image::{CacheMode, Format};
use blockyard_ring::xen::Host;
use blockyard_yard::{DiskSettings, Way, WayError, Yard, YardError};
use clap::Args;
use serde::{Deserialize, Deserializer};

use super::XenDevice;
use crate::cli::DiskArgs;
use crate::config;
use crate::knobs::{self, with_knobs};
use crate::serve::{check, log_end, settings};

/// The hotplug script by which xl's disks are known: contrib/block-blockyard.
const SCRIPT: &str = "block-blockyard";

/// The type of back end that libxl gives disks with a script.
const VBD: &str = "vbd";

/// Time until the server opens the image of a device in use again.
const RETRY: Duration = Duration::from_secs(10);

/// Back ends that are watched for disks of toolstacks: options, and the table `[xen]`.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct XenArgs {
    /// Serve the disks that a toolstack of Xen asks for by nodes in backend/TYPE: vbd (xl's disks with script=block-blockyard), or
    /// a type of its own. May be repeated.
    #[arg(long = "xen-watch", value_name = "TYPE", value_parser = parse_kind, help_heading = "Xen")]
    #[serde(default, deserialize_with = "kinds")]
    pub watch: Vec<String>,

    /// Open the images of these disks in or below this folder only. May be repeated.
    #[arg(long = "xen-folder", value_name = "FOLDER", help_heading = "Xen")]
    #[serde(default)]
    pub folders: Vec<PathBuf>,

    /// What these disks are opened with. (No option.)
    #[arg(skip)]
    #[serde(default)]
    pub defaults: Option<XenDefaults>,
}

with_knobs! {
/// The table `[xen.defaults]`: keys of a `[[disk]]` table, for each disk that a toolstack asks for. (No command takes them.)
#[derive(Args, Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct XenDefaults {
    #[arg(skip)]
    #[serde(default, deserialize_with = "config::from_text")]
    pub cache: CacheMode,
    #[arg(skip)]
    #[serde(default, deserialize_with = "config::from_text")]
    pub xen_data: XenData,
    #[arg(skip)]
    #[serde(default = "crate::cli::one", deserialize_with = "config::queues")]
    pub queues: u16,
    #[arg(skip)]
    #[serde(default, deserialize_with = "config::size")]
    pub l2_cache: Option<u64>,
    #[arg(skip)]
    #[serde(default)]
    pub group: Option<String>,
}
}

fn parse_kind(text: &str) -> Result<String, String> {
    let is_good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b);
    let good = (1..=32).contains(&text.len()) && text.bytes().all(is_good);
    good.then(|| text.into())
        .ok_or_else(|| format!("\"{text}\": a type of back end is vbd, or letters a to z, 0-9, - and _"))
}

/// A text, or a list of texts.
fn kinds<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "it is a type of back end, such as \"vbd\", or a list of them")]
    enum Value {
        One(String),
        Many(Vec<String>),
    }
    let kinds = match Value::deserialize(d)? {
        Value::One(kind) => vec![kind],
        Value::Many(kinds) => kinds,
    };
    kinds.iter().map(|kind| parse_kind(kind).map_err(serde::de::Error::custom)).collect()
}

impl XenArgs {
    /// Options win over the configuration.
    pub fn or(&self, config: &XenArgs) -> XenArgs {
        let or = |own: &Vec<PathBuf>, other: &Vec<PathBuf>| if own.is_empty() { other.clone() } else { own.clone() };
        XenArgs {
            watch: if self.watch.is_empty() { config.watch.clone() } else { self.watch.clone() },
            folders: or(&self.folders, &config.folders),
            defaults: config.defaults.clone(),
        }
    }

    /// What is wrong with them together.
    pub fn check(&self) -> anyhow::Result<()> {
        if !self.watch.is_empty() && self.folders.is_empty() {
            bail!(
                "xen: say the folders in which images of toolstacks may lie: --xen-folder FOLDER, or folders in [xen]"
            );
        }
        let twice = (1..self.watch.len()).find(|at| self.watch[..*at].contains(&self.watch[*at]));
        if let Some(at) = twice {
            bail!("xen: backend/{} is watched already", self.watch[at]);
        }
        match &self.defaults {
            Some(defaults) => knobs::check(&defaults.knobs()).map_err(|e| anyhow!("xen.defaults: {e}")),
            None => Ok(()),
        }
    }

    /// The disk that a toolstack asks for, as a `[[disk]]` table would describe it.
    fn disk(&self, wanted: &Wanted) -> anyhow::Result<DiskArgs> {
        let Target { format, path } = Target::parse(&wanted.target, &self.folders)?;
        let ToolstackDevice { domain, device, .. } = &wanted.device;
        let mut table = toml::Table::new();
        let image = path.to_str().context("its name is no UTF-8")?;
        table.insert("image".into(), image.into());
        table.insert("name".into(), format!("{domain}:{device}").into());
        let args: DiskArgs = table.try_into()?;
        let mut args = DiskArgs {
            format,
            read_only: wanted.read_only,
            xen: Some(XenDevice { domain: *domain, name: *device }),
            ..args
        };
        if let Some(defaults) = &self.defaults {
            let XenDefaults { cache, xen_data, queues, l2_cache, ref group, .. } = *defaults;
            let group = group.clone();
            args = DiskArgs { cache, xen_data, queues, l2_cache, group, ..args }.with(&defaults.knobs());
        }
        if args.format() == Ok(Format::Raw) {
            args.l2_cache = None;
        } else {
            args.backing_folders = self.folders.clone();
        }
        check(&args)?;
        Ok(args)
    }

    fn queues(&self) -> u16 {
        self.defaults.as_ref().map_or(1, |defaults| defaults.queues)
    }
}

/// What a toolstack's target means: `[FORMAT:]PATH`.
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
                let (_, format) = known.with_context(|| format!("target {text:?}: it is [FORMAT:]PATH of a file"))?;
                (Some(*format), path)
            }
        };
        if !path.starts_with('/') {
            bail!("target {text:?}: it is [FORMAT:]PATH of a file, and the path begins with /");
        }
        let named = Path::new(path);
        // The name that was given counts before the one that a link leads to.
        let format = format.or_else(|| Format::of_name(named));
        Ok(Target { format, path: allowed(named, folders)? })
    }
}

/// Where the file is in truth, if that is in or below one of the folders.
fn allowed(path: &Path, folders: &[PathBuf]) -> anyhow::Result<PathBuf> {
    let real = std::fs::canonicalize(path).with_context(|| format!("image {path:?}"))?;
    let is_below = |real: &Path| {
        let real_folders = folders.iter().filter_map(|folder| std::fs::canonicalize(folder).ok());
        real_folders.into_iter().any(|folder| real.starts_with(folder))
    };
    if is_below(&real) || (is_link_to_device(path) && is_below(&folder_of(path)?)) {
        return Ok(real);
    }
    bail!("image {path:?} lies outside the folders that toolstacks may name (--xen-folder)")
}

/// Whether root has made it a link to a block device, as udev does it in /dev/vg0.
fn is_link_to_device(path: &Path) -> bool {
    let is_roots_link = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink() && meta.uid() == 0);
    is_roots_link && std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

fn folder_of(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path.parent().unwrap_or(Path::new("/")))
}

/// The watches for disks of toolstacks. The disks are in the yard, under names such as `3:xvda`.
#[derive(Default)]
pub struct Toolstacks(Option<Arc<Shared>>);

struct Shared {
    args: XenArgs,
    host: Host,
    yard: Yard,
    records: Option<PathBuf>,
    /// By type of back end. They report disks before all of them have started.
    watches: OnceLock<Vec<(String, Watch)>>,
}

impl Toolstacks {
    /// `records`: the folder for what was taken of guests' rings, as in [`XenOptions`].
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
        let shared = Arc::new(Shared { args, host, yard, records: records(), watches: OnceLock::new() });
        let mut watches = Vec::new();
        for kind in &shared.args.watch {
            let script = (kind == VBD).then(|| SCRIPT.to_string());
            let options = WatchOptions { kind: kind.clone(), script, queues: shared.args.queues(), retry: RETRY };
            let disks = Arc::downgrade(&shared);
            let watch = Watch::start(options, &shared.host, move |wanted| {
                disks.upgrade().iter().for_each(|shared| shared.add(wanted.clone()));
            });
            watches.push((kind.clone(), watch?));
            tracing::info!("serving the disks that toolstacks ask for in backend/{kind}");
        }
        let _ = shared.watches.set(watches);
        Ok(Toolstacks(Some(shared)))
    }

    /// Ends the watches. The next server takes the devices, when the yard has closed their images.
    pub fn finish(&self) {
        let watches = self.0.iter().filter_map(|shared| shared.watches.get()).flatten();
        watches.for_each(|(_, watch)| watch.finish());
    }
}

impl Shared {
    /// Adds the disk that a toolstack asks for.
    fn add(self: &Arc<Self>, wanted: Wanted) {
        let (shared, asked) = (self.clone(), wanted.clone());
        let settings = move || shared.settings(asked).map_err(Into::into);
        let (shared, device) = (self.clone(), wanted.device.clone());
        self.yard.add_then(name(&wanted.device), settings, move |added| match added {
            // The next server takes the device.
            Ok(()) | Err(YardError::Closing) => {}
            Err(e) => shared.watch(&device).refuse(&device, &format!("{:#}", anyhow::Error::from(e))),
        });
    }

    /// Removes a disk that its toolstack wants back, or has removed.
    fn remove(self: &Arc<Self>, device: ToolstackDevice) {
        let shared = self.clone();
        self.yard.remove_then(name(&device), move |removed| {
            // One that is not there was released already.
            if let Ok(ended) = removed {
                log_end(&ended);
                shared.watch(&device).release(&device);
            }
        });
    }

    fn watch(&self, device: &ToolstackDevice) -> &Watch {
        let watches = self.watches.wait();
        let (_, watch) = watches.iter().find(|(kind, _)| **kind == *device.kind).expect("a watch reports its own type");
        watch
    }

    fn settings(self: &Arc<Self>, wanted: Wanted) -> anyhow::Result<DiskSettings> {
        if &*wanted.device.kind == VBD && Path::new("/sys/bus/xen-backend/drivers/vbd").exists() {
            bail!("the kernel's own back end takes the devices of backend/vbd: rmmod xen_blkback");
        }
        let args = self.args.disk(&wanted)?;
        let (queues, data) = (args.queues, args.xen_data);
        let way = ToolstackWay { shared: Arc::downgrade(self), wanted, queues, data };
        Ok(settings(&args, vec![Arc::new(way)]))
    }
}

/// The name of a toolstack's disk in the yard.
fn name(device: &ToolstackDevice) -> String {
    format!("{}:{}", device.domain, device.device)
}

/// Serves a disk as the device that a toolstack asks for.
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

    fn start(&self, disk: &Arc<Disk>, reactors: &Arc<Reactors>) -> Result<Box<dyn Export>, WayError> {
        let shared = self.shared.upgrade().ok_or("the server ends")?;
        let ToolstackDevice { domain, device, .. } = self.wanted.device;
        let records = shared.records.clone();
        let options = XenOptions { domain, device, queues: self.queues, data: self.data, records };
        let (of, device) = (self.shared.clone(), self.wanted.device.clone());
        let ended = move || of.upgrade().iter().for_each(|shared| shared.remove(device.clone()));
        let xen = Xen::take(disk.clone(), &options, &self.wanted, &shared.host, reactors.clone(), ended)?;
        Ok(Box::new(xen))
    }
}

#[cfg(test)]
mod tests;
