//! A disk that the old server of a hand-over has given away, or is about to give.
//!
//! In: what the yard returns for a disk that has ended. Out: the disk's parcels for the new server,
//! or the disk itself, served again. What must hold: a disk that could not be flushed is not served
//! again, because a later flush would report success for lost writes. Only a later command of the
//! operator (a reload, an upgrade) opens it. A process that has locked the image meanwhile, such as
//! a check, delays a disk and does not end it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use blockyard_control::types::KeyChange;
use blockyard_disk::{Carried, OnEnospc, Source};
use blockyard_export::vhost_user::Before;
use blockyard_export::{Handed, keeper};
use blockyard_ring::parcel::Parcel;
use blockyard_storage::targets::exec;
use blockyard_yard::{DiskSettings, HandedDisk, Pending, YardError};

use super::{CARRIED, KEPT, PROGRAM};
use crate::disks::book::HeldDisk;
use crate::disks::{log_end, settings};
use crate::exports;
use crate::options::disk::DiskArgs;
use crate::server::Server;
use crate::server::hand_overs::NotNow;
use crate::server::late::{First, Late, Locked, describe, describe_space};

/// How long a disk waits for other processes that have locked its image.
const LOCKED_TIME: Duration = Duration::from_secs(600);
/// How long a hand-over that has failed waits for a disk to open again. Storage without an answer
/// must not keep the caller of the upgrade, and the next upgrade.
pub const BACK_TIME: Duration = Duration::from_secs(30);

/// A disk that the new server has, or may have.
pub struct Away<'a> {
    pub held: HeldDisk<'a>,
    pub exports: Vec<Handed>,
    pub since: Instant,
    pub pause: Option<Duration>,
    /// What the new server has changed.
    pub changed: Vec<KeyChange>,
}

impl<'a> Away<'a> {
    /// Packs what the new server needs. The second value: an error if the disk's program could not
    /// be given up.
    pub fn of(
        server: &Server,
        held: HeldDisk<'a>,
        handed: HandedDisk,
    ) -> anyhow::Result<(Self, std::io::Result<()>)> {
        let (disk, since) = (held.args().name(), handed.since);
        log_end(&handed.ended);
        if !handed.ended.is_flushed {
            let what = "could not be flushed, and has ended: writes may be lost (a reload opens it \
                        again)";
            has_ended(server, held, what);
            server.common.handed.end_disk(&disk, handed.exports);
            bail!("disk \"{disk}\" {what}");
        }
        let mut exports = handed.exports;
        if let Some(carried) = handed.carried {
            let bytes = serde_json::to_vec(&carried).unwrap_or_default();
            exports.push(Handed { kind: CARRIED, parcel: Parcel { bytes, fds: Vec::new() } });
        }
        let program = handed.program.map(|program| {
            exports.extend(program.map(|parcel| Handed { kind: PROGRAM, parcel }));
        });
        let kept = kept(&disk, exports.iter().map(|handed| handed.kind));
        exports.extend(kept.map(|parcel| Handed { kind: KEPT, parcel }));
        Ok((Away { held, exports, since, pause: None, changed: Vec::new() }, program))
    }

    /// Begins to open the image again, and to continue the exports. The new server must have ended.
    pub fn begin_again(self, server: &Server) -> Back<'a> {
        let Away { held, exports, .. } = self;
        let (args, name) = (held.args(), held.args().name());
        let handed = &server.common.handed;
        for Handed { kind, parcel } in exports {
            if kind == PROGRAM {
                let _ = exec::continue_from(parcel, true)
                    .inspect_err(|e| tracing::error!(disk = name, "its program: {e}"));
                continue;
            }
            handed.put(&name, kind, parcel, Before::Died);
        }
        held.opens();
        let carried = handed.take_carried(&name).unwrap_or_else(|e| {
            tracing::error!("its statistics begin at zero: {e:#}");
            None
        });
        // The new server may have written to the image before it died.
        let carried = carried.map(|carried| Carried { left: None, ..(*carried).clone() }.into());
        let settings = settings(&args, exports::ways(&args, &server.common));
        let settings = DiskSettings { carried, ..settings };
        let pending = server.yard.begin_add(settings.clone());
        Back { held, settings, pending }
    }
}

/// Returns the parcel with the names of a disk's exports in systemd's store, if they are there. Its
/// descriptors are the descriptions of these exports in the order of their keys, all or none.
fn kept<'a>(disk: &str, kinds: impl Iterator<Item = &'a str>) -> Option<Parcel> {
    let keys: BTreeSet<_> = kinds.map(|kind| format!("{kind}:{disk}")).collect();
    let kept = keys.into_iter().filter_map(|key| {
        let (name, description) = keeper::stored(&key)?;
        Some(((key, name), description))
    });
    let (names, descriptions): (BTreeMap<String, String>, Vec<_>) = kept.unzip();
    if names.is_empty() {
        return None;
    }
    let bytes = serde_json::to_vec(&names).unwrap_or_default();
    let fds = descriptions.into_iter().collect::<Option<Vec<_>>>().unwrap_or_default();
    Some(Parcel { bytes, fds })
}

