//! One disk: checks its options, makes its settings for the yard, and logs its end.
//!
//! `book` has the configuration of each disk of a server. `identities` and `early` look at images.
//! `figures` logs statistics.

pub mod book;
pub mod early;
pub mod figures;
pub mod identities;

use std::sync::Arc;

use anyhow::Context;
use blockyard_disk::{OnEnospc, Source, SourceError};
use blockyard_export::xen::XenData;
use blockyard_image::journal::{CrashSafety, SafetyMode};
use blockyard_image::{CacheMode, ChainError, ChainOptions, Format, OpenError};
use blockyard_storage::OpenOptions;
use blockyard_yard::{Activation, DiskSettings, Ended, Way};

use crate::exports;
use crate::options::disk::DiskArgs;
use crate::options::knobs;

/// Maximum length of a disk's name in bytes: that of a file's name.
const MAX_NAME: usize = 255;

/// Returns an error if options of a disk contradict each other.
pub fn check(disk: &DiskArgs) -> anyhow::Result<()> {
    if disk.image.as_os_str().is_empty() {
        anyhow::bail!("the path of an image is empty");
    }
    if disk.image.to_string_lossy().contains(char::is_control) {
        let image = &disk.image;
        anyhow::bail!("image {image:?}: the path of an image has no control characters");
    }
    check_name(&disk.name())?;
    let image = disk.image.display();
    if !exports::is_exported(disk) {
        anyhow::bail!("image {image}: it has no export: add {}", exports::options());
    }
    exports::check(disk).map_err(|what| anyhow::anyhow!("disk \"{}\": {what}", disk.name()))?;
    let format = disk.format().map_err(anyhow::Error::msg)?;
    if format == Format::Raw {
        let of_chains = [
            ("--l2-cache", disk.l2_cache.is_some()),
            ("--prime", disk.prime),
            ("--copy-on-read", disk.copy_on_read),
        ];
        if let Some((option, _)) = of_chains.iter().find(|(_, given)| *given) {
            anyhow::bail!(
                "image {image}: {option} is for qcow2 and cow images, and this one is raw"
            );
        }
    }
    check_writes(disk)?;
    check_exports(disk)?;
    if disk.copy_on_read && disk.read_only {
        anyhow::bail!("image {image}: --copy-on-read writes to the image; leave out --read-only");
    }
    if disk.activation == Activation::Rings {
        check_activation(disk)?;
    }
    knobs::check(&disk.knobs()).map_err(|e| anyhow::anyhow!("disk \"{}\": {e}", disk.name()))?;
    let serial = disk.serial.as_deref().unwrap_or_default();
    if serial.contains(char::is_control) {
        let name = disk.name();
        anyhow::bail!("disk \"{name}\": serial {serial:?}: a serial has no control characters");
    }
    if serial.len() > 20 {
        let (name, bytes) = (disk.name(), serial.len());
        anyhow::bail!(
            "disk \"{name}\": serial \"{serial}\" has {bytes} bytes; at most 20 are allowed"
        );
    }
    Ok(())
}

/// Returns an error if an option is about writes, and the disk is read-only.
pub fn check_writes(disk: &DiskArgs) -> anyhow::Result<()> {
    let of_writes = [
        ("--on-enospc", disk.on_enospc != OnEnospc::default()),
        ("--abandon-overlay", disk.abandon_overlay),
    ];
    if let Some((option, _)) = of_writes.iter().find(|(_, given)| *given && disk.read_only) {
        let name = disk.name();
        anyhow::bail!(
            "disk \"{name}\": {option} is about writes; leave it out, or leave out --read-only"
        );
    }
    Ok(())
}

/// Returns an error if an option belongs to an export that the disk does not have.
fn check_exports(disk: &DiskArgs) -> anyhow::Result<()> {
    let of_exports = [
        ("--nbd-name", "--nbd", disk.nbd_name.is_some() && disk.nbd.is_none()),
        ("--nbd-block-size", "--nbd", disk.nbd_block_size.is_some() && disk.nbd.is_none()),
        ("--description", "--nbd", disk.description.is_some() && disk.nbd.is_none()),
        ("--xen-data", "--xen", disk.xen_data != XenData::default() && disk.xen.is_none()),
    ];
    if let Some((option, export, _)) = of_exports.iter().find(|(_, _, is_alone)| *is_alone) {
        let name = disk.name();
        anyhow::bail!("disk \"{name}\": {option} is for {export}, which is missing: leave it out");
    }
    Ok(())
}

