//! A sample of the yard, and of the process, as the figures of the API.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blockyard_control::figures::{
    DeviceFigures, DiskFigures, DiskShareFigures, Figures, FlushFigures, GroupFigures,
    HistogramFigures, LimitFigures, MetadataFigures, OperationFigures, PolicyFigures,
    ProcessFigures, ReactorFigures,
};
use blockyard_disk::{Counts, Latencies, OpKind, WriteFigures};
use blockyard_export::policy;
use blockyard_export::policy::SignalFigures;
use blockyard_export::policy::placement::PlacementFigures;
use blockyard_export::policy::polling::Strategy;
use blockyard_export::policy::unkicked::LookFigures;
use blockyard_ring::{Clock, Latest, SlowCallFigures};
use blockyard_sched::{Knobs, Share};
use blockyard_yard::{DiskSample, ReactorSample, Sample};
use rustix::process::Resource;

use crate::server::words;

/// Returns the figures of a sample. `since` and `started`: the start of the server.
pub fn figures(sample: &Sample, since: SystemTime, started: Instant) -> Figures {
    Figures {
        version: env!("CARGO_PKG_VERSION").into(),
        uptime: started.elapsed().as_secs_f64(),
        process: process(since),
        bounds_us: Latencies::bounds_us().collect(),
        write_back: blockyard_ring::write_back_rate() as f64,
        reactors: sample.reactors.iter().map(reactor).collect(),
        devices: devices(&sample.disks),
        groups: sample.groups.iter().map(group).collect(),
        disks: sample.disks.iter().map(disk).collect(),
        disks_failed: 0,
    }
}

/// Returns the figures of this process. A figure that the host does not show is 0.
fn process(since: SystemTime) -> ProcessFigures {
    let read = |name: &str| std::fs::read_to_string(Path::new("/proc/self").join(name));
    let pages = read("statm").ok().and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    let entries = |name: &str| {
        let folder = std::fs::read_dir(Path::new("/proc/self").join(name));
        folder.map_or(0, |entries| entries.count() as u64)
    };
    ProcessFigures {
        pid: std::process::id(),
        started: since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
        cpu: Clock::Process.read().as_secs_f64(),
        resident_bytes: pages.unwrap_or(0) * rustix::param::page_size() as u64,
        threads: entries("task"),
        // One of them is the folder itself.
        open_descriptors: entries("fd").saturating_sub(1),
        max_descriptors: rustix::process::getrlimit(Resource::Nofile).current,
    }
}

fn reactor(sample: &ReactorSample) -> ReactorFigures {
    ReactorFigures {
        busy: sample.cpu.as_secs_f64(),
        waited: waited(sample.thread).map(|time| time.as_secs_f64()),
        iterations: sample.iterations,
    }
}

