//! The exports of a disk, from its options.
//!
//! Each kind of export has a file here. Besides the options, it has all that the program knows of
//! the kind: what messages call it, what it listens on, what only one disk can have, which devices
//! it needs, and how it starts. A new kind needs such a file, and an entry in [`ALL`].

pub mod bound;
mod handed;
mod nbd;
mod ublk;
mod vhost_user;
mod xen;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use blockyard_disk::Disk;
use blockyard_export::vhost_user::{Before, QueueShape};
use blockyard_export::{Export, Listener, Reactors};
use blockyard_ring::parcel::Parcel;
use blockyard_yard::{Way, WayError};
use rustix::process::Signal;

use crate::nbd::Servers;
use crate::options::disk::DiskArgs;
use crate::options::values::ReactorList;
use crate::process::inherited;

use bound::{Address, Bound};
pub use handed::HandedExports;
pub use ublk::ublk_options;

/// Exports start in this order. ublk and Xen come last: the host or a guest uses their devices at
/// once. [`ways`] puts an export that continues a session behind them.
static ALL: &[&dyn Kind] = &[&vhost_user::Kind, &nbd::Kind, &ublk::Kind, &xen::Kind];

/// State that the exports of all disks share.
#[derive(Clone)]
pub struct Common {
    pub nbd: Arc<Mutex<Servers>>,
    /// The process serves one device, and exits when the device is removed.
    pub attached: bool,
    /// Exports of another server that this one continues.
    pub handed: Arc<HandedExports>,
    /// Sockets for the exports that a reload starts again.
    pub bound: Arc<Bound>,
}

impl Common {
    pub fn new(nbd: Arc<Mutex<Servers>>, attached: bool) -> Self {
        Common { nbd, attached, handed: Arc::default(), bound: Arc::default() }
    }

    /// Listens on a Unix socket: one that a reload has bound already, an inherited one, or a new
    /// one.
    fn listen(&self, socket: &Listens) -> Result<Listener, WayError> {
        match socket {
            Listens::Inherited { name, .. } => {
                Ok(Listener::inherited(inherited::socket(name).map_err(WayError::caller)?))
            }
            Listens::Alone(path) | Listens::Shared(path) => {
                let bound = self.bound.take(&Address::unix(path.clone()));
                bound.map_or_else(|| Ok(Listener::bind(path)?), Ok)
            }
        }
    }

    /// Listens on TCP, as [`Common::listen`].
    fn listen_tcp(&self, host: &str, port: u16) -> Result<Listener, WayError> {
        let bound = self.bound.take(&Address::Tcp(host.into(), port));
        bound.map_or_else(|| Ok(Listener::bind_tcp(host, port)?), Ok)
    }
}

/// A kind of export.
trait Kind: Sync {
    /// Returns the option that requests the export, with its value, for messages.
    fn option(&self) -> &'static str;

    /// Returns the export of a disk, or `None` if its options do not request it.
    fn way(&self, args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>>;

    fn is_requested(&self, args: &DiskArgs) -> bool;

    /// Returns what is wrong with the options of the export.
    fn check(&self, _args: &DiskArgs) -> Result<(), &'static str> {
        Ok(())
    }

    /// Returns the Unix socket on which the export listens.
    fn listens(&self, _args: &DiskArgs) -> Option<Listens> {
        None
    }

    /// Returns the host and the port of TCP on which the export listens.
    fn tcp(&self, _args: &DiskArgs) -> Option<(String, u16)> {
        None
    }

    /// Returns what only one disk of a server can have.
    fn claim(&self, _args: &DiskArgs) -> Option<Claim> {
        None
    }

