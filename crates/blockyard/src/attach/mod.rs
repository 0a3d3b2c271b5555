//! `blockyard attach` and `detach`: an image as a block device of this host, the short way.
//!
//! `attach` starts `serve --ublk` in the background, with its own options, waits until it is ready
//! and prints the device. The log goes to a file beside. `detach` stops the device; its server,
//! finding it gone, flushes the image and ends. Where the kernel has no ublk, it is `serve --nbd`,
//! and the kernel's own NBD client. What must hold: what was written is in the image when `detach`
//! has ended; a device in use is not taken away unasked.

mod kernel_nbd;

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use blockyard_export::ublk;
use blockyard_program::ending::Failure;
use blockyard_program::output;
use blockyard_ring::nbd_device::NbdDevice;
use rustix::process::{Pid, Signal};

use crate::log;
use crate::options::nbd::NbdAddress;
use crate::options::serve::{AttachOptions, DetachOptions};

/// How long the server of a device may take to flush the image and end.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn attach(options: &AttachOptions) -> Result<(), Failure> {
    let way = Way::find(options)?;
    let log = log_file(&options.disk.name())?;
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    // Its own options, and those that stand before its name.
    let mut args: Vec<_> = std::env::args_os().skip(1).collect();
    args.iter_mut().filter(|arg| *arg == "attach").take(1).for_each(|arg| *arg = "serve".into());
    command.args(args).arg("--attached");
    match way {
        Way::Ublk if options.disk.ublk.is_some() => {}
        Way::Ublk => _ = command.arg("--ublk"),
        Way::Nbd => {
            let socket = log.with_extension("sock");
            let _ = std::fs::remove_file(&socket);
            command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        }
    }
    start(command, &log, |device| Path::new(device).file_name().unwrap_or_default().to_os_string())
}

