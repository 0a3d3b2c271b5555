//! `blockyard serve`: opens the disks, listens, and waits for signals.
//!
//! SIGTERM and SIGINT: drain, flush, exit 0. SIGHUP: `reload`. SIGUSR1: statistics into the log.

use std::sync::Arc;

use anyhow::Context;
use blockyard_bench::output;
use blockyard_disk::{Disk, DiskOptions, OpKind, Served, Source, SourceError, Statistics};
use blockyard_export::ublk::{Ublk, UblkOptions};
use blockyard_export::vhost_user::{QueueShape, Tuning, VhostUser};
use blockyard_export::xen::{Xen, XenOptions};
use blockyard_export::{Listener, Reactors};
use blockyard_image::{CacheMode, ChainError, ChainOptions, Format, OpenError};
use blockyard_ring::xen::Host;
use rustix::thread::CpuSet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::cli::{Cpus, DiskArgs, ServeOptions, UblkNumber};
use crate::config::Config;
use crate::nbd::Servers;
use crate::reload::Known;
use crate::shares::{self, Shares};
use crate::xen::XenDevice;
use crate::{Failure, attach, inherited, knobs, log};

pub fn run(options: &ServeOptions) -> Result<(), Failure> {
    blockyard_ring::inherited::note();
    let config = read(options).map_err(Failure::usage)?;
    for disk in &config.disks {
        check(disk).map_err(Failure::usage)?;
    }
    let shares = Shares::new(options, &config).map_err(Failure::usage)?;
    let nbd = options.nbd.or(&config.nbd).settings(&config.disks).map_err(Failure::usage)?;
    if let Some(cpus) = &options.cpus {
        check_cpus(cpus).map_err(Failure::usage)?;
    }
    if options.check_config {
        for disk in &config.disks {
            look_at(disk).map_err(Failure::usage)?;
        }
        output::print(format_args!("configuration is good: {} disks\n", config.disks.len()))?;
        return Ok(());
    }
    if options.attached {
        attach::leave_terminal();
    }
    if let Err(e) = blockyard_ring::host::raise_descriptor_limit() {
        tracing::warn!("raising the limit of open descriptors (ulimit -n): {e}");
    }
    // From here on a signal waits until the start is over.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1])?;
    let reactors = options.reactors.or(config.reactors).unwrap_or(1);
    let cpus = options.cpus.as_ref().map_or(&[][..], |c| &c.0);
    let reactors = Reactors::start(reactors.into(), cpus).map_err(explain_io_uring)?;
    let reactors = Arc::new(reactors);
    let nbd = Servers::new(nbd, reactors.clone());
    let file = config.file;
    let mut yard =
        Yard { reactors, shares, nbd, disks: Vec::new(), attached: options.attached, known: Known::new(file) };
    yard.open_all(config.disks)?;
    let mut by_nbd = None;
    if options.attached {
        let disk = yard.disks.first().context("no disk is served")?;
        let name = disk.args.nbd_name.as_deref().unwrap_or(disk.disk.name());
        match disk.args.xen {
            Some(device) => log::say(&device.name.to_string()),
            None => by_nbd = attach::tell(disk.ublk.as_ref(), disk.args.nbd.as_ref(), name)?,
        }
        // The kernel writes pages of the device back when memory is short: its server is not to wait for memory then.
        yard.reactors.all().for_each(|reactor| reactor.run(|_| drop(blockyard_ring::host::set_io_flusher())));
    }
    log::say("ready");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    for signal in signals.forever() {
        match signal {
            SIGHUP => yard.reload(options),
            SIGUSR1 => yard.log_statistics(),
            _ => break,
        }
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    by_nbd.iter().for_each(|device| attach::settle(device));
    yard.close()
}

pub fn read(options: &ServeOptions) -> anyhow::Result<Config> {
    match (&options.config, &options.disk) {
        (Some(path), _) => Ok(Config::read(path)?),
        (None, Some(disk)) => Ok(Config { disks: vec![disk.clone()], ..Config::default() }),
        (None, None) => {
            anyhow::bail!("say an IMAGE and a way in (--vhost-user, --nbd, --ublk, --xen), or --config FILE")
        }
    }
}

/// What is wrong with a disk's options, beyond what each one alone can tell.
pub fn check(disk: &DiskArgs) -> anyhow::Result<()> {
    let image = disk.image.display();
    if disk.ways_in().is_empty() {
        anyhow::bail!("image {image}: say a way in: --vhost-user SOCKET, --nbd ADDRESS, --ublk or --xen DOMID:DEVICE");
    }
    let format = disk.format().map_err(anyhow::Error::msg)?;
    if format == Format::Raw {
        let of_chains = [
            ("--l2-cache", disk.l2_cache.is_some()),
            ("--prime", disk.prime),
            ("--backing-folder", !disk.backing_folders.is_empty()),
            ("--copy-on-read", disk.copy_on_read),
        ];
        if let Some((option, _)) = of_chains.iter().find(|(_, given)| *given) {
            anyhow::bail!("image {image}: {option} is for qcow2 and cow images, and this one is raw");
        }
    }
    if disk.copy_on_read && disk.read_only {
        anyhow::bail!("image {image}: --copy-on-read writes, and --read-only forbids it");
    }
    knobs::check(&disk.knobs()).map_err(|e| anyhow::anyhow!("disk \"{}\": {e}", disk.name()))?;
    let serial = disk.serial.as_deref().unwrap_or_default();
    if serial.len() > 20 {
        anyhow::bail!("serial \"{serial}\" has {} bytes, and may have 20", serial.len());
    }
    Ok(())
}

/// Returns an error for a processor that this process may not use.
fn check_cpus(cpus: &Cpus) -> anyhow::Result<()> {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return Ok(()) };
    let is_allowed = |cpu: usize| cpu < CpuSet::MAX_CPU && allowed.is_set(cpu);
    if let Some(cpu) = cpus.0.iter().find(|cpu| !is_allowed(**cpu)) {
        let list: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| is_allowed(*cpu)).map(|cpu| cpu.to_string()).collect();
        anyhow::bail!("--cpus: this process cannot use processor {cpu}: it may use {}", list.join(","));
    }
    Ok(())
}

