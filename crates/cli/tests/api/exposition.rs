//! A strict reader of Prometheus' text format, version 0.0.4.
//!
//! It refuses what `promtool check metrics` refuses: samples without help and type, families in
//! several parts, names without the suffix of their type, duplicates, and histograms that are not
//! cumulative.

use std::collections::{BTreeMap, BTreeSet};

/// Labels of a sample, without the braces.
pub type Labels = BTreeMap<String, String>;

pub struct Sample {
    pub name: String,
    pub labels: Labels,
    pub value: f64,
}

pub struct Family {
    pub name: String,
    pub kind: String,
    pub samples: Vec<Sample>,
}

/// Parses a whole text. Panics with the line that is wrong.
pub fn parse(text: &str) -> Vec<Family> {
    assert!(text.ends_with('\n'), "the last line has no end");
    let mut families: Vec<Family> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}"));
            assert!(!help.is_empty() && !help.contains('\\'), "{line}");
            assert!(families.iter().all(|family| family.name != name), "a second part: {line}");
            let next = lines.next().unwrap_or_default();
            let kind = next.strip_prefix(&format!("# TYPE {name} "));
            let kind = kind.unwrap_or_else(|| panic!("no type after {line:?}: {next:?}"));
            check_name(name, kind);
            let (name, kind) = (name.to_string(), kind.to_string());
            families.push(Family { name, kind, samples: Vec::new() });
            continue;
        }
        let family = families.last_mut().unwrap_or_else(|| panic!("no family: {line}"));
        let sample = sample(line);
        let suffix = sample.name.strip_prefix(&family.name).unwrap_or_else(|| panic!("{line}"));
        let suffixes: &[&str] = match family.kind.as_str() {
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        assert!(suffixes.contains(&suffix), "{line}");
        assert_eq!(suffix == "_bucket", sample.labels.contains_key("le"), "{line}");
        assert!(seen.insert((sample.name.clone(), sample.labels.clone())), "twice: {line}");
        let finite = sample.value.is_finite() && sample.value >= 0.0;
        assert!(finite, "{line}");
        family.samples.push(sample);
    }
    families.iter().filter(|family| family.kind == "histogram").for_each(check_histogram);
    assert!(families.iter().all(|family| !family.samples.is_empty()));
    families
}

fn check_name(name: &str, kind: &str) {
    let is_plain = |c: char| c.is_ascii_lowercase() || c == '_';
    assert!(name.chars().all(is_plain), "{name}");
    assert!(["counter", "gauge", "histogram"].contains(&kind), "{name}: {kind}");
    assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
    for suffix in ["_count", "_sum", "_bucket"] {
        assert!(!name.ends_with(suffix), "{name}");
    }
    // Base units only.
    for unit in ["milliseconds", "microseconds", "ms", "us", "kilobytes", "kib", "percent"] {
        assert!(!name.split('_').any(|word| word == unit), "{name}");
    }
}

fn sample(line: &str) -> Sample {
    let (head, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
    let value = value.parse().unwrap_or_else(|e| panic!("{e}: {line}"));
    let (name, labels) = match head.split_once('{') {
        Some((name, rest)) => {
            (name, labels(rest.strip_suffix('}').unwrap_or_else(|| panic!("{line}"))))
        }
        None => (head, Labels::new()),
    };
    assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{line}");
    Sample { name: name.into(), labels, value }
}

fn labels(text: &str) -> Labels {
    let mut labels = Labels::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (name, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("{text}"));
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{text}");
        let (mut value, mut chars) = (String::new(), after.chars());
        loop {
            match chars.next().unwrap_or_else(|| panic!("no end: {text}")) {
                '"' => break,
                '\\' => value.push(match chars.next() {
                    Some('n') => '\n',
                    Some(c @ ('"' | '\\')) => c,
                    other => panic!("{other:?}: {text}"),
                }),
                c => value.push(c),
            }
        }
        assert!(labels.insert(name.into(), value).is_none(), "{text}");
        rest = chars.as_str();
        rest = if rest.is_empty() {
            rest
        } else {
            rest.strip_prefix(',').unwrap_or_else(|| panic!("{text}"))
        };
    }
    labels
}

/// Panics unless each histogram has growing buckets up to `+Inf`, which is its count.
fn check_histogram(family: &Family) {
    let mut all: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    let mut counts = BTreeMap::new();
    for Sample { name, labels, value } in &family.samples {
        let mut labels = labels.clone();
        match labels.remove("le") {
            Some(le) => {
                let le = if le == "+Inf" { f64::INFINITY } else { le.parse().unwrap() };
                all.entry(labels).or_default().push((le, *value));
            }
            None if name.ends_with("_count") => assert!(counts.insert(labels, *value).is_none()),
            None => {}
        }
    }
    assert_eq!(all.len(), counts.len(), "{}", family.name);
    for (labels, buckets) in all {
        let grows = buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        assert!(grows, "{}{labels:?}: {buckets:?}", family.name);
        let (le, count) = *buckets.last().unwrap();
        assert_eq!((le, Some(&count)), (f64::INFINITY, counts.get(&labels)), "{}", family.name);
    }
}
