//! Metrics of the process, its reactors and the devices that disks share.

use crate::figures::{Figures, GroupFigures, LimitFigures};

use super::disks::{Emit, limits, optional};
use super::text::{Family, Kind, Text, Value, label};

const BUILD: Family = Family {
    name: "blockyard_build_info",
    kind: Kind::Gauge,
    help: "Version of the server. The value is always 1.",
};
const DISKS: Family =
    Family { name: "blockyard_disks", kind: Kind::Gauge, help: "Number of open disks." };
const FAILED: Family = Family {
    name: "blockyard_disks_failed",
    kind: Kind::Gauge,
    help: "Number of disks of the configuration that could not be opened.",
};
const STARTED: Family = Family {
    name: "process_start_time_seconds",
    kind: Kind::Gauge,
    help: "Start of the server, in seconds since 1970.",
};
const CPU: Family = Family {
    name: "process_cpu_seconds_total",
    kind: Kind::Counter,
    help: "CPU time of the server, in seconds.",
};
const RESIDENT: Family = Family {
    name: "process_resident_memory_bytes",
    kind: Kind::Gauge,
    help: "Resident memory of the server, with guest memory that it has touched.",
};
const THREADS: Family =
    Family { name: "process_threads", kind: Kind::Gauge, help: "Number of threads of the server." };
const OPEN: Family = Family {
    name: "process_open_fds",
    kind: Kind::Gauge,
    help: "Number of open file descriptors.",
};
const MAX_OPEN: Family = Family {
    name: "process_max_fds",
    kind: Kind::Gauge,
    help: "Maximum number of open file descriptors.",
};
const BUSY: Family = Family {
    name: "blockyard_reactor_busy_seconds_total",
    kind: Kind::Counter,
    help: "CPU time of the reactor's thread. Its rate is the utilisation of the reactor.",
};
const WAITED: Family = Family {
    name: "blockyard_reactor_runnable_seconds_total",
    kind: Kind::Counter,
    help: "Time that the reactor was ready to run while other threads had its processor.",
};
const ITERATIONS: Family = Family {
    name: "blockyard_reactor_iterations_total",
    kind: Kind::Counter,
    help: "Iterations of the reactor's event loop.",
};
const CAPACITY: Family = Family {
    name: "blockyard_device_capacity_ratio",
    kind: Kind::Gauge,
    help: "Part of its known capacity that a shared device shows now.",
};
const WINDOW: Family = Family {
    name: "blockyard_device_window_seconds",
    kind: Kind::Gauge,
    help: "Work that may be in flight at a shared device, in seconds of device time.",
};

const WRITE_BACK: Family = Family {
    name: "blockyard_write_back_bytes_per_second",
    kind: Kind::Gauge,
    help: "Rate of the host's write-back that the policy of dirty pages last saw.",
};
const GROUP_WEIGHT: Family = Family {
    name: "blockyard_group_weight",
    kind: Kind::Gauge,
    help: "Weight of the group, which its busy disks divide.",
};

/// What a group's disks may use together: the family, and its values for a group.
type GroupMetric = (Family, fn(&LimitFigures, Emit<'_>));

const GROUP_LIMITS: [GroupMetric; 6] = [
    (
        group("blockyard_group_limit_requests_per_second", "Limit of the group's operations."),
        |l, emit| limits(emit, [&l.iops, &l.iops_read, &l.iops_write], |limit| limit.rate.into()),
    ),
    (
        group(
            "blockyard_group_limit_burst_requests_per_second",
            "Limit of the group's operations during a burst.",
        ),
        |l, emit| {
            let all = [&l.iops, &l.iops_read, &l.iops_write];
            limits(emit, all, |limit| limit.max.unwrap_or(limit.rate).into())
        },
    ),
    (group("blockyard_group_limit_bytes_per_second", "Limit of the group's bytes."), |l, emit| {
        limits(emit, [&l.bps, &l.bps_read, &l.bps_write], |limit| limit.rate.into())
    }),
    (
        group(
            "blockyard_group_limit_burst_bytes_per_second",
            "Limit of the group's bytes during a burst.",
        ),
        |l, emit| {
            let all = [&l.bps, &l.bps_read, &l.bps_write];
            limits(emit, all, |limit| limit.max.unwrap_or(limit.rate).into())
        },
    ),
    (
        group(
            "blockyard_group_reserved_requests_per_second",
            "Operations that the group is guaranteed.",
        ),
        |l, emit| optional(emit, l.reserve_iops),
    ),
    (
        group("blockyard_group_reserved_bytes_per_second", "Bytes that the group is guaranteed."),
        |l, emit| optional(emit, l.reserve_bps),
    ),
];

const fn group(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Gauge, help }
}

/// Adds the metrics of the server.
pub fn write(text: &mut Text, figures: &Figures) {
    text.family(&BUILD);
    text.sample(&BUILD, "", &label("version", &figures.version), 1u64.into());
    text.single(DISKS, figures.disks.len() as u64);
    text.single(FAILED, figures.disks_failed);
    let process = &figures.process;
    text.single(STARTED, process.started);
    text.single(CPU, process.cpu);
    text.single(RESIDENT, process.resident_bytes);
    text.single(THREADS, process.threads);
    text.single(OPEN, process.open_descriptors);
    if let Some(max) = process.max_descriptors {
        text.single(MAX_OPEN, max);
    }
    text.single(WRITE_BACK, figures.write_back);
    let each = || (0..).map(|at: u32| label("reactor", &at.to_string())).zip(&figures.reactors);
    family(text, &BUSY, each().map(|(labels, reactor)| (labels, reactor.busy.into())));
    let waited = each().filter_map(|(labels, reactor)| Some((labels, reactor.waited?.into())));
    family(text, &WAITED, waited);
    family(text, &ITERATIONS, each().map(|(labels, reactor)| (labels, reactor.iterations.into())));
    let each = || figures.devices.iter().map(|device| (label("device", &device.name), device));
    family(text, &CAPACITY, each().map(|(labels, device)| (labels, device.capacity.into())));
    family(text, &WINDOW, each().map(|(labels, device)| (labels, device.window.into())));
    write_groups(text, &figures.groups);
}

/// Adds the metrics of the groups of disks.
fn write_groups(text: &mut Text, groups: &[GroupFigures]) {
    let each = || groups.iter().map(|group| (label("group", &group.name), group));
    family(text, &GROUP_WEIGHT, each().map(|(labels, group)| (labels, group.weight.into())));
    for (metric, values) in &GROUP_LIMITS {
        let mut samples = Vec::new();
        for (name, group) in each() {
            values(&group.limits, &mut |more, value| {
                let comma = if more.is_empty() { "" } else { "," };
                samples.push((format!("{name}{comma}{more}"), value));
            });
        }
        family(text, metric, samples.into_iter());
    }
}

/// Adds a family with its samples, if it has any.
fn family(text: &mut Text, family: &Family, samples: impl Iterator<Item = (String, Value)>) {
    let mut samples = samples.peekable();
    if samples.peek().is_some() {
        text.family(family);
    }
    for (labels, value) in samples {
        text.sample(family, "", &labels, value);
    }
}
