//! The setup of a table's measurements: a folder with images, servers on sockets, tools. Dropping
//! it removes all.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use blockyard_program::peer;
use clap::Parser;

use super::Figures;
use crate::client;
use crate::compare::blockdev::{self, ImageFile};
use crate::job::RunLimit;
use crate::process::{Process, Stop, fill};

pub struct Workspace {
    pub folder: PathBuf,
    guests: Option<PathBuf>,
    pub program: PathBuf,
    pub stop: Stop,
    pub size: u64,
    pub seconds: f64,
    /// Operations of a run, instead of seconds.
    ops: Option<u64>,
}

/// Back ends that speak vhost-user.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Server {
    Blockyard,
    Qsd,
}

/// The disk of a back end.
pub struct Image<'a> {
    pub path: &'a Path,
    /// `raw`, `qcow2`, or `null` for no storage at all.
    pub format: &'static str,
    /// The images that back it: that of `path` first.
    pub backing: &'a [ImageFile],
    pub cached: bool,
    /// Blockyard's option. `None`: its default, which is the journal.
    pub crash_safety: Option<&'static str>,
}

impl<'a> Image<'a> {
    pub fn new(path: &'a Path, format: &'static str, cached: bool) -> Self {
        Image { path, format, backing: &[], cached, crash_safety: None }
    }
}

impl Workspace {
    pub fn new(guests: Option<PathBuf>, size: u64, limit: RunLimit, stop: Stop) -> Result<Self> {
        let base = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let folder = base.join(format!("blockyard-table.{}", std::process::id()));
        let program = peer::find("blockyard")?;
        std::fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let (seconds, ops) = match limit {
            RunLimit::Seconds(seconds) => (seconds, None),
            RunLimit::Operations(ops) => (0.0, Some(ops)),
        };
        Ok(Workspace { folder, guests, program, stop, size, seconds, ops })
    }

    /// Returns a place of a MiB for each disk, with these programs.
    #[cfg(test)]
    pub fn of_programs(folder: PathBuf, guests: PathBuf, program: PathBuf) -> Self {
        let stop = Stop::default();
        let (size, seconds, ops) = (1 << 20, 0.01, None);
        Workspace { folder, guests: Some(guests), program, stop, size, seconds, ops }
    }

    /// Returns the option of `bench client` that ends a run.
    pub fn limit(&self) -> String {
        match self.ops {
            Some(ops) => format!("--ops {ops}"),
            None => format!("--runtime {}", self.seconds),
        }
    }

    pub fn guests(&self) -> Result<&Path> {
        self.guests
            .as_deref()
            .context("no guests are installed (BLOCKYARD_GUESTS names their folder)")
    }

    /// Returns a program of the guests' tree.
    pub fn tool(&self, name: &str) -> Result<Command> {
        let mut command = Command::new(self.guests()?.join("tool"));
        command.arg(name);
        Ok(command)
    }

    pub fn qemu_img(&self, words: &str, files: &[&Path]) -> Result<()> {
        run(self.tool("qemu-img")?.args(words.split_whitespace()).args(files)).map(drop)
    }

    /// Returns the raw file. Every block of it is written.
    pub fn base(&self) -> Result<PathBuf> {
        let path = self.folder.join("base.img");
        if !path.exists() {
            fill(&path, self.size, &self.stop)?;
        }
        Ok(path)
    }

    /// Starts a server, and waits until it listens.
    pub fn start(&self, command: &Command, socket: &Path) -> Result<Process> {
        let mut server = Process::start(command)?;
        server.until_it_listens(socket, &self.stop)?;
        Ok(server)
    }

    pub fn socket(&self) -> PathBuf {
        let socket = self.folder.join("s");
        let _ = std::fs::remove_file(&socket);
        socket
    }