/// Returns how long a thread was ready to run while others had the processor. None: the kernel does
/// not count it (CONFIG_SCHED_INFO).
fn waited(thread: i32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    text.split(' ').nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// Returns each device that a disk shares, once.
fn devices(disks: &[DiskSample]) -> Vec<DeviceFigures> {
    let shared = disks.iter().filter_map(|sample| sample.disk.share().device());
    let by_name: BTreeMap<_, _> = shared.map(|device| (device.name(), device)).collect();
    let figures = by_name.into_iter().map(|(name, device)| DeviceFigures {
        name: name.into(),
        capacity: device.capacity(),
        window: seconds(device.window()),
    });
    figures.collect()
}

fn group((name, knobs): (&String, &Knobs)) -> GroupFigures {
    let (name, weight) = (name.clone(), knobs.weight.into());
    GroupFigures { name, weight, limits: limits(knobs) }
}

fn disk(sample: &DiskSample) -> DiskFigures {
    let DiskSample { disk, counts, .. } = sample;
    let of_kind = |kind: OpKind| Some((kind.name().to_string(), operation(counts.of(kind)?)));
    let flushes = disk.flushes();
    DiskFigures {
        name: disk.name().into(),
        state: words::state(sample.state),
        image: sample.image.clone(),
        device: disk.share().device().map(|device| device.name().to_string()),
        group: sample.group.clone(),
        size: disk.capacity(),
        read_only: disk.options().read_only,
        poisoned: disk.poisoned().is_some(),
        paused: disk.paused(),
        drained: disk.is_drained(),
        clients: disk.clients().into_iter().map(|(kind, n)| (kind.to_string(), n)).collect(),
        held_back: disk.longest_held_back().as_secs_f64(),
        operations: OpKind::ALL.into_iter().filter_map(of_kind).collect(),
        in_flight: counts.in_flight,
        oldest: counts.oldest.map(|age| age.as_secs_f64()),
        flushes: FlushFigures { requested: flushes.requested, syncs: flushes.syncs },
        metadata: MetadataFigures { hits: counts.lookups.hits, misses: counts.lookups.misses },
        share: share(disk.share()),
        limits: limits(&sample.knobs),
        policies: policies(&sample.policies, &sample.counts.writes),
    }
}

fn operation(counts: &Counts) -> OperationFigures {
    OperationFigures {
        requests: counts.requests,
        errors: counts.errors,
        merged: counts.merged,
        bytes: counts.bytes,
        queue: histogram(&counts.queue),
        service: histogram(&counts.service),
    }
}

fn histogram(latencies: &Latencies) -> HistogramFigures {
    let buckets = latencies.buckets();
    let used = buckets.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
    HistogramFigures { sum: latencies.sum().as_secs_f64(), buckets: buckets[..used].to_vec() }
}

fn share(share: &Share) -> DiskShareFigures {
    let figures = share.figures();
    DiskShareFigures {
        weight: figures.weight,
        entitled: seconds(figures.owed_ns),
        used: seconds(figures.used_ns),
        donated: seconds(figures.donated_ns),
        limited: seconds(figures.limited_ns),
        waited: seconds(figures.waited_ns),
        queued: figures.queued,
    }
}

fn limits(knobs: &Knobs) -> LimitFigures {
    let limits = &knobs.limits;
    LimitFigures {
        iops: words::limit(limits.iops),
        iops_read: words::limit(limits.iops_read),
        iops_write: words::limit(limits.iops_write),
        bps: words::limit(limits.bps),
        bps_read: words::limit(limits.bps_read),
        bps_write: words::limit(limits.bps_write),
        reserve_iops: knobs.reserve_iops,
        reserve_bps: knobs.reserve_bps,
        latency_target: knobs.latency_target.map(|time| time.as_secs_f64()),
    }
}

fn policies(policies: &policy::PolicyFigures, writes: &WriteFigures) -> PolicyFigures {
    // The names of the log have spaces, which are awkward in queries.
    let name = |kind: Strategy| kind.name().replace(", ", "-").replace(' ', "-");
    let chosen = |kind: Strategy| (name(kind), policies.polling.of(kind).chosen);
    let SignalFigures { completions, signals } = policies.signals;
    let rate = |kind: Strategy| {
        let last = policies.polling.of(kind).last;
        (name(kind), last.map_or(0.0, |last| last.value))
    };
    let WriteFigures { inline, blocked, left, noted, refused, off, paced, .. } = *writes;
    let PlacementFigures { to_guest, home } = policies.placement;
    let LookFigures { quick, slower, idle, period } = policies.looks;
    let SlowCallFigures { slow, measured, elsewhere, last: slow_call } = policies.slow_calls;
    PolicyFigures {
        polling: Strategy::ALL.map(chosen).into(),
        polling_rates: Strategy::ALL.map(rate).into(),
        trials: named([
            ("early", policies.polling.early),
            ("given-up", policies.polling.given_up),
            ("vain", policies.polling.vain),
        ]),
        placement: named([("guest", to_guest), ("home", home)]),
        writes: named([
            ("inline", inline),
            ("blocked", blocked),
            ("left", left),
            ("noted", noted),
            ("refused", refused),
            ("off", off),
            ("paced", paced),
        ]),
        completions,
        signals_sent: signals,
        looks: named([("quick", quick), ("slower", slower), ("idle", idle)]),
        slow_calls: named([("slow", slow), ("measured", measured), ("elsewhere", elsewhere)]),
        last: named([
            ("look", last(period)),
            ("slow-call", last(slow_call)),
            ("blocked", last(writes.last_blocked)),
            ("paced", last(writes.last_paced)),
        ]),
    }
}

/// Returns a time in seconds, 0 if there is none.
fn last(time: Option<Latest<Duration>>) -> f64 {
    time.map_or(0.0, |last| last.value.as_secs_f64())
}

fn named<V, const N: usize>(values: [(&str, V); N]) -> BTreeMap<String, V> {
    values.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_show_the_rate_of_each_strategy_and_their_last_times() {
        let mut seen = policy::PolicyFigures::default();
        let at = Instant::now();
        let trial = &mut seen.polling.strategies[Strategy::BusyPollInFlightCoLocated as usize];
        (trial.chosen, trial.last) = (3, Some(Latest { at, value: 1234.5 }));
        seen.slow_calls.last = Some(Latest { at, value: Duration::from_millis(2) });
        let writes = WriteFigures {
            blocked: 4,
            last_paced: Some(Latest { at, value: Duration::from_millis(30) }),
            ..WriteFigures::default()
        };
        let figures = policies(&seen, &writes);
        let name = "busy-poll-in-flight-co-located";
        for (other, rate) in &figures.polling_rates {
            assert_eq!(*rate, if other == name { 1234.5 } else { 0.0 }, "{other}");
        }
        assert_eq!((figures.polling[name], figures.writes["blocked"]), (3, 4));
        let last = [("blocked", 0.0), ("look", 0.0), ("paced", 0.03), ("slow-call", 0.002)];
        assert_eq!(figures.last, named(last));
    }
}