/// Opens the image and closes it again, without a lock: another server may have it. An export of an NBD server is not
/// looked at, and what is made at the start (ram:) is not made.
fn look_at(disk: &DiskArgs) -> anyhow::Result<()> {
    let name = disk.image.to_string_lossy();
    if ["nbd:", "nbds:", "nbd+unix:", "nbds+unix:", "ram:"].iter().any(|scheme| name.starts_with(scheme)) {
        return Ok(());
    }
    let (read_only, force_share, cache) = (true, true, CacheMode::Writeback);
    let options = ChainOptions { read_only, force_share, cache, prime: false, copy_on_read: false, ..disk.chain() };
    Source::open(&options).map(drop).map_err(|e| advise(e, disk)).with_context(|| format!("disk {}", disk.name()))
}

/// Adds what an option of `serve` can do about an image that cannot be opened.
fn advise(error: SourceError, args: &DiskArgs) -> anyhow::Error {
    let open = match &error {
        SourceError::Open(e) | SourceError::Chain(ChainError::Open(e)) => Some(e),
        _ => None,
    };
    let advice = match open {
        Some(OpenError::Open { .. }) if args.image.starts_with("/dev/null") => {
            "null:SIZE is a disk that forgets what is written"
        }
        Some(e) if e.may_be_read() && !args.read_only => "--read-only serves it without writing to it",
        _ => return error.into(),
    };
    anyhow::anyhow!("{:#}; {advice}", anyhow::Error::from(error))
}

