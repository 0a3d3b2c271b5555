//! `blockyard serve`: opens the disks, starts their exports, and waits for signals.
//!
//! SIGTERM and SIGINT: drain, flush, exit. SIGHUP: `reload`. SIGUSR1: log statistics.
//!
//! `attach` and `xen` run a server in the background for one disk. `toolstack` serves the disks
//! that Xen toolstacks request. `check_config` is `--check-config`. `shares` reads the file of
//! costs.

pub mod attach;
mod check_config;
mod shares;
mod toolstack;
pub mod xen;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use blockyard_control::events::What;
use blockyard_export::{Listener, Reactors};
use blockyard_program::ending::Failure;
use blockyard_ring::xen::Host;
use blockyard_yard::{Shares, Yard};
use rustix::thread::CpuSet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use toml::Table;

use crate::changes::Known;
use crate::config::Config;
use crate::disks::book::{Book, HeldDisk};
use crate::disks::check;
use crate::exports::Common;
use crate::handover::{self, Control, Takeover, Wanted, holder};
use crate::nbd::{ServerSettings, Servers};
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::options::values::Cpus;
use crate::options::xen::XenArgs;
use crate::process::{journals, log, supervisor};
use crate::reload::reloader::Reloader;
use crate::server::error::AddError;
use crate::server::events::Events;
use crate::server::hand_overs::HandOvers;
use crate::server::late::Wakes;
use crate::server::sandbox::{self, Needs};
use crate::server::unopened::Unopened;
use crate::server::waits::Waits;
use crate::server::{Adding, STORAGE_TIME, Server};
use crate::{api, claims};
use toolstack::Toolstacks;

/// Longest wait for a server that still has an image of a new disk, and time between two attempts.
const OTHERS_TIME: Duration = Duration::from_secs(30);
const OTHERS_PAUSE: Duration = Duration::from_millis(5);

/// Longest wait at start for disks to open. Storage that does not answer must not keep the server
/// from being ready: systemd would end it after 90 s and start it again. The time is longer than
/// the default limit of a connection to an NBD server, so that a server without any disk fails.
const OPEN_TIME: Duration = Duration::from_secs(60);

/// The same after the death of a server. Its clients wait, and so does the operator.
const AGAIN_TIME: Duration = Duration::from_secs(10);

/// Most reasons in the log of a server that ends because it can serve no disk.
const MOST_REASONS: usize = 20;

/// Longest wait at the end of the server for a reload that runs.
const RELOAD_TIME: Duration = Duration::from_secs(10);

/// What a server has read before it changes anything.
struct Plan {
    config: Config,
    xen: XenArgs,
    shares: Shares,
    nbd: ServerSettings,
}

impl Plan {
    /// Returns an error if options or the configuration have a mistake.
    fn of(options: &ServeOptions) -> anyhow::Result<Self> {
        let config = check_disks(options, Config::of(options)?)?;
        if let Some(folder) = options.state_folder.as_ref().or(config.state_folder.as_ref()) {
            journals::use_folder(folder.clone());
        }
        let shares = shares::from_configuration(options, &config)?;
        let xen = options.xen.or(&config.xen);
        xen.check()?;
        let nbd = config.nbd_settings(&options.nbd)?;
        options.cpus.as_ref().map_or(Ok(()), check_cpus)?;
        Ok(Plan { config, xen, shares, nbd })
    }
}

pub fn run(options: &ServeOptions) -> Result<(), Failure> {
    blockyard_ring::inherited::note();
    if options.check_config {
        let plan = Plan::of(options).map_err(Failure::usage)?;
        return check_config::run(options, &plan.config);
    }
    // Before the first wait for a file system.
    let mut caught = Caught::new(options)?;
    let plan = Plan::of(options).inspect_err(|e| {
        options.takeover.iter().for_each(|control| Takeover::refuse(control, e));
    });
    let Plan { config, xen, shares, nbd } = plan.map_err(Failure::usage)?;
    let closing = options.attached.then(attach::Closing::new).transpose()?;
    if options.attached {
        attach::leave_terminal();
    }
    if let Err(e) = blockyard_ring::host::raise_descriptor_limit() {
        tracing::warn!("raising the limit of open descriptors (ulimit -n): {e}");
    }
    let mut takeover = Takeover::begin(options, &config)?;
    let entered = enter(options, &config, &xen, takeover.as_mut());
    let started = entered.and_then(|()| start(options, &config, (shares, nbd), &caught));
    // The caller of the upgrade sees only what the old server knows.
    let server = started.inspect_err(|failure| {
        takeover.iter().for_each(|takeover| takeover.fail(&failure.error));
    })?;
    let reactors = server.yard.reactors().clone();
    let served = server.serve(&config, xen, &mut caught, takeover);
    let closed = server.close();
    // After `stop` the images are closed. Another program may open them as soon as this one exits.
    reactors.stop();
    served?;
    closed?;
    closing.into_iter().for_each(attach::Closing::report);
    Ok(())
}

