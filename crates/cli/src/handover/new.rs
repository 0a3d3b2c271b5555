//! The new server of a hand-over.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::{Context, bail};
use blockyard_control::events::What;
use blockyard_control::types::KeyChange;
use blockyard_export::custody::{self, Custody};
use blockyard_export::vhost_user::Before;
use blockyard_export::{Listener, keeper};
use blockyard_image::journal;
use blockyard_ring::parcel::Parcel;
use blockyard_ring::{host, resident};
use blockyard_storage::targets::exec;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use toml::Table;

use super::settings::{Split, Wanted, split};
use super::{FORMAT, FromNew, FromOld, KEPT, MESSAGE_TIME, NBD, Offered, PROGRAM, Peer, holder};
use crate::config::Config;
use crate::config::files::{self, Missing};
use crate::exports;
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::process::{inherited, journals};
use crate::server::Server;

/// The connection to the old server, which has agreed to hand its disks over.
pub struct Takeover {
    peer: Peer,
    /// The process of the old server. None: it has ended, or is in another PID namespace.
    old: Option<OwnedFd>,
    offered: Vec<Offered>,
    /// Disks that calls have removed, with their keys in the old server's file.
    removed: BTreeMap<String, Table>,
    sockets: HashMap<String, Parcel>,
}

/// The disks that a new server opens by itself, after the hand-over.
pub struct Remaining {
    /// The old server does not have them.
    pub added: Vec<(DiskArgs, Table)>,
    /// The old server has not opened them.
    pub unopened: Vec<Wanted>,
}

impl Takeover {
    /// Reports to the old server why this one cannot start.
    pub fn refuse(control: &Path, why: &anyhow::Error) {
        if let Ok(peer) = connect(control) {
            let _ = peer.send(&FromNew::Failed { what: format!("{why:#}") });
        }
    }

    /// Connects to the old server, if there is one. `-` as its socket: standard input is the
    /// connection. Call this before the process enters its sandbox.
    pub fn begin(options: &ServeOptions, config: &Config) -> anyhow::Result<Option<Self>> {
        let Some(control) = options.takeover.as_deref() else { return Ok(None) };
        let peer = connect(control)?;
        let old = process(&peer)?;
        let version = env!("CARGO_PKG_VERSION").to_string();
        let sent = peer.send(&FromNew::Hello { format: FORMAT, version }).context(TALKING);
        // A server that refuses at once may close the connection before it reads.
        let answer: FromOld = peer.receive().context(TALKING).or_else(|e| sent.and(Err(e)))?;
        let (disks, names, state_folder, removed, files) = match answer {
            FromOld::Welcome { disks, sockets, version, state_folder, removed, files } => {
                tracing::info!("taking {} disks over from version {version}", disks.len());
                (disks, sockets, state_folder, removed, files)
            }
            FromOld::Refused { what } => bail!("the running server keeps its disks: {what}"),
            other => bail!("the running server sent {other:?}"),
        };
        let mut sockets = HashMap::new();
        for name in names {
            sockets.insert(name, peer.receive_parcel().context(TALKING)?);
        }
        if let Err(e) = resident::map_code() {
            tracing::debug!("cannot map this program's code in advance: {e}");
        }
        custody::set(Custody::Waiting);
        let mut takeover = Takeover { peer, old, offered: disks, removed, sockets };
        takeover.prepare(|takeover| {
            check_unchanged(options, config)?;
            check_files(options, config, files)?;
            check_state_folder(state_folder.as_deref())?;
            // The old server could not take an image back that a journal elsewhere belongs to. A
            // server of an older version does not say where its journals are.
            journal::hold(state_folder.is_none());
            takeover.check_programs(config)
        })?;
        Ok(Some(takeover))
    }

    /// Returns the data files of the running program that this server will get with a disk.
    pub fn program(&self, disk: &str, image: &str) -> Option<&[PathBuf]> {
        let offered = self.offered.iter().find(|offered| offered.name == disk)?;
        let program = offered.program.as_ref().filter(|program| program.image == image)?;
        Some(&program.files)
    }

