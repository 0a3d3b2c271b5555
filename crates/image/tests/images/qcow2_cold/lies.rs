//! Truncated, circular, overlapping and inconsistent images. Open, read, check and list return an
//! error that names a structure and its offset (or the unchanged contents), and nothing is written.

use blockyard_image::qcow2::bitmap_directory;
use blockyard_image::qcow2::check::{FindingKind, Repair, check};
use blockyard_image::qcow2::{Header, Qcow2, Qcow2Options, snapshot};
use blockyard_image::{Image, ImageError, Layer, Raw};
use blockyard_ring::Segments;
use blockyard_storage::sim::SimImage;

use super::cuts::{load, on_image};
use super::peer::{Scratch, qemu_img, qemu_io};

const CLUSTER: u64 = 1024;

/// Makes an image of 256 KiB with a snapshot, a bitmap, zeroes, and compressed clusters from 192
/// KiB on.
fn image(scratch: &Scratch) -> Vec<u8> {
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=1k", &path, "256k"]);
    qemu_io(
        &path,
        &["write -P 1 0 60k", "write -P 2 100k 40k", "write -z 8k 8k", "write -c -P 3 192k 16k"],
    );
    qemu_img(&["bitmap", "--add", "--disable", &path, "rests"]);
    qemu_img(&["snapshot", "-c", "one", &path]);
    qemu_io(&path, &["write -P 4 10k 16k"]);
    load(&path).bytes()
}

/// Opens the image, and reads the whole disk.
async fn read(raw: Raw, read_only: bool) -> Result<Vec<u8>, ImageError> {
    let header = Header::read(&raw).await?;
    let options = Qcow2Options { read_only, ..Qcow2Options::default() };
    let image =
        Image::new(vec![Layer::Qcow2(Qcow2::open(header, raw, None, &options).await?)], false);
    let mut disk = Vec::new();
    let failed = |at| move |e| ImageError::io("guest's disk", at, "reading", e);
    for at in (0..image.size()).step_by(64 << 10) {
        let len = (image.size() - at).min(64 << 10);
        // Look up the extents, as `map` does.
        image.find(at, len).await.map_err(failed(at))?;
        let (segments, result) = image.read(Segments::buffer(len as usize), at).await;
        result.map_err(failed(at))?;
        let mut bytes = vec![0; len as usize];
        segments.copy_out(0, &mut bytes);
        disk.append(&mut bytes);
    }
    Ok(disk)
}

/// Reads what `info` reads.
async fn list(raw: Raw) -> Result<(), ImageError> {
    let header = Header::read(&raw).await?;
    snapshot::list(&raw).await?;
    match &header.bitmaps {
        Some(extension) => bitmap_directory::read(&raw, extension).await.map(|_| ()),
        None => Ok(()),
    }
}

/// Checks the image. Returns the first finding that is not a leak, as an error.
async fn find(raw: Raw) -> Result<(), ImageError> {
    let report = check(&raw, None, Repair::No).await?;
    match report.findings.into_iter().find(|finding| finding.kind != FindingKind::Leak) {
        Some(finding) => Err(ImageError::invalid(finding.structure, finding.offset, finding.text)),
        None => Ok(()),
    }
}

/// Opens the image for reading, opens it for writing, checks it, and lists its contents. Every
/// error must name a structure or an offset. Only the open for writing may write.
fn opinions(what: &str, bytes: &[u8]) -> [Result<Vec<u8>, String>; 4] {
    let image = SimImage::from_bytes(bytes);
    let none = |result: Result<(), ImageError>| result.map(|()| Vec::new());
    let said = [
        on_image(&image, |raw| read(raw, true)),
        on_image(&image, |raw| read(raw, false)),
        on_image(&image, |raw| async move { none(find(raw).await) }),
        on_image(&image, |raw| async move { none(list(raw).await) }),
    ];
    let mut number = 0;
    said.map(|(result, left)| {
        let may_write = number == 1 && result.is_ok();
        number += 1;
        assert!(may_write || left.bytes() == bytes, "{what}: {number}: something was written");
        result.map_err(|e| {
            assert!(e.offset.is_some(), "{what}: {number}: no offset: {e}");
            e.to_string()
        })
    })
}

