//! The results of a row: figures, each with its goal.
//!
//! In: the reports of all rounds. Out: figures. What must hold: rates are compared with those of
//! the same round; the names are those of resctl-bench where it has one (isol-01, lat-imp,
//! work-csv), over slices of 100 ms.

use blockyard_program::costs::DeviceCosts;
use serde::Serialize;

use super::device::spent;
use super::rows::{
    BPS, EQUALS, IOPS, IOPS_READ, IOPS_WRITE, LENGTH, MAX, RATE, Row, TARGETS, WEIGHTS, reserved,
};
use super::{Order, arrival};
use crate::client::load::{SLICE, Slice};
use crate::client::report::Report;
use crate::statistics::{median, quantile, sorted};

/// The reports of all scenes of a row in one round.
pub struct Round(pub Vec<(&'static str, Vec<Option<Report>>)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    PerSecond,
    Percent,
    Milliseconds,
    Microseconds,
    Number,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    pub name: String,
    pub unit: Unit,
    /// A value for each round, or one for the slices of all rounds.
    pub values: Vec<f64>,
    pub median: f64,
    pub goal: Option<Goal>,
}

impl Figure {
    fn new(name: impl Into<String>, unit: Unit, values: Vec<f64>) -> Self {
        let median = median(values.iter().copied());
        Figure { name: name.into(), unit, values, median, goal: None }
    }

    fn goal(self, goal: Goal) -> Self {
        Figure { goal: Some(goal), ..self }
    }

    /// Returns whether the figure meets its goal. `None`: there is no goal or no value.
    pub fn met(&self) -> Option<bool> {
        if self.median.is_nan() {
            return None;
        }
        self.goal.map(|goal| match goal {
            Goal::AtLeast(least) => self.median >= least,
            Goal::AtMost(most) => self.median <= most,
        })
    }
}

impl Round {
    fn reports(&self, scene: &str) -> impl Iterator<Item = &Report> {
        let found = self.0.iter().find(|(name, _)| *name == scene);
        found.into_iter().flat_map(|(_, reports)| reports.iter().flatten())
    }

    /// Returns a figure from the report of the scene's first disk with a load.
    fn of(&self, scene: &str, what: impl Fn(&Report) -> f64) -> f64 {
        self.reports(scene).next().map_or(f64::NAN, what)
    }

    fn rate(&self, scene: &str) -> f64 {
        self.of(scene, |r| r.iops)
    }

    /// Returns the rate that the first disk could reach with its share of the device's time: its
    /// rate alone, at most its part of the saturated device's rate. All disks of the scene `with`
    /// have the same weight.
    fn share(&self) -> f64 {
        self.rate("alone").min(self.rate("saturated") / self.disks())
    }

    /// Returns the polite disk's rate alone, divided by the number of disks: half of it beside one
    /// thrasher. On a device that makes each operation wait for the neighbours', a disk cannot have
    /// more beside neighbours that get as much each.
    fn part(&self) -> f64 {
        self.rate("alone") / self.disks()
    }

    fn disks(&self) -> f64 {
        self.reports("with").count().max(1) as f64
    }

    /// Returns the device time of all disks in nanoseconds a second.
    fn spent(&self, scene: &str, costs: &DeviceCosts) -> f64 {
        self.reports(scene).map(|r| spent(&costs.costs(), r)).sum()
    }
}

/// Returns the figures of a row. `model`: the device is simulated, so a stricter goal applies.
pub fn of(
    row: Row,
    order: Order,
    rounds: &[Round],
    costs: &DeviceCosts,
    model: bool,
) -> Vec<Figure> {
    let all = Rounds { rounds, costs };
    match row {
        Row::Thrash(..) => all.thrash(order, model),
        Row::Frontier(_) => all.frontier(),
        Row::Weights(_) => all.weights(),
        Row::Equal => all.equal(),
        Row::Reserve => all.reserve(),
        Row::Limits => all.limits(),
        Row::Burst => all.burst(),
        Row::Busy => vec![all.total("work-csv %").goal(Goal::AtLeast(97.0))],
        Row::Lone => all.lone(),
    }
}

struct Rounds<'a> {
    rounds: &'a [Round],
    costs: &'a DeviceCosts,
}

