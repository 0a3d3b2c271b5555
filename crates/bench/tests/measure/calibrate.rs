//! `bench calibrate`: the file that it writes, and what it does not touch.

use std::path::Path;

use serde_json::Value;

use crate::common::{Finished, Folder, blockyard};

fn calibrate(target: &Path, costs: &Path, more: &[&str]) -> Finished {
    let fixed = [
        "bench",
        "calibrate",
        target.to_str().unwrap(),
        "--size",
        "64m",
        "--seconds",
        "1",
        "--rounds",
        "1",
    ];
    blockyard(fixed.iter().chain(&["-o", costs.to_str().unwrap()]).chain(more))
}

fn table(costs: &Path) -> toml::Table {
    std::fs::read_to_string(costs).unwrap().parse().unwrap()
}

#[test]
fn a_folders_device_is_calibrated_and_the_others_stay() {
    let folder = Folder::new();
    let (target, costs) = (folder.join("target"), folder.join("costs.toml"));
    std::fs::create_dir(&target).unwrap();
    std::fs::write(&costs, "[[device]]\ndevice = \"model\"\nread = 1\n").unwrap();
    let out = calibrate(&target, &costs, &[]).good();
    assert!(
        out.contains("window") && out.contains("flush") && !out.contains("not measured"),
        "{out}"
    );
    let names: Vec<_> = std::fs::read_dir(&target).unwrap().collect();
    assert!(names.is_empty(), "left behind: {names:?}");

    let file = table(&costs);
    let devices = file["device"].as_array().unwrap();
    assert_eq!((devices.len(), devices[0]["device"].as_str()), (2, Some("model")));
    let dev = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(&target).unwrap());
    let key = format!("{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let device = devices[1].as_table().unwrap();
    assert_eq!(device["device"].as_str(), Some(key.as_str()));
    let figure = |name: &str| device[name].as_integer().unwrap_or_else(|| panic!("no {name}"));
    for name in ["read", "write", "flush", "discard", "write-zeroes", "window", "base-latency-read"]
    {
        // If the machine stops meanwhile, the figures are too large: here only their presence
        // counts.
        assert!((1..1_000_000_000_000).contains(&figure(name)), "{name} is {}", figure(name));
    }
    // A second calibration replaces the entry of the same device.
    let json: Value =
        serde_json::from_str(&calibrate(&target, &costs, &["--json"]).good()).unwrap();
    let again = table(&costs);
    assert_eq!(again["device"].as_array().unwrap().len(), 2);
    assert_eq!(json["read"].as_i64(), again["device"][1]["read"].as_integer());
}

#[test]
fn what_is_not_its_own_is_only_read() {
    let folder = Folder::new();
    let (image, costs) = (folder.image("disk", 64 << 20), folder.join("costs.toml"));
    // Holes are read without the device.
    let sparse = calibrate(&image, &costs, &[]);
    assert!(sparse.err.contains("it has a hole at byte 0") && !costs.exists(), "{}", sparse.err);
    // The magic number of ext4, in a file without holes.
    let mut bytes = vec![7; 64 << 20];
    bytes[0x438..0x43a].copy_from_slice(&[0x53, 0xef]);
    std::fs::write(&image, bytes).unwrap();
    let before = std::fs::read(&image).unwrap();
    let out = calibrate(&image, &costs, &[]).good();
    assert!(out.contains("not measured: in the proportion of the defaults"), "{out}");
    assert!(std::fs::read(&image).unwrap() == before, "it was written to");
    let refused = calibrate(&image, &costs, &["--writes"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.err.contains("ext4") && refused.err.contains("--destroy"), "{}", refused.err);
    assert!(std::fs::read(&image).unwrap() == before, "it was written to");
    calibrate(&image, &costs, &["--writes", "--destroy"]).good();
    assert!(std::fs::read(&image).unwrap() != before, "nothing was written");

    std::fs::write(&costs, "device = 3\n").unwrap();
    let refused = calibrate(&image, &costs, &[]);
    assert!(refused.err.contains("costs.toml is no file of costs"), "{}", refused.err);
    assert_eq!(std::fs::read_to_string(&costs).unwrap(), "device = 3\n");
    let small = folder.image("small", 1 << 20);
    assert!(calibrate(&small, &costs, &[]).err.contains("too small"), "a small file");
    assert!(calibrate(Path::new("/nonexistent/x"), &costs, &[]).err.contains("/nonexistent/x"));
}
