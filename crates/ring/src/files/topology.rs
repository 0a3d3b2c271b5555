//! The block device under a file, as sysfs describes it.
//!
//! In: an open file. Out: its [`Topology`]. Files on one device share it: sysfs is read once while
//! any of them is open, because that takes 30 system calls. The device of a mounted file system
//! keeps its number and its block sizes.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::FileType;

/// Limits and topology of the storage under an image, in bytes; 0 means unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub logical_block: u32,
    pub physical_block: u32,
    /// Smallest I/O that causes no read-modify-write below (a RAID chunk).
    pub minimum_io: u32,
    /// I/O size that keeps the whole device busy (a RAID stripe).
    pub optimal_io: u32,
    /// Offset of the first physical block in the image.
    pub alignment_offset: u32,
    /// Alignment that O_DIRECT requires of addresses, and of offsets and lengths; 0 if O_DIRECT is
    /// not supported.
    pub direct_memory: u32,
    pub direct_offset: u32,
    pub rotational: bool,
}

/// The default is the geometry of unknown storage.
impl Default for Geometry {
    fn default() -> Self {
        Geometry {
            logical_block: 512,
            physical_block: 4096,
            minimum_io: 4096,
            optimal_io: 0,
            alignment_offset: 0,
            direct_memory: 1,
            direct_offset: 1,
            rotational: false,
        }
    }
}

/// What sysfs says about a block device. Keep it as long as the file is open.
#[derive(Debug)]
pub struct Topology {
    /// The alignment for O_DIRECT is not known here: it may differ between files.
    pub(crate) device: Geometry,
}

/// The devices of the open files, and the size of a file system's blocks.
type Known = HashMap<(u64, u32), Weak<Topology>>;

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

impl Topology {
    /// Returns the topology of the device `fd`, or of the device under the file `fd`.
    pub fn of(fd: impl AsFd) -> io::Result<Arc<Self>> {
        let stat = rustix::fs::fstat(fd)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
            return Ok(Arc::new(Topology { device: read(stat.st_rdev) }));
        }
        let block = u32::try_from(stat.st_blksize).unwrap_or(4096);
        let key = (stat.st_dev, block);
        // Other threads wait: most of them have a file on the same device.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = known.get_or_insert_default();
        if let Some(topology) = known.get(&key).and_then(Weak::upgrade) {
            return Ok(topology);
        }
        known.retain(|_, topology| topology.strong_count() > 0);
        let topology = Arc::new(Topology { device: under_files(read(stat.st_dev), block) });
        known.insert(key, Arc::downgrade(&topology));
        Ok(topology)
    }
}

/// Reads what sysfs says about a device.
fn read(dev: u64) -> Geometry {
    let folder = device_folder(dev);
    let folder = folder.as_deref();
    let read = |name: &str| folder.and_then(|f| read_number(&f.join(name))).unwrap_or(0);
    let logical = read("queue/logical_block_size").max(512);
    Geometry {
        logical_block: logical,
        physical_block: read("queue/physical_block_size").max(logical),
        minimum_io: read("queue/minimum_io_size"),
        optimal_io: read("queue/optimal_io_size"),
        alignment_offset: read("alignment_offset"),
        direct_memory: logical,
        direct_offset: logical,
        rotational: read("queue/rotational") == 1,
    }
}

/// Returns the geometry of files on a device. The file system decides where a file's blocks are:
/// sizes carry over, offsets do not. `block`: the size of the file system's blocks.
fn under_files(device: Geometry, block: u32) -> Geometry {
    let block = block.min(1 << 16).next_power_of_two().min(4096);
    let physical_block = device.physical_block.max(block);
    Geometry { alignment_offset: 0, physical_block, ..device }
}

/// Returns the sysfs folder of a block device; for a partition, its parent's, which has the queue.
/// `None`: there is no block device (tmpfs, NFS).
pub(crate) fn device_folder(dev: u64) -> Option<PathBuf> {
    // Resolve the last link only: each component would cost a system call.
    let links = Path::new("/sys/dev/block");
    let number = format!("{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let folder = links.join(std::fs::read_link(links.join(number)).ok()?);
    if folder.join("queue").exists() {
        Some(folder)
    } else {
        folder.parent().map(Path::to_path_buf)
    }
}

/// Most mapped devices one over the other. The kernel has no such limit, but no host has more.
const MOST_MAPPED: usize = 16;

/// Returns the sysfs folder of the device on which a mapped device lies, if that is one device. Its
/// folder `slaves` has a link to each device or partition below.
pub(crate) fn lowest_device(folder: PathBuf) -> PathBuf {
    let mut lowest = folder;
    for _ in 0..MOST_MAPPED {
        let Ok(below) = std::fs::read_dir(lowest.join("slaves")) else { break };
        let below: Vec<_> =
            below.filter_map(|entry| entry.ok()?.path().canonicalize().ok()).collect();
        let [one] = &below[..] else { break };
        lowest = match one.join("queue").exists() {
            true => one.clone(),
            // A partition.
            false => one.parent().map_or_else(|| one.clone(), Path::to_path_buf),
        };
    }
    lowest
}

pub(crate) fn read_number(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path)
        .ok()?
        .trim()
        .parse::<i64>()
        .ok()
        .and_then(|n| u32::try_from(n).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_on_one_device_share_its_topology_while_one_is_open() {
        let path = std::env::temp_dir().join(format!("topology-{}", std::process::id()));
        let (one, two) = (std::fs::File::create(&path).unwrap(), std::fs::File::open(&path));
        let first = Topology::of(&one).unwrap();
        let second = Topology::of(two.unwrap()).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(under_files(read(first_device(&one)), 4096), first.device);
        std::fs::remove_file(&path).unwrap();
    }

    fn first_device(file: &std::fs::File) -> u64 {
        rustix::fs::fstat(file).unwrap().st_dev
    }

    #[test]
    fn a_mapped_device_on_one_device_is_that_one() {
        let sys = std::env::temp_dir().join(format!("mapped-{}", std::process::id()));
        let folder = |name: &str| {
            std::fs::create_dir_all(sys.join(name)).unwrap();
            sys.join(name)
        };
        let (disk, other) = (folder("disk"), folder("other"));
        ["disk/queue", "disk/part", "other/queue"].iter().for_each(|name| drop(folder(name)));
        let mapped = |name: &str, below: &[&str]| {
            let slaves = folder(&format!("{name}/slaves"));
            folder(&format!("{name}/queue"));
            for name in below {
                let link = slaves.join(name.replace('/', "-"));
                std::os::unix::fs::symlink(sys.join(name), link).unwrap();
            }
            sys.join(name)
        };
        let volume = mapped("volume", &["disk/part"]);
        let encrypted = mapped("encrypted", &["volume"]);
        let raid = mapped("raid", &["disk", "other"]);
        let on_raid = mapped("on-raid", &["raid"]);
        for (device, expected) in [
            (&disk, &disk),
            (&other, &other),
            (&volume, &disk),
            (&encrypted, &disk),
            (&raid, &raid),
            (&on_raid, &raid),
        ] {
            assert_eq!(lowest_device(device.clone()), *expected);
        }
        std::fs::remove_dir_all(&sys).unwrap();
    }

    #[test]
    fn a_file_has_no_alignment_offset_and_at_least_its_file_systems_blocks() {
        let device = Geometry { alignment_offset: 512, physical_block: 512, ..Default::default() };
        let file = under_files(device, 3000);
        assert_eq!((file.alignment_offset, file.physical_block), (0, 4096));
        assert_eq!(
            under_files(Geometry { physical_block: 8192, ..device }, 1).physical_block,
            8192
        );
    }
}
