//! The exports of a disk, from its options.
//!
//! A new kind of export needs a [`Way`] here, and an entry in [`ALL`].

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_disk::Disk;
use blockyard_export::nbd;
use blockyard_export::ublk::{Ublk, UblkOptions};
use blockyard_export::vhost_user::{self, HandedSocket, QueueShape, Tuning, VhostUser};
use blockyard_export::xen::{Xen, XenOptions, records};
use blockyard_export::{Export, Listener, Reactors};
use blockyard_ring::xen::Host;
use blockyard_yard::{Way, WayError};
use rustix::process::Signal;

use crate::handover::HandedExports;
use crate::inherited;
use crate::nbd::Servers;
use crate::options::disk::DiskArgs;
use crate::options::values::{ReactorList, UblkNumber};
use crate::options::xen::XenDevice;

/// State that the exports of all disks share.
#[derive(Clone)]
pub struct Common {
    pub nbd: Arc<Mutex<Servers>>,
    /// The process serves one device, and exits when the device is removed.
    pub attached: bool,
    /// Exports of another server that this one continues.
    pub handed: Arc<HandedExports>,
}

type Started = Result<Box<dyn Export>, WayError>;

/// Returns an export of a disk, or `None` if its options do not request it.
type Constructor = fn(&DiskArgs, &Common) -> Option<Arc<dyn Way>>;

/// Exports start in this order. ublk and Xen come last: the host or a guest uses their devices at
/// once.
const ALL: [Constructor; 4] = [vhost_user, nbd_export, ublk, xen];

/// Returns the exports that a disk's options request.
pub fn ways(args: &DiskArgs, common: &Common) -> Vec<Arc<dyn Way>> {
    ALL.iter().filter_map(|constructor| constructor(args, common)).collect()
}

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

fn vhost_user(args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
    let socket = args.vhost_user.clone()?;
    let tuning = Tuning {
        poll: args.poll,
        coalesce: args.coalesce,
        in_band: args.in_band_notifications,
        pin_memory: args.pin_memory,
        any_memory_file: args.allow_any_memory_file,
        second_client: args.second_client,
    };
    let (shape, handed) = (shape(args), common.handed.clone());
    at(socket.clone(), args, move |disk, reactors| {
        if let Some((parcel, before)) = handed.take(disk.name(), vhost_user::KIND) {
            let handed = HandedSocket::unpack(parcel, before)?;
            if let Some(path) = handed.path().filter(|path| *path != Path::new(&socket)) {
                let path = path.display();
                let what = format!("the other server listens on {path}, not on {socket}");
                return Err(WayError::caller(what));
            }
            let (disk, reactors) = (disk.clone(), reactors.clone());
            return Ok(Box::new(VhostUser::resume(disk, handed, shape, tuning, reactors)?));
        }
        let listener = match socket.strip_prefix("fd:") {
            Some(text) => Listener::inherited(inherited::socket(text).map_err(WayError::caller)?),
            None => Listener::bind(socket.as_ref())?,
        };
        Ok(Box::new(VhostUser::start(disk.clone(), listener, shape, tuning, reactors.clone())?))
    })
}

fn nbd_export(args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
    let address = args.nbd.clone()?;
    let (own, servers, handed) = (args.clone(), common.nbd.clone(), common.handed.clone());
    at(address.to_string(), args, move |disk, _| {
        let mut servers = servers.lock().unwrap_or_else(PoisonError::into_inner);
        let offer = servers.offer(&address, disk, &own).map_err(WayError::caller)?;
        if let Some((parcel, _)) = handed.take(disk.name(), nbd::KIND) {
            offer.resume(parcel)?;
        }
        Ok(Box::new(offer))
    })
}

fn ublk(args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
    let address = match args.ublk? {
        UblkNumber::Any => "a ublk device".to_string(),
        UblkNumber::Number(number) => format!("/dev/ublkb{number}"),
    };
    let (own, attached) = (args.clone(), common.attached);
    at(address, args, move |disk, reactors| {
        let options = ublk_options(&own);
        let ended = ended(disk.name().to_string(), attached);
        Ok(Box::new(Ublk::start(disk.clone(), &options, reactors, ended)?))
    })
}

/// Returns the options of a disk's ublk device.
pub fn ublk_options(args: &DiskArgs) -> UblkOptions {
    let id = match args.ublk {
        Some(UblkNumber::Number(number)) => Some(number),
        Some(UblkNumber::Any) | None => None,
    };
    UblkOptions { id, shape: shape(args), identity: args.identity(), file: args.file_identity() }
}

fn xen(args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
    let device = args.xen?;
    let (queues, data, attached) = (args.queues, args.xen_data, common.attached);
    at(device, args, move |disk, reactors| {
        let XenDevice { domain, name: device } = device;
        let options = XenOptions { domain, device, queues, data, records: records() };
        let ended = ended(disk.name().to_string(), attached);
        Ok(Box::new(Xen::start(disk.clone(), &options, &Host::Xen, reactors.clone(), ended)?))
    })
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
