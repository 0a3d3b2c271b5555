//! The old server of a hand-over.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use blockyard_control::events::What;
use blockyard_control::types::{HandedOver, Upgraded};
use blockyard_export::custody::{self, Custody};
use blockyard_export::keeper;
use blockyard_ring::host;
use blockyard_ring::sandbox;
use blockyard_ring::text::clean;
use blockyard_storage::Program;
use blockyard_yard::{DiskState, HeldOpenings};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::alone::Alone;
use super::away::{Away, BACK_TIME};
use super::{
    FORMAT, FromNew, FromOld, MESSAGE_TIME, NBD, Offered, OfferedProgram, Peer, away, holder,
};
use crate::config::files;
use crate::disks::book::{Entry, HeldDisk, HoldError};
use crate::exports;
use crate::process::{journals, launcher, supervisor};
use crate::server::Server;
use crate::server::hand_overs::{CALLS_PAUSE, CALLS_TIME, NotNow};

/// How long a disk may take until its image is left. Less than [`MESSAGE_TIME`], so that the
/// new server still waits, and the disks that it has are served again at once.
const DRAIN_TIME: Duration = Duration::from_secs(20);
/// How long a new server that has failed may close its images before it is killed.
const END_TIME: Duration = Duration::from_secs(10);
/// How long the kernel may take to end a killed process.
const KILL_TIME: Duration = Duration::from_secs(60);
/// Time between two looks whether this server ends, while it waits for such a process.
const CHECK_TIME: Duration = Duration::from_millis(500);

/// Why a process is refused that sends no message of a hand-over.
const STRANGER: &str = "the process that has connected to --control is no blockyard that takes \
                        over (serve --takeover)";
/// Most characters of a new server's error that this one repeats.
const MOST_OF_ERROR: usize = 2000;

/// A hand-over that runs.
struct HandOver<'a> {
    server: &'a Server,
    peer: Peer,
    process: OwnedFd,
    pid: Pid,
    version: String,
    away: Vec<Away<'a>>,
    /// Disks that this server has not opened, and the new one will open.
    unopened: Vec<String>,
    openings: Option<HeldOpenings>,
    /// This server has started the new one.
    is_ours: bool,
}

/// Hands all disks over to the process at the other end of `stream`. After an error this server
/// serves them. `is_ours`: this server has started that process, and must end it after an error.
pub fn hand_over(
    server: &Server,
    stream: UnixStream,
    pid: i32,
    is_ours: bool,
    mut alone: Alone<'_>,
) -> anyhow::Result<Upgraded> {
    let peer = Peer::new(stream, MESSAGE_TIME);
    let (pid, process) = watch(pid).inspect_err(|e| refuse(&peer, e))?;
    // Before the new server has anything of this one.
    keeper::announce_taker(Some(pid));
    server.events.publish(What::HandOverBegun);
    let (openings, version, away, unopened) =
        (alone.openings.take(), String::new(), vec![], vec![]);
    let mut hand_over =
        HandOver { server, peer, process, pid, version, away, unopened, openings, is_ours };
    let outcome = hand_over.run();
    server.hand_overs.is_decided();
    match &outcome {
        Ok(done) => {
            let pid = Some(done.pid);
            server.events.publish(What::HandOverEnded { pid, error: None });
            server.hand_overs.set_done();
            // The disks stay in the book, held, until this process ends.
            hand_over.away.drain(..).for_each(|away| std::mem::forget(away.held));
            server.hand_overs.end_wait();
        }
        Err(e) => {
            tracing::error!("the disks stay with this server: {e:#}");
            let _ = hand_over.peer.send(&FromOld::Refused { what: format!("{e:#}") });
            // The new server must not believe any more that this one will leave.
            let _ = hand_over.peer.stream().shutdown(Shutdown::Both);
            holder::announce();
            drop(hand_over.openings.take());
            hand_over.take_back();
            // The new server may have announced itself meanwhile.
            holder::announce();
            keeper::announce_taker(None);
            let error = Some(format!("{e:#}"));
            server.events.publish(What::HandOverEnded { pid: None, error });
        }
    }
    drop(alone);
    outcome
}

