#![cfg(test)]
//! Tests of the header: round trips, and one wrong field at a time.

use super::*;
use crate::error::ErrorKind;

const FILE: u64 = 1 << 20;

fn plain() -> Header {
    Header {
        version: 3,
        cluster_bits: 16,
        size: 1 << 30,
        l1_size: 2,
        l1_offset: 0x30000,
        refcount_table_offset: 0x10000,
        refcount_table_clusters: 1,
        snapshot_count: 0,
        snapshots_offset: 0,
        incompatible: 0,
        compatible: 0,
        autoclear: 0,
        refcount_order: 4,
        header_length: 112,
        compression: Compression::Zlib,
        backing: None,
        backing_offset: 0,
        backing_format: None,
        data_file: None,
        bitmaps: None,
        extensions: Vec::new(),
        unknown_fields: vec![0; 7],
    }
}

fn area(header: &Header) -> Vec<u8> {
    let mut bytes = header.serialize().unwrap();
    bytes.resize(header.cluster_size() as usize, 0);
    bytes
}

fn error(change: impl FnOnce(&mut Header)) -> String {
    let mut header = plain();
    change(&mut header);
    Header::parse(&area(&header), FILE).unwrap_err().to_string()
}

#[test]
fn a_serialized_header_parses_to_the_same_header() {
    let full = Header {
        l1_size: 4,
        incompatible: INCOMPATIBLE_COMPRESSION | INCOMPATIBLE_EXTENDED_L2,
        compression: Compression::Zstd,
        autoclear: AUTOCLEAR_BITMAPS | 1 << 40,
        compatible: 1 << 63 | COMPATIBLE_LAZY_REFCOUNTS,
        backing: Some("base ä.raw".into()),
        backing_format: Some("raw".into()),
        bitmaps: Some(BitmapsExtension { count: 1, directory_size: 32, directory_offset: 0x50000 }),
        extensions: vec![Extension { kind: 0x1234_5678, data: b"unknown".to_vec() }],
        unknown_fields: vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14],
        header_length: 120,
        ..plain()
    };
    let parsed = Header::parse(&area(&full), FILE).unwrap();
    assert_eq!(parsed.backing_offset as usize % 8, 0);
    assert_eq!(parsed.extensions.len(), 3);
    let expected = Header {
        backing_offset: parsed.backing_offset,
        extensions: parsed.extensions.clone(),
        ..full
    };
    assert_eq!(parsed, expected);
    assert_eq!(Header::parse(&area(&parsed), FILE).unwrap(), parsed);
}

#[test]
fn version_2_has_no_features() {
    let old = Header { version: 2, header_length: 72, unknown_fields: Vec::new(), ..plain() };
    let parsed = Header::parse(&area(&old), FILE).unwrap();
    assert_eq!((&parsed, parsed.refcount_bits()), (&old, 16));
}

#[test]
fn a_removed_backing_format_is_not_written() {
    let mut header =
        Header { backing: Some("b".into()), backing_format: Some("raw".into()), ..plain() };
    header = Header::parse(&area(&header), FILE).unwrap();
    (header.backing, header.backing_format) = (None, None);
    let parsed = Header::parse(&area(&header), FILE).unwrap();
    assert_eq!((parsed.backing, parsed.backing_format, parsed.backing_offset), (None, None, 0));
}

