//! The options of one disk, on the command line and in the configuration file. They are one struct,
//! so that they cannot drift apart.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use blockyard_disk::{OnEnospc, Source};
use blockyard_export::PollMode;
use blockyard_export::vhost_user::SecondClient;
use blockyard_export::xen::XenData;
use blockyard_image::journal::CrashSafety;
use blockyard_image::{CacheMode, ChainOptions, Format, Overlaid};
use blockyard_sched::{Knobs, Limits};
use blockyard_yard::Activation;
use clap::{Args, ValueHint};
use serde::Deserialize;

use super::knobs::with_knobs;
use super::nbd::{self, NbdAddress};
use super::values::{self, ReactorList, UblkNumber, explain, suggest};
use super::xen::XenDevice;
use crate::process::journals::{self, CrashMode};

with_knobs! {
/// Options of one disk, which are also the keys of a `[[disk]]` table.
#[derive(Args, Clone, Debug, Deserialize, PartialEq)]
#[group(id = "DiskArgs")]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskArgs {
    /// Image to serve: a file, a block device, or the URI of an NBD export.
    ///
    /// A URI is nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH (docs/remote-images.md).
    /// exec:/path/of/program is a disk whose program says where its data lie (docs/own-target.md).
    /// For tests: null:SIZE discards writes; ram:SIZE keeps them in memory; delay:SIZE,... discards
    /// writes and takes the time that a device would take; delay:file=PATH,... stores them in a raw
    /// image and takes that time (docs/filters.md).
    #[allow(rustdoc::broken_intra_doc_links)] // the brackets are text of --help
    #[arg(value_name = "IMAGE", required = false, value_hint = ValueHint::AnyPath)]
    pub image: PathBuf,

    /// Export the disk to a virtual machine on this vhost-user-blk socket.
    ///
    /// fd:N or fd:NAME is a listening socket that the server inherits (systemd).
    #[arg(long, value_name = "SOCKET", help_heading = "Exports", value_hint = ValueHint::AnyPath)]
    #[serde(default)]
    pub vhost_user: Option<String>,

    /// Export the disk by NBD at unix:PATH, tcp:HOST:PORT, fd:N or fd:NAME.
    ///
    /// fd:N or fd:NAME is a listening socket that the server inherits (systemd). Several disks may
    /// share an address.
    #[arg(long, value_name = "ADDRESS", help_heading = "Exports",
        value_parser = suggest(&["unix:", "tcp:", "fd:"], values::parse_text::<NbdAddress>),
        hide_possible_values = true)]
    #[serde(default, deserialize_with = "values::some_from_text")]
    pub nbd: Option<NbdAddress>,

    /// Name of the NBD export, at most 4096 bytes [default: the disk's name].
    ///
    /// A client that gives no name gets the only export of the address.
    #[arg(long, value_name = "NAME", help_heading = "Exports")]
    #[serde(default)]
    pub nbd_name: Option<String>,

    /// Minimum block size of the NBD export in bytes [default: 1 for raw images, 512 for others].
    ///
    /// A power of two, at most 4096. The server advertises it to clients.
    #[arg(long, value_name = "BYTES", help_heading = "Exports",
        value_parser = suggest(&["1", "512", "4096"], nbd::parse_block),
        hide_possible_values = true)]
    #[serde(default, deserialize_with = "nbd::block")]
    pub nbd_block_size: Option<u32>,

    /// Make the disk a block device of this host, /dev/ublkbN.
    ///
    /// Without N the kernel chooses the number. A device that an earlier server of this disk left
    /// is taken over.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true,
        default_missing_value = "any", value_parser = values::parse_ublk, help_heading = "Exports")]
    #[serde(default, deserialize_with = "values::ublk")]
    pub ublk: Option<UblkNumber>,

    /// Attach the disk to a guest of Xen, such as 3:xvda for domain 3.
    ///
    /// A device of this program that has no server any more is taken over.
    #[arg(long, value_name = "DOMID:DEVICE", help_heading = "Exports")]
    #[serde(default, deserialize_with = "values::some_from_text")]
    pub xen: Option<XenDevice>,

    /// How the server accesses the data pages of a guest of Xen.
    #[arg(long, default_value = "auto", value_name = "MODE", help_heading = "Exports",
        value_parser = explain(values::XEN_DATA, values::parse_xen_data))]
    #[serde(default, deserialize_with = "values::from_text")]
    pub xen_data: XenData,

    /// Admit only NBD clients whose certificate has this name. May be repeated.
    ///
    /// The name is a DNS name of the certificate, or its common name. An empty list in the
    /// configuration file admits no client.
    #[arg(long, value_name = "NAME", help_heading = "Exports")]
    #[serde(default)]
    pub tls_allow: Option<Vec<String>>,

    /// Description of the export, for NBD clients.
    #[arg(long, value_name = "TEXT", help_heading = "Exports")]
    #[serde(default)]
    pub description: Option<String>,

    /// Image format [default: from the file name, else raw].
    ///
    /// The server never guesses the format from the contents of the image.
    #[arg(long, value_name = "FORMAT", help_heading = "Image",
        value_parser = explain(values::FORMATS, values::parse_format))]
    #[serde(default, deserialize_with = "values::some_from_text")]
    pub format: Option<Format>,

    /// Name of the disk in messages and statistics [default: the image's file name].
    #[arg(long, help_heading = "Image")]
    #[serde(default)]
    pub name: Option<String>,

    /// Reject writes. Other programs may read the image at the same time.
    #[arg(long, help_heading = "Image")]
    #[serde(default)]
    pub read_only: bool,

    /// Serial number that the guest reads, at most 20 bytes [default: the disk's name].
    #[arg(long, help_heading = "Image")]
    #[serde(default)]
    pub serial: Option<String>,

    /// Open backing and data files only in this folder or below. May be repeated.
    ///
    /// An NBD URI instead of a folder allows the exports of a server. For a raw image these folders
    /// allow overlays that later snapshots put into other folders [default: the image's own
    /// folder].
    #[arg(long = "backing-folder", value_name = "FOLDER", help_heading = "Image",
        value_hint = ValueHint::DirPath)]
    #[serde(default)]
    pub backing_folders: Vec<PathBuf>,

    /// Write data that is read from a backing image into the image.
    #[arg(long, help_heading = "Image")]
    #[serde(default)]
    pub copy_on_read: bool,

    /// Write to an image although it is the backing file of a live snapshot's overlay.
    ///
    /// This makes the overlay invalid, and marks it so. All writes to it are lost. Use this for one
    /// start: a later start with this option abandons the overlay of a later snapshot.
    #[arg(long, help_heading = "Image")]
    #[serde(default)]
    pub abandon_overlay: bool,

    /// When the image is open and locked.
    ///
    /// rings: for live migration of a virtual machine. Source and destination may have servers for
    /// the same image at the same time (docs/live-migration.md).
    #[arg(long, default_value = "start", value_name = "WHEN", help_heading = "Image",
        value_parser = explain(values::ACTIVATION, values::parse_activation))]
    #[serde(default, deserialize_with = "values::activation")]
    pub activation: Activation,

    /// What happens to a request if the host has no space for it.
    ///
    /// `ctl set` and a reload change it while clients are connected.
    #[arg(long, default_value = "error", value_name = "MODE", help_heading = "Image",
        value_parser = explain(values::ON_ENOSPC, values::parse_text::<OnEnospc>))]
    #[serde(default, deserialize_with = "values::from_text")]
    pub on_enospc: OnEnospc,

    /// Cache mode of the image.
    #[arg(long, default_value = "none", value_name = "MODE", help_heading = "Image cache",
        value_parser = explain(values::CACHE_MODES, values::parse_cache))]
    #[serde(default, deserialize_with = "values::from_text")]
    pub cache: CacheMode,

    /// Size of the cache for L2 tables of the whole chain, in bytes (suffixes k, M, G).
    ///
    /// At least 32k for each image of the chain [default: all tables, at most 32M].
    #[arg(long, value_name = "SIZE", help_heading = "Image cache",
        value_parser = values::parse_size)]
    #[serde(default, deserialize_with = "values::size")]
    pub l2_cache: Option<u64>,

    /// Load L2 tables into the cache at start, as many as fit.
    #[arg(long, help_heading = "Image cache")]
    #[serde(default)]
    pub prime: bool,

    /// What answered writes survive if the server dies: for qcow2 and COW images, and for the
    /// overlay that a snapshot puts on a raw image.
    #[arg(long, default_value = "journal", value_name = "MODE", help_heading = "Image cache",
        value_parser = explain(values::CRASH_SAFETY, values::parse_text::<CrashMode>))]
    #[serde(default, deserialize_with = "values::from_text")]
    pub crash_safety: CrashMode,

    /// Seconds for which requests wait for a lost NBD server before they fail.
    #[arg(long, default_value = "30", value_name = "SECONDS", help_heading = "Remote images",
        value_parser = values::parse_seconds)]
    #[serde(default = "nbd_patience", deserialize_with = "values::seconds")]
    pub nbd_reconnect: Duration,

    /// Seconds without a reply after which an NBD server counts as lost.
    #[arg(long, default_value = "30", value_name = "SECONDS", help_heading = "Remote images",
        value_parser = values::parse_seconds)]
    #[serde(default = "nbd_patience", deserialize_with = "values::seconds")]
    pub nbd_timeout: Duration,

    /// Number of virtqueues that the guest may use: 1 to 256.
    #[arg(long, default_value_t = 1, value_name = "N", help_heading = "Queues",
        value_parser = values::parse_queues)]
    #[serde(default = "values::one", deserialize_with = "values::queues")]
    pub queues: u16,

    /// Expected entries of each queue: a power of two from 4 to 32768.
    ///
    /// It bounds the segments of one request.
    #[arg(long, default_value_t = 128, value_name = "N", help_heading = "Queues",
        value_parser = suggest(&["128", "256", "512", "1024"], values::parse_queue_size),
        hide_possible_values = true)]
    #[serde(default = "default_queue_size", deserialize_with = "values::queue_size")]
    pub queue_size: u16,

    /// Reactors for the disk's queues, such as 0,2-3 [default: all, in turn].
    ///
    /// A guest that stops a reactor then stops no disk of the other reactors. NBD connections are
    /// on all reactors.
    #[arg(long, value_name = "LIST", value_parser = values::parse_reactor_list,
        help_heading = "Queues")]
    #[serde(default, deserialize_with = "values::reactor_list")]
    pub on_reactors: Option<ReactorList>,

    /// What to do when a queue is empty: auto, off, or microseconds to busy-poll.
    ///
    /// auto: sleep, busy-poll (also while requests are in flight, for User Mode Linux) or
    /// coalesce kicks, whichever measures best. off: sleep. The same
    /// applies to NBD connections without requests.
    #[arg(long, default_value = "auto", value_name = "MODE", help_heading = "Queues",
        value_parser = suggest(&["auto", "off"], values::parse_poll), hide_possible_values = true)]
    #[serde(default = "auto_poll", deserialize_with = "values::poll")]
    pub poll: PollMode,

    /// Send kicks and calls as vhost-user messages instead of eventfds. Slow.
    ///
    /// User Mode Linux in simulated time (time-travel=ext) needs it.
    #[arg(long, help_heading = "Queues")]
    #[serde(default)]
    pub in_band_notifications: bool,

    /// What happens to a front end that connects while another one is connected.
    ///
    /// The log names the front end in both cases.
    #[arg(long, default_value = "wait", value_name = "MODE", help_heading = "Queues",
        value_parser = explain(values::SECOND_CLIENT, values::parse_second_client))]
    #[serde(default, deserialize_with = "values::second_client")]
    pub second_client: SecondClient,

    /// Pin all guest memory and register it with io_uring, which saves work for each request.
    ///
    /// Do not use it with guests that give memory back (ballooning, free page reporting,
    /// virtio-mem): they would read wrong data.
    #[arg(long, help_heading = "Guest memory")]
    #[serde(default)]
    pub pin_memory: bool,

    /// Accept guest memory in files whose pages another process can withhold.
    ///
    /// Such files are on FUSE, network file systems or overlayfs, or are device files. The process
    /// can block the reactor, and with it every disk of the reactor, without limit.
    #[arg(long, help_heading = "Guest memory")]
    #[serde(default)]
    pub allow_any_memory_file: bool,

    /// Insert a filter in front of the disk, for tests. May be repeated.
    ///
    /// delay:read=1ms,flush=10ms delays requests. error:write=0.01,range=0-1048576 fails 1% of the
    /// writes in these bytes (docs/filters.md).
    #[arg(long = "filter", value_name = "FILTER", help_heading = "Testing",
        value_parser = suggest(&["delay:", "error:"], values::parse_text::<blockyard_disk::Filter>),
        hide_possible_values = true)]
    #[serde(default, deserialize_with = "values::filters")]
    pub filters: Vec<blockyard_disk::Filter>,

    /// Name of the shared device, instead of the one that holds the image.
    ///
    /// Disks with the same name share it.
    #[arg(long, value_name = "NAME", help_heading = "Share and limits")]
    #[serde(default)]
    pub device: Option<String>,

    /// Group of disks whose share the disk uses. Only in the configuration file.
    #[arg(skip)]
    #[serde(default)]
    pub group: Option<String>,
}
}

