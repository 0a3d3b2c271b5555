//! The rows and their scenes.
//!
//! In: a row's name, and the device's costs. Out: scenes. Their results are described
//! in `figures`.

use std::str::FromStr;

use blockyard_program::costs::DeviceCosts;

use super::scene::{Disk, Export, Scene, load};
use super::thrasher::ThrasherKind;
use crate::client::workload::Pattern;
use crate::client::{LoadOptions, Sizes};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// A disk within its share beside a thrasher, with or without a latency target.
    Thrash(Polite, bool),
    /// A disk within its share beside a thrasher, with latency targets from strict to loose.
    Frontier(Polite),
    /// Weights 1:2:4:8.
    Weights(Loads),
    Equal,
    Reserve,
    Limits,
    Burst,
    Busy,
    Lone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polite {
    D1,
    D8,
    Stream,
    Database,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loads {
    Same,
    Sizes,
    Mixes,
}

pub const ALL: [(&str, Row, &str); 17] = [
    ("thrash-d1", Row::Thrash(Polite::D1, false), "polite: random reads of 4 KiB, one at a time"),
    ("thrash-d8", Row::Thrash(Polite::D8, false), "polite: random reads of 4 KiB, depth 8"),
    (
        "thrash-stream",
        Row::Thrash(Polite::Stream, false),
        "polite: reads of 1 MiB, one after the other, depth 4",
    ),
    (
        "thrash-db",
        Row::Thrash(Polite::Database, false),
        "polite: random writes of 8 KiB, one at a time, each flushed",
    ),
    ("thrash-d1-target", Row::Thrash(Polite::D1, true), "as thrash-d1, with a latency target"),
    ("thrash-d8-target", Row::Thrash(Polite::D8, true), "as thrash-d8, with a latency target"),
    ("frontier-d1", Row::Frontier(Polite::D1), "as thrash-d1, with latency targets 1.1 to 6"),
    ("frontier-d8", Row::Frontier(Polite::D8), "as thrash-d8, with latency targets 1.1 to 6"),
    ("weights", Row::Weights(Loads::Same), "weights 1:2:4:8, all random reads of 4 KiB, depth 128"),
    (
        "weights-sizes",
        Row::Weights(Loads::Sizes),
        "weights 1:2:4:8, 4 KiB, 16 KiB, 64 KiB, and 4 KiB mixed with 64 KiB",
    ),
    (
        "weights-mix",
        Row::Weights(Loads::Mixes),
        "weights 1:2:4:8, reads, writes, half of each, 7 reads in 10",
    ),
    ("equal-64", Row::Equal, "64 disks of equal weight, random reads of 4 KiB, depth 32"),
    (
        "reserve",
        Row::Reserve,
        "a disk of weight 10 with a reservation of 30% beside three thrashers of weight 100",
    ),
    (
        "limits",
        Row::Limits,
        "iops=5000; bps=40M; iops-read=3000 and iops-write=1000, mostly reads, mostly writes",
    ),
    ("burst", Row::Burst, "iops=2000,max=6000,length=1, from the first operation on"),
    ("work-conserving", Row::Busy, "four disks, 4 KiB, half reads, half writes, depth 64"),
    ("lone", Row::Lone, "one disk alone, random reads of 4 KiB, depth 128 and one at a time"),
];

/// Properties of the device that are known before the rows are measured.
pub struct Known {
    pub costs: DeviceCosts,
    /// Mean latency of random 4 KiB reads without other load, in nanoseconds: at depth 1 here, at
    /// depth 8 in the next field.
    pub mean_d1: u64,
    pub mean_d8: u64,
}

/// The settings of a run that decide the scenes.
pub struct Settings {
    /// Seconds of each measurement.
    pub seconds: f64,
    /// Number of completions of each measurement, instead of seconds.
    pub ops: Option<u64>,
    /// The thrasher of the rows `thrash-*`, and the exports of both sides.
    pub thrasher: ThrasherKind,
    pub polite_by: Export,
    pub thrasher_by: Export,
}

/// The scenes of the frontier with their latency targets, in tenths of the mean latency alone.
pub const TARGETS: [(&str, u64); 6] = [
    ("target 1.1", 11),
    ("target 1.3", 13),
    ("target 1.6", 16),
    ("target 2", 20),
    ("target 3", 30),
    ("target 6", 60),
];
pub const WEIGHTS: [u32; 4] = [1, 2, 4, 8];
pub const EQUALS: usize = 64;
/// Limits of the row `limits`, in operations or bytes per second.
pub const IOPS: u64 = 5000;
pub const BPS: u64 = 40 << 20;
pub const IOPS_READ: u64 = 3000;
pub const IOPS_WRITE: u64 = 1000;
/// Limits of the row `burst`: the rate and the maximum rate in operations per second, and the
/// length of a burst in seconds.
pub const RATE: u64 = 2000;
pub const MAX: u64 = 6000;
pub const LENGTH: f64 = 1.0;

impl FromStr for Row {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, anyhow::Error> {
        let found = ALL.iter().find(|(name, ..)| *name == text).map(|(_, row, _)| *row);
        let names = || ALL.map(|(name, ..)| name).join(", ");
        found.ok_or_else(|| anyhow::anyhow!("\"{text}\" is no row: {}", names()))
    }
}

impl Row {
    pub fn name(self) -> &'static str {
        ALL.iter().find(|(_, row, _)| *row == self).map_or("", |(name, ..)| name)
    }

    /// Returns whether a run without `--rows` has this row.
    pub fn is_default(self, model: bool) -> bool {
        match self {
            Row::Frontier(_) => false,
            Row::Equal => model,
            _ => true,
        }
    }

    pub fn about(self) -> &'static str {
        ALL.iter().find(|(_, row, _)| *row == self).map_or("", |(.., about)| about)
    }

    pub fn scenes(self, known: &Known, settings: &Settings) -> Vec<Scene> {
        // Limits of a rate are limits of each second.
        let ops = settings.ops.filter(|_| !matches!(self, Row::Limits | Row::Burst));
        let scenes = self.timed_scenes(known, settings).into_iter();
        scenes.map(|scene| Scene { ops, ..scene }).collect()
    }

    fn timed_scenes(self, known: &Known, settings: &Settings) -> Vec<Scene> {
        let seconds = settings.seconds;
        match self {
            Row::Thrash(polite, target) => polite.scenes(target, known, settings),
            Row::Frontier(polite) => polite.frontier(known, settings),
            Row::Weights(loads) => vec![Scene::new("with", true, loads.disks(), seconds)],
            Row::Equal => [("without", false), ("with", true)]
                .map(|(name, fair)| equal(name, fair, seconds))
                .into(),
            Row::Reserve => reserve(&known.costs, seconds),
            Row::Limits => limits(seconds.max(3.0)),
            Row::Burst => {
                let disk = Disk::new("limited", load(Pattern::Randread, 4096, 64));
                let disk = disk.knob("iops", format!("{RATE},max={MAX},length={LENGTH}"));
                vec![Scene {
                    warmup: 0.0,
                    ..Scene::new("burst", true, vec![disk], seconds.max(4.0))
                }]
            }
            Row::Busy => {
                let disk =
                    |n: usize| Disk::new(&format!("busy{n}"), load(Pattern::Randrw, 4096, 64));
                let disks: Vec<_> = (0..4).map(disk).collect();
                [("without", false), ("with", true)]
                    .map(|(name, fair)| Scene::new(name, fair, disks.clone(), seconds))
                    .into()
            }
            Row::Lone => {
                let scene = |name, fair, depth| {
                    Scene::new(
                        name,
                        fair,
                        vec![Disk::new("lone", load(Pattern::Randread, 4096, depth))],
                        seconds,
                    )
                };
                let at_once = [scene("without", false, 128), scene("with", true, 128)];
                at_once
                    .into_iter()
                    .chain([scene("without, d1", false, 1), scene("with, d1", true, 1)])
                    .collect()
            }
        }
    }
}

