//! The setup of a measurement: a folder with images, a server, a guest. Dropping it removes all.
//!
//! In: a system and a script. Out: what the script printed, the time between its marks by the
//! host's clock, and CPU time.
//!
//! A script prints `mark begin CLOCK` and `mark end CLOCK` (its own clock, in microseconds) around
//! what is measured, and blocks of data: `data NAME`, lines, `end NAME`. It finds the disk in
//! `$DISK`, this program in `$BENCH`, fio in `$FIO`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_program::peer;

use super::blockdev::{self, ImageFile};
use super::cpu::Snapshot;
use super::system::{Image, System, SystemKind};
use super::tables::settle;
use super::trace::{Measured, Trace};
use crate::experiment::Contents;
use crate::process::{Process, Stop, fill};
use crate::results::{Cpu, Run, Spent};

/// A script without output for this time has failed.
const SILENCE: Duration = Duration::from_secs(300);

pub struct Stage {
    folder: PathBuf,
    guests: Option<PathBuf>,
    /// Path of this program, which is also the server. Guests and scripts run it.
    program: PathBuf,
    bench: PathBuf,
    size: u64,
    seccomp: Option<String>,
    stop: Stop,
}

/// The results of a script.
pub struct Played {
    /// Marks with times and CPU time, and other lines of the script.
    pub run: Run,
    pub data: HashMap<String, Vec<String>>,
    /// Ratio of the host's clock to the guest's clock.
    pub clock: f64,
    /// Parts of the latency, from the server's own statistics.
    pub spent: Spent,
}

impl Stage {
    /// Creates a folder below `TMPDIR` or /var/tmp, because images must be on a disk. `size`: bytes
    /// of each disk.
    pub fn new(guests: Option<PathBuf>, size: u64, stop: Stop) -> Result<Self> {
        let base = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let folder = base.join(format!("blockyard-bench.{}", std::process::id()));
        let program = peer::find("blockyard")?;
        let bench = std::env::current_exe().context("finding this program")?;
        std::fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        Ok(Stage { folder, guests, program, bench, size, seccomp: None, stop })
    }

    /// Returns the path of the raw image. Systems use it directly, or as the base of their image.
    fn base(&self, contents: Contents) -> Result<PathBuf> {
        let path =
            self.folder.join(if contents == Contents::Linux { "linux.img" } else { "base.img" });
        match contents {
            _ if path.exists() => {}
            Contents::Random => fill(&path, self.size, &self.stop)?,
            Contents::Linux => {
                let guests = self.guests.as_deref().context("no guests are installed")?;
                let find = ". \"$1/lib.sh\" && printf %s \"$cache\"";
                let folder =
                    Command::new("bash").args(["-c", find, "cache"]).arg(guests).output()?;
                let root = Path::new(&String::from_utf8_lossy(&folder.stdout).into_owned())
                    .join("root.img");
                let copied = std::fs::copy(&root, &path);
                copied.with_context(|| {
                    format!("copying {} (guests/setup qemu makes it)", root.display())
                })?;
            }
        }
        Ok(path)
    }

    /// Returns the system's image and the image that backs it, if there is one. The page cache has
    /// no page of them.
    fn image(&self, system: &System, contents: Contents) -> Result<Vec<ImageFile>> {
        let base = self.base(contents)?;
        let make = |arguments: &[&std::ffi::OsStr]| {
            let done = Command::new(&self.program)
                .args(["--log", "error", "image"])
                .args(arguments)
                .output()?;
            anyhow::ensure!(
                done.status.success(),
                "making an image: {}",
                String::from_utf8_lossy(&done.stderr)
            );
            Ok(())
        };
        let (qcow2, overlay) = (base.with_extension("qcow2"), self.folder.join("overlay.qcow2"));
        let raw = ImageFile::new(&*base, "raw");
        let chain = match system.image {
            Image::Raw => vec![raw],
            Image::Qcow2 => {
                if !qcow2.exists() {
                    let [f, raw, o, q] = ["-f", "raw", "-O", "qcow2"].map(AsRef::as_ref);
                    make(&[
                        "convert".as_ref(),
                        "-q".as_ref(),
                        f,
                        raw,
                        o,
                        q,
                        base.as_ref(),
                        qcow2.as_ref(),
                    ])?;
                }
                vec![ImageFile::new(qcow2, "qcow2")]
            }
            Image::Overlay => {
                let _ = std::fs::remove_file(&overlay);
                let [create, f, q, b, big, below] =
                    ["create", "-f", "qcow2", "-b", "-F", "raw"].map(AsRef::as_ref);
                make(&[create, overlay.as_ref(), f, q, b, base.as_ref(), big, below])?;
                vec![ImageFile::new(overlay, "qcow2"), raw]
            }
        };
        chain.iter().try_for_each(|file| settle(&file.path, false))?;
        Ok(chain)
    }

