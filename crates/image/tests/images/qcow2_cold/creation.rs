//! Images created by this crate, as QEMU sees them; and interrupted creations.

use blockyard_image::qcow2::check::Repair;
use blockyard_image::qcow2::{Compression, CreateOptions, Header, Preallocation, create};
use blockyard_storage::sim::SimImage;

use super::cuts::{everywhere, header, load, on_image, opened_sound};
use super::peer::{Scratch, on_file, our_check, qemu_check, qemu_img, qemu_io, two_files};

const SIZE: u64 = 9 << 20;

fn create_file(path: &str, data: Option<&str>, options: &CreateOptions) {
    std::fs::File::create(path).unwrap();
    let options = options.clone();
    match data {
        None => on_file(path, |raw| async move { create(&raw, None, &options).await }),
        Some(data) => {
            std::fs::File::create(data).unwrap();
            two_files(
                path,
                data,
                |raw, data| async move { create(&raw, Some(&data), &options).await },
            )
        }
    }
    .unwrap();
}

/// Returns options, and the same for `qemu-img create -o`.
fn matrix(scratch: &Scratch) -> Vec<(CreateOptions, String)> {
    let new = || CreateOptions::new(SIZE);
    let data_file = Some(scratch.path("data.raw"));
    let named = format!("data_file={}", scratch.path("theirs.data"));
    let mut all = vec![
        (new(), "compat=1.1".into()),
        (CreateOptions { version: 2, ..new() }, "compat=0.10".into()),
        (CreateOptions { lazy_refcounts: true, ..new() }, "lazy_refcounts=on".into()),
        (CreateOptions { compression: Compression::Zstd, ..new() }, "compression_type=zstd".into()),
        (CreateOptions { data_file: data_file.clone(), ..new() }, named.clone()),
        (
            CreateOptions { data_file, data_file_raw: true, ..new() },
            format!("{named},data_file_raw=on"),
        ),
        (CreateOptions { size: 0, ..new() }, "compat=1.1".into()),
        (CreateOptions { size: 1000, ..new() }, "compat=1.1".into()),
    ];
    for bits in [9, 12, 21] {
        all.push((
            CreateOptions { cluster_size: 1 << bits, ..new() },
            format!("cluster_size={}", 1 << bits),
        ));
    }
    for refcount_bits in [1, 2, 4, 8, 32, 64] {
        all.push((
            CreateOptions { refcount_bits, ..new() },
            format!("refcount_bits={refcount_bits}"),
        ));
    }
    for cluster_size in [16 << 10, 128 << 10] {
        let theirs = format!("extended_l2=on,cluster_size={cluster_size}");
        all.push((CreateOptions { extended_l2: true, cluster_size, ..new() }, theirs));
    }
    for (preallocation, name) in [
        (Preallocation::Metadata, "metadata"),
        (Preallocation::Falloc, "falloc"),
        (Preallocation::Full, "full"),
    ] {
        for (cluster_size, extended_l2, on) in
            [(64 << 10, false, "off"), (512, false, "off"), (32 << 10, true, "on")]
        {
            let theirs =
                format!("preallocation={name},cluster_size={cluster_size},extended_l2={on}");
            all.push((CreateOptions { preallocation, cluster_size, extended_l2, ..new() }, theirs));
        }
    }
    all
}

fn info(path: &str) -> serde_json::Value {
    let mut info: serde_json::Value =
        serde_json::from_str(&qemu_img(&["info", "-f", "qcow2", "--output", "json", path]))
            .unwrap();
    // Do not compare file names and space on the host's disk.
    let info = info.as_object_mut().unwrap();
    info.retain(|key, _| {
        ["virtual-size", "cluster-size", "format-specific", "dirty-flag"].contains(&key.as_str())
    });
    let mut info = serde_json::Value::Object(info.clone());
    info["format-specific"]["data"]["data-file"] = serde_json::Value::Null;
    info
}

#[test]
fn qemu_sees_the_same_options_in_images_of_both() {
    let scratch = Scratch::new("create");
    for (options, theirs) in matrix(&scratch) {
        let (path, other) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
        create_file(&path, options.data_file.as_deref(), &options);
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &theirs,
            &other,
            &options.size.to_string(),
        ]);
        assert_eq!(info(&path), info(&other), "{theirs}");
        let (report, expected) = (qemu_check(&path, None), qemu_check(&other, None));
        assert!(report.is_clean(), "{theirs}: {report:?}");
        assert_eq!(report.allocated_clusters, expected.allocated_clusters, "{theirs}");
        let ours = our_check(&path, Repair::No);
        assert!(ours.is_clean(), "{theirs}: {ours:#?}");
        if options.size > 0 {
            qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", &path, &other]);
            qemu_io(&path, &["write -P 7 0 512", "read -P 7 0 512", "read -P 0 512 0"]);
            assert!(qemu_check(&path, None).is_clean(), "{theirs}, written to");
        }
    }
}

#[test]
fn preallocation_allocates_the_requested_space() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new("space");
    let path = scratch.path("a.qcow2");
    for (preallocation, taken) in [
        (Preallocation::Off, false),
        (Preallocation::Metadata, false),
        (Preallocation::Falloc, true),
        (Preallocation::Full, true),
    ] {
        create_file(&path, None, &CreateOptions { preallocation, ..CreateOptions::new(SIZE) });
        let stat = std::fs::metadata(&path).unwrap();
        assert_eq!(stat.blocks() * 512 >= SIZE, taken, "{preallocation:?}");
        assert_eq!(stat.len() >= SIZE, preallocation != Preallocation::Off, "{preallocation:?}");
    }
}