impl Polite {
    fn load(self) -> LoadOptions {
        match self {
            Polite::D1 => load(Pattern::Randread, 4096, 1),
            Polite::D8 => load(Pattern::Randread, 4096, 8),
            Polite::Stream => load(Pattern::Read, 1 << 20, 4),
            Polite::Database => LoadOptions { flush_every: 1, ..load(Pattern::Randwrite, 8192, 1) },
        }
    }

    fn scenes(self, target: bool, known: &Known, settings: &Settings) -> Vec<Scene> {
        let polite = self.disk(settings);
        let thrashers = thrashers(settings);
        let seconds = settings.seconds;
        let depth = if self == Polite::Stream { 16 } else { 256 };
        let saturated = Disk { load: Some(LoadOptions { depth, ..self.load() }), ..polite.clone() };
        let idle: Vec<_> = thrashers.iter().map(Disk::idle).collect();
        let protected = match target {
            true => self.with_target(11, known, settings),
            false => polite.clone(),
        };
        vec![
            Scene::new("alone", false, beside(&polite, &idle), seconds),
            Scene::new("saturated", false, beside(&saturated, &idle), seconds),
            Scene::new("without", false, beside(&polite, &thrashers), seconds),
            Scene::new("with", true, beside(&protected, &thrashers), seconds),
        ]
    }

