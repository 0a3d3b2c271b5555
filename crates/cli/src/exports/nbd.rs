//! `--nbd`: an export of an NBD server, which several disks can share.

use std::path::Path;
use std::sync::{Arc, PoisonError};

use blockyard_export::nbd;
use blockyard_yard::{Way, WayError};

use super::{Claim, Common, Listens, at};
use crate::options::disk::DiskArgs;
use crate::options::nbd::NbdAddress;

pub(super) struct Kind;

fn shared(path: &Path) -> Listens {
    Listens::Shared(path.into())
}

fn inherited(name: &str) -> Listens {
    Listens::Inherited { name: name.into(), shared: true }
}

impl super::Kind for Kind {
    fn option(&self) -> &'static str {
        "--nbd ADDRESS"
    }

    fn is_requested(&self, args: &DiskArgs) -> bool {
        args.nbd.is_some()
    }

    fn check(&self, args: &DiskArgs) -> Result<(), &'static str> {
        match args.on_reactors {
            Some(_) => Err("--on-reactors is not for --nbd, because a connection has its reactor \
                            before it has chosen a disk"),
            None => Ok(()),
        }
    }

    fn listens(&self, args: &DiskArgs) -> Option<Listens> {
        match args.nbd.as_ref()? {
            NbdAddress::Unix(path) => Some(shared(path)),
            NbdAddress::Inherited(name) => Some(inherited(name)),
            NbdAddress::Tcp { .. } => None,
        }
    }

    fn tcp(&self, args: &DiskArgs) -> Option<(String, u16)> {
        match args.nbd.as_ref()? {
            NbdAddress::Tcp { host, port } if *port != 0 => Some((host.clone(), *port)),
            _ => None,
        }
    }

    fn claim(&self, args: &DiskArgs) -> Option<Claim> {
        let address = args.nbd.as_ref()?;
        let name = args.nbd_name.clone().unwrap_or_else(|| args.name());
        let says = format!("has that name at {address}");
        Some(Claim { of: format!("{name} at {}", address.whole()), says })
    }

    fn is_handed_last(&self) -> bool {
        true
    }

    fn parcels(&self) -> Option<&'static str> {
        Some(nbd::KIND)
    }

    fn way(&self, args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
        let address = args.nbd.clone()?;
        let (own, common) = (args.clone(), common.clone());
        at(address.to_string(), args, move |disk, _| {
            let listen = || match &address {
                NbdAddress::Tcp { host, port } => common.listen_tcp(host, *port),
                NbdAddress::Unix(path) => common.listen(&shared(path)),
                NbdAddress::Inherited(name) => common.listen(&inherited(name)),
            };
            let mut servers = common.nbd.lock().unwrap_or_else(PoisonError::into_inner);
            let offer = servers.offer(&address, disk, &own, listen).map_err(WayError::caller)?;
            if let Some((parcel, _)) = common.handed.take(disk.name(), nbd::KIND) {
                offer.resume(parcel)?;
            }
            Ok(Box::new(offer))
        })
    }
}
