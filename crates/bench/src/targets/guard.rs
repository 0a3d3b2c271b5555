//! Checks before the first write whether it would destroy data on the target.
//!
//! In: a target and, for a device, its path. Out: an error that names the contents found. What must
//! hold: the signatures are those of images, and of libblkid's superblocks that today's guests and
//! hosts use. A target without any of them may still hold data. A plain file of zeroes or random
//! bytes passes.

use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Result;
use rustix::fs::OFlags;

use super::{Access, Target, TargetAddress};

/// Signatures: offset, the bytes at that offset, and the name of the contents.
const SIGNATURES: [(usize, &[u8], &str); 24] = [
    (0x438, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a btrfs file system"),
    (0x400, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    (0, b"hsqs", "a squashfs file system"),
    (0x52, b"FAT32", "a FAT file system"),
    (0x36, b"FAT", "a FAT file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (512, b"EFI PART", "a partition table (GPT)"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (0x1000, &[0xfc, 0x4e, 0x2b, 0xa9], "a member of an md RAID"),
    (0, b"OOOM", "a COW file"),
    (0, b"KDMV", "a VMDK image"),
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], "a VDI image"),
    (0, b"vhdxfile", "a VHDX image"),
    (3, b"-FVE-FS-", "a BitLocker volume"),
    (0x400, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS file system"),
    (0x1018, &[0xc6, 0x85, 0x73, 0xf6], "a bcache device or a bcachefs file system"),
    (0, b"bluestore block device", "an object store of Ceph"),
];
/// All signatures are below this offset in bytes.
pub const LOOKED_AT: usize = 0x11000;

/// Returns an error if the target holds data, or is a device in use. `path`: path of a file or
/// device. `bytes`: a buffer of at least [`LOOKED_AT`] bytes.
pub fn check(target: &mut dyn Target, path: Option<&Path>, bytes: &mut [u8]) -> Result<()> {
    if let Some(path) =
        path.filter(|p| std::fs::metadata(p).is_ok_and(|m| m.file_type().is_block_device()))
    {
        not_in_use(path)?;
    }
    let len = target.size().min(bytes.len() as u64) / target.block() * target.block();
    let bytes = &mut bytes[..len as usize];
    target.read(0, bytes)?;
    if let Some(what) = holds(bytes) {
        anyhow::bail!(
            "it holds {what}, which writing would destroy: pass --destroy to overwrite it"
        );
    }
    Ok(())
}

/// Opens a target that is not open yet, and calls [`check`].
pub fn check_unopened(place: &TargetAddress) -> Result<()> {
    let largest = LOOKED_AT as u64;
    let mut target =
        place.open(Access { writes: false, durable: false, direct: false, largest })?;
    let path = if let TargetAddress::File(path) = place { Some(path.as_path()) } else { None };
    check(&mut *target, path, &mut vec![0; LOOKED_AT])
}

/// Returns an error if the device is in use. The kernel refuses to open a device with O_EXCL while
/// it is mounted, used as swap, or part of another device.
fn not_in_use(path: &Path) -> Result<()> {
    let exclusive =
        std::fs::OpenOptions::new().read(true).custom_flags(OFlags::EXCL.bits() as i32).open(path);
    match exclusive {
        Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {
            anyhow::bail!(
                "the device is in use (mounted, swap, or part of another device): pass --destroy to overwrite it"
            )
        }
        _ => Ok(()),
    }
}

fn holds(bytes: &[u8]) -> Option<&'static str> {
    let found =
        SIGNATURES.iter().find(|(at, magic, _)| bytes.get(*at..at + magic.len()) == Some(magic));
    // Tests for a boot sector with a valid partition entry.
    let table = || {
        let sector = bytes.get(..512).filter(|s| s[510..] == [0x55, 0xaa])?;
        let entries = || sector[446..510].chunks(16);
        let sane = entries().all(|e| e[0] & 0x7f == 0) && entries().any(|e| e[4] != 0);
        sane.then_some("a partition table (DOS)")
    };
    found.map(|f| f.2).or_else(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_told() {
        let mut bytes = vec![0; LOOKED_AT];
        assert_eq!(holds(&bytes), None);
        assert_eq!(holds(&bytes[..512]), None);
        for (at, magic, what) in SIGNATURES {
            bytes.fill(0);
            bytes[at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(holds(&bytes), Some(what));
        }
        bytes.fill(0);
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(holds(&bytes), None, "no partition in it");
        bytes[450] = 0x83;
        assert_eq!(holds(&bytes), Some("a partition table (DOS)"));
    }
}
