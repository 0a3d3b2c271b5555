//! Persistent bitmaps, and how they are marked before the first write.

use blockyard_image::qcow2::Header;
use blockyard_image::qcow2::bitmap::edit::{self, Edit};
use blockyard_image::qcow2::bitmap::{names, prepare_for_writing};
use blockyard_image::qcow2::header::AUTOCLEAR_BITMAPS;
use blockyard_image::qcow2::header::AUTOCLEAR_KNOWN;
use blockyard_storage::sim::SimImage;

use super::cuts::{everywhere, guest, header, load, on_image, opened_sound};
use super::peer::{Scratch, on_file, our_check, qemu_check, qemu_img, qemu_io};

/// Makes an image with a bitmap that records writes, one that does not, and an unknown autoclear
/// bit.
fn image(scratch: &Scratch) -> String {
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=1k", &path, "256k"]);
    qemu_img(&["bitmap", "--add", "-g", "4k", &path, "records"]);
    qemu_img(&["bitmap", "--add", "--disable", &path, "rests"]);
    qemu_io(&path, &["write -P 1 0 64k"]);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[88] = 0x80;
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Returns the bitmaps as QEMU lists them: name and flags.
fn listed(path: &str) -> Vec<(String, Vec<String>)> {
    let info: serde_json::Value =
        serde_json::from_str(&qemu_img(&["info", "-f", "qcow2", "--output", "json", path]))
            .unwrap();
    let bitmaps =
        info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
    let text = |v: &serde_json::Value| v.as_str().unwrap().to_string();
    let flags = |b: &serde_json::Value| b["flags"].as_array().unwrap().iter().map(text).collect();
    bitmaps.iter().map(|b| (text(&b["name"]), flags(b))).collect()
}

async fn prepare(raw: blockyard_image::Raw) -> Result<(), blockyard_image::ImageError> {
    let mut header = Header::read(&raw).await?;
    prepare_for_writing(&raw, &mut header, AUTOCLEAR_KNOWN).await?;
    assert_eq!(header, Header::read(&raw).await?);
    Ok(())
}

#[test]
fn bitmaps_that_record_are_marked_and_the_others_stay_valid() {
    let scratch = Scratch::new("bitmaps");
    let path = image(&scratch);
    on_file(&path, prepare).unwrap();
    let auto = |flags: &[&str]| flags.iter().map(|f| f.to_string()).collect::<Vec<_>>();
    assert_eq!(
        listed(&path),
        [("records".into(), auto(&["in-use", "auto"])), ("rests".into(), auto(&[]))],
    );
    let header = Header::parse(&std::fs::read(&path).unwrap(), u64::MAX).unwrap();
    assert_eq!(header.autoclear, AUTOCLEAR_BITMAPS);
    assert!(qemu_check(&path, None).is_clean());
    // The bitmaps are marked already, so nothing is written.
    let before = std::fs::read(&path).unwrap();
    on_file(&path, prepare).unwrap();
    assert!(std::fs::read(&path).unwrap() == before);
    let found =
        on_file(&path, |raw| async move { names(&raw, &Header::read(&raw).await?).await }).unwrap();
    assert_eq!(found, ["records", "rests"]);
}

#[test]
fn a_power_cut_invalidates_at_most_the_bitmaps() {
    let scratch = Scratch::new("bitmap-cuts");
    let image = load(&image(&scratch));
    let before = guest(&image);
    let flags = |image: &SimImage| {
        let (flags, _) = on_image(image, |raw| async move {
            let extension = Header::read(&raw).await.unwrap().bitmaps.unwrap();
            let (_, bitmaps) =
                blockyard_image::qcow2::bitmap_directory::read(&raw, &extension).await.unwrap();
            bitmaps.iter().map(|b| b.flags).collect::<Vec<_>>()
        });
        flags
    };
    let cuts = everywhere("bitmaps", &image, prepare, |through, left| {
        let opened = opened_sound(&left)?;
        let bitmaps = header(&left)?.bitmaps.is_some();
        let known = !bitmaps || matches!(flags(&left)[..], [2 | 3, 0]);
        match guest(&opened) == before && known && (!through || bitmaps && flags(&left) == [3, 0]) {
            true => Ok(()),
            false => Err(format!("bitmaps: {bitmaps}, {:?}", header(&left))),
        }
    });
    assert!(cuts > 10, "{cuts} cuts");
}

#[test]
fn an_invalid_directory_is_refused_and_nothing_is_written() {
    let scratch = Scratch::new("bitmap-lies");
    let path = image(&scratch);
    let at = Header::parse(&std::fs::read(&path).unwrap(), u64::MAX)
        .unwrap()
        .bitmaps
        .unwrap()
        .directory_offset;
    for (byte, expected) in [(18, "goes on beyond"), (20, "goes on beyond")] {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[88] = 0;
        bytes[at as usize + byte] = 0xff;
        let copy = scratch.path("copy.qcow2");
        std::fs::write(&copy, &bytes).unwrap();
        let error = on_file(&copy, prepare).unwrap_err();
        assert!(error.to_string().contains(expected) && error.offset == Some(at), "{error}");
        assert!(std::fs::read(&copy).unwrap() == bytes);
        let report = our_check(&copy, blockyard_image::qcow2::check::Repair::No);
        assert!(
            report.corruptions > 0 && report.findings[0].structure == "qcow2 bitmap directory",
            "{report:#?}"
        );
    }
}

/// Offsets in the directory of the entries of [`image`].
const ENTRIES: [usize; 2] = [0, 32];

/// Changes the image's bitmap directory: sets bytes `at` of it.
fn change_directory(path: &str, at: usize, to: &[u8]) {
    let mut bytes = std::fs::read(path).unwrap();
    let header = Header::parse(&bytes, u64::MAX).unwrap();
    let at = header.bitmaps.unwrap().directory_offset as usize + at;
    bytes[at..at + to.len()].copy_from_slice(to);
    std::fs::write(path, bytes).unwrap();
}

fn remove(path: &str, name: &'static str) -> Result<(), blockyard_image::ImageError> {
    on_file(path, move |raw| async move { edit::edit(&raw, name, &[Edit::Remove]).await })
}

#[test]
fn bitmaps_that_are_wrong_can_be_removed_one_after_the_other() {
    let scratch = Scratch::new("bitmap-odd");
    let path = image(&scratch);
    for entry in ENTRIES {
        // No entries in its table.
        change_directory(&path, entry + 8, &[0; 4]);
    }
    remove(&path, "records").unwrap();
    remove(&path, "rests").unwrap();
    assert!(listed(&path).is_empty());
    // A new directory would lose the extra data of the other bitmap.
    let path = image(&scratch);
    change_directory(&path, ENTRIES[1] + 16, &[2]);
    let error = remove(&path, "records").unwrap_err().to_string();
    assert!(error.contains("\"rests\": its type 2 is not known"), "{error}");
}

/// The bits of a truncated image must not count as clear.
#[test]
fn a_table_behind_the_end_of_the_file_is_not_read() {
    let scratch = Scratch::new("bitmap-cut");
    let path = image(&scratch);
    let read = || on_file(&path, |raw| async move { edit::read(&raw, "rests").await });
    read().unwrap();
    change_directory(&path, ENTRIES[1], &(1u64 << 30).to_be_bytes());
    let error = read().unwrap_err().to_string();
    assert!(error.contains("beyond the end of the file"), "{error}");
}

/// Each power cut leaves the old bitmaps or the new ones, and the disk unchanged.
#[test]
fn bitmaps_change_atomically_at_every_power_cut() {
    let scratch = Scratch::new("bitmap-edit-cuts");
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=1k", &path, "256k"]);
    qemu_img(&["bitmap", "--add", "-g", "4k", &path, "old"]);
    qemu_io(&path, &["write -P 1 0 64k"]);
    let image = load(&path);
    let before = guest(&image);
    let bits = |image: &SimImage, name: &'static str| {
        on_image(image, move |raw| async move { edit::read(&raw, name).await }).0
    };
    let merged = bits(&image, "old").unwrap();
    let edits =
        [Edit::Add { granularity: Some(4096) }, Edit::Merge(merged.clone()), Edit::Record(false)];
    let seen = [const { std::cell::Cell::new(0) }; 2];
    let cuts = everywhere(
        "bitmap",
        &image,
        |raw| {
            let edits = edits.clone();
            async move { edit::edit(&raw, "new", &edits).await }
        },
        |through, left| {
            let opened = opened_sound(&left)?;
            let (old, new) = (bits(&opened, "old"), bits(&opened, "new"));
            if guest(&opened) != before || old.as_ref().ok() != Some(&merged) {
                return Err(format!("the disk or the other bitmap has changed: {old:?}"));
            }
            match new {
                Ok(new) if new == merged => seen[1].set(seen[1].get() + 1),
                Err(e) if !through && e.to_string().contains("there is no bitmap") => {
                    seen[0].set(seen[0].get() + 1)
                }
                other => return Err(format!("{other:?}")),
            }
            Ok(())
        },
    );
    assert!(cuts > 10 && seen[0].get() > 0 && seen[1].get() > 1, "{cuts} cuts, {seen:?}");
}