    /// Returns the device of the host without which the export cannot start.
    fn control(&self) -> Option<&'static str> {
        None
    }

    /// Returns the devices and folders of devices that the server writes to.
    fn devices(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Returns whether toolstacks can request the export, besides the options of a disk.
    fn has_toolstacks(&self) -> bool {
        false
    }

    /// Returns whether the server can open the image when the first queue starts.
    fn has_rings(&self) -> bool {
        false
    }

    /// Returns whether clients wait for the end of a hand-over.
    fn is_handed_last(&self) -> bool {
        false
    }

    /// Returns the kind of the parcels in which another server hands the export over.
    fn parcels(&self) -> Option<&'static str> {
        None
    }

    /// Returns whether a client that the export disconnects may be unable to connect again.
    fn keeps_session(&self) -> bool {
        false
    }

    /// Returns whether the next server must continue an export that is handed over.
    fn must_continue(&self) -> bool {
        false
    }

    /// Removes what the keeper of sessions has for a disk.
    fn forget(&self, _disk: &str) {}

    /// Drops an export that was handed over, and that no server continues. Returns whether it was
    /// kept for later servers.
    fn end_handed(&self, _disk: &str, _parcel: Parcel, _before: Before) -> bool {
        false
    }
}

/// A Unix socket of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Listens {
    /// The disk has the socket for itself.
    Alone(PathBuf),
    /// Several disks can have the socket.
    Shared(PathBuf),
    /// An inherited socket. `name`: the part after `fd:`.
    Inherited { name: String, shared: bool },
}

impl Listens {
    /// Returns the socket that one disk has for itself. `text`: a path, or `fd:` and a name.
    fn alone(text: &str) -> Self {
        match text.strip_prefix("fd:") {
            Some(name) => Listens::Inherited { name: name.into(), shared: false },
            None => Listens::Alone(PathBuf::from(text)),
        }
    }
}

/// What only one disk of a server can have.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// What distinguishes it from the other claims of this kind.
    pub of: String,
    /// What another disk does with it, for messages: "is /dev/ublkb5".
    pub says: String,
}

fn requested(args: &DiskArgs) -> impl Iterator<Item = &'static dyn Kind> {
    ALL.iter().copied().filter(|kind| kind.is_requested(args))
}

/// Returns the exports that a disk's options request, in the order in which they start. One that
/// continues a session of another server is the last: if another export cannot start, the session
/// must stay for a later attempt.
pub fn ways(args: &DiskArgs, common: &Common) -> Vec<Arc<dyn Way>> {
    let disk = args.name();
    let mut kinds = ALL.to_vec();
    kinds.sort_by_key(|kind| {
        let is_handed = |parcels| common.handed.has(&disk, parcels);
        kind.keeps_session() && kind.parcels().is_some_and(is_handed)
    });
    kinds.iter().filter_map(|kind| kind.way(args, common)).collect()
}

/// Removes what the keeper of sessions has for a disk.
pub fn forget(disk: &str) {
    ALL.iter().for_each(|kind| kind.forget(disk));
}

pub fn is_exported(args: &DiskArgs) -> bool {
    requested(args).next().is_some()
}

/// Returns the options that request an export, for messages.
pub fn options() -> String {
    list(ALL.iter().map(|kind| kind.option()))
}

/// Returns the keys of the configuration that request an export, for messages.
pub fn keys() -> String {
    list(ALL.iter().map(|kind| key(*kind)))
}

/// Returns the key of the configuration that requests an export.
fn key(kind: &dyn Kind) -> &'static str {
    let option = kind.option().trim_start_matches('-');
    option.split(' ').next().unwrap_or(option)
}

fn list(words: impl Iterator<Item = &'static str>) -> String {
    let words: Vec<_> = words.collect();
    let (last, first) = words.split_last().expect("there are exports");
    format!("{} or {last}", first.join(", "))
}

/// Returns what is wrong with the options of a disk's exports.
pub fn check(args: &DiskArgs) -> Result<(), &'static str> {
    requested(args).try_for_each(|kind| kind.check(args))
}

/// Returns whether the image can be opened when the first ring starts.
pub fn have_rings(args: &DiskArgs) -> bool {
    is_exported(args) && requested(args).all(Kind::has_rings)
}

/// Returns the Unix sockets of a disk.
pub fn listens(args: &DiskArgs) -> Vec<Listens> {
    requested(args).filter_map(|kind| kind.listens(args)).collect()
}

/// Returns the host and the port of TCP on which a disk listens.
fn tcp(args: &DiskArgs) -> Option<(String, u16)> {
    requested(args).find_map(|kind| kind.tcp(args))
}

