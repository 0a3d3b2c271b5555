//! The snapshot table: consecutive entries of variable length.
//!
//! In: the bytes that the header points to. Out: the entries; unknown fields are preserved.
//! Invariants: an entry lies inside the file, and the table has at most 64 MiB.

use blockyard_storage::Storage;

use super::bytes::{self, be16, be32, be64};
use super::header::{Header, MAX_L1_BYTES, MAX_SNAPSHOT_TABLE_BYTES};
use crate::error::ImageError;
use crate::raw::Raw;

const FIXED: usize = 40;
/// Known extra data: size of the VM state (64 bits) and size of the disk, in bytes.
const KNOWN_EXTRA: usize = 16;
const MAX_EXTRA: usize = 1024;

/// An entry with more extra data than any known version has.
#[derive(Debug, thiserror::Error)]
#[error("it has {0} bytes of extra data: at most {MAX_EXTRA} are allowed")]
struct TooMuchExtra(usize);
const PIECE: u64 = 1 << 16;

/// What is wrong with the L1 table of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum L1Fault {
    #[error("its L1 table has {0} entries: at most 32 MiB are allowed")]
    TooLong(u32),
    #[error("its L1 table's offset {0} is not aligned to a cluster")]
    Unaligned(u64),
}

/// An internal snapshot (specification, "Snapshots").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub l1_offset: u64,
    /// Number of entries of the L1 table.
    pub l1_size: u32,
    /// Names are bytes; they are shown as UTF-8 if they are valid.
    pub id: Vec<u8>,
    pub name: Vec<u8>,
    /// Time when the snapshot was taken, in seconds since 1970.
    pub seconds: u32,
    pub nanoseconds: u32,
    /// Time that the VM had run, in nanoseconds.
    pub vm_clock: u64,
    pub vm_state_size: u64,
    /// Size of the disk in bytes. None in old images, in which the disk's size never changed.
    pub disk_size: Option<u64>,
    /// Unknown extra data.
    pub extra: Vec<u8>,
}

impl Snapshot {
    pub fn id(&self) -> String {
        String::from_utf8_lossy(&self.id).into_owned()
    }

    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    /// Returns what is wrong with the offset or size of the snapshot's L1 table.
    pub fn l1_fault(&self, header: &Header) -> Option<L1Fault> {
        let bytes = u64::from(self.l1_size) * 8;
        if bytes > MAX_L1_BYTES {
            return Some(L1Fault::TooLong(self.l1_size));
        }
        if !self.l1_offset.is_multiple_of(header.cluster_size()) {
            return Some(L1Fault::Unaligned(self.l1_offset));
        }
        None
    }

    /// Decodes the entry at the start of `bytes`; returns the entry and its length. None: the entry
    /// is longer than `bytes`.
    fn decode(bytes: &[u8]) -> Option<Result<(Snapshot, usize), TooMuchExtra>> {
        let fixed = bytes.get(..FIXED)?;
        let (id_len, name_len, extra_len) =
            (be16(fixed, 12) as usize, be16(fixed, 14) as usize, be32(fixed, 36) as usize);
        if extra_len > MAX_EXTRA {
            return Some(Err(TooMuchExtra(extra_len)));
        }
        let extra = bytes.get(FIXED..FIXED + extra_len)?;
        let id = bytes.get(FIXED + extra_len..)?.get(..id_len)?;
        let name = bytes.get(FIXED + extra_len + id_len..)?.get(..name_len)?;
        let large_state = extra.get(..8).map(|e| be64(e, 0));
        let snapshot = Snapshot {
            l1_offset: be64(fixed, 0),
            l1_size: be32(fixed, 8),
            id: id.to_vec(),
            name: name.to_vec(),
            seconds: be32(fixed, 16),
            nanoseconds: be32(fixed, 20),
            vm_clock: be64(fixed, 24),
            vm_state_size: large_state.unwrap_or_else(|| be32(fixed, 32).into()),
            disk_size: extra.get(8..16).map(|e| be64(e, 0)),
            extra: extra.get(KNOWN_EXTRA..).unwrap_or_default().to_vec(),
        };
        Some(Ok((snapshot, (FIXED + extra_len + id_len + name_len).next_multiple_of(8))))
    }

    /// Encodes the entry with padding. `disk_size` is stored if the entry has no size of the disk.
    fn encode(&self, out: &mut Vec<u8>, disk_size: u64) {
        let small_state = u32::try_from(self.vm_state_size).unwrap_or(0);
        out.extend_from_slice(&self.l1_offset.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&(self.id.len() as u16).to_be_bytes());
        out.extend_from_slice(&(self.name.len() as u16).to_be_bytes());
        out.extend_from_slice(&self.seconds.to_be_bytes());
        out.extend_from_slice(&self.nanoseconds.to_be_bytes());
        out.extend_from_slice(&self.vm_clock.to_be_bytes());
        out.extend_from_slice(&small_state.to_be_bytes());
        out.extend_from_slice(&((KNOWN_EXTRA + self.extra.len()) as u32).to_be_bytes());
        out.extend_from_slice(&self.vm_state_size.to_be_bytes());
        out.extend_from_slice(&self.disk_size.unwrap_or(disk_size).to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.name);
        out.resize(out.len().next_multiple_of(8), 0);
    }
}

