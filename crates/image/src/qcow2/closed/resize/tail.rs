//! The rest of the last cluster of a disk that grows. Behind the old end there may be stale data,
//! or data of a longer backing file. It must read as zeroes when the disk grows over it.

use super::tables::ResizeTables;
use crate::error::ImageError;
use crate::qcow2::encoding::bytes;
use crate::qcow2::encoding::compression::unpack;
use crate::qcow2::encoding::entry::{Cluster, L2Entry, SUBCLUSTERS, SubclusterBitmap};
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 last cluster";

/// How the last cluster changes.
pub enum Tail {
    /// The rest of the last cluster reads as zeroes already.
    Zero,
    /// The last cluster's L2 entry changes to this.
    Entry(L2Entry),
    /// The last cluster's data, with zeroes at the end, go to a new host cluster, because a
    /// snapshot shares the old one. The second field is the bitmap of allocated subclusters.
    Moved(Vec<u8>, SubclusterBitmap),
}

impl Tail {
    /// Returns true if the last cluster must move to a new host cluster.
    pub fn moves(&self) -> bool {
        matches!(self, Tail::Moved(..))
    }

    /// Returns true if the last cluster's entry changes.
    pub fn changes_entry(&self) -> bool {
        !matches!(self, Tail::Zero)
    }

    /// Sets the L2 entry of the last cluster of the old size in `table`. `moved`: the cluster's
    /// new offset, used only if it moves.
    pub async fn put(
        &self,
        tables: &ResizeTables<'_>,
        table: &mut [u8],
        moved: u64,
    ) -> Result<(), ImageError> {
        let cluster = (tables.change.old.size - 1) >> tables.layout.cluster_bits;
        match self {
            Tail::Zero => {}
            Tail::Entry(entry) => tables.put(table, cluster, *entry),
            Tail::Moved(bytes, bitmap) => {
                tables.change.write("qcow2 cluster", moved, bytes).await?;
                let cluster_now = match tables.layout.extended_l2 {
                    false => Cluster::Standard { host: moved },
                    true => Cluster::Subclusters { host: Some(moved), bitmap: *bitmap },
                };
                tables.put(table, cluster, L2Entry { cluster: cluster_now, copied: true });
            }
        }
        Ok(())
    }
}

/// The last cluster of the disk: its host offset and file, and where in the cluster the disk ends.
struct LastCluster<'a> {
    tables: &'a ResizeTables<'a>,
    /// The file that has the cluster's data.
    file: &'a Raw,
    host: u64,
    inside: u64,
    /// Whether nothing else references the cluster.
    own: bool,
}

/// Prepares the last cluster for growth. If possible it writes zeroes behind the disk's end in
/// place, because no guest can read there yet.
pub async fn of(
    tables: &ResizeTables<'_>,
    data: Option<&Raw>,
    below: u64,
) -> Result<Tail, ImageError> {
    let old = &tables.change.old;
    let (cluster_size, shows) = (old.cluster_size(), below > old.size);
    let (cluster, inside) = (old.size / cluster_size, old.size % cluster_size);
    if inside == 0 {
        return Ok(Tail::Zero);
    }
    let table = tables.read(cluster / old.l2_entries()).await?;
    let entry = tables.entry(&table, cluster)?;
    let file = data.unwrap_or(tables.change.file);
    let own = entry.copied || data.is_some();
    let last = |host| LastCluster { tables, file, host, inside, own };
    match entry.cluster {
        Cluster::Zero { .. } => Ok(Tail::Zero),
        Cluster::Partial { host, .. } => {
            Err(ImageError::invalid(STRUCTURE, host, "a file has no partial entries"))
        }
        Cluster::Unallocated if shows => Err(backing_shows()),
        Cluster::Unallocated => Ok(Tail::Zero),
        Cluster::Standard { host } => {
            last(host).clear(cluster_size, SubclusterBitmap::ALL_DATA).await
        }
        Cluster::Compressed { host, len } => {
            let io = |e| ImageError::io(STRUCTURE, host, "reading", e);
            let packed = bytes::read(tables.change.file, host, len as usize).await.map_err(io)?;
            let plain = unpack(&packed, old.compression, cluster_size as usize);
            let mut plain = plain
                .map_err(|e| ImageError::invalid(STRUCTURE, host, e.to_string()).with_source(e))?;
            if plain[inside as usize..].iter().all(|&byte| byte == 0) {
                return Ok(Tail::Zero);
            }
            plain[inside as usize..].fill(0);
            Ok(Tail::Moved(plain, SubclusterBitmap::ALL_DATA))
        }
        Cluster::Subclusters { host, bitmap } => {
            let piece = old.subcluster_size();
            // Subclusters wholly behind the end, and the one in which the disk ends.
            let rest = u32::MAX.checked_shl(inside.div_ceil(piece) as u32).unwrap_or(0);
            let cut = if inside % piece == 0 { 0 } else { 1 << (inside / piece) };
            debug_assert!(inside / piece < u64::from(SUBCLUSTERS));
            if shows && (bitmap.data() | bitmap.zero()) & cut != cut {
                return Err(backing_shows());
            }
            let zero = bitmap.zero() | if shows { rest } else { 0 };
            let new = SubclusterBitmap(u64::from(bitmap.data() & !rest) | u64::from(zero) << 32);
            if let (Some(host), true) = (host, bitmap.data() & cut != 0) {
                let moved = last(host).clear(inside.next_multiple_of(piece), new).await?;
                if moved.moves() {
                    return Ok(moved);
                }
            }
            let now = L2Entry { cluster: Cluster::Subclusters { host, bitmap: new }, ..entry };
            Ok(if new == bitmap { Tail::Zero } else { Tail::Entry(now) })
        }
    }
}

fn backing_shows() -> ImageError {
    let what = "the backing file is larger than the image and would show in its last cluster: \
        write the last sector of the disk, then resize";
    ImageError::refused(STRUCTURE, what)
}

impl LastCluster<'_> {
    /// Zeroes the cluster from the disk's end up to `end`.
    async fn clear(&self, end: u64, bitmap: SubclusterBitmap) -> Result<Tail, ImageError> {
        let at = self.host + self.inside;
        let io = |what| move |e| ImageError::io(STRUCTURE, at, what, e);
        let rest = bytes::read(self.file, at, (end - self.inside) as usize)
            .await
            .map_err(io("reading"))?;
        if rest.iter().all(|&byte| byte == 0) {
            return Ok(Tail::Zero);
        }
        if self.own {
            bytes::write(self.file, at, &vec![0; rest.len()]).await.map_err(io("writing"))?;
            return Ok(Tail::Zero);
        }
        let len = 1 << self.tables.layout.cluster_bits;
        let mut all = bytes::read(self.file, self.host, len).await.map_err(io("reading"))?;
        all[self.inside as usize..end as usize].fill(0);
        Ok(Tail::Moved(all, bitmap))
    }
}
