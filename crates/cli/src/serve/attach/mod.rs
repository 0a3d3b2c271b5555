//! `blockyard attach` and `detach`: an image as a block device of this host, by one command.
//!
//! `attach` starts `serve --ublk` in the background with the same options, waits until it is ready,
//! and prints the device. The server logs to a file. `detach` stops the device. The server notices
//! that, flushes the image and exits. If the kernel has no ublk, `attach` starts `serve --nbd` and
//! uses the kernel's NBD client. What must hold: when `detach` ends, all writes are in the image.
//! `detach` removes a device that is in use only with `--force`. If `attach` is killed before it
//! has printed the device, its server ends. If the server is killed, `attach` removes its device.

mod closing;
mod disconnect;
mod kernel_nbd;
mod leftovers;
mod starter;

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use blockyard_export::ublk;
use blockyard_program::ending::Failure;
use blockyard_program::output;
use blockyard_ring::nbd_device::NbdDevice;

use crate::exports;
use crate::options::disk::DiskArgs;
use crate::options::nbd::NbdAddress;
use crate::options::serve::{AttachOptions, DetachOptions};
use crate::process::log;
pub use closing::Closing;
use closing::Server;
pub use starter::follow;

/// How long a new server waits for the image's lock. After a kill of `attach`, its server may still
/// have the lock, and after a kill of a server, its last requests may.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

pub fn attach(options: &AttachOptions) -> Result<(), Failure> {
    let driver = Driver::find(options)?;
    let log = log_file(&options.disk.name())?;
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    // The server gets all options of this command, including general options before the word
    // `attach`.
    let mut args: Vec<_> = std::env::args_os().skip(1).collect();
    args.iter_mut().filter(|arg| *arg == "attach").take(1).for_each(|arg| *arg = "serve".into());
    command.args(args).arg("--attached");
    match driver {
        Driver::Ublk if options.disk.ublk.is_some() => {}
        Driver::Ublk => _ = command.arg("--ublk"),
        Driver::Nbd => {
            let socket = log.with_extension("sock");
            let _ = std::fs::remove_file(&socket);
            command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        }
    }
    let started =
        start(command, &log, |device| Path::new(device).file_name().unwrap_or_default().into());
    match (started, driver) {
        (Err(failure), Driver::Ublk) if failure.error.is::<Killed>() => {
            Err(without_device(failure, &options.disk))
        }
        (started, _) => started,
    }
}

/// A signal ended the server before its device was ready.
#[derive(Debug, thiserror::Error)]
#[error("signal {signal} ended the server of the device before it was ready (log: {})",
    .log.display())]
pub struct Killed {
    signal: i32,
    log: PathBuf,
}

/// Removes the device that a killed server left, because a program that opens it would wait for
/// the next server. Adds to the error what happened to the device.
fn without_device(failure: Failure, disk: &DiskArgs) -> Failure {
    let removed = ublk::remove_left(&exports::ublk_options(disk));
    let what = match removed {
        Ok(Some(id)) => format!("/dev/ublkb{id} is removed again"),
        Ok(None) => "no device is left".into(),
        Err(e) => format!("its device stays, and waits for the next `attach`: {e}"),
    };
    Failure::with_status(failure.status, anyhow!("{}; {what}", failure.error))
}

/// Starts a server in the background that logs to the file `log`. Prints its device when it is
/// ready, and renames the log to what `name` returns for the device. The server ends if this
/// process ends before it has printed the device.
pub fn start(
    mut command: Command,
    log: &Path,
    name: impl Fn(&str) -> OsString,
) -> Result<(), Failure> {
    let file = File::create(log).with_context(|| format!("log {}", log.display()))?;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
    let mut server = command.spawn().context("starting the server")?;
    let confirmation = server.stdin.take();
    match device_of(&mut server) {
        Some(device) => {
            let mut file = name(&device);
            file.push(".log");
            let _ = std::fs::rename(log, log.with_file_name(file));
            output::print(format_args!("{device}\n"))?;
            starter::confirm(confirmation);
            Ok(())
        }
        None => Err(why_ended(server.wait().context("waiting for the server")?, log)),
    }
}

/// Returns why a server has ended before it was ready: its last message, or the signal. The log of
/// a server that a signal has ended stays.
fn why_ended(status: ExitStatus, log: &Path) -> Failure {
    if let Some(signal) = status.signal() {
        return Killed { signal, log: leftovers::keep(log) }.into();
    }
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let _ = std::fs::remove_file(log);
    let last = text
        .lines()
        .last()
        .unwrap_or("the server ended without a message")
        .trim_start_matches("blockyard: ")
        .to_string();
    Failure::with_status(status.code().map_or(1, |code| code as u8), anyhow!(last))
}

