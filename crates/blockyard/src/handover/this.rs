//! The process that hands its disks over.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use blockyard_disk::Carried;
use blockyard_export::Handed;
use blockyard_export::custody::{self, Custody};
use blockyard_export::nbd::Server;
use blockyard_export::vhost_user::Before;
use blockyard_ring::host;
use blockyard_ring::parcel::Parcel;
use blockyard_storage::targets::exec;
use blockyard_yard::{HandedDisk, Pending};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::{CARRIED, FORMAT, FromNext, FromThis, MESSAGE_TIME, PROGRAM, Peer, kinds, unexpected};
use crate::disk::Disk;
use crate::error::{Error, ErrorKind};
use crate::yard::{HandedOver, Yard};

/// How long a disk may take until its target has ended. Less than the next process waits.
const DRAIN_TIME: Duration = Duration::from_secs(20);
/// How long a process that has failed may take to end before it is killed.
const END_TIME: Duration = Duration::from_secs(10);
/// How long the kernel may take to end a killed process.
const KILL_TIME: Duration = Duration::from_secs(60);

/// A hand-over that runs.
struct HandOver<'a> {
    yard: &'a Yard,
    peer: Peer,
    /// The next process. None: it has not said which one it is.
    process: Option<OwnedFd>,
    away: Vec<Away>,
    /// Disks with requests that take too long.
    late: Vec<(String, Pending<HandedDisk>)>,
    /// They listen on if the next process fails.
    servers: Vec<Arc<Server>>,
}

/// A disk on its way.
struct Away {
    name: String,
    /// With the program of an `exec:` image.
    exports: Vec<Handed>,
    carried: Option<Carried>,
    /// False: writes may be lost.
    is_flushed: bool,
    since: Instant,
    pause: Option<Duration>,
}

impl Yard {
    /// Hands all disks over to another process, which calls [`Yard::take_over`] on the other end of
    /// `to`. Clients stay connected. Each disk is drained and flushed, and its target ends
    /// before the other process opens it: all that the target keeps must be in files, or in another
    /// place that the other process finds.
    ///
    /// Returns the pause of each disk that the other process has. Other disks have ended. This
    /// process must end then. Its yard has no disks, and it must not serve any.
    ///
    /// After an error this yard serves the disks as before. `again` describes a disk by its name,
    /// as for [`Yard::serve`], to open it again. If the other process neither closes the disks nor
    /// ends by itself, it is killed. A disk that could not be flushed has ended, and the log says
    /// so: opened again, it would report lost writes as durable at the next flush.
    ///
    /// A process hands over its only yard. Xen devices cannot be handed over.
    pub fn hand_over(
        &self,
        to: UnixStream,
        again: impl FnMut(&str) -> Disk,
    ) -> Result<Vec<HandedOver>, Error> {
        let (away, late, servers) = Default::default();
        let mut run = HandOver {
            yard: self,
            peer: Peer::new(to, MESSAGE_TIME),
            process: None,
            away,
            late,
            servers,
        };
        match run.run() {
            Ok(()) => {
                custody::set(Custody::Gone);
                let paused = |away: Away| HandedOver {
                    name: away.name,
                    pause: away.pause.unwrap_or_default(),
                };
                Ok(run.away.drain(..).map(paused).collect())
            }
            Err((why, mut has_closed)) => {
                let refused = run.peer.send(&FromThis::Refused { what: why.to_string() });
                if !has_closed && refused.is_ok() {
                    // The next process closes what it has, and says so.
                    let last = run.peer.receive_last(END_TIME / 2);
                    has_closed = matches!(last, Ok(FromNext::Failed { .. }));
                }
                run.take_back(has_closed, again);
                let what = format!("the disks stay in this process: {why}");
                Err(Error::new(ErrorKind::HandOver, what, why))
            }
        }
    }
}

/// Why a hand-over failed, and whether the next process has closed what it had got.
type Failure = (io::Error, bool);

