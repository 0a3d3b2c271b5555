//! The command line. Options that a configuration file knows too are one struct, so that they cannot drift apart.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use blockyard_export::PollMode;
use blockyard_export::vhost_user::{Coalesce, SecondClient};
use blockyard_export::xen::XenData;
use blockyard_image::{CacheMode, Format};
use clap::{Args, Parser, Subcommand};
use serde::Deserialize;

use crate::config;
use crate::knobs::with_knobs;
use crate::nbd::{NbdAddress, NbdArgs, parse_block};
use crate::xen::{XenArgs, XenDevice};

#[derive(Parser)]
#[command(
    name = "blockyard",
    version,
    about = "Serves virtual disks to virtual machines from user space.",
    propagate_version = true
)]
pub struct Cli {
    /// How much to tell on standard error: error, warn, info, debug, trace.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL", value_parser = blockyard_program::log::parse_level)]
    pub log: tracing::Level,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Serve a disk image (or many, by --config) to guests.
    Serve(Box<ServeOptions>),
    /// Make a disk image a block device of this host: prints the device, and serves it in the background until `detach`.
    Attach(Box<AttachOptions>),
    /// Remove a block device that `attach` or `serve --ublk` has made.
    Detach(DetachOptions),
    /// Give disks to guests of Xen, and take them away.
    #[command(subcommand)]
    Xen(crate::xen::Command),
    /// Make, look at, check and change disk images: the commands of qemu-img, with its options and its JSON.
    #[command(subcommand)]
    Image(Box<crate::image::Command>),
    /// Measure (`blockyard bench --help` lists the commands; the program blockyard-bench has them).
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        arguments: Vec<OsString>,
    },
    /// Print a shell's completions.
    Completions { shell: clap_complete::Shell },
    /// Write the man pages into a folder.
    Man { folder: PathBuf },
}

#[derive(Args, Default)]
pub struct ServeOptions {
    #[command(flatten)]
    pub disk: Option<DiskArgs>,

    /// Serve the disks of this TOML file; SIGHUP reads it anew.
    #[arg(long, value_name = "FILE", conflicts_with = "DiskArgs")]
    pub config: Option<PathBuf>,

    /// Tells the device, and ends with it: for `attach`.
    #[arg(long, hide = true)]
    pub attached: bool,

    /// Only read the configuration file, look at the images, and say what is wrong with them.
    #[arg(long, requires = "config")]
    pub check_config: bool,

    /// Threads that serve queues, each with a ring of its own; queues are dealt out to them in turn [default: 1].
    #[arg(long, value_name = "N", value_parser = parse_reactors)]
    pub reactors: Option<u16>,

    /// Processors that the reactors keep to, in turn, such as 0,2-3 [default: wherever the kernel puts them].
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    pub cpus: Option<Cpus>,

    /// Serve disks as they ask, without a look at shares of their device. Limits hold all the same.
    #[arg(long)]
    pub no_fair_share: bool,

    /// What operations cost the devices, as `bench calibrate` has measured it [default: /var/lib/blockyard/costs.toml, where
    /// there is one].
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,

    #[command(flatten)]
    pub nbd: NbdArgs,

    #[command(flatten)]
    pub xen: XenArgs,
}

#[derive(Args)]
pub struct AttachOptions {
    #[command(flatten)]
    pub disk: DiskArgs,
}

#[derive(Args)]
pub struct DetachOptions {
    /// The block device, such as /dev/ublkb0.
    pub device: PathBuf,

    /// Remove it also while it is mounted, or used otherwise: what is written then is lost.
    #[arg(long)]
    pub force: bool,
}

/// The N of /dev/ublkbN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UblkNumber {
    Any,
    Number(u32),
}

/// A list of processors.
#[derive(Clone, Debug, PartialEq)]
pub struct Cpus(pub Vec<usize>);

