//! The configuration file: TOML, one `[[disk]]` table a disk. See docs/configuration.md.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use blockyard_disk::Filter;
use blockyard_export::vhost_user::{Coalesce, PollMode};
use blockyard_image::{ChainOptions, Format};
use serde::{Deserialize, Deserializer};

use crate::cli::{self, DiskArgs};

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// Threads that serve queues; read at start only.
    #[serde(default)]
    pub reactors: Option<u16>,
    #[serde(default, rename = "disk")]
    pub disks: Vec<DiskArgs>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration {}: cannot read it", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("configuration {}: {}", path.display(), message.trim_end())]
    Parse { path: PathBuf, message: String },
    #[error("configuration {}: {what}", path.display())]
    Value { path: PathBuf, what: String },
}

impl Config {
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let owned = || path.to_path_buf();
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: owned(), source })?;
        let config: Config =
            toml::from_str(&text).map_err(|e| ConfigError::Parse { path: owned(), message: one_line(&text, &e) })?;
        config.check().map_err(|what| ConfigError::Value { path: owned(), what })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if self.reactors.is_some_and(|n| !(1..=256).contains(&n)) {
            return Err("reactors is a number from 1 to 256".into());
        }
        let (mut names, mut sockets) = (HashSet::new(), HashSet::new());
        for disk in &self.disks {
            let name = disk.name();
            if !names.insert(name.clone()) {
                return Err(format!("two disks are called \"{name}\": give one of them a name of its own"));
            }
            if !sockets.insert(disk.vhost_user.clone()) {
                return Err(format!("disk \"{name}\": another disk has the socket {} already", disk.vhost_user));
            }
            if !(1..=256).contains(&disk.queues) {
                return Err(format!("disk \"{name}\": queues is a number from 1 to 256"));
            }
            cli::parse_queue_size(&disk.queue_size.to_string()).map_err(|e| format!("disk \"{name}\": {e}"))?;
        }
        Ok(())
    }
}

impl DiskArgs {
    /// The name given, or the image's own.
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| {
            let file = self.image.file_name().unwrap_or(self.image.as_os_str());
            file.to_string_lossy().into_owned()
        })
    }

    /// The format that is told, or that the image's name says. Other names mean raw, unless they are those of formats that
    /// are not served.
    pub fn format(&self) -> Result<Format, String> {
        if let Some(format) = self.format.or_else(|| Format::of_name(&self.image)) {
            return Ok(format);
        }
        let extension = self.image.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        if matches!(extension.as_str(), "vmdk" | "vdi" | "vhd" | "vhdx") {
            return Err(format!(
                "image {}: its name says {extension}, which is not served; --format raw serves the file's bytes as they are",
                self.image.display()
            ));
        }
        Ok(Format::Raw)
    }

    /// What the image is opened with.
    pub fn chain(&self) -> ChainOptions {
        ChainOptions {
            format: self.format().ok(),
            read_only: self.read_only,
            cache: self.cache,
            l2_cache: self.l2_cache,
            prime: self.prime,
            copy_on_read: self.copy_on_read,
            folders: self.backing_folders.clone(),
            ..ChainOptions::new(&self.image)
        }
    }
}

/// TOML's own message spans lines and draws; a log wants one line, with the place.
fn one_line(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    format!("line {line}: {}", error.message().replace('\n', "; "))
}

pub fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(d: D) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
}

/// A text, where the key is there.
pub fn some_from_text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(
    d: D,
) -> Result<Option<T>, D::Error> {
    from_text(d).map(Some)
}

/// A number of bytes, or a text with a suffix.
pub fn size<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    cli::parse_size(&WordOrNumber::deserialize(d)?.text()).map(Some).map_err(serde::de::Error::custom)
}

pub fn filters<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Filter>, D::Error> {
    let texts = Vec::<String>::deserialize(d)?;
    texts.iter().map(|t| t.parse().map_err(serde::de::Error::custom)).collect()
}

/// `"auto"`, `"off"`, a size with its suffix; or a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum WordOrNumber {
    Word(String),
    Number(u64),
}

impl WordOrNumber {
    fn text(self) -> String {
        match self {
            WordOrNumber::Word(word) => word,
            WordOrNumber::Number(number) => number.to_string(),
        }
    }
}

pub fn poll<'de, D: Deserializer<'de>>(d: D) -> Result<PollMode, D::Error> {
    cli::parse_poll(&WordOrNumber::deserialize(d)?.text()).map_err(serde::de::Error::custom)
}

pub fn coalesce<'de, D: Deserializer<'de>>(d: D) -> Result<Coalesce, D::Error> {
    cli::parse_coalesce(&WordOrNumber::deserialize(d)?.text()).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let path = std::env::temp_dir().join(format!("blockyard-config-{:?}.toml", std::thread::current().id()));
        std::fs::write(&path, text).unwrap();
        let result = Config::read(&path).map_err(|e| e.to_string());
        std::fs::remove_file(&path).unwrap();
        result
    }

    #[test]
    fn a_full_file() {
        let config = read(
            "reactors = 2\n[[disk]]\nimage = \"/a/root.img\"\nvhost-user = \"/run/root.sock\"\ncache = \"writethrough\"\n\
             queues = 4\nqueue-size = 256\npoll = \"off\"\ncoalesce = 50\nfilters = [\"delay:read=1ms\"]\n\
             [[disk]]\nname = \"data\"\nimage = \"ram:1G\"\nvhost-user = \"/run/data.sock\"\n",
        )
        .unwrap();
        assert_eq!((config.reactors, config.disks.len()), (Some(2), 2));
        assert_eq!(config.disks[0].name(), "root.img");
        assert_eq!(config.disks[0].cache, blockyard_image::CacheMode::Writethrough);
        assert_eq!(config.disks[1].queue_size, 128);
    }

    #[test]
    fn errors_name_the_line_or_the_disk() {
        let disk = "[[disk]]\nimage = \"a\"\nvhost-user = \"s\"\n";
        for (text, part) in [
            (format!("{disk}cach = \"none\"\n"), "line 4: unknown field `cach`"),
            (format!("{disk}cache = \"fast\"\n"), "cache mode \"fast\" is not known"),
            (format!("{disk}queue-size = 100\n"), "a power of two"),
            (format!("{disk}{disk}"), "two disks are called \"a\""),
            ("[[disk]]\nimage = \"a\"\n".into(), "missing field `vhost-user`"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
        }
    }
}