fn watch(pid: i32) -> anyhow::Result<(Pid, OwnedFd)> {
    let pid = Pid::from_raw(pid).context("the new server has no process number here")?;
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => Ok((pid, process)),
        Err(Errno::SRCH) => Err(io::Error::from(Errno::SRCH)).context("the new server has ended"),
        Err(e) => Err(e).context("watching the new server's process"),
    }
}

/// Returns the error of a new server for the log and the answer of the upgrade: one line.
fn shown(error: &str) -> String {
    clean(error).chars().take(MOST_OF_ERROR).collect()
}

/// Reports to both sides why a hand-over does not begin.
pub fn refuse(peer: &Peer, why: &anyhow::Error) {
    tracing::error!("nothing is handed over: {why:#}");
    let _ = peer.send(&FromOld::Refused { what: format!("{why:#}") });
}

impl<'a> HandOver<'a> {
    fn run(&mut self) -> anyhow::Result<Upgraded> {
        self.server.hand_overs.begins(self.peer.stream())?;
        self.greet()?;
        loop {
            match self.peer.receive().context("waiting for the new server")? {
                FromNew::Take { disk, programs, unopened } => {
                    self.give(&disk, programs, unopened)?;
                }
                FromNew::Took { disk, changed } => {
                    let taken = self.away.iter_mut().find(|away| away.held.args().name() == disk);
                    let taken =
                        taken.context("it says that it has a disk which it was not given")?;
                    let pause = taken.since.elapsed();
                    tracing::info!(disk, "handed over after a pause of {pause:.1?}");
                    taken.pause = Some(pause);
                    taken.changed = changed;
                }
                FromNew::Failed { what } => bail!("the new server failed: {}", shown(&what)),
                FromNew::Ready => break,
                other => bail!("the new server sent {other:?}"),
            }
        }
        if let Some(away) = self.away.iter().find(|away| away.pause.is_none()) {
            bail!("the new server is ready without disk \"{}\"", away.held.args().name());
        }
        // The caller that learns of the end must not reach this server again.
        self.server.hand_overs.pause_api();
        self.server.hand_overs.is_decided();
        self.peer.send(&FromOld::Commit)?;
        let last = self.peer.receive_last(MESSAGE_TIME);
        match last.context("the new server did not confirm that it serves")? {
            FromNew::Serves => {}
            other => bail!("the new server sent {other:?} when it was ready"),
        }
        let pid = self.pid.as_raw_nonzero().get() as u32;
        // Supervisors must know the new process before they see the end of this one, and the end of
        // the other disks may take long. With a holder, the service's main process is the holder,
        // and stays.
        if keeper::connection().is_none() {
            supervisor::notify(&format!("MAINPID={pid}"));
        }
        keeper::announce_taker(Some(rustix::process::getpid()));
        let mut ended = self.end_unopened();
        ended.extend(self.end_others());
        ended.sort();
        custody::set(Custody::Gone);
        let disks = self.away.iter().map(|away| HandedOver {
            name: away.held.args().name(),
            pause_us: away.pause.unwrap_or_default().as_micros() as u64,
            changed: away.changed.clone(),
        });
        let nbd = self.server.common.nbd.lock().unwrap_or_else(PoisonError::into_inner);
        let (version, disconnected) = (self.version.clone(), nbd.disconnected());
        Ok(Upgraded { pid, version, disks: disks.collect(), ended, disconnected })
    }

    /// Leaves the disks that are not open to the new server. Ends what this server has kept of
    /// those that the new one has not taken, and returns their names.
    fn end_unopened(&mut self) -> Vec<String> {
        let is_left = |disk: &String| !self.unopened.contains(disk);
        let opening = self.server.book.all().into_iter().filter(|entry| entry.is_opening);
        let opening = opening.map(|entry| entry.args.name());
        let left: BTreeSet<_> = opening.chain(self.closed()).filter(is_left).collect();
        for disk in &left {
            tracing::warn!(disk, "the new server does not have this disk: it is not opened");
            self.server.common.handed.end_disk(disk, Vec::new());
        }
        self.openings.take().into_iter().for_each(HeldOpenings::for_good);
        left.into_iter().collect()
    }

    /// Returns the disks that could not be opened, and of which this server has what they continue
    /// of an earlier one. They are not in the book.
    fn closed(&self) -> BTreeSet<String> {
        let mut closed = self.server.common.handed.disks();
        closed.retain(|disk| self.server.book.find(disk).is_none());
        closed
    }

