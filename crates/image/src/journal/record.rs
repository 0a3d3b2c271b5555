//! One change of metadata, as four words.
//!
//! ```text
//!   word 0   checksum (bits 8 to 63), kind (bits 0 to 7)
//!   word 1   key: number of the guest cluster, L1 index, first sector
//!   word 2   new value: L2 entry, L1 entry, number of sectors
//!   word 3   second word of an extended L2 entry, else 0
//! ```
//!
//! The checksum covers the session, the half's generation and the record's slot, so that no record
//! of an earlier use of the memory counts. It does not protect against forged records:
//! only the server's own user can write to the folder.

/// Number of words of a record.
pub const WORDS: usize = 4;

/// What a record changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// The L2 entry of a guest cluster.
    Cluster(u64),
    /// An entry of the L1 table, by index.
    Table(u64),
    /// Sectors of a COW file, from this one on, that are stored in it now.
    Sector(u64),
}

/// A change: the key, and its new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub key: Key,
    pub value: [u64; 2],
}

impl Key {
    fn parts(self) -> (u64, u64) {
        match self {
            Key::Cluster(number) => (1, number),
            Key::Table(index) => (2, index),
            Key::Sector(first) => (3, first),
        }
    }

    fn from_parts(kind: u64, number: u64) -> Option<Self> {
        match kind {
            1 => Some(Key::Cluster(number)),
            2 => Some(Key::Table(number)),
            3 => Some(Key::Sector(number)),
            _ => None,
        }
    }
}

impl Record {
    /// Returns the words of the record in `slot` of a half with this salt.
    #[inline]
    pub fn encode(&self, salt: u64, slot: u64) -> [u64; WORDS] {
        let ((kind, number), [first, second]) = (self.key.parts(), self.value);
        [checksum(salt, slot, [kind, number, first, second]) | kind, number, first, second]
    }

    /// Returns the record in `slot`. `None`: the words are no record of this half.
    pub fn decode(words: [u64; WORDS], salt: u64, slot: u64) -> Option<Self> {
        let [head, number, first, second] = words;
        let kind = head & 0xff;
        if head & !0xff != checksum(salt, slot, [kind, number, first, second]) {
            return None;
        }
        Some(Record { key: Key::from_parts(kind, number)?, value: [first, second] })
    }
}

/// Returns the salt of a half: it differs between sessions and between uses of the half.
pub fn salt(session: u128, generation: u64) -> u64 {
    mix(mix(session as u64, (session >> 64) as u64), generation)
}

#[inline]
fn checksum(salt: u64, slot: u64, words: [u64; WORDS]) -> u64 {
    words.into_iter().fold(mix(salt, slot), mix) & !0xff
}

/// Mixes a word into a hash: a multiplication, and the upper half of the product into the lower.
#[inline]
fn mix(hash: u64, word: u64) -> u64 {
    let product =
        (hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xd6e8_feb8_6659_fd93);
    product ^ product >> 32
}

/// Returns the words of bytes in native order, as [`SharedWords`] stores them.
pub fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks_exact(8)
        .map(|chunk| u64::from_ne_bytes(chunk.try_into().expect("eight bytes")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: Record = Record { key: Key::Cluster(7), value: [0x8000_0000_0005_0000, 3] };

    #[test]
    fn a_record_is_read_as_it_was_written() {
        for key in [Key::Cluster(1 << 40), Key::Table(3), Key::Sector(u64::MAX)] {
            let record = Record { key, ..RECORD };
            assert_eq!(Record::decode(record.encode(5, 9), 5, 9), Some(record));
        }
    }

    #[test]
    fn a_record_counts_only_in_its_own_half_and_slot() {
        let words = RECORD.encode(5, 9);
        assert_eq!(Record::decode(words, 6, 9), None);
        assert_eq!(Record::decode(words, 5, 8), None);
        assert_eq!(Record::decode([0; WORDS], 5, 9), None);
        assert_ne!(salt(1, 2), salt(1, 3));
        assert_ne!(salt(1, 2), salt(1 << 64 | 1, 2));
    }

    #[test]
    fn a_changed_bit_is_noticed() {
        let words = RECORD.encode(5, 9);
        for bit in 0..64 * WORDS {
            let mut changed = words;
            changed[bit / 64] ^= 1 << (bit % 64);
            assert_eq!(Record::decode(changed, 5, 9), None, "bit {bit}");
        }
    }
}