    /// Returns an error if a program of the old server would run twice, because its disk has
    /// another name now. Both would change the same files.
    fn check_programs(&self, config: &Config) -> anyhow::Result<()> {
        for Offered { name, by_api, program, .. } in &self.offered {
            let Some(program) = program.as_ref().filter(|_| !by_api) else { continue };
            let same: Vec<_> =
                config.disks.iter().filter(|disk| disk.image == *program.image).collect();
            let stays = same.iter().any(|disk| disk.name() == *name);
            if let Some(other) = same.first().filter(|_| !stays) {
                bail!(
                    "image {}: its program runs for disk \"{name}\", which the configuration calls \
                     \"{}\": keep the name, or restart the server instead of an upgrade",
                    program.image,
                    other.name()
                );
            }
        }
        Ok(())
    }

    pub fn has_socket(&self, name: &str) -> bool {
        self.sockets.contains_key(name)
    }

    /// Returns a listening socket of the old server.
    pub fn socket(&mut self, name: &str) -> Option<Parcel> {
        self.sockets.remove(name)
    }

    /// Returns an error if this server has no API, or no socket for take-overs, and the old one
    /// has. Operators would lose them with an upgrade that succeeds.
    pub fn check_sockets(&self) -> anyhow::Result<()> {
        for (name, option) in [("API", "api (--api)"), ("control", "--control")] {
            let Some(parcel) = self.sockets.get(name) else { continue };
            let listener = Listener::from_parcel(parcel.try_clone()?)?;
            let path = listener.path().map(|path| format!(" on {}", path.display()));
            // This process is not the owner of the sockets yet, so the file stays.
            drop(listener);
            bail!(
                "{option}: the running server listens{}, and this one has no such option: give it \
                 too, or remove it by a restart",
                path.unwrap_or_default()
            );
        }
        Ok(())
    }

    /// Does what may fail before the disks are taken over. After an error the old server goes on.
    pub fn prepare<T>(
        &mut self,
        prepare: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let prepared = prepare(self);
        prepared.inspect_err(|e| self.fail(e))
    }

    /// Reports to the old server why this one cannot take the disks. The old server goes on.
    pub fn fail(&self, error: &anyhow::Error) {
        let _ = self.peer.send(&FromNew::Failed { what: format!("{error:#}") });
        custody::set(Custody::Gone);
    }