    fn tool(&self, name: &str) -> Result<Command> {
        let guests = self.guests.as_deref().context("no guests are installed")?;
        let mut command = Command::new(guests.join("tool"));
        command.arg(name);
        Ok(command)
    }

    /// Starts the server of the system's disk, if there is one, and waits until it listens.
    fn server(&self, system: &System, chain: &[ImageFile]) -> Result<Option<Process>> {
        let ImageFile { path: image, format } = &chain[0];
        let socket = self.folder.join("s");
        let _ = std::fs::remove_file(&socket);
        let command = match system.kind {
            SystemKind::UmlBlockyard | SystemKind::QemuBlockyard => {
                let mut command = Command::new(&self.program);
                command
                    .arg("serve")
                    .arg(image)
                    .args(["--format", format, "--vhost-user"])
                    .arg(&socket);
                command
            }
            SystemKind::Nbd => {
                let mut command = Command::new(&self.program);
                command.arg("serve").arg(image).args(["--format", format, "--name", "disk"]);
                command.arg("--nbd").arg(format!("unix:{}", socket.display()));
                command
            }
            SystemKind::QemuQsd | SystemKind::NbdQsd => {
                let mut command = self.tool("qemu-storage-daemon")?;
                command.args(blockdev::arguments(chain, false));
                let (path, node) = (socket.display(), blockdev::TOP);
                if system.nbd() {
                    command.args(["--nbd-server", &format!("addr.type=unix,addr.path={path}")]);
                    let export = format!("type=nbd,id=e,node-name={node},name=disk,writable=on");
                    command.args(["--export", &export]);
                } else {
                    let export = format!("type=vhost-user-blk,id=e,node-name={node},writable=on");
                    command
                        .args(["--export", &format!("{export},addr.type=unix,addr.path={path}")]);
                }
                command
            }
            _ => return Ok(None),
        };
        let mut server = Process::start(&command)?;
        server.until_it_listens(&socket, &self.stop)?;
        Ok(Some(server))
    }

    /// Runs a script on a system.
    pub fn play(&mut self, system: &System, contents: Contents, script: &str) -> Result<Played> {
        let chain = self.image(system, contents)?;
        let image = chain[0].path.clone();
        let mut server = self.server(system, &chain)?;
        let file = self.folder.join("script");
        let target = self.target(system, &image);
        let program = if system.uml() || system.qemu() {
            Path::new("/host/blockyard-bench")
        } else {
            &self.bench
        };
        let fio = match &self.guests {
            Some(guests) if !system.uml() && !system.qemu() => {
                format!("{} fio", guests.join("tool").display())
            }
            _ => "fio".into(),
        };
        // A guest's console is a terminal, on which programs would draw progress bars.
        let head = format!(
            "set -euo pipefail\nexec 2> >(exec cat >&2)\nDISK='{target}' BENCH='{}' FIO='{fio}' FOLDER='{}'\n",
            program.display(),
            self.folder.display()
        );
        let mark = "mark() { echo \"mark $1 ${EPOCHREALTIME/./}\"; }\n";
        std::fs::write(&file, format!("{head}{mark}{script}\n"))?;
        let started = Instant::now();
        let mut player = Process::start(&self.player(system, &image, &file)?)?;
        // If the script fails and its marks are missing too, the reported error is that of the
        // script.
        let mut said = Vec::new();
        let played = match self.listen(&player, server.as_ref(), started, &mut said) {
            Err(e) if e.is::<crate::process::Interrupted>() => return Err(e),
            heard => player.finish().and(heard),
        };
        let mut played = played.map_err(|e| {
            let script = said[said.len().saturating_sub(5)..].join("; ");
            let log = server
                .as_ref()
                .map(|s| format!("; the server: {}", s.errors().trim()))
                .unwrap_or_default();
            e.context(format!("{system}: the script says: {script}{log}"))
        })?;
        drop(player);
        if let Some(server) = &mut server {
            server.end()?;
            played.spent = spent(&server.errors());
        }
        played.run.system = system.to_string();
        Ok(played)
    }

    /// Returns the path of the disk for scripts.
    fn target(&self, system: &System, image: &Path) -> String {
        match system.kind {
            SystemKind::Host | SystemKind::Ublk => image.display().to_string(),
            SystemKind::UmlUbd | SystemKind::UmlUbdSync => "/dev/ubda".into(),
            SystemKind::Nbd | SystemKind::NbdQsd => {
                format!("nbd+unix:///disk?socket={}/s", self.folder.display())
            }
            SystemKind::UmlBlockyard
            | SystemKind::QemuVirtio
            | SystemKind::QemuQsd
            | SystemKind::QemuBlockyard => "/dev/vda".into(),
        }
    }

