//! Tests of check, make_empty and merge on the simulated disk.

use blockyard_ring::Segments;
use blockyard_storage::Storage;
use blockyard_storage::sim::{OpKind, Phase, SimConfig, SimDisk, SimImage, pattern};

use super::bitmap::PAGE_SECTORS;
use super::tests::{Bench, SHAPES, backing, read, size_of, write};
use super::*;
use crate::{CopyDown, Image, Layer};

/// Makes a backing file that holds pattern 0, as `read` assumes.
fn base(size: u64) -> (SimDisk, Raw) {
    let disk = SimDisk::new(SimImage::from_bytes(&pattern(0, 0, size as usize)), SimConfig::new(9));
    (disk.clone(), Raw::on(disk, SHAPES[0]))
}

async fn bytes(raw: &Raw, offset: u64, len: usize) -> Vec<u8> {
    let (segments, result) = raw.read(Segments::buffer(len), offset).await;
    result.unwrap();
    let mut bytes = vec![0; len];
    segments.copy_out(0, &mut bytes);
    bytes
}

/// Commits a closed file.
async fn commit(file: &Raw, cow: Cow, base: Raw) -> Result<(), ImageError> {
    let size = cow.size();
    let (from, into) = (Layer::Cow(cow), Layer::Raw { raw: base, size });
    let (from, into) = (Image::new(vec![from], false), Image::new(vec![into], false));
    CopyDown::new(0..size, 1, Arc::default()).run(&from, &into, async |_| Ok(())).await?;
    into.close().await.map_err(|e| ImageError::io("backing file", None, "closing", e))?;
    make_empty(file).await
}

#[test]
fn info_counts_the_sectors_that_the_file_stores() {
    Bench::new(1, SHAPES[0]).run(1, |bench| async move {
        let header = bench.create(3, size_of(2)).await;
        let cow = bench.open(u64::MAX).await;
        write(&cow, 0, &[1; 3 * 512]).await.unwrap();
        write(&cow, PAGE_SECTORS * 512, &[1; 512]).await.unwrap();
        cow.close().await.unwrap();
        let report = info(&bench.raw()).await.unwrap();
        assert_eq!((report.own_sectors, report.file_len, report.leaked), (4, header.file_len(), 0));
        assert_eq!(report.header, header);
        assert!(report.corruptions.is_empty() && report.repaired.is_empty());
    });
}

#[test]
fn a_check_writes_nothing_unless_a_repair_is_requested() {
    Bench::new(2, SHAPES[1]).run(2, |bench| async move {
        let size = 11 * 512;
        let header = bench.create(3, size).await;
        let cow = bench.open(u64::MAX).await;
        write(&cow, 512, &[1; 512]).await.unwrap();
        write(&cow, 9 * 512, &[2; 512]).await.unwrap();
        cow.close().await.unwrap();
        // Sets bits 12 and 15 of a disk of 11 sectors. Below, the file loses two sectors of data.
        bench
            .raw()
            .write(Segments::from_bytes(&[0b1001_0010]), header.bitmap_offset + 1, false)
            .await
            .1
            .unwrap();
        let error = Cow::open(bench.raw(), &CowOptions::default()).await.err().unwrap().to_string();
        let expected = "cow bitmap at offset 8193: bits are set beyond the disk's 11 sectors";
        assert!(error.starts_with(expected), "{error}");
        let options = CowOptions { read_only: true, ..CowOptions::default() };
        let cow = Cow::open(bench.raw(), &options).await.unwrap();
        assert_eq!(
            read(&cow, 9 * 512, 1024).await.unwrap(),
            [vec![2; 512], pattern(0, 5120, 512)].concat()
        );
        bench.disk.set_len(header.file_len() - 1024).await.unwrap();
        let events = bench.disk.events();
        let report = check(&bench.raw(), Repair { leaks: true, corruptions: false }).await.unwrap();
        let found: Vec<_> = report.corruptions.iter().map(ToString::to_string).collect();
        let lost = "cow data at offset 16896: the file ends after 16896 bytes, and should have \
                    17920: 1 sectors of its own are lost";
        let beyond = "cow bitmap at offset 8193: bits set beyond the disk's 11 sectors: 2";
        assert_eq!(found, [beyond, lost]);
        assert_eq!((report.own_sectors, bench.disk.events()), (2, events));

        let report = check(&bench.raw(), Repair { leaks: true, corruptions: true }).await.unwrap();
        assert_eq!((report.corruptions.len(), report.repaired.len()), (0, 2));
        let cow = bench.open(u64::MAX).await;
        let expected = [
            pattern(0, 0, 512),
            vec![1; 512],
            pattern(0, 1024, 7 * 512),
            vec![0; 512],
            pattern(0, 5120, 512),
        ];
        assert_eq!(read(&cow, 0, size).await.unwrap(), expected.concat());

        bench.disk.set_len(header.file_len() + 4096).await.unwrap();
        assert_eq!(info(&bench.raw()).await.unwrap().leaked, 4096);
        let report = check(&bench.raw(), Repair { leaks: true, corruptions: false }).await.unwrap();
        assert_eq!(
            (report.leaked, report.file_len, report.repaired.len()),
            (0, header.file_len(), 1)
        );
        let report = check(&bench.raw(), Repair::default()).await.unwrap();
        assert_eq!((report.leaked, report.corruptions.len(), report.repaired.len()), (0, 0, 0));
    });
}

