//! Changes the set of persistent bitmaps of a closed image, and their bits.
//!
//! ```text
//!   directory -> BitmapSet (entries, and the bits that change) -> edits
//!   -> new directory, tables and data in free clusters -> switch of the header
//! ```
//!
//! In: a closed image, held exclusively. Out: the same disk with other bitmaps. Invariant: at every
//! power cut the image has the old bitmaps or the new ones (`closed::change`). The limits
//! are those that QEMU checks when it loads bitmaps.

use blockyard_storage::Storage;

use crate::error::ImageError;
use crate::qcow2::closed::change::OfflineChange;
use crate::qcow2::encoding::bitmap_directory::{
    self, AUTO, BitmapEntry, DIRTY_TRACKING, GRANULARITY_BITS, IN_USE, MAX_BITMAP_BYTES, MAX_NAME,
    OddBitmap, whole_sectors,
};
use crate::qcow2::encoding::bytes::{self, be64, put64};
use crate::qcow2::encoding::entry::OFFSET_MASK;
use crate::qcow2::encoding::header::{
    AUTOCLEAR_BITMAPS, BitmapsExtension, EXTENSION_BITMAPS, Header, MAX_BITMAP_DIRECTORY_BYTES,
    MAX_BITMAPS,
};
use crate::raw::Raw;

const STRUCTURE: &str = "qcow2 bitmaps";
const TABLE: &str = "qcow2 bitmap table";
/// Maximum size of the bitmap data that a resize holds in memory, in bytes.
const MOST_HELD: usize = 1 << 30;
/// Table entry without a cluster: all bits that the entry stands for are set.
const ALL_ONES: u64 = 1;

/// One change of a bitmap.
#[derive(Clone, Debug)]
pub enum Edit {
    /// Adds an empty bitmap that records writes. `granularity` in bytes; None: the cluster size,
    /// clamped to 4 KiB..64 KiB.
    Add {
        granularity: Option<u64>,
    },
    Remove,
    /// Clears all bits.
    Clear,
    /// Switches the recording of writes (auto flag) on or off.
    Record(bool),
    /// Sets the bits that cover the set bits of another bitmap.
    Merge(Bits),
}

/// The bits of a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bits {
    granularity_bits: u8,
    /// Size of the disk in bytes.
    size: u64,
    /// Bit n of byte k describes the disk's piece 8k + n.
    bytes: Vec<u8>,
}

struct LoadedBitmap {
    entry: BitmapEntry,
    content: Content,
}

/// What a change writes of a bitmap.
enum Content {
    /// Nothing: its table and data stay.
    Kept,
    Bits(Bits),
    /// A table with one empty entry, because the bits have no meaning. The bitmap is in use. QEMU
    /// accepts a table of any length then, but at least one entry.
    Nothing,
}

/// Applies the edits to the bitmap `name`, in this order and atomically. Durable on return.
pub async fn edit(file: &Raw, name: &str, edits: &[Edit]) -> Result<(), ImageError> {
    let change = OfflineChange::begin(file).await?;
    if change.old.version < 3 {
        return Err(ImageError::unsupported(
            STRUCTURE,
            "version 2 has no bitmaps: run `image amend -o compat=1.1` first",
        ));
    }
    let mut set = BitmapSet::load(file, &change.old).await?;
    for edit in edits {
        set.apply(file, &change.old, name, edit).await?;
    }
    set.store(change).await
}

/// Reads the bits of a bitmap. Fails if its data cannot be trusted.
pub async fn read(file: &Raw, name: &str) -> Result<Bits, ImageError> {
    let header = Header::read(file).await?;
    let set = BitmapSet::load(file, &header).await?;
    let at = set.find(name)?;
    set.trusted(at, &header)?;
    Bits::read(file, &header, &set.0[at].entry).await
}

/// All bitmaps of an image, and what is written of them.
pub(in crate::qcow2) struct BitmapSet(Vec<LoadedBitmap>);

impl BitmapSet {
    async fn load(file: &Raw, header: &Header) -> Result<Self, ImageError> {
        let Some(extension) = &header.bitmaps else { return Ok(BitmapSet(Vec::new())) };
        let (_, entries) = bitmap_directory::read(file, extension).await?;
        let kept = |entry| LoadedBitmap { entry, content: Content::Kept };
        Ok(BitmapSet(entries.into_iter().map(kept).collect()))
    }