    /// Ends the disks that the new server has not taken. This server still owns them: it closes
    /// their connections, and removes what is kept of them. Returns their names.
    fn end_others(&self) -> Vec<String> {
        let taken: Vec<_> = self.away.iter().map(|away| away.held.args().name()).collect();
        let all = self.server.book.all().into_iter().filter(|entry| !entry.is_opening);
        let others: Vec<_> =
            all.map(|entry| entry.args.name()).filter(|disk| !taken.contains(disk)).collect();
        for disk in &others {
            tracing::warn!(disk, "the new server does not have this disk: it ends");
            let ended = self.server.book.hold(disk).map_err(anyhow::Error::from);
            let ended = ended.and_then(|held| Ok(self.server.remove(held, DRAIN_TIME)?));
            if let Err(e) = ended {
                tracing::error!(disk, "cannot end it: {e:#}");
                // It may end after this server leaves. A server that starts after a death must not
                // continue its session.
                exports::forget(disk);
            }
        }
        others
    }

    fn greet(&mut self) -> anyhow::Result<()> {
        // Any process of this user may connect to `--control`, such as an HTTP client.
        let hello = self.peer.receive().map_err(|e| match e.kind() {
            ErrorKind::InvalidData if !self.is_ours => anyhow::anyhow!(STRANGER),
            _ => anyhow::Error::from(e).context("waiting for the new server"),
        });
        let (format, version) = match hello? {
            FromNew::Hello { format, version } => (format, version),
            FromNew::Failed { what } => bail!("the new server failed: {}", shown(&what)),
            other => bail!("the new server does not say hello, but {other:?}"),
        };
        if format != FORMAT {
            bail!(
                "version {version} hands disks over in format {format}, and this server knows only \
                 {FORMAT}: stop it and start the new one"
            );
        }
        self.version = version;
        if self.server.options.attached || !self.server.options.xen.watch.is_empty() {
            bail!("the device of `attach` and the disks of Xen toolstacks cannot be handed over");
        }
        let disks = self.offered();
        let mut parcels = Vec::new();
        for (name, copy) in &*self.server.hand_overs.sockets() {
            let parcel = copy().with_context(|| format!("copying the socket of the {name}"))?;
            parcels.push((name.to_string(), parcel));
        }
        let mut nbd = self.server.common.nbd.lock().unwrap_or_else(PoisonError::into_inner);
        let listening = nbd.hand_over().context("copying the sockets of NBD")?;
        parcels.extend(listening.into_iter().map(|(at, parcel)| (format!("{NBD}{at}"), parcel)));
        drop(nbd);
        let sockets = parcels.iter().map(|(name, _)| name.clone()).collect();
        let version = env!("CARGO_PKG_VERSION").into();
        let state_folder = journals::in_use().map(Path::to_path_buf);
        let removed = self.server.book.removed();
        let config = self.server.options.config.as_deref().map(files::root);
        let folder = config.and_then(|folder| std::fs::canonicalize(folder).ok());
        let files = folder.map(|folder| (folder, self.server.known().missing));
        let welcome = FromOld::Welcome { version, disks, sockets, state_folder, removed, files };
        self.peer.send(&welcome)?;
        parcels.iter().try_for_each(|(_, parcel)| self.peer.send_parcel(parcel))?;
        Ok(())
    }

    /// Returns the disks for the new server.
    fn offered(&self) -> Vec<Offered> {
        let offered = |entry: Entry| Offered {
            program: self.server.yard.program(&entry.args.name()).map(|program| {
                let Program { image, files } = program;
                OfferedProgram { image, files }
            }),
            name: entry.args.name(),
            by_api: entry.by_api,
            keys: entry.keys,
            set: entry.set,
            is_closed: false,
        };
        let mut all: Vec<_> = self.server.book.all().into_iter().map(offered).collect();
        let of_file: BTreeSet<_> =
            self.server.unopened.all().into_iter().map(|disk| disk.name).collect();
        for name in self.closed().intersection(&of_file) {
            // A disk may have left the book in this moment.
            if all.iter().all(|offered| offered.name != *name) {
                all.push(Offered::closed(name.clone()));
            }
        }
        all
    }

