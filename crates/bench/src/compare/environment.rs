//! The environment of a measurement, which each report states.

use std::path::Path;
use std::process::Command;

/// Returns names and values that describe the environment, for people.
pub fn environment(image_folder: &Path, guests: Option<&Path>) -> Vec<(String, String)> {
    let first = |path: &str, prefix: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|l| l.starts_with(prefix)).unwrap_or_default();
        line.split_once(':').map_or(line, |(_, value)| value).trim().to_string()
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all = vec![
        ("date", output(Command::new("date").args(["-u", "+%F %H:%M UTC"]))),
        ("kernel", first("/proc/sys/kernel/osrelease", "")),
        ("processors", format!("{processors} x {}", first("/proc/cpuinfo", "model name"))),
        ("memory", first("/proc/meminfo", "MemTotal")),
        ("disk", disk(image_folder)),
        ("blockyard", env!("CARGO_PKG_VERSION").to_string()),
    ];
    if let Some(guests) = guests {
        let version = |name: &str, option: &str| {
            output(Command::new(guests.join("tool")).args([name, option]))
        };
        all.push(("QEMU", version("qemu-storage-daemon", "--version")));
        all.push(("fio", version("fio", "--version")));
    }
    all.into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name.to_string(), value))
        .collect()
}

/// Returns the first line that a command prints. Empty: it failed.
fn output(command: &mut Command) -> String {
    let out = command
        .output()
        .map(|o| String::from_utf8_lossy(&o.stdout).into_owned())
        .unwrap_or_default();
    out.lines().next().unwrap_or_default().trim().to_string()
}

/// Returns the file system and the device of a folder.
fn disk(folder: &Path) -> String {
    output(Command::new("findmnt").args(["-no", "FSTYPE,SOURCE", "--target"]).arg(folder))
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" on ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn the_environment_names_the_machine_and_the_tools_that_it_has() {
        let scratch = Scratch::new();
        let names =
            |all: &[(String, String)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let facts = environment(&scratch, None);
        let value = |name: &str| &facts.iter().find(|(n, _)| n == name).unwrap().1;
        assert_eq!(value("blockyard"), env!("CARGO_PKG_VERSION"));
        assert!(value("memory").ends_with(" kB"), "{}", value("memory"));
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(value("kernel"), kernel.trim());
        assert!(!names(&facts).contains(&"fio".into()));
        // The guests' tree has fio and no QEMU.
        scratch.script("tool", "[[ $1 == fio ]] && echo fio-3.36 || exit 1");
        let facts = environment(&scratch, Some(&scratch));
        assert!(facts.contains(&("fio".into(), "fio-3.36".into())), "{facts:?}");
        assert!(!names(&facts).contains(&"QEMU".into()), "{facts:?}");
    }
}