/// Returns an error if the disk waits for the program of an `exec:` image.
pub fn check_program(args: &DiskArgs) -> anyhow::Result<()> {
    let scheme = Source::scheme_of(&args.image);
    if scheme.is_some_and(|(scheme, name)| scheme.program(name).is_some()) {
        let disk = args.name();
        let what = format!("disk \"{disk}\" waits for its program: try again when it is served");
        return Err(NotNow(what).into());
    }
    Ok(())
}

/// Returns what a disk continues of an earlier server, for the new one: each parcel with its kind.
/// This server has not opened the disk, so it is left to the new one.
pub fn unopened(server: &Server, disk: &str) -> anyhow::Result<Vec<(String, Parcel)>> {
    let copies = server.common.handed.copies(disk);
    let mut copies =
        copies.with_context(|| format!("copying the connections of disk \"{disk}\""))?;
    let kept = kept(disk, copies.iter().map(|(kind, _)| kind.as_str()));
    copies.extend(kept.map(|parcel| (KEPT.into(), parcel)));
    Ok(copies)
}

/// A disk that is being served again.
pub struct Back<'a> {
    held: HeldDisk<'a>,
    settings: DiskSettings,
    pending: Pending<()>,
}

impl Back<'_> {
    /// Waits until the disk is served again, but not longer than until then, and not for other
    /// programs. Then it is served later.
    pub fn wait(self, server: &Server, until: Instant) {
        let Back { held, settings, pending } = self;
        let disk = held.args().name();
        let first = match pending.wait_at_most(until.saturating_duration_since(Instant::now())) {
            Ok(Err(e)) if e.is_full() && settings.on_enospc == OnEnospc::Pause => {
                tracing::warn!(disk, "{}", describe_space(&disk, &e));
                First::Failed(e)
            }
            Ok(Err(e)) if e.is_locked() => {
                let (limit, locked) = (LOCKED_TIME.as_secs(), describe(&e));
                tracing::warn!(disk, "waiting up to {limit} s before it is served again: {locked}");
                First::Failed(e)
            }
            Ok(added) => return has_tried(server, held, added),
            Err(late) => {
                let limit = BACK_TIME.as_secs();
                tracing::warn!(
                    disk,
                    "it is still opening after {limit} s, and goes on: its storage may not answer"
                );
                First::Runs(late)
            }
        };
        // The other disks of the hand-over must not wait.
        let locked = Locked::WaitsFor(LOCKED_TIME);
        Late { settings, locked, ended: has_tried }.serve(server, held, first);
    }
}

/// The end of the attempts to serve a disk again.
fn has_tried(server: &Server, held: HeldDisk<'_>, added: Result<(), YardError>) {
    let name = held.args().name();
    match added {
        Ok(()) => {
            server.unopened.clear(&name);
            tracing::info!(disk = name, "served again");
        }
        // This server ends, or another one opens the disk.
        Err(YardError::Closing) => return drop(held.lend()),
        Err(e) => {
            let what = format!("cannot serve it again: {:#}", anyhow::Error::from(e));
            tracing::error!(disk = name, "{what}");
            has_ended(server, held, &what);
        }
    }
    server.common.handed.end_disk(&name, Vec::new());
}

/// Notes that a disk has ended that the configuration may have.
fn has_ended(server: &Server, held: HeldDisk<'_>, what: &str) {
    let entry = held.entry();
    held.remove();
    server.note_ended(&entry, what);
}

/// Serves a disk again as soon as it has ended, because the hand-over does not wait for it. `lent`:
/// its name in the book.
pub fn serve_later(server: &Server, lent: String, late: Pending<HandedDisk>) {
    let Some(server) = server.itself.upgrade() else { return };
    // The wait ends with the disk's requests in flight. A device may never answer them, so the wait
    // would use up a pool. A disk is lent once, so it has at most one such thread.
    let thread = std::thread::Builder::new().name("late disk".into());
    let spawned = thread.spawn(move || {
        let held = server.book.lent(lent);
        let disk = held.args().name();
        let ended = late.wait().map_err(anyhow::Error::from);
        match ended.and_then(|handed| Away::of(&server, held, handed)) {
            Ok((away, _)) => {
                let until = Instant::now() + BACK_TIME;
                away.begin_again(&server).wait(&server, until);
            }
            Err(e) => tracing::error!(disk, "{e:#}"),
        }
    });
    if let Err(e) = spawned {
        tracing::error!("a disk is not served again after its drain: no thread can start: {e}");
    }
}
