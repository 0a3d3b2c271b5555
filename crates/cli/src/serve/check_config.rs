//! `serve --check-config`: what a configuration needs of the host.
//!
//! In: a configuration without a mistake of its own. Out: the first thing that the host does not
//! have. Opens each image and closes it again. Takes no lock, opens no socket and makes no folder:
//! another server, of another user, may have them.

use std::path::Path;

use anyhow::Context;
use blockyard_export::Listener;
use blockyard_program::ending::Failure;
use blockyard_program::output;

use crate::config::{Config, Place};
use crate::disks::try_open;
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::process::looks;
use crate::server::sandbox;
use crate::{api, exports};

pub fn run(options: &ServeOptions, config: &Config) -> Result<(), Failure> {
    check(options, config).map_err(Failure::usage)?;
    let count = config.disks.len();
    let disks = if count == 1 { "disk" } else { "disks" };
    output::print(format_args!("configuration is valid: {count} {disks}\n"))?;
    Ok(())
}

/// Folders that are empty after a boot. A service makes its own folder there when it starts.
const RUNTIME: [&str; 2] = ["/run", "/var/run"];

/// Returns the first thing of the configuration that the host lacks.
fn check(options: &ServeOptions, config: &Config) -> anyhow::Result<()> {
    sandbox::reserve(options.config.as_deref(), &config.disks);
    sandbox::check_host(&config.sandbox(&options.sandbox), config)?;
    if let Some(unknown) = config.unknown.first() {
        anyhow::bail!("{unknown}");
    }
    let api = config.api(&options.api);
    if let Some(path) = &api.api {
        let group = api.socket_group.as_deref().map(api::group).transpose()?;
        // The unit of a service may give it the group.
        if let Some(group) =
            group.filter(|group| !path.starts_with("fd:") && !api::is_member(*group))
        {
            tracing::warn!("{}", api::no_member(group));
        }
        let place = || match (&options.api.api, &options.config) {
            (None, Some(file)) => format!("{}: api", Place::of_main(file, "api")),
            _ => "--api".into(),
        };
        check_socket(path).with_context(place)?;
    }
    if let Some(path) = &options.control {
        check_path(path).context("--control")?;
    }
    let reactors = options.reactors.or(config.reactors).unwrap_or(1);
    for (at, disk) in config.disks.iter().enumerate() {
        let located = |key| move |error| config.locate(at, Some(key), error);
        check_reactors(disk, reactors).map_err(located("on-reactors"))?;
        for (key, path) in exports::sockets_by_key(disk) {
            let named = || format!("disk \"{}\": {key}", disk.name());
            check_path(&path).with_context(named).map_err(located(key))?;
        }
        let args = disk.clone();
        let opened = looks::look(&disk.image, looks::LIMIT, move || try_open(&args));
        let opened = opened.with_context(|| format!("disk \"{}\": image", disk.name()));
        opened.flatten().map_err(located("image"))?;
    }
    Ok(())
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

/// Returns an error if no server can listen at a path. Another server may listen there now.
fn check_path(path: &Path) -> anyhow::Result<()> {
    Listener::check(path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let Some(folder) = folder.filter(|folder| !folder.exists()) else { return Ok(()) };
    let (socket, missing) = (path.display(), folder.display());
    if RUNTIME.iter().any(|runtime| folder.starts_with(runtime)) {
        tracing::warn!(
            "socket {socket}: its folder {missing} does not exist: the service must make it at its \
             start (RuntimeDirectory= of systemd)"
        );
        return Ok(());
    }
    anyhow::bail!("socket {socket}: its folder {missing} does not exist: create it first")
}

/// Returns an error if no server can listen on a socket of the server itself.
fn check_socket(socket: &str) -> anyhow::Result<()> {
    match socket.strip_prefix("fd:") {
        // Only the server's own process inherits the socket.
        Some(_) => Ok(()),
        None => check_path(socket.as_ref()),
    }
}