#[test]
fn every_field_is_checked() {
    type Change = Box<dyn FnOnce(&mut Header)>;
    let cases: Vec<(&str, Change)> = vec![
        (
            "at offset 36: the L1 table has 1 entries, and 1073741824 bytes need 2",
            Box::new(|h| h.l1_size = 1),
        ),
        ("at most 32 MiB", Box::new(|h| h.l1_size = (4 << 20) + 1)),
        ("at most 32 MiB", Box::new(|h| (h.size, h.l1_size) = (u64::MAX, 4 << 20))),
        ("L1 table at offset 40: offset 196609 is not aligned", Box::new(|h| h.l1_offset += 1)),
        ("beyond 2^56", Box::new(|h| h.l1_offset = 1 << 56)),
        (
            "snapshot table at offset 64: offset 9223372036854775808 lies beyond 2^56",
            Box::new(|h| h.snapshots_offset = 1 << 63),
        ),
        (
            "snapshot table at offset 64: offset 1 is not aligned",
            Box::new(|h| h.snapshots_offset = 1),
        ),
        (
            "refcount table at offset 65536: it overlaps the L1 table",
            Box::new(|h| h.l1_offset = 0x10000),
        ),
        ("L1 table at offset 0: it overlaps the header", Box::new(|h| h.l1_offset = 0)),
        ("beyond the end of the file at 1048576", Box::new(|h| h.l1_offset = 0x100000)),
        ("refcount table of 129 clusters", Box::new(|h| h.refcount_table_clusters = 129)),
        ("no refcount table", Box::new(|h| h.refcount_table_clusters = 0)),
        ("refcount order 7", Box::new(|h| h.refcount_order = 7)),
        ("65537 snapshots", Box::new(|h| h.snapshot_count = 65537)),
        ("snapshot table at offset 0: it overlaps", Box::new(|h| h.snapshot_count = 1)),
        (
            "extended L2 entries need",
            Box::new(|h| (h.cluster_bits, h.size, h.incompatible) = (13, 512, 1 << 4)),
        ),
        ("contradict", Box::new(|h| h.incompatible = INCOMPATIBLE_COMPRESSION)),
        ("contradict", Box::new(|h| h.compression = Compression::Zstd)),
        ("without an external data file", Box::new(|h| h.autoclear = AUTOCLEAR_RAW_DATA)),
        ("without the bitmaps extension", Box::new(|h| h.autoclear = AUTOCLEAR_BITMAPS)),
        ("1024 bytes long", Box::new(|h| h.backing = Some("x".repeat(1024)))),
        ("zero byte", Box::new(|h| h.backing = Some("a\0b".into()))),
        (
            "encrypted",
            Box::new(|h| {
                h.extensions.push(Extension { kind: EXTENSION_ENCRYPTION, data: vec![0; 16] })
            }),
        ),
    ];
    for (expected, change) in cases {
        let found = error(change);
        assert!(found.contains(expected), "{found:?} is not about {expected:?}");
    }
}

#[test]
fn invalid_bytes_are_refused() {
    let parse = |at: usize, new: &[u8]| {
        let mut bytes = area(&Header { backing: Some("base".into()), ..plain() });
        bytes[at..at + new.len()].copy_from_slice(new);
        Header::parse(&bytes, FILE).unwrap_err().to_string()
    };
    assert!(parse(0, b"QFI\0").contains("not a qcow2 image"));
    assert!(parse(4, &[0, 0, 0, 1]).contains("version 1"));
    assert!(parse(4, &[0, 0, 0, 4]).contains("version 4"));
    for bits in [0, 8, 22, 255] {
        assert!(parse(20, &[0, 0, 0, bits]).contains("cluster bits"));
    }
    assert!(parse(32, &[0, 0, 0, 1]).contains("AES"));
    assert!(parse(32, &[0, 0, 0, 2]).contains("LUKS"));
    assert!(parse(100, &[0, 0, 0, 96]).contains("header length 96"));
    assert!(parse(100, &[0, 1, 0, 8]).contains("header length 65544"));
    assert!(parse(8, &[0xff; 8]).contains("outside of the first cluster"));
    assert!(
        parse(8, &64u64.to_be_bytes()).contains("outside of the first cluster"),
        "a name over the fields"
    );
    assert!(parse(120, b"\xff").contains("not UTF-8"));
    assert!(parse(112, &[1, 2, 3, 4, 0, 0, 0, 1]).contains("extension 0x01020304 has 1 bytes"));
    assert!(parse(112, &[0, 0, 0, 0, 0, 0, 0, 1]).contains("extension 0x00000000 has 1 bytes"));
}

