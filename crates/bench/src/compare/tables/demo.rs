//! The experiment of `make demo`: write a file, sync, remove it, sync; on the host, on UML's own
//! disk driver and on Blockyard.
//!
//! Each system has its own image, and all images are made in the same way. Blockyard's disk is an
//! overlay on such an image. The script prints a mark around each command with the guest's clock,
//! and the host records when the line arrives. In: nothing. Out: a table for people. What must
//! hold: afterwards the disk that Blockyard served is clean, and the base image of its overlay is
//! unchanged.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use blockyard_program::output;

use super::workspace::{Workspace, run};
use super::{Figures, Measured, Row, SILENCE, Table};
use crate::process::Process;

/// Each system: its name in the table; the name of its folder, image or socket; the option of the
/// guest's disk (empty on the host); the guest's device.
const SYSTEMS: [(&str, &str, &str, &str); 4] = [
    ("host: a file", "host", "", ""),
    ("UML, stock ubd, ubd0s= (O_SYNC)", "ubds.img", "ubds", "/dev/ubda"),
    ("UML, stock ubd, ubd0= (page cache) *", "ubd.img", "ubd", "/dev/ubda"),
    ("UML, Blockyard, overlay (O_DIRECT)", "s", "vhost", "/dev/vda"),
];
const HOST: usize = 0;
const SYNC: usize = 1;
const OWN: usize = 3;
const ROW: &str = "ext4; dd if=/dev/zero of=testfile bs=1M count=32; sync; rm testfile; sync";
/// Figures in the order of the table's columns: seconds from the first mark to the end of `dd` and
/// of its `sync`, and from there to the end of `rm` and of its `sync`.
const COLUMNS: [&str; 4] = ["write", "write_sync", "rm", "rm_sync"];

/// `$DISK` is the disk of a guest, `$FOLDER` a folder of the host. `sync -f` is for this file
/// system alone.
const SCRIPT: &str = r#"set -e
export LC_ALL=C
mark() { echo "mark ${EPOCHREALTIME/./}"; }
if [[ -n ${DISK:-} ]]; then mount "$DISK" /mnt; cd /mnt; settle() { sync; }; else cd "$FOLDER"; settle() { sync -f .; }; fi
settle
mark
dd if=/dev/zero of=testfile bs=1M count=32 status=none
mark
settle
mark
rm testfile
mark
settle
mark
cd /
[[ -z ${DISK:-} ]] || umount /mnt
"#;

pub struct Demo {
    /// The server of the overlay during all rounds. It is dropped before `place`, because it uses
    /// the folder of `place`.
    server: Process,
    place: Workspace,
    /// The guest's kernel, and how it catches system calls.
    release: String,
    seccomp: &'static str,
    base: String,
    /// Set once a guest has written to Blockyard's disk.
    written: bool,
    /// Results of the checks after the last round.
    found: String,
}

impl Demo {
    pub fn new(place: Workspace) -> Result<Self> {
        let user = run(Command::new("id").arg("-un"))?;
        output::note(format_args!("as user {}, in {}", user.trim(), place.folder.display()));
        std::fs::create_dir(place.folder.join("host"))?;
        // No lazy initialisation, so that the guest's kernel does no work of its own on them.
        let options = ["-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        for name in ["ubds.img", "ubd.img", "base.img"] {
            run(place.tool("mke2fs")?.args(options).arg(place.folder.join(name)).arg("512M"))?;
        }
        let overlay = place.folder.join("blockyard.qcow2");
        let mut create = Command::new(&place.program);
        create
            .args(["image", "create", "-q", "-F", "raw", "-b"])
            .arg(place.folder.join("base.img"))
            .arg(&overlay);
        run(&mut create)?;
        let base = sum(&place.folder.join("base.img"))?;
        let socket = place.socket();
        let mut serve = Command::new(&place.program);
        serve.arg("serve").arg(&overlay).arg("--vhost-user").arg(&socket);
        let server = place.start(&serve, &socket)?;
        let (release, seccomp) = facts(&place)?;
        Ok(Demo { server, place, release, seccomp, base, written: false, found: String::new() })
    }