#[test]
fn a_commit_syncs_the_backing_file_before_it_clears_bits() {
    for (version, shape) in [1, 2, 3].into_iter().flat_map(|v| SHAPES.map(|s| (v, s))) {
        Bench::new(3, shape).run(3, |bench| async move {
            let size = 3 << 20;
            let header = bench.create(version, size).await;
            let (base_disk, base) = base(size);
            let cow = bench.open(u64::MAX).await;
            for (tag, at, len) in [(1, 512, 1024), (2, 1 << 20, 1_100_288), (3, size - 512, 512)] {
                write(&cow, at, &pattern(tag, at, len)).await.unwrap();
            }
            let expected = read(&cow, 0, size).await.unwrap();
            cow.close().await.unwrap();
            commit(&bench.raw(), cow, base.clone()).await.unwrap();
            assert_eq!(
                bytes(&base, 0, size as usize).await,
                expected,
                "version {version}, {shape:?}"
            );
            let synced = base_disk.trace().iter().rposition(|t| t.kind == OpKind::Sync).unwrap();
            let written = base_disk.trace().iter().rposition(|t| t.kind == OpKind::Write).unwrap();
            assert!(written < synced, "the copied data are durable");
            let report = info(&bench.raw()).await.unwrap();
            assert_eq!((report.own_sectors, report.header), (0, header));
            // The data's space is discarded after the cleared bits are durable.
            let trace = bench.disk.trace();
            let last = |kind| {
                trace.iter().rposition(|t| t.kind == kind && t.phase == Phase::Started).unwrap()
            };
            assert!(last(OpKind::Discard) > last(OpKind::Sync));
            let cow = bench.open(u64::MAX).await;
            assert_eq!(read(&cow, 0, 4096).await.unwrap(), pattern(0, 0, 4096));
        });
    }
}

#[test]
fn an_inconsistent_file_is_not_emptied() {
    Bench::new(4, SHAPES[0]).run(4, |bench| async move {
        let header = bench.create(3, 11 * 512).await;
        let cow = bench.open(u64::MAX).await;
        write(&cow, 0, &[1; 512]).await.unwrap();
        cow.close().await.unwrap();
        bench
            .raw()
            .write(Segments::from_bytes(&[0b1000_0000]), header.bitmap_offset + 1, false)
            .await
            .1
            .unwrap();
        let error = make_empty(&bench.raw()).await.unwrap_err().to_string();
        assert!(error.contains("bits are set beyond the disk's 11 sectors"), "{error}");
        assert_eq!(info(&bench.raw()).await.unwrap().own_sectors, 1);
    });
}