    /// Returns the scenes without a target, and one for each of [`TARGETS`].
    fn frontier(self, known: &Known, settings: &Settings) -> Vec<Scene> {
        let thrashers = thrashers(settings);
        let aimed = |(name, tenths): (&'static str, u64)| {
            let disk = self.with_target(tenths, known, settings);
            Scene::new(name, true, beside(&disk, &thrashers), settings.seconds)
        };
        let plain = self.scenes(false, known, settings).into_iter();
        plain.chain(TARGETS.into_iter().map(aimed)).collect()
    }

    fn disk(self, settings: &Settings) -> Disk {
        Disk::new("polite", self.load()).by(settings.polite_by)
    }

    /// Returns the disk with a latency target in tenths of its mean latency alone.
    fn with_target(self, tenths: u64, known: &Known, settings: &Settings) -> Disk {
        let alone = if self == Polite::D8 { known.mean_d8 } else { known.mean_d1 };
        let target = format!("{}us", (alone * tenths / 10).div_ceil(1000));
        self.disk(settings).knob("latency-target", target)
    }
}

fn thrashers(settings: &Settings) -> Vec<Disk> {
    let disks = settings.thrasher.disks().into_iter();
    disks.map(|disk| disk.by(settings.thrasher_by)).collect()
}

fn beside(disk: &Disk, others: &[Disk]) -> Vec<Disk> {
    [std::slice::from_ref(disk), others].concat()
}

impl Loads {
    fn disks(self) -> Vec<Disk> {
        let read = |bs| load(Pattern::Randread, bs, 128);
        let split = |sizes: &[(u64, u8)]| LoadOptions {
            bssplit: Some(Sizes(sizes.to_vec())),
            ..read(4096)
        };
        let mixed = |rwmixread| LoadOptions { rwmixread, ..load(Pattern::Randrw, 4096, 128) };
        let loads = match self {
            Loads::Same => [read(4096), read(4096), read(4096), read(4096)],
            Loads::Sizes => {
                [read(4096), read(16 << 10), read(64 << 10), split(&[(4096, 50), (64 << 10, 50)])]
            }
            Loads::Mixes => [read(4096), load(Pattern::Randwrite, 4096, 128), mixed(50), mixed(70)],
        };
        let disk = |(weight, load): (u32, LoadOptions)| {
            Disk::new(&format!("weight{weight}"), load).knob("weight", i64::from(weight * 100))
        };
        WEIGHTS.into_iter().zip(loads).map(disk).collect()
    }
}

fn equal(name: &'static str, fair: bool, seconds: f64) -> Scene {
    let disk = |n: usize| Disk::new(&format!("equal{n}"), load(Pattern::Randread, 4096, 32));
    Scene::new(name, fair, (0..EQUALS).map(disk).collect(), seconds)
}

/// Returns the rate of 4 KiB reads that uses 30% of the device's time.
pub fn reserved(costs: &DeviceCosts) -> u64 {
    let each = costs.read + costs.read_per_mib / 256;
    300_000_000 / each.max(1)
}

fn reserve(costs: &DeviceCosts, seconds: f64) -> Vec<Scene> {
    let own = Disk::new("reserved", load(Pattern::Randread, 4096, 64)).knob("weight", 10);
    let thrasher = ThrasherKind::default().load();
    let others = (1..4).map(|n| Disk::new(&format!("thrasher{n}"), thrasher.clone()).beside());
    let disks = |own: Disk| std::iter::once(own).chain(others.clone()).collect();
    let iops = reserved(costs) as i64;
    vec![
        Scene::new("with", true, disks(own.clone().knob("reserve-iops", iops)), seconds),
        Scene::new("unreserved", true, disks(own), seconds),
    ]
}

