//! The files of a configuration: one main file, and a folder `conf.d` beside it.
//!
//! In: the path of `--config`, a file or a folder. Out: one configuration. Files of the folder come
//! after the main file, in the order of their names. What must hold: each error names its file and
//! line. A disk or group of a later file replaces the one of the same name, as a whole. A folder
//! that is gone does not become a file: its parts would be those of another folder.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use blockyard_disk::Source;
use blockyard_ring::sandbox::Reserved;
use blockyard_ring::small_file::read_text;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::{Config, ConfigError, Place, Unknown, mistake};
use crate::options::disk::DiskArgs;
use crate::options::knobs::GroupArgs;

/// Name of the folder.
pub const FOLDER: &str = "conf.d";

/// Name of the main file if `--config` names a folder.
const MAIN: &str = "blockyard.toml";

/// Prefix of the files that the API writes. Names with higher numbers override them.
pub const OF_API: &str = "90-ctl-";

/// What a file of the folder is, for messages about unknown keys.
const PART: &str = " in a file of conf.d, which has only [[disk]], [group.NAME] and remove";

/// A file of the folder.
#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Part {
    /// Names of disks of earlier files that are not served.
    #[serde(default)]
    remove: Vec<String>,
    #[serde(default, rename = "group")]
    groups: BTreeMap<String, GroupArgs>,
    #[serde(default, rename = "disk")]
    disks: Vec<DiskArgs>,
}

/// What a configuration does not have of its files.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Missing {
    /// The configuration is a folder without a main file.
    pub main: bool,
    /// There is no folder `conf.d`.
    pub parts: bool,
}

impl Missing {
    /// Returns an error if a file or folder has gone since a server read the configuration: that is
    /// a mistake more often than an order to close its disks. `before`: what was missing then.
    pub fn check(self, before: Missing, config: &Path) -> anyhow::Result<()> {
        let main = main(config);
        anyhow::ensure!(
            before.main || !self.main,
            "configuration {}: the file is missing: restore it, or write an empty one",
            main.display()
        );
        let folder = root(config).join(FOLDER);
        anyhow::ensure!(
            before.parts || !self.parts,
            "configuration {}: the folder is missing: restore it, or make an empty one",
            folder.display()
        );
        Ok(())
    }
}

/// Whether the paths of configurations were folders when this process first used them. A process
/// has one configuration.
static FOLDERS: Mutex<BTreeMap<PathBuf, bool>> = Mutex::new(BTreeMap::new());

/// Returns whether a configuration is a folder. Later changes of the file system do not change
/// that: `conf.d` would be another folder then.
fn is_folder(config: &Path) -> bool {
    let mut folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    *folders.entry(config.to_path_buf()).or_insert_with(|| config.is_dir())
}

/// Returns the folder that holds the main file of a configuration.
pub fn root(config: &Path) -> &Path {
    if is_folder(config) {
        return config;
    }
    config.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the main file of a configuration, which may be missing.
pub fn main(config: &Path) -> PathBuf {
    if is_folder(config) { config.join(MAIN) } else { config.to_path_buf() }
}

/// Returns the files of a configuration, which no disk may use.
pub fn reserved(config: &Path) -> Reserved {
    Reserved::of(&main(config), &root(config).join(FOLDER), is_part)
}

/// A text that replaces a file of the folder, for a check before the file is written.
#[derive(Clone, Copy)]
pub struct Instead<'a> {
    pub path: &'a Path,
    /// None: there is no such file.
    pub text: Option<&'a str>,
}