fn explain_io_uring(error: std::io::Error) -> anyhow::Error {
    let hint = match error.raw_os_error() {
        // ENOSYS, EPERM
        Some(38) => "this kernel has no io_uring (5.15 or newer is needed)",
        Some(1) => {
            "io_uring is forbidden here (see the sysctl kernel.io_uring_disabled, and the container's seccomp profile)"
        }
        Some(12) => "io_uring got no memory (see ulimit -l)",
        _ => "starting a reactor",
    };
    anyhow::Error::from(error).context(hint)
}

/// The disks being served.
pub struct Yard {
    pub reactors: Arc<Reactors>,
    pub shares: Shares,
    pub nbd: Servers,
    pub disks: Vec<Serving>,
    /// The configuration file that is in effect.
    pub known: Known,
    /// The program is there for one device, and ends with it.
    attached: bool,
}

pub struct Serving {
    pub args: DiskArgs,
    pub disk: Arc<Disk>,
    /// The ways in that are this disk's own.
    pub vhost_user: Option<VhostUser>,
    pub ublk: Option<Ublk>,
    pub xen: Option<Xen>,
}

impl Yard {
    /// Opens the disks at the start. One that fails does not end the others; if all fail, the first error is the result.
    fn open_all(&mut self, disks: Vec<DiskArgs>) -> anyhow::Result<()> {
        let (all, mut failed) = (disks.len(), Vec::new());
        for disk in disks {
            failed.extend(self.open(disk).err());
        }
        if self.disks.is_empty() && !failed.is_empty() {
            return Err(failed.swap_remove(0));
        }
        failed.iter().for_each(|e| tracing::error!("{e:#}"));
        if !failed.is_empty() {
            tracing::warn!("{} of {all} disks are not served; SIGHUP tries them again", failed.len());
        }
        Ok(())
    }

    pub fn open(&mut self, args: DiskArgs) -> anyhow::Result<()> {
        let name = args.name();
        let source = Source::open(&args.chain()).map_err(|e| advise(e, &args))?;
        let mut serial = args.serial.clone().unwrap_or_else(|| name.clone());
        while serial.len() > 20 {
            serial.pop();
        }
        let options = DiskOptions {
            name: name.clone(),
            serial,
            read_only: args.read_only,
            cache: args.cache,
            filters: args.filters.clone(),
        };
        let share = self.shares.open(&args, &source)?;
        let disk = Arc::new(Disk::sharing(options, source, share));
        let vhost_user = match &args.vhost_user {
            Some(socket) => Some(self.vhost_user(&args, socket, &disk)?),
            None => None,
        };
        if let Some(address) = &args.nbd {
            let offered = self.nbd.offer(address, &disk, &args);
            offered.with_context(|| format!("disk {name}: offering it by NBD"))?;
        }
        let ublk = args.ublk.map(|number| self.ublk(&args, number, &disk)).transpose();
        let devices = ublk.and_then(|ublk| {
            let xen = args.xen.map(|device| self.xen(&args, device, &disk)).transpose();
            xen.map(|xen| (ublk, xen))
        });
        let (ublk, xen) = match devices {
            Ok(devices) => devices,
            Err(e) => {
                drop(vhost_user);
                self.nbd.withdraw(&disk);
                blockyard_export::close(&disk, &self.reactors);
                return Err(e);
            }
        };
        tracing::info!(
            disk = name,
            bytes = disk.capacity(),
            cache = %args.cache,
            "serving {} on {}",
            disk.source().chain().map_or_else(|| args.image.display().to_string(), |chain| chain.describe()),
            args.ways_in().join(" and ")
        );
        self.disks.push(Serving { args, disk, vhost_user, ublk, xen });
        Ok(())
    }