/// As taskset(1) and the kernel write it: numbers and ranges.
fn parse_cpus(s: &str) -> Result<Cpus, String> {
    let bad = || "a list of processors is numbers and ranges, such as 0,2-3".to_string();
    let mut cpus = Vec::new();
    for part in s.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.parse::<usize>().map_err(|_| bad());
        let range = number(first)?..=number(last)?;
        if range.is_empty() || *range.end() > 4095 {
            return Err(bad());
        }
        cpus.extend(range);
    }
    Ok(Cpus(cpus))
}

with_knobs! {
/// One disk: on the command line, and as a `[[disk]]` table of the configuration file.
#[derive(Args, Clone, Debug, Deserialize, PartialEq)]
#[group(id = "DiskArgs")]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskArgs {
    /// The image: a file, a block device, an NBD server's export (nbd://HOST[:PORT]/EXPORT or
    /// nbd+unix:///EXPORT?socket=PATH: docs/remote-images.md), or null:SIZE (forgets writes), ram:SIZE (forgets at exit) or
    /// delay:SIZE,... (forgets writes, and takes the time that a device would take: docs/filters.md).
    #[arg(value_name = "IMAGE", required = false)]
    pub image: PathBuf,

    /// Offer the disk to a virtual machine on this Unix socket; fd:N or fd:NAME takes one that is inherited (systemd).
    #[arg(long, value_name = "SOCKET", help_heading = "Ways in")]
    #[serde(default)]
    pub vhost_user: Option<String>,

    /// Offer the disk by NBD: unix:PATH, tcp:HOST:PORT, or fd:N or fd:NAME for a socket that is inherited (systemd). Several
    /// disks may share an address.
    #[arg(long, value_name = "ADDRESS", help_heading = "Ways in")]
    #[serde(default, deserialize_with = "config::some_from_text")]
    pub nbd: Option<NbdAddress>,

    /// The export's name, up to 4096 bytes [default: the disk's name]. A client that gives none gets the only export.
    #[arg(long, value_name = "NAME", help_heading = "Ways in")]
    #[serde(default)]
    pub nbd_name: Option<String>,

    /// The smallest block in bytes that NBD clients are told to use: a power of two up to 4096 [default: 1 for raw images,
    /// 512 for others].
    #[arg(long, value_name = "BYTES", value_parser = parse_block, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "crate::nbd::block")]
    pub nbd_block_size: Option<u32>,

    /// Make the disk a block device of this host, /dev/ublkbN; which one, N says. What a server of this disk left is taken
    /// over.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "any", value_parser = parse_ublk, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "config::ublk")]
    pub ublk: Option<UblkNumber>,

    /// Give the disk to a guest of Xen as its device, such as 3:xvda for domain number 3. A device of this program that has no
    /// server any more is taken over.
    #[arg(long, value_name = "DOMID:DEVICE", help_heading = "Ways in")]
    #[serde(default, deserialize_with = "config::some_from_text")]
    pub xen: Option<XenDevice>,

    /// How the data of a guest of Xen come: map (its pages are mapped), copy (the hypervisor copies them) or auto (mapped if the
    /// guest uses the same pages again, else copied).
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = parse_xen_data, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "config::from_text")]
    pub xen_data: XenData,

    /// Offer the disk to those NBD clients only whose certificate has this name (a DNS name of it, or its common name). May be
    /// repeated.
    #[arg(long, value_name = "NAME", help_heading = "Ways in")]
    #[serde(default)]
    pub tls_allow: Vec<String>,

    /// What NBD clients are told that the disk is.
    #[arg(long, value_name = "TEXT", help_heading = "Ways in")]
    #[serde(default)]
    pub description: Option<String>,

    /// The image's format: raw, qcow2 or cow (User Mode Linux's) [default: what the file's name says, else raw]. It is
    /// never guessed from what the image holds.
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    #[serde(default, deserialize_with = "config::some_from_text")]
    pub format: Option<Format>,

    /// The disk's name in messages and statistics [default: the image's file name].
    #[arg(long)]
    #[serde(default)]
    pub name: Option<String>,

    /// none: O_DIRECT, flushes honoured; writeback: page cache, flushes honoured; writethrough: page cache, every write
    /// durable; directsync: O_DIRECT, every write durable; unsafe: page cache, flushes ignored.
    #[arg(long, default_value = "none", value_name = "MODE", value_parser = parse_cache)]
    #[serde(default, deserialize_with = "config::from_text")]
    pub cache: CacheMode,

    /// Refuse writes; others may read the image at the same time.
    #[arg(long)]
    #[serde(default)]
    pub read_only: bool,

    /// Bytes of L2 tables kept in memory, of all images of the chain together (suffixes k, M, G); 32k of each at least
    /// [default: all that there are, at most 32M].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(default, deserialize_with = "config::size")]
    pub l2_cache: Option<u64>,

    /// Load L2 tables when the image is opened, as many as are kept.
    #[arg(long)]
    #[serde(default)]
    pub prime: bool,

    /// Open backing and data files in or below this folder only; an NBD URI in its place allows a server's exports. May be
    /// repeated [default: the image's own folder].
    #[arg(long = "backing-folder", value_name = "FOLDER")]
    #[serde(default)]
    pub backing_folders: Vec<PathBuf>,

    /// How many seconds requests wait for an NBD server that is gone, before they fail.
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = parse_seconds)]
    #[serde(default = "nbd_patience", deserialize_with = "config::seconds")]
    pub nbd_reconnect: Duration,

    /// How many seconds an NBD server may be silent while it owes an answer, before it counts as gone.
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = parse_seconds)]
    #[serde(default = "nbd_patience", deserialize_with = "config::seconds")]
    pub nbd_timeout: Duration,

    /// Keep in the image what is read from its backing images.
    #[arg(long)]
    #[serde(default)]
    pub copy_on_read: bool,

    /// Write to the image although a live snapshot has put an overlay on it. The overlay, and all that was written to it, is
    /// given up.
    #[arg(long)]
    #[serde(default)]
    pub abandon_overlay: bool,

    /// Request queues offered to the guest: 1 to 256.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = parse_queues)]
    #[serde(default = "one", deserialize_with = "config::queues")]
    pub queues: u16,

    /// Entries expected in each queue, which bounds the segments of one request: 4 to 32768, a power of two.
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = parse_queue_size)]
    #[serde(default = "default_queue_size", deserialize_with = "config::queue_size")]
    pub queue_size: u16,

    /// The serial number the guest reads, up to 20 bytes [default: the disk's name].
    #[arg(long)]
    #[serde(default)]
    pub serial: Option<String>,

    /// What to do when a queue is empty, or NBD clients ask for nothing: auto (sleep, look again or gather kicks, whichever
    /// proves best), off (sleep), or microseconds for which to look again.
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = parse_poll)]
    #[serde(default = "auto_poll", deserialize_with = "config::poll")]
    pub poll: PollMode,

    /// How long completions may be gathered before the guest is told: auto (for User Mode Linux only), off, or
    /// microseconds.
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = parse_coalesce)]
    #[serde(default = "auto_coalesce", deserialize_with = "config::coalesce")]
    pub coalesce: Coalesce,

    /// Offer kicks and calls by message instead of eventfds: User Mode Linux in simulated time (time-travel=ext) needs it,
    /// and it is slow.
    #[arg(long)]
    #[serde(default)]
    pub in_band_notifications: bool,

    /// Pin all of the guest's memory and register it with io_uring, which saves the kernel work for each request. Never
    /// for guests that give memory back (ballooning, free page reporting, virtio-mem): they would read wrong data.
    #[arg(long)]
    #[serde(default)]
    pub pin_memory: bool,

    /// Accept guest memory in files whose pages another process can withhold (FUSE, network file systems, overlayfs, device
    /// files). Such a process can stop this reactor, and every disk on it, for as long as it likes.
    #[arg(long)]
    #[serde(default)]
    pub allow_any_memory_file: bool,

    /// What becomes of a front end that connects while another one is served: wait (until the other one is gone) or refuse
    /// (its connection is closed). The log names it either way.
    #[arg(long, default_value = "wait", value_name = "MODE", value_parser = parse_second_client, help_heading = "Ways in")]
    #[serde(default, deserialize_with = "config::second_client")]
    pub second_client: SecondClient,

    /// Put a filter before the disk, to test what is above: delay:read=1ms,flush=10ms or
    /// error:write=0.01,range=0-1048576 (bytes). May be repeated.
    #[arg(long = "filter", value_name = "FILTER")]
    #[serde(default, deserialize_with = "config::filters")]
    pub filters: Vec<blockyard_disk::Filter>,

    /// The device that the disk shares with others, in the place of the one on which its image lies: any name.
    #[arg(long, value_name = "NAME", help_heading = "Share and limits")]
    #[serde(default)]
    pub device: Option<String>,

    /// The group of disks to whose share it belongs. (A single disk has none.)
    #[arg(skip)]
    #[serde(default)]
    pub group: Option<String>,
}
}