    /// Returns the command that runs the script on the host or in a guest.
    fn player(&mut self, system: &System, image: &Path, script: &Path) -> Result<Command> {
        if !system.uml() && !system.qemu() {
            let mut command = Command::new("bash");
            // The script puts its temporary files into `folder`, which is removed even after an
            // interruption.
            command.arg(script).env("TMPDIR", &self.folder);
            return Ok(command);
        }
        let disk = match system.kind {
            SystemKind::UmlUbd => format!("ubd={}", image.display()),
            SystemKind::UmlUbdSync => format!("ubds={}", image.display()),
            SystemKind::QemuVirtio => format!("file={}", image.display()),
            _ => format!("vhost={}/s", self.folder.display()),
        };
        // In the guest, this program has the file name of this copy.
        let copy = self.folder.join("blockyard-bench");
        if !copy.exists() {
            std::fs::copy(&self.bench, &copy)?;
        }
        let guests = self.guests.clone().context("no guests are installed")?;
        let mut command = Command::new(guests.join(if system.uml() { "uml" } else { "qemu" }));
        command.args(["--disk", &disk, "--file"]).arg(copy).args(["--timeout", "900"]);
        if system.uml() {
            command.args(["--seccomp", &self.seccomp(&guests)?]);
        } else {
            // Not for User Mode Linux, which would put the guest's memory into this folder.
            command.env("TMPDIR", &self.folder);
        }
        command.arg(script);
        Ok(command)
    }

    /// Returns the mode in which UML guests catch system calls: seccomp if the host's kernel has
    /// it, because seccomp is several times as fast.
    fn seccomp(&mut self, guests: &Path) -> Result<String> {
        if let Some(mode) = &self.seccomp {
            return Ok(mode.clone());
        }
        let script = self.folder.join("nothing");
        std::fs::write(&script, "true\n")?;
        let boots = |mode: &str| {
            let mut command = Command::new(guests.join("uml"));
            command.args(["--timeout", "60", "--seccomp", mode]).arg(&script);
            let mut guest = Process::start(&command)?;
            while guest.line(&self.stop, Instant::now() + SILENCE)?.is_some() {}
            anyhow::Ok(guest.finish().is_ok())
        };
        let mode = if boots("on")? { "on" } else { "off" };
        self.seccomp = Some(mode.into());
        Ok(mode.into())
    }

    fn listen(
        &self,
        player: &Process,
        server: Option<&Process>,
        started: Instant,
        said: &mut Vec<String>,
    ) -> Result<Played> {
        let mut trace = Trace::new(started, Snapshot::take(), said);
        while let Some((came, line)) = player.line(&self.stop, Instant::now() + SILENCE)? {
            trace.take(came, line, Snapshot::take)?;
        }
        let part = trace.measured().with_context(|| {
            format!("the script ended without its marks: {}", player.errors().trim())
        })?;
        let used = |pid| (part.end.tree(pid) - part.begin.tree(pid)).max(0.0);
        let cpu = Cpu {
            guest: used(player.pid()),
            backend: server.map(|s| used(s.pid())),
            kernel: part.end.kernel_since(&part.begin),
        };
        let clock = part.clock();
        let Measured { seconds, guest_seconds, steps, data, .. } = part;
        let run = Run { steps, seconds, guest_seconds: Some(guest_seconds), cpu, ..Run::default() };
        Ok(Played { run, data, clock, spent: Spent::default() })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Parses the server's own figures at the end of its log: medians for the most common operation.
fn spent(log: &str) -> Spent {
    let figure = |line: &str, after: &str| -> Option<f64> {
        let rest = &line[line.find(after)? + after.len()..];
        rest.split(' ').next()?.parse::<f64>().ok().map(|us| us / 1e6)
    };
    let count = |line: &str| line.split("requests=").nth(1)?.split(' ').next()?.parse::<u64>().ok();
    let lines = log.lines().filter(|l| l.contains("queue time p50") && !l.contains(" flush:"));
    let Some(line) = lines.max_by_key(|l| count(l).unwrap_or(0)) else { return Spent::default() };
    Spent {
        submission: None,
        queueing: figure(line, "queue time p50 "),
        service: figure(line, "service time p50 "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_last_words() {
        let log = "INFO flush: queue time p50 9 us, p99 9, max 9; service time p50 9 us, p99 9, max 9 disk=\"d\" requests=900\n\
                   INFO read: queue time p50 5 us, p99 1, max 2; service time p50 80 us, p99 1, max 2 disk=\"d\" requests=100\n\
                   INFO write: queue time p50 6 us, p99 1, max 2; service time p50 70 us, p99 1, max 2 disk=\"d\" requests=7";
        let spent = spent(log);
        assert_eq!((spent.queueing, spent.service), (Some(5e-6), Some(80e-6)));
        assert_eq!(super::spent("nothing"), Spent::default());
    }
}
