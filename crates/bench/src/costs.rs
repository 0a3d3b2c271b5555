//! The file of what operations cost devices: written by `bench calibrate`, read by `serve --costs`.
//!
//! In: the costs of a device. Out: TOML, one `[[device]]` table a device. What must hold: writing one device's keeps those of
//! the others, and a power cut leaves the file as it was, or as it was to be.

use std::path::Path;

use anyhow::{Context, Result};
use blockyard_sched::Costs;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// Where it is when nothing else is said.
pub const USUAL: &str = "/var/lib/blockyard/costs.toml";

/// One `[[device]]`; all but the first two in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeviceCosts {
    /// `MAJOR:MINOR`, or a name.
    pub device: String,
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
    /// The cost of what must be in flight for 98% of the most that the device can do.
    pub window: u64,
    /// Of 4 KiB, when nothing else is in flight.
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

    /// Puts it into the file, in the place of what is there of the same device.
    pub fn save(&self, path: &Path) -> Result<()> {
        let name = || path.display().to_string();
        let text = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.with_context(|| format!("reading {}", name()))?,
        };
        let text = self.put(&text).with_context(|| format!("{} is no file of costs", name()))?;
        replace(path, text.as_bytes()).with_context(|| format!("writing {}", name()))
    }

    /// The text with this device's costs in it.
    fn put(&self, text: &str) -> Result<String> {
        let mut all: Table = text.parse()?;
        let devices = all.entry("device").or_insert_with(|| Value::Array(Vec::new()));
        let devices = devices.as_array_mut().context("\"device\" is not an array of tables: [[device]]")?;
        let own = Value::try_from(self)?;
        let same = |value: &&mut Value| value.get("device").and_then(Value::as_str) == Some(&self.device);
        match devices.iter_mut().find(same) {
            Some(place) => *place = own,
            None => devices.push(own),
        }
        Ok(toml::to_string(&all)?)
    }

    /// What the file says of a device.
    pub fn load(path: &Path, device: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct File {
            #[serde(default)]
            device: Vec<DeviceCosts>,
        }
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let file: File = toml::from_str(&text).with_context(|| format!("{} is no file of costs", path.display()))?;
        let found = file.device.into_iter().find(|d| d.device == device);
        found.with_context(|| format!("{} says nothing of device {device}: run bench calibrate", path.display()))
    }
}

/// The new contents, or the old ones, whatever happens.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let name = path.file_name().context("that is no file's name")?.to_string_lossy();
    let new = folder.join(format!(".{name}.{}", std::process::id()));
    let write = || {
        let mut file = std::fs::File::create(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        anyhow::Ok(std::fs::File::open(folder)?.sync_all()?)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&new)))
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
        let told: Vec<_> =
            devices.iter().map(|d| (d["device"].as_str().unwrap(), d["read"].as_integer().unwrap())).collect();
        assert_eq!(told, [("8:0", 3), ("model", 2)]);
        assert!(third.contains("base-latency-read = 0") && third.contains("read-per-mib"), "{third}");
    }

    #[test]
    fn what_is_no_file_of_costs_is_left_alone() {
        assert!(device("a", 1).put("device = 3\n").unwrap_err().to_string().contains("[[device]]"));
        assert!(device("a", 1).put("[[device").is_err());
    }
}
