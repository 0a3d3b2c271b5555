//! Block devices of a host, in a QEMU guest (TCG): an image by ublk, raw and as a qcow2 overlay,
//! beside the kernel's loop device.
//!
//! The guest has two processors. The images lie on ext4 of a virtio disk, which the host has in a
//! file opened with O_DIRECT. One guest has the devices of all systems for all rounds, and its
//! script has the harness's order. Each device is written as a whole first (an overlay: its first
//! writes), so that all is allocated. `copy` is the experiment of 2006; its rounds are the last,
//! because its mkfs discards the device. In: the plan of the rounds. Out: lines of the guest. What
//! must hold: each measurement of the plan has its line.

use std::collections::{BTreeMap, VecDeque};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::columns::Columns;
use super::workspace::{Workspace, run, zeroes};
use super::{Figures, Measured, Row, SILENCE, Table, TablePlan, markdown};
use crate::process::{Process, Stop};
use crate::rounds::Rounds;

/// Each system: its name; and the guest script's arguments: driver, cache mode, and image.
const SYSTEMS: [(&str, &str); 6] = [
    ("loop", "loop off raw"),
    ("ublk, writeback", "ublk writeback raw"),
    ("ublk, writeback, overlay", "ublk writeback overlay"),
    ("loop, direct", "loop on raw"),
    ("ublk", "ublk none raw"),
    ("ublk, overlay", "ublk none overlay"),
];
/// Pairs of systems (indices in `SYSTEMS`) whose ratio the table shows.
const RATIOS: [(usize, usize); 4] = [(4, 3), (5, 4), (1, 0), (2, 1)];

/// Each row: its name, the work that the guest does, and the decimals of a figure.
const ROWS: [(&str, &str, usize); 5] = [
    ("1 MiB write, depth 4, MB/s", "measure write --bs=1M --iodepth=4", 0),
    ("1 MiB read, depth 4, MB/s", "measure read --bs=1M --iodepth=4", 0),
    ("4k random read, depth 32, IOPS", "measure randread --bs=4k --iodepth=32", 0),
    ("4k random write, depth 32, IOPS", "measure randwrite --bs=4k --iodepth=32", 0),
    ("mount, copy 20 MB, unmount, s", "copy", 2),
];
const COPY: usize = 4;

/// The guest prints `result ROW SYSTEM KILOBYTES COUNT`. For a load, both figures are per second.
/// For a copy, they are 0 and the duration in microseconds.
const HEAD: &str = r#"set -euo pipefail
modprobe ublk_drv
modprobe loop
# (What was discarded would have to be taken and written by the host once more.)
mkfs.ext4 -q -E nodiscard -O ^has_journal /dev/vda
mkdir /tmp/i
mount /dev/vda /tmp/i
cd /tmp/i
head -c 20000000 /dev/urandom >/tmp/source
declare -A devices=()
begin() { # SYSTEM KIND CACHE IMAGE
    local raw=$1.raw image
    image=$raw
    dd if=/dev/zero of=$raw bs=1M count=$SIZE oflag=direct status=none
    [[ $4 == raw ]] || { image=$1.qcow2; /host/blockyard image create -f qcow2 -b $raw -F raw $image >/dev/null; }
    if [[ $2 == loop ]]; then
        device=$(losetup -f --show --direct-io=$3 $image)
    else
        device=$(/host/blockyard attach $image --cache $3)
    fi
    dd if=/dev/zero of=$device bs=1M count=$SIZE oflag=direct status=none
    devices[$1]=$device
}
measure() { # JOB ROW SYSTEM FIO_ARGUMENTS...
    local job=$1 where="$2 $3" device=${devices[$3]}
    shift 3
    sync
    echo 3 >/proc/sys/vm/drop_caches
    fio --name=a --filename=$device --rw=$job --direct=1 --ioengine=libaio --output-format=terse --terse-version=3 \
        --time_based --runtime=$SECONDS_EACH "$@" |
        { IFS=';' read -ra f; echo "result $where $((f[6] + f[47])) $((f[7] + f[48]))"; }
}
copy() { # ROW SYSTEM
    local device=${devices[$2]}
    mkfs.ext4 -q $device
    sync
    echo 3 >/proc/sys/vm/drop_caches
    cat /tmp/source >/dev/null
    local begin=$EPOCHREALTIME
    mount $device /mnt
    cp /tmp/source /mnt/copy
    umount /mnt
    local end=$EPOCHREALTIME
    echo "result $1 $2 0 $((${end/./} - ${begin/./}))"
    mount -o ro $device /mnt
    cmp /tmp/source /mnt/copy
    umount /mnt
}
"#;

pub struct Ublk {
    /// The guest is dropped before `place`, because it uses the folder of `place`.
    guest: Process,
    place: Workspace,
    kernel: String,
    /// Figures that `measure` has not returned yet, by row and system.
    results: BTreeMap<(usize, usize), VecDeque<f64>>,
    /// Lines of the guest that have no figures.
    said: Vec<String>,
}

