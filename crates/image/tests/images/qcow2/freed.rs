//! Freed space, and its effect on other requests.

use std::future::{Future, poll_fn};

use blockyard_ring::Segments;

use super::on_image;
use super::peer::{Scratch, qemu_img};

/// A guest that never flushes frees and writes its small disk over and over: the file stays small.
#[test]
fn a_guest_that_never_flushes_does_not_fill_the_host() {
    const SIZE: u64 = 16 << 20;
    for zeroes in [true, false] {
        let scratch = Scratch::new("freed");
        qemu_img(&["create", "-q", "-f", "qcow2", scratch.name("a.qcow2"), &SIZE.to_string()]);
        on_image(&scratch, async move |image| {
            for _ in 0..20 {
                image.write(Segments::from_bytes(&vec![5; SIZE as usize]), 0).await.1.unwrap();
                let freed = if zeroes {
                    image.write_zeroes(0, SIZE, true).await
                } else {
                    image.discard(0, SIZE).await
                };
                freed.unwrap();
            }
        });
        let len = std::fs::metadata(scratch.path("a.qcow2")).unwrap().len();
        // The bounds: the disk, the freed space that may wait for a flush, and the reserved
        // clusters.
        assert!(
            len < SIZE + (64 << 20) + (64 << 20),
            "{len} bytes for a disk of {SIZE} (zeroes: {zeroes})"
        );
    }
}

/// A request that finds all metadata in the cache never waits. It must still yield to the reactor's
/// other requests.
#[test]
fn a_long_discard_of_unallocated_space_yields_to_other_requests() {
    const SIZE: u64 = 1 << 30;
    let scratch = Scratch::new("nothing");
    std::fs::write(scratch.path("base.raw"), [7; 512]).unwrap();
    let options = ["-o", "cluster_size=4k", "-F", "raw", "-b", "base.raw"];
    qemu_img(
        &[
            &["create", "-q", "-f", "qcow2"],
            &options[..],
            &[scratch.name("a.qcow2"), &SIZE.to_string()],
        ]
        .concat(),
    );
    on_image(&scratch, async move |image| {
        let mut discard = Box::pin(image.discard(0, SIZE));
        let mut polls = 0u32;
        poll_fn(|cx| {
            polls += 1;
            discard.as_mut().poll(cx)
        })
        .await
        .unwrap();
        assert!(polls > 500, "{polls} polls");
    });
}

/// The refcounts of freed clusters are in memory after the first look, so their release never
/// waits. It must still yield to the reactor's other requests.
#[test]
fn the_release_of_many_clusters_yields_to_other_requests() {
    const SIZE: u64 = 256 << 20;
    let scratch = Scratch::new("release");
    let options = "cluster_size=4k,refcount_bits=1,preallocation=metadata";
    let (image, size) = (scratch.name("a.qcow2"), SIZE.to_string());
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, image, &size]);
    on_image(&scratch, async move |image| {
        let hold = image.hold_freed();
        image.discard(0, SIZE).await.unwrap();
        drop(hold);
        let mut flush = Box::pin(image.flush());
        let mut polls = 0u64;
        poll_fn(|cx| {
            polls += 1;
            flush.as_mut().poll(cx)
        })
        .await
        .unwrap();
        // The release goes through all clusters twice.
        assert!(polls >= 2 * (SIZE >> 12) / 256, "{polls} polls");
    });
}