/// Reads the table: its entries, and its length in bytes.
pub async fn read(file: &Raw, header: &Header) -> Result<(Vec<Snapshot>, u64), ImageError> {
    let entry = |index: usize, at: u64, what: String| {
        ImageError::invalid(name_of(index), header.snapshots_offset + at, what)
    };
    let io = |at: u64| move |e| ImageError::io("qcow2 snapshot table", at, "reading", e);
    let file_len = file.storage().len().await.map_err(io(0))?;
    let room = MAX_SNAPSHOT_TABLE_BYTES.min(file_len.saturating_sub(header.snapshots_offset));
    let (mut table, mut at, mut snapshots) = (Vec::new(), 0, Vec::new());
    while snapshots.len() < header.snapshot_count as usize {
        match Snapshot::decode(&table[at..]) {
            Some(Ok((snapshot, len))) if at + len <= table.len() || table.len() as u64 == room => {
                snapshots.push(snapshot);
                at = (at + len).min(table.len());
            }
            Some(Err(e)) => return Err(entry(snapshots.len(), at as u64, e.to_string())),
            _ if table.len() as u64 == room => {
                let what =
                    "it ends beyond the end of the file, or the table takes more than 64 MiB"
                        .into();
                return Err(entry(snapshots.len(), at as u64, what));
            }
            _ => {
                let (from, len) = (table.len() as u64, PIECE.min(room - table.len() as u64));
                let offset = header.snapshots_offset + from;
                table.extend(bytes::read(file, offset, len as usize).await.map_err(io(offset))?);
            }
        }
    }
    Ok((snapshots, at as u64))
}

fn name_of(index: usize) -> String {
    format!("qcow2 snapshot table entry {index}")
}

/// Encodes a table of these entries.
pub fn encode(snapshots: &[Snapshot], disk_size: u64) -> Result<Vec<u8>, ImageError> {
    let mut out = Vec::new();
    snapshots.iter().for_each(|snapshot| snapshot.encode(&mut out, disk_size));
    if out.len() as u64 > MAX_SNAPSHOT_TABLE_BYTES {
        let what = format!("it would take {} bytes: at most 64 MiB are allowed", out.len());
        return Err(ImageError::refused("qcow2 snapshot table", what));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot() -> Snapshot {
        Snapshot {
            l1_offset: 0x50000,
            l1_size: 7,
            id: b"12".to_vec(),
            name: "näme\u{7f}".into(),
            seconds: 1,
            nanoseconds: 2,
            vm_clock: 3,
            vm_state_size: 1 << 40,
            disk_size: Some(1 << 30),
            extra: b"of a later version".to_vec(),
        }
    }

    #[test]
    fn encoded_entries_decode_to_the_same() {
        let bytes = encode(&[snapshot(), Snapshot { extra: Vec::new(), ..snapshot() }], 5).unwrap();
        let (first, len) = Snapshot::decode(&bytes).unwrap().unwrap();
        let (second, end) = Snapshot::decode(&bytes[len..]).unwrap().unwrap();
        assert_eq!((first, second), (snapshot(), Snapshot { extra: Vec::new(), ..snapshot() }));
        assert_eq!(len + end, bytes.len());
    }

    #[test]
    fn old_entries_lack_extra_data() {
        let mut bytes = encode(&[Snapshot { extra: Vec::new(), ..snapshot() }], 5).unwrap();
        bytes[32..36].copy_from_slice(&77u32.to_be_bytes());
        bytes[36..40].fill(0);
        bytes.drain(40..56);
        let (old, _) = Snapshot::decode(&bytes).unwrap().unwrap();
        assert_eq!((old.vm_state_size, old.disk_size, old.id()), (77, None, "12".into()));
        let written = encode(&[old], 5).unwrap();
        assert_eq!(Snapshot::decode(&written).unwrap().unwrap().0.disk_size, Some(5));
    }

    #[test]
    fn truncated_entries_are_not_decoded() {
        let bytes = encode(&[snapshot()], 0).unwrap();
        let whole = FIXED + 16 + 18 + 2 + 6;
        assert!((0..whole).all(|len| Snapshot::decode(&bytes[..len]).is_none()));
        assert!(Snapshot::decode(&bytes[..whole]).unwrap().is_ok());
        let mut much = bytes.clone();
        much[36] = 0xff;
        assert!(Snapshot::decode(&much).unwrap().unwrap_err().to_string().contains("extra data"));
    }
}
