//! `serve --check-config`: what a configuration needs of the host.
//!
//! In: a configuration without a mistake of its own. Out: the first thing that the host does not
//! have. Opens each image and closes it again. Takes no lock, opens no socket and makes no folder:
//! another server, of another user, may have them.

use anyhow::Context;
use blockyard_export::Listener;
use blockyard_program::ending::Failure;
use blockyard_program::output;

use crate::config::Config;
use crate::disks::try_open;
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::{api, exports, looks, sandbox};

pub fn run(options: &ServeOptions, config: &Config) -> Result<(), Failure> {
    check(options, config).map_err(Failure::usage)?;
    let count = config.disks.len();
    let disks = if count == 1 { "disk" } else { "disks" };
    output::print(format_args!("configuration is valid: {count} {disks}\n"))?;
    Ok(())
}

/// Returns the first thing of the configuration that the host lacks. A socket's folder may be made
/// later, when the service starts.
fn check(options: &ServeOptions, config: &Config) -> anyhow::Result<()> {
    sandbox::reserve(options.config.as_deref(), &config.disks);
    sandbox::check_host(&config.sandbox(&options.sandbox), config)?;
    let api = config.api(&options.api);
    if let Some(path) = &api.api {
        api.socket_group.as_deref().map(api::group).transpose()?;
        check_socket(path)?;
    }
    if let Some(path) = &options.control {
        Listener::check(path)?;
    }
    let reactors = options.reactors.or(config.reactors).unwrap_or(1);
    config.check_each(|disk| {
        check_reactors(disk, reactors)?;
        check_sockets(disk)?;
        let args = disk.clone();
        let opened = looks::look(&disk.image, looks::LIMIT, move || try_open(&args));
        opened.with_context(|| format!("disk \"{}\": image", disk.name())).flatten()
    })
}

fn check_reactors(disk: &DiskArgs, count: u16) -> anyhow::Result<()> {
    let list = disk.on_reactors.as_ref().map_or(&[][..], |list| &list.0);
    match list.iter().find(|number| **number >= count.into()) {
        Some(number) => anyhow::bail!(
            "disk \"{}\": on-reactors: there is no reactor {number}: the server has {count}, from \
             0 on",
            disk.name()
        ),
        None => Ok(()),
    }
}

fn check_sockets(disk: &DiskArgs) -> anyhow::Result<()> {
    let named =
        |result: anyhow::Result<()>| result.with_context(|| format!("disk \"{}\"", disk.name()));
    exports::sockets(disk).iter().try_for_each(|path| named(Ok(Listener::check(path)?)))
}

/// Returns an error if no server can listen on a socket, whatever its folder is.
fn check_socket(socket: &str) -> anyhow::Result<()> {
    match socket.strip_prefix("fd:") {
        // Only the server's own process inherits the socket.
        Some(_) => Ok(()),
        None => Ok(Listener::check(socket.as_ref())?),
    }
}
