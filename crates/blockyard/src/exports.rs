//! The exports of a disk.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockyard_disk::Disk;
use blockyard_export::nbd::{self, Exported, Server, Settings};
use blockyard_export::ublk::{PARCELS, Ublk, UblkOptions, number_in};
use blockyard_export::vhost_user::{self, HandedSocket, QueueShape, Tuning, VhostUser};
use blockyard_export::xen::{Name, Xen, XenData, XenOptions, records};
use blockyard_export::{Listener, PollMode, Reactors};
use blockyard_ring::xen::Host;
use blockyard_yard::{Way, WayError};

use crate::disk::Export;
use crate::handover::Inheritance;

/// Entries of a queue.
const QUEUE_SIZE: u16 = 128;

/// The NBD servers of a yard, by address. Each ends with its last disk.
pub(crate) type NbdServers = Arc<Mutex<HashMap<String, Weak<Server>>>>;

/// An export of one disk.
pub(crate) struct One {
    pub(crate) export: Export,
    pub(crate) queues: u16,
    pub(crate) servers: NbdServers,
    pub(crate) inherited: Inheritance,
}

impl One {
    fn shape(&self) -> QueueShape {
        QueueShape { queues: self.queues, size: QUEUE_SIZE }
    }

    fn nbd(
        &self,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
        listen: impl FnOnce() -> Result<Listener, WayError>,
    ) -> Result<Box<dyn blockyard_export::Export>, WayError> {
        let address = self.describe();
        let exported = Exported::new(disk.clone(), disk.name(), "", None);
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        let server = match servers.get(&address).and_then(Weak::upgrade) {
            Some(server) => server,
            None => {
                let listener = match self.inherited.take_socket(&address) {
                    Some(parcel) => Listener::from_parcel(parcel)?,
                    None => listen()?,
                };
                let settings = Arc::new(Settings::default());
                let server = Server::start(listener, &address, settings, reactors.clone())?;
                // A program may serve disk after disk, each on an address of its own.
                servers.retain(|_, server| server.strong_count() > 0);
                servers.insert(address, Arc::downgrade(&server));
                server
            }
        };
        let offer = server.offer(exported);
        if let Some((parcel, _)) = self.inherited.take(disk.name(), nbd::KIND) {
            offer.resume(parcel)?;
        }
        Ok(Box::new(offer))
    }

    fn vhost_user(
        &self,
        path: &Path,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
    ) -> Result<VhostUser, WayError> {
        let tuning = Tuning {
            poll: PollMode::Auto,
            in_band: false,
            pin_memory: false,
            any_memory_file: false,
            second_client: Default::default(),
        };
        let (shape, served, reactors) = (self.shape(), disk.clone(), reactors.clone());
        let Some((parcel, before)) = self.inherited.take(disk.name(), vhost_user::KIND) else {
            let listener = Listener::bind(path)?;
            return Ok(VhostUser::start(served, listener, shape, tuning, reactors)?);
        };
        let handed = HandedSocket::unpack_at(parcel, before, path)?;
        Ok(VhostUser::resume(served, handed, shape, tuning, reactors)?)
    }
}

impl Way for One {
    fn describe(&self) -> String {
        match &self.export {
            Export::VhostUser(path) => path.display().to_string(),
            Export::NbdUnix(path) => format!("unix:{}", path.display()),
            Export::NbdTcp(host, port) => format!("tcp:{host}:{port}"),
            Export::Ublk(None) => "a ublk device".into(),
            Export::Ublk(Some(number)) => format!("/dev/ublkb{number}"),
            Export::Xen(domain, device) => format!("device {device} of domain {domain}"),
        }
    }

    fn start(
        &self,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
    ) -> Result<Box<dyn blockyard_export::Export>, WayError> {
        match &self.export {
            Export::VhostUser(path) => Ok(Box::new(self.vhost_user(path, disk, reactors)?)),
            Export::NbdUnix(path) => {
                let path: PathBuf = path.clone();
                self.nbd(disk, reactors, || Ok(Listener::bind(&path)?))
            }
            Export::NbdTcp(host, port) => {
                self.nbd(disk, reactors, || Ok(Listener::bind_tcp(host, *port)?))
            }
            Export::Ublk(id) => {
                let left = self.inherited.take(disk.name(), PARCELS);
                let id = left.and_then(|(parcel, _)| number_in(&parcel)).or(*id);
                let options = UblkOptions {
                    id,
                    shape: self.shape(),
                    identity: disk.name().into(),
                    file: None,
                    earlier: Vec::new(),
                };
                let ublk = Ublk::start(disk.clone(), &options, reactors, || ());
                Ok(Box::new(ublk.map_err(WayError::caller)?))
            }
            Export::Xen(domain, device) => {
                let device = device.parse::<Name>().map_err(WayError::caller)?;
                let (domain, queues) = (*domain, self.queues);
                let (data, records) = (XenData::Auto, records());
                let options = XenOptions { domain, device, queues, data, records };
                let (disk, reactors) = (disk.clone(), reactors.clone());
                let xen = Xen::start(disk, &options, &Host::Xen, reactors, || ());
                Ok(Box::new(xen.map_err(WayError::caller)?))
            }
        }
    }
}
