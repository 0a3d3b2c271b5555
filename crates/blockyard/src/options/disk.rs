//! The options of one disk, on the command line and in the configuration file. They are one struct,
//! so that they cannot drift apart.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use blockyard_export::PollMode;
use blockyard_export::vhost_user::{Coalesce, SecondClient};
use blockyard_export::xen::XenData;
use blockyard_image::{CacheMode, ChainOptions, Format, Overlaid};
use blockyard_sched::{Knobs, Limits};
use clap::Args;
use serde::Deserialize;

use super::knobs::with_knobs;
use super::nbd::{self, NbdAddress};
use super::values::{self, UblkNumber};
use super::xen::XenDevice;

with_knobs! {
/// One disk: on the command line, and as a `[[disk]]` table of the configuration file.
#[derive(Args, Clone, Debug, Deserialize, PartialEq)]
#[group(id = "DiskArgs")]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskArgs {
    /// The image: a file, a block device, an NBD server's export (nbd://HOST[:PORT]/EXPORT or
    /// nbd+unix:///EXPORT?socket=PATH: docs/remote-images.md), or null:SIZE (forgets writes),
    /// ram:SIZE (forgets at exit) or delay:SIZE,... (forgets writes, and takes the time that a
    /// device would take: docs/filters.md).
    #[arg(value_name = "IMAGE", required = false)]
    pub image: PathBuf,

    /// Offer the disk to a virtual machine on this Unix socket; fd:N or fd:NAME takes one that is
    /// inherited (systemd).
    #[arg(long, value_name = "SOCKET", help_heading = "Ways in")]
    #[serde(default)]
    pub vhost_user: Option<String>,

    /// Offer the disk by NBD: unix:PATH, tcp:HOST:PORT, or fd:N or fd:NAME for a socket that is
    /// inherited (systemd). Several disks may share an address.
    #[arg(long, value_name = "ADDRESS", help_heading = "Ways in")]
    #[serde(default, deserialize_with = "values::some_from_text")]
    pub nbd: Option<NbdAddress>,

    /// The export's name, up to 4096 bytes [default: the disk's name]. A client that gives none
    /// gets the only export.
    #[arg(long, value_name = "NAME", help_heading = "Ways in")]
    #[serde(default)]
    pub nbd_name: Option<String>,

    /// The smallest block in bytes that NBD clients are told to use: a power of two up to 4096
    /// [default: 1 for raw images, 512 for others].
    #[arg(long, value_name = "BYTES", value_parser = nbd::parse_block, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "nbd::block")]
    pub nbd_block_size: Option<u32>,

    /// Make the disk a block device of this host, /dev/ublkbN; which one, N says. What a server of
    /// this disk left is taken over.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "any", value_parser = values::parse_ublk, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "values::ublk")]
    pub ublk: Option<UblkNumber>,

    /// Give the disk to a guest of Xen as its device, such as 3:xvda for domain number 3. A device
    /// of this program that has no server any more is taken over.
    #[arg(long, value_name = "DOMID:DEVICE", help_heading = "Ways in")]
    #[serde(default, deserialize_with = "values::some_from_text")]
    pub xen: Option<XenDevice>,

    /// How the data of a guest of Xen come: map (its pages are mapped), copy (the hypervisor copies
    /// them) or auto (mapped if the guest uses the same pages again, else copied).
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = values::parse_xen_data, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "values::from_text")]
    pub xen_data: XenData,

    /// Offer the disk to those NBD clients only whose certificate has this name (a DNS name of it,
    /// or its common name). May be repeated.
    #[arg(long, value_name = "NAME", help_heading = "Ways in")]
    #[serde(default)]
    pub tls_allow: Vec<String>,

    /// What NBD clients are told that the disk is.
    #[arg(long, value_name = "TEXT", help_heading = "Ways in")]
    #[serde(default)]
    pub description: Option<String>,

    /// The image's format: raw, qcow2 or cow (User Mode Linux's) [default: what the file's name
    /// says, else raw]. It is never guessed from what the image holds.
    #[arg(long, value_name = "FORMAT", value_parser = values::parse_format)]
    #[serde(default, deserialize_with = "values::some_from_text")]
    pub format: Option<Format>,

    /// The disk's name in messages and statistics [default: the image's file name].
    #[arg(long)]
    #[serde(default)]
    pub name: Option<String>,

    /// none: O_DIRECT, flushes honoured; writeback: page cache, flushes honoured; writethrough:
    /// page cache, every write durable; directsync: O_DIRECT, every write durable; unsafe: page
    /// cache, flushes ignored.
    #[arg(long, default_value = "none", value_name = "MODE", value_parser = values::parse_cache)]
    #[serde(default, deserialize_with = "values::from_text")]
    pub cache: CacheMode,

    /// Refuse writes; others may read the image at the same time.
    #[arg(long)]
    #[serde(default)]
    pub read_only: bool,

    /// Bytes of L2 tables kept in memory, of all images of the chain together (suffixes k, M, G);
    /// 32k of each at least [default: all that there are, at most 32M].
    #[arg(long, value_name = "SIZE", value_parser = values::parse_size)]
    #[serde(default, deserialize_with = "values::size")]
    pub l2_cache: Option<u64>,

    /// Load L2 tables when the image is opened, as many as are kept.
    #[arg(long)]
    #[serde(default)]
    pub prime: bool,

    /// Open backing and data files in or below this folder only; an NBD URI in its place allows a
    /// server's exports. May be repeated [default: the image's own folder].
    #[arg(long = "backing-folder", value_name = "FOLDER")]
    #[serde(default)]
    pub backing_folders: Vec<PathBuf>,

    /// How many seconds requests wait for an NBD server that is gone, before they fail.
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = values::parse_seconds)]
    #[serde(default = "nbd_patience", deserialize_with = "values::seconds")]
    pub nbd_reconnect: Duration,

    /// How many seconds an NBD server may be silent while it owes an answer, before it counts as
    /// gone.
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = values::parse_seconds)]
    #[serde(default = "nbd_patience", deserialize_with = "values::seconds")]
    pub nbd_timeout: Duration,

    /// Keep in the image what is read from its backing images.
    #[arg(long)]
    #[serde(default)]
    pub copy_on_read: bool,

    /// Write to the image although a live snapshot has put an overlay on it. The overlay, and all
    /// that was written to it, is given up.
    #[arg(long)]
    #[serde(default)]
    pub abandon_overlay: bool,

    /// Request queues offered to the guest: 1 to 256.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = values::parse_queues)]
    #[serde(default = "values::one", deserialize_with = "values::queues")]
    pub queues: u16,

    /// Entries expected in each queue, which bounds the segments of one request: 4 to 32768, a
    /// power of two.
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = values::parse_queue_size)]
    #[serde(default = "default_queue_size", deserialize_with = "values::queue_size")]
    pub queue_size: u16,

    /// The serial number the guest reads, up to 20 bytes [default: the disk's name].
    #[arg(long)]
    #[serde(default)]
    pub serial: Option<String>,

    /// What to do when a queue is empty, or NBD clients ask for nothing: auto (sleep, look again or
    /// gather kicks, whichever proves best), off (sleep), or microseconds for which to look again.
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = values::parse_poll)]
    #[serde(default = "auto_poll", deserialize_with = "values::poll")]
    pub poll: PollMode,

    /// How long completions may be gathered before the guest is told: auto (for User Mode Linux
    /// only), off, or microseconds.
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = values::parse_coalesce)]
    #[serde(default = "auto_coalesce", deserialize_with = "values::coalesce")]
    pub coalesce: Coalesce,

    /// Offer kicks and calls by message instead of eventfds: User Mode Linux in simulated time
    /// (time-travel=ext) needs it, and it is slow.
    #[arg(long)]
    #[serde(default)]
    pub in_band_notifications: bool,

    /// Pin all of the guest's memory and register it with io_uring, which saves the kernel work for
    /// each request. Never for guests that give memory back (ballooning, free page reporting,
    /// virtio-mem): they would read wrong data.
    #[arg(long)]
    #[serde(default)]
    pub pin_memory: bool,

    /// Accept guest memory in files whose pages another process can withhold (FUSE, network file
    /// systems, overlayfs, device files). Such a process can stop this reactor, and every disk on
    /// it, for as long as it likes.
    #[arg(long)]
    #[serde(default)]
    pub allow_any_memory_file: bool,

    /// What becomes of a front end that connects while another one is served: wait (until the other
    /// one is gone) or refuse (its connection is closed). The log names it either way.
    #[arg(long, default_value = "wait", value_name = "MODE", value_parser = values::parse_second_client, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "values::second_client")]
    pub second_client: SecondClient,

    /// Put a filter before the disk, to test what is above: delay:read=1ms,flush=10ms or
    /// error:write=0.01,range=0-1048576 (bytes). May be repeated.
    #[arg(long = "filter", value_name = "FILTER")]
    #[serde(default, deserialize_with = "values::filters")]
    pub filters: Vec<blockyard_disk::Filter>,

    /// The device that the disk shares with others, in the place of the one on which its image
    /// lies: any name.
    #[arg(long, value_name = "NAME", help_heading = "Share and limits")]
    #[serde(default)]
    pub device: Option<String>,

    /// The group of disks to whose share it belongs. (A single disk has none.)
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