    /// Loads all bitmaps of an image for a disk of `size` bytes. Bits of the new part are clear.
    /// Bitmaps in use stay in use, without their bits. All are written again, because the resize
    /// frees the clusters of all bitmaps.
    ///
    /// A disk without a sector leaves every bitmap in use: QEMU accepts no other bitmap of it, and
    /// its own resize leaves them in use too.
    pub async fn resized(file: &Raw, header: &Header, size: u64) -> Result<Self, ImageError> {
        let mut set = Self::load(file, header).await?;
        let mut held_bytes = 0;
        for held in &mut set.0 {
            can_be_written(&held.entry, header)?;
            if whole_sectors(size) == 0 {
                held.entry.flags |= IN_USE;
            }
            if held.entry.flags & IN_USE != 0 {
                // QEMU allocates its bits when it opens the image.
                Bits::bytes_needed(size, held.entry.granularity_bits)?;
                held.content = Content::Nothing;
                continue;
            }
            let mut bits = Bits::read(file, header, &held.entry).await?;
            bits.resize(size)?;
            held_bytes += bits.bytes.len();
            if held_bytes > MOST_HELD {
                let what = "together they take more than 1 GiB of memory: remove some first";
                return Err(ImageError::refused(STRUCTURE, what));
            }
            held.content = Content::Bits(bits);
        }
        Ok(set)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn find(&self, name: &str) -> Result<usize, ImageError> {
        let at = self.0.iter().position(|held| held.entry.name == name);
        at.ok_or_else(|| ImageError::refused(STRUCTURE, format!("there is no bitmap \"{name}\"")))
    }

    /// Refuses a bitmap that cannot be trusted: one in use was not saved by its last writer.
    fn trusted(&self, at: usize, header: &Header) -> Result<(), ImageError> {
        let LoadedBitmap { entry, content } = &self.0[at];
        if let Content::Kept = content {
            can_be_written(entry, header)?;
        }
        if entry.flags & IN_USE == 0 {
            return Ok(());
        }
        let what = format!(
            "bitmap \"{}\" was not saved by its last writer: it can only be removed",
            entry.name
        );
        Err(ImageError::refused(STRUCTURE, what))
    }

    async fn apply(
        &mut self,
        file: &Raw,
        header: &Header,
        name: &str,
        edit: &Edit,
    ) -> Result<(), ImageError> {
        if let Edit::Add { granularity } = edit {
            return self.add(header, name, *granularity);
        }
        let at = self.find(name)?;
        if let Edit::Remove = edit {
            self.0.remove(at);
            return Ok(());
        }
        self.trusted(at, header)?;
        let held = &mut self.0[at];
        match edit {
            Edit::Record(true) => held.entry.flags |= AUTO,
            Edit::Record(false) => held.entry.flags &= !AUTO,
            Edit::Clear => {
                held.content = Content::Bits(Bits::new(header.size, held.entry.granularity_bits)?);
            }
            Edit::Merge(source) => {
                let mut bits = match std::mem::replace(&mut held.content, Content::Nothing) {
                    Content::Bits(bits) => bits,
                    _ => Bits::read(file, header, &held.entry).await?,
                };
                bits.merge(source)?;
                held.content = Content::Bits(bits);
            }
            Edit::Add { .. } | Edit::Remove => unreachable!("they are done above"),
        }
        Ok(())
    }

    fn add(
        &mut self,
        header: &Header,
        name: &str,
        granularity: Option<u64>,
    ) -> Result<(), ImageError> {
        let refuse = |what: String| Err(ImageError::refused(STRUCTURE, what));
        if name.is_empty() || name.len() > MAX_NAME {
            return refuse(format!("a name has 1 to {MAX_NAME} bytes"));
        }
        if self.0.iter().any(|held| held.entry.name == name) {
            return refuse(format!("there is a bitmap \"{name}\" already"));
        }
        if self.0.len() >= MAX_BITMAPS as usize {
            return refuse(format!(
                "the image has {MAX_BITMAPS} bitmaps, the most that are allowed"
            ));
        }
        if whole_sectors(header.size) == 0 {
            return refuse("a disk without a sector has no bitmaps: resize it first".into());
        }
        let granularity = granularity.unwrap_or(header.cluster_size().clamp(4 << 10, 64 << 10));
        let granularity_bits = granularity.trailing_zeros() as u8;
        if !granularity.is_power_of_two() || !GRANULARITY_BITS.contains(&granularity_bits) {
            return refuse(format!(
                "a granularity must be a power of two from 512 to 2G, not {granularity}"
            ));
        }
        // The zero fields get their values when the bitmaps are stored.
        let entry = BitmapEntry {
            at: 0,
            len: 0,
            table_offset: 0,
            table_size: 0,
            flags: AUTO,
            kind: DIRTY_TRACKING,
            granularity_bits,
            extra_len: 0,
            name: name.into(),
        };
        let content = Content::Bits(Bits::new(header.size, granularity_bits)?);
        self.0.push(LoadedBitmap { entry, content });
        Ok(())
    }

    /// Writes the set to free clusters, and switches the header to it.
    pub async fn store(mut self, change: OfflineChange<'_>) -> Result<(), ImageError> {
        let mut new = change.old.clone();
        let cluster = new.cluster_size();
        for held in &self.0 {
            if let Content::Kept = held.content {
                can_be_kept(&held.entry)?;
            }
        }
        let directory = bitmap_directory::encode(&self.entries()).len() as u64;
        if directory > MAX_BITMAP_DIRECTORY_BYTES {
            return Err(ImageError::refused(
                STRUCTURE,
                "their directory would be larger than 64 MiB",
            ));
        }
        let clusters: u64 = self.0.iter().map(|held| held.content.clusters_needed(cluster)).sum();
        let mut next = change.find_free(clusters + directory.div_ceil(cluster)).await?;
        for held in &mut self.0 {
            let (entries, end) = match &held.content {
                Content::Kept => continue,
                Content::Bits(bits) => {
                    (bits.parts(cluster).len(), bits.write(&change, next, cluster).await?)
                }
                Content::Nothing => {
                    change.write(TABLE, next, &[0; 8]).await?;
                    (1, next + cluster)
                }
            };
            held.entry.table_size = entries as u32;
            held.entry.table_offset = next;
            next = end;
        }
        let entries = self.entries();
        if entries.is_empty() {
            new.bitmaps = None;
            new.autoclear &= !AUTOCLEAR_BITMAPS;
            new.extensions.retain(|extension| extension.kind != EXTENSION_BITMAPS);
        } else {
            change
                .write("qcow2 bitmap directory", next, &bitmap_directory::encode(&entries))
                .await?;
            let count = entries.len() as u32;
            new.bitmaps =
                Some(BitmapsExtension { count, directory_size: directory, directory_offset: next });
            new.autoclear |= AUTOCLEAR_BITMAPS;
        }
        change.switch(new).await.map(|_| ())
    }

    fn entries(&self) -> Vec<BitmapEntry> {
        self.0.iter().map(|held| held.entry.clone()).collect()
    }
}

impl Content {
    /// Returns the number of clusters that the table and the data need.
    fn clusters_needed(&self, cluster: u64) -> u64 {
        match self {
            Content::Kept => 0,
            Content::Bits(bits) => bits.clusters_needed(cluster),
            Content::Nothing => 1,
        }
    }
}

/// Refuses an entry that is not fully understood.
fn can_be_written(entry: &BitmapEntry, header: &Header) -> Result<(), ImageError> {
    entry.odd(header).map_or(Ok(()), |what| Err(refuse_odd(entry, what)))?;
    can_be_kept(entry)
}

/// Refuses an entry that a new directory would change. Another bitmap can be removed although this
/// one is wrong in other ways.
fn can_be_kept(entry: &BitmapEntry) -> Result<(), ImageError> {
    let what = match entry {
        _ if entry.kind != DIRTY_TRACKING => OddBitmap::Kind(entry.kind),
        _ if entry.extra_len > 0 => OddBitmap::Extra(entry.extra_len),
        _ if entry.name.contains(char::REPLACEMENT_CHARACTER) => OddBitmap::NotUtf8,
        _ => return Ok(()),
    };
    Err(refuse_odd(entry, what))
}

fn refuse_odd(entry: &BitmapEntry, what: OddBitmap) -> ImageError {
    let what = format!("bitmap \"{}\": {what}: remove it first", entry.name);
    ImageError::refused(STRUCTURE, what)
}

impl Bits {
    /// Returns a bitmap without set bits.
    fn new(size: u64, granularity_bits: u8) -> Result<Self, ImageError> {
        let len = Self::bytes_needed(size, granularity_bits)?;
        Ok(Bits { granularity_bits, size: whole_sectors(size), bytes: vec![0; len as usize] })
    }