    /// Takes the disks over, and becomes the owner of their connections. Returns the disks that
    /// this server opens by itself. After an error the old server goes on with all disks, and this
    /// process must end.
    pub fn run(&mut self, server: &Server, config: &Config) -> anyhow::Result<Remaining> {
        let mut nbd = server.common.nbd.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, parcel) in self.sockets.extract_if(|name, _| name.starts_with(NBD)) {
            nbd.continue_on(&name[NBD.len()..], parcel);
        }
        drop(nbd);
        let taken = self.take_all(server, config);
        if let Err(e) = &taken {
            self.fail(e);
            // A server that follows a dead one needs the addresses.
            server.common.nbd.lock().unwrap_or_else(PoisonError::into_inner).close_unused();
        }
        taken
    }

    fn take_all(&mut self, server: &Server, config: &Config) -> anyhow::Result<Remaining> {
        server.yard.prepare().context("preparing to take disks over")?;
        let (offered, removed) =
            (std::mem::take(&mut self.offered), std::mem::take(&mut self.removed));
        let Split { mut wanted, others, removed } = split(offered, config, removed)?;
        removed.into_iter().for_each(|(disk, keys)| server.book.note_removed(&disk, keys));
        // Clients that wait for the end of the hand-over must not wait for other disks.
        wanted.sort_by_key(|wanted| exports::is_handed_last(&wanted.args));
        let mut unopened = Vec::new();
        for disk in wanted {
            unopened.extend(self.take(server, disk)?);
        }
        self.peer.send(&FromNew::Ready).context(TALKING)?;
        match self.peer.receive().context("waiting for the old server's consent")? {
            FromOld::Commit => {}
            other => bail!("the old server sent {other:?}"),
        }
        // The holder must know this process before the old one exits. If the old one has died, the
        // holder has started another server, and this one must end.
        holder::announce_surely().context("announcing this server to the holder")?;
        if let Err(e) = self.peer.send(&FromNew::Serves) {
            self.check_old_has_ended(&e)?;
            tracing::warn!("the old server has ended before it could leave: {e}");
        }
        journal::hold(false);
        // Before requests begin, because a program that is not owned answers none.
        server.book.all().iter().for_each(|disk| server.yard.own_program(&disk.args.name()));
        exec::end_unused();
        custody::set(Custody::Owner);
        // What no export has taken ends with the old server.
        let names: Vec<_> = unopened.iter().map(|disk| disk.args.name()).collect();
        server.common.handed.clear(&names);
        Ok(Remaining { added: others, unopened })
    }

    /// Returns an error if the old server is alive after the last message could not be sent to it.
    /// Then it has given up, and serves its disks again after this process ends. It says so before
    /// it closes the connection, because its process may not be visible here.
    fn check_old_has_ended(&self, error: &std::io::Error) -> anyhow::Result<()> {
        let has_left = match self.peer.receive::<FromOld>() {
            Ok(_) => false,
            Err(e) => e.kind() == ErrorKind::UnexpectedEof && !self.old_lives(DYING),
        };
        anyhow::ensure!(has_left, "the old server waits no longer: {error}");
        Ok(())
    }

    /// Returns whether the old server's process does not end within `limit`.
    pub fn old_lives(&self, limit: Duration) -> bool {
        let lives = |old| host::has_ended(old, limit).is_ok_and(|has_ended| !has_ended);
        self.old.as_ref().is_some_and(lives)
    }

    /// Closes the sockets of the old server that this one does not use, and removes their files.
    pub fn finish(self) {
        self.sockets.into_values().for_each(|parcel| drop(Listener::from_parcel(parcel)));
    }

    /// Takes a disk over. Returns it if the old server has not opened it.
    fn take(&self, server: &Server, disk: Wanted) -> anyhow::Result<Option<Wanted>> {
        let name = disk.args.name();
        let take = FromNew::Take { disk: name.clone(), programs: true, unopened: true };
        self.peer.send(&take).context(TALKING)?;
        let mut missing = None;
        let is_open = match self.peer.receive().context(TALKING)? {
            FromOld::Given { exports, unopened } => {
                // Another server has died, or has given such a disk back.
                let before = if unopened { Before::Died } else { Before::Drained };
                for kind in exports {
                    missing = missing.or(exports::missing(&disk.args, &kind));
                    let parcel = self.peer.receive_parcel().context(TALKING)?;
                    if kind == KEPT {
                        adopt(parcel)?;
                    } else if kind == PROGRAM {
                        exec::continue_from(parcel, false)?;
                    } else {
                        server.common.handed.put(&name, &kind, parcel, before);
                    }
                }
                !unopened
            }
            FromOld::Refused { what } => bail!("{what}"),
            other => bail!("the old server sent {other:?}"),
        };
        if let Some(option) = missing {
            bail!(
                "disk \"{name}\" has its device, but no {option} any more: an upgrade cannot change \
                 that"
            );
        }
        if !is_open {
            return Ok(Some(disk));
        }
        let Wanted { args, keys, by_api, set, changed } = disk;
        server.add(args, keys, by_api)?;
        server.book.note_set(&name, set);
        report(server, &name, &changed);
        self.peer.send(&FromNew::Took { disk: name, changed }).context(TALKING)?;
        Ok(None)
    }
}

/// Notes what the old server has of a disk in systemd's store. An older version sends no
/// descriptions.
fn adopt(kept: Parcel) -> anyhow::Result<()> {
    let names: BTreeMap<String, String> = serde_json::from_slice(&kept.bytes)?;
    let has_all = names.len() == kept.fds.len();
    let mut descriptions = kept.fds.into_iter().filter(|_| has_all);
    names.into_iter().for_each(|(key, name)| keeper::adopt(key, name, descriptions.next()));
    Ok(())
}

