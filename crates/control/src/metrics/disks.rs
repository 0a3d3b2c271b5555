//! Metrics of each disk.

use std::collections::BTreeMap;

use crate::figures::{DiskFigures, Figures, HistogramFigures, OperationFigures};
use crate::json::types::LimitSetting;

use super::text::{Family, Kind, Text, Value, label};

/// Adds a sample: further labels besides the disk's, and the value.
pub(super) type Emit<'a> = &'a mut dyn FnMut(&str, Value);

/// A family, and the samples of a disk.
struct Metric {
    family: Family,
    samples: fn(&DiskFigures, Emit<'_>),
}

const fn metric(
    name: &'static str,
    kind: Kind,
    help: &'static str,
    samples: fn(&DiskFigures, Emit<'_>),
) -> Metric {
    Metric { family: Family { name, kind, help }, samples }
}

const fn counter(
    name: &'static str,
    help: &'static str,
    samples: fn(&DiskFigures, Emit<'_>),
) -> Metric {
    metric(name, Kind::Counter, help, samples)
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    samples: fn(&DiskFigures, Emit<'_>),
) -> Metric {
    metric(name, Kind::Gauge, help, samples)
}

/// Labels of the operations: those that merge, those that have a length, and the flush.
const OPERATIONS: [(&str, &str); 5] = [
    ("read", "operation=\"read\""),
    ("write", "operation=\"write\""),
    ("discard", "operation=\"discard\""),
    ("write-zeroes", "operation=\"write-zeroes\""),
    ("flush", "operation=\"flush\""),
];
const MERGED: &[(&str, &str)] = OPERATIONS.split_at(2).0;
const WITH_LENGTH: &[(&str, &str)] = OPERATIONS.split_at(4).0;

/// Adds one sample for each of `operations`, also for those that have not occurred yet. So a rate
/// includes the first request.
fn each(
    operations: &[(&str, &str)],
    disk: &DiskFigures,
    emit: Emit<'_>,
    value: fn(&OperationFigures) -> u64,
) {
    for (name, labels) in operations {
        emit(labels, disk.operations.get(*name).map_or(0, value).into());
    }
}

pub(super) fn limits(
    emit: Emit<'_>,
    limits: [&Option<LimitSetting>; 3],
    value: fn(&LimitSetting) -> Value,
) {
    for (operation, limit) in ["all", "read", "write"].into_iter().zip(limits) {
        if let Some(limit) = limit {
            emit(&label("operation", operation), value(limit));
        }
    }
}

/// All metrics of disks except histograms.
const METRICS: &[Metric] = &[
    gauge("blockyard_disk_info", "Properties of the disk. The value is always 1.", |disk, emit| {
        let labels = [
            label("image", &disk.image),
            label("device", disk.device.as_deref().unwrap_or_default()),
            label("group", disk.group.as_deref().unwrap_or_default()),
        ];
        emit(&labels.join(","), 1u64.into());
    }),
    gauge("blockyard_disk_size_bytes", "Size of the disk.", |disk, emit| {
        emit("", disk.size.into());
    }),
    gauge("blockyard_disk_read_only", "1 if the disk refuses writes.", |disk, emit| {
        emit("", disk.read_only.into());
    }),
    gauge(
        "blockyard_disk_poisoned",
        "1 if writes fail because of a failed flush, until the image is opened again.",
        |disk, emit| emit("", disk.poisoned.into()),
    ),
    gauge(
        "blockyard_disk_paused",
        "1 if requests wait for space on the host, until the disk is resumed.",
        |disk, emit| emit("", (disk.paused > 0).into()),
    ),
    gauge("blockyard_disk_drained", "1 if an operator holds requests back.", |disk, emit| {
        emit("", disk.drained.into());
    }),
    gauge("blockyard_disk_clients", "Connected clients of the disk's exports.", |disk, emit| {
        by_name(emit, "export", &disk.clients);
    }),
    gauge(
        "blockyard_disk_held_back_max_seconds",
        "Longest time for which a snapshot, commit, stream, backup, growth or drain has held \
         requests.",
        |disk, emit| emit("", disk.held_back.into()),
    ),
    counter("blockyard_disk_requests_total", "Requests that have ended.", |disk, emit| {
        each(&OPERATIONS, disk, emit, |operation| operation.requests);
    }),
    counter("blockyard_disk_request_errors_total", "Requests that have failed.", |disk, emit| {
        each(&OPERATIONS, disk, emit, |operation| operation.errors);
    }),
    counter(
        "blockyard_disk_request_bytes_total",
        "Bytes of requests that have succeeded.",
        |disk, emit| each(WITH_LENGTH, disk, emit, |operation| operation.bytes),
    ),
    counter(
        "blockyard_disk_merged_requests_total",
        "Requests that were merged into the operation of an adjacent request.",
        |disk, emit| each(MERGED, disk, emit, |operation| operation.merged),
    ),
    gauge("blockyard_disk_in_flight_requests", "Requests without an answer.", |disk, emit| {
        emit("", disk.in_flight.into());
    }),
    gauge(
        "blockyard_disk_oldest_request_seconds",
        "Age of the oldest request without an answer; 0 if there is none.",
        |disk, emit| emit("", disk.oldest.unwrap_or(0.0).into()),
    ),
    counter(
        "blockyard_disk_flushes_requested_total",
        "Flushes that clients or durable writes needed.",
        |disk, emit| emit("", disk.flushes.requested.into()),
    ),
    counter(
        "blockyard_disk_syncs_total",
        "Syncs of the image that were begun for flushes. Flushes that wait together share one.",
        |disk, emit| emit("", disk.flushes.syncs.into()),
    ),
    counter(
        "blockyard_disk_metadata_cache_hits_total",
        "Lookups that found where data lie in an L2 table in memory, or in an answer of a target. \
         Also lookups that loaded the table first.",
        |disk, emit| emit("", disk.metadata.hits.into()),
    ),
    counter(
        "blockyard_disk_metadata_cache_misses_total",
        "Lookups that loaded an L2 table, or asked the target, to find where data lie.",
        |disk, emit| emit("", disk.metadata.misses.into()),
    ),
    counter(
        "blockyard_disk_throttled_seconds_total",
        "Sum of the times that operations waited for the disk's limits, or for other disks.",
        |disk, emit| {
            emit("reason=\"limits\"", disk.share.limited.into());
            emit("reason=\"share\"", disk.share.waited.into());
        },
    ),
    gauge(
        "blockyard_disk_queued_operations",
        "Operations that wait for the disk's limits or for other disks.",
        |disk, emit| emit("", disk.share.queued.into()),
    ),
    gauge(
        "blockyard_disk_share_weight",
        "Effective weight: the disk's own, or its part of its group's weight.",
        |disk, emit| emit("", disk.share.weight.into()),
    ),
    counter(
        "blockyard_disk_share_entitled_seconds_total",
        "Device time that the share allowed while the disk was busy.",
        |disk, emit| of_device(disk, emit, disk.share.entitled),
    ),
    counter(
        "blockyard_disk_share_used_seconds_total",
        "Device time that the disk used while it was busy.",
        |disk, emit| of_device(disk, emit, disk.share.used),
    ),
    counter(
        "blockyard_disk_share_donated_seconds_total",
        "Device time that the disk left to others while it was busy.",
        |disk, emit| of_device(disk, emit, disk.share.donated),
    ),
    gauge(
        "blockyard_disk_limit_requests_per_second",
        "Limit of the disk's operations.",
        |disk, emit| limits(emit, iops(disk), |limit| limit.rate.into()),
    ),
    gauge(
        "blockyard_disk_limit_burst_requests_per_second",
        "Limit of the disk's operations during a burst.",
        |disk, emit| limits(emit, iops(disk), |limit| limit.max.unwrap_or(limit.rate).into()),
    ),
    gauge("blockyard_disk_limit_bytes_per_second", "Limit of the disk's bytes.", |disk, emit| {
        limits(emit, bps(disk), |limit| limit.rate.into())
    }),
    gauge(
        "blockyard_disk_limit_burst_bytes_per_second",
        "Limit of the disk's bytes during a burst.",
        |disk, emit| limits(emit, bps(disk), |limit| limit.max.unwrap_or(limit.rate).into()),
    ),
    gauge(
        "blockyard_disk_reserved_requests_per_second",
        "Operations that the disk is guaranteed.",
        |disk, emit| optional(emit, disk.limits.reserve_iops),
    ),
    gauge(
        "blockyard_disk_reserved_bytes_per_second",
        "Bytes that the disk is guaranteed.",
        |disk, emit| optional(emit, disk.limits.reserve_bps),
    ),
    gauge(
        "blockyard_disk_latency_target_seconds",
        "Mean service time that the disk must get while it stays within its share.",
        |disk, emit| optional(emit, disk.limits.latency_target),
    ),
    counter(
        "blockyard_disk_policy_decisions_total",
        "Decisions of the adaptive policies.",
        |disk, emit| {
            let DiskFigures { policies, .. } = disk;
            by_name(emit, "policy=\"polling\",decision", &policies.polling);
            by_name(emit, "policy=\"placement\",decision", &policies.placement);
            by_name(emit, "policy=\"writes\",decision", &policies.writes);
            by_name(emit, "policy=\"trials\",decision", &policies.trials);
            by_name(emit, "policy=\"looks\",decision", &policies.looks);
            by_name(emit, "policy=\"slow-calls\",decision", &policies.slow_calls);
        },
    ),
    gauge(
        "blockyard_disk_policy_requests_per_second",
        "Rate of requests in the last time slice of a polling trial with the strategy.",
        |disk, emit| by_name(emit, "decision", &disk.policies.polling_rates),
    ),
    gauge(
        "blockyard_disk_policy_last_seconds",
        "Time that a policy saw or chose last; 0 before the first one.",
        |disk, emit| by_name(emit, "what", &disk.policies.last),
    ),
    counter(
        "blockyard_disk_signalled_completions_total",
        "Completions for which the guest wanted a signal.",
        |disk, emit| emit("", disk.policies.completions.into()),
    ),
    counter("blockyard_disk_signals_total", "Signals to the guest.", |disk, emit| {
        emit("", disk.policies.signals_sent.into())
    }),
];

const QUEUE: Family = Family {
    name: "blockyard_disk_request_queue_seconds",
    kind: Kind::Histogram,
    help: "Time from a request's arrival to its admission: limits, shares and quiesces.",
};
const SERVICE: Family = Family {
    name: "blockyard_disk_request_service_seconds",
    kind: Kind::Histogram,
    help: "Time of a request in the image and below.",
};

fn iops(disk: &DiskFigures) -> [&Option<LimitSetting>; 3] {
    [&disk.limits.iops, &disk.limits.iops_read, &disk.limits.iops_write]
}

fn bps(disk: &DiskFigures) -> [&Option<LimitSetting>; 3] {
    [&disk.limits.bps, &disk.limits.bps_read, &disk.limits.bps_write]
}

/// Adds the sample of a disk that shares a device.
fn of_device(disk: &DiskFigures, emit: Emit<'_>, value: f64) {
    if disk.device.is_some() {
        emit("", value.into());
    }
}

pub(super) fn optional(emit: Emit<'_>, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        emit("", value.into());
    }
}

fn by_name<V: Copy + Into<Value>>(emit: Emit<'_>, name: &str, values: &BTreeMap<String, V>) {
    for (key, value) in values {
        emit(&label(name, key), (*value).into());
    }
}

/// Adds the metrics of all disks.
pub fn write(text: &mut Text, figures: &Figures) {
    let names: Vec<_> = figures.disks.iter().map(|disk| label("disk", &disk.name)).collect();
    let disks = || names.iter().zip(&figures.disks);
    let mut labels = String::new();
    for Metric { family, samples } in METRICS {
        let mut begun = false;
        for (name, disk) in disks() {
            samples(disk, &mut |more, value| {
                if !std::mem::replace(&mut begun, true) {
                    text.family(family);
                }
                join(&mut labels, &[name, more]);
                text.sample(family, "", &labels, value);
            });
        }
    }
    let bounds = bounds(&figures.bounds_us);
    let queue: fn(&OperationFigures) -> &HistogramFigures = |operation| &operation.queue;
    let kinds = [(&QUEUE, queue), (&SERVICE, |operation| &operation.service)];
    for (family, histogram) in kinds {
        let mut begun = false;
        for (name, disk) in disks() {
            for (operation, label) in OPERATIONS {
                let Some(operation) = disk.operations.get(operation) else { continue };
                if !std::mem::replace(&mut begun, true) {
                    text.family(family);
                }
                join(&mut labels, &[name, label]);
                write_histogram(text, family, &labels, &bounds, histogram(operation));
            }
        }
    }
}

/// Sets `text` to labels with commas between them.
fn join(text: &mut String, labels: &[&str]) {
    text.clear();
    for label in labels.iter().filter(|label| !label.is_empty()) {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(label);
    }
}

/// Returns the bounds of the text's buckets: the number of figures' buckets below, and the label.
///
/// Between 8 us and 1 ms, where flash devices answer, there are two for each power of two. Outside
/// of that there is one, because each bound is a time series of the collecting program.
fn bounds(bounds_us: &[u64]) -> Vec<(usize, String)> {
    let is_shown = |us: &u64| us.is_power_of_two() || (8..1024).contains(us);
    let numbered = bounds_us.iter().enumerate().filter(|(_, us)| is_shown(us));
    let labelled = numbered.map(|(at, us)| (at + 1, label("le", &(*us as f64 / 1e6).to_string())));
    labelled.chain([(usize::MAX, label("le", "+Inf"))]).collect()
}

fn write_histogram(
    text: &mut Text,
    family: &Family,
    labels: &str,
    bounds: &[(usize, String)],
    histogram: &HistogramFigures,
) {
    let (mut done, mut count) = (0, 0);
    let mut all = String::new();
    for (buckets, bound) in bounds {
        let end = (*buckets).min(histogram.buckets.len());
        count += histogram.buckets[done..end].iter().sum::<u64>();
        done = end;
        join(&mut all, &[labels, bound]);
        text.sample(family, "_bucket", &all, count.into());
    }
    text.sample(family, "_sum", labels, histogram.sum.into());
    text.sample(family, "_count", labels, count.into());
}
