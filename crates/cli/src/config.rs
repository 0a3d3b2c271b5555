//! The configuration file: TOML with one `[[disk]]` table for each disk and one `[group.NAME]`
//! table for each group. See docs/configuration.md.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use blockyard_ring::small_file::{self, SmallFileError};
use blockyard_sched::Knobs;
use serde::Deserialize;

pub mod files;
pub mod mistake;

use self::files::{Instead, Missing};
use crate::claims::{Claims, ImageId};
use crate::disks::early;
use crate::disks::identities::Images;
use crate::exports;
use crate::nbd;
use crate::options::api::{self, ApiArgs};
use crate::options::disk::DiskArgs;
use crate::options::knobs::{self, GroupArgs};
use crate::options::nbd::NbdArgs;
use crate::options::sandbox::{self, SandboxArgs};
use crate::options::serve::ServeOptions;
use crate::options::values;
use crate::options::xen::XenArgs;

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// Number of reactors. Read at start only.
    #[serde(default, deserialize_with = "values::reactors")]
    pub reactors: Option<u16>,
    /// Whether disks get shares of their device. If false, requests run in the order of arrival.
    #[serde(default)]
    pub fair_share: Option<bool>,
    /// File with the costs of the devices' operations.
    #[serde(default)]
    pub costs: Option<PathBuf>,
    /// Folder for journals of changed metadata. Read at start only.
    #[serde(default)]
    pub state_folder: Option<PathBuf>,
    /// The API's socket. Read at start only.
    #[serde(default, deserialize_with = "api::socket")]
    pub api: Option<String>,
    #[serde(default, deserialize_with = "api::mode")]
    pub socket_mode: Option<u32>,
    #[serde(default)]
    pub socket_group: Option<String>,
    /// Whether the server enters a sandbox. Read at start only.
    #[serde(default, deserialize_with = "sandbox::mode")]
    pub sandbox: Option<bool>,
    /// Folders of the sandbox besides those of the disks. Read at start only.
    #[serde(default)]
    pub allow_folders: Vec<PathBuf>,
    /// The user to become if root starts the server. Read at start only.
    #[serde(default, deserialize_with = "sandbox::user")]
    pub user: Option<String>,
    /// Address of the metrics. Read at start only.
    #[serde(default, deserialize_with = "values::loopback")]
    pub metrics: Option<SocketAddr>,
    /// Settings for all NBD clients.
    #[serde(default)]
    pub nbd: NbdArgs,
    /// Disks that Xen toolstacks request. Read at start only.
    #[serde(default)]
    pub xen: XenArgs,
    #[serde(default, rename = "group")]
    pub groups: BTreeMap<String, GroupArgs>,
    #[serde(default, rename = "disk")]
    pub disks: Vec<DiskArgs>,
    /// The parsed file, for messages about its changes.
    #[serde(skip)]
    pub file: toml::Table,
    #[serde(skip)]
    pub missing: Missing,
    /// Names that a file removes although no earlier one has such a disk.
    #[serde(skip)]
    pub unknown: Vec<Unknown>,
    /// Where the files have the disks, in their order. Empty if no file configures them.
    #[serde(skip)]
    pub places: Vec<Place>,
}

/// Where a file configures a disk: the line of its `[[disk]]`. None: the file has another form.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub path: PathBuf,
    pub line: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "configuration {}", self.path.display())?;
        self.line.map_or(Ok(()), |line| write!(f, ": line {line}"))
    }
}

impl Place {
    /// Returns the place of a key of the main file, before its tables.
    pub fn of_main(path: &Path, key: &str) -> Self {
        let top = Place { path: files::main(path), line: Some(0) }.of_key(key);
        Place { line: top.line.filter(|line| *line > 0), ..top }
    }

    /// Returns the place of a key of this table. Reads the file again, for a message.
    pub fn of_key(&self, key: &str) -> Self {
        let Some(header) = self.line else { return self.clone() };
        let text = small_file::read_text(&self.path).unwrap_or_default();
        let lines = text.lines().map(str::trim_start).zip(1..).skip(header);
        let mut own = lines.take_while(|(line, _)| !line.starts_with('['));
        let is_key = |line: &str| {
            line.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
        };
        let found = own.find(|(line, _)| is_key(line));
        Place { path: self.path.clone(), line: found.map(|(_, line)| line).or(self.line) }
    }
}

