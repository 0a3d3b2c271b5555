//! The shares of the yard's disks: on which device each of them lies, what is known of that device,
//! and groups.
//!
//! In: settings of disks and groups. Out: a [`Share`] for each disk. What must hold: disks on one
//! device share one [`Host`] entry; a change of a group's knobs reaches requests that wait already.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use blockyard_disk::{Source, sched_time};
use blockyard_sched::{Calibration, DeviceProfile, Host, Knobs, Share};

use crate::interface::error::YardError;
use crate::interface::settings::DiskSettings;

/// The measured calibration of a device.
#[derive(Clone, Debug)]
pub struct MeasuredDevice {
    /// Name of the device: the kernel's, or the `device` setting of a disk.
    pub device: String,
    pub calibration: Calibration,
}

/// The devices and groups that disks share; see the module documentation.
pub struct Shares {
    host: Host,
    groups: RwLock<BTreeMap<String, Knobs>>,
    is_fair: bool,
    measured: Vec<MeasuredDevice>,
}

impl Shares {
    /// Creates the shares. If `is_fair` is false, disks are not scheduled against each other, and
    /// only their limits apply.
    pub fn new(
        is_fair: bool,
        measured: Vec<MeasuredDevice>,
        groups: BTreeMap<String, Knobs>,
    ) -> Self {
        let host = Host::reporting(|shortfall| tracing::warn!("{shortfall}"));
        Shares { host, groups: RwLock::new(groups), is_fair, measured }
    }

    /// Creates the share of a disk. `source` is its open image.
    pub fn open(&self, settings: &DiskSettings, source: &Source) -> Result<Arc<Share>, YardError> {
        let image = || settings.image.path.clone();
        let lies_on =
            source.device().map_err(|source| YardError::Device { image: image(), source })?;
        let rotational = lies_on.as_ref().is_some_and(|(_, rotational)| *rotational);
        let names = [settings.device.as_deref(), lies_on.as_ref().map(|(name, _)| name.as_str())];
        let profile = self.profile(names, rotational);
        let device = names
            .into_iter()
            .flatten()
            .next()
            .filter(|_| self.is_fair)
            .map(|name| (name, &profile));
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        let group = settings
            .group
            .as_deref()
            .map(|name| (name, groups.get(name).cloned().unwrap_or_default()));
        let group = group.as_ref().map(|(name, knobs)| (*name, knobs));
        let share = self.host.share(device, group, &settings.knobs);
        share.set_name(&settings.name);
        Ok(share)
    }

    /// Returns the measured profile of the device under one of its names, or a typical one.
    fn profile(&self, names: [Option<&str>; 2], rotational: bool) -> DeviceProfile {
        let usual = if rotational { DeviceProfile::ROTATIONAL } else { DeviceProfile::FLASH };
        let known = names
            .iter()
            .flatten()
            .find_map(|name| self.measured.iter().find(|known| known.device == *name));
        known.map_or(usual, |known| DeviceProfile { calibration: known.calibration, ..usual })
    }

    /// Returns the knobs of all groups.
    pub fn groups(&self) -> BTreeMap<String, Knobs> {
        self.groups.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the knobs of groups. A group that `groups` does not name keeps its knobs, because
    /// disks may still be in it.
    pub fn set_groups(&self, groups: BTreeMap<String, Knobs>) {
        let mut known = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        for (name, knobs) in groups {
            // Disks of a group without knobs of its own have one with the usual knobs.
            let old = known.insert(name.clone(), knobs.clone()).unwrap_or_default();
            if old != knobs {
                self.host.set_group(&name, &knobs, sched_time());
            }
        }
    }
}