impl Ublk {
    pub fn new(place: Workspace, plan: &TablePlan<'_>) -> Result<Self> {
        let systems: Vec<usize> =
            (0..SYSTEMS.len()).filter(|n| plan.wants_peer(SYSTEMS[*n].0)).collect();
        let rows: Vec<usize> = (0..ROWS.len()).filter(|n| plan.wants(ROWS[*n].0)).collect();
        let (disk, program, script) = (
            place.folder.join("disk"),
            place.folder.join("blockyard"),
            place.folder.join("script"),
        );
        let mib = (place.size >> 20).max(1);
        // The file is written, not only allocated. The first write of an allocated block costs the
        // host more, and the first system at an offset would pay for that.
        zeroes(&disk, (mib * 2 * systems.len() as u64 + 128) << 20, &place.stop)?;
        run(Command::new("strip").arg("-o").args([&program, &place.program]))?;
        std::fs::write(&script, text(&rows, &systems, plan.rounds, &place.stop))?;
        let kernel = plan.kernel.unwrap_or("7").to_string();
        let mut command = Command::new(place.guests()?.join("qemu"));
        command
            .args(["--kernel", &kernel, "--mem", "1G", "--timeout", "3000", "--file"])
            .arg(&program);
        command.args([
            "--env",
            &format!("SIZE={mib}"),
            "--env",
            &format!("SECONDS_EACH={}", place.seconds.ceil()),
        ]);
        command
            .arg("--disk")
            .arg(format!("file={}", disk.display()))
            .arg(&script)
            .env("TMPDIR", &place.folder);
        let guest = Process::start(&command)?;
        Ok(Ublk { guest, place, kernel, results: BTreeMap::new(), said: Vec::new() })
    }

    /// Waits for the guest's next line. Returns whether there is one.
    fn listen(&mut self) -> Result<bool> {
        let Some((_, line)) = self.guest.line(&self.place.stop, Instant::now() + SILENCE)? else {
            return Ok(false);
        };
        match result(&line) {
            Some((row, system, figure)) => {
                self.results.entry((row, system)).or_default().push_back(figure)
            }
            None => self.said.push(line),
        }
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        let last = self.said[self.said.len().saturating_sub(5)..].join("; ");
        self.guest.finish().with_context(|| format!("the guest failed; it said: {last}"))
    }
}

/// Returns the guest's script: the devices, then all measurements in their order.
fn text(rows: &[usize], systems: &[usize], rounds: u32, stop: &Stop) -> String {
    let mut text = HEAD.to_string();
    for system in systems {
        text += &format!("begin {system} {}\n", SYSTEMS[*system].1);
    }
    let (copies, loads): (Vec<usize>, Vec<usize>) = rows.iter().partition(|row| **row == COPY);
    for rows in [loads, copies] {
        // The guest measures, so only the order comes from the harness.
        let rounds = Rounds::new(rounds, rows.iter().map(|_| systems.len()), stop);
        for turn in rounds.turns() {
            let (row, system) = (rows[turn.row], systems[turn.system]);
            let (verb, words) = ROWS[row].1.split_once(' ').unwrap_or((ROWS[row].1, ""));
            let (job, options) = words.split_once(' ').unwrap_or(("", ""));
            text += &format!("{verb} {job} {row} {system} {options}\n");
        }
    }
    text
}

/// Parses row, system and figure from a line of the guest.
fn result(line: &str) -> Option<(usize, usize, f64)> {
    let numbers: Vec<u64> =
        line.strip_prefix("result ")?.split(' ').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let [row, system, kilobytes, count] = numbers[..] else { return None };
    let figure = match row {
        0 | 1 => kilobytes as f64 / 1e3,
        4 => count as f64 / 1e6,
        _ => count as f64,
    };
    Some((row as usize, system as usize, figure))
}

impl Table for Ublk {
    fn rows(&self) -> Vec<Row> {
        let systems = || SYSTEMS.iter().map(|s| s.0.to_string()).collect();
        ROWS.iter().map(|row| Row { name: row.0.into(), systems: systems() }).collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        loop {
            if let Some(figure) = self.results.get_mut(&(row, system)).and_then(VecDeque::pop_front)
            {
                return Ok(Figures::from([("figure", figure)]));
            }
            if !self.listen()? {
                self.finish()?;
                anyhow::bail!(
                    "the guest ended before \"{}\" on {}",
                    ROWS[row].0,
                    SYSTEMS[system].0
                );
            }
        }
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let columns = Columns::of(measured, SYSTEMS.len(), &RATIOS);
        let line = |m: &Measured| {
            let digits = ROWS[m.number].2;
            columns.line(&m.row.name, m, "figure", |x| format!("{x:.digits$}"))
        };
        let head = columns.head(&self.kernel, |system| SYSTEMS[system].0);
        markdown(&head, &measured.iter().map(line).collect::<Vec<_>>())
    }

    /// Checks that the guest compares the last copies, and ends with status 0.
    fn check(&mut self) -> Result<()> {
        while self.listen()? {}
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_has_the_order_of_the_rounds() {
        let text = text(&[1, COPY], &[3, 4], 2, &Stop::default());
        let lines: Vec<_> = text[HEAD.len()..].lines().map(str::trim_end).collect();
        let read = |system: usize| format!("measure read 1 {system} --bs=1M --iodepth=4");
        let loads = [3, 4, 4, 3].map(read);
        assert_eq!(lines[..2], ["begin 3 loop on raw", "begin 4 ublk none raw"]);
        assert_eq!(lines[2..6], loads);
        // The copies come last, because a copy discards data that the loads need.
        assert_eq!(lines[6..], ["copy  4 3", "copy  4 4", "copy  4 4", "copy  4 3"]);
    }

    #[test]
    fn lines_become_figures() {
        assert_eq!(result("result 1 3 250000 244"), Some((1, 3, 250.0)));
        assert_eq!(result("result 2 5 4000 1000"), Some((2, 5, 1000.0)));
        assert_eq!(result("result 4 0 0 730000"), Some((4, 0, 0.73)));
        assert_eq!((result("result 4 0"), result("done")), (None, None));
    }
}