    /// Returns the size of the data of a bitmap. Fails if QEMU does not accept that size.
    fn bytes_needed(size: u64, granularity_bits: u8) -> Result<u64, ImageError> {
        let len = whole_sectors(size).div_ceil(1 << granularity_bits).div_ceil(8);
        if len > MAX_BITMAP_BYTES {
            let what =
                "a bitmap of this granularity would be larger than 512 MiB: choose a larger one";
            return Err(ImageError::refused(STRUCTURE, what));
        }
        Ok(len)
    }

    async fn read(file: &Raw, header: &Header, entry: &BitmapEntry) -> Result<Self, ImageError> {
        let structure = format!("qcow2 bitmap \"{}\"", entry.name);
        let invalid =
            |what: String| ImageError::invalid(structure.clone(), entry.table_offset, what);
        if let Some(fault) = entry.table_fault(header) {
            return Err(invalid(fault.to_string()));
        }
        if !GRANULARITY_BITS.contains(&entry.granularity_bits) {
            return Err(invalid(format!("a granularity of 2^{} bytes", entry.granularity_bits)));
        }
        let mut bits = Bits::new(header.size, entry.granularity_bits)?;
        let cluster = header.cluster_size() as usize;
        if bits.bytes.len().div_ceil(cluster) != entry.table_size as usize {
            return Err(invalid(format!(
                "its table has {} entries, too many or too few",
                entry.table_size
            )));
        }
        let io = |at: u64, e| ImageError::io(structure.clone(), at, "reading", e);
        let table = bytes::read(file, entry.table_offset, entry.table_size as usize * 8).await;
        let table = table.map_err(|e| io(entry.table_offset, e))?;
        let end = file.storage().len().await.map_err(|e| io(0, e))?;
        if entry.table_offset.saturating_add(table.len() as u64) > end {
            return Err(invalid("its table ends beyond the end of the file".into()));
        }
        for (index, part) in bits.bytes.chunks_mut(cluster).enumerate() {
            let word = be64(&table, index * 8);
            match word & OFFSET_MASK {
                0 if word & ALL_ONES != 0 => part.fill(0xff),
                0 => {}
                at if word == at
                    && at.is_multiple_of(cluster as u64)
                    && at + part.len() as u64 <= end =>
                {
                    part.copy_from_slice(
                        &bytes::read(file, at, part.len()).await.map_err(|e| io(at, e))?,
                    );
                }
                _ => {
                    return Err(invalid(format!(
                        "table entry {index}: {word:#x} is not a cluster of the file"
                    )));
                }
            }
        }
        bits.mask();
        Ok(bits)
    }

