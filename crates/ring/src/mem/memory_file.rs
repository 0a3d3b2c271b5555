//! What a file of guest memory is stored in: memory, a local disk, or something else that supplies
//! its pages.

use std::os::fd::AsFd;

use rustix::fs::FileType;

/// What a file of guest memory is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFile {
    /// Memory of this host.
    Memory,
    /// A file system on a disk of this host, by name. Page faults may wait for the disk.
    Disk(&'static str),
    /// Any other file system: its name, or "unknown", and its number (statfs).
    Other(&'static str, u64),
    /// Not a regular file: a device, a pipe or a directory.
    NotRegular,
}

impl MemoryFile {
    /// Determines the storage of an open file.
    pub fn of(fd: impl AsFd) -> std::io::Result<MemoryFile> {
        let fd = fd.as_fd();
        // A device file reports the file system of its path, but its driver supplies its pages.
        let mode = rustix::fs::fstat(fd)?.st_mode;
        if FileType::from_raw_mode(mode) != FileType::RegularFile {
            return Ok(MemoryFile::NotRegular);
        }
        Ok(MemoryFile::of_type(rustix::fs::fstatfs(fd)?.f_type as u64 & 0xffff_ffff))
    }

    /// Maps the numbers of statfs(2).
    fn of_type(number: u64) -> MemoryFile {
        match number {
            0x0102_1994 | 0x9584_58f6 | 0x8584_58f6 => MemoryFile::Memory,
            0xef53 => MemoryFile::Disk("ext4"),
            0x5846_5342 => MemoryFile::Disk("XFS"),
            0x9123_683e => MemoryFile::Disk("Btrfs"),
            0xf2f5_2010 => MemoryFile::Disk("F2FS"),
            0x6573_5546 => MemoryFile::Other("FUSE", number),
            0x794c_7630 => MemoryFile::Other("overlayfs", number),
            0x6969 => MemoryFile::Other("NFS", number),
            0x0102_1997 => MemoryFile::Other("9p", number),
            0xff53_4d42 | 0xfe53_4d42 | 0x517b => MemoryFile::Other("CIFS", number),
            _ => MemoryFile::Other("unknown", number),
        }
    }
}

impl std::fmt::Display for MemoryFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MemoryFile::Memory => f.write_str("memory"),
            MemoryFile::Disk(name) => write!(f, "a file on {name}"),
            MemoryFile::Other(name, number) => {
                write!(f, "a file on a file system of type {number:#x} ({name})")
            }
            MemoryFile::NotRegular => f.write_str("something that is not a regular file"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_classified_by_what_supplies_pages() {
        let fuse = 0x6573_5546;
        assert_eq!(MemoryFile::of_type(fuse), MemoryFile::Other("FUSE", fuse));
        for local in [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010] {
            assert!(matches!(MemoryFile::of_type(local), MemoryFile::Disk(_)), "{local:#x}");
        }
        for other in [0x6969, 0x0102_1997, 0xff53_4d42, 0xfe53_4d42, 0x517b, 0x794c_7630, 0x9fa0, 0]
        {
            assert!(matches!(MemoryFile::of_type(other), MemoryFile::Other(..)), "{other:#x}");
        }
    }
}