    fn vhost_user(&self, args: &DiskArgs, socket: &str, disk: &Arc<Disk>) -> anyhow::Result<VhostUser> {
        let listener = match socket.strip_prefix("fd:") {
            Some(text) => Listener::inherited(inherited::socket(text)?),
            None => Listener::bind(socket.as_ref())?,
        };
        let shape = QueueShape { queues: args.queues, size: args.queue_size };
        let tuning = Tuning {
            poll: args.poll,
            coalesce: args.coalesce,
            in_band: args.in_band_notifications,
            pin_memory: args.pin_memory,
            any_memory_file: args.allow_any_memory_file,
            second_client: args.second_client,
        };
        VhostUser::start(disk.clone(), listener, shape, tuning, self.reactors.clone())
            .with_context(|| format!("disk {}: starting its export", disk.name()))
    }

    fn ublk(&self, args: &DiskArgs, number: UblkNumber, disk: &Arc<Disk>) -> anyhow::Result<Ublk> {
        let id = match number {
            UblkNumber::Any => None,
            UblkNumber::Number(number) => Some(number),
        };
        let shape = QueueShape { queues: args.queues, size: args.queue_size };
        let options = UblkOptions { id, shape, identity: args.identity(), file: args.file_identity() };
        let ended = attach::ended(disk.name().to_string(), self.attached);
        Ublk::start(disk.clone(), &options, &self.reactors, ended)
            .with_context(|| format!("disk {}: starting its export", disk.name()))
    }

    fn xen(&self, args: &DiskArgs, device: XenDevice, disk: &Arc<Disk>) -> anyhow::Result<Xen> {
        let XenDevice { domain, name } = device;
        let records = crate::xen::records();
        let options = XenOptions { domain, device: name, queues: args.queues, data: args.xen_data, records };
        let ended = attach::ended(disk.name().to_string(), self.attached);
        Xen::start(disk.clone(), &options, &Host::Xen, self.reactors.clone(), ended)
            .with_context(|| format!("disk {}: starting its export", disk.name()))
    }

    fn log_statistics(&self) {
        for serving in &self.disks {
            serving.log_statistics(&self.reactors);
        }
    }

    fn close(mut self) -> Result<(), Failure> {
        let mut good = true;
        for serving in self.disks {
            good &= serving.close(&mut self.nbd, &self.reactors);
        }
        if good { Ok(()) } else { Err(anyhow::anyhow!("not every disk could be flushed: see the log").into()) }
    }
}

impl Serving {
    fn log_statistics(&self, reactors: &Reactors) {
        let mut all = Statistics::default();
        for reactor in reactors.all() {
            let disk = self.disk.clone();
            let part = reactor.ask(move |_, reply| reply.send(Served::known(&disk).map(|s| s.statistics())));
            if let Some(Some(part)) = part {
                all.merge(&part);
            }
        }
        let mut operations = 0;
        for kind in OpKind::ALL {
            let Some(s) = all.summary(kind) else { continue };
            operations += s.requests - s.merged;
            tracing::info!(
                disk = self.disk.name(),
                requests = s.requests,
                merged = s.merged,
                bytes = s.bytes,
                errors = s.errors,
                "{}: queue time p50 {:.0} us, p99 {:.0}, max {:.0}; service time p50 {:.0} us, p99 {:.0}, max {:.0}",
                kind.name(),
                s.queue_us[0],
                s.queue_us[1],
                s.queue_us[2],
                s.service_us[0],
                s.service_us[1],
                s.service_us[2],
            );
        }
        let share = self.disk.share();
        if operations > 0 && !share.is_free() {
            tracing::info!(disk = self.disk.name(), "share: {}", shares::describe(share, operations));
        }
    }

    /// Drains, flushes, lets go; false when the flush failed.
    pub fn close(mut self, nbd: &mut Servers, reactors: &Reactors) -> bool {
        self.vhost_user.iter_mut().for_each(VhostUser::stop);
        self.ublk.iter_mut().for_each(Ublk::stop);
        self.xen.iter_mut().for_each(Xen::stop);
        nbd.withdraw(&self.disk);
        self.log_statistics(reactors);
        blockyard_export::close(&self.disk, reactors)
    }
}
