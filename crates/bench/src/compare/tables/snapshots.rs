//! Copy-on-write disks in a QEMU guest (TCG): the kernel's dm-snapshot, the example `cowd` of the
//! library, and Blockyard's own qcow2 overlay.
//!
//! ```text
//!   copy    mount, copy a file of 20 MB, unmount: seconds by the guest's clock
//!   boot    start of a guest, which changes to a root file system on the disk: programs that read
//!           60 MB, a log, sync. Seconds by the host's clock; and of the part on the disk, by the
//!           guest's
//!   loads   fio: reads and first writes of a new disk, then reads and writes of what it has
//! ```
//! Each measurement has a new guest and a new disk over the same base. dm-snapshot and ublk work in
//! the guest, on virtio disks that the host has in files opened with O_DIRECT. By vhost-user the
//! same files are opened by the server on the host. All three copy blocks of 4 KiB. What must hold:
//! the bases do not change.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::columns::Columns;
use super::guests::{guest_root, sum};
use super::workspace::{Image, Server, Workspace, run, settle, zeroes};
use super::{Figures, Measured, Row, SILENCE, Table, TablePlan, grouped, markdown};
use crate::process::{Process, fill};

/// Names of the systems, how a guest makes the disk, and whether the server is on the host.
const SYSTEMS: [(&str, &str); 5] = [
    ("dm-snapshot", "dm_snapshot"),
    ("cowd, ublk", "cowd"),
    ("qcow2, ublk", "qcow2"),
    ("cowd, vhost-user", COWD_OF_HOST),
    ("qcow2, vhost-user", QCOW2_OF_HOST),
];
const COWD_OF_HOST: &str = "served cowd";
const QCOW2_OF_HOST: &str = "served qcow2";
/// The ratios of the table: pairs of indices in `SYSTEMS`.
const RATIOS: [(usize, usize); 4] = [(1, 2), (3, 4), (1, 0), (2, 0)];

/// Names of the experiments, and the contents of their disks.
const EXPERIMENTS: [(&str, &str); 3] =
    [("copy", "copy-base.img"), ("boot", "boot-base.img"), ("loads", "loads-base.img")];

/// Lines of the table: experiment, name, key of the figure, decimals.
const LINES: [(usize, &str, &str, usize); 9] = [
    (0, "mount, copy 20 MB, unmount, s", "copy", 2),
    (1, "boot of a guest, s", "boot", 2),
    (1, "of that on the disk, s", "root", 2),
    (2, "1 MiB read of the base, depth 4, MB/s", "read", 0),
    (2, "4k random read of the base, depth 32, IOPS", "randread", 0),
    (2, "1 MiB first write, depth 4, MB/s", "first", 0),
    (2, "4k first write in each 64k, depth 32, IOPS", "copyup", 0),
    (2, "4k random read of what was written, depth 32, IOPS", "reread", 0),
    (2, "4k random write of what was written, depth 32, IOPS", "rewrite", 0),
];
/// Figures that are megabytes a second. Other figures of loads are operations a second.
const BYTES: [&str; 2] = ["read", "first"];

/// The base is /dev/vda, the store /dev/vdb, the table /dev/vdc. With a server on the host /dev/vda
/// is the disk itself. The guest prints `result KEY KILOBYTES COUNT`, or `took KEY MICROSECONDS`.
const HEAD: &str = r#"set -euo pipefail
export DM_DISABLE_UDEV=1
served() { disk=/dev/vda; }
dm_snapshot() {
    modprobe dm-snapshot
    dmsetup create cow --table "0 $(blockdev --getsz /dev/vda) snapshot /dev/vda /dev/vdb P 8"
    disk=/dev/mapper/cow
}
cowd() {
    modprobe ublk_drv
    mkfifo enter
    /host/cowd /dev/vda /dev/vdb /dev/vdc ublk <enter >said &
    exec 9>enter
    until read -r disk <said; do sleep 0.02; done
}
qcow2() {
    modprobe ublk_drv
    /host/blockyard image create -q -f qcow2 -b /dev/vda -F raw overlay
    dd if=overlay of=/dev/vdb bs=1M oflag=direct conv=sync status=none
    disk=$(/host/blockyard attach /dev/vdb --format qcow2)
}
took() { echo "took $1 $((${EPOCHREALTIME/./} - begin))"; }
copy() {
    head -c 20000000 /dev/urandom >/tmp/source
    begin=${EPOCHREALTIME/./}
    mount $disk /mnt; cp /tmp/source /mnt/copy; umount /mnt
    took copy
    mount -o ro $disk /mnt; cmp /tmp/source /mnt/copy; umount /mnt
}
boot() {
    begin=${EPOCHREALTIME/./}
    mount $disk /mnt
    chroot /mnt /bin/bash -c '
        set -e
        mount -t proc proc /proc
        for program in bash ls find grep sed date stat; do /usr/bin/$program --version; done >/dev/null
        find /etc /usr/bin /usr/lib -type f | head -n 2000 | xargs cat | head -c 60000000 | cksum >/var/boot.log
        date >>/var/boot.log
        umount /proc'
    umount /mnt
    took root
}
load() { # KEY FIO_ARGUMENTS...
    local key=$1
    shift
    fio --name=a --filename=$disk --direct=1 --ioengine=libaio --output-format=terse --terse-version=3 "$@" |
        { IFS=';' read -ra f; echo "result $key $((f[6] + f[47])) $((f[7] + f[48]))"; }
}
loads() {
    local half=$((SIZE / 2)) timed="--time_based --runtime=$SECONDS_EACH"
    load read --rw=read --bs=1M --iodepth=4 --size=$half $timed
    load randread --rw=randread --bs=4k --iodepth=32 --size=$half $timed
    load first --rw=write --bs=1M --iodepth=4 --size=$half
    load copyup --rw=write:60k --bs=4k --iodepth=32 --offset=$half --size=$half --io_size=$((half / 16))
    load reread --rw=randread --bs=4k --iodepth=32 --size=$half $timed
    load rewrite --rw=randwrite --bs=4k --iodepth=32 --size=$half $timed
}
"#;