/// A name in a list `remove` that no earlier file defines.
#[derive(Clone, Debug, PartialEq)]
pub struct Unknown {
    pub place: Place,
    pub name: String,
    /// The disk that may be meant.
    pub nearest: Option<String>,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unknown { place, name, nearest } = self;
        write!(f, "{place}: remove: no earlier file has a disk \"{name}\"")?;
        match nearest {
            Some(nearest) => write!(f, ": did you mean \"{nearest}\"?"),
            None => write!(f, ": correct the name, or leave it out"),
        }
    }
}

/// Returns the identity of a disk's image, if it is known.
type Identify<'a> = &'a dyn Fn(&DiskArgs) -> Option<ImageId>;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration {}: cannot read it", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("configuration {0}")]
    File(SmallFileError),
    #[error("configuration {}: {message}", path.display())]
    Parse { path: PathBuf, message: String },
    #[error("{place}: {what}")]
    Value { place: Place, what: String },
}

impl Config {
    /// Returns the configuration of `--config`, or the one that the other options describe.
    pub fn of(options: &ServeOptions) -> anyhow::Result<Self> {
        Config::identified(options, &early::identity)
    }

    /// Like `of`. `identify`: what tells whether two images are the same.
    pub fn identified(options: &ServeOptions, identify: Identify<'_>) -> anyhow::Result<Self> {
        match (&options.config, &options.disk) {
            (Some(path), _) => {
                let may_be_empty = options.api.api.is_some() || !options.xen.watch.is_empty();
                Ok(Config::read_identified(path, may_be_empty, None, identify)?)
            }
            (None, Some(disk)) => Ok(Config { disks: vec![disk.clone()], ..Config::default() }),
            (None, None) if !options.xen.watch.is_empty() || options.api.api.is_some() => {
                Ok(Config::default())
            }
            (None, None) => {
                anyhow::bail!(
                    "no disk: give an IMAGE and an export ({}), or --config FILE, or --api SOCKET \
                     to add disks later",
                    exports::options()
                )
            }
        }
    }

    /// Returns the options of the API's socket, with keys of this for those that are absent.
    pub fn api(&self, options: &ApiArgs) -> ApiArgs {
        ApiArgs {
            api: options.api.clone().or_else(|| self.api.clone()),
            socket_mode: options.socket_mode.or(self.socket_mode),
            socket_group: options.socket_group.clone().or_else(|| self.socket_group.clone()),
        }
    }

    /// Returns the options of the sandbox, with keys of this for those that are absent.
    pub fn sandbox(&self, options: &SandboxArgs) -> SandboxArgs {
        SandboxArgs {
            sandbox: options.sandbox.or(self.sandbox),
            allow_folders: [&options.allow_folders[..], &self.allow_folders].concat(),
            user: options.user.clone().or_else(|| self.user.clone()),
        }
    }

    /// Reads a configuration file and its folder `conf.d`; see [`files`]. `may_be_empty`: calls of
    /// the API can add disks.
    #[cfg(test)]
    pub fn read(path: &Path, may_be_empty: bool) -> Result<Self, ConfigError> {
        Config::read_with(path, may_be_empty, None, &Images::default())
    }

    /// Like `read`, with another text of one file of the folder. `images`: what is known of images.
    pub fn read_with(
        path: &Path,
        may_be_empty: bool,
        instead: Option<Instead<'_>>,
        images: &Images,
    ) -> Result<Self, ConfigError> {
        Config::read_identified(path, may_be_empty, instead, &|disk| images.known(disk))
    }