    /// Returns the number of bits: pieces of the disk.
    fn count(&self) -> u64 {
        self.size.div_ceil(1 << self.granularity_bits)
    }

    /// Clears the bits behind the last piece.
    fn mask(&mut self) {
        if let (rest @ 1.., Some(last)) = (self.count() % 8, self.bytes.last_mut()) {
            *last &= (1u8 << rest) - 1;
        }
    }

    fn resize(&mut self, size: u64) -> Result<(), ImageError> {
        let len = Bits::new(size, self.granularity_bits)?.bytes.len();
        self.size = size;
        self.bytes.resize(len, 0);
        self.mask();
        Ok(())
    }

    /// Sets the bits of all pieces that overlap set bits of `source`.
    fn merge(&mut self, source: &Bits) -> Result<(), ImageError> {
        if source.size != self.size {
            let what =
                format!("a bitmap for {} bytes cannot go into one for {}", source.size, self.size);
            return Err(ImageError::refused(STRUCTURE, what));
        }
        if source.granularity_bits == self.granularity_bits {
            self.bytes.iter_mut().zip(&source.bytes).for_each(|(to, from)| *to |= from);
            return Ok(());
        }
        for (index, &byte) in source.bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let start = (index as u64 * 8 + bit) << source.granularity_bits;
                let end = (start + (1 << source.granularity_bits)).min(self.size);
                for piece in
                    start >> self.granularity_bits..end.div_ceil(1 << self.granularity_bits)
                {
                    self.bytes[(piece / 8) as usize] |= 1 << (piece % 8);
                }
            }
        }
        Ok(())
    }

    /// Returns the data of each table entry; None: all bits of that part are clear.
    fn parts(&self, cluster: u64) -> Vec<Option<&[u8]>> {
        let set = |part: &&[u8]| part.iter().any(|&byte| byte != 0);
        self.bytes.chunks(cluster as usize).map(|part| Some(part).filter(set)).collect()
    }

    fn table_clusters(&self, cluster: u64) -> u64 {
        (self.bytes.len() as u64).div_ceil(cluster).saturating_mul(8).div_ceil(cluster)
    }

    /// Returns the number of clusters that the bitmap's table and data need.
    fn clusters_needed(&self, cluster: u64) -> u64 {
        self.table_clusters(cluster) + self.parts(cluster).iter().flatten().count() as u64
    }

    /// Writes the bitmap's table and data at offset `at`; returns the offset behind them.
    async fn write(
        &self,
        change: &OfflineChange<'_>,
        at: u64,
        cluster: u64,
    ) -> Result<u64, ImageError> {
        let parts = self.parts(cluster);
        let mut table = vec![0; parts.len() * 8];
        let mut next = at + self.table_clusters(cluster) * cluster;
        for (index, part) in parts.into_iter().enumerate() {
            let Some(part) = part else { continue };
            put64(&mut table, index * 8, next);
            let mut data = part.to_vec();
            data.resize(cluster as usize, 0);
            change.write("qcow2 bitmap data", next, &data).await?;
            next += cluster;
        }
        change.write(TABLE, at, &table).await?;
        Ok(next)
    }
}