    /// Runs the script on a system. Returns its marks: when the host received each, and the
    /// system's own clock in seconds.
    fn marks(&self, system: usize) -> Result<Vec<(Instant, f64)>> {
        let (_, file, kind, device) = SYSTEMS[system];
        let (script, target) = (self.place.folder.join("script"), self.place.folder.join(file));
        std::fs::write(&script, SCRIPT)?;
        let command = if kind.is_empty() {
            let mut command = Command::new("bash");
            command.arg(&script).env("FOLDER", &target);
            command
        } else {
            let mut command = Command::new(self.place.guests()?.join("uml"));
            command.args([
                "--timeout",
                "60",
                "--seccomp",
                self.seccomp,
                "--env",
                &format!("DISK={device}"),
            ]);
            command.arg("--disk").arg(format!("{kind}={}", target.display())).arg(&script);
            command
        };
        let mut player = Process::start(&command)?;
        let (mut marks, mut said) = (Vec::new(), Vec::new());
        while let Some((came, line)) = player.line(&self.place.stop, Instant::now() + SILENCE)? {
            match line.strip_prefix("mark ").and_then(|clock| clock.parse::<f64>().ok()) {
                Some(clock) => marks.push((came, clock / 1e6)),
                None => said.push(line),
            }
        }
        player.finish().with_context(|| format!("the script says: {}", said.join("; ")))?;
        Ok(marks)
    }

    /// Checks the disk that Blockyard served, and the image below it, with other programs.
    fn look(&mut self) -> Result<String> {
        self.server.end()?;
        let [base, overlay, seen] =
            ["base.img", "blockyard.qcow2", "seen.img"].map(|f| self.place.folder.join(f));
        let image = || {
            let mut command = Command::new(&self.place.program);
            command.arg("image");
            command
        };
        run(image().args(["check", "-q"]).arg(&overlay)).context("the overlay is not sound")?;
        run(image().args(["convert", "-q", "-O", "raw"]).args([&overlay, &seen]))?;
        run(self.place.tool("e2fsck")?.arg("-fn").arg(&seen)).context("the disk is not clean")?;
        let (after, seen) = (sum(&base)?, sum(&seen)?);
        anyhow::ensure!(
            after == self.base,
            "the base image has changed: nothing may ever be written to it"
        );
        anyhow::ensure!(
            after != seen || !self.written,
            "the guests have written nothing to the overlay"
        );
        let kilobytes = std::fs::metadata(&overlay)?.blocks() * 512 / 1024;
        Ok(format!(
            "Afterwards e2fsck -fn finds the disk that Blockyard served clean.\n\
             Its base image, before and after (sha256); the overlay on it takes {kilobytes} KB:\n  {}\n  {after}\n\
             The base image is unchanged.\n",
            self.base
        ))
    }
}

/// Returns the durations of the commands by the host's clock, and the largest deviation of the
/// guest's clock from it.
fn durations(marks: &[(Instant, f64)]) -> Result<Figures> {
    let [begin, write, write_sync, rm, rm_sync] = *marks else {
        anyhow::bail!("{} marks instead of 5", marks.len())
    };
    let since = |mark: (Instant, f64), from: (Instant, f64)| (mark.0 - from.0).as_secs_f64();
    let off = |mark: &(Instant, f64)| (since(*mark, begin) - (mark.1 - begin.1)).abs();
    Ok(Figures::from([
        ("write", since(write, begin)),
        ("write_sync", since(write_sync, begin)),
        ("rm", since(rm, write_sync)),
        ("rm_sync", since(rm_sync, write_sync)),
        ("clock_off", marks.iter().map(off).fold(0.0, f64::max)),
    ]))
}

/// Returns the release of the guest's kernel, and how the guest catches system calls: by seccomp if
/// the host supports it, which is much cheaper.
fn facts(place: &Workspace) -> Result<(String, &'static str)> {
    let script = place.folder.join("facts");
    std::fs::write(&script, "uname -r\n")?;
    let boot = |mode: &str| {
        run(Command::new(place.guests()?.join("uml"))
            .args(["--timeout", "60", "--seccomp", mode])
            .arg(&script))
    };
    let (release, mode) = match boot("on") {
        Ok(release) => (release, "on"),
        Err(_) => (boot("off").context("no User Mode Linux guest boots")?, "off"),
    };
    Ok((release.trim().into(), mode))
}