    fn read_identified(
        path: &Path,
        may_be_empty: bool,
        instead: Option<Instead<'_>>,
        identify: Identify<'_>,
    ) -> Result<Self, ConfigError> {
        let config = files::read(path, instead)?;
        let whole = Place { path: path.to_path_buf(), line: None };
        config
            .check(may_be_empty)
            .map_err(|what| ConfigError::Value { place: whole.clone(), what })?;
        let mut claims = Claims::default();
        for (at, disk) in config.disks.iter().enumerate() {
            let place = || config.places.get(at).unwrap_or(&whole).clone();
            let checked = claims.add(disk, identify(disk)).and_then(|()| config.check_disk(disk));
            checked.map_err(|what| ConfigError::Value { place: place(), what })?;
        }
        Ok(config)
    }

    fn check_disk(&self, disk: &DiskArgs) -> Result<(), String> {
        let name = disk.name();
        if !exports::is_exported(disk) {
            return Err(format!("disk \"{name}\": it has no export: set {}", exports::keys()));
        }
        match disk.group.as_ref().filter(|group| !self.groups.contains_key(*group)) {
            Some(group) => Err(format!(
                "disk \"{name}\": there is no group \"{group}\" (a table [group.{group}])"
            )),
            None => Ok(()),
        }
    }

    fn check(&self, may_be_empty: bool) -> Result<(), String> {
        for (name, group) in &self.groups {
            knobs::check(&group.knobs()).map_err(|e| format!("group \"{name}\": {e}"))?;
        }
        let xen_group = self.xen.defaults.as_ref().and_then(|defaults| defaults.group.as_ref());
        if let Some(group) = xen_group.filter(|group| !self.groups.contains_key(*group)) {
            return Err(format!(
                "xen.defaults: there is no group \"{group}\" (a table [group.{group}])"
            ));
        }
        let may_be_empty = may_be_empty || self.api.is_some() || !self.xen.watch.is_empty();
        if self.disks.is_empty() && !may_be_empty {
            return Err(format!(
                "it has no disk: add a table [[disk]] with the key image, and {}",
                exports::keys()
            ));
        }
        Ok(())
    }
}

impl Config {
    /// Returns the settings of the NBD servers; see [`nbd::settings`]. Options of the command line
    /// replace keys of the file. Returns an error if a disk restricts its NBD clients without
    /// effect.
    pub fn nbd_settings(&self, options: &NbdArgs) -> anyhow::Result<nbd::ServerSettings> {
        let args = options.or(&self.nbd);
        let settings = nbd::settings(&args)?;
        self.check_each(|disk| nbd::check(settings.tls, disk))?;
        Ok(settings)
    }

    /// Returns the first disk's error, with the file and the line of the disk.
    pub fn check_each(
        &self,
        check: impl Fn(&DiskArgs) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut disks = self.disks.iter().enumerate();
        disks.try_for_each(|(at, disk)| check(disk).map_err(|error| self.locate(at, None, error)))
    }

    /// Adds the file and the line of the disk at this index, or of a key of it, to an error.
    pub fn locate(&self, disk: usize, key: Option<&str>, error: anyhow::Error) -> anyhow::Error {
        match self.places.get(disk) {
            Some(place) => error.context(key.map_or(place.clone(), |key| place.of_key(key))),
            None => error,
        }
    }

    /// Logs what is probably a mistake, and no reason to serve nothing.
    pub fn warn(&self) {
        self.unknown.iter().for_each(|unknown| tracing::warn!("{unknown}"));
    }

    /// Returns the keys of the disk at this index of [`Config::disks`]. It has none if no file
    /// configures it.
    pub fn keys(&self, disk: usize) -> toml::Table {
        let tables = self.file.get("disk").and_then(toml::Value::as_array);
        let table = tables.and_then(|tables| tables.get(disk)).and_then(toml::Value::as_table);
        table.cloned().unwrap_or_default()
    }

    /// Returns the weight, limits and reservations of each group of disks.
    pub fn group_knobs(&self) -> BTreeMap<String, Knobs> {
        self.groups.iter().map(|(name, group)| (name.clone(), group.knobs())).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use blockyard_sched::{Knobs, Limit, Limits};

    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let path = std::env::temp_dir()
            .join(format!("blockyard-config-{:?}.toml", std::thread::current().id()));
        std::fs::write(&path, text).unwrap();
        let result = Config::read(&path, false).map_err(|e| e.to_string());
        std::fs::remove_file(&path).unwrap();
        result
    }