/// Returns the paths of the Unix sockets that a disk's exports create, each with its key.
pub fn sockets_by_key(args: &DiskArgs) -> Vec<(&'static str, PathBuf)> {
    let socket = |kind: &'static dyn Kind| match kind.listens(args)? {
        Listens::Alone(path) | Listens::Shared(path) => Some((key(kind), path)),
        Listens::Inherited { .. } => None,
    };
    requested(args).filter_map(socket).collect()
}

/// Returns the paths of the Unix sockets that a disk's exports create.
pub fn sockets(args: &DiskArgs) -> Vec<PathBuf> {
    sockets_by_key(args).into_iter().map(|(_, path)| path).collect()
}

/// Returns what only one disk of a server can have, each with the option that requests it.
pub fn claims(args: &DiskArgs) -> Vec<(&'static str, Claim)> {
    requested(args).filter_map(|kind| Some((kind.option(), kind.claim(args)?))).collect()
}

/// Returns the devices without which the exports of a disk cannot start.
pub fn controls(args: &DiskArgs) -> impl Iterator<Item = &'static str> {
    requested(args).filter_map(Kind::control)
}

/// Returns the devices and folders of devices that the exports of these disks use. `watches`:
/// whether the server waits for disks of Xen toolstacks.
pub fn devices(disks: &[DiskArgs], watches: bool) -> Vec<PathBuf> {
    let is_used = |kind: &&dyn Kind| {
        disks.iter().any(|disk| kind.is_requested(disk)) || (watches && kind.has_toolstacks())
    };
    ALL.iter().copied().filter(is_used).flat_map(Kind::devices).collect()
}

/// Returns whether clients of the disk wait for the end of a hand-over.
pub fn is_handed_last(args: &DiskArgs) -> bool {
    requested(args).any(Kind::is_handed_last)
}

/// Returns the option of an export that was handed over, if the disk lacks that option and must
/// have it.
pub fn missing(args: &DiskArgs, kind: &str) -> Option<&'static str> {
    let kind = ALL.iter().copied().find(|of| of.parcels() == Some(kind))?;
    (kind.must_continue() && !kind.is_requested(args)).then(|| kind.option())
}

/// Drops an export that another server has handed over, and that this one does not continue.
/// Returns whether it was kept for later servers.
fn end_handed(disk: &str, kind: &str, parcel: Parcel, before: Before) -> bool {
    let kind = ALL.iter().copied().find(|of| of.parcels() == Some(kind));
    kind.is_some_and(|kind| kind.end_handed(disk, parcel, before))
}

type Started = Result<Box<dyn Export>, WayError>;

/// An export with an address for messages, and a function that starts it.
struct At<F> {
    address: String,
    /// The reactors for its queues.
    on: Option<ReactorList>,
    start: F,
}

impl<F: Fn(&Arc<Disk>, &Arc<Reactors>) -> Started + Send + Sync> Way for At<F> {
    fn describe(&self) -> String {
        self.address.clone()
    }

    fn start(&self, disk: &Arc<Disk>, reactors: &Arc<Reactors>) -> Started {
        match &self.on {
            None => (self.start)(disk, reactors),
            Some(list) => (self.start)(disk, &Arc::new(reactors.only(&list.0)?)),
        }
    }
}

fn at<F: Fn(&Arc<Disk>, &Arc<Reactors>) -> Started + Send + Sync + 'static>(
    address: impl ToString,
    args: &DiskArgs,
    start: F,
) -> Option<Arc<dyn Way>> {
    Some(Arc::new(At { address: address.to_string(), on: args.on_reactors.clone(), start }))
}

fn shape(args: &DiskArgs) -> QueueShape {
    QueueShape { queues: args.queues, size: args.queue_size }
}

/// Returns the callback for a device that something else removed. It ends an attached server.
pub fn ended(disk: String, attached: bool) -> impl Fn() + Send + Sync + 'static {
    move || {
        tracing::info!(disk, "the block device was removed");
        if attached {
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::TERM);
        }
    }
}