/// Connects to the holder and the supervisor, and enters the sandbox.
fn enter(
    options: &ServeOptions,
    config: &Config,
    xen: &XenArgs,
    mut takeover: Option<&mut Takeover>,
) -> Result<(), Failure> {
    if options.held || takeover.as_deref().is_some_and(holder::is_offered) {
        holder::connect(takeover.as_deref_mut())?;
    } else if options.keep_sessions {
        holder::use_store()?;
    }
    supervisor::start();
    let needs = Needs {
        config,
        config_file: options.config.as_deref(),
        api: &config.api(&options.api),
        nbd: &options.nbd.or(&config.nbd),
        xen,
        control: options.control.as_deref(),
        attached: options.attached,
        handed_program: &|disk, image| takeover.as_deref()?.program(disk, image),
    };
    sandbox::enter(&config.sandbox(&options.sandbox), &needs)
}

/// Starts a server without disks.
fn start(
    options: &ServeOptions,
    config: &Config,
    (shares, nbd): (Shares, ServerSettings),
    caught: &Caught,
) -> Result<Arc<Server>, Failure> {
    log::start_queues()?;
    caught.ends_at_once(false);
    if options.attached {
        attach::follow()?;
    }
    let reactors = options.reactors.or(config.reactors).unwrap_or(1);
    let cpus = options.cpus.as_ref().map_or(&[][..], |c| &c.0);
    let alive = supervisor::alive(options.takeover.is_some() || options.held);
    let reactors = Reactors::start_supervised(reactors.into(), cpus, alive);
    let reactors = Arc::new(reactors.map_err(explain_io_uring)?);
    let nbd = Arc::new(Mutex::new(Servers::new(nbd, reactors.clone())));
    let common = Common::new(nbd, options.attached);
    let events = Events::start(config.api(&options.api).api.is_some())?;
    let yard = Yard::start_observed(reactors, shares, events.observer())?;
    Ok(Arc::new_cyclic(|itself| Server {
        yard,
        events,
        common,
        options: options.clone(),
        since: SystemTime::now(),
        started: Instant::now(),
        book: Book::default(),
        unopened: Unopened::default(),
        waits: Waits::default(),
        late: Wakes::default(),
        known: Mutex::new(Known::new(config)),
        reloading: Mutex::new(()),
        hand_overs: HandOvers::new(caught.signals.handle()),
        itself: itself.clone(),
    }))
}

/// The signals that the server catches. SIGHUP and SIGUSR1 stay pending until the server is ready.
struct Caught {
    signals: Signals,
    /// SIGTERM or SIGINT has arrived.
    stop: Arc<AtomicBool>,
    /// SIGTERM and SIGINT end the process in their handler. The start may wait for a file system.
    at_once: Arc<AtomicBool>,
}

