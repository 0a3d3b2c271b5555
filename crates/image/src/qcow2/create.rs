//! Creates images.
//!
//! In: options, and a file with any contents. Out: an image that reads as zeroes, or as its backing
//! file. Invariant: until everything is durable the file is no qcow2 image, because the header's
//! first sector is written last.
//!
//! ```text
//!   header | refcount table | refcount blocks | L1 table | L2 tables | data
//!   (L2 tables and data only with preallocation)
//! ```

use std::ops::Range;

use blockyard_storage::Storage;

use super::encoding::bytes;
use super::encoding::entry::{Cluster, EntryFormat, L1Entry, L2Entry, SubclusterBitmap};
use super::encoding::file::flush;
use super::encoding::header::{self, Compression, Header, SECTOR_BYTES};
use super::encoding::refblock::RefcountWidth;
use crate::SECTOR;
use crate::error::ImageError;
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 image to be created";
const OVERLAY_CLUSTER: u64 = 128 << 10;

/// What is preallocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preallocation {
    Off,
    /// L2 tables that map each guest cluster; the file has its full length, and is sparse.
    Metadata,
    /// Like `Metadata`; in addition the host reserves the space (fallocate).
    Falloc,
    /// Like `Metadata`; in addition the space is written with zeroes.
    Full,
}

/// Parameters of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size of the guest's disk in bytes; rounded up to a whole sector.
    pub size: u64,
    pub version: u32,
    pub cluster_size: u64,
    pub refcount_bits: u32,
    pub extended_l2: bool,
    pub lazy_refcounts: bool,
    pub compression: Compression,
    /// Name of the backing file as the image stores it, and its format.
    pub backing: Option<(String, String)>,
    pub data_file: Option<String>,
    /// Whether the external data file is valid as a raw image by itself.
    pub data_file_raw: bool,
    pub preallocation: Preallocation,
}

impl CreateOptions {
    /// Returns the defaults of `qemu-img create`.
    pub fn new(size: u64) -> Self {
        CreateOptions {
            size,
            version: 3,
            cluster_size: 64 << 10,
            refcount_bits: 16,
            extended_l2: false,
            lazy_refcounts: false,
            compression: Compression::Zlib,
            backing: None,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
        }
    }

    /// Returns the defaults of an overlay: subclusters of 4 KiB, so that small allocating writes
    /// need not copy from the backing file.
    pub fn overlay(size: u64, backing: impl Into<String>, format: impl Into<String>) -> Self {
        CreateOptions {
            backing: Some((backing.into(), format.into())),
            extended_l2: true,
            cluster_size: OVERLAY_CLUSTER,
            ..CreateOptions::new(size)
        }
    }

    /// Refuses invalid combinations of options.
    pub(crate) fn check(&self, has_data: bool) -> Result<(), ImageError> {
        let refuse = |what: &str| Err(ImageError::refused(STRUCTURE, what));
        if !matches!(self.version, 2 | 3) {
            return refuse("only versions 2 and 3 are known");
        }
        if !self.cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&self.cluster_size) {
            return refuse("the cluster size must be a power of two from 512 bytes to 2 MiB");
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return refuse("refcounts must have 1, 2, 4, 8, 16, 32 or 64 bits");
        }
        let new = self.refcount_bits != 16
            || self.extended_l2
            || self.lazy_refcounts
            || self.data_file.is_some();
        if self.version == 2 && (new || self.compression != Compression::Zlib) {
            return refuse(
                "version 2 has refcounts of 16 bits and zlib, and no extended L2 entries, lazy \
                 refcounts or data file",
            );
        }
        if self.extended_l2 && self.cluster_size < 1 << header::MIN_EXTENDED_CLUSTER_BITS {
            return refuse("extended L2 entries need clusters of 16 KiB at least");
        }
        if self.data_file_raw && self.data_file.is_none() {
            return refuse("a raw data file needs a data file");
        }
        if self.data_file_raw && self.backing.is_some() {
            return refuse("an image with a raw data file cannot have a backing file");
        }
        if self.data_file.is_some() != has_data {
            return refuse("an external data file needs both a name and the file");
        }
        if self.backing.is_some() && self.preallocation != Preallocation::Off && !self.extended_l2 {
            return refuse(
                "preallocation over a backing file needs extended L2 entries: it would hide the \
                 backing file",
            );
        }
        if self
            .backing
            .as_ref()
            .is_some_and(|(name, _)| name.is_empty() || name.len() > header::MAX_BACKING_NAME)
        {
            return refuse("a backing file's name must have 1 to 1023 bytes");
        }
        Ok(())
    }

    /// Returns true if L2 tables map each guest cluster from the start, as for a raw data file.
    fn maps_all(&self) -> bool {
        self.preallocation != Preallocation::Off || self.data_file_raw
    }
}

