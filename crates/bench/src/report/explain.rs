//! Says in sentences where the time went. Each sentence states a measurement.

use super::figures::{self, Figures};
use crate::plot::scale::{Unit, words};
use crate::results::{Results, Run};
use crate::statistics::median;

/// A processor counts as busy from this fraction on. It is less than 1 because the kernel counts in
/// ticks.
const BUSY: f64 = 0.9;

/// Returns a sentence for each system except the host. It compares the system's results for `work`
/// with those of the host.
pub fn sentences(results: &Results, work: &str) -> Vec<String> {
    let all = figures::of(results, work);
    let host = all.iter().find(|f| f.system == "host");
    all.iter().filter(|f| f.system != "host").map(|f| sentence(results, work, f, host)).collect()
}

fn sentence(results: &Results, work: &str, f: &Figures, host: Option<&Figures>) -> String {
    let time = |seconds: f64| words(seconds, Unit::Seconds);
    let mut parts = Vec::new();
    if f.drops_flushes {
        parts.push("not durable: it answers flushes without a sync".into());
    }
    if let (Some(host), Some(ratio)) = (host, f.to_host) {
        let gap = f.median - host.median;
        let slower = if f.steps.is_empty() && gap > 0.0 {
            format!("; a median operation takes {} longer", time(gap))
        } else {
            String::new()
        };
        parts.push(match ratio {
            r if !f.steps.is_empty() => format!("{:.2} times the host's time", 1.0 / r),
            r if r > 1.05 => {
                format!("{r:.1} times the host's rate (less is promised, or caches are between)")
            }
            r if r > 0.95 => "as fast as the host".into(),
            r => format!("{:.0}% of the host's rate{slower}", r * 100.0),
        });
    }
    if f.steps.is_empty() {
        parts.extend(split(results, work, f));
    }
    parts.push(limit(f));
    format!("{}: {}.", f.system, parts.join("; "))
}

/// Compares the server's and the guest's figures of an operation.
fn split(results: &Results, work: &str, f: &Figures) -> Option<String> {
    let mid = |of: fn(&Run) -> Option<f64>| {
        let value = median(results.of(work, &f.system).filter_map(of));
        value.is_finite().then_some(value)
    };
    let (service, queueing) = (mid(|r| r.spent.service)?, mid(|r| r.spent.queueing).unwrap_or(0.0));
    let submission = mid(|r| r.spent.submission);
    let time = |seconds: f64| words(seconds, Unit::Seconds);
    let rest = (f.median - service - queueing - submission.unwrap_or(0.0)).max(0.0);
    let submitted =
        submission.map(|s| format!(", {} submission in the guest", time(s))).unwrap_or_default();
    let what = if submission.is_some() {
        "notifications and the guest's completion"
    } else {
        "the guest's driver and notifications"
    };
    Some(format!(
        "of {} are {} service (server and disk), {} queueing{submitted}, {} {what}",
        time(f.median),
        time(service),
        time(queueing),
        time(rest)
    ))
}

/// Returns a sentence about which side has no processor time left.
fn limit(f: &Figures) -> String {
    let percent = |cores: f64| format!("{:.0}%", cores * 100.0);
    match f.backend_cores {
        Some(backend) if backend > BUSY => {
            format!("the server is CPU-bound: {} of a core", percent(backend))
        }
        _ if f.guest_cores > BUSY => {
            format!("the guest is CPU-bound: {} of a core", percent(f.guest_cores))
        }
        Some(backend) => format!(
            "no side lacks CPU (guest {}, server {} of a core): it waits",
            percent(f.guest_cores),
            percent(backend)
        ),
        None => format!("it does not lack CPU ({} of a core): it waits", percent(f.guest_cores)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Cpu, Spent};

    fn run(system: &str, per_second: u64, guest: f64, backend: Option<f64>) -> Run {
        Run {
            system: system.into(),
            work: "w".into(),
            seconds: 1.0,
            operations: per_second,
            latency: vec![(0.5, 1.0 / per_second as f64)],
            cpu: Cpu { guest, backend, kernel: 0.0 },
            ..Run::default()
        }
    }

    fn of(runs: Vec<Run>) -> Vec<String> {
        sentences(&Results { runs, ..Results::default() }, "w")
    }

    #[test]
    fn a_sentence_compares_with_the_host_and_names_the_busy_side() {
        let host = || run("host", 1000, 0.1, None);
        let all = of(vec![
            host(),
            run("uml-blockyard", 500, 0.2, Some(0.95)),
            run("uml-ubd-sync", 980, 0.92, None),
            run("nbd", 2500, 0.3, Some(0.4)),
            run("qemu-virtio", 1000, 0.25, None),
        ]);
        assert_eq!(
            all,
            [
                "uml-blockyard: 50% of the host's rate; a median operation takes 1 ms longer; \
                 the server is CPU-bound: 95% of a core.",
                "uml-ubd-sync: as fast as the host; the guest is CPU-bound: 92% of a core.",
                "nbd: 2.5 times the host's rate (less is promised, or caches are between); no side \
                 lacks CPU (guest 30%, server 40% of a core): it waits.",
                "qemu-virtio: as fast as the host; it does not lack CPU (25% of a core): it waits.",
            ]
        );
        assert!(of(vec![host()]).is_empty());
        // Without the host there is nothing to compare with.
        let alone = of(vec![run("nbd", 10, 0.1, None)]);
        assert_eq!(alone, ["nbd: it does not lack CPU (10% of a core): it waits."]);
    }

    #[test]
    fn the_time_of_an_operation_is_divided_among_server_and_guest() {
        let spent = Spent { submission: None, queueing: Some(2e-4), service: Some(1e-3) };
        let served = Run { spent, ..run("uml-blockyard", 500, 0.1, Some(0.1)) };
        let sentence = &of(vec![served.clone()])[0];
        assert!(
            sentence.contains(
                "of 2 ms are 1 ms service (server and disk), 200 µs queueing, 800 µs the guest's driver"
            ),
            "{sentence}"
        );
        let spent = Spent { submission: Some(5e-4), ..spent };
        let sentence = &of(vec![Run { spent, ..served }])[0];
        assert!(
            sentence.contains("500 µs submission in the guest, 300 µs notifications"),
            "{sentence}"
        );
    }
}
