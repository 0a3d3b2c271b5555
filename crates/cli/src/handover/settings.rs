//! What calls of the API have set, added and removed in the old server, for the new one.
//!
//! In: the disks of the old server, and the configuration that this one has read. Out: the disks to
//! take over with their settings, and the disks that stay away. What must hold: the running state
//! goes on. The configuration file has precedence only where it has another value than the old
//! server knew: then an operator has changed it since. Each change is in the log, in an event and
//! in the answer of the upgrade.

use std::collections::BTreeMap;

use blockyard_control::Object;
use blockyard_control::types::KeyChange;
use serde_json::Value;
use toml::Table;

use super::Offered;
use crate::changes::{changes, describe};
use crate::config::Config;
use crate::disks::book::SetKeys;
use crate::disks::check_writes;
use crate::options::disk::DiskArgs;
use crate::options::knobs;
use crate::server::words;

/// A disk to take over.
pub struct Wanted {
    pub args: DiskArgs,
    pub keys: Table,
    /// No configuration file has it.
    pub by_api: bool,
    /// What calls have set.
    pub set: SetKeys,
    /// What differs from the old server.
    pub changed: Vec<KeyChange>,
}

/// The disks of a new server.
#[derive(Default)]
pub struct Split {
    pub wanted: Vec<Wanted>,
    /// The old server does not have them.
    pub others: Vec<(DiskArgs, Table)>,
    /// Disks of the configuration that a call has removed, with their keys.
    pub removed: BTreeMap<String, Table>,
}

/// Compares the disks of the old server with the configuration. `removed`: what calls have removed
/// there, with the keys that the file had.
pub fn split(
    mut offered: Vec<Offered>,
    config: &Config,
    mut removed: BTreeMap<String, Table>,
) -> anyhow::Result<Split> {
    let mut split = Split::default();
    for (at, args) in config.disks.iter().enumerate() {
        let (name, keys) = (args.name(), config.keys(at));
        // A change of the file since then has precedence.
        let gone = removed.remove(&name).filter(|before| *before == keys);
        split.removed.extend(gone.iter().map(|keys| (name.clone(), keys.clone())));
        let place = offered.iter().position(|offered| offered.name == name);
        match place {
            // A call has added another disk with that name.
            Some(place) if gone.is_some() && offered[place].by_api => {}
            Some(place) => {
                split.wanted.push(of_file(args.clone(), keys, &offered.remove(place)));
            }
            None if gone.is_some() => {
                tracing::warn!(
                    disk = name,
                    "a call has removed it, so it is not served: a reload serves it again"
                );
            }
            None => split.others.push((args.clone(), keys)),
        }
    }
    for Offered { name, by_api, keys, set, .. } in offered {
        if !by_api {
            tracing::warn!("disk \"{name}\" is in no configuration file any more: it ends");
            continue;
        }
        let args = keys.clone().try_into();
        let args = args.map_err(|e| anyhow::Error::from(e).context(format!("disk \"{name}\"")))?;
        split.wanted.push(Wanted { args, keys, by_api, set, changed: Vec::new() });
    }
    Ok(split)
}

/// Returns a disk of the configuration file with what calls have set.
fn of_file(args: DiskArgs, keys: Table, offered: &Offered) -> Wanted {
    let goes_on =
        |(key, before): &(&String, &Option<toml::Value>)| keys.get(*key) == before.as_ref();
    let set: SetKeys =
        offered.set.iter().filter(goes_on).map(|(k, v)| (k.clone(), v.clone())).collect();
    let (args, keys, set) = match with(&args, &keys, &set, offered) {
        Ok((with, table)) => (with, table, set),
        Err(e) => {
            tracing::error!(disk = offered.name, "it has the keys of its file only: {e:#}");
            (args, keys, SetKeys::new())
        }
    };
    // The old server has no keys of a disk that it could not open.
    let changed = if offered.is_closed { Vec::new() } else { changes(&offered.keys, &keys) };
    if !changed.is_empty() {
        let what = describe(&changed);
        tracing::warn!(disk = offered.name, "the configuration file has changed it: {what}");
    }
    Wanted { args, keys, by_api: false, set, changed }
}

