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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Cpu, Run};

    fn run(system: &str, samples: &[(u64, f64)]) -> Run {
        Run {
            system: system.into(),
            work: "w".into(),
            round: 1,
            seconds: samples.iter().map(|s| s.1).sum::<f64>().max(1.0),
            operations: samples.len().max(1) as u64,
            samples: samples.to_vec(),
            cpu: Cpu { guest: 0.5, backend: Some(0.25), kernel: 0.25 },
            ..Run::default()
        }
    }

    fn results(runs: Vec<Run>) -> Results {
        Results { runs, ..Results::default() }
    }

    fn names(series: &[Series]) -> Vec<&str> {
        series.iter().map(|series| series.name.as_str()).collect()
    }

    #[test]
    fn a_size_with_at_least_three_operations_is_a_point_of_the_curve() {
        let ms = |bytes, all: &[u32]| {
            all.iter().map(|ms| (bytes, f64::from(*ms) / 1e3)).collect::<Vec<_>>()
        };
        let first = [ms(512, &[5, 1]), ms(4096, &[2, 9])].concat();
        let again = [ms(512, &[3]), ms(65536, &[7])].concat();
        let results =
            results(vec![run("uml-ubd", &first), run("uml-ubd", &again), run("host", &[])]);
        let chart = by_size(&results, "w").unwrap();
        // The host has no single operations.
        assert_eq!(names(&chart.series), ["uml-ubd"]);
        let [point] = chart.series[0].points[..] else { panic!("{:?}", chart.series[0].points) };
        assert_eq!((point.x, point.y), (512.0, 0.003), "the median of both rounds");
        let (low, high) = point.band.unwrap();
        assert!((low - 0.0012).abs() < 1e-9 && (high - 0.0048).abs() < 1e-9, "{low} to {high}");
        assert!(by_size(&results, "other").is_none());
    }

    #[test]
    fn latencies_end_at_the_percentile_that_the_samples_show() {
        let samples: Vec<_> = (1..=100).map(|ms| (512, f64::from(ms) / 1e3)).collect();
        let of_fio = Run { latency: vec![(0.5, 0.001), (0.999, 0.004)], ..run("nbd", &[]) };
        let results = results(vec![run("uml-ubd", &samples), of_fio, run("host", &[])]);
        let chart = latencies(&results, "w").unwrap();
        assert_eq!(names(&chart.series), ["uml-ubd", "nbd"]);
        let points = &chart.series[0].points;
        assert_eq!(points[0].x, 0.0);
        assert!((points[0].y - 0.001).abs() < 1e-12);
        let last = points.last().unwrap();
        assert!(last.x <= 0.99 && last.x > 0.98, "100 samples do not show more: {last:?}");
        assert!(points.windows(2).all(|pair| pair[0].y <= pair[1].y));
        // fio's own percentiles are drawn as they are.
        let told: Vec<_> = chart.series[1].points.iter().map(|p| (p.x, p.y)).collect();
        assert_eq!(told, [(0.5, 0.001), (0.999, 0.004)]);
        assert!(latencies(&self::results(vec![run("host", &[])]), "w").is_none());
    }

    #[test]
    fn throughput_is_that_of_the_last_round_in_bytes_a_second() {
        let early = Run { throughput: vec![9e9; 5], ..run("host", &[]) };
        let late = Run { throughput: vec![100.0, 200.0, 300.0], round: 2, ..run("host", &[]) };
        let short = Run { throughput: vec![1.0, 2.0], ..run("nbd", &[]) };
        let chart = over_time(&results(vec![early, late, short]), "w").unwrap();
        assert_eq!(names(&chart.series), ["host"], "two tenths of a second are no curve");
        let points: Vec<_> = chart.series[0].points.iter().map(|p| (p.x, p.y)).collect();
        assert_eq!(points, [(0.0, 1000.0), (0.1, 2000.0), (0.2, 3000.0)]);
    }

    #[test]
    fn bars_have_the_median_of_the_rounds_and_their_range() {
        let with =
            |system: &str, operations, seconds| Run { operations, seconds, ..run(system, &[]) };
        let runs = vec![
            with("fast", 100, 1.0),
            with("fast", 100, 2.0),
            with("fast", 100, 0.5),
            with("host", 300, 1.0),
        ];
        let results = results(runs);
        let rates = rates(&results, "w");
        assert_eq!((rates.bars[0].value, rates.bars[0].range), (100.0, Some((50.0, 200.0))));
        // A system has the same colour in all pictures, and the host has the first one.
        let looks: Vec<_> = rates.bars.iter().map(|bar| (bar.name.as_str(), bar.look)).collect();
        assert_eq!(looks, [("fast", 1), ("host", 0)]);
        let seconds = seconds(&results, "w");
        assert_eq!((seconds.bars[0].value, seconds.bars[0].range), (1.0, None));
        assert!(matches!(seconds.unit, Unit::Seconds));
        // One CPU second for 100 operations.
        assert_eq!(cpu(&results, "w").bars[0].value, 10_000.0);
        assert!(cpu(&results, "w").title.starts_with("w: CPU seconds"));
    }
}