/// Returns an error if a name cannot be in a path of the API, or not in one line of a message.
fn check_name(name: &str) -> anyhow::Result<()> {
    let is_path = matches!(name, "" | "." | "..");
    if is_path || name.len() > MAX_NAME || name.contains(char::is_control) {
        anyhow::bail!(
            "name {name:?}: a name has 1 to {MAX_NAME} bytes and no control characters, and is \
             not \".\" or \"..\": give the disk another name"
        );
    }
    Ok(())
}

/// Returns an error if a disk cannot be without an open image while no ring runs.
fn check_activation(disk: &DiskArgs) -> anyhow::Result<()> {
    let image = disk.image.display();
    if !exports::have_rings(disk) {
        anyhow::bail!(
            "image {image}: --activation rings is for disks whose only export is --vhost-user"
        );
    }
    if disk.read_only {
        anyhow::bail!(
            "image {image}: --activation rings is for disks that guests write to; leave out \
             --read-only or --activation"
        );
    }
    if Source::scheme_of(&disk.image).is_some_and(|(scheme, _)| !scheme.may_move()) {
        anyhow::bail!(
            "image {image}: --activation rings needs an image that another server can open"
        );
    }
    Ok(())
}

/// Opens the image and closes it again, to find errors. Takes no lock and writes nothing, because
/// another server may have the image open. Looks whether it could be opened for writing. Does
/// nothing for images of other programs and hosts (NBD, `exec:`).
pub fn try_open(disk: &DiskArgs) -> anyhow::Result<()> {
    if Source::scheme_of(&disk.image).is_some_and(|(scheme, _)| scheme.is_elsewhere()) {
        return Ok(());
    }
    let (read_only, force_share, cache) = (true, true, CacheMode::Writeback);
    let options = ChainOptions {
        read_only,
        force_share,
        cache,
        prime: false,
        copy_on_read: false,
        // A journal needs the state folder, which the server makes as its own user.
        ..disk.chain_with(CrashSafety { mode: SafetyMode::Unread, store: None })
    };
    let opened = Source::open(&options).map(drop).and_then(|()| {
        let is_file = Source::scheme_of(&disk.image).is_none();
        if disk.read_only || !is_file {
            return Ok(());
        }
        let overlaid = options.overlaid.clone();
        let file = OpenOptions { overlaid, ..OpenOptions::new(&disk.image, read_only, cache) };
        Ok(file.check_writable()?)
    });
    opened.map_err(|e| advise(e, disk)).with_context(|| format!("disk \"{}\"", disk.name()))
}

/// Adds advice to the error of an image that cannot be opened, if an option of `serve` helps.
pub fn advise(error: SourceError, args: &DiskArgs) -> anyhow::Error {
    let open = match &error {
        SourceError::Open(e) | SourceError::Chain(ChainError::Open(e)) => Some(e),
        _ => None,
    };
    let advice = match open {
        Some(OpenError::Open { .. }) if args.image.starts_with("/dev/null") => {
            "use null:SIZE for a disk that discards writes"
        }
        Some(e) if e.may_be_read() && !args.read_only => {
            "use --read-only to serve it without writes"
        }
        _ => return error.into(),
    };
    anyhow::anyhow!("{:#}; {advice}", anyhow::Error::from(error))
}

/// Returns the settings of a disk for the yard.
pub fn settings(args: &DiskArgs, ways: Vec<Arc<dyn Way>>) -> DiskSettings {
    let name = args.name();
    DiskSettings {
        serial: args.serial.clone().unwrap_or_else(|| name.clone()),
        name,
        image: args.chain(),
        activation: args.activation,
        filters: args.filters.clone(),
        on_enospc: args.on_enospc,
        device: args.device.clone(),
        group: args.group.clone(),
        knobs: args.knobs(),
        carried: None,
        ways,
    }
}

/// Logs the final statistics of a disk, and an error if its image could not be flushed.
pub fn log_end(ended: &Ended) {
    figures::log(&ended.name, &ended.statistics, &ended.share);
    figures::log_policies(&ended.name, &ended.policies);
    if !ended.is_flushed {
        tracing::error!(disk = ended.name, "the image could not be flushed: writes may be lost");
    }
}
