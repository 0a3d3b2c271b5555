//! Two experiments of 2006 in a User Mode Linux guest, on a raw disk and on a copy-on-write overlay
//! of the same contents.
//!
//! ```text
//!   copy   mount, copy a file of 20 MB, unmount: seconds by the guest's clock
//!   boot   start from a root file system on the disk: kernel, mount for writing, programs that
//!          read 60 MB, a log, sync. Seconds by the host's clock
//! ```
//! Each measurement has a new disk. The guest runs on processor 0, the back end on any. What must
//! hold: the bases do not change.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::workspace::{Image, Server, Workspace, run, settle};
use super::{Figures, Measured, Row, SILENCE, Table, cell, markdown};
use crate::compare::blockdev::ImageFile;
use crate::process::Process;

const COPY: &str = r#"set -e
head -c 20000000 /dev/urandom >/tmp/source; sync
begin=${EPOCHREALTIME/./}
mount /dev/vda /mnt; cp /tmp/source /mnt/copy; umount /mnt
end=${EPOCHREALTIME/./}
mount -o ro /dev/vda /mnt; cmp /tmp/source /mnt/copy
echo "took $((end - begin))"
"#;

const BOOT: &str = r#"set -e
mount /dev/vda /mnt
chroot /mnt /bin/bash -c '
    set -e
    mount -t proc proc /proc
    for program in bash ls find grep sed date stat; do /usr/bin/$program --version >/dev/null; done
    find /etc /usr/bin /usr/lib -type f | head -n 2000 | xargs cat | head -c 60000000 | sha256sum >/var/boot.log
    date >>/var/boot.log
    umount /proc'
umount /mnt
echo "took 0"
"#;

/// Names of the rows, their scripts, and the contents of their disks.
const EXPERIMENTS: [(&str, &str, &str); 2] =
    [("mount, copy 20 MB, unmount", COPY, "copy-base.img"), ("boot", BOOT, "boot-base.img")];

/// Names of the systems, their servers, and whether they serve an overlay.
const SYSTEMS: [(&str, Server, bool); 4] = [
    ("blockyard, raw", Server::Blockyard, false),
    ("blockyard, overlay", Server::Blockyard, true),
    ("qsd, raw", Server::Qsd, false),
    ("qsd, overlay (its defaults)", Server::Qsd, true),
];

pub struct OverlayGuests {
    place: Workspace,
    /// Checksums of the bases.
    sums: Vec<u32>,
}

