//! What calls with `persist` write into the configuration.

use blockyard_control::{Answer, Kind, Object, Problem};
use blockyard_yard::DiskInfo;
use toml::Table;

use super::persist::Persistence;
use crate::options::disk::DiskArgs;
use crate::options::knobs;
use crate::server::{reopening, words};

/// Of a call with `persist` that fails, or has not ended.
pub const NOT_WRITTEN: &str = "nothing is written into the configuration";

pub fn conflict(error: &anyhow::Error) -> Problem {
    Problem::new(Kind::Conflict, format!("{error:#}"))
}

/// Returns the keys of a disk to keep: those of the configuration files with the changes of a call.
/// Values that earlier calls have set without keeping them are not among them. `present`: all
/// present keys, for a disk that no file has.
pub fn kept(store: &Persistence, name: &str, present: &Table, changes: Object) -> Answer<Table> {
    let failed = |e| Problem::new(Kind::Conflict, format!("persist: {e:#}"));
    let Some(keys) = store.keys(name).map_err(failed)? else {
        store.check(name, present).map_err(|e| conflict(&e))?;
        return Ok(present.clone());
    };
    let keys = words::with(keys, changes)?;
    let args: Result<DiskArgs, _> = keys.clone().try_into();
    let checked = args
        .map_err(anyhow::Error::from)
        .and_then(|args| knobs::check(&args.knobs()).map_err(|e| anyhow::anyhow!("{e}")));
    checked.map_err(|e| {
        failed(e.context(format!("disk \"{name}\", with the values of the configuration file")))
    })?;
    store.check(name, &keys).map_err(|e| conflict(&e))?;
    Ok(keys)
}

/// Returns an error if the next start would open another image than the disk has: without the
/// overlay that a snapshot has put on it, or after a file with that overlay was removed.
pub fn check_top(served: &DiskInfo, kept: &Table) -> Answer<()> {
    let image = kept.get("image").and_then(toml::Value::as_str).unwrap_or_default();
    let Some(top) = &served.top else { return Ok(()) };
    if reopening::is_top(served, image.as_ref()) {
        return Ok(());
    }
    let (name, top) = (&served.name, top.display());
    let what = if reopening::has_overlay(served) {
        format!(
            "persist: a snapshot has put overlay {top} on disk \"{name}\": name the overlay as the \
             disk's image in a file of the configuration first (format qcow2)"
        )
    } else {
        format!(
            "persist: the files have image {image} for disk \"{name}\", and the disk has {top}: name \
             that image in a file of the configuration, or reload it first"
        )
    };
    Err(Problem::new(Kind::Conflict, what))
}

/// Returns the error of a change that took effect, but that a restart would lose.
pub fn not_kept(name: &str, done: &str, kept: anyhow::Result<()>) -> Answer<()> {
    let what = |e| format!("disk \"{name}\" {done}, but a restart would not know that: {e:#}");
    kept.map_err(|e| Problem::new(Kind::Failed, what(e)))
}
