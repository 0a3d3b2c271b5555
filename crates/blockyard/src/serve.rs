//! `blockyard serve`: opens the disks, listens, and waits for signals.
//!
//! SIGTERM and SIGINT: drain, flush, exit 0. SIGHUP: `reload`. SIGUSR1: statistics into the log. Signals are a client of the
//! yard, which has the disks.

use std::sync::{Arc, Mutex};

use anyhow::Context;
use blockyard_disk::{Source, SourceError};
use blockyard_export::Reactors;
use blockyard_image::{CacheMode, ChainError, ChainOptions, Format, OpenError};
use blockyard_program::ending::Failure;
use blockyard_program::output;
use blockyard_ring::xen::Host;
use blockyard_yard::{DiskInfo, DiskSettings, DiskState, Ended, Way, Yard, YardError};
use rustix::thread::CpuSet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::cli::{Cpus, DiskArgs, ServeOptions};
use crate::config::Config;
use crate::exports::{self, Common};
use crate::nbd::Servers;
use crate::reload::Known;
use crate::xen::{Toolstacks, XenArgs};
use crate::{attach, figures, knobs, log, shares};

pub fn run(options: &ServeOptions) -> Result<(), Failure> {
    blockyard_ring::inherited::note();
    let config = read(options).map_err(Failure::usage)?;
    for disk in &config.disks {
        check(disk).map_err(Failure::usage)?;
    }
    let shares = shares::from_configuration(options, &config).map_err(Failure::usage)?;
    let xen = options.xen.or(&config.xen);
    xen.check().map_err(Failure::usage)?;
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
    let nbd = Arc::new(Mutex::new(Servers::new(nbd, reactors.clone())));
    let common = Common { nbd, attached: options.attached };
    let yard = Yard::start(reactors.clone(), shares)?;
    let mut server = Server { yard, common, disks: Vec::new(), known: Known::new(config.file) };
    let served = server.serve(options, config.disks, xen, &mut signals);
    let closed = server.close();
    // The next server, or another program, may open the images at once.
    reactors.stop();
    served?;
    closed
}

pub fn read(options: &ServeOptions) -> anyhow::Result<Config> {
    match (&options.config, &options.disk) {
        (Some(path), _) => Ok(Config::read(path)?),
        (None, Some(disk)) => Ok(Config { disks: vec![disk.clone()], ..Config::default() }),
        (None, None) if !options.xen.watch.is_empty() => Ok(Config::default()),
        (None, None) => {
            anyhow::bail!("say an IMAGE and a way in (--vhost-user, --nbd, --ublk, --xen), or --config FILE")
        }
    }
}