pub fn one() -> u16 {
    1
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

/// A second, or parts of it, or up to a day.
pub fn of_seconds(seconds: f64) -> Result<Duration, String> {
    if !(0.0..=86400.0).contains(&seconds) {
        return Err("a number of seconds from 0 to 86400".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn parse_seconds(s: &str) -> Result<Duration, String> {
    of_seconds(s.parse().unwrap_or(-1.0))
}

fn parse_cache(s: &str) -> Result<CacheMode, blockyard_image::UnknownCacheMode> {
    s.parse()
}

fn parse_xen_data(s: &str) -> Result<XenData, blockyard_export::xen::XenNameError> {
    s.parse()
}

fn parse_format(s: &str) -> Result<Format, blockyard_image::UnknownFormat> {
    s.parse()
}

pub fn parse_ublk(s: &str) -> Result<UblkNumber, String> {
    if s == "any" {
        return Ok(UblkNumber::Any);
    }
    // The driver has 20 bits for them.
    let number = s.parse().ok().filter(|n| *n < 1 << 20).map(UblkNumber::Number);
    number.ok_or_else(|| format!("\"{s}\": the number of a ublk device is the N of /dev/ublkbN, 0 to 1048575"))
}

pub fn parse_reactors(s: &str) -> Result<u16, String> {
    let number = s.parse().ok().filter(|n| (1..=256).contains(n));
    number.ok_or_else(|| format!("\"{s}\": a number of reactors is from 1 to 256"))
}

pub fn parse_queues(s: &str) -> Result<u16, String> {
    let number = s.parse().ok().filter(|n| (1..=256).contains(n));
    number.ok_or_else(|| format!("\"{s}\": a number of queues is from 1 to 256"))
}

pub fn parse_size(s: &str) -> Result<u64, String> {
    blockyard_disk::parse_size(s)
        .ok_or_else(|| "a size is a number of bytes with an optional suffix k, M, G or T".into())
}

pub fn parse_queue_size(s: &str) -> Result<u16, String> {
    let size = s.parse().ok().filter(|n: &u16| n.is_power_of_two() && (4..=32768).contains(n));
    size.ok_or_else(|| format!("\"{s}\": a queue size is a power of two from 4 to 32768"))
}

pub fn parse_second_client(s: &str) -> Result<SecondClient, String> {
    match s {
        "wait" => Ok(SecondClient::Wait),
        "refuse" => Ok(SecondClient::Refuse),
        _ => Err("it is wait or refuse".into()),
    }
}

pub fn parse_poll(s: &str) -> Result<PollMode, String> {
    match s {
        "auto" => Ok(PollMode::Auto),
        "off" => Ok(PollMode::Off),
        _ => microseconds(s, "poll").map(PollMode::Fixed),
    }
}

pub fn parse_coalesce(s: &str) -> Result<Coalesce, String> {
    match s {
        "auto" => Ok(Coalesce::Auto),
        "off" => Ok(Coalesce::Fixed(Duration::ZERO)),
        _ => microseconds(s, "coalesce").map(Coalesce::Fixed),
    }
}

fn microseconds(s: &str, what: &str) -> Result<Duration, String> {
    let time = s.parse().ok().filter(|us| *us <= 100_000).map(Duration::from_micros);
    time.ok_or_else(|| format!("{what} is auto, off, or microseconds from 0 to 100000"))
}
