//! Damages images, one kind at a time, by changing bytes. Both checks must detect it, and each must
//! find the other's repair clean.

use blockyard_image::qcow2::Header;
use blockyard_image::qcow2::check::Repair;
use blockyard_image::qcow2::entry::{COMPRESSED, COPIED, OFFSET_MASK};

use super::images::image;
use super::peer::{Scratch, check_in_pieces, our_check, qemu_check, qemu_img};

/// An image's bytes, and functions to find and change its structures.
struct DamagedImage {
    bytes: Vec<u8>,
    header: Header,
}

impl DamagedImage {
    fn new(path: &str) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
        DamagedImage { bytes, header }
    }

    fn get(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.bytes[at as usize..][..8].try_into().unwrap())
    }

    fn put(&mut self, at: u64, word: u64) {
        self.bytes[at as usize..][..8].copy_from_slice(&word.to_be_bytes());
    }

    /// Returns the offset of the n-th L1 entry that names a table, and the table's offset.
    fn l1(&self, n: usize) -> (u64, u64) {
        let all = (0..u64::from(self.header.l1_size)).map(|i| self.header.l1_offset + i * 8);
        let at = all.filter(|&at| self.get(at) != 0).nth(n).unwrap();
        (at, self.get(at) & OFFSET_MASK)
    }

    /// Returns the offset and the value of the n-th L2 entry that names a cluster, in the first
    /// table.
    fn l2(&self, n: usize) -> (u64, u64) {
        let (_, table) = self.l1(0);
        let all = (0..self.header.l2_entries()).map(|i| table + i * self.header.l2_entry_size());
        let standard =
            |&at: &u64| self.get(at) & COMPRESSED == 0 && self.get(at) & OFFSET_MASK != 0;
        let at = all.filter(standard).nth(n).unwrap();
        (at, self.get(at))
    }

    /// Sets the refcount of the cluster at `offset`.
    fn set_refcount(&mut self, offset: u64, change: impl Fn(u64) -> u64) {
        let (width, cluster) = (self.header.refcount_width(), offset >> self.header.cluster_bits);
        let per_block = width.per_block(self.header.cluster_size());
        let block = self.get(self.header.refcount_table_offset + cluster / per_block * 8) as usize;
        let block = &mut self.bytes[block..][..self.header.cluster_size() as usize];
        let n = (cluster % per_block) as usize;
        let new = change(width.get(block, n));
        width.set(block, n, new);
    }

    /// Appends an unused cluster to the file.
    fn append_cluster(&mut self) -> u64 {
        let at = (self.bytes.len() as u64).next_multiple_of(self.header.cluster_size());
        self.bytes.resize((at + self.header.cluster_size()) as usize, 0);
        at
    }
}

/// How the two checks must agree, and what a repair achieves.
#[derive(Clone, Copy, PartialEq)]
enum Expect {
    /// Both checks count the same errors and repair all of them. The guest's data are unchanged.
    Same,
    /// Both checks find corruption and repair it. The guest's data are unchanged.
    Mended,
    /// Like `Mended`, but QEMU cannot repair it.
    MendedHere,
    /// Both find corruption, and each finds the other's repair clean; the guest's data have
    /// changed.
    DataLost,
    /// Both find corruption that this crate does not repair, because the intended state cannot be
    /// known.
    Stays,
}

