//! The API of a server: its socket, the address of its metrics, and the commands behind its calls.
//!
//! ```text
//!   operator   what each call does
//!   adding     adds disks
//!   forks      adds a disk that begins with the content of another one
//!   backups    copies of disks in use
//!   places     paths of new images
//!   clients    disconnects clients, and waits until they have left
//!   keeping    what calls write into the configuration
//!   snapshots  snapshots, and the configuration that names their overlays
//!   sampled    figures for metrics
//!   words      settings, figures and errors in the API's words
//! ```

mod adding;
mod backups;
mod clients;
mod forks;
mod keeping;
mod operator;
mod persist;
mod places;
mod sampled;
mod snapshots;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use blockyard_control::{Access, Api, ClientLimits, Listeners};
use blockyard_export::Listener;
use blockyard_ring::host;
use blockyard_ring::parcel::Parcel;

use crate::handover::Takeover;
use crate::options::api::ApiArgs;
use crate::process::inherited;
use crate::server::Server;

/// Names of the sockets in a hand-over.
const API: &str = "API";
const METRICS: &str = "metrics";

/// The running API. Dropping it ends the API and removes its socket.
pub struct Running {
    api: Api,
    _socket: Option<Socket>,
}

/// The socket of the API. Its drop removes the file, although a call that has not ended may keep
/// the listener.
struct Socket(Arc<Listener>);

impl Drop for Socket {
    fn drop(&mut self) {
        self.0.remove_socket();
    }
}

impl Running {
    /// Accepts no more clients, and waits a moment for the end of those that are connected.
    pub fn retire(&self) {
        self.api.retire(RETIRE_TIME);
    }
}

/// How long the API's clients may read the last answer of a server that another one has replaced.
const RETIRE_TIME: Duration = Duration::from_secs(2);

/// The open sockets of API and metrics.
#[derive(Default)]
pub struct Opened {
    api: Option<(Arc<Listener>, Access)>,
    /// What the file of a socket of the old server gets when this server has the disks.
    permission: Option<Permission>,
    metrics: Option<TcpListener>,
}

impl Opened {
    /// Opens the socket of the API and the address of the metrics, as far as the options have them.
    pub fn of(
        options: &ApiArgs,
        metrics: Option<SocketAddr>,
        mut takeover: Option<&mut Takeover>,
    ) -> anyhow::Result<Self> {
        let mut handed = |name| takeover.as_mut().and_then(|takeover| takeover.socket(name));
        let mut opened = Opened::default();
        if let Some(path) = &options.api {
            let group = options.socket_group.as_deref().map(group).transpose()?;
            let listener = match handed(API) {
                Some(parcel) => {
                    let listener = same_socket(Listener::from_parcel(parcel)?, path)?;
                    opened.permission = Permission::of_file(&listener, options.mode(), group)?;
                    listener
                }
                None => listen(path, options.mode(), group)?,
            };
            let access = Access { user: rustix::process::geteuid().as_raw(), group };
            opened.api = Some((Arc::new(listener), access));
            tracing::info!("the API listens on {path}");
        }
        if let Some(address) = metrics {
            let socket = handed(METRICS).and_then(|parcel| parcel.fds.into_iter().next());
            let socket = socket.map(TcpListener::from);
            let is_same = |socket: &TcpListener| {
                socket.local_addr().is_ok_and(|own| address.port() == 0 || own == address)
            };
            let listener = match socket.filter(is_same) {
                Some(socket) => socket,
                None => TcpListener::bind(address).with_context(|| {
                    format!("metrics {address}: cannot listen there; choose another port")
                })?,
            };
            tracing::info!("metrics are at http://{}/metrics", listener.local_addr()?);
            opened.metrics = Some(listener);
        }
        Ok(opened)
    }