impl Caught {
    fn new(options: &ServeOptions) -> std::io::Result<Self> {
        // By default it ends the process: a write beyond the limit of a file's size (ulimit -f)
        // fails with EFBIG instead.
        flag::register(SIGXFSZ, Arc::default())?;
        // What the holder keeps of a dead server ends only after this server has taken it.
        let follows = options.held && options.takeover.is_none();
        let (stop, at_once) = (Arc::default(), Arc::new(AtomicBool::new(!follows)));
        for signal in [SIGTERM, SIGINT] {
            if options.attached {
                // The command that waits for the device reports the signal.
                flag::register_conditional_default(signal, at_once.clone())?;
            } else {
                flag::register_conditional_shutdown(signal, 0, at_once.clone())?;
            }
            flag::register(signal, Arc::clone(&stop))?;
        }
        let signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1])?;
        Ok(Caught { signals, stop, at_once })
    }

    /// Sets whether SIGTERM and SIGINT end the process in their handler.
    fn ends_at_once(&self, at_once: bool) {
        self.at_once.store(at_once, Ordering::SeqCst);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Returns an error if options of a disk contradict each other, or if it cannot have a socket.
fn check_disks(options: &ServeOptions, config: Config) -> anyhow::Result<Config> {
    check_sockets(options, &config)?;
    config.check_each(check)?;
    Ok(config)
}

/// The sockets on which operators talk to the server. Nothing is accepted yet.
struct Sockets {
    api: api::Opened,
    control: Option<Listener>,
}

/// Returns an error if the server or a disk cannot have the socket that it names.
fn check_sockets(options: &ServeOptions, config: &Config) -> anyhow::Result<()> {
    let api = config.api(&options.api);
    api.check()?;
    let api = api.api;
    let control = options.control.as_deref().and_then(Path::to_str);
    let own = [api.as_deref().map(|s| ("--api", s)), control.map(|s| ("--control", s))];
    let own: Vec<_> = own.into_iter().flatten().collect();
    claims::check_sockets(&own, &config.disks).map_err(anyhow::Error::msg)
}

/// Returns an error if the list has a processor that this process may not use.
fn check_cpus(cpus: &Cpus) -> anyhow::Result<()> {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return Ok(()) };
    let is_allowed = |cpu: usize| cpu < CpuSet::MAX_CPU && allowed.is_set(cpu);
    if let Some(cpu) = cpus.0.iter().find(|cpu| !is_allowed(**cpu)) {
        let list: Vec<_> = (0..CpuSet::MAX_CPU)
            .filter(|cpu| is_allowed(*cpu))
            .map(|cpu| cpu.to_string())
            .collect();
        anyhow::bail!(
            "--cpus: this process cannot use processor {cpu}: it may use {}",
            list.join(",")
        );
    }
    Ok(())
}

fn explain_io_uring(error: std::io::Error) -> anyhow::Error {
    let hint = match error.raw_os_error() {
        // ENOSYS, EPERM
        Some(38) => "this kernel has no io_uring (5.15 or newer is needed)",
        Some(1) => {
            "io_uring is forbidden here (see the sysctl kernel.io_uring_disabled, and the \
             container's seccomp profile)"
        }
        Some(12) => "no memory for io_uring (see ulimit -l)",
        _ => "starting a reactor",
    };
    anyhow::Error::from(error).context(hint)
}

/// Logs why disks are not served, besides the one that the last line of the log names.
fn log_some(failed: Vec<AddError>) {
    let more = failed.len().saturating_sub(MOST_REASONS);
    for error in failed.into_iter().take(MOST_REASONS) {
        tracing::error!("{:#}", anyhow::Error::from(error));
    }
    if more > 0 {
        tracing::error!("{more} more disks cannot be served");
    }
}

impl Server {
    /// Opens the disks, and serves them until SIGTERM or SIGINT.
    fn serve(
        self: &Arc<Self>,
        config: &Config,
        xen: XenArgs,
        caught: &mut Caught,
        mut takeover: Option<Takeover>,
    ) -> Result<(), Failure> {
        config.warn();
        let sockets = match &mut takeover {
            None => {
                let begun = self.begin(config, caught);
                let sockets =
                    begun.inspect_err(|_| supervisor::delay_restart(|| caught.is_stopped()))?;
                if caught.is_stopped() {
                    tracing::info!("a signal ends the server before it is ready");
                    supervisor::notify("STOPPING=1");
                    // No server continues what a dead one has left.
                    self.hand_overs.give_up();
                    return Ok(());
                }
                self.end_others(config);
                sockets
            }
            Some(takeover) => {
                // After the hand-over an error would end all disks.
                let sockets = takeover.prepare(|takeover| {
                    let why = "the disks of Xen toolstacks begin with a restart, not an upgrade";
                    anyhow::ensure!(xen.watch.is_empty(), why);
                    self.open_sockets(config, Some(takeover))
                })?;
                let remaining = takeover.run(self, config)?;
                self.add_unopened(remaining.unopened);
                self.add_new(&remaining.added, takeover, caught);
                // A disk may have had the address of one that is gone.
                self.common.nbd.lock().unwrap_or_else(PoisonError::into_inner).close_unused();
                sockets
            }
        };
        let toolstacks =
            Toolstacks::start(xen, &Host::Xen, blockyard_export::xen::records, &self.yard)?;
        let api = sockets.api.start(self)?;
        holder::offer(&self.hand_overs);
        let control = sockets.control.map(|listener| Control::start(listener, self.clone()));
        let control = control.transpose()?;
        if let Some(takeover) = takeover {
            takeover.finish();
        }
        let mut by_nbd = None;
        if self.options.attached {
            by_nbd = self.report_device()?;
            // The kernel writes back pages of this device to free memory. The server must not wait
            // for memory then: that would be a deadlock.
            let reactors = self.yard.reactors();
            reactors
                .all()
                .for_each(|reactor| reactor.run(|_| drop(blockyard_ring::host::set_io_flusher())));
        }
        sandbox::report(&config.sandbox(&self.options.sandbox));
        if self.options.held {
            holder::announce();
        }
        self.events.publish(What::ServerReady { disks: self.yard.list().len() as u64 });
        log::say("ready");
        supervisor::notify("READY=1");
        self.follow(&mut caught.signals);
        self.hand_overs.give_up();
        self.events.publish(What::ServerEnding);
        self.events.flush();
        if self.hand_overs.is_done() {
            tracing::info!("another server has the disks: this one ends");
            api.iter().for_each(api::Running::retire);
        } else {
            supervisor::notify("STOPPING=1");
        }
        drop((api, control));
        by_nbd.iter().for_each(|device| attach::sync_device(device));
        toolstacks.finish();
        Ok(())
    }

