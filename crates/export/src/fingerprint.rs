//! A hash that is the same in every build of this program. A server uses it to name objects that
//! the next server must recognise, such as the disk of a ublk device.

/// Returns the FNV-1a hash of `bytes` (64 bits).
pub fn of(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}