fn limits(seconds: f64) -> Vec<Scene> {
    let disk = |load: LoadOptions| Disk::new("limited", load);
    let small = disk(load(Pattern::Randread, 4096, 64)).knob("iops", IOPS.to_string());
    let large = disk(load(Pattern::Randread, 64 << 10, 16)).knob("bps", BPS.to_string());
    let mixed = |rwmixread| {
        let disk = disk(LoadOptions { rwmixread, ..load(Pattern::Randrw, 4096, 64) });
        disk.knob("iops-read", IOPS_READ.to_string()).knob("iops-write", IOPS_WRITE.to_string())
    };
    let scene = |name, disk| Scene { warmup: 1.5, ..Scene::new(name, true, vec![disk], seconds) };
    vec![
        scene("iops", small),
        scene("bps", large),
        // In the first scene the limit of reads decides the rate, in the second that of writes.
        scene("iops-read", mixed(95)),
        scene("iops-write", mixed(40)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: Known = Known {
        costs: DeviceCosts {
            device: String::new(),
            description: String::new(),
            read: 9_000,
            read_sequential: 9_000,
            read_per_mib: 256_000,
            write: 20_000,
            write_sequential: 20_000,
            write_per_mib: 256_000,
            flush: 1,
            discard: 1,
            write_zeroes: 1,
            window: 1,
            base_latency_read: 1,
            base_latency_write: 1,
        },
        mean_d1: 100_000,
        mean_d8: 250_001,
    };

    fn settings(thrasher: ThrasherKind) -> Settings {
        let (polite_by, thrasher_by) = (Export::Nbd, Export::VhostUser);
        Settings { seconds: 2.0, ops: None, thrasher, polite_by, thrasher_by }
    }

    fn scenes(name: &str) -> Vec<Scene> {
        let row: Row = name.parse().unwrap();
        assert_eq!(row.name(), name);
        row.scenes(&KNOWN, &settings(ThrasherKind::default()))
    }

    fn names(scenes: &[Scene]) -> Vec<&str> {
        scenes.iter().map(|scene| scene.name).collect()
    }

    fn knob(disk: &Disk, key: &str) -> Option<String> {
        disk.knobs.get(key).map(|value| value.to_string().trim_matches('"').to_string())
    }

    #[test]
    fn a_row_that_is_none_is_refused_with_the_names_of_all() {
        let error = "thrash".parse::<Row>().unwrap_err().to_string();
        assert!(error.starts_with("\"thrash\" is no row: thrash-d1, thrash-d8,"), "{error}");
        let defaults = |model| ALL.iter().filter(|(_, row, _)| row.is_default(model)).count();
        // The frontier takes long, and 64 files of a folder take much space.
        assert_eq!((defaults(true), defaults(false)), (15, 14));
        assert!(ALL.iter().all(|(_, row, about)| row.about() == *about));
    }

    #[test]
    fn a_polite_disk_is_measured_alone_and_beside_the_thrasher_with_and_without_the_scheduler() {
        let scenes = scenes("thrash-d8");
        assert_eq!(names(&scenes), ["alone", "saturated", "without", "with"]);
        assert!(scenes.iter().all(|s| s.fair == (s.name == "with") && s.seconds == 2.0));
        for scene in &scenes {
            let [polite, thrasher] = &scene.disks[..] else {
                panic!("{} disks", scene.disks.len())
            };
            assert_eq!((polite.export, thrasher.export), (Export::Nbd, Export::VhostUser));
            assert!(!polite.beside && thrasher.beside);
            // The thrasher is served, but idle, while the polite disk is alone.
            let busy = matches!(scene.name, "with" | "without");
            assert_eq!(thrasher.load.is_some(), busy, "{}", scene.name);
            let depth = polite.load.as_ref().unwrap().depth;
            assert_eq!(depth, if scene.name == "saturated" { 256 } else { 8 });
            assert_eq!(knob(polite, "latency-target"), None);
        }
        let several =
            Row::Thrash(Polite::D1, false).scenes(&KNOWN, &settings(ThrasherKind::Several));
        assert!(several.iter().all(|scene| scene.disks.len() == 5));
    }

    #[test]
    fn a_latency_target_is_a_multiple_of_the_latency_alone() {
        let target = |scene: &Scene| knob(&scene.disks[0], "latency-target");
        let d1 = scenes("thrash-d1-target");
        assert_eq!(
            d1.iter().map(target).collect::<Vec<_>>(),
            [None, None, None, Some("110us".into())]
        );
        // Rounded up: 275.0011 us.
        assert_eq!(target(&scenes("thrash-d8-target")[3]), Some("276us".into()));
        let frontier = scenes("frontier-d1");
        assert_eq!(names(&frontier)[4..], TARGETS.map(|(name, _)| name));
        let targets: Vec<_> = frontier[4..].iter().filter_map(target).collect();
        assert_eq!(targets, ["110us", "130us", "160us", "200us", "300us", "600us"]);
        assert!(frontier[4..].iter().all(|scene| scene.fair));
    }

    #[test]
    fn a_number_of_operations_ends_all_scenes_but_those_of_limits() {
        let settings = Settings { ops: Some(400), ..settings(ThrasherKind::default()) };
        for (name, row, _) in ALL {
            let timed = ["limits", "burst"].contains(&name);
            let scenes = row.scenes(&KNOWN, &settings);
            let ops = if timed { None } else { Some(400) };
            assert!(scenes.iter().all(|scene| scene.ops == ops), "{name}");
        }
        assert!(scenes("thrash-d1").iter().all(|scene| scene.ops.is_none()));
    }

    #[test]
    fn weights_are_one_to_eight_with_each_kind_of_load() {
        for name in ["weights", "weights-sizes", "weights-mix"] {
            let scenes = scenes(name);
            assert_eq!((scenes.len(), scenes[0].fair), (1, true));
            let weights: Vec<_> =
                scenes[0].disks.iter().map(|d| knob(d, "weight").unwrap()).collect();
            assert_eq!(weights, ["100", "200", "400", "800"], "{name}");
        }
        let sizes = scenes("weights-sizes");
        let load = |n: usize| sizes[0].disks[n].load.as_ref().unwrap();
        assert_eq!((load(1).bs, load(2).bs), (16 << 10, 64 << 10));
        assert_eq!(load(3).bssplit, Some(Sizes(vec![(4096, 50), (64 << 10, 50)])));
        let mix = scenes("weights-mix");
        assert_eq!(mix[0].disks[3].load.as_ref().unwrap().rwmixread, 70);
    }

    #[test]
    fn a_reservation_is_three_tenths_of_the_time_of_the_device() {
        // A read of 4 KiB costs 10 us.
        assert_eq!(reserved(&KNOWN.costs), 30_000);
        assert_eq!(
            reserved(&DeviceCosts::default()),
            300_000_000 / DeviceCosts::default().read.max(1)
        );
        let scenes = scenes("reserve");
        assert_eq!(names(&scenes), ["with", "unreserved"]);
        let own: Vec<_> = scenes.iter().map(|s| knob(&s.disks[0], "reserve-iops")).collect();
        assert_eq!(own, [Some("30000".into()), None]);
        assert!(scenes.iter().all(|s| knob(&s.disks[0], "weight") == Some("10".into())));
        assert!(scenes.iter().all(|s| s.disks.len() == 4 && s.disks[1..].iter().all(|d| d.beside)));
    }

    #[test]
    fn limits_are_measured_long_enough_and_a_burst_from_its_first_operation() {
        let limits = scenes("limits");
        assert_eq!(names(&limits), ["iops", "bps", "iops-read", "iops-write"]);
        assert!(limits.iter().all(|scene| scene.seconds == 3.0 && scene.warmup == 1.5));
        assert_eq!(knob(&limits[0].disks[0], "iops"), Some("5000".into()));
        assert_eq!(knob(&limits[1].disks[0], "bps"), Some((40 << 20).to_string()));
        let reads = |n: usize| limits[n].disks[0].load.as_ref().unwrap().rwmixread;
        assert_eq!((reads(2), reads(3)), (95, 40));
        let burst = &scenes("burst")[0];
        assert_eq!((burst.warmup, burst.seconds), (0.0, 4.0));
        assert_eq!(knob(&burst.disks[0], "iops"), Some("2000,max=6000,length=1".into()));
        assert_eq!(scenes("equal-64")[1].disks.len(), 64);
        assert_eq!(names(&scenes("lone")), ["without", "with", "without, d1", "with, d1"]);
        assert!(scenes("work-conserving").iter().all(|scene| scene.disks.len() == 4));
    }
}
