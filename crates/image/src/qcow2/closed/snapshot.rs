//! Internal snapshots: another L1 table that keeps clusters as they were.
//!
//! In: a closed image, held exclusively. Out: the same image with a snapshot added, removed or
//! applied. For power cuts see `super::change`.

use std::time::Duration;

use super::bitmap;
use super::change::OfflineChange;
use crate::error::ImageError;
use crate::qcow2::encoding::bytes::{be64, put64};
use crate::qcow2::encoding::entry::{COPIED, EntryFormat, L1Entry};
use crate::qcow2::encoding::file::{length, read_l1};
use crate::qcow2::encoding::header::{AUTOCLEAR_KNOWN, Header, MAX_L1_BYTES, MAX_SNAPSHOTS};
use crate::qcow2::encoding::snapshot_table::{self, Snapshot};
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 snapshots";

/// Returns the snapshots of an image, oldest first.
pub async fn list(file: &Raw) -> Result<Vec<Snapshot>, ImageError> {
    let header = Header::read(file).await?;
    Ok(snapshot_table::read(file, &header).await?.0)
}

/// Takes a snapshot of the disk. `taken`: time since 1970.
pub async fn create(file: &Raw, name: &str, taken: Duration) -> Result<Snapshot, ImageError> {
    let change = OfflineChange::begin(file).await?;
    let mut new = change.old.clone();
    if new.has_data_file() {
        return Err(ImageError::unsupported(
            STRUCTURE,
            "an image with an external data file cannot have snapshots",
        ));
    }
    let (mut snapshots, _) = snapshot_table::read(file, &new).await?;
    let same = snapshots.iter().any(|s| s.name == name.as_bytes());
    if same || name.is_empty() || name.len() > usize::from(u16::MAX) {
        let what = if same {
            "a snapshot with this name exists"
        } else {
            "a name must have 1 to 65535 bytes"
        };
        return Err(ImageError::refused(STRUCTURE, format!("\"{name}\": {what}")));
    }
    if snapshots.len() >= MAX_SNAPSHOTS as usize {
        return Err(ImageError::refused(
            STRUCTURE,
            format!("the image has {MAX_SNAPSHOTS} snapshots, the most that are allowed"),
        ));
    }
    let numbers = snapshots.iter().filter_map(|s| s.id().parse::<u64>().ok());
    let mut snapshot = Snapshot {
        l1_offset: 0,
        l1_size: new.l1_size,
        id: (numbers.max().unwrap_or(0).wrapping_add(1)).to_string().into_bytes(),
        name: name.into(),
        seconds: taken.as_secs() as u32,
        nanoseconds: taken.subsec_nanos(),
        vm_clock: 0,
        vm_state_size: 0,
        disk_size: Some(new.size),
        extra: Vec::new(),
    };
    let l1 = without_flags(change.l1().await?, EntryFormat::of(&new))?;
    let l1_clusters = (l1.len() as u64).div_ceil(new.cluster_size());
    // The table's length does not depend on the offset of the L1 table.
    snapshots.push(snapshot.clone());
    let len = snapshot_table::encode(&snapshots, new.size)?.len() as u64;
    snapshot.l1_offset = change.find_free(l1_clusters + len.div_ceil(new.cluster_size())).await?;
    new.snapshots_offset = snapshot.l1_offset + l1_clusters * new.cluster_size();
    new.snapshot_count += 1;
    *snapshots.last_mut().expect("it was pushed") = snapshot.clone();
    change.write("qcow2 L1 table of a snapshot", snapshot.l1_offset, &l1).await?;
    change
        .write(
            "qcow2 snapshot table",
            new.snapshots_offset,
            &snapshot_table::encode(&snapshots, new.size)?,
        )
        .await?;
    change.switch(new).await?;
    Ok(snapshot)
}

