//! Interrupted repairs can be run again, and lose nothing.

use blockyard_image::qcow2::check::{self, Repair};
use blockyard_image::qcow2::rebuild_refcounts;
use blockyard_storage::sim::SimImage;

use super::cuts::{everywhere, guest, header, load, on_image, opened_sound};
use super::peer::{Scratch, our_check, qemu_img, qemu_io, qemu_io_killed};

const KINDS: [&str; 5] = [
    "compat=0.10,cluster_size=1k",
    "compat=1.1,cluster_size=512",
    "compat=1.1,cluster_size=4k,refcount_bits=64",
    "compat=1.1,cluster_size=2k,refcount_bits=2",
    "extended_l2=on,cluster_size=16k",
];

fn small_image(scratch: &Scratch, options: &str) -> String {
    let path = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "256k"]);
    qemu_io(&path, &["write -P 1 0 30k", "write -P 2 100k 40k", "write -z 8k 8k"]);
    qemu_img(&["snapshot", "-c", "one", &path]);
    qemu_io(&path, &["write -P 3 10k 16k", "write -P 4 200k 8k"]);
    path
}

/// Flips bits of refcount blocks, zeroes one block, and inverts COPIED flags.
fn damaged(image: &SimImage, seed: u64) -> SimImage {
    let (mut bytes, header) = (image.bytes(), header(image).unwrap());
    let word =
        |bytes: &[u8], at: u64| u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap());
    let block = word(&bytes, header.refcount_table_offset);
    let table = word(&bytes, header.l1_offset) & 0x00ff_ffff_ffff_fe00;
    match seed {
        0 => (0..8).for_each(|n| bytes[(block + n * 7 % header.cluster_size()) as usize] ^= 0x55),
        1 => bytes[header.refcount_table_offset as usize..][..8].fill(0),
        2 => bytes[block as usize..][..header.cluster_size() as usize].fill(0),
        _ => (0..20).for_each(|n| bytes[(table + n * header.l2_entry_size()) as usize] &= 0x7f),
    }
    bytes[header.l1_offset as usize] ^= 0x80;
    SimImage::from_bytes(&bytes)
}

#[test]
fn an_interrupted_repair_loses_nothing() {
    let mut cuts = 0;
    for options in KINDS {
        let scratch = Scratch::new("repair-cuts");
        let sound = load(&small_image(&scratch, options));
        let before = guest(&sound);
        for seed in 0..4 {
            let repair = |raw| async move {
                let report = check::check(&raw, None, Repair::All).await?;
                assert!(report.is_clean(), "{report:#?}");
                Ok(())
            };
            cuts += everywhere(
                &format!("{options}, damage {seed}"),
                &damaged(&sound, seed),
                repair,
                |_, left| {
                    if guest(&left) != before {
                        return Err("the guest's data have changed".into());
                    }
                    let (report, again) = on_image(&left, |raw| async move {
                        check::check(&raw, None, Repair::All).await
                    });
                    let report = report.map_err(|e| e.to_string())?;
                    match report.is_clean() && guest(&again) == before {
                        true => Ok(()),
                        false => Err(format!("{report:#?}")),
                    }
                },
            );
        }
    }
    println!("{cuts} cuts");
    assert!(cuts > 150, "{cuts} cuts");
}

#[test]
fn an_interrupted_repair_of_lazy_refcounts_loses_nothing() {
    let scratch = Scratch::new("lazy");
    let path = scratch.path("image.qcow2");
    let options = "lazy_refcounts=on,cluster_size=1k";
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "512k"]);
    qemu_io(&path, &["write -P 1 0 20k"]);
    qemu_io_killed(&path, &["write -P 2 30k 200k", "flush", "write -P 3 300k 100k", "flush"]);
    let dirty = load(&path);
    assert!(header(&dirty).unwrap().has_dirty());
    let before = guest(&dirty);
    assert!(before[310 << 10] == 3, "the data are there");
    assert!(our_check(&path, Repair::No).corruptions > 0, "the refcounts are not");
    let repair = |raw| async move {
        rebuild_refcounts(&raw).await.map(|header| assert!(!header.has_dirty()))
    };
    let cuts = everywhere("lazy refcounts", &dirty, repair, |_, left| {
        match guest(&opened_sound(&left)?) == before {
            true => Ok(()),
            false => Err("the guest's data have changed".into()),
        }
    });
    assert!(cuts > 10, "{cuts} cuts");
}
