//! The figures of a disk, in the log.

use blockyard_disk::WriteFigures;
use blockyard_disk::{OpKind, Statistics};
use blockyard_export::PolicyFigures;
use blockyard_export::policy::notify::NotifyFigures;
use blockyard_export::policy::placement::PlacementFigures;
use blockyard_export::policy::polling::{PollingFigures, Strategy};
use blockyard_sched::{Figures, Share};

/// Logs a line for each kind of operation, and a line about the share.
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
            "{}: queue time p50 {:.0} us, p99 {:.0}, max {:.0}; service time p50 {:.0} us, p99 {:.0}, max {:.0}",
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

/// Describes what reactors did about writes by themselves. None: nothing.
fn describe_writes(writes: &WriteFigures) -> Option<String> {
    let WriteFigures { inline, blocked, left, noted, refused } = writes;
    (*writes != WriteFigures::default()).then(|| {
        format!(
            "reactors made {inline} to the page cache, noted {noted} times of change, and made {refused} again that were \
             refused; such work blocked {blocked} times and was left to others {left} times"
        )
    })
}

/// Logs what the policies chose for a disk. A policy that had nothing to choose has no line.
pub fn log_policies(disk: &str, policies: &PolicyFigures) {
    if let Some(text) = describe_polling(&policies.polling) {
        tracing::info!(disk, "polling: {text}");
    }
    if policies.placement.to_guest > 0 {
        let PlacementFigures { to_guest, home } = policies.placement;
        tracing::info!(
            disk,
            "placement: {to_guest} moves to the guest's processors, {home} moves back"
        );
    }
    if policies.notify.signals > 0 {
        tracing::info!(disk, "signals: {}", describe_signals(&policies.notify));
    }
}

/// Describes what trials found. None: there was no trial.
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
            "{}; {early} trials began early at a change of the rate, {given_up} were given up",
            tried.join(", ")
        )
    })
}

fn describe_signals(figures: &NotifyFigures) -> String {
    let NotifyFigures { completions, signals, full, gathered, vain, skipped } = figures;
    let mut text = format!("{signals} for {completions} completions");
    if full + gathered + vain + skipped > 0 {
        text += &format!(
            "; {full} with enough pending, {gathered} after a wait that gathered more, {vain} after a wait in vain, \
             {skipped} at once because waits were in vain"
        );
    }
    text
}

/// Describes what a share did. Means are of so many operations.
fn describe(share: &Share, operations: u64) -> String {
    let Figures { weight, owed, used, donated, limited, waited, service, alone, queued, .. } =
        share.figures();
    let mean = |nanos: u64| nanos as f64 / 1e3 / operations.max(1) as f64;
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let waits = format!(
        "{:.0} us for its limits, {:.0} us for its neighbours",
        mean(limited),
        mean(waited)
    );
    let Some(device) = share.device() else {
        return format!("no device is shared; each operation waited {waits}; {queued} wait");
    };
    format!(
        "weight {weight:.1} on device {}: owed {:.3} s, used {:.3} s, donated {:.3} s; each operation waited {waits}; the \
         device took {:.0} us, without neighbours {:.0} us; {queued} wait; the device shows {:.0}% of its capacity, with {:.0} us \
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
