//! Replays the journal of a server that died, before the image is opened.
//!
//! In: the records, in order. Out: the image's file with the last value of each entry. Partial
//! clusters cannot be in the file; they are returned, and the opened image adopts them.
//!
//! ```text
//!   sync: the data that the entries name are durable
//!   ─► raise refcounts ─► sync ─► write L2 and L1 entries ─► sync
//! ```
//!
//! Invariants
//! - A power cut at any moment leaves old or new entries, and leaks. (The journal is gone then.)
//! - A death at any moment changes nothing: the replay begins again, with the same values.
//! - Refcounts are never too low. Those that are too high are leaks, which the open repairs. But a
//!   cluster that an entry owns alone (COPIED) gets exactly 1: the file may still count references
//!   of before the cluster was freed and used again.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::ImageError;
use crate::journal::{Key, Record};
use crate::qcow2::check::Tally;
use crate::qcow2::check::stored::Refcounts;
use crate::qcow2::encoding::bytes::{self, be64, put64};
use crate::qcow2::encoding::entry::{
    COPIED, Cluster, EntryFormat, L1Entry, L2Entry, OFFSET_MASK, is_partial,
};
use crate::qcow2::encoding::file::{flush, length, read_l1};
use crate::qcow2::encoding::header::Header;
use crate::qcow2::state::shared::Shape;
use crate::qcow2::state::tables::Entry;
use crate::raw::Raw;

const STRUCTURE: &str = "journal of the image";
/// Unit in which L1 entries are written, in bytes.
const L1_SECTOR: usize = 512;

fn invalid(what: String) -> ImageError {
    ImageError::invalid(STRUCTURE, None, what)
}

/// The last value of each entry in the journal.
#[derive(Default)]
struct Changes {
    l1: BTreeMap<u64, u64>,
    entries: BTreeMap<u64, Entry>,
    partial: Vec<(u64, Entry)>,
}

impl Changes {
    fn of(records: Vec<Record>, layout: EntryFormat) -> Self {
        let mut changes = Changes::default();
        for Record { key, value: [word, bitmap] } in records {
            match key {
                Key::Table(index) => drop(changes.l1.insert(index, word)),
                Key::Cluster(number) => {
                    changes.entries.insert(number, Entry { word, bitmap });
                }
                Key::Sector(_) => {}
            }
        }
        let is_partial = |entry: &Entry| !layout.extended_l2 && is_partial(entry.word);
        let partial = changes.entries.iter().filter(|(_, entry)| is_partial(entry));
        changes.partial = partial.map(|(number, entry)| (*number, *entry)).collect();
        changes.entries.retain(|_, entry| !is_partial(entry));
        changes
    }
}

/// Writes the changes to the file. Returns the partial clusters.
pub(super) async fn replay(
    file: &Raw,
    data: Option<&Raw>,
    header: &Header,
    records: Vec<Record>,
) -> Result<Vec<(u64, Entry)>, ImageError> {
    let shape = Shape::of(header);
    let changes = Changes::of(records, shape.layout);
    if let Some(data) = data {
        flush(data).await?;
    }
    flush(file).await?;
    let mut l1 = read_l1(file, header.l1_offset, header.l1_size.into()).await?;
    for (&index, &word) in &changes.l1 {
        let at = usize::try_from(index).ok().and_then(|index| index.checked_mul(8));
        let Some(at) = at.filter(|at| at + 8 <= l1.len()) else {
            return Err(invalid(format!("L1 entry {index} is behind the table's end")));
        };
        L1Entry::decode(word, shape.layout)
            .map_err(|what| invalid(format!("L1 entry {index}: {what}")))?;
        put64(&mut l1, at, word);
    }
    let named = Named::by(&changes, &shape, length(file).await?)?;
    named.raise(file, header).await?;
    flush(file).await?;
    write_entries(file, &shape, &l1, &changes).await?;
    let sectors: BTreeSet<usize> =
        changes.l1.keys().map(|index| *index as usize * 8 / L1_SECTOR).collect();
    for sector in sectors {
        let (from, to) = (sector * L1_SECTOR, ((sector + 1) * L1_SECTOR).min(l1.len()));
        let at = header.l1_offset + from as u64;
        let written = bytes::write(file, at, &l1[from..to]).await;
        written.map_err(|e| ImageError::io("qcow2 L1 table", at, "writing", e))?;
    }
    flush(file).await?;
    Ok(changes.partial)
}

/// Host clusters that changed entries name.
#[derive(Default)]
struct Named {
    /// L2 tables and clusters with data: each has one reference of a changed entry. True: no other
    /// entry has one (COPIED).
    once: BTreeMap<u64, bool>,
    /// Clusters with compressed data, and the number of new references of each.
    shared: BTreeMap<u64, u64>,
}

