//! Logs the statistics of a disk.

use blockyard_disk::WriteFigures;
use blockyard_disk::{OpKind, Statistics};
use blockyard_export::policy::SignalFigures;
use blockyard_export::policy::placement::PlacementFigures;
use blockyard_export::policy::polling::{PollingFigures, Strategy};
use blockyard_export::policy::unkicked::LookFigures;
use blockyard_export::{Client, PolicyFigures};
use blockyard_ring::SlowCallFigures;
use blockyard_sched::Share;

/// Logs one line for each kind of operation, and one for the share.
pub fn log(disk: &str, statistics: &Statistics, share: &Share) {
    let mut operations = 0;
    for kind in OpKind::ALL {
        let Some(s) = statistics.summary(kind) else { continue };
        operations += s.requests - s.merged;
        tracing::info!(
            disk,
            requests = s.requests,
            merged = s.merged,
            bytes = s.bytes,
            errors = s.errors,
            "{}: queue time p50 {:.0} us, p99 {:.0}, max {:.0}; service time p50 {:.0} us, \
             p99 {:.0}, max {:.0}",
            kind.name(),
            s.queue_us[0],
            s.queue_us[1],
            s.queue_us[2],
            s.service_us[0],
            s.service_us[1],
            s.service_us[2],
        );
    }
    if let Some(text) = describe_writes(&statistics.writes) {
        tracing::info!(disk, "writes: {text}");
    }
    if operations > 0 && !share.is_free() {
        tracing::info!(disk, "share: {}", describe(share, operations));
    }
}

/// Names clients: `pid 4711, pid 4712`.
pub fn describe_clients(clients: &[Client]) -> String {
    let each = clients.iter().map(|client| client.description.as_str());
    each.collect::<Vec<_>>().join(", ")
}

/// Describes the writes that reactors ran inline. Returns `None` if there were none.
fn describe_writes(writes: &WriteFigures) -> Option<String> {
    let WriteFigures { inline, blocked, left, noted, refused, paced, .. } = writes;
    (*writes != WriteFigures::default()).then(|| {
        format!(
            "reactors wrote {inline} to the page cache inline, updated {noted} modification times, \
             and retried {refused} that the kernel refused; inline work blocked {blocked} times; \
             {left} pieces of work were not tried inline because of that; {paced} writes waited \
             because too many pages of the host were dirty"
        )
    })
}

/// Logs the choices of the policies for a disk. A policy without choices logs nothing.
pub fn log_policies(disk: &str, policies: &PolicyFigures) {
    if let Some(text) = describe_polling(&policies.polling) {
        tracing::info!(disk, "polling: {text}");
    }
    if policies.placement.to_guest > 0 {
        let PlacementFigures { to_guest, home } = policies.placement;
        tracing::info!(
            disk,
            "placement: moved {to_guest} times to the guest's processors, {home} times back"
        );
    }
    let SignalFigures { completions, signals } = policies.signals;
    if signals > 0 {
        tracing::info!(disk, "signals: {signals} for {completions} completions");
    }
    let LookFigures { quick, slower, idle, period } = policies.looks;
    if let Some(period) = period {
        let us = period.value.as_micros();
        tracing::info!(
            disk,
            "queues without kicks: {quick} quick looks, {slower} slower, {idle} idle; the last \
             time between two is {us} us"
        );
    }
    let SlowCallFigures { slow, measured, elsewhere, last } = policies.slow_calls;
    if let Some(last) = last {
        let us = last.value.as_micros();
        tracing::info!(
            disk,
            "slow calls: {slow}, the last one took {us} us; the processor time of the next ones \
             was measured {measured} times, and they left the reactor {elsewhere} times"
        );
    }
}

/// Describes the results of polling trials. Returns `None` if there was no trial.
fn describe_polling(figures: &PollingFigures) -> Option<String> {
    let tried: Vec<_> = Strategy::ALL
        .into_iter()
        .filter_map(|kind| {
            let tried = figures.of(kind);
            let rate = tried.rate()?;
            Some(format!("{} chosen {} times at {rate:.0} requests/s", kind.name(), tried.chosen))
        })
        .collect();
    let (early, given_up) = (figures.early, figures.given_up);
    (!tried.is_empty()).then(|| {
        format!(
            "{}; {early} trials began early because the rate changed, {given_up} were aborted",
            tried.join(", ")
        )
    })
}

/// Describes the use of a share. Means are over `operations`.
fn describe(share: &Share, operations: u64) -> String {
    let figures = share.figures();
    let (weight, queued) = (figures.weight, figures.queued);
    let mean = |nanos: u64| nanos as f64 / 1e3 / operations.max(1) as f64;
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let waits = format!(
        "{:.0} us for the disk's limits, {:.0} us for other disks",
        mean(figures.limited_ns),
        mean(figures.waited_ns)
    );
    let Some(device) = share.device() else {
        return format!("no device is shared; mean wait {waits}; {queued} waiting now");
    };
    format!(
        "weight {weight:.1} on device {}: entitled to {:.3} s, used {:.3} s, donated {:.3} s; \
         mean wait {waits}; mean service time {:.0} us, without other disks {:.0} us; {queued} \
         waiting now; the device shows {:.0}% of its capacity; window {:.0} us of work",
        device.name(),
        seconds(figures.owed_ns),
        seconds(figures.used_ns),
        seconds(figures.donated_ns),
        mean(figures.service_ns),
        mean(figures.baseline_ns),
        device.capacity() * 100.0,
        device.window() as f64 / 1e3,
    )
}
