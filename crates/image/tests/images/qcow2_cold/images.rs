//! Images made by QEMU.

use super::peer::{Scratch, qemu_img, qemu_io};

/// Makes an image of 8 MiB with all kinds of clusters.
pub fn image(scratch: &Scratch, options: &str, extras: &[&str]) -> String {
    let path = scratch.path("image.qcow2");
    let data = scratch.path("data.raw");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options.replace("DATA", &data), &path, "8M"]);
    let write = [
        "write -P 1 0 300k",
        "write -P 2 1M 1M",
        "write -z 1200k 300k",
        "write -P 9 8126464 64k",
        "discard 1M 64k",
    ];
    qemu_io(&path, &write);
    if !extras.contains(&"not compressed") {
        qemu_io(&path, &["write -c -P 3 4M 2M"]);
    }
    if extras.contains(&"bitmaps") {
        qemu_img(&["bitmap", "--add", "-g", "64k", &path, "first"]);
        qemu_img(&["bitmap", "--add", "--disable", &path, "second"]);
        qemu_io(&path, &["write -P 4 3M 200k"]);
    }
    if extras.contains(&"snapshots") {
        qemu_img(&["snapshot", "-c", "one", &path]);
        qemu_io(&path, &["write -P 5 100k 100k", "write -P 6 6M 100k"]);
        if !options.contains("refcount_bits=2") {
            qemu_img(&["snapshot", "-c", "two", &path]);
            qemu_io(&path, &["write -P 7 1M 64k"]);
        }
    }
    path
}
