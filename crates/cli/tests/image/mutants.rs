//! Images with damaged metadata, checked by both programs. If QEMU finds an error, ours must find
//! one too.
//!
//! In: images that QEMU creates, and damage from a seed. Out: mutants that QEMU rates worse than we
//! do. `BLOCKYARD_MUTANTS=N` tests N mutants (scripts/soak.d/check-mutants), and `BLOCKYARD_SEED=N`
//! only the one of that seed.

use std::path::Path;

use blockyard_image::qcow2::Header;
use blockyard_storage::sim::Rng;

use crate::common::tool;
use crate::fixture::{Images, MIB, image_any, qemu_img, qemu_io, text};

const SIZE: u64 = 24 * MIB;
/// Number of mutants in a run of all tests.
const FEW: u64 = 12;

/// Options of the images to damage.
const TEMPLATES: [&str; 5] = [
    "cluster_size=4k",
    "compat=0.10,cluster_size=4k",
    "extended_l2=on,cluster_size=128k",
    "refcount_bits=1,cluster_size=4k",
    "lazy_refcounts=on,compression_type=zstd,cluster_size=4k",
];

/// A consistent image with all features of its format.
struct Template {
    options: &'static str,
    bytes: Vec<u8>,
    header: Header,
}

impl Template {
    fn new(images: &Images, options: &'static str) -> Self {
        let path = images.qcow2("template.qcow2", options, None, SIZE, 1);
        if !options.contains("0.10") {
            for name in ["first", "second"] {
                qemu_img(&["bitmap", "--add", "-g", "64k", text(&path), name]);
            }
            qemu_io(&path, "qcow2", &["write -P 5 1M 100k", "write -P 6 11M 64k"]);
        }
        if !options.contains("refcount_bits=1") {
            for name in ["one", "two"] {
                qemu_img(&["snapshot", "-c", name, text(&path)]);
                qemu_io(&path, "qcow2", &["write -P 7 0 20k", "write -z 2M 64k"]);
            }
        }
        let bytes = std::fs::read(&path).unwrap();
        let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
        std::fs::remove_file(&path).unwrap();
        Template { options, bytes, header }
    }

    fn word(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.bytes[at as usize..][..8].try_into().unwrap())
    }

    /// Returns the offsets in the entries of a table.
    fn offsets(&self, at: u64, entries: u64) -> Vec<u64> {
        let words = (0..entries).map(|n| self.word(at + n * 8) & 0x00ff_ffff_ffff_fe00);
        words.filter(|&offset| offset != 0 && offset < self.bytes.len() as u64).collect()
    }

    /// Returns the locations of metadata: name, offset, bytes.
    fn places(&self) -> Vec<(&'static str, u64, u64)> {
        let (header, cluster) = (&self.header, self.header.cluster_size());
        let mut places = vec![("header", 0, header.header_length.into())];
        places.push(("extensions", header.header_length.into(), 400));
        places.push(("L1 table", header.l1_offset, u64::from(header.l1_size) * 8));
        for table in self.offsets(header.l1_offset, header.l1_size.into()) {
            places.push(("L2 table", table, cluster.min(4096)));
        }
        places.push(("refcount table", header.refcount_table_offset, 32));
        for block in self.offsets(header.refcount_table_offset, 4) {
            places.push(("refcount block", block, cluster.min(1024)));
        }
        if header.snapshot_count > 0 {
            let at = header.snapshots_offset;
            places.extend([("snapshot table", at, 160), ("snapshot table", at, 160)]);
            places.push(("L1 table of a snapshot", self.word(at), 16));
        }
        if let Some(bitmaps) = header.bitmaps {
            let (at, len) = (bitmaps.directory_offset, bitmaps.directory_size);
            places.extend([("bitmap directory", at, len), ("bitmap directory", at, len)]);
            places.push(("bitmap table", self.word(at), 16));
        }
        places
    }

    /// Damages one location. Returns a description.
    fn damage(&self, bytes: &mut [u8], rng: &mut Rng) -> String {
        let places = self.places();
        let (name, start, len) = places[rng.below(places.len() as u64) as usize];
        let at = (start + rng.below(len)) as usize;
        let word = (start + rng.below(len / 8) * 8) as usize;
        let old = u64::from_be_bytes(bytes[word..][..8].try_into().unwrap());
        let cluster = self.header.cluster_size();
        let (what, new) = match rng.below(9) {
            0 | 1 => {
                let bit = rng.below(8);
                bytes[at] ^= 1 << bit;
                return format!("{name}: bit {bit} of byte {at} flipped");
            }
            2 => {
                let new = rng.below(256) as u8;
                bytes[at] = new;
                return format!("{name}: byte {at} is {new:#x}");
            }
            3 => ("zero", 0),
            4 => ("a COPIED flag more or less", old ^ 1 << 63),
            5 => ("a cluster further", old.wrapping_add(cluster)),
            6 => ("a cluster less", old.wrapping_sub(cluster)),
            7 => ("a word of another place", self.word(start + rng.below(len / 8) * 8)),
            _ => ("the COPIED flag alone", 1 << 63),
        };
        bytes[word..][..8].copy_from_slice(&new.to_be_bytes());
        format!("{name}: the word at {word} is {what}: {new:#x}, and was {old:#x}")
    }
}