    /// Handles signals until SIGTERM or SIGINT, or the end of a hand-over.
    fn follow(self: &Arc<Self>, signals: &mut Signals) {
        let server = self.clone();
        let reloader = Reloader::start(move || server.reload());
        let reloader = reloader
            .inspect_err(|e| tracing::error!("SIGHUP delays other signals: no thread: {e}"))
            .ok();
        for signal in signals.forever() {
            match signal {
                SIGHUP => reloader.as_ref().map_or_else(|| self.reload(), Reloader::request),
                SIGUSR1 => self.log_statistics(),
                _ => break,
            }
        }
        if let Some(reloader) = reloader {
            reloader.finish(RELOAD_TIME);
        }
    }

    /// Opens the sockets of the API, of the metrics and for take-overs, or continues on those of
    /// the server from which this one takes over.
    fn open_sockets(
        &self,
        config: &Config,
        mut takeover: Option<&mut Takeover>,
    ) -> anyhow::Result<Sockets> {
        let metrics = self.options.metrics.or(config.metrics);
        let options = config.api(&self.options.api);
        let api = api::Opened::of(&options, metrics, takeover.as_deref_mut())?;
        let control = self.options.control.as_deref().map(|path| {
            let handed = takeover.as_mut().and_then(|takeover| takeover.socket("control"));
            Control::open(path, handed)
        });
        let control = control.transpose()?;
        takeover.map_or(Ok(()), |takeover| takeover.check_sockets())?;
        Ok(Sockets { api, control })
    }

    /// Opens the sockets and the disks, and continues what a dead server has left.
    fn begin(&self, config: &Config, caught: &Caught) -> anyhow::Result<Sockets> {
        // Before any disk: after an error the server ends the sessions that it continues.
        let sockets = self.open_sockets(config, None)?;
        let left = holder::take_all(&self.common.handed)?;
        if left > 0 {
            tracing::warn!("the last server died: continuing {left} exports");
        }
        self.add_all(config, left > 0, caught)?;
        Ok(sockets)
    }

    /// Ends what another server has left of disks that the configuration does not have.
    pub fn end_others(&self, config: &Config) {
        let served = self.book.all();
        let all = config.disks.iter().chain(served.iter().map(|entry| &entry.args));
        let known = all.map(|disk| disk.name().to_string()).collect();
        for disk in self.common.handed.drop_others(&known) {
            tracing::warn!(disk, "the configuration does not have it: its clients are lost");
        }
    }

    /// Begins to open the disks that the previous server had not opened. Their storage may not
    /// answer, so nothing waits for them. What a disk of the configuration continues stays for a
    /// correction.
    fn add_unopened(&self, disks: Vec<Wanted>) {
        for Wanted { args, keys, by_api, set, changed } in disks {
            let name = args.name();
            // The old server may still have the image.
            let begun = self.begin_add_again(args.clone(), keys, by_api);
            if begun.as_ref().err().is_none_or(AddError::goes_on) {
                self.book.note_set(&name, set);
                handover::report(self, &name, &changed);
            }
            match begun {
                Ok(adding) => adding.later(),
                Err(e) => {
                    if !e.goes_on() {
                        match by_api {
                            // No reload opens it, so its clients must not wait.
                            true => self.common.handed.end_disk(&name, Vec::new()),
                            false => self.note_unopened(&args, &e.to_string()),
                        }
                    }
                    tracing::error!("{:#}", anyhow::Error::from(e));
                }
            }
        }
    }

