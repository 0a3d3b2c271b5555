//! UML's stock driver and Blockyard inside a User Mode Linux guest.
//!
//! Each measurement of a system boots one guest, which runs the loads of all rows. fio's rates and
//! latencies are by the guest's clock. The host measures the durations of the other rows, and the
//! CPU time of the back end, at marks that the guest prints. (ubd has no back end: it runs in the
//! guest.) In: processors of guest and back end. Out: operations a second, CPU time for each. What
//! must hold: only systems of equal durability are compared.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::workspace::{Workspace, settle};
use super::{Figures, Measured, Row, SILENCE, Table, TablePlan, cell, grouped, markdown};
use crate::compare::cpu::Snapshot;
use crate::process::Process;

/// Each system: its name, the option of the guest's disk, and the cache mode of the back end.
const SYSTEMS: [(&str, &str, Option<&str>); 6] = [
    // Page cache, FLUSH dropped.
    ("ubd", "ubd", None),
    ("blockyard unsafe", "vhost", Some("unsafe")),
    // Page cache and O_DIRECT; FLUSH is fdatasync.
    ("blockyard writeback", "vhost", Some("writeback")),
    ("blockyard none", "vhost", Some("none")),
    // Every write is durable.
    ("ubd O_SYNC", "ubds", None),
    ("blockyard writethrough", "vhost", Some("writethrough")),
];

/// Systems of equal durability: ours, and the one to compare with. (writeback and none are more
/// durable than ubd, which drops flushes, and less than ubd with O_SYNC. The table has them to show
/// the cost of a real flush.)
const PAIRS: [(usize, usize, &str); 2] =
    [(1, 0, "unsafe to ubd"), (5, 4, "writethrough to ubd O_SYNC")];

const LOADS: [(&str, &str); 9] = [
    ("4k random read, depth 32", "--rw=randread --bs=4k --iodepth=32"),
    ("4k random read, depth 1", "--rw=randread --bs=4k --iodepth=1"),
    ("4k random write, depth 32", "--rw=randwrite --bs=4k --iodepth=32"),
    ("4k random write, depth 1", "--rw=randwrite --bs=4k --iodepth=1"),
    ("64k random read, depth 32", "--rw=randread --bs=64k --iodepth=32"),
    ("64k random write, depth 32", "--rw=randwrite --bs=64k --iodepth=32"),
    ("64k random write, depth 1", "--rw=randwrite --bs=64k --iodepth=1"),
    ("1M read, depth 8", "--rw=read --bs=1M --iodepth=8"),
    ("1M write, depth 8", "--rw=write --bs=1M --iodepth=8"),
];
/// Rows that are timed by the host's clock.
const TIMED: [&str; 2] = ["dd 32 MiB + sync", "rm + sync"];

/// `mark NAME COUNT`: requests of the disk so far. `row NUMBER READS WRITES`: a load between the
/// last two marks; fio's terse version 3 has the rates of reads and of writes in fields 8 and 49.
const HEAD: &str = r#"set -e
disk=$(ls /dev/vda /dev/ubda 2>/dev/null | head -1)
stat=/sys/block/${disk#/dev/}/stat
mark() { read -r r _ _ _ w _ < $stat; echo "mark $1 $((r + w))"; }
run() { # NUMBER FIO_OPTIONS...
    mark begin
    fio --name=x --filename=$disk --ioengine=libaio --direct=1 --time_based --invalidate=0 --minimal "${@:2}" >/tmp/out ||
        { cat /tmp/out; exit 1; }
    mark end
    IFS=';' read -ra f </tmp/out
    echo "row $1 ${f[7]} ${f[48]}"
}
"#;
const TAIL: &str = r#"mkfs.ext4 -q -F $disk && mount $disk /mnt && sync
mark begin; dd if=/dev/zero of=/mnt/f bs=1M count=32 2>/dev/null && sync; mark end; echo "row 9 0 0"
mark begin; rm /mnt/f && sync; mark end; echo "row 10 0 0"
umount /mnt
"#;

pub struct Uml {
    place: Workspace,
    base: PathBuf,
    /// Processors of the guest and of the back end: a list, or `any`.
    guest_cpus: String,
    server_cpus: String,
    script: String,
    /// Figures of the last boots that `measure` has not returned yet, by program, system and row.
    boots: BTreeMap<(PathBuf, usize, usize), Figures>,
}

impl Uml {
    pub fn new(place: Workspace, plan: &TablePlan<'_>) -> Result<Self> {
        let base = place.base()?;
        let (seconds, mib) = (place.seconds.ceil(), place.size >> 20);
        let mut script = HEAD.to_string();
        for (number, (name, options)) in
            LOADS.iter().enumerate().filter(|(_, load)| plan.wants(load.0))
        {
            script +=
                &format!("run {number} --runtime={seconds} --size={mib}m {options} # {name}\n");
        }
        if TIMED.iter().any(|name| plan.wants(name)) {
            script += TAIL;
        }
        let guest_cpus = plan.guest_cpus.unwrap_or("any").to_string();
        // If the guest is bound to a processor, the back end uses the same one by default.
        let server_cpus = plan.server_cpus.map_or_else(|| guest_cpus.clone(), String::from);
        Ok(Uml { place, base, guest_cpus, server_cpus, script, boots: BTreeMap::new() })
    }

    /// Boots a guest on a system's disk. Returns figures of all rows.
    fn boot(&self, system: usize) -> Result<Vec<(usize, Figures)>> {
        let (name, kind, cache) = SYSTEMS[system];
        settle(&self.base, true)?;
        let script = self.place.folder.join("script");
        std::fs::write(&script, &self.script)?;
        let mut back = cache.map(|cache| self.back_end(cache)).transpose()?;
        let target = back.as_ref().map_or(&self.base, |(_, socket)| socket);
        let mut command = Command::new(self.place.guests()?.join("uml"));
        command.arg("--disk").arg(format!("{kind}={}", target.display()));
        command
            .args(["--seccomp", "on", "--timeout", "300", "--cpu", &self.guest_cpus])
            .arg(&script);
        let mut guest = Process::start(&command)?;
        let (mut marks, mut rows, mut said) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((came, line)) = guest.line(&self.place.stop, Instant::now() + SILENCE)? {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["mark", _, requests] => {
                    let used = back.as_ref().map(|(server, _)| Snapshot::take().tree(server.pid()));
                    marks.push(Mark { came, used, requests: requests.parse()? });
                }
                ["row", number, reads, writes] => {
                    let [.., begin, end] = &marks[..] else {
                        anyhow::bail!("{name}: a row without marks")
                    };
                    let rate = reads.parse::<f64>()?.max(writes.parse()?);
                    rows.push((number.parse()?, end.since(begin, rate)));
                }
                _ => said.push(line),
            }
        }
        guest.finish().with_context(|| format!("{name}: the guest says: {}", said.join("; ")))?;
        if let Some((server, _)) = &mut back {
            server.end()?;
        }
        Ok(rows)
    }

    fn back_end(&self, cache: &str) -> Result<(Process, PathBuf)> {
        let socket = self.place.socket();
        let mut command = Command::new(&self.place.program);
        command.args(["--log", "error", "serve"]).arg(&self.base).arg("--vhost-user").arg(&socket);
        command.args(["--cache", cache]);
        if self.server_cpus != "any" {
            command.args(["--cpus", &self.server_cpus]);
        }
        Ok((self.place.start(&command, &socket)?, socket))
    }
}