    /// Starts a back end for an image. Returns its process and its socket.
    pub fn vhost_user(&self, server: Server, image: &Image<'_>) -> Result<(Process, PathBuf)> {
        let socket = self.socket();
        let Image { path, format, backing, cached, crash_safety } = image;
        let command = if server == Server::Blockyard {
            let mut command = Command::new(&self.program);
            command.args(["--log", "error", "serve"]);
            match *format {
                "null" => command.arg("null:2G"),
                "raw" => command.arg(path).args(["--format", "raw"]),
                format => command.arg(path).args(["--format", format, "--prime"]),
            };
            command
                .args(["--cache", if *cached { "writeback" } else { "none" }, "--vhost-user"])
                .arg(&socket);
            if let Some(kind) = crash_safety {
                command.args(["--crash-safety", kind]);
            }
            command
        } else {
            let mut command = self.tool("qemu-storage-daemon")?;
            if *format == "null" {
                command.args([
                    "--blockdev",
                    &format!(
                        "driver=null-co,node-name={},size=2147483648,read-zeroes=off",
                        blockdev::TOP
                    ),
                ]);
            } else {
                let chain = [&[ImageFile::new(*path, format)], *backing].concat();
                command.args(blockdev::arguments(&chain, *cached));
            }
            let node = blockdev::TOP;
            let export = format!(
                "type=vhost-user-blk,id=e0,node-name={node},writable=on,num-queues=1,addr.type=unix,addr.path={}",
                socket.display()
            );
            command.args(["--export", &export]);
            command
        };
        Ok((self.start(&command, &socket)?, socket))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Writes a durable file of zeroes without holes.
pub fn zeroes(path: &Path, size: u64, stop: &Stop) -> Result<()> {
    use std::io::Write;
    let mut file =
        std::fs::File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let piece = vec![0; 1 << 20];
    for _ in 0..size.div_ceil(1 << 20) {
        stop.check()?;
        file.write_all(&piece).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(file.sync_all()?)
}

/// Runs a command to its end. Returns its output.
pub fn run(command: &mut Command) -> Result<String> {
    let done = command
        .output()
        .with_context(|| format!("starting {}", command.get_program().display()))?;
    anyhow::ensure!(
        done.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&done.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Syncs the file, and puts it into the page cache or drops it from there, because a direct write
/// of a cached page costs more.
pub fn settle(path: &Path, cached: bool) -> Result<()> {
    let mut file =
        std::fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
    file.sync_all()?;
    if cached {
        std::io::copy(&mut file, &mut std::io::sink())?;
    } else {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Runs a load of `bench client` on a target. `words` and `more`: its options.
pub fn load(words: &str, more: impl IntoIterator<Item = OsString>, stop: &Stop) -> Result<Figures> {
    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct Load {
        #[command(flatten)]
        options: client::LoadOptions,
    }
    let words = words.split_whitespace().map(OsString::from);
    let mut options = Load::try_parse_from(words.chain(more))?.options;
    options.stop = stop.clone();
    let report = client::measure(&options);
    stop.check()?;
    let report = report?;
    if let Some(first) = &report.first_error {
        anyhow::bail!("{} operations failed, the first: {first}", report.errors);
    }
    let latency = &report.latency_us;
    let mut figures = Figures::from([
        ("iops", report.iops),
        ("bytes_per_second", report.bytes_per_second),
        ("p50_us", latency.p50),
        ("p99_us", latency.p99),
    ]);
    figures.extend(report.backend_cpu.map(|cpu| ("cpu_us", cpu.seconds_per_million_ios)));
    Ok(figures)
}

/// Returns the options that name a back end and its process.
pub fn back_end(server: &Process, socket: &Path) -> [OsString; 3] {
    ["--backend-pid".into(), server.pid().to_string().into(), socket.into()]
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;
    use crate::process::Interrupted;
    use crate::scratch::Scratch;

    fn error(result: Result<impl Sized>) -> String {
        format!("{:#}", result.err().expect("an error"))
    }

    #[test]
    fn a_program_that_fails_is_named_with_its_arguments_and_what_it_said() {
        let scratch = Scratch::new();
        let program = scratch.script("program", "echo out; echo \"no such image\" >&2; exit 2");
        let said = error(run(Command::new(&program).arg("disk.img")));
        for part in [program.to_str().unwrap(), "disk.img", "no such image"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let said = error(run(&mut Command::new("/nonexistent/program")));
        assert!(said.starts_with("starting /nonexistent/program"), "{said}");
        assert_eq!(run(Command::new("echo").arg("out")).unwrap(), "out\n");
    }

    #[test]
    fn a_server_that_ends_at_its_start_is_an_error_with_its_last_words() {
        let scratch = Scratch::new();
        let record =
            "printf '%s\\n' \"$*\" >>\"${0%/*}/calls\"; echo \"the disk is in use\" >&2; exit 1";
        scratch.script("blockyard", record);
        scratch.script("tool", record);
        let place = fixture::place(&scratch);
        let path = Path::new("/disk.qcow2");
        let backing = [ImageFile::new("/base.img", "raw")];
        let qcow2 = Image {
            backing: &backing,
            crash_safety: Some("off"),
            ..Image::new(path, "qcow2", false)
        };
        let images = [
            (Server::Blockyard, qcow2),
            (Server::Blockyard, Image::new(path, "raw", true)),
            (Server::Blockyard, Image::new(path, "null", false)),
            (Server::Qsd, Image { backing: &backing, ..Image::new(path, "qcow2", true) }),
            (Server::Qsd, Image::new(path, "null", false)),
        ];
        for (server, image) in &images {
            let said = error(place.vhost_user(*server, image));
            let socket = place.folder.join("s");
            assert!(said.contains("does not listen on") && said.contains(socket.to_str().unwrap()));
            assert!(said.contains("the disk is in use"), "{said}");
        }
        let calls = scratch.lines("calls");
        let socket = place.folder.join("s").display().to_string();
        assert_eq!(
            calls[..3],
            [
                format!(
                    "--log error serve /disk.qcow2 --format qcow2 --prime --cache none --vhost-user {socket} --crash-safety off"
                ),
                format!(
                    "--log error serve /disk.qcow2 --format raw --cache writeback --vhost-user {socket}"
                ),
                format!("--log error serve null:2G --cache none --vhost-user {socket}"),
            ]
        );
        for part in ["filename=/base.img", "backing=r1", "cache.direct=off", "node-name=r0"] {
            assert!(calls[3].contains(part), "{part}: {}", calls[3]);
        }
        assert!(calls[4].contains("driver=null-co,node-name=r0,size=2147483648"), "{}", calls[4]);
    }

    #[test]
    fn a_place_without_guests_says_how_to_name_them() {
        let scratch = Scratch::new();
        let mut place = fixture::place(&scratch);
        place.guests = None;
        for said in [error(place.tool("fio")), error(place.guests())] {
            assert!(said.contains("BLOCKYARD_GUESTS"), "{said}");
        }
    }

    #[test]
    fn the_raw_file_is_made_once_and_has_no_holes() {
        let scratch = Scratch::new();
        let place = fixture::place(&scratch);
        let base = place.base().unwrap();
        let bytes = std::fs::read(&base).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        assert!(bytes.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
        std::fs::write(&base, "mine").unwrap();
        assert_eq!(std::fs::read(place.base().unwrap()).unwrap(), b"mine");
        let zero = scratch.join("zero");
        zeroes(&zero, 3 << 20, &Stop::default()).unwrap();
        assert!(std::fs::read(&zero).unwrap() == vec![0; 3 << 20]);
        let said = error(zeroes(Path::new("/nonexistent/zero"), 1, &Stop::default()));
        assert!(said.contains("creating /nonexistent/zero"), "{said}");
        assert!(
            error(settle(Path::new("/nonexistent/a"), true)).contains("opening /nonexistent/a")
        );
    }

    #[test]
    fn a_load_has_its_figures_or_an_error() {
        let scratch = Scratch::new();
        let file = scratch.file("disk", vec![7; 1 << 20]);
        let stop = Stop::default();
        let on = |file: &Path| ["--buffered".into(), "--file".into(), file.as_os_str().to_owned()];
        let figures = load("--rw randread --ops 50", on(&file), &stop).unwrap();
        let names: Vec<_> = figures.keys().copied().collect();
        assert_eq!(names, ["bytes_per_second", "iops", "p50_us", "p99_us"]);
        let bytes = figures["bytes_per_second"] / figures["iops"];
        assert!((bytes - 4096.0).abs() < 1e-6, "{bytes} bytes an operation");
        let said = error(load("--rw sideways", on(&file), &stop));
        assert!(said.contains("sideways"), "{said}");
        let said = error(load("--ops 1", on(Path::new("/nonexistent/disk")), &stop));
        assert!(said.contains("/nonexistent/disk"), "{said}");
        stop.request();
        let end = load("--rw randread --ops 50", on(&file), &stop).unwrap_err();
        assert!(end.is::<Interrupted>(), "{end:#}");
    }
}
