//! The file of device costs: `bench calibrate` writes it, `serve --costs` reads it.
//!
//! In: the costs of a device. Out: TOML, one `[[device]]` table a device. What must hold: a write
//! of one device's costs keeps the others; a power cut leaves the old file or the new one.

use std::path::Path;

use anyhow::{Context, Result};
use blockyard_ring::small_file::read_text;
use blockyard_sched::Costs;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::file::replace;

/// Default path of the file.
pub const USUAL: &str = "/var/lib/blockyard/costs.toml";

/// One `[[device]]` table. All fields except the first two are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeviceCosts {
    /// `MAJOR:MINOR`, or a name.
    pub device: String,
    /// As [`describe`] returned it.
    #[serde(default)]
    pub description: String,
    pub read: u64,
    pub read_sequential: u64,
    pub read_per_mib: u64,
    pub write: u64,
    pub write_sequential: u64,
    pub write_per_mib: u64,
    pub flush: u64,
    pub discard: u64,
    pub write_zeroes: u64,
    /// Total cost of the operations in flight with which the device reaches 98% of its highest
    /// rate.
    pub window: u64,
    /// Latency of a 4 KiB operation with nothing else in flight.
    pub base_latency_read: u64,
    pub base_latency_write: u64,
}

impl DeviceCosts {
    pub fn costs(&self) -> Costs {
        Costs {
            read: self.read,
            read_sequential: self.read_sequential,
            read_per_mib: self.read_per_mib,
            write: self.write,
            write_sequential: self.write_sequential,
            write_per_mib: self.write_per_mib,
            flush: self.flush,
            discard: self.discard,
            write_zeroes: self.write_zeroes,
        }
    }

    /// Returns whether the device that has the number now is not the one that was measured. The
    /// kernel gives most devices their numbers in the order in which it finds them.
    pub fn is_of_another(&self) -> bool {
        let now = describe(&self.device);
        let noted: Vec<_> = self.description.split_whitespace().collect();
        // An older version noted the first words only.
        !now.is_empty() && !now.starts_with(&noted.join(" "))
    }

    /// Writes the costs to the file, and replaces those of the same device.
    pub fn save(&self, path: &Path) -> Result<()> {
        let name = || path.display().to_string();
        let text = match read_text(path) {
            Err(e) if e.is_missing() => String::new(),
            read => read?,
        };
        let text = self.put(&text).with_context(|| format!("{} is no file of costs", name()))?;
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("creating {}", folder.display()))?;
        }
        replace(path, text.as_bytes())
    }

    /// Returns the file's text with this device's costs added or replaced.
    fn put(&self, text: &str) -> Result<String> {
        let mut all: Table = text.parse()?;
        let devices = all.entry("device").or_insert_with(|| Value::Array(Vec::new()));
        let devices =
            devices.as_array_mut().context("\"device\" is not an array of tables: [[device]]")?;
        let own = Value::try_from(self)?;
        let same =
            |value: &&mut Value| value.get("device").and_then(Value::as_str) == Some(&self.device);
        match devices.iter_mut().find(same) {
            Some(place) => *place = own,
            None => devices.push(own),
        }
        Ok(toml::to_string(&all)?)
    }

    /// Returns the costs of a device.
    pub fn load(path: &Path, device: &str) -> Result<Self> {
        let found = read(path)?.into_iter().find(|d| d.device == device);
        found.with_context(|| {
            format!("{} says nothing of device {device}: run bench calibrate", path.display())
        })
    }

    fn check(&self) -> Result<()> {
        let c = self;
        let all = [
            c.read,
            c.read_sequential,
            c.write,
            c.write_sequential,
            c.flush,
            c.discard,
            c.write_zeroes,
            c.window,
        ];
        anyhow::ensure!(
            !all.contains(&0),
            "device \"{}\": an operation costs at least 1 ns, and so does the window",
            c.device
        );
        Ok(())
    }
}