fn default_queue_size() -> u16 {
    128
}

fn auto_poll() -> PollMode {
    PollMode::Auto
}

fn nbd_patience() -> Duration {
    Duration::from_secs(30)
}

impl DiskArgs {
    /// Returns the configured name, else the file name of the image or the name of the NBD export.
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| {
            let described = Source::scheme_of(&self.image);
            if let Some(name) = described.and_then(|(scheme, name)| scheme.short_name(name)) {
                return name;
            }
            let file = self.image.file_name().unwrap_or(self.image.as_os_str());
            file.to_string_lossy().into_owned()
        })
    }

    /// Returns a text that identifies the disk across runs of the program.
    pub fn identity(&self) -> String {
        let path = || std::fs::canonicalize(&self.image).unwrap_or_else(|_| self.image.clone());
        self.name.clone().unwrap_or_else(|| path().to_string_lossy().into_owned())
    }

    /// Returns a number that distinguishes the image's file from a later file with the same path.
    /// Returns `None` if the disk has a configured name, or if the image is not a file.
    pub fn file_identity(&self) -> Option<u64> {
        if self.name.is_some() {
            return None;
        }
        let file = std::fs::metadata(&self.image).ok()?;
        // File systems reuse the inode numbers of removed files. The birth time differs then.
        let born = file.created().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        Some(file.ino() ^ born.unwrap_or_default().as_nanos() as u64)
    }

    /// Returns the configured format, else the format of the file extension, else raw. Returns an
    /// error for extensions of formats that are not supported.
    pub fn format(&self) -> Result<Format, String> {
        if let Some(format) = self.format.or_else(|| Format::of_name(&self.image)) {
            return Ok(format);
        }
        let extension =
            self.image.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        if matches!(extension.as_str(), "vmdk" | "vdi" | "vhd" | "vhdx") {
            return Err(format!(
                "image {}: its name says {extension}, which is not served; --format raw serves the \
                 file's bytes as they are",
                self.image.display()
            ));
        }
        Ok(Format::Raw)
    }

    /// Raw images and read-only disks have no metadata to lose.
    fn crash_safety(&self) -> CrashSafety {
        match self.format() {
            Ok(Format::Qcow2 | Format::Cow) if !self.read_only => {
                journals::safety(self.crash_safety)
            }
            _ => CrashSafety::default(),
        }
    }

    /// Returns the options to open the image with.
    pub fn chain(&self) -> ChainOptions {
        self.chain_with(self.crash_safety())
    }

    /// Returns the options to open the image with, and with this crash safety.
    pub fn chain_with(&self, crash_safety: CrashSafety) -> ChainOptions {
        ChainOptions {
            format: self.format().ok(),
            read_only: self.read_only,
            cache: self.cache,
            l2_cache: self.l2_cache,
            prime: self.prime,
            copy_on_read: self.copy_on_read,
            overlaid: if self.abandon_overlay { Overlaid::Abandon } else { Overlaid::Refuse },
            crash_safety,
            folders: self.backing_folders.clone(),
            nbd: blockyard_image::nbd::Options {
                reconnect: self.nbd_reconnect,
                timeout: self.nbd_timeout.max(Duration::from_millis(100)),
            },
            ..ChainOptions::new(&self.image)
        }
    }

    /// Returns these options with the shares and limits of `knobs`.
    pub fn with(self, knobs: &Knobs) -> Self {
        let Knobs { weight, reserve_iops, reserve_bps, ref limits, latency_target } = *knobs;
        let Limits { iops, iops_read, iops_write, bps, bps_read, bps_write } = *limits;
        DiskArgs {
            weight,
            reserve_iops,
            reserve_bps,
            iops,
            iops_read,
            iops_write,
            bps,
            bps_read,
            bps_write,
            latency_target,
            ..self
        }
    }
}
