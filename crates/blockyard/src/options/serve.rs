//! Options of `serve`, `attach` and `detach`.

use std::path::PathBuf;

use clap::Args;

use super::disk::DiskArgs;
use super::nbd::NbdArgs;
use super::values::{self, Cpus};
use super::xen::XenArgs;

#[derive(Args, Default)]
pub struct ServeOptions {
    #[command(flatten)]
    pub disk: Option<DiskArgs>,

    /// Serve the disks of this TOML file; SIGHUP reads it anew.
    #[arg(long, value_name = "FILE", conflicts_with = "DiskArgs")]
    pub config: Option<PathBuf>,

    /// Tells the device, and ends with it: for `attach`.
    #[arg(long, hide = true)]
    pub attached: bool,

    /// Only read the configuration file, look at the images, and say what is wrong with them.
    #[arg(long, requires = "config")]
    pub check_config: bool,

    /// Threads that serve queues, each with a ring of its own; queues are dealt out to them in turn
    /// [default: 1].
    #[arg(long, value_name = "N", value_parser = values::parse_reactors)]
    pub reactors: Option<u16>,

    /// Processors that the reactors keep to, in turn, such as 0,2-3 [default: wherever the kernel
    /// puts them].
    #[arg(long, value_name = "LIST", value_parser = values::parse_cpus)]
    pub cpus: Option<Cpus>,

    /// Serve disks as they ask, without a look at shares of their device. Limits hold all the same.
    #[arg(long)]
    pub no_fair_share: bool,

    /// What operations cost the devices, as `bench calibrate` has measured it [default:
    /// /var/lib/blockyard/costs.toml, where there is one].
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,

    #[command(flatten)]
    pub nbd: NbdArgs,

    #[command(flatten)]
    pub xen: XenArgs,
}

#[derive(Args)]
pub struct AttachOptions {
    #[command(flatten)]
    pub disk: DiskArgs,
}

#[derive(Args)]
pub struct DetachOptions {
    /// The block device, such as /dev/ublkb0.
    pub device: PathBuf,

    /// Remove it also while it is mounted, or used otherwise: what is written then is lost.
    #[arg(long)]
    pub force: bool,
}