/// Where each structure of the new file lies, in clusters.
#[derive(Debug)]
struct FileLayout {
    cluster_bits: u32,
    width: RefcountWidth,
    table: Range<u64>,
    blocks: Range<u64>,
    l1: Range<u64>,
    l2: Range<u64>,
    data: Range<u64>,
}

impl FileLayout {
    fn new(options: &CreateOptions, header: &Header) -> Result<Self, ImageError> {
        let (bits, width) = (header.cluster_bits, header.refcount_width());
        let l1 = (u64::from(header.l1_size) * 8).div_ceil(1 << bits);
        let all = options.maps_all();
        let l2 = if all { header.l1_size.into() } else { 0 };
        let inside = all && options.data_file.is_none();
        let data = if inside { header.size.div_ceil(1 << bits) } else { 0 };
        let rest = 1 + l1 + l2 + data;
        let (mut blocks, mut table) = (1, 1);
        loop {
            let needed = (rest + blocks + table).div_ceil(width.per_block(1 << bits));
            let table_needed = (needed * 8).div_ceil(1 << bits);
            if (needed, table_needed) == (blocks, table) {
                break;
            }
            (blocks, table) = (needed, table_needed);
        }
        if table << bits > header::MAX_REFCOUNT_TABLE_BYTES {
            return Err(ImageError::refused(
                STRUCTURE,
                "its refcount table would be larger than 8 MiB: use larger clusters",
            ));
        }
        let mut end = 1;
        let mut next = |len: u64| {
            end += len;
            end - len..end
        };
        let (table, blocks, l1, l2, data) =
            (next(table), next(blocks), next(l1), next(l2), next(data));
        Ok(FileLayout { cluster_bits: bits, width, table, blocks, l1, l2, data })
    }

    fn end(&self) -> u64 {
        self.data.end << self.cluster_bits
    }

    fn bytes(&self, clusters: &Range<u64>) -> Range<u64> {
        clusters.start << self.cluster_bits..clusters.end << self.cluster_bits
    }
}

/// Creates an image in `file`; `data` is the external data file that the options name. Durable on
/// return.
pub async fn create(
    file: &Raw,
    data: Option<&Raw>,
    options: &CreateOptions,
) -> Result<(), ImageError> {
    options.check(data.is_some())?;
    let mut header = header(options)?;
    let plan = FileLayout::new(options, &header)?;
    header.refcount_table_offset = plan.table.start << plan.cluster_bits;
    header.refcount_table_clusters = (plan.table.end - plan.table.start) as u32;
    header.l1_offset = plan.l1.start << plan.cluster_bits;
    let area = header.serialize()?;

    let creator = Creator { file, plan: &plan, header: &header, layout: EntryFormat::of(&header) };
    creator.clear().await?;
    creator.refcounts().await?;
    if options.maps_all() {
        creator.tables(options).await?;
    }
    match data {
        Some(data) => preallocate_data_file(data, header.size, options.preallocation).await?,
        None => creator.data(options.preallocation).await?,
    }
    let split = area.len().min(SECTOR_BYTES);
    creator.write(SECTOR, &area[split..]).await?;
    flush(file).await?;
    let mut first = area[..split].to_vec();
    first.resize(SECTOR_BYTES, 0);
    creator.write(0, &first).await?;
    flush(file).await
}