impl Rounds<'_> {
    fn each(&self, name: impl Into<String>, unit: Unit, what: impl Fn(&Round) -> f64) -> Figure {
        Figure::new(name, unit, self.rounds.iter().map(what).collect())
    }

    fn percent(&self, name: impl Into<String>, what: impl Fn(&Round) -> f64) -> Figure {
        self.each(name, Unit::Percent, |round| 100.0 * what(round))
    }

    /// Returns the device time of all disks with the scheduler, in percent of that without it.
    fn total(&self, name: &str) -> Figure {
        self.percent(name, |r| r.spent("with", self.costs) / r.spent("without", self.costs))
    }

    fn thrash(&self, order: Order, model: bool) -> Vec<Figure> {
        let rate = |name: &str, scene: &'static str| {
            self.each(name, Unit::PerSecond, move |r| r.rate(scene))
        };
        let p99 = |name: &str, scene: &'static str| {
            self.each(name, Unit::Microseconds, move |r| r.of(scene, |r| r.latency_us.p99))
        };
        let thrasher = |name: &str, scene: &'static str| {
            self.each(name, Unit::PerSecond, move |r| {
                r.reports(scene).skip(1).map(|r| r.iops).sum::<f64>()
            })
        };
        let longer =
            |r: &Round| r.of("with", |r| r.latency_us.p99) / r.of("alone", |r| r.latency_us.p99);
        let mut figures = vec![
            rate("alone", "alone"),
            self.each("share", Unit::PerSecond, Round::share),
            rate("with", "with"),
            rate("without", "without"),
            self.percent("kept %", |r| r.rate("with") / r.share()).goal(Goal::AtLeast(95.0)),
            self.percent("of part %", |r| r.rate("with") / r.part()),
            p99("p99 alone", "alone"),
            p99("p99 with", "with"),
            p99("p99 without", "without"),
            self.each("p99 x", Unit::Number, longer).goal(Goal::AtMost(if model {
                1.3
            } else {
                2.0
            })),
            self.isolation("isol-01 %", "with").goal(Goal::AtLeast(97.6)),
            self.isolation("isol-01 alone", "alone"),
            self.impact("lat-imp %", "with").goal(Goal::AtMost(2.0)),
            self.impact("lat-imp alone", "alone"),
            self.total("work-csv %").goal(Goal::AtLeast(97.0)),
            thrasher("thrasher with", "with"),
            thrasher("thrasher without", "without"),
        ];
        if order.arrives() {
            figures.push(self.to_share(order, if model { Round::share } else { Round::part }));
        }
        figures
    }

    /// Returns what the polite disk keeps of its share, and what all disks get of the total without
    /// the scheduler: without it, with it, and with each latency target.
    fn frontier(&self) -> Vec<Figure> {
        let scenes = ["without", "with"].into_iter().chain(TARGETS.map(|(scene, _)| scene));
        let of_scene = |scene: &'static str| {
            let total = |r: &Round| r.spent(scene, self.costs) / r.spent("without", self.costs);
            [
                self.percent(kept(scene), |r| r.rate(scene) / r.share()),
                self.percent(total_of(scene), total),
            ]
        };
        scenes.flat_map(of_scene).collect()
    }

    /// Returns the time until the disk that arrives gets its share, which `share` returns: of each
    /// round, or the 99th percentile of all arrivals if there are several in a round.
    fn to_share(&self, order: Order, share: fn(&Round) -> f64) -> Figure {
        let of_round = |round: &Round| {
            let first = round.reports("with").next();
            first.map(|report| arrival::times(report, share(round))).unwrap_or_default()
        };
        let times = self.rounds.iter().flat_map(of_round);
        let values = match order {
            Order::Sleeps => vec![quantile(&sorted(times), 0.99)],
            _ => times.collect(),
        };
        Figure::new("to share ms", Unit::Milliseconds, values)
    }

    /// Returns the first percentile of the slices' rates, in percent of the disk's share, at most
    /// 100.
    fn isolation(&self, name: &str, scene: &str) -> Figure {
        let of_round = |round: &Round| {
            let wanted = round.share() * SLICE as f64 / 1e9;
            let part = |slice: &Slice| (100.0 * slice.operations as f64 / wanted).min(100.0);
            round
                .reports(scene)
                .next()
                .map(|r| r.slices.iter().map(part).collect::<Vec<_>>())
                .unwrap_or_default()
        };
        let slices = sorted(self.rounds.iter().flat_map(of_round));
        Figure::new(name, Unit::Percent, vec![quantile(&slices, 0.01)])
    }

    /// Returns by how many percent operations took longer than alone: the mean of all slices, at
    /// least 0. The part that comes from a demand of more than the disk's share does not count.
    fn impact(&self, name: &str, scene: &str) -> Figure {
        let of_round = |round: &Round| {
            let alone = round.of("alone", |r| r.latency_us.mean) * 1e3 * round.rate("alone")
                / round.share();
            let longer = |slice: &Slice| {
                let mean = slice.latency_ns as f64 / slice.operations as f64;
                (100.0 * (mean / alone - 1.0)).max(0.0)
            };
            let with = |slices: &[Slice]| {
                slices.iter().filter(|s| s.operations > 0).map(longer).collect::<Vec<_>>()
            };
            round.reports(scene).next().map(|r| with(&r.slices)).unwrap_or_default()
        };
        let slices: Vec<f64> = self.rounds.iter().flat_map(of_round).collect();
        Figure::new(name, Unit::Percent, vec![slices.iter().sum::<f64>() / slices.len() as f64])
    }

    /// Compares each disk's share of the device time with the share that its weight gives it.
    fn weights(&self) -> Vec<Figure> {
        let owed = |n: usize| f64::from(WEIGHTS[n]) / f64::from(WEIGHTS.iter().sum::<u32>());
        let share = |round: &Round, n: usize| {
            let spent: Vec<f64> =
                round.reports("with").map(|r| spent(&self.costs.costs(), r)).collect();
            spent.get(n).map_or(f64::NAN, |own| own / spent.iter().sum::<f64>())
        };
        let error = |round: &Round, n: usize| share(round, n) / owed(n) - 1.0;
        let places = 0..WEIGHTS.len();
        let shares =
            places.clone().map(|n| self.percent(format!("share {}", WEIGHTS[n]), |r| share(r, n)));
        let worst =
            |round: &Round| places.clone().map(|n| error(round, n).abs()).fold(0.0, f64::max);
        let worst = self.percent("worst error %", worst).goal(Goal::AtMost(3.0));
        let busy = self.percent("busy %", |r| r.spent("with", self.costs) / 1e9);
        shares.chain([worst, busy]).collect()
    }

    fn equal(&self) -> Vec<Figure> {
        let fairness = |scene: &'static str| {
            move |round: &Round| jain(&round.reports(scene).map(|r| r.iops).collect::<Vec<_>>())
        };
        let least = |round: &Round| {
            let rates: Vec<f64> = round.reports("with").map(|r| r.iops).collect();
            rates.iter().copied().fold(f64::INFINITY, f64::min) * EQUALS as f64
                / rates.iter().sum::<f64>()
        };
        vec![
            self.each("Jain's index", Unit::Number, fairness("with")).goal(Goal::AtLeast(0.99)),
            self.each("without", Unit::Number, fairness("without")),
            self.percent("least share %", least),
            self.total("work-csv %").goal(Goal::AtLeast(97.0)),
        ]
    }

    fn reserve(&self) -> Vec<Figure> {
        let wanted = reserved(self.costs) as f64;
        vec![
            self.each("reserved", Unit::PerSecond, |_| wanted),
            self.each("got", Unit::PerSecond, |r| r.rate("with")),
            self.percent("met %", |r| r.rate("with") / wanted).goal(Goal::AtLeast(100.0)),
            self.each("without it", Unit::PerSecond, |r| r.rate("unreserved")),
        ]
    }

    /// Returns the largest deviation from the limit in any second, as a fraction of the limit. With
    /// a limit on reads or writes only: the deviation of the mean over the whole time.
    fn limits(&self) -> Vec<Figure> {
        let farthest = |scene: &'static str, limit: u64, what: fn(&Slice) -> u64| {
            let off = move |r: &Report| {
                seconds(&r.slices, what)
                    .map(|sum| (sum / limit as f64 - 1.0).abs())
                    .fold(0.0, f64::max)
            };
            self.percent(format!("{scene} off %"), move |round| round.of(scene, off))
                .goal(Goal::AtMost(2.0))
        };
        let off = |scene: &'static str, limit: u64, what: fn(&Report) -> u64| {
            let off = move |r: &Report| (what(r) as f64 / r.seconds / limit as f64 - 1.0).abs();
            self.percent(format!("{scene} off %"), move |round| round.of(scene, off))
                .goal(Goal::AtMost(2.0))
        };
        vec![
            farthest("iops", IOPS, |s| s.operations),
            farthest("bps", BPS, |s| s.bytes),
            off("iops-read", IOPS_READ, |r| r.reads),
            off("iops-write", IOPS_WRITE, |r| r.writes),
        ]
    }

    fn burst(&self) -> Vec<Figure> {
        let burst = |r: &Report| {
            r.slices
                .iter()
                .take((LENGTH * 1e9) as usize / SLICE as usize)
                .map(|s| s.operations)
                .sum::<u64>()
        };
        let after = |r: &Report| {
            // The bucket is empty, and the rate is steady.
            let slices = &r.slices[r.slices.len().min(20)..];
            slices.iter().map(|s| s.operations).sum::<u64>() as f64
                / (slices.len() as f64 * SLICE as f64 / 1e9)
        };
        vec![
            self.percent("burst of max %", |r| {
                r.of("burst", |r| burst(r) as f64 / (MAX as f64 * LENGTH))
            }),
            self.percent("most over %", |r| r.of("burst", |r| over(&r.slices)))
                .goal(Goal::AtMost(2.0)),
            self.percent("after, off %", |r| {
                r.of("burst", |r| (after(r) / RATE as f64 - 1.0).abs())
            })
            .goal(Goal::AtMost(2.0)),
        ]
    }

    fn lone(&self) -> Vec<Figure> {
        let one = |name: &str, scene: &'static str| {
            self.each(name, Unit::PerSecond, move |r| r.rate(scene))
        };
        let kept = |name: &str, with: &'static str, without: &'static str| {
            self.percent(name, move |r| r.rate(with) / r.rate(without)).goal(Goal::AtLeast(99.0))
        };
        vec![
            one("with", "with"),
            one("without", "without"),
            kept("kept %", "with", "without"),
            one("d1 with", "with, d1"),
            one("d1 without", "without, d1"),
            kept("d1 kept %", "with, d1", "without, d1"),
        ]
    }
}