impl OverlayGuests {
    pub fn new(place: Workspace) -> Result<Self> {
        let [copy, boot] = EXPERIMENTS.map(|(_, _, base)| place.folder.join(base));
        let options = ["-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        run(place.tool("mke2fs")?.args(options).arg(&copy).arg("512M"))?;
        let root = guest_root(&place)?;
        std::fs::copy(&root, &boot)
            .with_context(|| format!("copying {} (guests/setup makes it)", root.display()))?;
        let sums = [&copy, &boot].map(|base| sum(base)).into_iter().collect::<Result<_>>()?;
        Ok(OverlayGuests { place, sums })
    }

    /// Makes the disk of a system: a copy of the base, or an overlay on it.
    fn disk(&self, server: Server, overlay: bool, base: &Path) -> Result<PathBuf> {
        let disk = self.place.folder.join(if overlay { "disk.qcow2" } else { "disk.img" });
        let _ = std::fs::remove_file(&disk);
        match (overlay, server) {
            (false, _) => {
                run(Command::new("cp").arg("--sparse=never").args([base, &disk])).map(drop)?
            }
            (true, Server::Qsd) => {
                self.place.qemu_img("create -q -f qcow2 -F raw -b", &[base, &disk])?
            }
            (true, Server::Blockyard) => {
                let mut command = Command::new(&self.place.program);
                command
                    .args(["image", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
                    .args([base, &disk]);
                run(&mut command)?;
            }
        }
        settle(&disk, false)?;
        Ok(disk)
    }

    /// Returns the seconds of a script in a guest: by its own clock if it prints them, else by the
    /// host's.
    fn guest(&self, script: &str, socket: &Path) -> Result<f64> {
        let file = self.place.folder.join("script");
        std::fs::write(&file, script)?;
        let mut command = Command::new(self.place.guests()?.join("uml"));
        command.args(["--timeout", "300", "--mem", "512M", "--cpu", "0", "--disk"]);
        command.arg(format!("vhost={}", socket.display())).arg(&file);
        let begin = Instant::now();
        let mut guest = Process::start(&command)?;
        let mut took = None;
        while let Some((_, line)) = guest.line(&self.place.stop, Instant::now() + SILENCE)? {
            took = line.strip_prefix("took ").and_then(|text| text.parse::<f64>().ok()).or(took);
        }
        guest.finish()?;
        let seconds = begin.elapsed().as_secs_f64();
        let own = took.context("the script does not say how long it took")? / 1e6;
        Ok(if own > 0.0 { own } else { seconds })
    }
}

impl Table for OverlayGuests {
    fn rows(&self) -> Vec<Row> {
        let systems = || SYSTEMS.iter().map(|s| s.0.to_string()).collect();
        EXPERIMENTS
            .iter()
            .map(|(name, ..)| Row { name: name.to_string(), systems: systems() })
            .collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        let ((_, script, base), (_, server, overlay)) = (EXPERIMENTS[row], SYSTEMS[system]);
        let base = self.place.folder.join(base);
        let disk = self.disk(server, overlay, &base)?;
        settle(&base, false)?;
        let base = [ImageFile::new(base, "raw")];
        let (format, backing) = if overlay { ("qcow2", &base[..]) } else { ("raw", &[][..]) };
        let (mut back, socket) = self
            .place
            .vhost_user(server, &Image { backing, ..Image::new(&disk, format, false) })?;
        let seconds = self.guest(script, &socket)?;
        back.end()?;
        Ok(Figures::from([("seconds", seconds)]))
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let names = SYSTEMS.iter().map(|s| s.0.to_string());
        let head: Vec<_> = ["experiment".into()]
            .into_iter()
            .chain(names)
            .chain(["overlay to raw".into()])
            .collect();
        let line = |m: &Measured| {
            let seconds = |system| m.median(system, "seconds");
            let ratio = seconds(1).zip(seconds(0)).map(|(overlay, raw)| overlay / raw);
            let mut cells = vec![m.row.name.clone()];
            cells.extend(
                (0..SYSTEMS.len()).map(|system| cell(seconds(system), |x| format!("{x:.3} s"))),
            );
            cells.push(cell(ratio, |x| format!("{x:.3}")));
            cells
        };
        markdown(&head, &measured.iter().map(line).collect::<Vec<_>>())
    }

    fn check(&mut self) -> Result<()> {
        for ((_, _, base), before) in EXPERIMENTS.iter().zip(&self.sums) {
            anyhow::ensure!(
                sum(&self.place.folder.join(base))? == *before,
                "{base} has changed, and is only to be read"
            );
        }
        Ok(())
    }
}

/// Returns the guests' root file system, an image of ext4.
pub fn guest_root(place: &Workspace) -> Result<PathBuf> {
    let find = ". \"$1/lib.sh\" && printf %s \"$cache\"";
    let cache = run(Command::new("bash").args(["-c", find, "cache"]).arg(place.guests()?))?;
    Ok(Path::new(&cache).join("root.img"))
}

/// Returns the CRC32C of a file.
pub fn sum(path: &Path) -> Result<u32> {
    use std::io::Read;
    let mut file = std::fs::File::open(path)?;
    let (mut sum, mut piece) = (0, vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(sum),
            len => sum = crc32c::crc32c_append(sum, &piece[..len]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, RECORD, measured, rounds};
    use super::*;
    use crate::scratch::Scratch;

    fn table(scratch: &Scratch) -> OverlayGuests {
        OverlayGuests { place: fixture::place(scratch), sums: Vec::new() }
    }

    #[test]
    fn the_table_has_seconds_and_the_ratio_of_overlay_to_raw() {
        let seconds = |all: [f64; 3]| rounds(&[("seconds", all)]);
        let figures = [
            seconds([1.0, 2.0, 1.5]),
            seconds([1.8, 1.2, 9.0]),
            seconds([2.5, 2.5, 2.5]),
            seconds([3.0, 3.1, 3.2]),
        ];
        let all: Vec<_> = SYSTEMS.iter().map(|s| s.0).zip(figures).collect();
        let mut some = all.clone();
        some[0].1.clear();
        let rows = [measured("copy", &all), measured("boot", &some)];
        let cells = fixture::cells(&table(&Scratch::new()).markdown(&rows));
        assert_eq!(cells[0][1..3], ["blockyard, raw", "blockyard, overlay"]);
        assert_eq!(cells[1], ["copy", "1.500 s", "1.800 s", "2.500 s", "3.100 s", "1.200"]);
        assert_eq!(cells[2], ["boot", "", "1.800 s", "2.500 s", "3.100 s", ""]);
    }

    #[test]
    fn a_guest_is_timed_by_its_own_clock_if_it_says_so() {
        let scratch = Scratch::new();
        let table = table(&scratch);
        let guest = |text: &str| {
            scratch.script("uml", text);
            table.guest("the script", Path::new("/the/socket")).map_err(|e| format!("{e:#}"))
        };
        let record = "echo \"$@\" >>\"${0%/*}/calls\"";
        let seconds = guest(&format!("{record}; echo booting; echo took 1500000; echo bye"));
        assert_eq!(seconds, Ok(1.5));
        let (call, script) = (&scratch.lines("calls")[0], table.place.folder.join("script"));
        assert!(call.contains("--disk vhost=/the/socket"), "{call}");
        assert!(call.ends_with(script.to_str().unwrap()), "{call}");
        assert_eq!(std::fs::read(script).unwrap(), b"the script");
        // `took 0`: by the host's clock.
        assert!(guest("echo took 0").unwrap() > 0.0);
        let error = guest("echo booting").unwrap_err();
        assert!(error.contains("does not say how long"), "{error}");
        let error = guest("echo took 1500000; echo 'no root' >&2; exit 4").unwrap_err();
        assert!(error.contains("exit status: 4") && error.contains("no root"), "{error}");
    }

    #[test]
    fn each_measurement_has_a_new_disk_of_the_contents_of_the_base() {
        let scratch = Scratch::new();
        scratch.script("tool", RECORD);
        scratch.script("blockyard", RECORD);
        let table = table(&scratch);
        let base = scratch.file("base.img", [9; 8192]);
        scratch.file("work/disk.img", "of the round before");
        for server in [Server::Blockyard, Server::Qsd] {
            let disk = table.disk(server, false, &base).unwrap();
            assert_eq!(std::fs::read(&disk).unwrap(), [9; 8192]);
            let overlay = scratch.file("work/disk.qcow2", "of the round before");
            assert_eq!(table.disk(server, true, &base).unwrap(), overlay);
            assert_eq!(std::fs::read(overlay).unwrap(), b"", "a new file");
        }
        let files = format!("{} {}", base.display(), scratch.join("work/disk.qcow2").display());
        assert_eq!(
            scratch.lines("calls"),
            [
                format!("image create -q -f qcow2 -F raw -b {files}"),
                format!("qemu-img create -q -f qcow2 -F raw -b {files}"),
            ]
        );
    }

    #[test]
    fn a_base_that_has_changed_is_an_error_that_names_it() {
        let scratch = Scratch::new();
        // The check value of CRC32C.
        assert_eq!(sum(&scratch.file("check", "123456789")).unwrap(), 0xe306_9283);
        let mut table = table(&scratch);
        for (.., base) in EXPERIMENTS {
            let path = scratch.file(&format!("work/{base}"), vec![1; 3 << 20]);
            table.sums.push(sum(&path).unwrap());
        }
        table.check().unwrap();
        let mut bytes = vec![1; 3 << 20];
        bytes[(2 << 20) + 5] = 2;
        scratch.file("work/boot-base.img", bytes);
        let error = table.check().unwrap_err().to_string();
        assert!(error.contains("boot-base.img has changed"), "{error}");
    }
}