fn header(options: &CreateOptions) -> Result<Header, ImageError> {
    let size = options.size.checked_next_multiple_of(SECTOR);
    let size = size.ok_or_else(|| ImageError::refused(STRUCTURE, "its size is too large"))?;
    let flag = |on: bool, bit: u64| if on { bit } else { 0 };
    let zstd = options.compression == Compression::Zstd;
    let mut header = Header {
        version: options.version,
        cluster_bits: options.cluster_size.trailing_zeros(),
        size,
        l1_size: 0,
        l1_offset: 0,
        refcount_table_offset: 0,
        refcount_table_clusters: 0,
        snapshot_count: 0,
        snapshots_offset: 0,
        incompatible: flag(zstd, header::INCOMPATIBLE_COMPRESSION)
            | flag(options.extended_l2, header::INCOMPATIBLE_EXTENDED_L2)
            | flag(options.data_file.is_some(), header::INCOMPATIBLE_DATA_FILE),
        compatible: flag(options.lazy_refcounts, header::COMPATIBLE_LAZY_REFCOUNTS),
        autoclear: flag(options.data_file_raw, header::AUTOCLEAR_RAW_DATA),
        refcount_order: options.refcount_bits.trailing_zeros(),
        header_length: if options.version == 2 { 72 } else { 112 },
        compression: options.compression,
        backing: options.backing.as_ref().map(|(name, _)| name.clone()),
        backing_offset: 0,
        backing_format: options.backing.as_ref().map(|(_, format)| format.clone()),
        data_file: options.data_file.clone(),
        bitmaps: None,
        extensions: Vec::new(),
        unknown_fields: Vec::new(),
    };
    let entries = header.l1_needed(size).max(1);
    if entries * 8 > header::MAX_L1_BYTES {
        let what = format!("{size} bytes need an L1 table larger than 32 MiB: use larger clusters");
        return Err(ImageError::refused(STRUCTURE, what));
    }
    header.l1_size = entries as u32;
    Ok(header)
}

struct Creator<'a> {
    file: &'a Raw,
    plan: &'a FileLayout,
    header: &'a Header,
    layout: EntryFormat,
}

