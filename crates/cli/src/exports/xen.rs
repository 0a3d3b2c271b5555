//! `--xen`: a disk of a Xen guest.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_export::xen::{Xen, XenOptions, records};
use blockyard_ring::xen::Host;
use blockyard_yard::{Way, WayError};

use super::{Claim, Common, at, ended};
use crate::options::disk::DiskArgs;
use crate::options::xen::XenDevice;

pub(super) struct Kind;

impl super::Kind for Kind {
    fn option(&self) -> &'static str {
        "--xen DOMID:DEVICE"
    }

    fn is_requested(&self, args: &DiskArgs) -> bool {
        args.xen.is_some()
    }

    fn claim(&self, args: &DiskArgs) -> Option<Claim> {
        let device = args.xen?.to_string();
        Some(Claim { says: format!("is {device}"), of: device })
    }

    fn control(&self) -> Option<&'static str> {
        Some("/dev/xen/gntdev")
    }

    fn devices(&self) -> Vec<PathBuf> {
        [PathBuf::from("/dev/xen")].into_iter().chain(records()).collect()
    }

    fn has_toolstacks(&self) -> bool {
        true
    }

    fn way(&self, args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
        let device = args.xen?;
        let (queues, data, attached) = (args.queues, args.xen_data, common.attached);
        at(device, args, move |disk, reactors| {
            let XenDevice { domain, name: device } = device;
            let options = XenOptions { domain, device, queues, data, records: records() };
            let ended = ended(disk.name().to_string(), attached);
            let xen = Xen::start(disk.clone(), &options, &Host::Xen, reactors.clone(), ended);
            Ok(Box::new(xen.map_err(WayError::caller)?))
        })
    }
}
