//! The text of metrics: its format, and its cost.

use std::collections::BTreeMap;

use super::*;
use crate::figures::{DiskFigures, HistogramFigures, OperationFigures, ReactorFigures};
use crate::json::types::State;

fn disk(name: &str) -> DiskFigures {
    let histogram = HistogramFigures { sum: 0.25, buckets: vec![0, 3, 0, 4, 0, 2, 0, 1] };
    let operation = OperationFigures {
        requests: 10,
        errors: 1,
        merged: 2,
        bytes: 40960,
        queue: histogram.clone(),
        service: histogram,
    };
    let (device, group, share, limits, policies) = Default::default();
    let (flushes, metadata) = Default::default();
    DiskFigures {
        name: name.into(),
        state: State::Serving,
        image: "/images/a \"b\".qcow2".into(),
        device,
        group,
        size: 1 << 30,
        read_only: false,
        poisoned: false,
        paused: 0,
        drained: false,
        clients: BTreeMap::new(),
        held_back: 0.0,
        operations: ["read", "write", "flush"].map(|kind| (kind.into(), operation.clone())).into(),
        in_flight: 3,
        oldest: Some(0.5),
        flushes,
        metadata,
        share,
        limits,
        policies,
    }
}

fn figures(disks: Vec<DiskFigures>) -> Figures {
    Figures {
        version: "1.2.3".into(),
        bounds_us: vec![1, 2, 3, 4, 6, 8, 12],
        reactors: vec![ReactorFigures { busy: 1.5, waited: None, iterations: 7 }],
        disks,
        ..Figures::default()
    }
}

#[test]
fn a_histogram_is_cumulative_and_its_bounds_are_in_seconds() {
    let text = render(&figures(vec![disk("a")]));
    let lines: Vec<_> = text
        .lines()
        .filter_map(|line| {
            line.strip_prefix("blockyard_disk_request_service_seconds")
                .filter(|line| line.contains("operation=\"read\""))
        })
        .collect();
    let labels = "disk=\"a\",operation=\"read\"";
    let bucket = |le: &str, count: u64| format!("_bucket{{{labels},le=\"{le}\"}} {count}");
    assert_eq!(
        lines,
        [
            bucket("0.000001", 0),
            bucket("0.000002", 3),
            bucket("0.000004", 7),
            bucket("0.000008", 9),
            bucket("0.000012", 9),
            bucket("+Inf", 10),
            format!("_sum{{{labels}}} 0.25"),
            format!("_count{{{labels}}} 10"),
        ]
    );
}

#[test]
fn policies_show_what_they_decided_and_saw() {
    let mut disk = disk("a");
    disk.policies.polling = [("poll".into(), 3)].into();
    disk.policies.polling_rates = [("poll".into(), 1234.5), ("wait".into(), 0.0)].into();
    disk.policies.last = [("slow-call".into(), 0.002)].into();
    let text = render(&figures(vec![disk]));
    for line in [
        "decisions_total{disk=\"a\",policy=\"polling\",decision=\"poll\"} 3",
        "requests_per_second{disk=\"a\",decision=\"poll\"} 1234.5",
        "requests_per_second{disk=\"a\",decision=\"wait\"} 0",
        "last_seconds{disk=\"a\",what=\"slow-call\"} 0.002",
    ] {
        let line = format!("blockyard_disk_policy_{line}");
        assert!(text.lines().any(|other| other == line), "{line}\n{text}");
    }
}

#[test]
fn label_values_are_escaped() {
    let text = render(&figures(vec![disk("a\"b\\c\nd=é{}")]));
    let expected = r#"blockyard_disk_in_flight_requests{disk="a\"b\\c\nd=é{}"} 3"#;
    assert!(text.lines().any(|line| line == expected), "{text}");
    let expected = r#"image="/images/a \"b\".qcow2",device="",group=""} 1"#;
    assert!(text.contains(expected), "{text}");
}

/// Each name has one help text and one type before its first sample, and its samples are together.
#[test]
fn each_family_has_its_help_and_type_once() {
    let text = render(&figures(vec![disk("a"), disk("b")]));
    let (mut kinds, mut current) = (BTreeMap::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(help.ends_with('.') && !kinds.contains_key(name), "{line}");
            current = name.to_string();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(name, current);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            kinds.insert(current.clone(), kind.to_string());
        } else {
            let name = line.split(['{', ' ']).next().unwrap();
            let base = match kinds.get(&current).map(String::as_str) {
                Some("histogram") => name.rsplit_once('_').unwrap().0,
                _ => name,
            };
            assert_eq!(base, current, "{line}");
        }
    }
    assert!(kinds.len() >= 30, "{kinds:?}");
}

#[test]
fn an_operation_that_has_not_occurred_has_counts_of_0_and_no_histogram() {
    let text = render(&figures(vec![disk("a")]));
    let discards: Vec<_> = text.lines().filter(|line| line.contains("\"discard\"")).collect();
    assert_eq!(discards.len(), 3, "{discards:?}");
    assert!(discards.iter().all(|line| line.ends_with(" 0")), "{discards:?}");
}