#[test]
fn an_overlay_shows_its_backing_file_by_default_in_subclusters() {
    let scratch = Scratch::new("overlay");
    let (base, path) = (scratch.path("base.qcow2"), scratch.path("top.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", &base, "9M"]);
    qemu_io(&base, &["write -P 5 1M 3M"]);
    for preallocation in [Preallocation::Off, Preallocation::Metadata, Preallocation::Falloc] {
        let options =
            CreateOptions { preallocation, ..CreateOptions::overlay(SIZE, "base.qcow2", "qcow2") };
        create_file(&path, None, &options);
        qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", &path, &base]);
        let info = qemu_img(&["info", "-f", "qcow2", &path]);
        for expected in [
            "backing file: base.qcow2",
            "format: qcow2",
            "extended l2: true",
            "cluster_size: 131072",
        ] {
            assert!(info.contains(expected), "{info}");
        }
        qemu_io(&path, &["write -P 6 2M 4k", "read -P 5 2052k 4k"]);
        assert!(qemu_check(&path, None).is_clean());
    }
}

#[test]
fn invalid_options_are_refused_and_the_file_is_unchanged() {
    let scratch = Scratch::new("refused");
    let path = scratch.path("a.qcow2");
    std::fs::write(&path, "precious").unwrap();
    let new = || CreateOptions::new(SIZE);
    let backing = Some(("base".to_string(), "raw".to_string()));
    let cases = [
        (CreateOptions { version: 4, ..new() }, "versions 2 and 3"),
        (CreateOptions { cluster_size: 256, ..new() }, "power of two from 512"),
        (CreateOptions { cluster_size: 3 << 12, ..new() }, "power of two from 512"),
        (CreateOptions { cluster_size: 4 << 20, ..new() }, "power of two from 512"),
        (CreateOptions { refcount_bits: 3, ..new() }, "refcounts must have"),
        (CreateOptions { refcount_bits: 128, ..new() }, "refcounts must have"),
        (CreateOptions { version: 2, refcount_bits: 8, ..new() }, "version 2 has"),
        (CreateOptions { version: 2, compression: Compression::Zstd, ..new() }, "version 2 has"),
        (CreateOptions { extended_l2: true, cluster_size: 8 << 10, ..new() }, "16 KiB"),
        (CreateOptions { data_file_raw: true, ..new() }, "needs a data file"),
        (CreateOptions { data_file: Some("d".into()), ..new() }, "a name and the file"),
        (
            CreateOptions { preallocation: Preallocation::Full, backing: backing.clone(), ..new() },
            "hide the backing file",
        ),
        (
            CreateOptions { backing: Some(("x".repeat(1024), "raw".into())), ..new() },
            "1 to 1023 bytes",
        ),
        (
            CreateOptions {
                backing: Some(("x".repeat(600), "raw".into())),
                cluster_size: 512,
                ..new()
            },
            "a cluster has 512",
        ),
        (CreateOptions { size: u64::MAX, ..new() }, "too large"),
        (CreateOptions { size: 1 << 62, ..new() }, "larger than 32 MiB"),
    ];
    for (options, expected) in cases {
        let error = on_file(&path, |raw| async move { create(&raw, None, &options).await })
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn an_interrupted_creation_is_not_an_image() {
    let scratch = Scratch::new("create-cuts");
    let old = scratch.path("old.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=1k", &old, "64k"]);
    qemu_io(&old, &["write -P 1 0 64k"]);
    let mut cuts = 0;
    for before in [SimImage::zeroed(0), load(&old)] {
        for preallocation in [Preallocation::Off, Preallocation::Metadata, Preallocation::Full] {
            let options =
                CreateOptions { preallocation, cluster_size: 512, ..CreateOptions::new(200 << 10) };
            let what = format!("{preallocation:?} over {} bytes", before.len());
            let expected = options.clone();
            let operation = move |raw| {
                let options = options.clone();
                async move { create(&raw, None, &options).await }
            };
            cuts += everywhere(&what, &before, operation, |through, left| {
                // Until the file begins to change it is the old image.
                let is_old = header(&left).is_ok_and(|header| header.cluster_bits == 10);
                match header(&left) {
                    Err(e) if !through => is_no_image(&e),
                    Ok(_) if is_old && !through => Ok(()),
                    Ok(header) => is_new(&left, &header, &expected),
                    Err(e) => Err(e),
                }
            });
        }
    }
    assert!(cuts > 60, "{cuts} cuts");
}

fn is_no_image(error: &str) -> Result<(), String> {
    if error.contains("this is not a qcow2 image") { Ok(()) } else { Err(error.into()) }
}

fn is_new(left: &SimImage, header: &Header, options: &CreateOptions) -> Result<(), String> {
    if header.size != options.size || header.cluster_size() != options.cluster_size {
        return Err(format!("{header:?}"));
    }
    let image = opened_sound(left)?;
    let (report, _) = on_image(&image, |raw| async move {
        blockyard_image::qcow2::check::check(&raw, None, Repair::No)
            .await
            .map_err(|e| e.to_string())
    });
    if report?.is_clean() { Ok(()) } else { Err("it is not clean".into()) }
}
