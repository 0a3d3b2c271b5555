//! Options of `serve`, `attach` and `detach`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueHint};

use super::api::ApiArgs;
use super::disk::DiskArgs;
use super::nbd::NbdArgs;
use super::sandbox::SandboxArgs;
use super::values::{self, Cpus};
use super::xen::XenArgs;

#[derive(Args, Clone, Default)]
pub struct ServeOptions {
    #[command(flatten)]
    pub disk: Option<DiskArgs>,

    /// Serve the disks of this TOML file, and of the files in the folder conf.d beside it.
    ///
    /// A folder instead of a file: blockyard.toml and conf.d in it. SIGHUP reads all files again.
    #[arg(long, value_name = "FILE", conflicts_with = "DiskArgs", help_heading = "Server",
        value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,

    /// Print the device, and exit when the device is removed. `attach` passes it.
    #[arg(long, hide = true)]
    pub attached: bool,

    /// Check the configuration file and its images, and exit.
    #[arg(long, requires = "config", help_heading = "Server")]
    pub check_config: bool,

    /// Number of reactors (threads with an io_uring each) [default: 1].
    ///
    /// The server distributes the queues to the reactors in turn.
    #[arg(long, value_name = "N", value_parser = values::parse_reactors, help_heading = "Server")]
    pub reactors: Option<u16>,

    /// Pin the reactors to these processors in turn, such as 0,2-3 [default: not pinned].
    #[arg(long, value_name = "LIST", value_parser = values::parse_cpus, help_heading = "Server")]
    pub cpus: Option<Cpus>,

    /// Serve requests in the order of arrival, without shares of devices. Limits still apply.
    #[arg(long, help_heading = "Server")]
    pub no_fair_share: bool,

    /// File with the costs of the devices' operations, from `bench calibrate`.
    ///
    /// [default: /var/lib/blockyard/costs.toml, if it exists]
    #[arg(long, value_name = "FILE", help_heading = "Server", value_hint = ValueHint::FilePath)]
    pub costs: Option<PathBuf>,

    /// Folder for journals of changed metadata, on tmpfs. The next server needs the same one.
    ///
    /// [default: $BLOCKYARD_STATE_FOLDER, else blockyard-journals in the runtime directory]
    #[arg(long, value_name = "FOLDER", help_heading = "Server", value_hint = ValueHint::DirPath)]
    pub state_folder: Option<PathBuf>,

    /// Hand the disks over to a server that is started with --takeover SOCKET.
    ///
    /// Only a process of the same user may connect.
    #[arg(long, value_name = "SOCKET", help_heading = "Server", value_parser = control(),
        value_hint = ValueHint::AnyPath)]
    pub control: Option<PathBuf>,

    /// Take the disks over from the server with this --control socket. Guests stay connected.
    ///
    /// Give the options of the running server. `ctl upgrade` does all of this.
    #[arg(long, value_name = "SOCKET", help_heading = "Server", value_hint = ValueHint::AnyPath)]
    pub takeover: Option<PathBuf>,

    /// Keep the guests of vhost-user sockets if the server dies.
    ///
    /// A small process, the holder, keeps their sockets and memory, and starts the server again.
    /// Guests see a pause, also those that cannot reconnect. In a service with
    /// FileDescriptorStoreMax= systemd does this, and there is no holder.
    #[arg(long, help_heading = "Server")]
    pub keep_sessions: bool,

    /// The holder has started this server; standard input is the connection.
    #[arg(long, hide = true, conflicts_with = "keep_sessions")]
    pub held: bool,

    #[command(flatten)]
    pub api: ApiArgs,

    /// Offer metrics for Prometheus, and a web page, at this address of the host itself.
    ///
    /// Every process of the host may read them: 127.0.0.1:9184 or [::1]:9184. They are also on the
    /// API's socket.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = values::parse_loopback,
        help_heading = "Server")]
    pub metrics: Option<SocketAddr>,

    #[command(flatten)]
    pub sandbox: SandboxArgs,

    #[command(flatten)]
    pub nbd: NbdArgs,

    #[command(flatten)]
    pub xen: XenArgs,
}

/// Returns the parser of `--control`.
fn control() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        values::plain(&path.to_string_lossy())?;
        Ok::<_, String>(path)
    })
}

#[derive(Args)]
#[command(mut_arg("image", |image| image.required(true)))]
pub struct AttachOptions {
    #[command(flatten)]
    pub disk: DiskArgs,
}

#[derive(Args)]
pub struct DetachOptions {
    /// The block device, such as /dev/ublkb0.
    #[arg(value_hint = ValueHint::FilePath)]
    pub device: PathBuf,

    /// Remove it even if it is mounted or open. Writes that are not flushed are lost.
    #[arg(long)]
    pub force: bool,
}