fn with(
    args: &DiskArgs,
    keys: &Table,
    set: &SetKeys,
    offered: &Offered,
) -> anyhow::Result<(DiskArgs, Table)> {
    let value = |key: &String| match offered.keys.get(key) {
        Some(value) => Ok((key.clone(), serde_json::to_value(value)?)),
        None => Ok((key.clone(), Value::Null)),
    };
    let given = set.keys().map(value).collect::<anyhow::Result<Object>>()?;
    let changed = words::changed(args.clone(), keys.clone(), given);
    let (args, keys) = changed.map_err(|problem| anyhow::anyhow!("{problem}"))?;
    knobs::check(&args.knobs()).map_err(anyhow::Error::msg)?;
    check_writes(&args)?;
    Ok((args, keys))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        let config: Config = toml::from_str(text).unwrap();
        Config { file: text.parse().unwrap(), ..config }
    }

    fn disk(name: &str, more: &str) -> String {
        format!("name = \"{name}\"\nimage = \"/{name}\"\nvhost-user = \"/{name}.s\"\n{more}")
    }

    /// A disk of the old server, and the values of its file.
    fn offered(name: &str, more: &str, set: &[(&str, Option<i64>)]) -> Offered {
        let set = set.iter().map(|(key, value)| (key.to_string(), value.map(Into::into)));
        Offered {
            name: name.into(),
            by_api: false,
            keys: disk(name, more).parse().unwrap(),
            set: set.collect(),
            program: None,
            is_closed: false,
        }
    }

    fn one(file: &str, old: Offered) -> (u32, Option<u64>, SetKeys, String) {
        let config = config(&format!("[[disk]]\n{}", disk("a", file)));
        let mut split = split(vec![old], &config, BTreeMap::new()).unwrap();
        let Wanted { args, set, changed, .. } = split.wanted.remove(0);
        (args.weight, args.iops.map(|limit| limit.rate), set, describe(&changed))
    }

    #[test]
    fn what_a_call_has_set_goes_on_unless_the_file_has_changed() {
        let set = [("weight", Some(200)), ("iops", Some(50)), ("bps", None)];
        let old = || offered("a", "weight = 300\nbps = 9\n", &set);
        // The call has taken the limit `iops` away.
        let (weight, iops, set, changed) = one("weight = 200\niops = 50\n", old());
        assert_eq!((weight, iops, set.len(), &*changed), (300, None, 3, ""));
        let (weight, iops, set, changed) = one("weight = 400\niops = 50\n", old());
        assert_eq!((weight, iops, set.len()), (400, None, 2));
        assert_eq!(changed, "weight: 300 -> 400");
        // The file has other changes, too.
        let (.., changed) = one("weight = 200\niops = 50\nqueues = 2\n", old());
        assert_eq!(changed, "queues: 1 -> 2");
        // An operator has put the value into the file.
        let (weight, _, set, changed) = one("weight = 300\niops = 50\n", old());
        assert_eq!((weight, set.len(), &*changed), (300, 2, ""));
    }

    #[test]
    fn a_disk_that_the_old_server_could_not_open_is_that_of_the_file() {
        let (weight, _, set, changed) = one("weight = 300\n", Offered::closed("a".into()));
        assert_eq!((weight, set.len(), &*changed), (300, 0, ""));
        let split = split(vec![Offered::closed("b".into())], &config(""), BTreeMap::new());
        assert!(split.unwrap().wanted.is_empty(), "no file has it");
    }

    #[test]
    fn a_setting_that_contradicts_the_new_file_is_given_up() {
        let old = offered("a", "iops = 50\n", &[("iops", None)]);
        let (_, iops, set, changed) = one("reserve-iops = 60\n", old);
        assert_eq!((iops, set.len()), (None, 0));
        assert_eq!(changed, "iops: 50 -> not set, reserve-iops: not set -> 60");
    }

    #[test]
    fn a_disk_that_a_call_has_removed_stays_away_unless_its_file_has_changed() {
        let keys = |more: &str| disk("a", more).parse::<Table>().unwrap();
        let removed = || BTreeMap::from([("a".to_string(), keys(""))]);
        let of = |file: &str, offered| {
            let config = config(&format!("[[disk]]\n{}", disk("a", file)));
            split(offered, &config, removed()).unwrap()
        };
        let away = of("", Vec::new());
        assert_eq!((away.wanted.len(), away.others.len(), away.removed), (0, 0, removed()));
        let back = of("weight = 5\n", Vec::new());
        assert_eq!((back.wanted.len(), back.others.len(), back.removed.len()), (0, 1, 0));
        // A call has added another disk with the name.
        let added = Offered { by_api: true, ..offered("a", "weight = 7\n", &[]) };
        let other = of("", vec![added]);
        assert!(other.wanted[0].by_api && other.wanted[0].args.weight == 7);
        assert_eq!(other.removed, removed());
    }
}
