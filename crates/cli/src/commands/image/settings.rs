//! `-o key=value,...`: options of image formats, with qemu-img's names.

use std::str::FromStr;

use anyhow::{Result, anyhow, bail};
use blockyard_image::Format;
use blockyard_image::qcow2::{Compression, Preallocation};

use super::size;

/// Keys of each format, with their meaning for `-o help`.
const QCOW2: [(&str, &str); 12] = [
    ("size", "bytes of the disk"),
    ("backing_file", "as -b"),
    ("backing_fmt", "as -F"),
    ("compat", "0.10 (version 2) or 1.1 (version 3) [default: 1.1]"),
    ("cluster_size", "512 to 2M [default: 64k; 128k over a backing file]"),
    ("extended_l2", "on or off: clusters of 32 parts [default: off; on over a backing file]"),
    ("refcount_bits", "1 to 64 [default: 16]"),
    ("lazy_refcounts", "on or off [default: off]"),
    ("compression_type", "zlib or zstd [default: zlib]"),
    ("data_file", "a raw file that holds the data"),
    ("data_file_raw", "on or off: the data file reads as the disk by itself [default: off]"),
    ("preallocation", "off, metadata, falloc or full [default: off]"),
];
const RAW: [(&str, &str); 2] =
    [("size", "bytes of the disk"), ("preallocation", "off, falloc or full [default: off]")];
const COW: [(&str, &str); 4] = [
    ("backing_file", "as -b"),
    ("backing_fmt", "as -F: raw"),
    ("version", "1, 2 or 3 [default: 3]"),
    ("alignment", "of bitmap and data, version 3 only [default: 4k]"),
];

/// The options of `-o`. Values are parsed when they are used.
#[derive(Debug)]
pub struct Settings {
    format: Format,
    pairs: Vec<(String, String)>,
}

fn keys(format: Format) -> &'static [(&'static str, &'static str)] {
    match format {
        Format::Raw => &RAW,
        Format::Qcow2 => &QCOW2,
        Format::Cow => &COW,
    }
}

/// Returns the text for `-o help`, or `None` if the lists have no `help`.
pub fn help(format: Format, lists: &[String]) -> Option<String> {
    let is_requested = lists.iter().any(|list| matches!(list.as_str(), "help" | "list" | "?"));
    let line = |(key, meaning): &(&str, &str)| format!("  {key:<18}{meaning}\n");
    is_requested.then(|| {
        format!(
            "Options of {format} images:\n{}",
            keys(format).iter().map(line).collect::<String>()
        )
    })
}

impl Settings {
    /// Parses lists of `key=value,...`. A comma in a value is doubled. Returns an error for a key
    /// that the format does not have.
    pub fn parse(format: Format, lists: &[String]) -> Result<Self> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for item in lists.iter().flat_map(|list| split(list)) {
            let (key, value) = item.split_once('=').unwrap_or((&item, "on"));
            if !keys(format).iter().any(|(known, _)| *known == key) {
                let known: Vec<_> = keys(format).iter().map(|(known, _)| *known).collect();
                bail!("{format} images have no option \"{key}\": options are {}", known.join(", "));
            }
            // As in qemu-img, the last value of a key wins.
            pairs.retain(|(other, _)| other != key);
            pairs.push((key.into(), value.into()));
        }
        Ok(Settings { format, pairs })
    }

    /// Refuses the option `size` in a command that takes the disk's size from elsewhere.
    pub fn refuse_size(&self, from: &str) -> Result<()> {
        if self.has("size") {
            bail!("option \"size\": the new disk has the size of {from}");
        }
        Ok(())
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the given keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().map(|(key, _)| key.as_str())
    }

    pub fn has(&self, key: &str) -> bool {
        self.pairs.iter().any(|(other, _)| other == key)
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.pairs.iter().find(|(other, _)| other == key).map(|(_, value)| value.as_str())
    }

    fn value<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Option<T>,
        wanted: &str,
    ) -> Result<Option<T>> {
        let Some(text) = self.text(key) else { return Ok(None) };
        parse(text).map(Some).ok_or_else(|| anyhow!("option {key}=\"{text}\": it must be {wanted}"))
    }

    pub fn size(&self, key: &str) -> Result<Option<u64>> {
        self.value(key, |text| size::parse(text).ok(), "a size, such as 64k")
    }

    pub fn number<T: FromStr>(&self, key: &str) -> Result<Option<T>> {
        self.value(key, |text| text.parse().ok(), "a number")
    }

    pub fn switch(&self, key: &str) -> Result<Option<bool>> {
        let parse = |text: &str| match text {
            "on" | "yes" | "true" | "y" => Some(true),
            "off" | "no" | "false" | "n" => Some(false),
            _ => None,
        };
        self.value(key, parse, "on or off")
    }

    pub fn version(&self) -> Result<Option<u32>> {
        let parse = |text: &str| match text {
            "0.10" | "v2" => Some(2),
            "1.1" | "v3" => Some(3),
            _ => None,
        };
        self.value("compat", parse, "0.10 or 1.1")
    }

    pub fn compression(&self) -> Result<Option<Compression>> {
        let parse = |text: &str| match text {
            "zlib" => Some(Compression::Zlib),
            "zstd" => Some(Compression::Zstd),
            _ => None,
        };
        self.value("compression_type", parse, "zlib or zstd")
    }

    pub fn preallocation(&self) -> Result<Option<Preallocation>> {
        self.value("preallocation", preallocation, "off, metadata, falloc or full")
    }
}

pub fn preallocation(text: &str) -> Option<Preallocation> {
    match text {
        "off" => Some(Preallocation::Off),
        "metadata" => Some(Preallocation::Metadata),
        "falloc" => Some(Preallocation::Falloc),
        "full" => Some(Preallocation::Full),
        _ => None,
    }
}

/// Splits a list at commas that are not doubled.
fn split(list: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut letters = list.chars().peekable();
    while let Some(letter) = letters.next() {
        let last = items.len() - 1;
        match letter {
            ',' if letters.next_if_eq(&',').is_none() => items.push(String::new()),
            other => items[last].push(other),
        }
    }
    items.retain(|item| !item.is_empty());
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_separate_and_doubled_ones_do_not() {
        assert_eq!(split("a=1,b,c=x,,y,"), ["a=1", "b", "c=x,y"]);
        let lists =
            ["cluster_size=4k,lazy_refcounts".to_string(), "cluster_size=2M,data_file=a,,b".into()];
        let settings = Settings::parse(Format::Qcow2, &lists).unwrap();
        assert_eq!(settings.size("cluster_size").unwrap(), Some(2 << 20));
        assert_eq!(settings.switch("lazy_refcounts").unwrap(), Some(true));
        assert_eq!((settings.text("data_file"), settings.has("compat")), (Some("a,b"), false));
        assert!(
            Settings::parse(Format::Raw, &lists)
                .unwrap_err()
                .to_string()
                .contains("no option \"cluster_size\"")
        );
        let wrong =
            Settings::parse(Format::Qcow2, &["compat=2".into()]).unwrap().version().unwrap_err();
        assert_eq!(wrong.to_string(), "option compat=\"2\": it must be 0.10 or 1.1");
    }
}