/// What is wrong with a disk's options, beyond what each one alone can tell.
pub fn check(disk: &DiskArgs) -> anyhow::Result<()> {
    let image = disk.image.display();
    if !disk.is_offered() {
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

/// Opens the image and closes it again, without a lock: another server may have it. Does nothing for an image that is no file of
/// this host (an export of an NBD server, `ram:`).
fn look_at(disk: &DiskArgs) -> anyhow::Result<()> {
    if blockyard_storage::scheme_of(&disk.image).is_some() || disk.image.to_string_lossy().starts_with("ram:") {
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

/// Returns what the yard needs to know of a disk.
pub fn settings(args: &DiskArgs, ways: Vec<Arc<dyn Way>>) -> DiskSettings {
    let name = args.name();
    DiskSettings {
        serial: args.serial.clone().unwrap_or_else(|| name.clone()),
        name,
        image: args.chain(),
        filters: args.filters.clone(),
        device: args.device.clone(),
        group: args.group.clone(),
        knobs: args.knobs(),
        ways,
    }
}

/// The disks of the command line or of the configuration file, which the yard serves.
pub struct Server {
    pub yard: Yard,
    pub common: Common,
    /// As the configuration describes those that are served.
    pub disks: Vec<DiskArgs>,
    /// The configuration file that is in effect.
    pub known: Known,
}

impl Server {
    /// Opens the disks, and serves them until a signal ends that.
    fn serve(
        &mut self,
        options: &ServeOptions,
        disks: Vec<DiskArgs>,
        xen: XenArgs,
        signals: &mut Signals,
    ) -> Result<(), Failure> {
        self.add_all(disks)?;
        let toolstacks = Toolstacks::start(xen, &Host::Xen, crate::xen::records, &self.yard)?;
        let mut by_nbd = None;
        if options.attached {
            by_nbd = self.report_device()?;
            // The kernel writes pages of the device back when memory is short: its server is not to wait for memory then.
            let reactors = self.yard.reactors();
            reactors.all().for_each(|reactor| reactor.run(|_| drop(blockyard_ring::host::set_io_flusher())));
        }
        log::say("ready");
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        for signal in signals.forever() {
            match signal {
                SIGHUP => self.reload(options),
                SIGUSR1 => self.log_statistics(),
                _ => break,
            }
        }
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        by_nbd.iter().for_each(|device| attach::settle(device));
        toolstacks.finish();
        Ok(())
    }

    /// Adds the disks at the start. One that fails does not end the others; if all fail, the first error is the result.
    fn add_all(&mut self, disks: Vec<DiskArgs>) -> anyhow::Result<()> {
        let (all, mut failed) = (disks.len(), Vec::new());
        for disk in disks {
            failed.extend(self.add(disk).err());
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

    pub fn add(&mut self, args: DiskArgs) -> anyhow::Result<()> {
        let added = self.yard.add(settings(&args, exports::ways(&args, &self.common)));
        added.map_err(|e| match e {
            YardError::Open(e) => advise(e, &args),
            e => e.into(),
        })?;
        self.disks.push(args);
        Ok(())
    }

    /// Removes a disk, and logs its last figures.
    pub fn remove(&self, name: &str) {
        match self.yard.remove(name) {
            Ok(ended) => log_end(&ended),
            Err(e) => tracing::error!("{e}"),
        }
    }

    /// Reports the device of the only disk to the process that started this server. See [`attach::tell`].
    fn report_device(&self) -> anyhow::Result<Option<std::path::PathBuf>> {
        let args = self.disks.first().context("no disk is served")?;
        let name = args.name();
        match args.xen {
            Some(device) => {
                log::say(&device.name.to_string());
                Ok(None)
            }
            None => {
                let export = args.nbd_name.as_deref().unwrap_or(&name);
                attach::tell(self.yard.report(&name)?.device, args.nbd.as_ref(), export)
            }
        }
    }

    /// Returns the disks that answer now. A command for a disk that is being opened or closed waits for that, and signals must
    /// not wait with it.
    pub fn served(&self) -> impl Iterator<Item = DiskInfo> {
        let answers = |disk: &DiskInfo| matches!(disk.state, DiskState::Serving | DiskState::Busy);
        self.yard.list().into_iter().filter(answers)
    }

    fn log_statistics(&self) {
        for disk in self.served() {
            // It may have gone meanwhile.
            let Ok(report) = self.yard.report(&disk.name) else { continue };
            if !report.clients.is_empty() {
                tracing::info!(disk = report.name, "clients: {}", report.clients.join(", "));
            }
            figures::log(&report.name, &report.statistics, &report.share);
            figures::log_policies(&report.name, &report.policies);
        }
    }

    fn close(self) -> Result<(), Failure> {
        let ended = self.yard.close();
        for disk in &ended {
            figures::log(&disk.name, &disk.statistics, &disk.share);
            figures::log_policies(&disk.name, &disk.policies);
        }
        if ended.iter().all(|disk| disk.is_flushed) {
            return Ok(());
        }
        Err(anyhow::anyhow!("not every disk could be flushed: see the log").into())
    }
}

/// Logs the last figures of a disk, and whether its image could be flushed.
pub fn log_end(ended: &Ended) {
    figures::log(&ended.name, &ended.statistics, &ended.share);
    figures::log_policies(&ended.name, &ended.policies);
    if !ended.is_flushed {
        tracing::error!(disk = ended.name, "its image could not be flushed");
    }
}
