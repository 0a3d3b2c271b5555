//! The API of a server: its socket, and the commands behind its calls.
//!
//! ```text
//!   operator   what each call does
//!   words      settings, figures and errors in the API's words
//! ```

mod operator;
mod words;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use blockyard_control::{Access, Api};
use blockyard_export::Listener;
use blockyard_ring::host;

use crate::inherited;
use crate::options::api::ApiArgs;
use crate::serve::Server;

/// The running API. Dropping it ends the API and removes its socket.
pub struct Running {
    _api: Api,
    _listener: Listener,
}

/// Starts the API if the options have a socket.
pub fn start(options: &ApiArgs, server: Arc<Server>) -> anyhow::Result<Option<Running>> {
    let Some(socket) = &options.api else { return Ok(None) };
    let group = options.socket_group.as_deref().map(group).transpose()?;
    let listener = match socket.strip_prefix("fd:") {
        Some(text) => Listener::inherited(inherited::socket(text)?),
        None => {
            let listener = Listener::bind(socket.as_ref())?;
            permit(socket.as_ref(), options.mode(), group)
                .with_context(|| format!("socket {socket}: cannot set its group or its mode"))?;
            listener
        }
    };
    let access = Access { user: rustix::process::geteuid().as_raw(), group };
    let of_socket = || format!("socket {socket}: cannot serve the API on it");
    let api = Api::start(listener.unix().with_context(of_socket)?, access, server);
    let api = api.with_context(of_socket)?;
    tracing::info!("the API listens on {socket}");
    Ok(Some(Running { _api: api, _listener: listener }))
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
