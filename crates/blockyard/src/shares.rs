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
use blockyard_sched::{Calibration, Host, Means, Share};

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
                tracing::info!(group = name, "its knobs were changed");
            }
        }
    }
}