/// Reads and merges the files of a configuration.
pub fn read(config: &Path, instead: Option<Instead<'_>>) -> Result<Config, ConfigError> {
    let main = main(config);
    let mut all = match read_text(&main) {
        // A folder may have parts only.
        Err(e) if config.is_dir() && e.is_missing() && !is_link(&main) => {
            Config { missing: Missing { main: true, parts: false }, ..Config::default() }
        }
        text => {
            let text = text.map_err(ConfigError::File)?;
            let (parsed, file, lines): (Config, _, _) = parse(&main, &text, "")?;
            let places = places(&main, &lines, parsed.disks.len());
            Config { file, places, ..parsed }
        }
    };
    let mut known: HashSet<_> = all.disks.iter().map(DiskArgs::name).collect();
    let folder = root(config).join(FOLDER);
    all.missing.parts = !folder.is_dir();
    for (path, given) in parts(&folder, instead)? {
        let text = match given {
            Some(text) => text.to_string(),
            None => read_text(&path).map_err(ConfigError::File)?,
        };
        let (part, file, lines): (Part, _, _) = parse(&path, &text, PART)?;
        check_programs(&path, &all.disks, &part).map_err(|what| {
            let place = Place { path: path.clone(), line: None };
            ConfigError::Value { place, what }
        })?;
        // A file of the API stays when an operator takes its disk out of another file.
        if !is_of_api(&path) {
            all.unknown.extend(unknown(&path, &text, &part.remove, &known));
        }
        known.extend(part.disks.iter().map(DiskArgs::name));
        let places = places(&path, &lines, part.disks.len());
        merge(&mut all, part, file, places);
    }
    Ok(all)
}

/// Returns the files of the folder in their order, one of them with its text. A folder that does
/// not exist has none.
fn parts<'a>(
    folder: &Path,
    instead: Option<Instead<'a>>,
) -> Result<Vec<(PathBuf, Option<&'a str>)>, ConfigError> {
    let failed = |source| ConfigError::Folder { path: folder.to_path_buf(), source };
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !is_link(folder) => {
            return Ok(Vec::new());
        }
        Err(e) => return Err(failed(e)),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let is_other = instead.is_none_or(|instead| instead.path != path);
        if is_part(&path) && is_other {
            paths.push((path, None));
        }
    }
    let given = instead.and_then(|Instead { path, text }| Some((path.to_path_buf(), Some(text?))));
    paths.extend(given);
    paths.sort();
    Ok(paths)
}

/// Returns whether a file that is missing is a link, which leads to nothing now.
fn is_link(path: &Path) -> bool {
    path.is_symlink()
}

/// Returns whether a file of the folder belongs to the configuration.
fn is_part(path: &Path) -> bool {
    let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes()[0] == b'.');
    path.extension().is_some_and(|extension| extension == "toml") && !is_hidden
}

/// Returns whether the API writes a file.
fn is_of_api(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(OF_API.as_bytes())
}

/// Returns the names of the list `remove` that no earlier file has, each with its line.
fn unknown(path: &Path, text: &str, removed: &[String], known: &HashSet<String>) -> Vec<Unknown> {
    let lines = || text.lines().zip(1..).skip_while(|(l, _)| !l.trim_start().starts_with("remove"));
    let unknown = removed.iter().filter(|name| !known.contains(*name)).map(|name| {
        let has_name = |(line, _): &(&str, usize)| line.contains(&**name);
        let line = lines().find(has_name).or_else(|| lines().next()).map(|(_, number)| number);
        let place = Place { path: path.to_path_buf(), line };
        let nearest = mistake::nearest(name, known.iter().map(String::as_str)).map(String::from);
        Unknown { place, name: name.clone(), nearest }
    });
    unknown.collect()
}

/// Returns an error if a file that the API writes names a program that no file of the operator
/// names for the same disk. Otherwise a call could start any program as the server's user.
/// `earlier`: the disks of the files before this one.
fn check_programs(path: &Path, earlier: &[DiskArgs], part: &Part) -> Result<(), String> {
    if !is_of_api(path) {
        return Ok(());
    }
    let is_known = |disk: &DiskArgs| {
        let mut same = earlier.iter().filter(|known| known.name() == disk.name());
        same.any(|known| known.image == disk.image)
    };
    match part.disks.iter().find(|disk| names_program(disk) && !is_known(disk)) {
        Some(disk) => Err(format!(
            "disk \"{}\": image {}: only an operator's own file may name a program, and the API \
             writes files {OF_API}*: put the disk into another file of this folder",
            disk.name(),
            disk.image.display()
        )),
        None => Ok(()),
    }
}

fn names_program(disk: &DiskArgs) -> bool {
    Source::scheme_of(&disk.image).is_some_and(|(scheme, name)| scheme.program(name).is_some())
}

