//! `bench compare --table`: the tables of docs/benchmark-tables.md. Many loads, each on
//! several systems, in interleaved rounds.
//!
//! ```text
//!   place        folder, images, servers
//!   clients      the host's file, qemu-storage-daemon and Blockyard, by one load generator
//!   overlays     copy-on-write images
//!   guests       experiments in a guest, on a raw disk and on overlays
//!   image_tools  `blockyard image` beside `qemu-img` (image_tasks: the rows)
//!   nbd          NBD servers, by fio
//!   snapshots    copy-on-write disks in a QEMU guest: dm-snapshot, the example cowd, qcow2
//!   thrash       two guests, one of which swaps (thrash_scripts: their scripts)
//!   ublk         block devices of a host, in a QEMU guest
//!   uml          drivers in a User Mode Linux guest
//!   demo         the experiment of `make demo`
//!   columns      the columns of tables that measure a guest: systems, ratios
//!   builds       an earlier build of Blockyard beside this one (`--before`)
//! ```
//! In: the name of a table. Out: Markdown, or all figures as JSON. What must hold: `rounds` orders
//! the measurements; figures are medians of the rounds; all systems of a row have the same rounds,
//! also after an interruption.

mod builds;
mod clients;
mod columns;
mod demo;
#[cfg(test)]
mod fixture;
mod guests;
mod image_tasks;
mod image_tools;
mod nbd;
mod overlays;
mod snapshots;
mod thrash;
mod thrash_scripts;
mod ublk;
mod uml;
mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use blockyard_program::output;

use self::builds::Build;
use self::workspace::Workspace;
pub(crate) use self::workspace::settle;
use crate::job::RunLimit;
use crate::process::{Interrupted, Stop};
use crate::rounds::{Rounds, Turn};
use crate::statistics::median;

/// Names of tables.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub enum TableName {
    /// The host's file, qemu-storage-daemon and Blockyard under the loads of `bench client`
    Clients,
    /// Copy-on-write images: Blockyard's qcow2, its raw, and qemu-storage-daemon's qcow2
    Overlays,
    /// The experiments of 2006 in a User Mode Linux guest: copy and boot, on a raw disk and on
    /// overlays
    OverlayGuests,
    /// NBD servers under fio: Blockyard, qemu-nbd and nbdkit
    Nbd,
    /// `blockyard image` and `qemu-img`: the same work on the same files
    ImageTools,
    /// Copy-on-write disks in a QEMU guest: the kernel's dm-snapshot, the example cowd of the
    /// library, and a qcow2 overlay, by ublk and by vhost-user
    Snapshots,
    /// A guest beside one that runs out of memory and swaps, with fair shares and without
    Thrash,
    /// Block devices of a host, in a QEMU guest: ublk and the kernel's loop device
    Ublk,
    /// A User Mode Linux guest on its own disk driver and on Blockyard, at equal durability
    Uml,
    /// The experiment of `make demo`: a table for people, not Markdown
    Demo,
}

impl TableName {
    /// Returns the defaults of a table: bytes of the disk, and seconds of a run.
    fn usual(self) -> (u64, f64) {
        match self {
            TableName::Overlays => (4 << 30, 2.0),
            TableName::Thrash => (1 << 30, 15.0),
            TableName::Demo => (512 << 20, 0.0),
            TableName::ImageTools => (1 << 30, 0.0),
            TableName::Snapshots => (256 << 20, 2.0),
            TableName::Ublk => (128 << 20, 3.0),
            TableName::Uml => (512 << 20, 1.0),
            TableName::Clients | TableName::OverlayGuests | TableName::Nbd => (2 << 30, 2.0),
        }
    }
}

/// Options of a table.
pub struct TablePlan<'a> {
    pub name: TableName,
    pub rounds: u32,
    pub seconds: Option<f64>,
    /// Operations of a run instead of seconds, for tables with loads of `bench client`.
    pub ops: Option<u64>,
    pub size: Option<u64>,
    /// Only rows with this text in their names.
    pub only: &'a str,
    /// Only systems with one of these names, if there are any.
    pub peers: &'a [String],
    /// The program of an earlier build, which is measured too.
    pub before: Option<&'a Path>,
    /// The guest's kernel, for tables with a choice.
    pub kernel: Option<&'a str>,
    /// Processors of the guest and of the back end, for tables with a choice.
    pub guest_cpus: Option<&'a str>,
    pub server_cpus: Option<&'a str>,
    pub json: bool,
}