fn sum(path: &Path) -> Result<String> {
    let printed = run(Command::new("sha256sum").arg(path))?;
    Ok(printed.split(' ').next().unwrap_or_default().into())
}

impl Table for Demo {
    fn rows(&self) -> Vec<Row> {
        vec![Row { name: ROW.into(), systems: SYSTEMS.iter().map(|s| s.0.to_string()).collect() }]
    }

    fn measure(&mut self, _row: usize, system: usize) -> Result<Figures> {
        self.written |= system == OWN;
        durations(&self.marks(system)?)
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let [m] = measured else { return String::new() };
        let rounds = m.figures.iter().map(Vec::len).max().unwrap_or(0);
        let mut text = format!(
            "\n{ROW}\nseconds, medians of {rounds} interleaved rounds; write and rm end in a page cache, sync goes on to the disk\n\n"
        );
        let line = |name: &str, cells: [String; 6]| {
            format!("{name:<36}{}\n", cells.map(|cell| format!("{cell:>12}")).concat())
        };
        text += &line(
            "",
            ["write", "write+sync", "rm", "rm+sync", "write+sync", "rm+sync"].map(String::from),
        );
        text += &line("", ["", "", "", "", "host = 1", "host = 1"].map(String::from));
        let median = |system, key| m.median(system, key).unwrap_or(f64::NAN);
        for (system, (name, ..)) in
            SYSTEMS.iter().enumerate().filter(|(n, _)| !m.figures[*n].is_empty())
        {
            let seconds = COLUMNS.map(|key| format!("{:.3}", median(system, key)));
            let to_host = |key| format!("{:.1}", median(system, key) / median(HOST, key));
            let [a, b, c, d] = seconds;
            text += &line(name, [a, b, c, d, to_host("write_sync"), to_host("rm_sync")]);
        }
        let faster = |key| median(SYNC, key) / median(OWN, key);
        let off = m
            .figures
            .iter()
            .flatten()
            .filter_map(|f| f.get("clock_off"))
            .copied()
            .fold(0.0, f64::max);
        if !m.figures[SYNC].is_empty() && !m.figures[OWN].is_empty() {
            text += &format!(
                "\nAt equal durability, Blockyard against ubd with O_SYNC: write+sync is {:.1} times as fast, rm+sync {:.1} times.",
                faster("write_sync"),
                faster("rm_sync")
            );
        }
        text += &format!(
            "\n* Not durable: this driver answers the guest's flush, and leaves the data in the host's page cache; a\n  \
             power cut loses it. In the three other rows what was synced is on the disk: each write by O_SYNC, or\n  \
             by the fdatasync that a flush becomes (Blockyard: --cache none), or by sync -f on the host.\n\
             Guest: User Mode Linux {}, seccomp={}, one processor, 512 MB; blockyard {}.\n\
             Clock: the host's; the guest's own differs by at most {:.1} ms.\n",
            self.release,
            self.seccomp,
            env!("CARGO_PKG_VERSION"),
            off * 1e3
        );
        text + &self.found
    }

    fn check(&mut self) -> Result<()> {
        self.found = self.look()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn five_marks_are_four_durations() {
        let begin = Instant::now();
        // The guest's clock is 10 ms ahead at the end of rm.
        let mark =
            |ms: u64, guest: u64| (begin + Duration::from_millis(ms), 7.0 + guest as f64 / 1e3);
        let marks = [mark(0, 0), mark(40, 40), mark(60, 60), mark(70, 80), mark(90, 90)];
        let figures = durations(&marks).unwrap();
        let wanted = [
            ("write", 0.04),
            ("write_sync", 0.06),
            ("rm", 0.01),
            ("rm_sync", 0.03),
            ("clock_off", 0.01),
        ];
        for (key, value) in wanted {
            assert!((figures[key] - value).abs() < 1e-9, "{key}: {}", figures[key]);
        }
        assert!(durations(&marks[1..]).is_err());
    }
}