/// Kernel driver of the block device.
enum Driver {
    Ublk,
    Nbd,
}

impl Driver {
    fn find(options: &AttachOptions) -> anyhow::Result<Self> {
        let has_ublk = || Path::new("/dev/ublk-control").exists() && !ublk::is_too_old();
        if options.disk.ublk.is_some() || has_ublk() {
            return Ok(Driver::Ublk);
        }
        if !Path::new("/dev/nbd0").exists() {
            bail!(
                "cannot make a block device: the kernel driver is not loaded: run `modprobe \
                 ublk_drv` (or `modprobe nbd` if the kernel is older than Linux 6.5 or has no \
                 ublk_drv)"
            );
        }
        if options.disk.nbd.is_some() {
            bail!("--nbd works here only with ublk: run `modprobe ublk_drv`, or leave out --nbd");
        }
        Ok(Driver::Nbd)
    }
}

/// Returns the device that a server prints before it is ready, or `None` if the server ended.
fn device_of(server: &mut Child) -> Option<String> {
    let mut lines = BufReader::new(server.stdout.take()?).lines().map_while(Result::ok);
    let device = lines.next()?;
    lines.any(|line| line == "ready").then_some(device)
}

/// Root's folder of logs and sockets. (The user of the service owns `/run/blockyard`.)
const ROOTS_FOLDER: &str = "/run/blockyard-attach";

/// Returns the path for the log of a server whose device is not known yet. Creates the folder.
/// Returns an error if the folder belongs to another user.
pub fn log_file(disk: &str) -> anyhow::Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let folder = if user == 0 {
        PathBuf::from(ROOTS_FOLDER)
    } else {
        // The temporary folder belongs to all users.
        std::env::var_os("XDG_RUNTIME_DIR").map_or_else(
            || std::env::temp_dir().join(format!("blockyard-{user}")),
            |folder| PathBuf::from(folder).join("blockyard"),
        )
    };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.with_context(|| format!("folder {}", folder.display()))?;
    let owner = std::fs::symlink_metadata(&folder)
        .with_context(|| format!("folder {}", folder.display()))?
        .uid();
    if owner != user {
        bail!("folder {} belongs to another user: the log cannot be there", folder.display());
    }
    leftovers::remove(&folder);
    Ok(folder.join(leftovers::name(disk, std::process::id())))
}

/// Detaches the server from the terminal, so that the terminal's signals do not reach it.
pub fn leave_terminal() {
    // Fails for the leader of a process group. A shell gave it a group of its own already.
    let _ = rustix::process::setsid();
}

/// Prints the device for the process that started this server. Without ublk, makes a device of the
/// kernel's NBD client first, and returns it, for [`sync_device`].
pub fn report_device(
    ublk: Option<PathBuf>,
    nbd: Option<&NbdAddress>,
    name: &str,
) -> anyhow::Result<Option<PathBuf>> {
    let is_ublk = ublk.is_some();
    let device = match (ublk, nbd) {
        (Some(device), _) => device,
        (None, Some(NbdAddress::Unix(socket))) => {
            let device = kernel_nbd::start(socket, name, exports::ended(name.to_string(), true));
            // Remove the socket, so that no other client can connect.
            let _ = std::fs::remove_file(socket);
            device?
        }
        _ => bail!("the export has no block device"),
    };
    log::say(&device.display().to_string());
    Ok((!is_ublk).then_some(device))
}

/// Syncs a device of the kernel's NBD client before its server ends. The kernel loses data that it
/// has not written back by then.
pub fn sync_device(device: &Path) {
    let synced = NbdDevice::open(device).and_then(|device| device.sync());
    if let Err(e) = synced {
        tracing::debug!("{}: syncing it: {e}", device.display());
    }
}

pub fn detach(options: &DetachOptions) -> Result<(), Failure> {
    // Resolve links. Keep a path that does not exist: the device may be half removed.
    let path = std::fs::canonicalize(&options.device).unwrap_or_else(|_| options.device.clone());
    let number = |prefix| path.to_str()?.strip_prefix(prefix)?.parse::<u32>().ok();
    let server = match (number("/dev/ublkb"), number("/dev/nbd")) {
        (Some(id), _) => ublk::remove(id, options.force, Server::watch)?,
        (_, Some(id)) => disconnect::disconnect(&path, id, options.force)?,
        _ => {
            let path = path.display();
            let why =
                anyhow!("{path} is not a device of this program: give /dev/ublkbN or /dev/nbdN");
            return Err(Failure::usage(why));
        }
    };
    Ok(server.finish(&path)?)
}
