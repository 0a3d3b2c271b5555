//! `--ublk`: a block device of this host.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_disk::{Disk, Source};
use blockyard_export::ublk::{PARCELS, Ublk, UblkOptions, number_in};
use blockyard_yard::{Way, WayError};

use super::{Claim, Common, at, ended, shape};
use crate::options::disk::DiskArgs;
use crate::options::values::UblkNumber;

pub(super) struct Kind;

impl super::Kind for Kind {
    fn option(&self) -> &'static str {
        "--ublk"
    }

    fn is_requested(&self, args: &DiskArgs) -> bool {
        args.ublk.is_some()
    }

    fn claim(&self, args: &DiskArgs) -> Option<Claim> {
        let device = format!("/dev/ublkb{}", number(args)?);
        Some(Claim { says: format!("is {device}"), of: device })
    }

    fn control(&self) -> Option<&'static str> {
        Some("/dev/ublk-control")
    }

    fn devices(&self) -> Vec<PathBuf> {
        // The driver makes the devices of its disks later, with new names.
        vec!["/dev".into()]
    }

    fn parcels(&self) -> Option<&'static str> {
        Some(PARCELS)
    }

    /// A device that no server continues would hang, with the file system on it.
    fn must_continue(&self) -> bool {
        true
    }

    fn way(&self, args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
        let address = match args.ublk? {
            UblkNumber::Any => "a ublk device".to_string(),
            UblkNumber::Number(number) => format!("/dev/ublkb{number}"),
        };
        let (own, attached, handed) = (args.clone(), common.attached, common.handed.clone());
        at(address, args, move |disk, reactors| {
            let mut options = ublk_options(&own);
            options.earlier = earlier(&own, disk);
            let left = handed.take(disk.name(), PARCELS);
            if let Some(id) = left.and_then(|(parcel, _)| number_in(&parcel)) {
                if let Some(other) = options.id.filter(|other| *other != id) {
                    let what = format!(
                        "the other server has the disk as /dev/ublkb{id}, not as /dev/ublkb{other}"
                    );
                    return Err(WayError::caller(what));
                }
                options.id = Some(id);
            }
            let ended = ended(disk.name().to_string(), attached);
            let ublk = Ublk::start(disk.clone(), &options, reactors, ended);
            Ok(Box::new(ublk.map_err(WayError::caller)?))
        })
    }
}

/// Returns the options of a disk's ublk device.
pub fn ublk_options(args: &DiskArgs) -> UblkOptions {
    let (id, shape) = (number(args), shape(args));
    let (identity, file) = (args.identity(), args.file_identity());
    UblkOptions { id, shape, identity, file, earlier: Vec::new() }
}

/// Returns the identities that the disk may have had before a snapshot, without a name of its own.
/// Such a disk has the file name of its image. `ctl snapshot --persist` makes that its name, and
/// the image is then below the overlay. (A disk with another name over the same backing image is
/// another disk.)
fn earlier(args: &DiskArgs, disk: &Disk) -> Vec<(String, Option<u64>)> {
    let (Some(name), Source::Chain(chain)) = (&args.name, disk.source()) else {
        return Vec::new();
    };
    let below = chain.layers().iter().skip(1).map(|layer| {
        let image = layer.file.path().to_path_buf();
        DiskArgs { name: None, image, ..args.clone() }
    });
    let same = below.filter(|before| before.name() == *name);
    same.map(|before| (before.identity(), before.file_identity())).collect()
}

/// Returns the configured number of the device.
fn number(args: &DiskArgs) -> Option<u32> {
    match args.ublk? {
        UblkNumber::Number(number) => Some(number),
        UblkNumber::Any => None,
    }
}