impl Named {
    fn by(changes: &Changes, shape: &Shape, file_len: u64) -> Result<Self, ImageError> {
        let (bits, mut named) = (shape.layout.cluster_bits, Named::default());
        let end = file_len.div_ceil(shape.cluster_size());
        let tables = changes.l1.values().filter(|word| **word & OFFSET_MASK != 0);
        let owned = |word: &u64| ((word & OFFSET_MASK) >> bits, word & COPIED != 0);
        named.once.extend(tables.map(owned));
        // Clusters of an external data file have no refcount.
        let entries = changes.entries.iter().filter(|_| !shape.layout.data_file);
        for (number, entry) in entries {
            let decoded = L2Entry::decode(entry.word, entry.bitmap, shape.layout)
                .map_err(|what| invalid(format!("entry of guest cluster {number}: {what}")))?;
            match decoded.cluster {
                Cluster::Compressed { host, len } => {
                    for cluster in host >> bits..=(host + len - 1).min(file_len - 1) >> bits {
                        *named.shared.entry(cluster).or_default() += 1;
                    }
                }
                cluster => {
                    named.once.extend(cluster.host().map(|host| (host >> bits, decoded.copied)));
                }
            }
        }
        let partial = changes.partial.iter().filter_map(|(_, entry)| {
            L2Entry::cached(entry.word, entry.bitmap, shape.layout).ok()?.cluster.host()
        });
        let once = named.once.keys().last().copied();
        let last = once.max(named.shared.keys().last().copied());
        if let Some(last) = last.max(partial.map(|host| host >> bits).max())
            && last >= end
        {
            return Err(invalid(format!("it names cluster {last}, and the file has {end}")));
        }
        Ok(named)
    }

    /// Raises the stored refcounts, so that none is too low. Clusters that the file already counts
    /// keep their refcount, except those with a single owner.
    async fn raise(&self, file: &Raw, header: &Header) -> Result<(), ImageError> {
        let refcounts = Refcounts::load(file, header, &mut Tally::default()).await?;
        let mut wanted: BTreeMap<u64, Vec<(u64, u64, u64)>> = BTreeMap::new();
        let max = refcounts.width.max();
        let once =
            self.once.iter().map(|(&cluster, &alone)| (cluster, 0, if alone { 1 } else { max }));
        let shared = self.shared.iter().map(|(&cluster, &more)| (cluster, more, max));
        for (cluster, more, most) in once.chain(shared) {
            let block = refcounts.block_of(cluster).ok_or_else(|| {
                invalid(format!("it names cluster {cluster}, which has no refcount block"))
            })?;
            wanted.entry(block).or_default().push((cluster, more, most));
        }
        for (block, clusters) in wanted {
            let mut counts = refcounts.read_block(file, block).await?;
            let before = counts.clone();
            for (cluster, more, most) in clusters {
                let index = (cluster % refcounts.per_block()) as usize;
                let count = refcounts.width.get(&counts, index);
                let raised = count.saturating_add(more).clamp(1, most);
                refcounts.width.set(&mut counts, index, raised);
            }
            if counts != before {
                let written = bytes::write(file, block, &counts).await;
                written.map_err(|e| ImageError::io("qcow2 refcount block", block, "writing", e))?;
            }
        }
        Ok(())
    }
}

/// Writes the L2 entries, a slice at a time.
async fn write_entries(
    file: &Raw,
    shape: &Shape,
    l1: &[u8],
    changes: &Changes,
) -> Result<(), ImageError> {
    let entries: Vec<(&u64, &Entry)> = changes.entries.iter().collect();
    for group in entries.chunk_by(|(a, _), (b, _)| shape.slice(**a).0 == shape.slice(**b).0) {
        let (slice, _) = shape.slice(*group[0].0);
        let index = slice / shape.slices_per_table();
        let at = index as usize * 8;
        let table = if at + 8 <= l1.len() { be64(l1, at) & OFFSET_MASK } else { 0 };
        if table == 0 {
            if group.iter().all(|(_, entry)| **entry == Entry::default()) {
                continue;
            }
            return Err(invalid(format!("it changes L2 table {index}, which does not exist")));
        }
        let offset = table + slice % shape.slices_per_table() * shape.slice_bytes();
        let structure = format!("qcow2 L2 table {index}");
        let failed = |what: &'static str| {
            let structure = structure.clone();
            move |e| ImageError::io(structure, offset, what, e)
        };
        let read = bytes::read(file, offset, shape.slice_bytes() as usize).await;
        let mut words = read.map_err(failed("reading"))?;
        for (number, entry) in group {
            let (_, within) = shape.slice(**number);
            if shape.layout.extended_l2 {
                put64(&mut words, within * 16, entry.word);
                put64(&mut words, within * 16 + 8, entry.bitmap);
            } else {
                put64(&mut words, within * 8, entry.word);
            }
        }
        bytes::write(file, offset, &words).await.map_err(failed("writing"))?;
    }
    Ok(())
}
