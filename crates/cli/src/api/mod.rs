//! The API of a server: its socket, the address of its metrics, and the commands behind its calls.
//!
//! ```text
//!   operator   what each call does
//!   sampled    figures for metrics
//!   words      settings, figures and errors in the API's words
//! ```

mod operator;
mod sampled;
pub mod words;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use blockyard_control::{Access, Api, Listeners};
use blockyard_export::Listener;
use blockyard_ring::host;
use blockyard_ring::parcel::Parcel;

use crate::handover::Takeover;
use crate::inherited;
use crate::options::api::ApiArgs;
use crate::server::Server;

/// Names of the sockets in a hand-over.
const API: &str = "API";
const METRICS: &str = "metrics";

/// The running API. Dropping it ends the API and removes its socket.
pub struct Running {
    api: Api,
    _socket: Option<Arc<Listener>>,
}

impl Running {
    /// Accepts no more clients, and waits a moment for the end of those that are connected.
    pub fn retire(&self) {
        self.api.retire(RETIRE_TIME);
    }
}

/// How long the API's clients may read the last answer of a server that another one has replaced.
const RETIRE_TIME: Duration = Duration::from_secs(2);

/// Starts the API if the options have a socket, and offers metrics if they have an address.
pub fn start(
    options: &ApiArgs,
    metrics: Option<SocketAddr>,
    server: Arc<Server>,
    mut takeover: Option<&mut Takeover>,
) -> anyhow::Result<Option<Running>> {
    if options.api.is_none() && metrics.is_none() {
        return Ok(None);
    }
    let (mut listeners, mut socket) = (Listeners::default(), None);
    let mut handed = |name| takeover.as_mut().and_then(|takeover| takeover.socket(name));
    if let Some(path) = &options.api {
        let group = options.socket_group.as_deref().map(group).transpose()?;
        let listener = match handed(API) {
            Some(parcel) => Listener::from_parcel(parcel)?,
            None => listen(path, options.mode(), group)?,
        };
        let listener = Arc::new(listener);
        let offered = listener.clone();
        server.hand_overs.offer(API, move || offered.to_parcel());
        let access = Access { user: rustix::process::geteuid().as_raw(), group };
        let unix = listener.unix();
        let unix = unix.with_context(|| format!("socket {path}: cannot serve the API on it"))?;
        listeners.api = Some((unix, access));
        socket = Some(listener);
        tracing::info!("the API listens on {path}");
    }
    if let Some(address) = metrics {
        let listener = match handed(METRICS).and_then(|parcel| parcel.fds.into_iter().next()) {
            Some(socket) => TcpListener::from(socket),
            None => TcpListener::bind(address).with_context(|| {
                format!("metrics {address}: cannot listen there; choose another port")
            })?,
        };
        let offered = listener.try_clone()?;
        server.hand_overs.offer(METRICS, move || {
            let socket = offered.as_fd().try_clone_to_owned()?;
            Ok(Parcel { bytes: Vec::new(), fds: vec![socket] })
        });
        tracing::info!("metrics are at http://{}/metrics", listener.local_addr()?);
        listeners.metrics = Some(listener);
    }
    let api = Api::start(listeners, server).context("starting the API")?;
    Ok(Some(Running { api, _socket: socket }))
}

/// Opens the API's socket, or takes an inherited one.
fn listen(path: &str, mode: u32, group: Option<u32>) -> anyhow::Result<Listener> {
    if let Some(text) = path.strip_prefix("fd:") {
        return Ok(Listener::inherited(inherited::socket(text)?));
    }
    let listener = Listener::bind(path.as_ref())?;
    permit(path.as_ref(), mode, group)
        .with_context(|| format!("socket {path}: cannot set its group or its mode"))?;
    Ok(listener)
}

/// Sets group and permissions of the socket. Until then the check of each peer protects the API.
fn permit(path: &Path, mode: u32, group: Option<u32>) -> std::io::Result<()> {
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

/// Returns the number of a group, which is given by name or number.
fn group(text: &str) -> anyhow::Result<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let number = host::group_id(text).with_context(|| format!("finding the group {text}"))?;
    number.with_context(|| format!("socket-group: this host has no group \"{text}\""))
}