/// Restores the disk from a snapshot, including its size. The snapshot stays.
pub async fn apply(file: &Raw, name: &str) -> Result<(), ImageError> {
    let change = OfflineChange::begin(file).await?;
    let mut new = change.old.clone();
    let (snapshots, _) = snapshot_table::read(file, &new).await?;
    let snapshot = &snapshots[find(&snapshots, name)?];
    if let Some(fault) = snapshot.l1_fault(&new) {
        return Err(ImageError::invalid("qcow2 snapshot", snapshot.l1_offset, fault.to_string()));
    }
    new.size = snapshot.disk_size.unwrap_or(new.size);
    if new.size != change.old.size && new.bitmaps.is_some() {
        let names = bitmap::names(file, &new).await?.join("\", \"");
        let what = format!(
            "\"{name}\" and the disk differ in size, so the bitmaps \"{names}\" do not fit: \
             remove them first"
        );
        return Err(ImageError::refused(STRUCTURE, what));
    }
    let entries = new.l1_needed(new.size).max(u64::from(snapshot.l1_size)).max(1);
    if entries * 8 > MAX_L1_BYTES {
        return Err(ImageError::invalid(
            "qcow2 snapshot",
            snapshot.l1_offset,
            "its disk is too large for an L1 table",
        ));
    }
    let mut l1 = read_l1(file, snapshot.l1_offset, snapshot.l1_size.into()).await?;
    l1 = without_flags(l1, EntryFormat::of(&new))?;
    l1.resize(entries as usize * 8, 0);
    new.l1_size = entries as u32;
    new.l1_offset = change.find_free((entries * 8).div_ceil(new.cluster_size())).await?;
    change.write("qcow2 L1 table", new.l1_offset, &l1).await?;
    // Mark the bitmaps: the disk changes without a write that a bitmap could record.
    let mut marked = change.old.clone();
    bitmap::prepare_for_writing(file, &mut marked, AUTOCLEAR_KNOWN).await?;
    change.switch(new).await.map(|_| ())
}

/// Changes `header` to show the disk of a snapshot, for a read-only image.
pub async fn show(file: &Raw, header: &mut Header, name: &str) -> Result<(), ImageError> {
    let (snapshots, _) = snapshot_table::read(file, header).await?;
    let snapshot = &snapshots[find(&snapshots, name)?];
    if let Some(fault) = snapshot.l1_fault(header) {
        return Err(ImageError::invalid("qcow2 snapshot", snapshot.l1_offset, fault.to_string()));
    }
    header.size = snapshot.disk_size.unwrap_or(header.size);
    if header.l1_needed(header.size) > u64::from(snapshot.l1_size) {
        let what = format!("its L1 table is too short for a disk of {} bytes", header.size);
        return Err(ImageError::invalid("qcow2 snapshot", snapshot.l1_offset, what));
    }
    // Bytes behind the end read as zeroes, so a truncated image would show an empty disk.
    let end = snapshot.l1_offset.saturating_add(u64::from(snapshot.l1_size) * 8);
    if end > length(file).await? {
        let what = "its L1 table ends beyond the end of the file: the file is truncated";
        return Err(ImageError::invalid("qcow2 snapshot", snapshot.l1_offset, what));
    }
    (header.l1_offset, header.l1_size) = (snapshot.l1_offset, snapshot.l1_size);
    Ok(())
}

/// Removes a snapshot; clusters that only it used become free.
pub async fn delete(file: &Raw, name: &str) -> Result<(), ImageError> {
    let change = OfflineChange::begin(file).await?;
    let mut new = change.old.clone();
    let (mut snapshots, _) = snapshot_table::read(file, &new).await?;
    snapshots.remove(find(&snapshots, name)?);
    new.snapshot_count -= 1;
    new.snapshots_offset = 0;
    if !snapshots.is_empty() {
        let table = snapshot_table::encode(&snapshots, new.size)?;
        new.snapshots_offset =
            change.find_free((table.len() as u64).div_ceil(new.cluster_size())).await?;
        change.write("qcow2 snapshot table", new.snapshots_offset, &table).await?;
    }
    change.switch(new).await.map(|_| ())
}

/// Finds a snapshot by name, or else by id.
fn find(snapshots: &[Snapshot], name: &str) -> Result<usize, ImageError> {
    let mut named = snapshots.iter().enumerate().filter(|(_, s)| s.name == name.as_bytes());
    match (named.next(), named.next()) {
        (Some((index, _)), None) => Ok(index),
        (Some(_), Some(_)) => Err(ImageError::refused(
            STRUCTURE,
            format!("several snapshots are named \"{name}\": use an id"),
        )),
        (None, _) => {
            let by_id = snapshots.iter().position(|s| s.id == name.as_bytes());
            by_id.ok_or_else(|| {
                ImageError::refused(
                    STRUCTURE,
                    format!("there is no snapshot with the name or id \"{name}\""),
                )
            })
        }
    }
}

/// Returns an L1 table without COPIED flags, because it shares its L2 tables with another L1 table.
fn without_flags(mut l1: Vec<u8>, layout: EntryFormat) -> Result<Vec<u8>, ImageError> {
    for at in (0..l1.len()).step_by(8) {
        let word = be64(&l1, at);
        L1Entry::decode(word, layout)
            .map_err(|what| ImageError::invalid("qcow2 L1 table", None, what))?;
        put64(&mut l1, at, word & !COPIED);
    }
    Ok(l1)
}