    #[test]
    fn keys_of_the_file_are_parsed() {
        let config = read(
            "reactors = 2\n[[disk]]\nimage = \"/a/root.img\"\nvhost-user = \"/run/root.sock\"\n\
             cache = \"writethrough\"\n\
             queues = 4\nqueue-size = 256\npoll = \"off\"\nfilters = \
             [\"delay:read=1ms\"]\n\
             [[disk]]\nname = \"data\"\nimage = \"ram:1G\"\nvhost-user = \"/run/data.sock\"\n",
        )
        .unwrap();
        assert_eq!((config.reactors, config.disks.len()), (Some(2), 2));
        assert_eq!(config.disks[0].name(), "root.img");
        assert_eq!(config.disks[0].cache, blockyard_image::CacheMode::Writethrough);
        assert_eq!(config.disks[1].queue_size, 128);
    }

    #[test]
    fn disks_and_groups_have_the_same_knobs() {
        let all = "weight = 250\nreserve-iops = \"1k\"\nreserve-bps = 5000\niops = 2000\n\
                   iops-read = \"300,max=600\"\n\
                   iops-write = 30\nbps = \"50M,max=200M,length=2.5\"\nbps-read = \"1G\"\n\
                   bps-write = 1000000\n\
                   latency-target = \"2.5ms\"\n";
        let config = read(&format!(
            "fair-share = false\ncosts = \"/etc/costs\"\n[[disk]]\nimage = \"a\"\nvhost-user = \
             \"s\"\ngroup = \"g\"\n\
             device = \"d\"\n{all}[group.g]\n{all}[group.h]\n"
        ))
        .unwrap();
        let limits = Limits {
            iops: Some(Limit::of(2000)),
            iops_read: Some(Limit { max: Some(600), ..Limit::of(300) }),
            iops_write: Some(Limit::of(30)),
            bps: Some(Limit {
                rate: 50 << 20,
                max: Some(200 << 20),
                length: Duration::from_millis(2500),
            }),
            bps_read: Some(Limit::of(1 << 30)),
            bps_write: Some(Limit::of(1_000_000)),
        };
        let (reserve_iops, reserve_bps) = (Some(1024), Some(5000));
        let latency_target = Some(Duration::from_micros(2500));
        let knobs = Knobs { weight: 250, reserve_iops, reserve_bps, limits, latency_target };
        assert_eq!((config.disks[0].knobs(), config.groups["g"].knobs()), (knobs.clone(), knobs));
        assert_eq!(config.groups["h"].knobs(), Knobs::default());
        assert_eq!(
            (config.disks[0].group.as_deref(), config.disks[0].device.as_deref()),
            (Some("g"), Some("d"))
        );
        assert_eq!((config.fair_share, config.costs), (Some(false), Some("/etc/costs".into())));
    }

    const DISK: &str = "[[disk]]\nimage = \"a\"\nvhost-user = \"s\"\n";

