//! The shares of the program's disks: on which device each of them lies, what is known of that, and groups.
//!
//! In: the configuration, and disks as they are opened. Out: a [`Share`] for each. What must hold: disks of one device are
//! on one device here; a change of knobs is felt by those who wait already.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use blockyard_bench::costs::{DeviceCosts, USUAL, read};
use blockyard_disk::{Source, sched_time};
use blockyard_sched::{Calibration, Figures, Host, Means, Share};

use crate::cli::{DiskArgs, ServeOptions};
use crate::config::Config;
use crate::knobs::GroupArgs;

pub struct Shares {
    host: Host,
    groups: BTreeMap<String, GroupArgs>,
    fair: bool,
    costs: Vec<DeviceCosts>,
}

impl Shares {
    pub fn new(options: &ServeOptions, config: &Config) -> anyhow::Result<Self> {
        let costs = match options.costs.as_ref().or(config.costs.as_ref()) {
            Some(path) => read(path)?,
            None if Path::new(USUAL).exists() => read(Path::new(USUAL))?,
            None => Vec::new(),
        };
        let fair = !options.no_fair_share && config.fair_share != Some(false);
        Ok(Shares { host: Host::default(), groups: config.groups.clone(), fair, costs })
    }

    /// For a disk that is opened.
    pub fn open(&self, args: &DiskArgs, source: &Source) -> anyhow::Result<Arc<Share>> {
        let lies_on = source.device().with_context(|| format!("image {}: finding its device", args.image.display()))?;
        let rotational = lies_on.as_ref().is_some_and(|(_, rotational)| *rotational);
        let names = [args.device.as_deref(), lies_on.as_ref().map(|(name, _)| name.as_str())];
        let means = self.means(names, rotational);
        let device = names.into_iter().flatten().next().filter(|_| self.fair).map(|name| (name, &means));
        let group = args.group.as_deref().map(|name| {
            let knobs = self.groups.get(name).map(GroupArgs::knobs).unwrap_or_default();
            (name, knobs)
        });
        let group = group.as_ref().map(|(name, knobs)| (*name, knobs));
        Ok(self.host.share(device, group, &args.knobs()))
    }

    /// What was measured of the device under one of its names, or what such devices do.
    fn means(&self, names: [Option<&str>; 2], rotational: bool) -> Means {
        let usual = if rotational { Means::ROTATIONAL } else { Means::FLASH };
        let known = names.iter().flatten().find_map(|name| self.costs.iter().find(|costs| costs.device == *name));
        known.map_or(usual, |known| {
            let calibration = Calibration {
                costs: known.costs(),
                window: Some(known.window).filter(|window| *window > 0),
                alone_read: known.base_latency_read,
                alone_write: known.base_latency_write,
            };
            Means { calibration, ..usual }
        })
    }

    /// Other knobs for groups, from now on. Those that are there no more are kept for disks that cannot be opened otherwise.
    pub fn set_groups(&mut self, groups: &BTreeMap<String, GroupArgs>) {
        for (name, group) in groups {
            if self.groups.insert(name.clone(), group.clone()).is_some_and(|old| old != *group) {
                self.host.set_group(name, &group.knobs(), sched_time());
            }
        }
    }
}

/// What became of a disk's share, for a person; means are of so many operations.
pub fn describe(share: &Share, operations: u64) -> String {
    let Figures { weight, owed, used, donated, limited, waited, service, alone, waiting } = share.figures();
    let mean = |nanos: u64| nanos as f64 / 1e3 / operations.max(1) as f64;
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let waits = format!("{:.0} us for its limits, {:.0} us for its neighbours", mean(limited), mean(waited));
    let Some(device) = share.device() else {
        return format!("no device is shared; each operation waited {waits}; {waiting} wait");
    };
    format!(
        "weight {weight:.1} on device {}: owed {:.3} s, used {:.3} s, donated {:.3} s; each operation waited {waits}; the \
         device took {:.0} us, without neighbours {:.0} us; {waiting} wait; the device shows {:.0}% of its capacity, with {:.0} us \
         of work on the way at most",
        device.name(),
        seconds(owed),
        seconds(used),
        seconds(donated),
        mean(service),
        mean(alone),
        device.capacity() * 100.0,
        device.window() as f64 / 1e3,
    )
}