#[test]
fn a_merge_writes_the_disk_without_blocks_of_zeroes() {
    Bench::new(5, SHAPES[0]).run(5, |bench| async move {
        let size = (2 << 20) + 700;
        bench.create(3, size).await;
        let (base_disk, base) = base(1 << 20);
        base_disk.set_len(size).await.unwrap();
        let cow = bench.open(u64::MAX).await;
        cow.write_zeroes(8192, 16384, true).await.unwrap();
        write(&cow, 12288, &pattern(1, 12288, 512)).await.unwrap();
        write(&cow, cow.size() - 512, &pattern(1, cow.size() - 512, 512)).await.unwrap();
        let target_disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
        let target = Raw::on(target_disk.clone(), SHAPES[0]);
        merge(&cow, &base, &target, |_| ()).await.unwrap();
        let mut expected = pattern(0, 0, 1 << 20);
        expected.resize(cow.size() as usize, 0);
        expected[8192..24576].fill(0);
        for at in [12288, cow.size() - 512] {
            expected[at as usize..][..512].copy_from_slice(&pattern(1, at, 512));
        }
        assert_eq!(target_disk.contents(), expected);
        let trace = target_disk.trace();
        let written: u64 = trace
            .iter()
            .filter(|t| t.phase == Phase::Answered && t.kind == OpKind::Write)
            .map(|t| t.len)
            .sum();
        assert_eq!(written, (1 << 20) - 12288 + 512, "a block of zeroes is not written");
        let error = merge(&cow, &base, &target, |_| ()).await.unwrap_err().to_string();
        assert!(error.starts_with("merged image: the file has 2098176 bytes already"), "{error}");
    });
}

#[test]
fn unusual_alignments_are_checked_correctly() {
    Bench::new(6, SHAPES[0]).run(6, |bench| async move {
        let options = CreateOptions { alignment: 700, ..CreateOptions::new(backing(100 * 512)) };
        let header = create(&bench.raw(), &options).await.unwrap();
        assert_eq!((header.bitmap_offset, header.bitmap_len, header.data_offset), (4200, 13, 4900));
        let cow = bench.open(u64::MAX).await;
        write(&cow, 0, &pattern(1, 0, 100 * 512)).await.unwrap();
        cow.close().await.unwrap();
        let report = info(&bench.raw()).await.unwrap();
        assert_eq!((report.own_sectors, report.corruptions.len(), report.leaked), (100, 0, 0));
        let again = bench.open(u64::MAX).await;
        assert_eq!(read(&again, 0, 100 * 512).await.unwrap(), pattern(1, 0, 100 * 512));
    });
}

/// Opening or checking a truncated file shows the same disk or returns an error with an offset.
/// Nothing is written.
#[test]
fn a_truncated_file_fails_or_shows_the_same_disk() {
    for version in [1, 2, 3] {
        Bench::new(7, SHAPES[0]).run(7, |bench| async move {
            let size = 64 * 512;
            let header = bench.create(version, size).await;
            let cow = bench.open(u64::MAX).await;
            write(&cow, 512, &pattern(1, 512, 20 * 512)).await.unwrap();
            cow.close().await.unwrap();
            let (whole, expected) = (bench.disk.contents(), read(&cow, 0, size).await.unwrap());
            let (ends, mut refused) =
                ((0..whole.len()).step_by(256).chain([1, 7, 8, 279, 4119, 4127, 4135]), 0);
            for end in ends.filter(|&end| end < whole.len()) {
                let disk = SimDisk::new(SimImage::from_bytes(&whole[..end]), SimConfig::new(1));
                let raw = Raw::on(disk.clone(), SHAPES[0]);
                for read_only in [true, false] {
                    let opened =
                        Cow::open(raw.clone(), &CowOptions { read_only, ..CowOptions::default() })
                            .await;
                    match opened {
                        Ok(cow) => assert!(
                            read(&cow, 0, size).await.is_ok_and(|disk| disk == expected),
                            "at {end}"
                        ),
                        Err(e) => assert!(e.offset.is_some(), "at {end}: {e}"),
                    }
                }
                match check(&raw, Repair::default()).await {
                    Ok(report) => {
                        assert!(report.corruptions.iter().all(|e| e.offset.is_some()), "at {end}")
                    }
                    Err(e) => {
                        refused += 1;
                        assert!(e.offset.is_some(), "at {end}: {e}");
                    }
                }
                assert_eq!(disk.events(), 0, "at {end}: something was written");
            }
            assert!(refused > 1 && whole.len() as u64 == header.file_len(), "{refused}");
        });
    }
}