/// A line of the guest that marks a point in its script: the time of its arrival, and the CPU
/// seconds of the back end and the requests of the disk until then.
struct Mark {
    came: Instant,
    used: Option<f64>,
    requests: u64,
}

impl Mark {
    fn since(&self, begin: &Mark, rate: f64) -> Figures {
        let mut figures = Figures::from([("seconds", (self.came - begin.came).as_secs_f64())]);
        // A row that is timed by the host's clock has no rate.
        if rate > 0.0 {
            figures.insert("iops", rate);
        }
        let requests = self.requests.saturating_sub(begin.requests);
        if let Some((before, after)) = begin.used.zip(self.used).filter(|_| requests > 0) {
            figures.insert("cpu_us", (after - before) * 1e6 / requests as f64);
        }
        figures
    }
}

impl Table for Uml {
    fn rows(&self) -> Vec<Row> {
        let systems = || SYSTEMS.iter().map(|s| s.0.to_string()).collect();
        let names = LOADS.iter().map(|load| load.0).chain(TIMED);
        names.map(|name| Row { name: name.into(), systems: systems() }).collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        let key = |row| (self.place.program.clone(), system, row);
        if !self.boots.contains_key(&key(row)) {
            let rows = self.boot(system)?;
            let keyed: Vec<_> =
                rows.into_iter().map(|(row, figures)| (key(row), figures)).collect();
            self.boots.extend(keyed);
        }
        let wanted = key(row);
        self.boots.remove(&wanted).context("the guest has not run a load")
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let there = |system: usize| measured.iter().any(|m| !m.figures[system].is_empty());
        let systems: Vec<usize> = (0..SYSTEMS.len()).filter(|system| there(*system)).collect();
        let pairs: Vec<_> =
            PAIRS.iter().filter(|(own, peer, _)| there(*own) && there(*peer)).collect();
        let mut head = vec!["load in the guest".to_string()];
        head.extend(systems.iter().map(|system| SYSTEMS[*system].0.to_string()));
        head.extend(pairs.iter().map(|pair| pair.2.to_string()));
        let line = |m: &Measured| {
            let timed = m.number >= LOADS.len();
            let mut cells = vec![m.row.name.clone()];
            for system in &systems {
                let cost = cell(m.median(*system, "cpu_us"), |us| format!(" ({us:.0})"));
                cells.push(match timed {
                    true => cell(m.median(*system, "seconds"), |x| format!("{x:.3} s")),
                    false => cell(m.median(*system, "iops"), grouped) + &cost,
                });
            }
            for (own, peer, _) in &pairs {
                let value = |system, key| m.median(system, key);
                let ratio = match timed {
                    true => value(*peer, "seconds").zip(value(*own, "seconds")),
                    false => value(*own, "iops").zip(value(*peer, "iops")),
                };
                cells.push(cell(ratio.map(|(a, b)| a / b), |x| format!("{x:.2}")));
            }
            cells
        };
        markdown(&head, &measured.iter().map(line).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_that_of_the_requests() {
        let begin = Mark { came: Instant::now(), used: Some(1.0), requests: 1000 };
        let came = begin.came + std::time::Duration::from_secs(2);
        let figures = Mark { came, used: Some(1.5), requests: 11_000 }.since(&begin, 5000.0);
        assert_eq!(figures, Figures::from([("seconds", 2.0), ("iops", 5000.0), ("cpu_us", 50.0)]));
        // ubd has no back end, and a load without requests has no cost.
        for (used, requests) in [(None, 11_000), (Some(1.5), 1000)] {
            let timed = Mark { came, used, requests }.since(&begin, 0.0);
            assert_eq!((timed.get("cpu_us"), timed.get("iops")), (None, None));
        }
        // The rows that the script's tail prints.
        for number in LOADS.len()..LOADS.len() + TIMED.len() {
            assert!(TAIL.contains(&format!("\"row {number} 0 0\"")), "{number}");
        }
    }
}
