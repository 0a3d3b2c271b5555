//! The note of a device: 64 bits of the server's choice, which the driver stores with the device.
//! They identify the disk, so that another server finds the device again.

use blockyard_ring::ublk::abi::DeviceInfo;

use super::UblkOptions;
use crate::fingerprint;

/// Returns the 64 bits for a device. The upper half identifies the disk, the lower half the image's
/// file if it is known.
pub(super) fn of(options: &UblkOptions) -> u64 {
    note_of(&options.identity, options.file)
}

fn note_of(identity: &str, file: Option<u64>) -> u64 {
    let disk = fingerprint::of(identity.bytes());
    file.map_or(disk, |file| disk & HALF | fingerprint::of(file.to_le_bytes()) & !HALF)
}

const HALF: u64 = !0 << 32;

/// Returns whether the device was made for this disk.
pub(super) fn is_ours(info: &DeviceInfo, options: &UblkOptions) -> bool {
    let is_earlier = |(identity, file): &(String, _)| info.note == note_of(identity, *file);
    (info.note ^ fingerprint::of(options.identity.bytes())) & HALF == 0
        || options.earlier.iter().any(is_earlier)
}

/// Returns whether the device was made for another file, which had the image's path then. (If a
/// device was made without a known file, its lower half is the lower half of the disk's hash.)
pub(super) fn is_other_file(info: &DeviceInfo, options: &UblkOptions) -> bool {
    options.file.is_some()
        && info.note != of(options)
        && info.note != fingerprint::of(options.identity.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::QueueShape;

    fn options(identity: &str, file: Option<u64>) -> UblkOptions {
        UblkOptions {
            id: None,
            shape: QueueShape { queues: 1, size: 1 },
            identity: identity.into(),
            file,
            earlier: Vec::new(),
        }
    }

    #[test]
    fn the_bits_of_a_disk_never_change() {
        assert_eq!(of(&options("", None)), 0xcbf2_9ce4_8422_2325);
        assert_eq!(of(&options("a", None)), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(of(&options("a", Some(1))), 0xaf63_dc4c_1d2a_efa4);
    }

    #[test]
    fn the_bits_identify_the_disk_and_the_file() {
        let device = |identity, file| DeviceInfo {
            note: of(&options(identity, file)),
            ..DeviceInfo::default()
        };
        let (first, second) = (options("/srv/a.img", Some(1)), options("/srv/a.img", Some(2)));
        let of_first = device("/srv/a.img", Some(1));
        assert!(is_ours(&of_first, &first) && !is_other_file(&of_first, &first));
        assert!(is_ours(&of_first, &second) && is_other_file(&of_first, &second));
        assert!(!is_ours(&device("/srv/b.img", Some(1)), &first));
        // The disk got a name, and its image is now below an overlay.
        let named =
            UblkOptions { earlier: vec![("/srv/a.img".into(), Some(1))], ..options("a.img", None) };
        assert!(is_ours(&of_first, &named) && !is_other_file(&of_first, &named));
        assert!(!is_ours(&device("/srv/a.img", Some(2)), &named));
        assert!(!is_ours(&of_first, &options("a.img", None)));
        // If the device or the options have no file, files are not compared.
        assert!(!is_other_file(&device("/srv/a.img", None), &first));
        assert!(!is_other_file(&of_first, &options("/srv/a.img", None)));
    }
}