    /// Starts the API, and offers its sockets to the next server. None: there are none.
    pub fn start(self, server: &Arc<Server>) -> anyhow::Result<Option<Running>> {
        let Opened { api, permission, metrics } = self;
        // The server has the disks, so an error must not end it.
        if let Some(permission) = permission
            && let Err(e) = permission.apply()
        {
            tracing::error!("api: the socket has its old group and mode: {e}");
        }
        if api.is_none() && metrics.is_none() {
            return Ok(None);
        }
        let (mut listeners, mut socket) = (Listeners::default(), None);
        if let Some((listener, access)) = api {
            let unix = listener.unix().context("cannot serve the API on its socket")?;
            let offered = listener.clone();
            server.hand_overs.offer(API, move || offered.to_parcel());
            listeners.api = Some((unix, access));
            socket = Some(Socket(listener));
        }
        if let Some(listener) = metrics {
            let offered = listener.try_clone()?;
            server.hand_overs.offer(METRICS, move || {
                let socket = offered.as_fd().try_clone_to_owned()?;
                Ok(Parcel { bytes: Vec::new(), fds: vec![socket] })
            });
            listeners.metrics = Some(listener);
        }
        let api = Api::start(listeners, ClientLimits::default(), server.clone());
        let api = api.context("starting the API")?;
        server.hand_overs.pauses(api.acceptance());
        Ok(Some(Running { api, _socket: socket }))
    }
}

/// Returns the socket of the running server, if it is the configured one.
fn same_socket(listener: Listener, path: &str) -> anyhow::Result<Listener> {
    if let Some(own) = listener.path().filter(|own| *own != Path::new(path)) {
        let own = own.display();
        bail!("api: the running server listens on {own}, not on {path}: a restart changes that");
    }
    Ok(listener)
}

/// Opens the API's socket, or takes an inherited one.
fn listen(path: &str, mode: u32, group: Option<u32>) -> anyhow::Result<Listener> {
    if let Some(text) = path.strip_prefix("fd:") {
        return Ok(Listener::inherited(inherited::socket(text)?));
    }
    let listener = Listener::bind(path.as_ref())?;
    permit(path.as_ref(), mode, group).with_context(|| match group {
        Some(group) if !is_member(group) => format!("socket {path}: {}", no_member(group)),
        _ => format!("socket {path}: cannot set its group or its mode"),
    })?;
    Ok(listener)
}

/// Group and permissions that the file of a running server's socket does not have yet.
struct Permission {
    /// The file itself (O_PATH): another one may get its name.
    file: OwnedFd,
    mode: u32,
    group: Option<u32>,
}

impl Permission {
    /// Returns what to change of the file of a listener. None: nothing, or the file is another one
    /// now. Returns an error if this process may not change it.
    fn of_file(listener: &Listener, mode: u32, group: Option<u32>) -> anyhow::Result<Option<Self>> {
        let Some(file) = listener.open_file() else { return Ok(None) };
        let now = rustix::fs::fstat(&file).context("api: looking at its socket")?;
        let group = group.filter(|group| *group != now.st_gid);
        if group.is_none() && now.st_mode & 0o777 == mode {
            return Ok(None);
        }
        if let Some(group) = group.filter(|group| !is_member(*group)) {
            bail!("{}", no_member(group));
        }
        let own = rustix::process::geteuid();
        if !own.is_root() && own.as_raw() != now.st_uid {
            bail!(
                "api: user {} owns the socket, so this server cannot change its group and mode: \
                 leave socket-group and socket-mode as they are, or restart the server",
                now.st_uid
            );
        }
        Ok(Some(Permission { file, mode, group }))
    }

    fn apply(&self) -> std::io::Result<()> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        permit(path.as_ref(), self.mode, self.group)
    }
}

/// Sets group and permissions of the socket. Until then the check of each peer protects the API.
fn permit(path: &Path, mode: u32, group: Option<u32>) -> std::io::Result<()> {
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

/// Returns whether this process may give its sockets to a group.
pub fn is_member(group: u32) -> bool {
    let own = rustix::process::getgroups().unwrap_or_default();
    let mut own = own.into_iter().chain([rustix::process::getegid()]);
    rustix::process::geteuid().is_root() || own.any(|own| own.as_raw() == group)
}

/// Returns what to do if [`is_member`] is false.
pub fn no_member(group: u32) -> String {
    format!(
        "socket-group: the server's user is no member of group {group}: add it to the group, or, in \
         a unit of systemd, add SupplementaryGroups={group}"
    )
}

/// Returns the number of a group, which is given by name or number.
pub fn group(text: &str) -> anyhow::Result<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let number = host::group_id(text).with_context(|| format!("finding the group {text}"))?;
    number.with_context(|| format!("socket-group: this host has no group \"{text}\""))
}
