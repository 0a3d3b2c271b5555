//! Compares the configuration file with a disk that a reload holds.
//!
//! In: the entries that the reload read before it read the file, the file, and the disk as it is
//! now. Out: what changes. What must hold: a reload does not put an older configuration into a
//! disk that a snapshot or a call has changed meanwhile, also in the file.

use blockyard_control::types::DiskChange;
use toml::Table;

use crate::changes::changes;
use crate::config::Config;
use crate::disks::book::Entry;
use crate::options::disk::DiskArgs;

/// Returns a disk and its keys as the file has them.
pub fn of_file<'a>(config: &'a Config, disk: &str) -> Option<(&'a DiskArgs, Table)> {
    let at = config.disks.iter().position(|args| args.name() == disk)?;
    Some((&config.disks[at], config.keys(at)))
}

/// Returns whether a job has held a disk since the reload read `before`. It may have changed the
/// disk's file after the reload read that.
fn had_job(held: &Entry, before: &[Entry]) -> bool {
    let disk = held.args.name();
    before.iter().any(|entry| entry.args.name() == disk && entry.jobs != held.jobs)
}

/// Returns whether a call has changed a disk and its file since the reload read `before`.
pub fn was_kept(held: &Entry, before: &[Entry]) -> bool {
    let disk = held.args.name();
    before.iter().any(|entry| entry.args.name() == disk && entry.kept != held.kept)
}

/// Returns whether the disk's file may have changed since the reload read it.
pub fn may_be_stale(held: &Entry, before: &[Entry]) -> bool {
    had_job(held, before) || was_kept(held, before)
}

pub fn stale(disk: &str) -> String {
    format!("disk \"{disk}\" has changed while the files were read: reload again")
}

/// Compares the file with a disk that this reload holds. The disk may have changed since the plan
/// was made: a snapshot puts its overlay into the book and into the file. Returns an error if the
/// file that was read may be older than the disk.
pub fn compare(
    held: &Entry,
    before: &[Entry],
    config: &Config,
    change: &mut DiskChange,
) -> anyhow::Result<()> {
    let Some((args, table)) = of_file(config, &change.disk) else { return Ok(()) };
    let is_older = had_job(held, before) && held.args.image != args.image;
    if is_older || (was_kept(held, before) && held.args != *args) {
        anyhow::bail!("{}", stale(&change.disk));
    }
    change.keys = changes(&held.keys, &table);
    change.disconnects = !is_same(&held.args, args);
    Ok(())
}

/// Returns whether `args` differs from the served disk only in keys that change without closing it:
/// weight, limits, reservations, `tls-allow` and `on-enospc`.
pub fn is_same(served: &DiskArgs, args: &DiskArgs) -> bool {
    let (tls_allow, on_enospc) = (served.tls_allow.clone(), served.on_enospc);
    let same = DiskArgs { tls_allow, on_enospc, ..args.clone() };
    same.with(&served.knobs()) == *served
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::book::Book;

    fn config(image: &str, more: &str) -> Config {
        let text = format!("[[disk]]\nname = \"a\"\nimage = \"{image}\"\nublk = true\n{more}");
        let config: Config = toml::from_str(&text).unwrap();
        Config { file: text.parse().unwrap(), ..config }
    }

    /// The plan of a reload may be older than the end of a snapshot that is kept.
    #[test]
    fn a_reload_compares_the_file_with_the_disk_that_it_holds() {
        let (old, new) = (config("/old", ""), config("/top.qcow2", "format = \"qcow2\"\n"));
        let book = Book::default();
        let args = |config: &Config| (config.disks[0].clone(), config.keys(0));
        let (args_of_old, keys) = args(&old);
        book.reserve(args_of_old, keys, false, None).unwrap().keep();
        let lent = book.hold("a").unwrap().lend();
        // The reload begins while the snapshot runs.
        let before = book.all();
        let planned = || DiskChange { disk: "a".into(), keys: Vec::new(), disconnects: true };
        let held = book.lent(lent);
        let (args_of_new, keys) = args(&new);
        held.set_image(args_of_new, keys);
        let mut change = planned();
        let error = compare(&held.entry(), &before, &old, &mut change).unwrap_err();
        assert!(error.to_string().contains("reload again"), "{error}");
        // This reload read the file after the snapshot had changed it.
        compare(&held.entry(), &before, &new, &mut change).unwrap();
        assert!(!change.disconnects && change.keys.is_empty(), "{change:?}");
        let heavier = config("/top.qcow2", "format = \"qcow2\"\nweight = 300\n");
        compare(&held.entry(), &before, &heavier, &mut change).unwrap();
        assert_eq!((change.disconnects, &*change.keys[0].key), (false, "weight"));
        // Another image of a later file is one that the operator means.
        let before = book.all();
        compare(&held.entry(), &before, &old, &mut change).unwrap();
        assert!(change.disconnects);
    }

    /// A call with `persist` runs while the reload reads the files.
    #[test]
    fn a_reload_does_not_take_back_what_a_call_has_kept() {
        let (old, new) = (config("/a", ""), config("/a", "weight = 300\n"));
        let book = Book::default();
        let args = |config: &Config| (config.disks[0].clone(), config.keys(0));
        let (args_of_old, keys) = args(&old);
        book.reserve(args_of_old, keys, false, None).unwrap().keep();
        let held = book.hold("a").unwrap();
        let (args_of_new, keys) = args(&new);
        held.set(args_of_new, keys);
        // The call has changed the disk, and the reload reads the file before the call writes it.
        let before = book.all();
        held.note_kept();
        let planned = || DiskChange { disk: "a".into(), keys: Vec::new(), disconnects: false };
        let error = compare(&held.entry(), &before, &old, &mut planned()).unwrap_err();
        assert!(error.to_string().contains("reload again"), "{error}");
        assert!(may_be_stale(&held.entry(), &before));
        compare(&held.entry(), &before, &new, &mut planned()).unwrap();
        // A later reload finds an older value that the operator means.
        compare(&held.entry(), &book.all(), &old, &mut planned()).unwrap();
    }
}