/// Parses a file, also as a table for messages about changes. Returns the lines of its disks, too.
/// `kind`: for messages about mistakes.
fn parse<T: DeserializeOwned>(
    path: &Path,
    text: &str,
    kind: &str,
) -> Result<(T, Table, Vec<usize>), ConfigError> {
    let owned = || path.to_path_buf();
    let wrong =
        |e| ConfigError::Parse { path: owned(), message: mistake::describe(text, &e, kind) };
    let parsed = toml::from_str(text).map_err(wrong)?;
    Ok((parsed, text.parse().map_err(wrong)?, lines_of_disks(text)))
}

/// Returns the numbers of the lines with `[[disk]]`.
fn lines_of_disks(text: &str) -> Vec<usize> {
    let is_disk = |line: &str| line.trim_start().starts_with("[[disk]]");
    let numbered = text.lines().zip(1..);
    numbered.filter(|(line, _)| is_disk(line)).map(|(_, number)| number).collect()
}

/// Returns where a file has each of its disks. A text of several lines may look like a table, and a
/// table may have another form: then the lines are not known.
fn places(path: &Path, lines: &[usize], disks: usize) -> Vec<Place> {
    let line = |at: usize| lines.get(at).copied().filter(|_| lines.len() == disks);
    (0..disks).map(|at| Place { path: path.to_path_buf(), line: line(at) }).collect()
}

/// Adds a part. `file`: the same part as a table; `places`: where it has its disks.
fn merge(all: &mut Config, part: Part, mut file: Table, places: Vec<Place>) {
    let named = part.disks.iter().map(DiskArgs::name);
    let gone: HashSet<_> = named.chain(part.remove).collect();
    let mut tables = take_disks(&mut all.file);
    let mut stays = all.disks.iter().map(|disk| !gone.contains(&disk.name()));
    tables.retain(|_| stays.next().unwrap_or(true));
    let mut stays = all.disks.iter().map(|disk| !gone.contains(&disk.name()));
    all.places.retain(|_| stays.next().unwrap_or(true));
    all.places.extend(places);
    all.disks.retain(|disk| !gone.contains(&disk.name()));
    all.disks.extend(part.disks);
    tables.extend(take_disks(&mut file));
    all.file.insert("disk".into(), Value::Array(tables));
    all.groups.extend(part.groups);
    if let Some(Value::Table(groups)) = file.remove("group") {
        let known = all.file.entry("group").or_insert_with(|| Value::Table(Table::new()));
        if let Some(known) = known.as_table_mut() {
            known.extend(groups);
        }
    }
}