#[test]
fn a_truncated_file_fails_or_shows_the_same_disk() {
    let scratch = Scratch::new("short");
    let whole = image(&scratch);
    let [expected, ..] = opinions("whole", &whole);
    let expected = expected.unwrap();
    let header = Header::parse(&whole, whole.len() as u64).unwrap();
    let ends = (0..=whole.len() as u64).step_by(CLUSTER as usize / 2);
    let mut refused = 0;
    for end in ends.chain([1, 4, 71, 72, 103, 104, 111]).filter(|&end| end < whole.len() as u64) {
        let what = format!("cut at {end}");
        let [shown, written, checked, listed] = opinions(&what, &whole[..end as usize]);
        refused += usize::from(shown.is_err());
        for disk in [shown, written].into_iter().flatten() {
            assert!(disk == expected, "{what}: it shows other data");
        }
        let lost_table = end <= header.l1_offset;
        assert!(
            !lost_table || checked.is_err() && listed.is_err(),
            "{what}: {checked:?}, {listed:?}"
        );
    }
    assert!(refused > 20, "{refused} were refused");
}

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap())
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Offsets of structures in the image.
struct Places {
    l1: u64,
    l2: u64,
    /// Two entries of the L2 table at `l2`: one of a data cluster, one of a compressed cluster.
    data_entry: u64,
    packed_entry: u64,
    refcounts: u64,
    block: u64,
    snapshots: u64,
    bitmaps: u64,
    bitmap_table: u64,
}

impl Places {
    fn of(bytes: &[u8]) -> Self {
        let header = Header::parse(bytes, bytes.len() as u64).unwrap();
        let (l1, refcounts) = (header.l1_offset, header.refcount_table_offset);
        let l2 = word(bytes, l1) & OFFSET;
        let packed = word(bytes, l1 + 8) & OFFSET;
        let entry = |table: u64, packed: bool| {
            let found = |&at: &u64| {
                word(bytes, at) & OFFSET != 0 && (word(bytes, at) >> 62 & 1 == 1) == packed
            };
            (table..table + CLUSTER).step_by(8).find(found).unwrap()
        };
        Places {
            l1,
            l2,
            data_entry: entry(l2, false),
            packed_entry: entry(packed, true),
            refcounts,
            block: word(bytes, refcounts),
            snapshots: header.snapshots_offset,
            bitmaps: header.bitmaps.unwrap().directory_offset,
            bitmap_table: word(bytes, header.bitmaps.unwrap().directory_offset),
        }
    }
}

/// An invalid change: name, offset in the file, new bytes, and the structure that the error of an
/// open for writing must name.
type Lie = (&'static str, u64, Vec<u8>, &'static str);

