//! `blockyard attach` and `detach`: an image as a block device of this host, the short way.
//!
//! `attach` starts `serve --ublk` in the background, with its own options, waits until it is ready and prints the device. The
//! log goes to a file beside. `detach` stops the device; its server, finding it gone, flushes the image and ends.
//! What must hold: what was written is in the image when `detach` has ended; a device in use is not taken away unasked.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use blockyard_export::ublk::{self, Ublk};
use rustix::process::{Pid, Signal};

use crate::Failure;
use crate::cli::{AttachOptions, DetachOptions};

/// How long the server of a device may take to flush the image and end.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn attach(options: &AttachOptions) -> Result<(), Failure> {
    if !Path::new("/dev/ublk-control").exists() {
        return Err(
            anyhow!("no block device can be made: the kernel's driver is not loaded (modprobe ublk_drv)").into()
        );
    }
    let log = log_file(options)?;
    let file = File::create(&log).with_context(|| format!("log {}", log.display()))?;
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    // Its own options, and those that stand before its name.
    let mut args: Vec<_> = std::env::args_os().skip(1).collect();
    args.iter_mut().filter(|arg| *arg == "attach").take(1).for_each(|arg| *arg = "serve".into());
    command.args(args).arg("--attached");
    if options.disk.ublk.is_none() {
        command.arg("--ublk");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
    let mut server = command.spawn().context("starting the server")?;
    match device_of(&mut server) {
        Some(device) => {
            let name = Path::new(&device).file_name().unwrap_or_default();
            let _ = std::fs::rename(&log, log.with_file_name(name).with_extension("log"));
            println!("{device}");
            Ok(())
        }
        None => {
            let status = server.wait().context("waiting for the server")?;
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let _ = std::fs::remove_file(&log);
            let last = said.lines().last().unwrap_or("it said nothing").trim_start_matches("blockyard: ").to_string();
            Err(Failure::with_status(status.code().map_or(1, |code| code as u8), anyhow!(last)))
        }
    }
}

/// The device that a server tells before it is ready; None: it has ended.
fn device_of(server: &mut Child) -> Option<String> {
    let mut lines = BufReader::new(server.stdout.take()?).lines().map_while(Result::ok);
    let device = lines.next()?;
    lines.any(|line| line == "ready").then_some(device)
}

/// Where the log of a device goes, under a name of its own until the device has one.
fn log_file(options: &AttachOptions) -> anyhow::Result<PathBuf> {
    let folder = if rustix::process::geteuid().is_root() {
        PathBuf::from("/run/blockyard")
    } else {
        std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from).join("blockyard")
    };
    std::fs::create_dir_all(&folder).with_context(|| format!("folder {}", folder.display()))?;
    Ok(folder.join(format!("attach-{}-{}.log", options.disk.name().replace('/', "_"), std::process::id())))
}

/// For the server, before anything else: the terminal's hang-up and its keys are not for it.
pub fn leave_terminal() {
    // Refused to the leader of a process group, which has been given its own already.
    let _ = rustix::process::setsid();
}

/// Tells who started this server what the device is called.
pub fn tell(device: Option<&Ublk>) -> anyhow::Result<()> {
    let device = device.context("no ublk device was made")?;
    println!("{}", device.path().display());
    std::io::stdout().flush().context("telling the device")
}

/// What is done when somebody else has removed a device.
pub fn ended(disk: String, attached: bool) -> impl Fn() + Send + Sync + 'static {
    move || {
        tracing::info!(disk, "its block device was removed");
        if attached {
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::TERM);
        }
    }
}

pub fn detach(options: &DetachOptions) -> Result<(), Failure> {
    // A link's target; what is not there may still be half of a device.
    let path = std::fs::canonicalize(&options.device).unwrap_or_else(|_| options.device.clone());
    let number = path.to_str().and_then(|p| p.strip_prefix("/dev/ublkb")).and_then(|n| n.parse().ok());
    let Some(id) = number else {
        return Err(Failure::usage(anyhow!("{} is no device of this program: those are /dev/ublkbN", path.display())));
    };
    let server = ublk::remove(id, options.force)?;
    match server {
        Some(pid) if serves_one_device(pid) => Ok(wait_for(pid)?),
        _ => Ok(()),
    }
}

fn serves_one_device(pid: Pid) -> bool {
    let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    line.split(|b| *b == 0).any(|argument| argument == b"--attached")
}

fn wait_for(pid: Pid) -> anyhow::Result<()> {
    let start = Instant::now();
    while rustix::process::test_kill_process(pid).is_ok() && serves_one_device(pid) {
        if start.elapsed() > PATIENCE {
            bail!("the device is gone, but its server, process {}, does not end", pid.as_raw_nonzero());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