fn take_disks(file: &mut Table) -> Vec<Value> {
    match file.remove("disk") {
        Some(Value::Array(disks)) => disks,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration in a folder of its own.
    struct Files(PathBuf);

    impl Files {
        fn new(name: &str) -> Self {
            let folder =
                std::env::temp_dir().join(format!("blockyard-{name}-{}", std::process::id()));
            std::fs::create_dir_all(folder.join(FOLDER)).unwrap();
            Files(folder)
        }

        fn write(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join(name);
            std::fs::write(&path, text).unwrap();
            path
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn disk(name: &str, more: &str) -> String {
        format!("[[disk]]\nname = \"{name}\"\nimage = \"ram:1M\"\nvhost-user = \"/{name}\"\n{more}")
    }

    #[test]
    fn later_files_replace_and_remove_disks_and_the_table_has_the_same_order() {
        let files = Files::new("merge");
        let main = files.write("main.toml", &(disk("a", "") + &disk("b", "") + &disk("c", "")));
        files.write("conf.d/20.toml", &disk("a", "weight = 300\ngroup = \"g\"\n"));
        files.write("conf.d/30.toml", "remove = [\"b\", \"unknown\"]\n[group.g]\nweight = 5\n");
        files.write("conf.d/40.txt", "not a part");
        files.write("conf.d/.50.toml", "not a part");
        let config = Config::read(&main, false).unwrap();
        let names: Vec<_> = config.disks.iter().map(DiskArgs::name).collect();
        assert_eq!(names, ["c", "a"]);
        let wrong = config.unknown.iter().map(ToString::to_string).collect::<Vec<_>>();
        let expected = "30.toml: line 1: remove: no earlier file has a disk \"unknown\"";
        assert!(wrong.len() == 1 && wrong[0].contains(expected), "{wrong:?}");
        let place = |at: usize| config.places[at].to_string();
        assert!(place(0).ends_with("main.toml: line 9"), "{}", place(0));
        assert!(place(1).ends_with("20.toml: line 1"), "{}", place(1));
        assert_eq!((config.disks[1].weight, config.groups["g"].knobs().weight), (300, 5));
        for (at, name) in names.iter().enumerate() {
            assert_eq!(config.keys(at)["name"].as_str(), Some(&name[..]));
        }
    }

    #[test]
    fn a_folder_needs_no_main_file_and_errors_name_the_part() {
        let files = Files::new("folder");
        files.write("conf.d/a.toml", &disk("a", ""));
        assert_eq!(Config::read(&files.0, false).unwrap().disks.len(), 1);
        files.write("blockyard.toml", "reactors = 2\n");
        assert_eq!(Config::read(&files.0, false).unwrap().reactors, Some(2));
        let wrong = files.write("conf.d/b.toml", &disk("b", "wieght = 5\n"));
        let error = Config::read(&files.0, false).unwrap_err().to_string();
        let expected = format!("configuration {}: line 5: unknown key `wieght`", wrong.display());
        assert!(error.starts_with(&expected) && error.contains("`weight`"), "{error}");
        files.write("conf.d/b.toml", "reactors = 3\n");
        let error = Config::read(&files.0, false).unwrap_err().to_string();
        assert!(error.contains("b.toml: line 1: unknown key `reactors` in a file of"), "{error}");
        files.write("conf.d/b.toml", &(disk("b", "") + "[nbd]\nmax-clients = 3\n"));
        let error = Config::read(&files.0, false).unwrap_err().to_string();
        assert!(error.contains("line 5: unknown key `nbd` in a file of conf.d"), "{error}");
    }

    #[test]
    fn a_file_of_the_api_names_no_program_that_an_operator_has_not_named() {
        let files = Files::new("programs");
        let program = disk("p", "weight = 5\n").replace("ram:1M", "exec:/bin/program");
        let other = program.replace("/bin/program", "/bin/other");
        let main = files.write("main.toml", &program);
        let weights = || {
            let config = Config::read(&main, false).map_err(|e| e.to_string());
            config.map(|config| config.disks.iter().map(|disk| disk.weight).collect::<Vec<_>>())
        };
        // A change of another key (`ctl set --persist`).
        let kept = files.write("conf.d/90-ctl-p.toml", &program.replace("= 5", "= 7"));
        assert_eq!(weights(), Ok(vec![7]));
        for wrong in [other.clone(), program.replace("\"p\"", "\"q\""), disk("x", "") + &other] {
            std::fs::write(&kept, wrong).unwrap();
            let error = weights().unwrap_err();
            assert!(error.contains("90-ctl-p.toml: disk \""), "{error}");
            assert!(error.contains("only an operator's own file may name a program"), "{error}");
        }
        std::fs::remove_file(&kept).unwrap();
        files.write("conf.d/91-own.toml", &other.replace("= 5", "= 9"));
        assert_eq!(weights(), Ok(vec![9]));
    }

    #[test]
    fn a_folder_that_is_gone_does_not_become_a_file() {
        let files = Files::new("gone");
        files.write("conf.d/a.toml", &disk("a", ""));
        assert_eq!(Config::read(&files.0, false).unwrap().disks.len(), 1);
        std::fs::remove_dir_all(&files.0).unwrap();
        assert_eq!(root(&files.0), files.0);
        assert_eq!(main(&files.0), files.0.join(MAIN));
        let error = Config::read(&files.0, true).unwrap_err().to_string();
        assert!(error.contains(MAIN) && error.contains("cannot read it"), "{error}");
    }

    #[test]
    fn two_disks_of_one_file_may_not_have_the_same_name() {
        let files = Files::new("twice");
        let main = files.write("main.toml", &disk("a", ""));
        files.write("conf.d/x.toml", &(disk("b", "") + &disk("b", "")));
        let error = Config::read(&main, false).unwrap_err().to_string();
        assert!(error.contains("x.toml: line 5: two disks are called \"b\""), "{error}");
    }
}