/// Starts a server in the background, with a log in file `log`. Prints its device when it is ready;
/// then `name`, of the device, is what the log is called.
pub fn start(
    mut command: Command,
    log: &Path,
    name: impl Fn(&str) -> OsString,
) -> Result<(), Failure> {
    let file = File::create(log).with_context(|| format!("log {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
    let mut server = command.spawn().context("starting the server")?;
    match device_of(&mut server) {
        Some(device) => {
            let mut file = name(&device);
            file.push(".log");
            let _ = std::fs::rename(log, log.with_file_name(file));
            output::print(format_args!("{device}\n"))?;
            Ok(())
        }
        None => {
            let status = server.wait().context("waiting for the server")?;
            let said = std::fs::read_to_string(log).unwrap_or_default();
            let _ = std::fs::remove_file(log);
            let last = said
                .lines()
                .last()
                .unwrap_or("it said nothing")
                .trim_start_matches("blockyard: ")
                .to_string();
            Err(Failure::with_status(status.code().map_or(1, |code| code as u8), anyhow!(last)))
        }
    }
}

/// What makes the block device.
enum Way {
    Ublk,
    Nbd,
}

impl Way {
    fn find(options: &AttachOptions) -> anyhow::Result<Self> {
        if Path::new("/dev/ublk-control").exists() || options.disk.ublk.is_some() {
            return Ok(Way::Ublk);
        }
        if !Path::new("/dev/nbd0").exists() {
            bail!(
                "no block device can be made: the kernel's driver is not loaded (modprobe ublk_drv; or nbd, where there is \
                 no ublk_drv)"
            );
        }
        if options.disk.nbd.is_some() {
            bail!(
                "without ublk the device is one of the kernel's NBD client, and --nbd is taken (modprobe ublk_drv)"
            );
        }
        Ok(Way::Nbd)
    }
}

/// The device that a server tells before it is ready; None: it has ended.
fn device_of(server: &mut Child) -> Option<String> {
    let mut lines = BufReader::new(server.stdout.take()?).lines().map_while(Result::ok);
    let device = lines.next()?;
    lines.any(|line| line == "ready").then_some(device)
}

/// Where the log of a device goes, under a name of its own until the device has one.
pub fn log_file(disk: &str) -> anyhow::Result<PathBuf> {
    let folder = if rustix::process::geteuid().is_root() {
        PathBuf::from("/run/blockyard")
    } else {
        std::env::var_os("XDG_RUNTIME_DIR")
            .map_or_else(std::env::temp_dir, PathBuf::from)
            .join("blockyard")
    };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.with_context(|| format!("folder {}", folder.display()))?;
    let owner = std::fs::symlink_metadata(&folder)
        .with_context(|| format!("folder {}", folder.display()))?
        .uid();
    if owner != rustix::process::geteuid().as_raw() {
        bail!("folder {} belongs to somebody else: the log cannot be there", folder.display());
    }
    Ok(folder.join(format!("attach-{}-{}.log", disk.replace('/', "_"), std::process::id())))
}

/// For the server, before anything else: the terminal's hang-up and its keys are not for it.
pub fn leave_terminal() {
    // Refused to the leader of a process group, which has been given its own already.
    let _ = rustix::process::setsid();
}

/// Tells who started this server what the device is called. Without ublk it is made here: of an
/// export by NBD; then it is the answer, for [`settle`].
pub fn tell(
    ublk: Option<PathBuf>,
    nbd: Option<&NbdAddress>,
    name: &str,
) -> anyhow::Result<Option<PathBuf>> {
    let is_ublk = ublk.is_some();
    let device = match (ublk, nbd) {
        (Some(device), _) => device,
        (None, Some(NbdAddress::Unix(socket))) => {
            let device = kernel_nbd::start(socket, name, ended(name.to_string(), true));
            // Nobody else is to come.
            let _ = std::fs::remove_file(socket);
            device?
        }
        _ => bail!("no device was made"),
    };
    log::say(&device.display().to_string());
    Ok((!is_ublk).then_some(device))
}

/// Before the end of a server whose device is the NBD client's: what the kernel has of it and has
/// not written back comes now, or never.
pub fn settle(device: &Path) {
    let synced = NbdDevice::open(device).and_then(|device| device.sync());
    if let Err(e) = synced {
        tracing::debug!("{}: syncing it: {e}", device.display());
    }
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
    let number = |prefix| path.to_str()?.strip_prefix(prefix)?.parse::<u32>().ok();
    let server = match (number("/dev/ublkb"), number("/dev/nbd")) {
        (Some(id), _) => ublk::remove(id, options.force)?,
        (_, Some(id)) => disconnect(&path, id, options.force)?,
        _ => {
            let path = path.display();
            let why =
                anyhow!("{path} is no device of this program: those are /dev/ublkbN and /dev/nbdN");
            return Err(Failure::usage(why));
        }
    };
    match server {
        Some(pid) if serves_one_device(pid) => Ok(wait_for(pid)?),
        _ => Ok(()),
    }
}

/// Ends a device of the kernel's NBD client, and tells who served it.
fn disconnect(path: &Path, id: u32, force: bool) -> anyhow::Result<Option<Pid>> {
    let name = path.display();
    let Some(pid) = process_of(id) else { bail!("{name} is not connected") };
    if !serves_one_device(pid) {
        bail!("{name} is not served by this program");
    }
    if !force {
        let claimed = blockyard_ring::host::claim(path);
        claimed.with_context(|| format!("{name} is in use: unmount it first"))?;
    }
    let device = NbdDevice::open(path).with_context(|| format!("device {name}"))?;
    // The kernel drops what it has not written back yet.
    if let Err(e) = device.sync()
        && !force
    {
        return Err(anyhow!(e).context(format!(
            "{name}: what was written to it cannot be synced (--force drops that)"
        )));
    }
    device.disconnect().with_context(|| format!("disconnecting {name}"))?;
    Ok(Some(pid))
}

/// The process that serves /dev/nbdN: the kernel tells a thread of it.
fn process_of(id: u32) -> Option<Pid> {
    let thread = std::fs::read_to_string(format!("/sys/block/nbd{id}/pid")).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", thread.trim())).ok()?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    Pid::from_raw(process.trim().parse().ok()?)
}

fn serves_one_device(pid: Pid) -> bool {
    let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    line.split(|b| *b == 0).any(|argument| argument == b"--attached")
}

fn wait_for(pid: Pid) -> anyhow::Result<()> {
    let start = Instant::now();
    while rustix::process::test_kill_process(pid).is_ok() && serves_one_device(pid) {
        if start.elapsed() > PATIENCE {
            bail!(
                "the device is gone, but its server, process {}, does not end",
                pid.as_raw_nonzero()
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