impl Creator<'_> {
    async fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ImageError> {
        bytes::write(self.file, offset, bytes)
            .await
            .map_err(|e| ImageError::io(STRUCTURE, offset, "writing", e))
    }

    /// Clears the file: it is no image any more, and reads as zeroes where the image will be.
    async fn clear(&self) -> Result<(), ImageError> {
        let storage = self.file.storage();
        let io = |what| move |e| ImageError::io(STRUCTURE, None, what, e);
        let len = storage.len().await.map_err(io("finding its length"))?;
        if len > 0 {
            self.write(0, &[0; SECTOR_BYTES]).await?;
            flush(self.file).await?;
        }
        if !self.file.is_device() {
            storage.set_len(0).await.map_err(io("emptying it"))?;
            return storage.set_len(self.plan.end()).await.map_err(io("setting its length"));
        }
        if len < self.plan.end() {
            let what = format!("the device has {len} bytes, but {} are needed", self.plan.end());
            return Err(ImageError::refused(STRUCTURE, what));
        }
        self.file.write_zeroes(0, self.plan.end(), true).await.map_err(io("zeroing it"))
    }

    async fn refcounts(&self) -> Result<(), ImageError> {
        let plan = self.plan;
        let (per_block, table) =
            (plan.width.per_block(1 << plan.cluster_bits), plan.bytes(&plan.table));
        let offsets: Vec<u8> = plan
            .blocks
            .clone()
            .flat_map(|block| (block << plan.cluster_bits).to_be_bytes())
            .collect();
        let mut sectors = offsets;
        sectors.resize(sectors.len().next_multiple_of(SECTOR_BYTES), 0);
        self.write(table.start, &sectors).await?;
        for (index, block) in plan.blocks.clone().enumerate() {
            let first = index as u64 * per_block;
            let mut counts = vec![0; 1 << plan.cluster_bits];
            for n in 0..per_block.min(plan.data.end - first) {
                plan.width.set(&mut counts, n as usize, 1);
            }
            self.write(block << plan.cluster_bits, &counts).await?;
        }
        Ok(())
    }

    /// Writes L1 and L2 tables that map each guest cluster.
    async fn tables(&self, options: &CreateOptions) -> Result<(), ImageError> {
        let (plan, entries) = (self.plan, self.header.l2_entries());
        let l1 = plan
            .l2
            .clone()
            .map(|table| L1Entry { table: Some(table << plan.cluster_bits), copied: true });
        let mut l1: Vec<u8> = l1.flat_map(|entry| entry.encode().to_be_bytes()).collect();
        l1.resize(l1.len().next_multiple_of(SECTOR_BYTES), 0);
        self.write(self.header.l1_offset, &l1).await?;
        let guest_clusters = self.header.size.div_ceil(1 << plan.cluster_bits);
        // In an external data file, host offsets equal guest offsets.
        let place =
            |guest: u64| if options.data_file.is_some() { guest } else { plan.data.start + guest };
        for (index, table) in plan.l2.clone().enumerate() {
            let first = index as u64 * entries;
            let mut words = Vec::with_capacity(1 << plan.cluster_bits);
            for guest in first..(first + entries).min(guest_clusters) {
                let (word, bitmap) = self.entry(place(guest) << plan.cluster_bits, options);
                words.extend_from_slice(&word.to_be_bytes());
                if options.extended_l2 {
                    words.extend_from_slice(&bitmap.to_be_bytes());
                }
            }
            words.resize(words.len().next_multiple_of(SECTOR_BYTES), 0);
            self.write(table << plan.cluster_bits, &words).await?;
        }
        Ok(())
    }

    fn entry(&self, host: u64, options: &CreateOptions) -> (u64, u64) {
        let cluster = match options.extended_l2 {
            false => Cluster::Standard { host },
            // The host cluster is preallocated, but no subcluster is allocated: the backing file
            // shows through.
            true => {
                let bitmap = if options.data_file_raw {
                    SubclusterBitmap::ALL_DATA
                } else {
                    SubclusterBitmap::default()
                };
                Cluster::Subclusters { host: Some(host), bitmap }
            }
        };
        L2Entry { cluster, copied: true }.encode(self.layout)
    }

    async fn data(&self, preallocation: Preallocation) -> Result<(), ImageError> {
        let Range { start, end } = self.plan.bytes(&self.plan.data);
        take_space(self.file, start, end - start, preallocation).await
    }
}

/// Extends the data file to its full length, and allocates its space. Its contents stay.
async fn preallocate_data_file(
    data: &Raw,
    size: u64,
    preallocation: Preallocation,
) -> Result<(), ImageError> {
    let io = |what| move |e| ImageError::io("qcow2 external data file", None, what, e);
    let len = data.storage().len().await.map_err(io("finding its length"))?;
    if len < size {
        if data.is_device() {
            let what = format!("the device has {len} bytes, but {size} are needed");
            return Err(ImageError::refused("qcow2 external data file", what));
        }
        data.storage().set_len(size).await.map_err(io("setting its length"))?;
        take_space(data, len, size - len, preallocation).await?;
    }
    flush(data).await
}

/// Allocates space for a range, which then reads as zeroes.
async fn take_space(
    file: &Raw,
    start: u64,
    len: u64,
    preallocation: Preallocation,
) -> Result<(), ImageError> {
    if len == 0 {
        return Ok(());
    }
    match preallocation {
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc => match file.storage().allocate(start, len).await {
            Err(e) if e.kind() == std::io::ErrorKind::Unsupported && file.is_device() => Ok(()),
            done => done.map_err(|e| ImageError::io(STRUCTURE, start, "reserving space", e)),
        },
        Preallocation::Full => file
            .write_zero_bytes(start, len)
            .await
            .map_err(|e| ImageError::io(STRUCTURE, start, "writing zeroes", e)),
    }
}