    /// Holds a disk. None: it is not open.
    fn hold(&self, disk: &str) -> anyhow::Result<Option<HeldDisk<'a>>> {
        let until = Instant::now() + CALLS_TIME;
        loop {
            let is_opening = self.server.book.find(disk).is_some_and(|entry| entry.is_opening);
            match self.server.book.hold(disk) {
                Err(HoldError::Busy(_)) if is_opening => {}
                Err(HoldError::NotFound(_)) if self.closed().contains(disk) => return Ok(None),
                held => return Ok(Some(held?)),
            }
            match self.server.yard.info(disk).map(|info| info.state) {
                None | Some(DiskState::Opening) => return Ok(None),
                // It is open, and the caller of the addition learns that in a moment.
                Some(_) if Instant::now() < until => std::thread::sleep(CALLS_PAUSE),
                Some(_) => return Err(HoldError::Busy(disk.into()).into()),
            }
        }
    }

    /// Gives a disk that this server has not opened: its storage does not answer, or an error has
    /// ended it.
    fn give_unopened(&mut self, disk: &str) -> anyhow::Result<()> {
        if let Some(entry) = self.server.book.find(disk) {
            away::check_program(&entry.args)?;
        }
        let parcels = away::unopened(self.server, disk)?;
        let exports = parcels.iter().map(|(kind, _)| kind.clone()).collect();
        tracing::info!(disk, "it is not open yet: the new server opens it");
        self.unopened.push(disk.into());
        self.peer.send(&FromOld::Given { exports, unopened: true })?;
        Ok(parcels.iter().try_for_each(|(_, parcel)| self.peer.send_parcel(parcel))?)
    }

    /// Drains a disk, leaves its image, and gives it to the new server. `programs`: whether the new
    /// server can continue the program of an `exec:` image. `unopened`: whether it opens a disk by
    /// itself that this server has not opened.
    fn give(&mut self, disk: &str, programs: bool, unopened: bool) -> anyhow::Result<()> {
        if !programs && self.server.yard.program(disk).is_some() {
            bail!("the new server cannot continue the program of disk \"{disk}\"");
        }
        let held = match self.hold(disk)? {
            Some(held) => held,
            None if unopened => return self.give_unopened(disk),
            None => {
                let what = "and this version of the new server takes only open disks: try again \
                            when it is served";
                return Err(NotNow(format!("disk \"{disk}\" is not open, {what}")).into());
            }
        };
        let handed = match self.server.yard.begin_hand_over(disk).wait_at_most(DRAIN_TIME) {
            Ok(handed) => handed?,
            Err(late) => {
                away::serve_later(self.server, held.lend(), late);
                let what = format!(
                    "requests of disk \"{disk}\" take longer than {DRAIN_TIME:?}: try again \
                     when they have ended"
                );
                return Err(NotNow(what).into());
            }
        };
        let (away, program) = Away::of(self.server, held, handed)?;
        self.away.push(away);
        // This server tries to start the program again then.
        program.with_context(|| format!("giving up the program of disk \"{disk}\""))?;
        let Some(Away { exports, .. }) = self.away.last() else { return Ok(()) };
        let kinds = exports.iter().map(|handed| handed.kind.to_string()).collect();
        self.peer.send(&FromOld::Given { exports: kinds, unopened: false })?;
        exports.iter().try_for_each(|handed| self.peer.send_parcel(&handed.parcel))?;
        Ok(())
    }

    /// Waits for the end of the new server, and serves its disks again.
    fn take_back(&mut self) {
        // A process that has got nothing may do what it likes, unless this server has started it.
        let has_some = !self.away.is_empty();
        if (has_some || self.is_ours)
            && let Err(e) = self.end_process()
        {
            let pid = self.pid.as_raw_nonzero();
            tracing::error!("the new server does not end: end its process, {pid}: {e:#}");
        }
        // Before a wait without a limit: the operator must be able to ask this server.
        self.server.hand_overs.resume_api();
        let nbd = || self.server.common.nbd.lock().unwrap_or_else(PoisonError::into_inner);
        // A new client would find no export of a disk that is not served again yet. Connections
        // that go on do not wait for this.
        if !self.away.iter().any(|away| exports::is_handed_last(&away.held.args())) {
            nbd().take_back();
        }
        // Two servers on one image would destroy it, and a lock protects only some images.
        // Clients of other disks must not wait for that.
        if has_some && !self.has_surely_ended(|| nbd().take_back()) {
            self.away.clear();
        }
        // The disks open at the same time, as at start.
        let back = self.away.drain(..).map(|away| away.begin_again(self.server));
        let back: Vec<_> = back.collect();
        let until = Instant::now() + BACK_TIME;
        back.into_iter().for_each(|back| back.wait(self.server, until));
        let mut nbd = nbd();
        nbd.take_back();
        nbd.has_taken_back();
    }

    /// Waits without a limit for the end of the new server. Returns false if this one ends first.
    /// `late`: is called if it does not end soon.
    fn has_surely_ended(&self, late: impl Fn()) -> bool {
        let mut reported = None::<Instant>;
        while !host::has_ended(&self.process, CHECK_TIME).unwrap_or(true) {
            if self.server.hand_overs.is_ending() {
                return false;
            }
            if reported.is_none_or(|time| time.elapsed() > KILL_TIME) {
                let (disks, pid) = (self.away.len(), self.pid.as_raw_nonzero());
                tracing::error!("{disks} disks wait until process {pid} has ended");
                late();
                reported = Some(Instant::now());
            }
        }
        true
    }

    /// Waits for the end of the new server, which may close its images first. Kills it if it does
    /// not end.
    fn end_process(&self) -> anyhow::Result<()> {
        if host::has_ended(&self.process, END_TIME)? {
            return Ok(());
        }
        tracing::warn!("the new server does not end: killing it");
        let killed = if sandbox::is_on() {
            launcher::kill(self.pid.as_raw_nonzero().get())
        } else {
            rustix::process::pidfd_send_signal(&self.process, Signal::KILL).map_err(Into::into)
        };
        // It may have ended by itself before the signal.
        if host::has_ended(&self.process, KILL_TIME)? {
            return Ok(());
        }
        killed?;
        bail!("it does not end at all")
    }
}