pub struct Snapshots {
    place: Workspace,
    kernel: String,
    /// Programs that the guest gets: the example cowd, and blockyard, without symbols.
    programs: [PathBuf; 2],
    /// The program of which `programs` has a copy.
    copied: PathBuf,
    /// Checksums of the bases.
    sums: Vec<u32>,
}

impl Snapshots {
    pub fn new(place: Workspace, plan: &TablePlan<'_>) -> Result<Self> {
        let folder = place.program.parent().context("the program has no folder")?;
        let example = folder.join("examples/cowd");
        anyhow::ensure!(
            example.exists(),
            "{} is missing: cargo build --release -p blockyard --example cowd",
            example.display()
        );
        let programs = ["cowd", "blockyard"].map(|name| place.folder.join(name));
        let copied = place.program.clone();
        for (from, to) in [&example, &copied].into_iter().zip(&programs) {
            strip(from, to)?;
        }
        let [copy, boot, loads] = EXPERIMENTS.map(|(_, base)| place.folder.join(base));
        let options = ["-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        run(place.tool("mke2fs")?.args(options).arg(&copy).arg("256M"))?;
        let root = guest_root(&place)?;
        std::fs::copy(&root, &boot)
            .with_context(|| format!("copying {} (guests/setup makes it)", root.display()))?;
        fill(&loads, place.size, &place.stop)?;
        // Every block of the store is written once, because the first write of a block of a file
        // costs the host more.
        zeroes(&place.folder.join("store"), place.size.max(256 << 20) * 5 / 4, &place.stop)?;
        let sums =
            [&copy, &boot, &loads].map(|base| sum(base)).into_iter().collect::<Result<_>>()?;
        let kernel = plan.kernel.unwrap_or("7").to_string();
        Ok(Snapshots { place, kernel, programs, copied, sums })
    }

    /// Makes an empty store and an empty table, as disks of the guest.
    fn empty(&self) -> Result<[PathBuf; 2]> {
        use std::os::unix::fs::FileExt;
        let [store, table] = ["store", "table"].map(|name| self.place.folder.join(name));
        // Eight bytes for each block of 4 KiB, of bases of at most 2 GiB.
        zeroes(&table, 4 << 20, &self.place.stop)?;
        // dm-snapshot and qcow2 have their headers here.
        std::fs::File::options().write(true).open(&store)?.write_all_at(&vec![0; 1 << 20], 0)?;
        settle(&store, false)?;
        settle(&table, false)?;
        Ok([store, table])
    }

    /// Starts a server on the host for a new disk. Returns how it ends.
    fn serve(&self, way: &str, base: &Path) -> Result<(Process, PathBuf, Option<PathBuf>)> {
        let at = |name: &str| self.place.folder.join(name);
        if way == QCOW2_OF_HOST {
            let image = at("disk.qcow2");
            let _ = std::fs::remove_file(&image);
            let mut create = Command::new(&self.place.program);
            create.args(["image", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
            run(create.args([base, &image]))?;
            let image = Image::new(&image, "qcow2", false);
            let (server, socket) = self.place.vhost_user(Server::Blockyard, &image)?;
            return Ok((server, socket, None));
        }
        let ([store, table], enter) = (self.empty()?, at("enter"));
        let _ = std::fs::remove_file(&enter);
        run(Command::new("mkfifo").arg(&enter))?;
        let (socket, mut command) = (self.place.socket(), Command::new("bash"));
        command.args(["-c", "exec \"$@\" <>\"$0\""]).arg(&enter).arg(&self.programs[0]);
        command.args([base, &store, &table, &socket]);
        Ok((self.place.start(&command, &socket)?, socket, Some(enter)))
    }

    /// Runs an experiment in a guest with these disks.
    fn guest(&self, experiment: &str, way: &str, disks: &[String]) -> Result<Figures> {
        let script = self.place.folder.join("script");
        std::fs::write(&script, format!("{HEAD}{way}\n{experiment}\n"))?;
        let mut command = Command::new(self.place.guests()?.join("qemu"));
        command.args(["--kernel", &self.kernel, "--smp", "2", "--timeout", "900"]);
        for program in &self.programs {
            command.arg("--file").arg(program);
        }
        let (size, seconds) = (self.place.size, self.place.seconds.ceil());
        command.args(["--env", &format!("SIZE={size}")]);
        command.args(["--env", &format!("SECONDS_EACH={seconds}")]);
        for disk in disks {
            command.args(["--disk", disk]);
        }
        command.arg(&script).env("TMPDIR", &self.place.folder);
        let (begin, mut figures, mut said) = (Instant::now(), Figures::new(), Vec::new());
        let mut guest = Process::start(&command)?;
        while let Some((at, line)) = guest.line(&self.place.stop, Instant::now() + SILENCE)? {
            match result(&line) {
                Some((key, figure)) => {
                    figures.insert(key, figure);
                    if key == "root" {
                        figures.insert("boot", (at - begin).as_secs_f64());
                    }
                }
                None => said.push(line),
            }
        }
        let last = said[said.len().saturating_sub(5)..].join("; ");
        guest.finish().with_context(|| format!("the guest failed; it said: {last}"))?;
        Ok(figures)
    }
}

/// Copies a program without its symbols.
fn strip(from: &Path, to: &Path) -> Result<()> {
    run(Command::new("strip").arg("-o").args([to, from])).map(drop)
}

/// Parses the key and the figure from a line of the guest.
fn result(line: &str) -> Option<(&'static str, f64)> {
    let words: Vec<&str> = line.split(' ').collect();
    let key = |name: &str| LINES.iter().map(|line| line.2).find(|key| *key == name);
    match words[..] {
        ["took", name, microseconds] => Some((key(name)?, microseconds.parse::<f64>().ok()? / 1e6)),
        ["result", name, kilobytes, count] => {
            let key = key(name)?;
            let (kilobytes, count): (f64, f64) = (kilobytes.parse().ok()?, count.parse().ok()?);
            Some((key, if BYTES.contains(&key) { kilobytes / 1e3 } else { count }))
        }
        _ => None,
    }
}

impl Table for Snapshots {
    fn rows(&self) -> Vec<Row> {
        let systems = || SYSTEMS.iter().map(|s| s.0.to_string()).collect();
        EXPERIMENTS
            .iter()
            .map(|(name, _)| Row { name: name.to_string(), systems: systems() })
            .collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        if self.copied != self.place.program {
            strip(&self.place.program, &self.programs[1])?;
            self.copied.clone_from(&self.place.program);
        }
        let ((experiment, base), (_, way)) = (EXPERIMENTS[row], SYSTEMS[system]);
        let base = self.place.folder.join(base);
        settle(&base, false)?;
        if ![COWD_OF_HOST, QCOW2_OF_HOST].contains(&way) {
            let disks = [&[base][..], &self.empty()?].concat();
            let disks: Vec<_> =
                disks.iter().map(|disk| format!("file={}", disk.display())).collect();
            return self.guest(experiment, way, &disks);
        }
        let (mut server, socket, enter) = self.serve(way, &base)?;
        let figures = self.guest(experiment, way, &[format!("vhost={}", socket.display())])?;
        match enter {
            Some(enter) => {
                std::fs::write(enter, "\n")?;
                server.finish()?;
            }
            None => server.end()?,
        }
        Ok(figures)
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    /// The example cowd is a program of its own, of which the table has one build.
    fn is_ours(&self, _row: usize, system: usize) -> bool {
        ["qcow2", QCOW2_OF_HOST].contains(&SYSTEMS[system].1)
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let columns = Columns::of(measured, SYSTEMS.len(), &RATIOS);
        let line = |m: &Measured, (_, name, key, digits): &(usize, &str, &'static str, usize)| {
            columns.line(name, m, key, |x| match digits {
                0 => grouped(x),
                _ => format!("{x:.digits$}"),
            })
        };
        let lines = measured
            .iter()
            .flat_map(|m| LINES.iter().filter(|line| line.0 == m.number).map(move |l| line(m, l)));
        let head = columns.head(&self.kernel, |system| SYSTEMS[system].0);
        markdown(&head, &lines.collect::<Vec<_>>())
    }

    fn check(&mut self) -> Result<()> {
        for ((_, base), before) in EXPERIMENTS.iter().zip(&self.sums) {
            anyhow::ensure!(
                sum(&self.place.folder.join(base))? == *before,
                "{base} has changed, and is only to be read"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_figures() {
        assert_eq!(result("took copy 1500000"), Some(("copy", 1.5)));
        assert_eq!(result("result read 250000 244"), Some(("read", 250.0)));
        assert_eq!(result("result copyup 4000 1000"), Some(("copyup", 1000.0)));
        assert_eq!((result("result other 1 1"), result("done")), (None, None));
    }

    #[test]
    fn each_key_has_an_experiment() {
        for (experiment, _, key, _) in LINES {
            let name = EXPERIMENTS[experiment].0;
            let body = &HEAD[HEAD.find(&format!("\n{name}() {{")).unwrap()..];
            let body = &body[..body.find("\n}\n").unwrap()];
            assert!(key == "boot" || body.contains(&format!(" {key}")), "{key} in {name}");
        }
    }
}
