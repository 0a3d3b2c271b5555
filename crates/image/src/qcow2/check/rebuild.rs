//! Builds new refcount structures beside the old ones.
//!
//! In: refcounts, in ascending order of clusters. Out: refcount blocks and their table behind the
//! end of the file. The caller switches the image to them by one write of the header's sector.
//! Invariants: no existing data are overwritten; the new structures count themselves.

use crate::error::ImageError;
use crate::qcow2::encoding::bytes;
use crate::qcow2::encoding::header::{Header, MAX_REFCOUNT_TABLE_BYTES};
use crate::qcow2::encoding::refblock::RefcountWidth;
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 refcount table";

/// Writer of new refcount structures.
pub struct Builder<'a> {
    file: &'a Raw,
    width: RefcountWidth,
    cluster_bits: u32,
    /// First cluster of the new structures, and the next free one.
    first: u64,
    next: u64,
    /// Offsets of the written blocks, by number.
    table: Vec<u64>,
    /// The block that is being filled.
    current: Option<(u64, Vec<u8>)>,
}

impl<'a> Builder<'a> {
    /// Creates a builder of new structures at `end`, the offset behind all references and all data
    /// of the file.
    pub fn new(file: &'a Raw, header: &Header, end: u64) -> Self {
        let first = end.div_ceil(header.cluster_size());
        let width = header.refcount_width();
        Builder {
            file,
            width,
            cluster_bits: header.cluster_bits,
            first,
            next: first,
            table: Vec::new(),
            current: None,
        }
    }

    fn per_block(&self) -> u64 {
        self.width.per_block(1 << self.cluster_bits)
    }

    /// Sets the refcount of a cluster; clusters must come in ascending order.
    pub async fn put(&mut self, cluster: u64, refcount: u64) -> Result<(), ImageError> {
        let index = cluster / self.per_block();
        if self.current.as_ref().is_some_and(|(current, _)| *current != index) {
            self.write_block().await?;
        }
        if index * 8 >= MAX_REFCOUNT_TABLE_BYTES {
            let what = "the file is too large for a refcount table of 8 MiB";
            return Err(ImageError::refused(STRUCTURE, what));
        }
        let (_, block) =
            self.current.get_or_insert_with(|| (index, vec![0; 1 << self.cluster_bits]));
        self.width.set(
            block,
            (cluster % self.width.per_block(1 << self.cluster_bits)) as usize,
            refcount,
        );
        Ok(())
    }

    async fn write_block(&mut self) -> Result<(), ImageError> {
        let Some((index, block)) = self.current.take() else { return Ok(()) };
        let at = self.next << self.cluster_bits;
        self.next += 1;
        self.table.resize(index as usize, 0);
        self.table.push(at);
        bytes::write(self.file, at, &block)
            .await
            .map_err(|e| ImageError::io("qcow2 refcount block", at, "writing", e))
    }

    /// Counts the new structures themselves, and writes the table. Returns its offset and its
    /// clusters. Nothing is durable yet.
    pub async fn finish(mut self) -> Result<(u64, u32), ImageError> {
        let (blocks, table_clusters) = self.own_size();
        for cluster in self.first..self.next + blocks + table_clusters {
            self.put(cluster, 1).await?;
        }
        self.write_block().await?;
        let len = table_clusters << self.cluster_bits;
        if len > MAX_REFCOUNT_TABLE_BYTES {
            return Err(ImageError::refused(
                STRUCTURE,
                format!("it would take {len} bytes: at most 8 MiB are allowed"),
            ));
        }
        let mut table = Vec::with_capacity(len as usize);
        self.table.iter().for_each(|block| table.extend_from_slice(&block.to_be_bytes()));
        table.resize(len as usize, 0);
        let at = self.next << self.cluster_bits;
        bytes::write(self.file, at, &table)
            .await
            .map_err(|e| ImageError::io(STRUCTURE, at, "writing", e))?;
        Ok((at, table_clusters as u32))
    }

    /// Returns the number of refcount blocks still to write, and the number of the table's
    /// clusters. Includes the blocks that cover the new structures.
    fn own_size(&self) -> (u64, u64) {
        let current = self.current.as_ref().map(|(index, _)| *index);
        let (mut blocks, mut table_clusters) = (1, 1);
        loop {
            let end = self.next + blocks + table_clusters;
            let (first, last) = (self.first / self.per_block(), (end - 1) / self.per_block());
            let needed =
                last - first + 1 + u64::from(current.is_some_and(|current| current < first));
            let table_needed = ((last + 1) * 8).div_ceil(1 << self.cluster_bits);
            if (needed, table_needed) == (blocks, table_clusters) {
                return (blocks, table_clusters);
            }
            (blocks, table_clusters) = (needed, table_needed);
        }
    }
}