fn auto_coalesce() -> Coalesce {
    Coalesce::Auto
}

fn nbd_patience() -> Duration {
    Duration::from_secs(30)
}

impl DiskArgs {
    /// The name given, or the image's own.
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| {
            let remote = self.image.to_str().and_then(|name| blockyard_nbd::Uri::parse(name).ok());
            if let Some(uri) = remote {
                return if uri.export.is_empty() { "nbd".into() } else { uri.export };
            }
            let file = self.image.file_name().unwrap_or(self.image.as_os_str());
            file.to_string_lossy().into_owned()
        })
    }

    /// Device and inode of the image, if it is a file.
    pub fn file(&self) -> Option<(u64, u64)> {
        std::fs::metadata(&self.image).ok().map(|meta| (meta.dev(), meta.ino()))
    }

    /// Whether an export offers the disk.
    pub fn is_offered(&self) -> bool {
        self.vhost_user.is_some() || self.nbd.is_some() || self.ublk.is_some() || self.xen.is_some()
    }

    /// What tells the disk from others, from one run of the program to the next.
    pub fn identity(&self) -> String {
        let path = || std::fs::canonicalize(&self.image).unwrap_or_else(|_| self.image.clone());
        self.name.clone().unwrap_or_else(|| path().to_string_lossy().into_owned())
    }

    /// Tells the image's file from another one that gets its path later. None: the disk has a name,
    /// or the image is no file.
    pub fn file_identity(&self) -> Option<u64> {
        if self.name.is_some() {
            return None;
        }
        let file = std::fs::metadata(&self.image).ok()?;
        // A file system gives the number of a removed file to another one; but that is born later.
        let born = file.created().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        Some(file.ino() ^ born.unwrap_or_default().as_nanos() as u64)
    }

    /// The format that is told, or that the image's name says. Other names mean raw, unless they
    /// are those of formats that are not served.
    pub fn format(&self) -> Result<Format, String> {
        if let Some(format) = self.format.or_else(|| Format::of_name(&self.image)) {
            return Ok(format);
        }
        let extension =
            self.image.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        if matches!(extension.as_str(), "vmdk" | "vdi" | "vhd" | "vhdx") {
            return Err(format!(
                "image {}: its name says {extension}, which is not served; --format raw serves the file's bytes as they are",
                self.image.display()
            ));
        }
        Ok(Format::Raw)
    }

    /// What the image is opened with.
    pub fn chain(&self) -> ChainOptions {
        ChainOptions {
            format: self.format().ok(),
            read_only: self.read_only,
            cache: self.cache,
            l2_cache: self.l2_cache,
            prime: self.prime,
            copy_on_read: self.copy_on_read,
            overlaid: if self.abandon_overlay { Overlaid::Abandon } else { Overlaid::Refuse },
            folders: self.backing_folders.clone(),
            nbd: blockyard_image::nbd::Options {
                reconnect: self.nbd_reconnect,
                timeout: self.nbd_timeout.max(Duration::from_millis(100)),
            },
            ..ChainOptions::new(&self.image)
        }
    }
    /// The same disk with other knobs.
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