/// Returns the kernel's name of a device (`MAJOR:MINOR`), its model, and its identification, as far
/// as it has them.
pub fn describe(key: &str) -> String {
    let Ok(folder) = std::fs::canonicalize(format!("/sys/dev/block/{key}")) else {
        return String::new();
    };
    let text = |file| std::fs::read_to_string(folder.join(file)).ok();
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
    let own = ["wwid", "device/wwid", "serial", "dm/uuid"].into_iter().find_map(text);
    let words = [name, text("device/model"), own].into_iter().flatten();
    let words: Vec<_> = words
        .flat_map(|text| text.split_whitespace().map(String::from).collect::<Vec<_>>())
        .collect();
    words.join(" ")
}

/// Returns all devices of a file.
pub fn read(path: &Path) -> Result<Vec<DeviceCosts>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        #[serde(default)]
        device: Vec<DeviceCosts>,
    }
    let text = read_text(path)?;
    let parse = || {
        let file: File = toml::from_str(&text).map_err(|e| {
            let line = e
                .span()
                .map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            anyhow::anyhow!("line {line}: {}", e.message().replace('\n', "; "))
        })?;
        file.device.iter().try_for_each(DeviceCosts::check)?;
        Ok(file.device)
    };
    parse().map_err(|e: anyhow::Error| e.context(format!("{} is no file of costs", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, read: u64) -> DeviceCosts {
        DeviceCosts { device: name.into(), read, window: 7, ..DeviceCosts::default() }
    }

    #[test]
    fn a_device_is_replaced_and_others_stay() {
        let first = device("8:0", 1).put("# by hand\n").unwrap();
        let both = device("model", 2).put(&first).unwrap();
        let third = device("8:0", 3).put(&both).unwrap();
        let table: Table = third.parse().unwrap();
        let devices = table["device"].as_array().unwrap();
        let told: Vec<_> = devices
            .iter()
            .map(|d| (d["device"].as_str().unwrap(), d["read"].as_integer().unwrap()))
            .collect();
        assert_eq!(told, [("8:0", 3), ("model", 2)]);
        assert!(
            third.contains("base-latency-read = 0") && third.contains("read-per-mib"),
            "{third}"
        );
    }

    #[test]
    fn what_is_written_is_read() {
        let path =
            std::env::temp_dir().join(format!("blockyard-costs-{}.toml", std::process::id()));
        let full = |name: &str, read| DeviceCosts {
            read_sequential: 1,
            write: 2,
            write_sequential: 3,
            flush: 4,
            discard: 5,
            write_zeroes: 6,
            ..device(name, read)
        };
        for read in [7, 8] {
            full("8:0", read).save(&path).unwrap();
        }
        full("model", 9).save(&path).unwrap();
        assert_eq!(read(&path).unwrap(), [full("8:0", 8), full("model", 9)]);
        assert_eq!(DeviceCosts::load(&path, "model").unwrap().costs().read, 9);
        let wrong = |text: &str| {
            std::fs::write(&path, text).unwrap();
            format!("{:#}", read(&path).unwrap_err())
        };
        assert!(
            DeviceCosts::load(&path, "8:1")
                .unwrap_err()
                .to_string()
                .contains("nothing of device 8:1")
        );
        assert!(wrong("\n[[device]]\ndevice = \"a\"\n").contains("line 2: missing field"));
        let zero = device("a", 0).put("").unwrap();
        assert!(wrong(&zero).contains("at least 1 ns"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn costs_are_those_of_the_measured_device() {
        let devices = std::fs::read_dir("/sys/dev/block").unwrap().flatten();
        let keys: Vec<_> = devices.filter_map(|e| e.file_name().into_string().ok()).collect();
        // A device may be removed meanwhile.
        let known = keys.into_iter().map(|key| (describe(&key), key));
        let known: Vec<_> = known.filter(|(now, _)| !now.is_empty()).collect();
        assert!(!known.is_empty());
        for (now, key) in known {
            let noted = |description: &str| {
                let description = description.into();
                DeviceCosts { description, ..device(&key, 1) }.is_of_another()
            };
            let first = now.split(' ').next().unwrap();
            assert_eq!([&*now, first, "", "sdz other"].map(noted), [false, false, false, true]);
        }
        assert!(!device("model", 1).is_of_another(), "a name is no number");
    }

    #[test]
    fn what_is_no_file_of_costs_is_left_alone() {
        assert!(device("a", 1).put("device = 3\n").unwrap_err().to_string().contains("[[device]]"));
        assert!(device("a", 1).put("[[device").is_err());
    }
}