impl TablePlan<'_> {
    /// Returns whether a row is measured.
    fn wants(&self, row: &str) -> bool {
        row.contains(self.only)
    }

    /// Returns whether a system is measured.
    fn wants_peer(&self, system: &str) -> bool {
        self.peers.is_empty() || self.peers.iter().any(|peer| peer == system)
    }
}

/// A program or a script without output for this time has failed.
const SILENCE: Duration = Duration::from_secs(300);

/// The figures of one measurement, by their names.
type Figures = BTreeMap<&'static str, f64>;

#[derive(Clone)]
struct Row {
    name: String,
    systems: Vec<String>,
}

/// A table: its rows, their measurement, and its form.
trait Table {
    fn rows(&self) -> Vec<Row>;

    /// Measures a system of a row once. `row` and `system` are indices.
    fn measure(&mut self, row: usize, system: usize) -> Result<Figures>;

    fn markdown(&self, measured: &[Measured]) -> String;

    /// Returns the place with the program under test, if another build can take its turn.
    fn place(&mut self) -> Option<&mut Workspace> {
        None
    }

    /// Returns whether a system of a row is Blockyard.
    fn is_ours(&self, row: usize, system: usize) -> bool {
        self.rows()[row].systems[system].starts_with("blockyard")
    }

    /// Checks that the measurements have left files unchanged that they must not change.
    fn check(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A row with the figures of all rounds, for each system.
struct Measured {
    row: Row,
    number: usize,
    figures: Vec<Vec<Figures>>,
    /// The figures of the same systems with the earlier build.
    before: Vec<Vec<Figures>>,
}

impl Measured {
    /// Returns whether a round of the row is finished.
    fn has_rounds(&self) -> bool {
        self.figures.iter().any(|rounds| !rounds.is_empty())
    }

    /// Returns the median of a figure, if each round has it.
    fn median(&self, system: usize, key: &str) -> Option<f64> {
        let values: Option<Vec<f64>> =
            self.figures[system].iter().map(|f| f.get(key).copied()).collect();
        values.filter(|values| !values.is_empty()).map(median)
    }

    /// Returns the median of the rounds' ratios of a figure, between two systems.
    fn ratio(&self, own: usize, other: usize, key: &str) -> Option<f64> {
        let pairs = self.figures[own].iter().zip(&self.figures[other]);
        let ratios: Option<Vec<f64>> =
            pairs.map(|(a, b)| Some(a.get(key)? / b.get(key)?)).collect();
        ratios.filter(|ratios| !ratios.is_empty()).map(median)
    }
}

pub fn run(plan: &TablePlan<'_>, guests: Option<PathBuf>, stop: Stop) -> Result<()> {
    let (size, seconds) = plan.name.usual();
    let limit = match plan.ops {
        Some(_) if !matches!(plan.name, TableName::Clients | TableName::Overlays) => {
            anyhow::bail!("--ops: only the tables clients and overlays count operations")
        }
        Some(ops) => RunLimit::Operations(ops),
        None => RunLimit::Seconds(plan.seconds.unwrap_or(seconds)),
    };
    let place = Workspace::new(guests, plan.size.unwrap_or(size), limit, stop.clone())?;
    let mut table: Box<dyn Table> = match plan.name {
        TableName::Clients => Box::new(clients::Clients::new(place)?),
        TableName::Overlays => Box::new(overlays::Overlays::new(place)?),
        TableName::OverlayGuests => Box::new(guests::OverlayGuests::new(place)?),
        TableName::Nbd => Box::new(nbd::Nbd::new(place)?),
        TableName::ImageTools => Box::new(image_tools::ImageTools::new(place, plan.only)?),
        TableName::Snapshots => Box::new(snapshots::Snapshots::new(place, plan)?),
        TableName::Thrash => Box::new(thrash::Thrash::new(place)?),
        TableName::Ublk => Box::new(ublk::Ublk::new(place, plan)?),
        TableName::Uml => Box::new(uml::Uml::new(place, plan)?),
        TableName::Demo => Box::new(demo::Demo::new(place)?),
    };
    let mut measured = chosen(table.as_mut(), plan)?;
    let end = play(table.as_mut(), plan, &stop, &mut measured);
    if end.as_ref().is_err_and(|e| !e.is::<Interrupted>()) {
        return end;
    }
    measured.retain(Measured::has_rounds);
    // The figures mean nothing if the check fails, or if the interruption ended what it needs.
    let checked = table.check();
    if end.is_err() && (measured.is_empty() || checked.is_err()) {
        return end;
    }
    checked?;
    let text = match plan {
        TablePlan { json: true, .. } => json(&measured),
        TablePlan { before: Some(_), .. } => builds::markdown(&measured),
        _ => table.markdown(&measured),
    };
    output::print(text)?;
    end
}

/// Returns the rows of the table that the plan wants, without figures.
fn chosen(table: &mut dyn Table, plan: &TablePlan<'_>) -> Result<Vec<Measured>> {
    let TablePlan { only, peers, .. } = *plan;
    let chosen = table.rows().into_iter().enumerate().filter(|(_, row)| plan.wants(&row.name));
    let new = |(number, row): (usize, Row)| Measured {
        figures: vec![Vec::new(); row.systems.len()],
        before: vec![Vec::new(); row.systems.len()],
        row,
        number,
    };
    let measured: Vec<_> = chosen.map(new).collect();
    anyhow::ensure!(!measured.is_empty(), "--only {only}: no row has such a name");
    anyhow::ensure!(
        plan.before.is_none() || table.place().is_some(),
        "--before: the tables ublk and demo do not measure an earlier build"
    );
    let has = |peer: &String| measured.iter().any(|m| m.row.systems.contains(peer));
    if let Some(wrong) = peers.iter().find(|peer| !has(peer)) {
        let all: BTreeSet<_> = measured.iter().flat_map(|m| &m.row.systems).collect();
        anyhow::bail!("--peer {wrong}: the table has {all:?}");
    }
    Ok(measured)
}

/// Measures the rows in rounds, and adds the figures of each finished round of a row.
fn play(
    table: &mut dyn Table,
    plan: &TablePlan<'_>,
    stop: &Stop,
    measured: &mut [Measured],
) -> Result<()> {
    let turns_of = |Measured { row, number, .. }: &Measured| {
        let wanted = |system: &usize| plan.wants_peer(&row.systems[*system]);
        builds::turns(table, plan, *number, (0..row.systems.len()).filter(wanted))
    };
    let turns: Vec<Vec<(usize, Build)>> = measured.iter().map(turns_of).collect();
    let rows: Vec<(Row, usize)> = measured.iter().map(|m| (m.row.clone(), m.number)).collect();
    let rounds = plan.rounds;
    let measure = |turn: Turn| {
        let ((row, number), (system, build)) = (&rows[turn.row], turns[turn.row][turn.system]);
        let (name, system_name) = (&row.name, &row.systems[system]);
        let figures = builds::with(table, build, plan, |t| t.measure(*number, system))
            .with_context(|| format!("{name} on {system_name}{build}"))?;
        let told: Vec<_> =
            figures.iter().map(|(name, value)| format!("{name} {value:.3}")).collect();
        output::note(format_args!(
            "round {} of {rounds}: {name} on {system_name}{build}: {}",
            turn.round + 1,
            told.join(", ")
        ));
        Ok(figures)
    };
    let keep = |_, row: usize, all: Vec<(usize, Figures)>| {
        for (turn, figures) in all {
            let (system, build) = turns[row][turn];
            let Measured { figures: now, before, .. } = &mut measured[row];
            let kept = if build == Build::Before { before } else { now };
            kept[system].push(figures);
        }
        Ok(())
    };
    Rounds::new(rounds, turns.iter().map(Vec::len), stop).run_whole(measure, keep)
}

/// Returns all figures of all rounds.
fn json(measured: &[Measured]) -> String {
    let row = |m: &Measured| {
        let of = |build: Build, figures: &[Vec<Figures>]| {
            let all = m.row.systems.iter().zip(figures).filter(|(_, rounds)| !rounds.is_empty());
            all.map(|(name, rounds)| (format!("{name}{build}"), serde_json::json!(rounds)))
                .collect::<Vec<_>>()
        };
        let systems = of(Build::Now, &m.figures).into_iter().chain(of(Build::Before, &m.before));
        (m.row.name.clone(), serde_json::Value::Object(systems.collect()))
    };
    format!("{}\n", serde_json::Value::Object(measured.iter().map(row).collect()))
}

/// Formats a whole number with commas between thousands.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// Formats a cell for a figure that may be missing.
fn cell(figure: Option<f64>, text: impl Fn(f64) -> String) -> String {
    figure.map(text).unwrap_or_default()
}

/// Formats a Markdown table. `head` is its first line. All columns but the first have figures.
fn markdown(head: &[String], lines: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(head);
    text += &format!("|---{}|\n", "|--:".repeat(head.len() - 1));
    lines.iter().for_each(|cells| text += &line(cells));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table whose measurements return 1, 2, 3 and so on as their figures.
    struct Counts {
        calls: Vec<(usize, usize)>,
    }

    impl Table for Counts {
        fn rows(&self) -> Vec<Row> {
            let row = |name: &str, systems: &[&str]| Row {
                name: name.into(),
                systems: systems.iter().map(ToString::to_string).collect(),
            };
            vec![
                row("reads", &["a", "b", "c"]),
                row("writes", &["a"]),
                row("more reads", &["a", "b"]),
            ]
        }

        fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
            self.calls.push((row, system));
            Ok(Figures::from([("calls", self.calls.len() as f64)]))
        }

        fn markdown(&self, _: &[Measured]) -> String {
            String::new()
        }
    }

    /// Chooses the rows of the plan and measures them.
    fn rounds(table: &mut dyn Table, plan: &TablePlan<'_>, stop: &Stop) -> Result<Vec<Measured>> {
        let mut measured = chosen(table, plan)?;
        play(table, plan, stop, &mut measured)?;
        Ok(measured)
    }

    #[test]
    fn rounds_are_interleaved_and_begin_with_another_system() {
        let mut table = Counts { calls: Vec::new() };
        let all = TablePlan {
            name: TableName::Nbd,
            rounds: 1,
            seconds: None,
            ops: None,
            size: None,
            only: "",
            peers: &[],
            before: None,
            kernel: None,
            guest_cpus: None,
            server_cpus: None,
            json: false,
        };
        let plan = |rounds, only| TablePlan { rounds, only, ..all };
        let measured = rounds(&mut table, &plan(3, "reads"), &Stop::default()).unwrap();
        let first = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)];
        let second = [(0, 1), (0, 2), (0, 0), (2, 1), (2, 0)];
        let third = [(0, 2), (0, 0), (0, 1), (2, 0), (2, 1)];
        assert_eq!(table.calls, [first, second, third].concat());
        // The calls of system 0 in row 0 were the first, the eighth and the twelfth.
        assert_eq!(measured[0].median(0, "calls"), Some(8.0));
        assert_eq!(measured[0].median(0, "other"), None);
        // System 1 was the second, the sixth and the thirteenth; the median of 2 / 1, 6 / 8 and 13
        // / 12.
        assert_eq!(measured[0].ratio(1, 0, "calls"), Some(13.0 / 12.0));
        assert_eq!(measured[0].ratio(1, 0, "other"), None);
        assert!(rounds(&mut table, &plan(1, "nothing"), &Stop::default()).is_err());
        // If the user chooses systems, each round still begins with another one of them.
        let (peers, wrong) = (["c", "a"].map(String::from), ["d".to_string()]);
        table.calls.clear();
        let measured =
            rounds(&mut table, &TablePlan { peers: &peers, ..plan(2, "reads") }, &Stop::default())
                .unwrap();
        assert_eq!(table.calls, [(0, 0), (0, 2), (2, 0), (0, 2), (0, 0), (2, 0)]);
        assert_eq!(measured[0].median(1, "calls"), None);
        assert!(
            rounds(&mut table, &TablePlan { peers: &wrong, ..plan(1, "reads") }, &Stop::default())
                .is_err()
        );
    }

    /// A table in which one system fails.
    struct Failing(Counts);

    impl Table for Failing {
        fn rows(&self) -> Vec<Row> {
            self.0.rows()
        }

        fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
            anyhow::ensure!((row, system) != (0, 1), "the guest has no disk");
            self.0.measure(row, system)
        }

        fn markdown(&self, _: &[Measured]) -> String {
            String::new()
        }
    }

    fn two_rounds() -> TablePlan<'static> {
        TablePlan {
            name: TableName::Nbd,
            rounds: 2,
            seconds: None,
            ops: None,
            size: None,
            only: "",
            peers: &[],
            before: None,
            kernel: None,
            guest_cpus: None,
            server_cpus: None,
            json: false,
        }
    }

    #[test]
    fn a_measurement_that_fails_is_named() {
        let mut table = Failing(Counts { calls: Vec::new() });
        let plan = two_rounds();
        let error = rounds(&mut table, &plan, &Stop::default()).err().unwrap();
        assert_eq!(format!("{error:#}"), "reads on b: the guest has no disk");
        assert_eq!(table.0.calls, [(0, 0)], "no measurement after it");
        // An interruption before a measurement is no failure of it.
        let stop = Stop::default();
        stop.request();
        let error = rounds(&mut table, &plan, &stop).err().unwrap();
        assert!(error.is::<crate::process::Interrupted>() && table.0.calls.len() == 1);
        // A table that has no place for another program refuses one.
        let plan = TablePlan { before: Some(Path::new("/old/blockyard")), ..plan };
        let error = rounds(&mut table, &plan, &Stop::default()).err().unwrap().to_string();
        assert!(error.contains("--before"), "{error}");
    }

    /// A table that the user interrupts in the second round of its first row.
    struct Stopped(Counts, Stop);

    impl Table for Stopped {
        fn rows(&self) -> Vec<Row> {
            self.0.rows()
        }

        fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
            let figures = self.0.measure(row, system);
            if self.0.calls.len() == 8 {
                self.1.request();
            }
            figures
        }

        fn markdown(&self, _: &[Measured]) -> String {
            String::new()
        }
    }

    #[test]
    fn an_interruption_leaves_the_same_rounds_of_all_systems() {
        let stop = Stop::default();
        let mut table = Stopped(Counts { calls: Vec::new() }, stop.clone());
        let plan = two_rounds();
        let mut measured = chosen(&mut table, &plan).unwrap();
        let end = play(&mut table, &plan, &stop, &mut measured).unwrap_err();
        assert!(end.is::<Interrupted>());
        let kept: Vec<Vec<_>> =
            measured.iter().map(|m| m.figures.iter().map(Vec::len).collect()).collect();
        assert_eq!(kept, [vec![1, 1, 1], vec![1], vec![1, 1]]);
        assert!(measured.iter().all(Measured::has_rounds));
        // The signal came before the first turn.
        let mut measured = chosen(&mut table, &plan).unwrap();
        play(&mut table, &plan, &stop, &mut measured).unwrap_err();
        assert!(!measured.iter().any(Measured::has_rounds));
    }

    #[test]
    fn the_json_has_all_rounds_of_the_systems_that_were_measured() {
        let figures = || vec![Figures::from([("iops", 1.0)]), Figures::from([("iops", 2.5)])];
        let mut row = fixture::measured("reads", &[("a", figures()), ("b", vec![])]);
        row.before[0] = vec![Figures::from([("iops", 9.0)])];
        assert_eq!(
            json(&[row]),
            "{\"reads\":{\"a\":[{\"iops\":1.0},{\"iops\":2.5}],\"a, before\":[{\"iops\":9.0}]}}\n"
        );
    }

    #[test]
    fn cells() {
        assert_eq!(
            [0.0, 999.4, 1000.0, 1_234_567.0].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
        let head = ["load".to_string(), "IOPS".to_string()];
        assert_eq!(
            markdown(&head, &[head.to_vec()]),
            "| load | IOPS |\n|---|--:|\n| load | IOPS |\n"
        );
    }
}
