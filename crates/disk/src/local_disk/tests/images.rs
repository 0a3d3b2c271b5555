//! Answers of a disk on a qcow2 image if writing its metadata fails.

use blockyard_image::qcow2::{self, CreateOptions, Header, Qcow2, Qcow2Options};
use blockyard_image::{Image, Layer};

use super::*;

const SIZE: u64 = 16 << 20;

/// Creates an image with clusters of 512 bytes, and opens it.
async fn image() -> (SimDisk, LocalDisk) {
    let sim = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
    let raw = || Raw::on(sim.clone(), Alignment { memory_align: 1, offset_align: 1 });
    let create = CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) };
    qcow2::create(&raw(), None, &create).await.unwrap();
    let header = Header::read(&raw()).await.unwrap();
    let top = Qcow2::open(header, raw(), None, &Qcow2Options::default()).await.unwrap();
    let image = Backend::Image(Image::new(vec![Layer::Qcow2(top)], false));
    let disk = Arc::new(Disk::new(options(), Source::Null { size: SIZE }));
    (sim.clone(), LocalDisk::new(disk, image, None))
}

/// The image keeps the metadata that the host has no space for, and the kernel has lost nothing.
#[test]
fn a_flush_without_space_for_metadata_is_tried_again() {
    run(async {
        let (sim, served) = image().await;
        assert_eq!(ask(&served, WRITE, 0, 512).await, Ok(()));
        sim.fail(Fault::new(SimOp::Write, 28));
        assert_eq!(ask(&served, Op::Flush, 0, 0).await, Err(Failure::NoSpace));
        assert!(served.disk().poisoned().is_none());
        assert_eq!(ask(&served, Op::Flush, 0, 0).await, Ok(()));
    });
}

/// A larger refcount table takes a sync of the image's own. No flush reports its failure.
#[test]
fn a_failed_sync_of_the_image_itself_poisons_the_disk() {
    run(async {
        let (sim, served) = image().await;
        assert_eq!(ask(&served, WRITE, 0, 512).await, Ok(()));
        assert_eq!(ask(&served, Op::Flush, 0, 0).await, Ok(()));
        sim.fail(Fault::new(SimOp::Sync, 5));
        let (mut at, mut answer) = (512, Ok(()));
        while answer.is_ok() && at < SIZE {
            answer = ask(&served, WRITE, at, 64 << 10).await;
            at += 64 << 10;
        }
        assert_eq!(answer, POISONED, "at {at}");
        assert_eq!(ask(&served, WRITE, 0, 512).await, POISONED);
    });
}
