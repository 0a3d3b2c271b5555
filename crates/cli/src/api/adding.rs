//! Adds disks, for `add` and `fork`.
//!
//! In: the keys of a disk. Out: the disk, served, and with `persist` in the configuration too. What
//! must hold: nothing changes before all that can be checked is checked.

use std::sync::PoisonError;

use blockyard_control::types::Disk;
use blockyard_control::{Answer, Kind, Object, Operator, Problem, invalid};
use toml::Table;

use super::keeping::{NOT_WRITTEN, conflict, not_kept};
use super::persist::Persistence;
use crate::changes::inner;
use crate::disks::book::HeldDisk;
use crate::disks::check;
use crate::nbd;
use crate::options::disk::DiskArgs;
use crate::server::error::AddError;
use crate::server::{Adding, Server, words};

/// A new disk that was checked.
pub struct NewDisk {
    pub args: DiskArgs,
    /// Its keys, as a table of the configuration file.
    pub table: Table,
    /// Where the call keeps it.
    store: Option<Persistence>,
}

impl Server {
    pub(super) fn add_disk(&self, keys: Object, persist: bool) -> Answer<Disk> {
        let no_upgrade = self.exclude_upgrades()?;
        let (args, table) = words::disk(keys)?;
        let new = self.check_new(args, table, persist)?;
        let adding = self.begin_add(new.args.clone(), new.table.clone(), true);
        // An upgrade leaves a disk on hung storage to the new server. The call itself must end
        // before an upgrade only if it changes the configuration.
        let _no_upgrade = Some(no_upgrade).filter(|_| persist);
        let held = adding.and_then(Adding::wait_held).map_err(|e| not_added(e, persist))?;
        self.keep_new(held, new)
    }

    /// Returns an error if a disk with these options cannot be added.
    pub(super) fn check_new(&self, args: DiskArgs, table: Table, persist: bool) -> Answer<NewDisk> {
        check(&args).map_err(|e| Problem::new(Kind::Invalid, format!("{e:#}")))?;
        self.check_group(&args)?;
        self.check_clients(&args)?;
        let name = args.name();
        let store = self.persistence(&name, persist)?;
        if self.row(&name).is_ok() {
            let what = format!("a disk is called \"{name}\" already: choose another name");
            return Err(Problem::new(Kind::Conflict, what).in_field("name"));
        }
        if let Some(store) = &store {
            store.check(&name, &table).map_err(|e| conflict(&e))?;
        }
        Ok(NewDisk { args, table, store })
    }

    /// Lets other commands have a new disk that is served. Writes it into the configuration, if the
    /// caller asks for that.
    pub(super) fn keep_new(&self, held: HeldDisk<'_>, new: NewDisk) -> Answer<Disk> {
        let NewDisk { args, table, store } = new;
        let name = args.name();
        // While the disk is held, no other call changes its file.
        let kept = store.map_or(Ok(()), |store| {
            store.keep(&name, &table)?;
            self.book.adopt(&[args]);
            Ok(())
        });
        held.keep();
        not_kept(&name, "is served", kept)?;
        self.disk(&name)
    }

    /// Returns an error if the disk restricts its NBD clients without effect.
    pub(super) fn check_clients(&self, args: &DiskArgs) -> Answer<()> {
        let tls = self.common.nbd.lock().unwrap_or_else(PoisonError::into_inner).tls();
        nbd::check(tls, args).map_err(|e| invalid("tls-allow", &format!("{e:#}")))
    }

    /// Returns an error if the group of a new disk does not exist.
    fn check_group(&self, args: &DiskArgs) -> Answer<()> {
        let Some(group) = &args.group else { return Ok(()) };
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if inner(&known.file, "group").contains_key(group) {
            return Ok(());
        }
        let what = format!("group: the configuration file has no table [group.{group}]");
        Err(Problem::new(Kind::Invalid, what).in_field("group"))
    }
}

/// Returns the problem of a disk that was not added. `persist`: the caller asks for a change of the
/// configuration.
pub fn not_added(error: AddError, persist: bool) -> Problem {
    match error {
        AddError::Conflict(what) => Problem::new(Kind::Conflict, what),
        AddError::Unseen(e) => Problem::new(Kind::Busy, e.to_string()),
        AddError::Open(e) => Problem::new(Kind::Failed, format!("{e:#}")),
        AddError::Yard(e) => words::problem(e),
        e @ AddError::GoesOn { .. } if persist => {
            Problem::new(Kind::Busy, format!("{e}; {NOT_WRITTEN}"))
        }
        e @ (AddError::GoesOn { .. }
        | AddError::Waits { .. }
        | AddError::WaitsForFiles { .. }
        | AddError::Full { .. }
        | AddError::Stopped { .. }) => Problem::new(Kind::Busy, e.to_string()),
    }
}
