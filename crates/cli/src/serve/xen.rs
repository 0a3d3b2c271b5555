//! `blockyard xen`: attaches disks to guests of Xen by one command.
//!
//! `attach` starts a server for one disk in the background, waits until the device exists, and
//! prints its name. It works before and after the guest starts. `detach` requests that the guest
//! close the device. The server then flushes the image and exits.

use std::process::Command as Program;
use std::time::Duration;

use anyhow::{Context, anyhow};
use blockyard_export::xen::{self, Name};
use blockyard_program::ending::Failure;
use blockyard_program::output;
use blockyard_ring::xen::Host;
use clap::{Args, Subcommand};

use super::attach;
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::options::xen::XenDevice;
use crate::serve;

/// How long `detach` waits until the guest closes the device. Some drivers keep a device open while
/// it is in use.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Subcommand)]
pub enum Command {
    /// Attach an image to a guest as a device.
    ///
    /// Prints the device. A server runs in the background until `detach`, or until the guest ends.
    Attach(Box<XenAttachOptions>),
    /// Detach a device from its guest.
    ///
    /// Unmount it in the guest first: the guest's driver may close it at once.
    Detach(XenDetachOptions),
    /// List the devices of this program: domain, device, bytes, state.
    List(XenListOptions),
}

// DEVICE is what --xen says for `serve`.
#[derive(Args)]
#[command(mut_arg("xen", |xen| xen.hide(true)))]
pub struct XenAttachOptions {
    /// Domain number of the guest (xl domid NAME).
    #[arg(value_name = "DOMID")]
    pub domain: u16,
    #[command(flatten)]
    pub disk: DiskArgs,
    /// Name of the device in the guest: xvda to xvdzz.
    #[arg(value_name = "DEVICE", default_value = "xvda")]
    pub guest_device: Name,
    /// Run as the server. `attach` passes it to the background process.
    #[arg(long, hide = true)]
    pub attached: bool,
}

#[derive(Args)]
pub struct XenDetachOptions {
    /// Domain number of the guest.
    #[arg(value_name = "DOMID")]
    pub domain: u16,
    /// Name of the device, such as xvda.
    #[arg(value_name = "DEVICE")]
    pub device: Name,
    /// Remove it without the guest's driver. Writes that the guest has not sent yet are lost.
    #[arg(long)]
    pub force: bool,
}

#[derive(Args)]
pub struct XenListOptions {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl Command {
    /// Returns whether this process is the background server of `attach`.
    pub fn serves(&self) -> bool {
        matches!(self, Command::Attach(attach) if attach.attached)
    }
}

pub fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Attach(options) if options.attached => serve(options),
        Command::Attach(options) => start(options),
        Command::Detach(XenDetachOptions { domain, device, force }) => {
            let gone = xen::detach(&Host::Xen, *domain, *device, *force, CLOSE_TIMEOUT)?;
            if !gone {
                let what = "the guest still uses it, or it has no server; it is removed when the \
                            guest closes it (--force removes it now)";
                return Err(anyhow!("device {device} of domain {domain}: {what}").into());
            }
            Ok(())
        }
        Command::List(XenListOptions { json }) => list(*json),
    }
}

/// Starts this program again as the server, in the background.
fn start(options: &XenAttachOptions) -> Result<(), Failure> {
    let name = options.disk.name();
    let log = attach::log_file(&name)?;
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Program::new(program);
    command.args(std::env::args_os().skip(1)).arg("--attached");
    let domain = options.domain;
    attach::start(command, &log, |device| format!("xen-{domain}-{device}").into())
}

fn serve(options: &XenAttachOptions) -> Result<(), Failure> {
    let xen = Some(XenDevice { domain: options.domain, name: options.guest_device });
    let disk = DiskArgs { xen, ..options.disk.clone() };
    serve::run(&ServeOptions { disk: Some(disk), attached: true, ..ServeOptions::default() })
}

fn list(json: bool) -> Result<(), Failure> {
    let found = xen::list(&Host::Xen)?;
    if json {
        let rows = found.iter().map(|d| {
            let bytes = d.sectors.map(|sectors| sectors * 512);
            serde_json::json!({
                "type": d.kind,
                "domain": d.domain,
                "device": d.device.to_string(),
                "state": d.state,
                "bytes": bytes,
                "read-only": d.read_only,
            })
        });
        output::print(format_args!("{:#}\n", serde_json::Value::from_iter(rows)))?;
        return Ok(());
    }
    for d in found {
        let bytes = d.sectors.map_or("-".into(), |sectors| (sectors * 512).to_string());
        let mode = if d.read_only { " read-only" } else { "" };
        output::print(format_args!("{} {} {bytes} {}{mode}\n", d.domain, d.device, d.state))?;
    }
    Ok(())
}