type Damage = (&'static str, Expect, fn(&mut DamagedImage));

const DAMAGES: [Damage; 19] = [
    ("a leak", Expect::Same, |p| {
        let at = p.append_cluster();
        p.set_refcount(at, |_| 1);
    }),
    ("a refcount that is too high", Expect::Same, |p| {
        // The COPIED flag is clear, as after a snapshot.
        let (at, word) = p.l2(0);
        p.put(at, word & !COPIED);
        p.set_refcount(word & OFFSET_MASK, |n| n + 1);
    }),
    ("the refcount of data is 0", Expect::Mended, |p| {
        let (_, word) = p.l2(0);
        p.set_refcount(word & OFFSET_MASK, |_| 0);
    }),
    ("the refcount of an L2 table is 0", Expect::Mended, |p| {
        let (_, table) = p.l1(0);
        p.set_refcount(table, |_| 0);
    }),
    ("the refcount of the header is 0", Expect::Mended, |p| p.set_refcount(0, |_| 0)),
    ("a COPIED flag is missing", Expect::Mended, |p| {
        let (at, word) = (0..).map(|n| p.l2(n)).find(|(_, word)| word & COPIED != 0).unwrap();
        p.put(at, word & !COPIED);
    }),
    ("an L1 entry's COPIED flag is wrong", Expect::Same, |p| {
        let (at, _) = p.l1(0);
        let word = p.get(at);
        p.put(at, word ^ COPIED);
    }),
    ("a refcount block is missing", Expect::Mended, |p| p.put(p.header.refcount_table_offset, 0)),
    ("a refcount block is not aligned", Expect::MendedHere, |p| {
        let at = p.header.refcount_table_offset;
        p.put(at, p.get(at) | 1 << (p.header.cluster_bits - 1));
    }),
    // QEMU enlarges the file to there, and looks at the refcount of each cluster.
    ("a refcount block lies beyond the end", Expect::Mended, |p| {
        p.put(p.header.refcount_table_offset, 1 << 30)
    }),
    ("a refcount block is full of ones", Expect::Mended, |p| {
        let at = p.get(p.header.refcount_table_offset) as usize;
        let len = p.header.cluster_size() as usize;
        p.bytes[at..at + len].fill(0xff);
    }),
    ("an L2 entry has reserved bits", Expect::Stays, |p| {
        let (at, word) = p.l2(0);
        p.put(at, word | 2);
    }),
    ("an L2 entry is not aligned", Expect::Stays, |p| {
        let (at, word) = p.l2(0);
        p.put(at, word & !1 | 1 << (p.header.cluster_bits - 1));
    }),
    ("an L2 entry lies beyond the end", Expect::Stays, |p| {
        let (at, _) = p.l2(0);
        p.put(at, COPIED | 1 << 40);
    }),
    ("an L1 entry lies beyond the end", Expect::Stays, |p| {
        let (at, _) = p.l1(0);
        p.put(at, COPIED | 1 << 40);
    }),
    ("an L1 entry is not aligned", Expect::Stays, |p| {
        let (at, _) = p.l1(0);
        p.put(at, p.get(at) | 1 << (p.header.cluster_bits - 1));
    }),
    ("two entries name one cluster", Expect::DataLost, |p| {
        let (_, first) = p.l2(0);
        let (at, _) = p.l2(1);
        p.put(at, first);
    }),
    ("data lie in the refcount block", Expect::DataLost, |p| {
        let (at, _) = p.l2(0);
        p.put(at, COPIED | p.get(p.header.refcount_table_offset));
    }),
    ("data lie in the L1 table", Expect::Stays, |p| {
        let (at, _) = p.l2(0);
        p.put(at, COPIED | p.header.l1_offset);
    }),
];

const KINDS: [(&str, &[&str]); 5] = [
    ("compat=0.10", &["snapshots"]),
    ("compat=1.1", &["bitmaps"]),
    ("compat=1.1,cluster_size=4k", &["snapshots", "bitmaps"]),
    ("compat=1.1,refcount_bits=64", &["snapshots"]),
    ("extended_l2=on,cluster_size=64k", &["snapshots"]),
];

#[test]
fn damage_is_found_and_repaired_by_both_checks() {
    for (options, extras) in KINDS {
        let scratch = Scratch::new("damage");
        let path = image(&scratch, options, extras);
        qemu_img(&["convert", "-O", "raw", &path, &scratch.path("before.raw")]);
        let bytes = std::fs::read(&path).unwrap();
        for (name, expect, damage) in DAMAGES {
            std::fs::write(&path, &bytes).unwrap();
            one(&scratch, &path, &format!("{name} ({options})"), expect, damage);
        }
    }
}

/// Damages the image at `path`. `before.raw` has the disk's data.
fn one(scratch: &Scratch, path: &str, what: &str, expect: Expect, damage: fn(&mut DamagedImage)) {
    let (theirs_path, raw) = (scratch.path("theirs.qcow2"), scratch.path("before.raw"));
    let mut damaged = DamagedImage::new(path);
    damage(&mut damaged);
    std::fs::write(path, &damaged.bytes).unwrap();
    std::fs::write(&theirs_path, &damaged.bytes).unwrap();

    let (ours, theirs) = (our_check(path, Repair::No), qemu_check(path, None));
    let findings = &ours.findings[..ours.findings.len().min(4)];
    assert_eq!(
        (ours.corruptions > 0, ours.leaks > 0),
        (theirs.corruptions > 0, theirs.leaks > 0),
        "{what}: {findings:#?}"
    );
    if expect == Expect::Same {
        assert_eq!(
            (ours.corruptions, ours.leaks),
            (theirs.corruptions, theirs.leaks),
            "{what}: {findings:#?}"
        );
    }
    assert_eq!(std::fs::read(path).unwrap(), damaged.bytes, "a check without repair wrote");

    let mut pieces = check_in_pieces(path, Repair::No, 1000);
    pieces.findings.sort_by_key(|f| (f.offset, f.text.clone()));
    let mut whole = ours.clone();
    whole.findings.sort_by_key(|f| (f.offset, f.text.clone()));
    assert!(pieces == whole, "{what}: in pieces {pieces:#?}, as a whole {whole:#?}");
    let copy = scratch.path("pieces.qcow2");
    std::fs::copy(path, &copy).unwrap();

    let repaired = our_check(path, Repair::All);
    check_in_pieces(&copy, Repair::All, 1000);
    assert_eq!(
        std::fs::read(&copy).unwrap(),
        std::fs::read(path).unwrap(),
        "{what}: repaired in pieces"
    );
    if expect == Expect::Stays {
        assert!(repaired.corruptions > 0, "{what}");
        return;
    }
    assert!(
        repaired.is_clean() && repaired.corruptions_fixed + repaired.leaks_fixed > 0,
        "{what}: {repaired:#?}"
    );
    let after = qemu_check(path, None);
    assert!(after.is_clean(), "{what}: {after:#?}");
    if expect != Expect::MendedHere {
        qemu_check(&theirs_path, Some("all"));
        let after = our_check(&theirs_path, Repair::No);
        assert!(after.is_clean(), "{what}, mended by qemu-img: {after:#?}");
    }
    if expect != Expect::DataLost {
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", path, &raw]);
    }
}