/// Returns the names of a scene's figures in the frontier.
pub fn kept(scene: &str) -> String {
    format!("kept %, {scene}")
}

pub fn total_of(scene: &str) -> String {
    format!("total %, {scene}")
}

/// Returns Jain's index. 1: all are equal. 1/n: one has all.
fn jain(rates: &[f64]) -> f64 {
    let (sum, squares) = (rates.iter().sum::<f64>(), rates.iter().map(|r| r * r).sum::<f64>());
    sum * sum / (rates.len() as f64 * squares)
}

/// Returns the sum over each window of a second. A window begins with each slice.
fn seconds(slices: &[Slice], what: fn(&Slice) -> u64) -> impl Iterator<Item = f64> {
    slices
        .windows((1_000_000_000 / SLICE) as usize)
        .map(move |w| w.iter().map(what).sum::<u64>() as f64)
}

/// Returns the largest excess over the allowed number of operations, at the end of any slice, as a
/// fraction of `RATE`. `MAX` is allowed during the burst, and `RATE` after it.
fn over(slices: &[Slice]) -> f64 {
    let mut sum = 0.0;
    let mut most = f64::NEG_INFINITY;
    for (number, slice) in slices.iter().enumerate() {
        sum += slice.operations as f64;
        let time = (number + 1) as f64 * SLICE as f64 / 1e9;
        let (rate, max) = (RATE as f64, MAX as f64);
        let allowed = (max * time).min(rate * time + (max - rate) * LENGTH);
        most = most.max((sum - allowed) / rate);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::LoadOptions;
    use crate::client::cpu::{BackEnd, Meter};
    use crate::client::load::Tally;
    use crate::client::report::Target;
    use crate::client::workload::Pauses;
    use crate::neighbours::rows::{Loads, Polite};

    /// Makes the slices of a second with this number of operations of this latency.
    fn report(operations: u64, latency_us: u64) -> Option<Report> {
        let mut tally = Tally::new().unwrap();
        (tally.reads, tally.bytes, tally.elapsed_ns) =
            (operations, operations * 4096, 1_000_000_000);
        tally.latency.saturating_record_n(latency_us * 1000, operations);
        let each = operations / 10;
        let slice =
            Slice { operations: each, bytes: each * 4096, latency_ns: each * latency_us * 1000 };
        tally.slices = vec![slice; 10];
        let options = LoadOptions::for_socket("s".into());
        Some(Report::new(
            &options,
            Target::default(),
            &tally,
            &Meter::new(BackEnd::Unknown).unwrap(),
            0,
        ))
    }

    fn costs() -> DeviceCosts {
        DeviceCosts { read: 10_000, ..DeviceCosts::default() }
    }

    #[track_caller]
    fn is(figures: &[Figure], name: &str, value: f64, met: Option<bool>) {
        let figure = figures.iter().find(|f| f.name == name).unwrap_or_else(|| panic!("no {name}"));
        assert!(
            (figure.median - value).abs() < 0.01 * value.abs().max(0.1),
            "{name}: {}",
            figure.median
        );
        assert_eq!(figure.met(), met, "{name}");
    }

    #[test]
    fn a_polite_one_is_measured_by_its_share_of_the_device() {
        let round = || {
            Round(vec![
                ("alone", vec![report(8_000, 100), None]),
                ("saturated", vec![report(10_000, 100), None]),
                ("without", vec![report(1_000, 900), report(9_000, 100)]),
                ("with", vec![report(4_800, 120), report(5_000, 100)]),
            ])
        };
        let row = Row::Thrash(Polite::D8, false);
        let rounds = [round(), round()];
        let figures = of(row, Order::Together, &rounds, &costs(), true);
        is(&figures, "share", 5_000.0, None);
        is(&figures, "kept %", 96.0, Some(true));
        is(&figures, "of part %", 120.0, None);
        is(&figures, "p99 x", 1.2, Some(true));
        is(&figures, "isol-01 %", 96.0, Some(false));
        is(&figures, "isol-01 alone", 100.0, None);
        // The same latency counts as an impact if the disk wants at most half of the device.
        let small = Round(vec![
            ("alone", vec![report(4_000, 100)]),
            ("saturated", vec![report(10_000, 100)]),
            ("with", vec![report(3_300, 120), report(5_000, 100)]),
        ]);
        let small = of(row, Order::Together, &[small], &costs(), false);
        is(&small, "lat-imp %", 20.0, Some(false));
        // 8,000 operations a second at 100 us and 5,000 at 160 us keep the same number in flight.
        is(&figures, "lat-imp %", 0.0, Some(true));
        is(&figures, "work-csv %", 98.0, Some(true));
        is(&figures, "thrasher with", 5_000.0, None);
        assert_eq!(figures[0].values.len(), 2);
        assert!(figures.iter().all(|f| f.name != "to share ms"), "no disk arrives");
    }

    #[test]
    fn the_frontier_has_what_is_kept_and_the_total_of_each_scene() {
        let scene = |name, own, other| (name, vec![report(own, 100), report(other, 100)]);
        let mut scenes = vec![
            ("alone", vec![report(8_000, 100), None]),
            ("saturated", vec![report(10_000, 100), None]),
            scene("without", 1_000, 9_000),
            scene("with", 4_000, 4_000),
        ];
        scenes.extend(TARGETS.map(|(name, _)| scene(name, 5_000, 1_000)));
        let figures =
            of(Row::Frontier(Polite::D8), Order::Together, &[Round(scenes)], &costs(), true);
        is(&figures, "kept %, without", 20.0, None);
        is(&figures, "total %, without", 100.0, None);
        is(&figures, "kept %, with", 80.0, None);
        is(&figures, "total %, with", 80.0, None);
        is(&figures, "kept %, target 6", 100.0, None);
        is(&figures, "total %, target 6", 60.0, None);
    }

    #[test]
    fn the_share_beside_several_thrashers_is_smaller() {
        let thrashers = || (0..4).map(|_| report(2_000, 100));
        let with = std::iter::once(report(1_900, 100)).chain(thrashers());
        let round = Round(vec![
            ("alone", vec![report(8_000, 100), None, None, None, None]),
            ("saturated", vec![report(10_000, 100), None, None, None, None]),
            ("without", std::iter::once(report(100, 900)).chain(thrashers()).collect()),
            ("with", with.collect()),
        ]);
        let row = Row::Thrash(Polite::D8, false);
        let figures = of(row, Order::Together, &[round], &costs(), true);
        is(&figures, "share", 2_000.0, None);
        is(&figures, "kept %", 95.0, Some(true));
        is(&figures, "of part %", 118.75, None);
        is(&figures, "thrasher with", 8_000.0, None);
    }

    #[test]
    fn a_disk_that_arrives_has_a_time_to_its_share() {
        let pauses = Some(Pauses { work: 500_000_000, pause: 2_000_000_000 });
        let polite = |delays: &[usize], pauses| {
            let mut polite = report(5_000, 100).unwrap();
            // The share gives 50 operations in a step.
            let steps = |delay| (0..50).map(move |n| if n < delay { 10 } else { 50 });
            polite.steps = delays.iter().copied().flat_map(steps).collect();
            polite.options.pauses = pauses;
            Some(polite)
        };
        let round = |polite| {
            Round(vec![
                ("alone", vec![report(8_000, 100)]),
                ("saturated", vec![report(10_000, 100)]),
                ("without", vec![report(100, 900), report(9_000, 100)]),
                ("with", vec![polite, report(5_000, 100)]),
            ])
        };
        let row = Row::Thrash(Polite::D8, false);
        let rounds = [&[2], &[4], &[30]].map(|delays| round(polite(delays, None)));
        let figures = of(row, Order::Returns, &rounds, &costs(), true);
        is(&figures, "to share ms", 50.0, None);
        // On a real device, 80% of 4,000 operations a second.
        let figures = of(row, Order::Returns, &rounds, &costs(), false);
        is(&figures, "to share ms", 50.0, None);
        let rounds = [round(polite(&[2, 2], pauses)), round(polite(&[2, 39, 2], pauses))];
        let figures = of(row, Order::Sleeps, &rounds, &costs(), true);
        // Definition 7: 30 ms and 400 ms are neighbours, and the quantile is 0.96 between them.
        is(&figures, "to share ms", 30.0 + 0.96 * 370.0, None);
    }

    #[test]
    fn shares_are_of_the_devices_time() {
        let with = vec![report(700, 1), report(1_400, 1), report(2_800, 1), report(5_600, 1)];
        let rounds = [Round(vec![("with", with)])];
        let figures = of(Row::Weights(Loads::Same), Order::Together, &rounds, &costs(), true);
        is(&figures, "share 8", 53.33, None);
        is(&figures, "worst error %", 0.0, Some(true));
        is(&figures, "busy %", 10.5, None);
        assert!(
            (jain(&[1.0, 1.0, 1.0]) - 1.0).abs() < 1e-9 && (jain(&[1.0, 0.0]) - 0.5).abs() < 1e-9
        );
    }

    #[test]
    fn a_burst_is_what_it_may_be_and_no_more() {
        let slice = |operations| Slice { operations, ..Slice::default() };
        let right: Vec<_> = (0..30).map(|n| slice(if n < 10 { 600 } else { 200 })).collect();
        assert!(over(&right).abs() < 1e-9, "{}", over(&right));
        let more: Vec<_> = (0..30).map(|n| slice(if n < 11 { 600 } else { 200 })).collect();
        assert!((over(&more) - 0.2).abs() < 1e-9, "{}", over(&more));
        assert!(seconds(&right, |s| s.operations).eq((0..21).map(|n| f64::from(if n < 10 {
            6000 - 400 * n
        } else {
            2000
        }))));
    }
}