fn failed(why: io::Error) -> Failure {
    (why, false)
}

impl HandOver<'_> {
    fn run(&mut self) -> Result<(), Failure> {
        self.greet().map_err(failed)?;
        loop {
            match self.peer.receive().map_err(failed)? {
                FromNext::Take { disk } => self.give(&disk).map_err(failed)?,
                FromNext::Took { disk } => {
                    let taken = self.away.iter_mut().find(|away| away.name == disk);
                    let taken = taken.ok_or_else(|| failed(unexpected(&disk)))?;
                    taken.pause = Some(taken.since.elapsed());
                }
                FromNext::Ready => break,
                FromNext::Failed { what } => return Err((io::Error::other(what), true)),
                other => return Err(failed(unexpected(&other))),
            }
        }
        if let Some(away) = self.away.iter().find(|away| away.pause.is_none()) {
            let what = format!("the other process is ready without disk \"{}\"", away.name);
            return Err(failed(io::Error::other(what)));
        }
        self.peer.send(&FromThis::Commit).map_err(failed)?;
        match self.peer.receive_last(MESSAGE_TIME).map_err(failed)? {
            FromNext::Serves => {}
            FromNext::Failed { what } => return Err((io::Error::other(what), true)),
            other => return Err(failed(unexpected(&other))),
        }
        // This process owns the connections of disks that the other one does not have.
        for name in self.yard.disks() {
            let _ = self.yard.remove(&name);
        }
        Ok(())
    }

    fn greet(&mut self) -> io::Result<()> {
        let (format, process) = match self.peer.receive()? {
            FromNext::Hello { format, process } => (format, process),
            other => return Err(unexpected(&other)),
        };
        if format != FORMAT {
            let what = format!("it takes disks in format {format}, and this one knows {FORMAT}");
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        self.process = Some(process_of(self.peer.stream(), process)?);
        let servers = self.yard.servers.lock().unwrap_or_else(PoisonError::into_inner);
        self.servers = servers.values().filter_map(Weak::upgrade).collect();
        drop(servers);
        self.servers.iter().try_for_each(|server| server.pause())?;
        let since = Instant::now();
        let parcel =
            |server: &Arc<Server>| Ok((server.address().to_string(), server.hand_over(since)?));
        let sockets: Vec<_> = self.servers.iter().map(parcel).collect::<io::Result<_>>()?;
        let names = sockets.iter().map(|(address, _)| address.clone()).collect();
        self.peer.send(&FromThis::Welcome { disks: self.yard.disks(), sockets: names })?;
        sockets.iter().try_for_each(|(_, parcel)| self.peer.send_parcel(parcel))
    }

    /// Drains a disk, flushes it, ends its target, and gives it to the next process.
    fn give(&mut self, name: &str) -> io::Result<()> {
        let handed = match self.yard.yard.begin_hand_over(name).wait_at_most(DRAIN_TIME) {
            Ok(handed) => handed.map_err(|e| io::Error::other(Error::from(e)))?,
            Err(late) => {
                self.late.push((name.into(), late));
                let what = format!("requests of disk \"{name}\" take longer than {DRAIN_TIME:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
        };
        let (away, program) = Away::of(name, handed);
        self.away.push(away);
        program.map_err(|e| io::Error::other(format!("the program of disk \"{name}\": {e}")))?;
        let Some(Away { exports, carried, is_flushed, .. }) = self.away.last() else {
            return Ok(());
        };
        if !is_flushed {
            let what = format!("disk \"{name}\" could not be flushed: writes may be lost");
            return Err(io::Error::other(what));
        }
        self.yard.target_ended(name, DRAIN_TIME)?;
        let carried = carried.as_ref().map(serde_json::to_vec).transpose()?;
        let carried = carried.map(|bytes| Parcel { bytes, fds: Vec::new() });
        let mut all = kinds(exports);
        all.extend(carried.iter().map(|_| CARRIED.to_string()));
        self.peer.send(&FromThis::Given { exports: all })?;
        let parcels = exports.iter().map(|handed| &handed.parcel).chain(&carried);
        for parcel in parcels {
            self.peer.send_parcel(parcel)?;
        }
        Ok(())
    }

    /// Serves the disks again. `has_closed`: the next process has closed them.
    fn take_back(&mut self, has_closed: bool, mut again: impl FnMut(&str) -> Disk) {
        if !has_closed && !self.away.is_empty() {
            self.end_process();
        }
        self.servers.iter().for_each(|server| server.take_back());
        let late = self.late.drain(..).filter_map(|(name, late)| {
            let handed = late.wait();
            let handed = handed.inspect_err(|e| tracing::error!("disk \"{name}\" has ended: {e}"));
            Some(Away::of(&name, handed.ok()?).0)
        });
        for Away { name, exports, carried, is_flushed, .. } in self.away.drain(..).chain(late) {
            let _ = self.yard.target_ended(&name, KILL_TIME);
            for Handed { kind, parcel } in exports {
                if kind != PROGRAM {
                    self.yard.inherited.put(&name, kind, parcel, Before::Died);
                } else if let Err(e) = exec::continue_from(parcel, true) {
                    tracing::error!("disk \"{name}\": its program: {e}");
                }
            }
            if !is_flushed {
                tracing::error!(
                    "disk \"{name}\" could not be flushed, and has ended: writes may be lost"
                );
                continue;
            }
            // The next process may have written before it failed.
            let carried = carried.map(|carried| Carried { left: None, ..carried }.into());
            if let Err(e) = self.yard.serve_with(again(&name), carried) {
                let cause = std::error::Error::source(&e).map(ToString::to_string);
                let cause = cause.unwrap_or_default();
                tracing::error!("disk \"{name}\" cannot be served again: {e}: {cause}");
            }
        }
        self.yard.inherited.clear();
        self.servers.clear();
    }

    /// Waits for the end of the next process, without a limit: two processes on one image would
    /// destroy it. Kills it if it does not end.
    fn end_process(&self) {
        let Some(process) = &self.process else { return };
        if host::has_ended(process, END_TIME).unwrap_or(false) {
            return;
        }
        tracing::warn!("the other process neither closes the disks nor ends: killing it");
        let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
        while !host::has_ended(process, KILL_TIME).unwrap_or(true) {
            tracing::error!("disks wait for the end of a process that was killed");
        }
    }
}

impl Away {
    /// The second value: an error if the disk's program could not be given up.
    fn of(name: &str, handed: HandedDisk) -> (Self, io::Result<()>) {
        // The rest has the target, which ends now.
        let HandedDisk { mut exports, carried, program, since, ended, .. } = handed;
        let program = program.map(|program| {
            exports.extend(program.map(|parcel| Handed { kind: PROGRAM, parcel }));
        });
        let is_flushed = ended.is_flushed;
        (Away { name: name.into(), exports, carried, is_flushed, since, pause: None }, program)
    }
}

/// Returns the process at the other end of a connection. `number`: which one it says that it is.
fn process_of(stream: &UnixStream, number: u32) -> io::Result<OwnedFd> {
    let wrong = || {
        let what = format!("process {number}, as it calls itself, is not at the other end");
        io::Error::new(io::ErrorKind::InvalidData, what)
    };
    let number = i32::try_from(number).map_err(|_| wrong())?;
    // This process made both ends of a socket pair. A socket with a path has that of `connect`.
    let own = std::process::id() as i32;
    let peer = host::peer(stream).and_then(|peer| peer.process);
    if number == own || peer.is_some_and(|peer| peer != own && peer != number) {
        return Err(wrong());
    }
    let pid = Pid::from_raw(number).ok_or_else(wrong)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}
