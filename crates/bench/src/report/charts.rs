//! The pictures of results.

use super::figures;
use crate::plot::scale::ScaleKind::{Linear, Log, Nines};
use crate::plot::{Bar, Bars, Chart, Point, Series, Unit};
use crate::results::Results;
use crate::samples::{self, Sample};
use crate::statistics::{quantile, sorted};

const SIZE: (f64, f64) = (720.0, 430.0);

/// Returns the number of a system's colour and dash in all pictures. The host is the first.
fn look(results: &Results, system: &str) -> usize {
    let mut systems = results.systems();
    systems.sort_by_key(|s| *s != "host");
    systems.iter().position(|s| *s == system).unwrap_or(0)
}

/// Draws operations by size: the median of all rounds, and the 5th to the 95th percentile.
pub fn by_size(results: &Results, work: &str) -> Option<Chart> {
    let series: Vec<Series> = results
        .systems()
        .into_iter()
        .map(|system| {
            let all = results.of(work, system).flat_map(|r| &r.samples);
            let all: Vec<_> = all.map(|&(bytes, seconds)| Sample { bytes, seconds }).collect();
            curve(system, look(results, system), &all)
        })
        .filter(|s| !s.points.is_empty())
        .collect();
    let title = format!("{work}: how long one operation takes");
    (!series.is_empty()).then(|| sizes(&title, series))
}

/// Returns a curve of durations by size from samples.
pub fn curve(name: &str, look: usize, samples: &[Sample]) -> Series {
    let points =
        samples::bins(samples).into_iter().filter(|b| b.seconds.len() > 2).map(|bin| Point {
            x: bin.bytes as f64,
            y: quantile(&bin.seconds, 0.5),
            band: Some((quantile(&bin.seconds, 0.05), quantile(&bin.seconds, 0.95))),
        });
    Series { name: name.into(), points: points.collect(), look }
}

pub fn sizes(title: &str, series: Vec<Series>) -> Chart {
    Chart {
        title: title.into(),
        x: (Log, Unit::Bytes, "size of the operation (median, and 5th to 95th percentile)".into()),
        y: (Log, Unit::Seconds, "duration".into()),
        series,
        markers: true,
        size: SIZE,
    }
}

pub fn latencies(results: &Results, work: &str) -> Option<Chart> {
    let points = |system: &str| -> Vec<Point> {
        let all = sorted(results.of(work, system).flat_map(|r| &r.samples).map(|s| s.1));
        let steps = (0..=60).map(|i| 1.0 - 10f64.powf(-f64::from(i) / 20.0));
        if all.is_empty() {
            let told =
                results.of(work, system).last().map(|r| r.latency.clone()).unwrap_or_default();
            return told.into_iter().map(|(x, y)| Point { x, y, band: None }).collect();
        }
        // There are too few samples for higher percentiles.
        let most = 1.0 - 1.0 / all.len() as f64;
        steps
            .filter(|q| *q <= most)
            .map(|q| Point { x: q, y: quantile(&all, q), band: None })
            .collect()
    };
    let series = |system: &str| Series {
        name: system.into(),
        points: points(system),
        look: look(results, system),
    };
    let series: Vec<_> =
        results.systems().into_iter().map(series).filter(|s| !s.points.is_empty()).collect();
    (!series.is_empty()).then(|| Chart {
        title: format!("{work}: latency"),
        x: (Nines, Unit::Percentile, "percentile of operations".into()),
        y: (Log, Unit::Seconds, "as long or shorter".into()),
        series,
        markers: false,
        size: SIZE,
    })
}

/// Draws the last round in steps of a tenth of a second.
pub fn over_time(results: &Results, work: &str) -> Option<Chart> {
    let series = |system: &str| {
        let steps = results.of(work, system).last().map(figures::throughput).unwrap_or_default();
        let point =
            |(i, bytes): (usize, &f64)| Point { x: i as f64 / 10.0, y: bytes * 10.0, band: None };
        let points = steps.iter().enumerate().map(point).collect();
        Series { name: system.into(), points, look: look(results, system) }
    };
    let series: Vec<_> =
        results.systems().into_iter().map(series).filter(|s| s.points.len() > 2).collect();
    (!series.is_empty()).then(|| Chart {
        title: format!("{work}: throughput over time"),
        x: (Linear, Unit::Seconds, "seconds into the last round".into()),
        y: (Linear, Unit::BytesPerSecond, "a tenth of a second each".into()),
        series,
        markers: false,
        size: (SIZE.0, 280.0),
    })
}

pub fn rates(results: &Results, work: &str) -> Bars {
    bars(
        results,
        work,
        "operations a second",
        "median of the rounds, and their range; more is better",
        |f| (f.per_second, Some(f.range)),
    )
}

pub fn seconds(results: &Results, work: &str) -> Bars {
    let of = "median of the rounds; less is better";
    let bars = bars(results, work, "seconds", of, |f| (f.seconds, None));
    Bars { unit: Unit::Seconds, ..bars }
}

pub fn cpu(results: &Results, work: &str) -> Bars {
    let of = "guest, server and kernel threads together; less is better";
    bars(results, work, "CPU seconds for a million operations", of, |f| (f.cpu_per_million, None))
}

fn bars(
    results: &Results,
    work: &str,
    title: &str,
    of: &str,
    value: impl Fn(&figures::Figures) -> (f64, Option<(f64, f64)>),
) -> Bars {
    let bar = |f: &figures::Figures| {
        let (value, range) = value(f);
        Bar { name: f.system.clone(), value, range, look: look(results, &f.system) }
    };
    let bars = figures::of(results, work).iter().map(bar).collect();
    Bars {
        title: format!("{work}: {title}"),
        unit: Unit::Plain,
        of: of.into(),
        bars,
        width: SIZE.0,
    }
}