/// Starts another server with the command line of this one, and hands the disks over to it.
pub fn upgrade(server: &Server, binary: Option<PathBuf>) -> anyhow::Result<Upgraded> {
    // The new process reads the configuration at once, so no call may be about to change it.
    let alone = Alone::of(server)?;
    let (ours, theirs) = UnixStream::pair()?;
    if sandbox::is_on() {
        if let Some(binary) = binary {
            bail!(
                "a server in a sandbox starts only its own program, not {}: replace the file of \
                 its program, or start the new server with --takeover (the old one needs \
                 --control)",
                binary.display()
            );
        }
        let pid = launcher::launch(theirs.into())?;
        let outcome = hand_over(server, ours, pid, true, alone);
        return outcome.map_err(|e| with_end(e, launcher::ended(pid).ok().flatten()));
    }
    let binary = binary.map_or_else(launcher::own_binary, Ok)?;
    let mut command = Command::new(&binary);
    command.args(launcher::own_arguments()).arg("--takeover").arg("-");
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    let mut child: Child =
        command.spawn().with_context(|| format!("starting {}", binary.display()))?;
    // The command has the child's end of the connection, which must not outlive the child.
    drop(command);
    let pid = child.id() as i32;
    let outcome = hand_over(server, ours, pid, true, alone);
    outcome.map_err(|e| {
        // If it has ended by itself, this is its own status.
        let ended = child.try_wait().ok().flatten();
        // A hand-over that did not begin has not ended it.
        let _ = child.kill();
        let _ = child.wait();
        with_end(e, ended.map(|status| status.to_string()))
    })
}

/// Adds how the new server has ended to the error of a connection that it has closed.
fn with_end(error: anyhow::Error, status: Option<String>) -> anyhow::Error {
    let is_closed = |e: &io::Error| {
        let kind = e.kind();
        let by_end = [ErrorKind::UnexpectedEof, ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
        by_end.contains(&kind) || e.raw_os_error() == Some(Errno::SRCH.raw_os_error())
    };
    let is_closed = error.chain().any(|e| e.downcast_ref().is_some_and(is_closed));
    match status.filter(|_| is_closed) {
        Some(status) => error.context(format!(
            "the new server has ended by itself ({status}); its messages are in this server's log"
        )),
        None => error,
    }
}
