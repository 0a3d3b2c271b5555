//! The size of a disk that is a part of its name, such as `ram:64M`.

use blockyard_sched::parse_size;

use crate::SECTOR;

/// A name does not have the size of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a size is a number of bytes with an optional suffix k, M, G or T (powers of 1024), at least \
     512 and below 2^62"
)]
pub struct SizeError;

/// Returns the size in bytes of a disk: that of the text, in whole sectors.
pub fn disk_size(text: &str) -> Result<u64, SizeError> {
    let size = parse_size(text).filter(|size| (SECTOR..1 << 62).contains(size)).ok_or(SizeError)?;
    Ok(size & !(SECTOR - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_whole_sectors_at_least_one_and_fewer_than_2_to_the_62_bytes() {
        let cases = [
            ("512", 512),
            ("1023", 512),
            ("64M", 64 << 20),
            ("4611686018427387903", (1 << 62) - 512),
        ];
        for (text, size) in cases {
            assert_eq!(disk_size(text), Ok(size), "{text}");
        }
        for text in ["", "M", "511", "0", "+1M", "-1M", "1.5M", "4611686018427387904", "4194304T"] {
            assert_eq!(disk_size(text), Err(SizeError), "{text}");
        }
    }
}