/// Returns our rating of the image (0 consistent, 1 leaks, 2 corrupt or unreadable), and our
/// output.
fn ours(path: &Path) -> (u8, String) {
    let done = image_any(&["check", "-f", "qcow2", text(path)]);
    let output = done.out + &done.err;
    match done.status.code() {
        Some(0) => (0, output),
        Some(4) => (1, output),
        Some(1 | 3) => (2, output),
        _ => panic!("image check ended with {}: {output}", done.status),
    }
}

fn theirs(path: &Path) -> (u8, String) {
    let done = tool("qemu-img", ["check", "-f", "qcow2", text(path)]);
    let output = done.out + &done.err;
    match done.status.code() {
        Some(0) => (0, output),
        Some(3) => (1, output),
        _ => (2, output),
    }
}

/// Returns whether the mutant is the documented exception. Unset flags, or refcounts that the dirty
/// bit covers, endanger no data, because opening the image for writing repairs them. Ours exits
/// with status 4 (docs/images.md), while QEMU reports corruption.
fn is_excepted(ours: &str) -> bool {
    ours.contains("Opening the image for writing")
}

fn judge(path: &Path, bytes: &[u8], what: &str) -> Result<(), String> {
    std::fs::write(path, bytes).unwrap();
    let (theirs, ours) = (theirs(path), ours(path));
    if ours.0 >= theirs.0 || is_excepted(&ours.1) {
        return Ok(());
    }
    Err(format!("{what}\nqemu-img check: {}blockyard image check: {}", theirs.1, ours.1))
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

#[test]
fn our_check_finds_every_error_that_qemu_finds() {
    let images = Images::new();
    let templates = TEMPLATES.map(|options| Template::new(&images, options));
    let path = images.path("mutant.qcow2");
    let seeds = match number("BLOCKYARD_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("BLOCKYARD_MUTANTS").unwrap_or(FEW),
    };
    let count = seeds.end - seeds.start;
    let mut laxer = Vec::new();
    for seed in seeds {
        let mut rng = Rng::new(seed);
        let template = &templates[rng.below(TEMPLATES.len() as u64) as usize];
        let mut bytes = template.bytes.clone();
        let damage: Vec<_> =
            (0..rng.between(1, 3)).map(|_| template.damage(&mut bytes, &mut rng)).collect();
        let what = format!("seed {seed}, {}: {}", template.options, damage.join("; "));
        laxer.extend(judge(&path, &bytes, &what).err());
    }
    println!("mutants: {count}, of which {} are found by QEMU alone", laxer.len());
    assert!(laxer.is_empty(), "{}", laxer.join("\n\n"));
}

/// Writes bytes at `at`. Both programs must report corruption, ours with a line that has `part`.
#[track_caller]
fn both_find(template: &Template, path: &Path, at: u64, new: &[u8], part: &str) {
    let mut bytes = template.bytes.clone();
    bytes[at as usize..][..new.len()].copy_from_slice(new);
    std::fs::write(path, &bytes).unwrap();
    let (theirs, ours) = (theirs(path), ours(path));
    assert_eq!((theirs.0, ours.0), (2, 2), "{part}: {}{}", theirs.1, ours.1);
    assert!(ours.1.contains(part), "{part}: {}", ours.1);
}

#[test]
fn both_find_bad_bitmap_entries_missing_snapshots_and_wrong_flags() {
    let images = Images::new();
    let path = images.path("mutant.qcow2");
    let template = Template::new(&images, "cluster_size=4k");
    let both = |at, new: &[u8], part| both_find(&template, &path, at, new, part);
    let entry = template.header.bitmaps.unwrap().directory_offset;
    both(entry + 8, &[0; 4], "it has no table");
    both(entry + 12, &[0, 0, 0, 4], "its flags 0x4 are not known");
    both(entry + 16, &[2], "its type 2 is not known");
    both(entry + 17, &[8], "its granularity is 2^8");
    both(entry + 17, &[32], "its granularity is 2^32");
    both(entry + 17, &[9], "the disk's size needs 2");
    // The name of the bitmap is "first". The first damage declares a name of one byte and four
    // bytes of extra data. The second damage declares an empty name.
    both(entry + 18, &[0, 1, 0, 0, 0, 4], "4 bytes of extra data");
    both(entry + 18, &[0, 0], "its name must have");
    both(24, &12u64.to_be_bytes(), "the disk's size needs 0");
    let header = &template.header;
    both(60, &(header.snapshot_count + 1).to_be_bytes(), "does not store the disk's size");
    let empty = (0..u64::from(header.l1_size))
        .map(|n| header.l1_offset + n * 8)
        .find(|&at| template.word(at) == 0);
    both(empty.unwrap(), &[0x80], "there is no L2 table");
    let snapshot = template.word(header.snapshots_offset);
    both(snapshot + (empty.unwrap() - header.l1_offset), &[0x80], "there is no L2 table");
}