fn lies(p: &Places, bytes: &[u8]) -> Vec<Lie> {
    let w = |word: u64| word.to_be_bytes().to_vec();
    let h = |half: u32| half.to_be_bytes().to_vec();
    let (copied, far) = (1 << 63, 1 << 40);
    let extension = (104..CLUSTER)
        .step_by(8)
        .find(|&at| bytes[at as usize..][..4] == 0x2385_2875u32.to_be_bytes());
    let extension = extension.unwrap();
    vec![
        // Cycles: a table that is its own child, a refcount block that covers only itself, a
        // snapshot table in itself.
        ("L1 entry -> L1 table", p.l1, w(p.l1 | copied), "qcow2 L1 table"),
        ("L2 entry -> its own table", p.data_entry, w(p.l2 | copied), "qcow2"),
        ("L1 entries -> one L2 table", p.l1 + 8, w(p.l2 | copied), "qcow2"),
        ("refcount table entry -> the table", p.refcounts, w(p.refcounts), "qcow2 refcount"),
        ("snapshot's L1 table -> snapshot table", p.snapshots, w(p.snapshots), "qcow2"),
        ("bitmap's table -> directory", p.bitmaps, w(p.bitmaps), "qcow2 table of bitmap"),
        // Overlaps.
        ("L1 table = header", 40, w(0), "qcow2 L1 table"),
        ("L1 table = refcount table", 40, w(p.refcounts), "qcow2"),
        ("refcount table = header", 48, w(0), "qcow2 refcount table"),
        ("snapshot table = L1 table", 64, w(p.l1), "qcow2"),
        ("bitmap directory = L1 table", extension + 24, w(p.l1), "qcow2"),
        ("L1 entry -> refcount table", p.l1, w(p.refcounts | copied), "qcow2"),
        ("L1 entry -> refcount block", p.l1, w(p.block | copied), "qcow2"),
        ("L1 entry -> snapshot table", p.l1, w(p.snapshots | copied), "qcow2"),
        ("data -> L1 table", p.data_entry, w(p.l1 | copied), "qcow2"),
        ("data -> refcount table", p.data_entry, w(p.refcounts | copied), "qcow2"),
        ("data -> refcount block", p.data_entry, w(p.block | copied), "qcow2"),
        ("data -> snapshot table", p.data_entry, w(p.snapshots | copied), "qcow2"),
        ("data -> bitmap directory", p.data_entry, w(p.bitmaps | copied), "qcow2"),
        ("refcount block = L2 table", p.refcounts, w(p.l2), "qcow2"),
        ("bitmap's table = L1 table", p.bitmaps, w(p.l1), "qcow2"),
        // Invalid values: beyond the end, sizes, counts, lengths.
        ("data beyond the end", p.data_entry, w(far | copied), "qcow2 L2 table entry"),
        (
            "data at no cluster",
            p.data_entry,
            w(word(bytes, p.data_entry) + 512),
            "qcow2 L2 table entry",
        ),
        ("L2 table beyond the end", p.l1, w(far | copied), "qcow2 L1 table entry"),
        ("reserved bits", p.l1, w(word(bytes, p.l1) | 1), "qcow2 L1 table entry"),
        ("block beyond the end", p.refcounts, w(far), "qcow2 refcount table entry"),
        ("counts of zero", p.block, w(0), "qcow2 refcount of cluster"),
        ("compressed beyond the end", p.packed_entry, w(1 << 62 | far), "qcow2 L2 table entry"),
        ("compressed for ever", p.packed_entry, w(word(bytes, p.packed_entry) | 3 << 60), "qcow2"),
        ("disk too large", 24, w(1 << 60), "qcow2 header"),
        ("L1 table too short", 36, h(0), "qcow2 header"),
        ("L1 table too long", 36, h(u32::MAX), "qcow2 header"),
        ("no refcounts", 56, h(0), "qcow2"),
        ("refcount table too long", 56, h(u32::MAX), "qcow2 header"),
        ("too many snapshots", 60, h(u32::MAX), "qcow2 header"),
        ("more snapshots than there are", 60, h(60_000), "qcow2 snapshot table"),
        ("snapshot's L1 table too long", p.snapshots + 8, h(u32::MAX), "qcow2"),
        ("snapshot's name too long", p.snapshots + 12, h(u32::MAX), "qcow2 snapshot table"),
        ("snapshot's extra data too long", p.snapshots + 36, h(u32::MAX), "qcow2 snapshot table"),
        ("clusters too large", 20, h(40), "qcow2 header"),
        ("refcounts too wide", 96, h(7), "qcow2 header"),
        ("header too long", 100, h(0xffff_fff8), "qcow2 header"),
        ("extension too long", 108 + 4, h(u32::MAX), "qcow2 header"),
        ("bitmaps without number", extension + 8, h(u32::MAX), "qcow2 bitmaps extension"),
        ("bitmap directory without end", extension + 16, w(u64::MAX), "qcow2 bitmaps extension"),
        ("bitmap's table too long", p.bitmaps + 8, h(u32::MAX), "qcow2 table of bitmap"),
        ("bitmap's name too long", p.bitmaps + 18, vec![0xff, 0xff], "qcow2 bitmap directory"),
        ("bitmap's table beyond the end", p.bitmaps, w(far), "qcow2 table of bitmap"),
        ("bitmap's cluster = L1 table", p.bitmap_table, w(p.l1), "qcow2 table of bitmap"),
    ]
}

#[test]
fn an_invalid_value_is_refused_with_its_structure_and_nothing_is_written() {
    let scratch = Scratch::new("lies");
    let whole = image(&scratch);
    let places = Places::of(&whole);
    let mut faults = Vec::new();
    for (name, at, bytes, structure) in lies(&places, &whole) {
        let mut lying = whole.clone();
        lying[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        let [_, written, checked, _] = opinions(name, &lying);
        for (who, said) in [("opened for writing", written), ("checked", checked)] {
            match said {
                Err(e) if e.starts_with(structure) => {}
                Err(e) => faults.push(format!("{name}, {who}: not {structure:?}: {e}")),
                Ok(_) => faults.push(format!("{name}, {who}: no error")),
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn invalid_compressed_data_fail_when_they_are_read() {
    let scratch = Scratch::new("packed");
    let mut bytes = image(&scratch);
    let at = word(&bytes, Places::of(&bytes).packed_entry) & ((1 << 60) - 1);
    bytes[at as usize..][..16].fill(0xff);
    let [shown, ..] = opinions("compressed data", &bytes);
    let error = shown.unwrap_err();
    assert!(error.starts_with("qcow2 compressed cluster at offset"), "{error}");
}
