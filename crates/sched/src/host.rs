//! The devices and groups of a process, by name.
//!
//! In: disks, as they are opened. Out: a [`Share`] for each, on the device that holds its image.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::Time;
use crate::cost::{Calibration, Costs};
use crate::device::{Device, Shortfall};
use crate::group::Group;
use crate::in_flight_window::DeviceClass;
use crate::knobs::Knobs;
use crate::share::Share;

/// Properties of a device that are known before its first disk is opened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceProfile {
    pub class: DeviceClass,
    pub calibration: Calibration,
}

impl DeviceProfile {
    /// A typical flash device.
    pub const FLASH: DeviceProfile =
        DeviceProfile { class: DeviceClass::FLASH, calibration: Calibration::of(Costs::FLASH) };
    /// A typical rotational device.
    pub const ROTATIONAL: DeviceProfile = DeviceProfile {
        class: DeviceClass::ROTATIONAL,
        calibration: Calibration::of(Costs::ROTATIONAL),
    };
}

/// All devices and groups. One that no disk uses is dropped.
#[derive(Debug)]
pub struct Host {
    names: Mutex<Names>,
    report: fn(&Shortfall),
}

impl Default for Host {
    fn default() -> Self {
        Host::reporting(|_| {})
    }
}

#[derive(Debug, Default)]
struct Names {
    devices: HashMap<String, Weak<Device>>,
    groups: HashMap<String, Weak<Group>>,
    shares: Vec<Weak<Share>>,
    /// Number of `shares` above which those of closed disks are removed.
    prune_above: usize,
}

impl Host {
    /// Creates an empty host. `report` is called on the thread of a reactor if a device gives less
    /// than what is reserved on it, at most once a minute for each device.
    pub fn reporting(report: fn(&Shortfall)) -> Self {
        Host { names: Mutex::default(), report }
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the share of a disk. `device`: name and profile of the device; None: the disk is not
    /// scheduled against others. `group`: name and knobs of the disk's group.
    pub fn share(
        &self,
        device: Option<(&str, &DeviceProfile)>,
        group: Option<(&str, &Knobs)>,
        knobs: &Knobs,
    ) -> Arc<Share> {
        let mut names = self.names();
        let device = device.map(|(name, profile)| {
            let known = names.devices.get(name).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let device = Device::new(name, profile.class, &profile.calibration, self.report);
                let device = Arc::new(device);
                names.devices.insert(name.to_string(), Arc::downgrade(&device));
                device
            })
        });
        let group = group.map(|(name, knobs)| {
            let known = names.groups.get(name).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let group = Arc::new(Group::new(name, knobs));
                names.groups.insert(name.to_string(), Arc::downgrade(&group));
                group
            })
        });
        let share = Arc::new(Share::new(device, group, knobs));
        if names.shares.len() > names.prune_above {
            names.shares.retain(|share| share.strong_count() > 0);
            names.prune_above = 2 * names.shares.len();
        }
        names.shares.push(Arc::downgrade(&share));
        share
    }

    /// Changes the knobs of a group. Does nothing if no disk is in the group.
    pub fn set_group(&self, name: &str, knobs: &Knobs, now: Time) {
        let names = self.names();
        let Some(group) = names.groups.get(name).and_then(Weak::upgrade) else { return };
        group.set(knobs);
        for share in names.shares.iter().filter_map(Weak::upgrade) {
            if share.group().is_some_and(|its| Arc::ptr_eq(its, &group)) {
                share.group_changed(now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, Limits};

    #[test]
    fn disks_on_a_device_of_the_same_name_share_it() {
        let host = Host::default();
        let flash = Some(("a", &DeviceProfile::FLASH));
        let (one, two) = (
            host.share(flash, None, &Knobs::default()),
            host.share(flash, None, &Knobs::default()),
        );
        let other = host.share(Some(("b", &DeviceProfile::FLASH)), None, &Knobs::default());
        let device = |share: &Arc<Share>| share.device().map(Arc::as_ptr);
        assert_eq!(device(&one), device(&two));
        assert_ne!(device(&one), device(&other));
        assert!(host.share(None, None, &Knobs::default()).is_free());
    }

    #[test]
    fn the_weight_of_a_group_is_divided_among_its_disks() {
        let host = Host::default();
        let weight = |weight| Knobs { weight, ..Knobs::default() };
        let group = weight(300);
        let share =
            |own| host.share(Some(("a", &DeviceProfile::FLASH)), Some(("g", &group)), &weight(own));
        let (one, two) = (share(100), share(200));
        for (now, share) in [(1, &one), (2, &two)] {
            let read = crate::Operation {
                kind: crate::OperationKind::Read,
                bytes: 4096,
                sequential: false,
                requests: 1,
            };
            share.on_reactor().ask(now, &read).expect("there is room");
        }
        assert_eq!((one.figures().weight, two.figures().weight), (100.0, 200.0));
        host.set_group("g", &weight(30), 3);
        assert_eq!((one.figures().weight, two.figures().weight), (10.0, 20.0));
        one.set(&weight(200), 4);
        assert_eq!((one.figures().weight, two.figures().weight), (15.0, 15.0));
    }

    #[test]
    fn a_change_of_a_group_reaches_each_of_its_disks() {
        const NOW: Time = 1_000_000_000;
        let host = Host::default();
        let rate = Limit { rate: 1000, max: None, length: std::time::Duration::from_secs(1) };
        let limits = Limits { bps: Some(rate), ..Limits::default() };
        let group = Knobs { limits, ..Knobs::default() };
        let disk = || host.share(None, Some(("g", &group)), &Knobs::default());
        let closed = disk();
        let disks = [disk(), disk(), disk()];
        drop(closed);
        let disks = disks.into_iter().chain([disk()]).collect::<Vec<_>>();
        let kind = crate::OperationKind::Write;
        let write = crate::Operation { kind, bytes: 10_000, sequential: false, requests: 1 };
        for disk in &disks {
            let _ = disk.force(NOW, &write);
            assert!(disk.paused_until(NOW).is_some());
        }
        host.set_group("g", &Knobs::default(), NOW);
        for disk in &disks {
            assert_eq!(disk.paused_until(NOW), None, "the group has no limit now");
        }
    }
}
