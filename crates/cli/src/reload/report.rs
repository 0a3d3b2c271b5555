//! What a reload says: its log lines, its answer and its event.

use std::collections::{BTreeSet, HashSet};

use blockyard_control::events::What;
use blockyard_control::types::{FailedDisk, GroupChange, Ignored, Reload};
use blockyard_yard::{Resized, YardError};
use toml::{Table, Value};

use crate::changes::{change, changes, describe, inner};
use crate::disks::book::Entry;
use crate::server::error::AddError;

/// Returns the event of a reload.
pub fn summary(done: &anyhow::Result<Reload>) -> What {
    let error = done.as_ref().err().map(|e| format!("{e:#}"));
    let count = |of: fn(&Reload) -> usize| done.as_ref().map_or(0, of) as u64;
    What::Reloaded {
        added: count(|done| done.added.len()),
        changed: count(|done| done.changed.len()),
        removed: count(|done| done.removed.len()),
        failed: count(|done| done.failed.len()),
        groups: count(|done| done.groups.len()),
        error,
    }
}

/// Logs the size of a disk after a resize of its image.
pub fn log_size(disk: &str, size: Result<Option<Resized>, YardError>) {
    match size {
        Ok(Some(size)) => {
            tracing::info!(disk, bytes = size.new, old = size.old, "the image has a new size")
        }
        Ok(None) => {}
        Err(e) => tracing::error!(disk, "{:#}", anyhow::Error::from(e)),
    }
}

/// Returns the groups of both files with the keys that differ. A group that one file lacks differs
/// in all its keys.
pub fn group_changes(old: &Table, new: &Table) -> Vec<GroupChange> {
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let change = |name: &String| {
        let keys = changes(&inner(old, name), &inner(new, name));
        (!keys.is_empty()).then(|| GroupChange { group: name.clone(), keys })
    };
    names.into_iter().filter_map(change).collect()
}

/// Returns the disks of the API that stay in a group which the file does not have any more.
/// `names`: the disks of the file.
pub fn lost_groups(file: &Table, served: &[Entry], names: &HashSet<String>) -> Vec<Ignored> {
    let groups = inner(file, "group");
    let stays = |entry: &&Entry| entry.by_api && !names.contains(&entry.args.name());
    let ignored = served.iter().filter(stays).filter_map(|entry| {
        let (disk, group) = (entry.args.name(), entry.args.group.as_ref()?);
        if groups.contains_key(group) {
            return None;
        }
        let change = change("group", Some(&Value::from(group.clone())), None)?;
        let reason = format!(
            "a call added disk \"{disk}\", so it stays in the group with the last values of \
             [group.{group}]: remove the disk, or put the table back"
        );
        Some(Ignored { change, reason })
    });
    ignored.collect()
}

/// Logs changes that are not those of disks.
pub fn log_others(plan: &Reload) {
    for Ignored { change, reason } in &plan.ignored {
        let change = describe(std::slice::from_ref(change));
        tracing::warn!("not applied: {change}: {reason}");
    }
    if !plan.nbd.is_empty() {
        tracing::info!("changed for NBD: {}", describe(&plan.nbd));
    }
    for GroupChange { group, keys } in &plan.groups {
        tracing::info!(group, "changed: {}", describe(keys));
    }
}

/// Logs that a change of a disk failed.
pub fn note(disk: &str, error: &anyhow::Error) -> FailedDisk {
    tracing::error!(disk, "{error:#}");
    FailedDisk { disk: disk.into(), error: format!("{error:#}") }
}

/// Logs that a disk cannot be added.
pub fn note_new(disk: &str, error: AddError) -> FailedDisk {
    let error = format!("{:#}", anyhow::Error::from(error));
    tracing::error!(disk, "the disk cannot be served as configured: {error}");
    FailedDisk { disk: disk.into(), error }
}

/// Returns the plan without what failed.
pub fn without(plan: Reload, failed: Vec<FailedDisk>) -> Reload {
    let names: HashSet<_> = failed.iter().map(|failed| &failed.disk).collect();
    let added = plan.added.into_iter().filter(|disk| !names.contains(disk)).collect();
    let removed = plan.removed.into_iter().filter(|disk| !names.contains(disk)).collect();
    let changed = plan.changed.into_iter().filter(|c| !names.contains(&c.disk)).collect();
    Reload { added, removed, changed, failed, ..plan }
}