#[test]
fn truncated_headers_are_parsed_or_refused() {
    let bytes = area(&Header {
        backing: Some("base".into()),
        backing_format: Some("raw".into()),
        ..plain()
    });
    for len in 0..200 {
        assert!(Header::parse(&bytes[..len], len as u64).is_err());
    }
    assert!(Header::parse(&bytes, 0x30000 + 15).is_err());
    assert!(
        Header::parse(&bytes, 0x30000 + 16).is_ok(),
        "the last cluster of an L1 table may be partial"
    );
}

/// Tables in the last cluster of the file, at 0x50000: which of them may end behind the file.
#[test]
fn a_table_may_lie_in_a_partial_last_cluster_unless_it_is_the_l1_table() {
    let parse = |change: fn(&mut Header), file_len| {
        let mut header = plain();
        change(&mut header);
        Header::parse(&area(&header), file_len)
    };
    let bitmap = BitmapsExtension { count: 1, directory_size: 32, directory_offset: 0x50000 };
    let with_bitmap = Header { autoclear: AUTOCLEAR_BITMAPS, bitmaps: Some(bitmap), ..plain() };
    for file_len in [0x50001, 0x5fff0, 0x60000, u64::MAX] {
        assert!(parse(|h| h.refcount_table_offset = 0x50000, file_len).is_ok(), "{file_len:#x}");
        let snapshot = |h: &mut Header| (h.snapshots_offset, h.snapshot_count) = (0x50000, 1);
        assert!(parse(snapshot, file_len).is_ok(), "{file_len:#x}");
        assert!(Header::parse(&area(&with_bitmap), file_len).is_ok(), "{file_len:#x}");
    }
    let behind = |h: &mut Header| h.refcount_table_offset = 0x50000;
    assert!(parse(behind, 0x50000).unwrap_err().to_string().contains("the file is truncated"));
    let two = |h: &mut Header| {
        (h.refcount_table_offset, h.refcount_table_clusters) = (0x50000, 2);
    };
    assert!(parse(two, 0x60000).is_err() && parse(two, 0x60001).is_ok());
    let last_l1 = |h: &mut Header| h.l1_offset = 0x50000;
    assert!(parse(last_l1, 0x50000 + 15).is_err() && parse(last_l1, 0x50000 + 16).is_ok());
}

#[test]
fn unknown_features_are_refused_with_their_name() {
    let mut entry = vec![0, 9];
    entry.extend_from_slice(b"time\x1b travel");
    entry.resize(48, 0);
    let mut header = plain();
    header.extensions.push(Extension { kind: EXTENSION_FEATURE_NAMES, data: entry });
    header.incompatible = 1 << 9 | 1 << 63;
    let error = Header::parse(&area(&header), FILE).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    let expected = "\"time travel\" (incompatible feature bit 9), incompatible feature bit 63";
    assert!(error.what.ends_with(expected), "{error}");
}

#[test]
fn bitmaps_that_are_inconsistent_keep_their_bytes() {
    let data = vec![0xee; 24];
    let mut header = plain();
    header.extensions.push(Extension { kind: EXTENSION_BITMAPS, data });
    let parsed = Header::parse(&area(&header), FILE).unwrap();
    assert_eq!((parsed.bitmaps, &parsed.extensions), (None, &header.extensions));
    header.autoclear = AUTOCLEAR_BITMAPS;
    let error = Header::parse(&area(&header), FILE).unwrap_err();
    assert_eq!(error.structure, "qcow2 bitmaps extension");
}

#[test]
fn a_header_larger_than_a_cluster_is_refused() {
    let header = Header { cluster_bits: 9, size: 512, backing: Some("x".repeat(500)), ..plain() };
    assert_eq!(header.serialize().unwrap_err().kind, ErrorKind::Refused);
}
