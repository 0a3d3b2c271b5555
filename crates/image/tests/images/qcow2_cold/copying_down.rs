//! Commits of upper images into their base, on simulated disks; QEMU makes and verifies the images.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use blockyard_image::qcow2::{Header, Qcow2, Qcow2Options};
use blockyard_image::{Alignment, CopyDown, ErrorKind, Image, ImageError, Layer, Progress, Raw};
use blockyard_storage::sim::{Sim, SimConfig, SimDisk};

use super::cuts::load;
use super::peer::{Scratch, qemu_check, qemu_img, qemu_io};

const SIZE: u64 = 8 << 20;
const SHAPE: Alignment = Alignment { memory_align: 512, offset_align: 512 };

/// Options of base, middle and top.
const CHAINS: [[&str; 3]; 4] = [
    ["compat=1.1", "compat=1.1", "compat=1.1"],
    ["cluster_size=2M", "cluster_size=4k", "extended_l2=on,cluster_size=128k"],
    [
        "extended_l2=on,cluster_size=64k",
        "cluster_size=512",
        "compression_type=zstd,cluster_size=16k",
    ],
    ["compat=0.10,cluster_size=4k", "cluster_size=32k", "cluster_size=512"],
];

/// Makes a chain of three images, the middle one shorter than the others. Returns the paths,
/// topmost first.
fn chain(scratch: &Scratch, options: [&str; 3]) -> [String; 3] {
    let [top, middle, base] =
        ["top", "middle", "base"].map(|name| scratch.path(&format!("{name}.qcow2")));
    let create = |path: &str, options: &str, below: &[&str], size: &str| {
        qemu_img(&[&["create", "-q", "-f", "qcow2", "-o", options], below, &[path, size]].concat());
    };
    create(&base, options[0], &[], "8M");
    qemu_io(&base, &["write -P 1 0 8M"]);
    create(&middle, options[1], &["-F", "qcow2", "-b", "base.qcow2"], "5M");
    qemu_io(
        &middle,
        &["write -P 2 1M 1M", "write -P 3 4000k 7k", "write -z 3M 200k", "write -P 4 4990k 130k"],
    );
    create(&top, options[2], &["-F", "qcow2", "-b", "middle.qcow2"], "8M");
    qemu_io(
        &top,
        &[
            "write -P 5 1500k 700k",
            "write -c -P 6 3M 128k",
            "write -z 1100k 64k",
            "write -P 7 7M 4k",
        ],
    );
    [top, middle, base]
}

async fn open(disk: &SimDisk, read_only: bool) -> Layer {
    let raw = Raw::on(disk.clone(), SHAPE);
    let header = Header::read(&raw).await.unwrap();
    let options = Qcow2Options { read_only, ..Qcow2Options::default() };
    Layer::Qcow2(Qcow2::open(header, raw, None, &options).await.unwrap())
}

/// Commits a range of the two upper images, and closes the base.
fn copy(disks: &[SimDisk; 3], range: Range<u64>) -> (Result<(), ImageError>, Vec<Range<u64>>) {
    let asked = Rc::new(RefCell::new(Vec::new()));
    let (disks, noted) = (disks.clone(), asked.clone());
    let done = Sim::new(1).block_on(async move {
        let from =
            Image::new(vec![open(&disks[0], true).await, open(&disks[1], true).await], false);
        let into = Image::new(vec![open(&disks[2], false).await], false);
        let work = CopyDown::new(range.clone(), 2, Default::default());
        let note = async |range| {
            noted.borrow_mut().push(range);
            Ok(())
        };
        let result = work.run(&from, &into, note).await;
        into.close().await.unwrap();
        result
    });
    (done.unwrap(), asked.take())
}

#[test]
fn the_base_equals_the_chain_after_a_commit() {
    for options in CHAINS {
        let scratch = Scratch::new("copy-down");
        let paths = chain(&scratch, options);
        let expected = scratch.path("expected.raw");
        qemu_img(&["convert", "-O", "raw", &paths[0], &expected]);
        let disks = paths.each_ref().map(|path| SimDisk::new(load(path), SimConfig::new(1)));
        // The parts need not end at cluster boundaries.
        let middle = 3 * 512 * 1000;
        for part in [middle..SIZE, 0..middle] {
            copy(&disks, part).0.unwrap();
        }
        std::fs::write(&paths[2], disks[2].contents()).unwrap();
        assert!(qemu_check(&paths[2], None).is_clean(), "{options:?}");
        for path in [&paths[2], &paths[0]] {
            qemu_img(&["compare", "-F", "raw", path, &expected]);
        }
    }
}

#[test]
fn only_allocated_ranges_are_read_and_an_error_ends_the_commit() {
    let scratch = Scratch::new("copy-down-asked");
    let disks = chain(&scratch, CHAINS[0]).map(|path| SimDisk::new(load(&path), SimConfig::new(1)));
    let (done, asked) = copy(&disks, 0..SIZE);
    done.unwrap();
    let asked_of = |at: u64| asked.iter().filter(|range| range.contains(&at)).count();
    // Data of the base only; of the middle; of the top over the middle; behind the middle's end.
    assert_eq!([0, 2300 << 10, 4500 << 10].map(asked_of), [0; 3]);
    assert_eq!(
        [1 << 20, 1120 << 10, 2100 << 10, 3 << 20, 4000 << 10, 6 << 20, 7 << 20].map(asked_of),
        [1; 7]
    );
    let progress = std::sync::Arc::<Progress>::default();
    let told = progress.clone();
    let error = Sim::new(1).block_on(async move {
        let from = Image::new(vec![open(&disks[0], true).await], false);
        let into =
            Image::new(vec![open(&disks[1], false).await, open(&disks[2], true).await], false);
        let small =
            CopyDown::new(0..SIZE, 1, Default::default()).run(&from, &into, async |_| Ok(())).await;
        let enough = async |_| Err(ImageError::refused("test", "enough"));
        let work = CopyDown::new(0..5 << 20, 1, progress);
        [small, work.run(&from, &into, enough).await, work.run(&from, &into, enough).await]
    });
    let [small, stopped, again] = error.unwrap();
    assert_eq!(
        small.unwrap_err().to_string(),
        "backing image: it has 5242880 bytes, but needs at least 8388608: enlarge it first"
    );
    assert_eq!(stopped.unwrap_err().kind, ErrorKind::Refused);
    again.unwrap();
    assert!(told.done() < told.total() && told.total() == 5 << 20);
}