/// Publishes what the configuration file has changed of a disk.
pub fn report(server: &Server, disk: &str, changed: &[KeyChange]) {
    if !changed.is_empty() {
        server.events.publish(What::DiskChanged { disk: disk.into(), keys: changed.to_vec() });
    }
}

/// Returns an error if the configuration is not the one that this process has read. A call of the
/// old server may have changed it before the old one agreed to hand over. It changes nothing since.
fn check_unchanged(options: &ServeOptions, config: &Config) -> anyhow::Result<()> {
    let is_same = Config::of(options)? == *config;
    anyhow::ensure!(is_same, "the configuration has changed since this server read it: try again");
    Ok(())
}

/// Returns an error if a file or folder of the configuration has gone since the old server read it.
/// `before`: the folder that the old server has read, and what it did not have then.
fn check_files(
    options: &ServeOptions,
    config: &Config,
    before: Option<(PathBuf, Missing)>,
) -> anyhow::Result<()> {
    let (Some(path), Some((folder, before))) = (&options.config, before) else { return Ok(()) };
    let is_same = std::fs::canonicalize(files::root(path)).is_ok_and(|root| root == folder);
    if is_same { config.missing.check(before, path) } else { Ok(()) }
}

/// Returns an error if the old server has its journals elsewhere: it could not take back an image
/// that this server has marked with a journal in another folder.
fn check_state_folder(theirs: Option<&Path>) -> anyhow::Result<()> {
    let (Some(theirs), Some(ours)) = (theirs, journals::in_use()) else { return Ok(()) };
    let (place, old) = (ours.display(), theirs.display());
    anyhow::ensure!(
        ours == theirs,
        "--state-folder: the running server has its journals in {old}, not in {place}: a restart \
         changes that"
    );
    Ok(())
}

fn connect(control: &Path) -> anyhow::Result<Peer> {
    let stream = if control == Path::new("-") {
        let socket = inherited::connection();
        UnixStream::from(socket.context("--takeover -: standard input is no socket")?)
    } else {
        UnixStream::connect(control).with_context(|| {
            format!("--takeover {}: no server can be reached there", control.display())
        })?
    };
    Ok(Peer::new(stream, MESSAGE_TIME))
}

const TALKING: &str = "talking to the old server";

/// Longest time between the close of a connection and the end of its process, if the process dies.
const DYING: Duration = Duration::from_secs(2);

/// Returns the process at the other end of a connection. `None`: it has ended, or has no number
/// here.
fn process(peer: &Peer) -> anyhow::Result<Option<OwnedFd>> {
    let number = host::peer(peer.stream()).and_then(|peer| peer.process);
    let Some(process) = number.and_then(Pid::from_raw) else { return Ok(None) };
    match pidfd_open(process, PidfdFlags::empty()) {
        Ok(process) => Ok(Some(process)),
        Err(Errno::SRCH) => Ok(None),
        Err(e) => Err(e).context("watching the old server's process"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The new server sees no process of the old one, as in another PID namespace.
    #[test]
    fn a_new_server_goes_on_without_the_last_message_only_if_the_old_one_has_ended() {
        let pair = || {
            let (old, new) = UnixStream::pair().unwrap();
            let (offered, removed, sockets) = Default::default();
            (
                Peer::new(old, MESSAGE_TIME),
                Takeover {
                    peer: Peer::new(new, MESSAGE_TIME),
                    old: None,
                    offered,
                    removed,
                    sockets,
                },
            )
        };
        let late = ErrorKind::BrokenPipe.into();
        let (old, new) = pair();
        old.receive_last::<FromNew>(Duration::ZERO).unwrap_err();
        old.send(&FromOld::Refused { what: "late".into() }).unwrap();
        new.check_old_has_ended(&late).unwrap_err();
        let (old, new) = pair();
        drop(old);
        new.check_old_has_ended(&late).unwrap();
    }
}
