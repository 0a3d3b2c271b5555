//! Rates and percentiles between two samples of figures.

use std::collections::BTreeMap;

use blockyard_control::figures::{DiskFigures, Figures, HistogramFigures, OperationFigures};

/// What a disk did between two samples. Rates are a second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskRates {
    pub requests: f64,
    pub read_bytes: f64,
    pub write_bytes: f64,
    pub errors: f64,
    /// Latencies of all operations together, from arrival to answer without the queue of the guest.
    pub service: Latency,
    /// Part of the device's time that the disk used. None: it shares no device.
    pub used: Option<f64>,
    /// Mean number of operations that waited for limits, and for other disks.
    pub limited: f64,
    pub waited: f64,
    /// Estimate of the reactors' time for this disk: a part of it by number of requests.
    pub cpu: f64,
    pub operations: BTreeMap<String, OperationRates>,
}

/// What a disk did with one kind of operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OperationRates {
    pub requests: f64,
    pub bytes: f64,
    pub errors: f64,
    pub merged: f64,
    pub queue: Latency,
    pub service: Latency,
}

/// A distribution of latencies: number of values for each bucket.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latency {
    pub buckets: Vec<u64>,
}

impl Latency {
    fn between(old: Option<&HistogramFigures>, new: &HistogramFigures) -> Self {
        let old = |at: usize| old.and_then(|old| old.buckets.get(at)).copied().unwrap_or(0);
        let each = new.buckets.iter().enumerate();
        Latency { buckets: each.map(|(at, count)| count.saturating_sub(old(at))).collect() }
    }

    fn add(&mut self, other: &Latency) {
        self.buckets.resize(self.buckets.len().max(other.buckets.len()), 0);
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// Returns a quantile in seconds, interpolated within its bucket. None: there are no values.
    pub fn quantile(&self, bounds_us: &[u64], quantile: f64) -> Option<f64> {
        let count: u64 = self.buckets.iter().sum();
        if count == 0 {
            return None;
        }
        let rank = quantile * count as f64;
        let mut below = 0.0;
        for (at, values) in self.buckets.iter().enumerate().filter(|(_, values)| **values > 0) {
            let values = *values as f64;
            let low =
                at.checked_sub(1).and_then(|at| bounds_us.get(at)).map_or(0.0, |us| *us as f64);
            // The last bucket has no upper bound.
            let high = bounds_us.get(at).map_or(low, |us| *us as f64);
            if below + values >= rank {
                return Some((low + (high - low) * (rank - below) / values) / 1e6);
            }
            below += values;
        }
        None
    }
}

/// What the server did between two samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    pub disks: BTreeMap<String, DiskRates>,
    /// Utilisation of each reactor.
    pub reactors: Vec<f64>,
}

impl Rates {
    /// Returns the rates between two samples of one server. A disk that only `new` has was added.
    pub fn between(old: &Figures, new: &Figures) -> Self {
        let seconds = new.uptime - old.uptime;
        // Another server has taken the socket, or the sample is the same one.
        if seconds <= 0.0 || old.process.pid != new.process.pid {
            return Rates::default();
        }
        let before: BTreeMap<_, _> = old.disks.iter().map(|disk| (&disk.name, disk)).collect();
        let of = |disk: &DiskFigures| {
            let old = before.get(&disk.name).copied();
            (disk.name.clone(), DiskRates::between(old, disk, seconds))
        };
        let mut disks: BTreeMap<_, _> = new.disks.iter().map(of).collect();
        let busy = old.reactors.iter().zip(&new.reactors);
        let reactors: Vec<_> =
            busy.map(|(old, new)| ((new.busy - old.busy) / seconds).clamp(0.0, 1.0)).collect();
        let (all, time) = (disks.values().map(|disk| disk.requests).sum::<f64>(), reactors.iter());
        let time: f64 = time.sum();
        disks.values_mut().for_each(|disk| disk.cpu = time * disk.requests / all.max(1e-9));
        Rates { disks, reactors }
    }
}

impl DiskRates {
    fn between(old: Option<&DiskFigures>, new: &DiskFigures, seconds: f64) -> Self {
        let mut rates = DiskRates::default();
        for (kind, operation) in &new.operations {
            let old = old.and_then(|old| old.operations.get(kind));
            let of_kind = OperationRates::between(old, operation, seconds);
            rates.requests += of_kind.requests;
            rates.errors += of_kind.errors;
            match kind.as_str() {
                "read" => rates.read_bytes += of_kind.bytes,
                "write" => rates.write_bytes += of_kind.bytes,
                // They move no data.
                _ => {}
            }
            rates.service.add(&of_kind.service);
            rates.operations.insert(kind.clone(), of_kind);
        }
        // A disk that was removed and added again counts from 0.
        let rate = |old: Option<f64>, new: f64| (new - old.unwrap_or(0.0)).max(0.0) / seconds;
        let share = old.map(|old| &old.share);
        rates.limited = rate(share.map(|share| share.limited), new.share.limited);
        rates.waited = rate(share.map(|share| share.waited), new.share.waited);
        let used = rate(share.map(|share| share.used), new.share.used);
        rates.used = new.device.as_ref().map(|_| used);
        rates
    }
}

impl OperationRates {
    fn between(old: Option<&OperationFigures>, new: &OperationFigures, seconds: f64) -> Self {
        let rate = |value: fn(&OperationFigures) -> u64| {
            value(new).saturating_sub(old.map_or(0, value)) as f64 / seconds
        };
        OperationRates {
            requests: rate(|operation| operation.requests),
            bytes: rate(|operation| operation.bytes),
            errors: rate(|operation| operation.errors),
            merged: rate(|operation| operation.merged),
            queue: Latency::between(old.map(|old| &old.queue), &new.queue),
            service: Latency::between(old.map(|old| &old.service), &new.service),
        }
    }
}
