//! Changes of the backing file's name.

use blockyard_image::qcow2::backing::set_backing;
use blockyard_image::qcow2::header::AUTOCLEAR_KNOWN;
use blockyard_image::qcow2::{CreateOptions, Header, create};
use blockyard_image::{ImageError, Raw};
use blockyard_storage::sim::SimImage;

use super::cuts::{everywhere, guest, header, load, on_image, opened_sound};
use super::peer::{Scratch, on_file, qemu_check, qemu_img, qemu_io};

async fn set(raw: Raw, backing: Option<(String, &'static str)>) -> Result<(), ImageError> {
    let mut header = Header::read(&raw).await?;
    set_backing(&raw, &mut header, backing.as_ref().map(|(name, format)| (name.as_str(), *format)))
        .await?;
    assert_eq!(header, Header::read(&raw).await?, "the returned header equals the one in the file");
    Ok(())
}

#[test]
fn qemu_finds_the_new_backing_file() {
    let scratch = Scratch::new("backing");
    let path = scratch.path("image.qcow2");
    for name in ["one.raw", "two.raw"] {
        std::fs::write(scratch.path(name), vec![name.len() as u8; 1 << 20]).unwrap();
    }
    qemu_img(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        &scratch.path("two.raw"),
        &scratch.path("three.qcow2"),
    ]);
    for options in
        ["compat=0.10", "compat=1.1", "cluster_size=512", "extended_l2=on,cluster_size=16k"]
    {
        qemu_img(&[
            "create", "-q", "-f", "qcow2", "-o", options, "-F", "raw", "-b", "one.raw", &path,
        ]);
        qemu_io(&path, &["write -P 9 0 64k"]);
        for (name, format) in
            [("./././two.raw", "raw"), ("three.qcow2", "qcow2"), ("one.raw", "raw")]
        {
            on_file(&path, move |raw| set(raw, Some((name.into(), format)))).unwrap();
            let info: serde_json::Value = serde_json::from_str(&qemu_img(&[
                "info", "-f", "qcow2", "--output", "json", &path,
            ]))
            .unwrap();
            assert_eq!(
                (&info["backing-filename"], &info["backing-filename-format"]),
                (&name.into(), &format.into())
            );
            assert!(qemu_check(&path, None).is_clean());
            qemu_io(&path, &["read -P 9 0 64k", "read -P 7 64k 960k"]);
        }
        on_file(&path, |raw| set(raw, None)).unwrap();
        assert!(!qemu_img(&["info", &path]).contains("backing file"));
        qemu_io(&path, &["read -P 9 0 64k", "read -P 0 64k 960k"]);
    }
}

/// Returns name and format of an image's backing file.
fn backing(image: &SimImage) -> (Option<String>, Option<String>) {
    let header = header(image).unwrap();
    (header.backing, header.backing_format)
}

#[test]
fn name_and_format_change_atomically_at_every_power_cut() {
    let scratch = Scratch::new("backing-cuts");
    let mut cuts = 0;
    for options in [
        "compat=0.10",
        "cluster_size=1k",
        "cluster_size=2k",
        "cluster_size=64k",
        "cluster_size=512",
    ] {
        let path = scratch.path("image.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "64k"]);
        qemu_io(&path, &["write -P 9 0 20k"]);
        let mut bytes = std::fs::read(&path).unwrap();
        if options != "compat=0.10" {
            bytes[88] = 0x80;
        }
        let mut image = SimImage::from_bytes(&bytes);
        let guests = guest(&image);
        let long = match options {
            "cluster_size=512" => 300,
            // The cluster must have room for both names.
            "cluster_size=1k" => 240,
            _ => 400,
        };
        let others = [
            "a".repeat(long),
            "b".repeat(long),
            "short".into(),
            "c".repeat(long - 8),
            "d".repeat(20),
        ];
        let mut steps: Vec<_> = others
            .into_iter()
            .zip(["raw", "qcow2", "raw", "a-long-name", "raw"])
            .map(Some)
            .collect();
        steps.push(None);
        for step in steps {
            let before = backing(&image);
            let after =
                (step.as_ref().map(|s| s.0.clone()), step.as_ref().map(|s| s.1.to_string()));
            let operation = |raw| set(raw, step.clone());
            cuts +=
                everywhere(&format!("{options}, {step:?}"), &image, operation, |through, left| {
                    let now = backing(&left);
                    match (now == after || (!through && now == before))
                        && guest(&opened_sound(&left)?) == guests
                    {
                        true => Ok(()),
                        false => Err(format!("{now:?}, not {before:?} nor {after:?}")),
                    }
                });
            let (done, now) = on_image(&image, operation);
            done.unwrap();
            assert_eq!(header(&now).unwrap().autoclear & !AUTOCLEAR_KNOWN, 0);
            image = now;
        }
    }
    assert!(cuts > 100, "{cuts} cuts");
}

#[test]
fn a_name_without_room_is_refused() {
    let scratch = Scratch::new("backing-refused");
    let path = scratch.path("image.qcow2");
    std::fs::File::create(&path).unwrap();
    let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(1 << 20) };
    on_file(&path, |raw| async move { create(&raw, None, &options).await }).unwrap();
    let before = load(&path).bytes();
    for (len, expected) in [(400, "no room"), (1024, "1 to 1023"), (0, "1 to 1023")] {
        let error = on_file(&path, move |raw| set(raw, Some(("x".repeat(len), "raw"))))
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(load(&path).bytes() == before);
}