    /// Checks that the first text of each pair is refused with a one-line message that contains the
    /// second text.
    fn each_is_an_error(cases: &[(String, &str)]) {
        for (text, part) in cases {
            let error = read(text).unwrap_err();
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn errors_name_the_line_or_the_disk() {
        let disk = DISK;
        each_is_an_error(&[
            (
                format!("{disk}cach = \"none\"\n"),
                "line 4: unknown key `cach`: did you mean `cache`?",
            ),
            (format!("{disk}cache = \"fast\"\n"), "cache mode \"fast\" is not known"),
            (format!("{disk}queue-size = 100\n"), "a power of two"),
            (format!("{disk}{disk}"), "line 4: two disks are called \"a\""),
            (format!("{disk}nbd = \"tcp:5\"\n"), "\"tcp:5\": an NBD address is"),
            (
                format!("{disk}ublk = \"x\"\n"),
                "line 4: ublk: it must be true, false, or the N of /dev/ublkbN",
            ),
            (format!("{disk}ublk = 4294967295\n"), "the number of a ublk device is"),
            (
                format!("{disk}ublk = 3\n[[disk]]\nimage = \"b\"\nublk = 3\n"),
                "line 5: disk \"b\": another disk is /dev/ublkb3",
            ),
            ("[nbd]\nmax-clients = 0\n".into(), "line 2: max-clients: "),
            (
                "[xen]\nwatch = \"a/b\"\n".into(),
                "line 2: watch: \"a/b\": a type of back end is vbd",
            ),
            (
                "[xen]\nwatch = \"vbd\"\n[xen.defaults]\ngroup = \"g\"\n".into(),
                "xen.defaults: there is no group \"g\"",
            ),
            (format!("{disk}weight = 0\n"), "line 4: weight: a weight is a number from 1 to 10000"),
            (
                format!("{disk}iops = \"10,max=5\"\n"),
                "line 4: iops: limit \"10,max=5\": max is less than the rate",
            ),
            (format!("{disk}bps-read = true\n"), "line 4: bps-read: it must be a number or a text"),
            (
                format!("{disk}reserve-bps = \"many\"\n"),
                "line 4: reserve-bps: \"many\": a rate is a number",
            ),
            (
                format!("{disk}latency-target = 5\n"),
                "line 4: latency-target: \"5\": a latency target is a number and a unit",
            ),
            (
                format!("{disk}group = \"g\"\n[group.h]\n"),
                "line 1: disk \"a\": there is no group \"g\"",
            ),
            (
                format!("[group.g]\nwieght = 5\n{disk}"),
                "line 2: unknown key `wieght`: did you mean `weight`?",
            ),
            (format!("[group.g]\ngroup = \"h\"\n{disk}"), "line 2: unknown key `group`"),
        ]);
    }

    #[test]
    fn errors_name_a_value_of_the_wrong_type_and_an_unknown_key() {
        let disk = DISK;
        each_is_an_error(&[
            (format!("{disk}iops = 1.5\n"), "line 4: iops: limit \"1.5\": it is RATE"),
            (format!("{disk}iops = -5\n"), "line 4: iops: limit \"-5\": it is RATE"),
            (
                format!("{disk}queues = \"two\"\n"),
                "line 4: queues: \"two\": a number of queues is from 1 to 256",
            ),
            (format!("{disk}queues = 1.5\n"), "line 4: queues: \"1.5\": a number of queues is"),
            (
                format!("{disk}queues = 99999999999999999999\n"),
                "line 4: queues: it is 99999999999999999999, and a number here has at most 64 bits",
            ),
            (
                format!("{disk}[group]\nweight = 3\n"),
                "line 5: weight: it is 3, and must be a table: write [group.NAME]",
            ),
            (
                format!("{disk}read-only = \"yes\"\n"),
                "line 4: read-only: it is \"yes\", and must be true or false",
            ),
            (format!("{disk}name = 5\n"), "line 4: name: it is 5, and must be a text"),
            (
                format!("{disk}nbd-timeout = \"x\"\n"),
                "line 4: nbd-timeout: it is \"x\", and must be a number",
            ),
            (
                format!("{disk}serail = \"x\"\n"),
                "line 4: unknown key `serail`: did you mean `serial`?",
            ),
            (
                format!("{disk}read_only = true\n"),
                "line 4: unknown key `read_only`: did you mean `read-only`?",
            ),
            (
                format!("{disk}reactors = 2\n"),
                "line 4: unknown key `reactors` in [[disk]] (docs/configuration.md has the keys)",
            ),
            (
                "reactors = \"x\"\n".into(),
                "line 1: reactors: \"x\": a number of reactors is from 1 to 256",
            ),
            (
                disk.replace("[[disk]]", "\n[disk]"),
                "line 2: [disk] is one table, and disks are a list: write [[disk]]",
            ),
            ("disk = 5\n".into(), "line 1: disk: it is 5, and disks are a list: write [[disk]]"),
            (String::new(), "it has no disk: add a table [[disk]]"),
            (
                "[group.g]\niops = 5\nreserve-iops = 6\n".into(),
                "group \"g\": reserve-iops is 6, more than",
            ),
        ]);
    }
}