    /// Adds the disks that the previous server did not have. Logs errors. Under another name it may
    /// still have the image of one, until it has ended its own disk. A disk that opens slowly goes
    /// on beside the server.
    fn add_new(&self, disks: &[(DiskArgs, Table)], takeover: &Takeover, caught: &Caught) {
        let deadline = Instant::now() + OTHERS_TIME;
        let waits = || takeover.old_lives(Duration::ZERO) && Instant::now() < deadline;
        let wait = |adding: Adding<'_>| {
            adding.wait_within(AGAIN_TIME, || caught.is_stopped()).map(HeldDisk::keep)
        };
        for e in self.open_all(disks, false, waits, wait) {
            tracing::error!("{:#}", anyhow::Error::from(e));
        }
    }

    /// Opens disks at the same time. Returns the errors. `again`: clients wait for the disks.
    /// `waits`: whether to try again afterwards if other processes have locked an image. `wait`:
    /// waits for a disk.
    fn open_all(
        &self,
        disks: &[(DiskArgs, Table)],
        again: bool,
        waits: impl Fn() -> bool,
        wait: impl Fn(Adding<'_>) -> Result<(), AddError>,
    ) -> Vec<AddError> {
        let (mut left, mut failed) = (Vec::from_iter(disks), Vec::new());
        while !left.is_empty() {
            // Another disk may open slowly. A lock that is free by then needs one more attempt.
            let tries_again = waits();
            let begin = |disk| {
                let (args, keys): &(DiskArgs, Table) = disk;
                let begin = if again { Server::begin_add_again } else { Server::begin_add };
                (disk, begin(self, args.clone(), keys.clone(), false))
            };
            let adding: Vec<_> = left.drain(..).map(begin).collect();
            for (disk, adding) in adding {
                match adding.and_then(&wait) {
                    Ok(()) => {}
                    Err(e) if e.is_locked() && tries_again => left.push(disk),
                    Err(e) => {
                        if !e.goes_on() {
                            self.note_unopened(&disk.0, &e.to_string());
                        }
                        failed.push(e);
                    }
                }
            }
            if !left.is_empty() {
                std::thread::sleep(OTHERS_PAUSE);
            }
        }
        failed
    }

    /// Adds the disks at start. Returns the first error if all fail, and logs the others. If only
    /// some fail, logs their errors. `again`: another server has died that had them. Then a disk
    /// waits for other programs that have locked its image, and nothing waits for that. If the
    /// server died during a hand-over, the one that was to follow it closes the images and ends.
    /// Ends early if a signal ends the server.
    fn add_all(&self, config: &Config, again: bool, caught: &Caught) -> anyhow::Result<()> {
        let all = config.disks.len();
        let disks = config.disks.iter().enumerate();
        let disks: Vec<_> = disks.map(|(at, args)| (args.clone(), config.keys(at))).collect();
        // `attach` prints the device of a disk that is open.
        let (limit, patience) = match () {
            () if self.options.attached => (STORAGE_TIME, attach::LOCK_TIMEOUT),
            () if again => (AGAIN_TIME, Duration::ZERO),
            () => (OPEN_TIME, Duration::ZERO),
        };
        let deadline = Instant::now() + patience;
        let wait = |adding: Adding<'_>| {
            adding.wait_within(limit, || caught.is_stopped()).map(HeldDisk::keep)
        };
        let waits = || Instant::now() < deadline && !caught.is_stopped();
        let mut failed = self.open_all(&disks, again, waits, wait);
        if caught.is_stopped() {
            return Ok(());
        }
        let ended = failed.iter().filter(|e| !e.goes_on()).count();
        if ended == all && ended > 0 {
            let first = failed.remove(0);
            log_some(failed);
            return Err(first.into());
        }
        let failed: Vec<_> = failed.into_iter().map(anyhow::Error::from).collect();
        failed.iter().for_each(|e| tracing::error!("{e:#}"));
        if ended > 0 {
            tracing::warn!("{ended} of {all} disks are not served; SIGHUP tries again");
        }
        Ok(())
    }

    /// Prints the device of the only disk, for the process that started this server. Returns the
    /// device if it belongs to the kernel's NBD client. See [`attach::report_device`].
    fn report_device(&self) -> anyhow::Result<Option<std::path::PathBuf>> {
        let args = self.book.all().into_iter().next().context("no disk is served")?.args;
        let name = args.name();
        match args.xen {
            Some(device) => {
                log::say(&device.name.to_string());
                Ok(None)
            }
            None => {
                let export = args.nbd_name.as_deref().unwrap_or(&name);
                attach::report_device(self.yard.report(&name)?.device, args.nbd.as_ref(), export)
            }
        }
    }
}
