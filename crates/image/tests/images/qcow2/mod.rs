//! qcow2 images written by this crate and by QEMU, each read by the other.
//!
//! Random requests on chains; each read is compared with a model in memory. At the end `qemu-img
//! check` and `qemu-img compare` verify the files.

mod caches;
mod compressed;
mod freed;
mod locks;
mod partial;
mod peer;
mod reactors;
mod zeroes;

use std::rc::Rc;

use blockyard_image::{Chain, ChainOptions, Format, Image};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::sim::Rng;

use self::peer::{Scratch, qemu_img};
use crate::compared::{first_difference, note_discard};
use crate::tools;

const SIZE: u64 = 24 << 20;

/// Expected contents of an image.
struct Model(Vec<u8>);

async fn write(image: &Image, model: &mut Model, offset: u64, bytes: &[u8]) {
    image.write(Segments::from_bytes(bytes), offset).await.1.unwrap();
    model.0[offset as usize..][..bytes.len()].copy_from_slice(bytes);
}

async fn check(image: &Image, model: &Model, offset: u64, len: usize) {
    let (segments, result) = image.read(Segments::buffer(len), offset).await;
    result.unwrap();
    let mut bytes = vec![0; len];
    segments.copy_out(0, &mut bytes);
    if let Some(at) = first_difference(&bytes, &model.0[offset as usize..][..len]) {
        panic!(
            "offset {}: {} is not {}",
            offset + at as u64,
            bytes[at],
            model.0[offset as usize + at]
        );
    }
}

/// Sends random writes, zeroes, discards and flushes. After a discard it reads back whether the
/// range is zeroes or unchanged.
async fn work(image: Rc<Image>, mut model: Model, seed: u64, rounds: usize) -> Model {
    let mut rng = Rng::new(seed);
    for round in 0..rounds {
        let offset = rng.below(SIZE / 512) * 512;
        let longest = if rng.one_in(8) { 3 << 20 } else { 100 << 10 };
        let len = (rng.between(1, longest / 512) * 512).min(SIZE - offset);
        match rng.below(12) {
            0 => {
                let unmap = rng.one_in(2);
                let zeroed = match round % 3 {
                    0 => image.write_zeroes_fast(offset, len, unmap).await,
                    _ => image.write_zeroes(offset, len, unmap).await,
                };
                if zeroed.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::Unsupported) {
                    check(&image, &model, offset, len as usize).await;
                    continue;
                }
                zeroed.unwrap();
                model.0[offset as usize..][..len as usize].fill(0);
            }
            1 => {
                image.discard(offset, len).await.unwrap();
                let (segments, result) = image.read(Segments::buffer(len as usize), offset).await;
                result.unwrap();
                let mut now = vec![0; len as usize];
                segments.copy_out(0, &mut now);
                note_discard(&now, &mut model.0[offset as usize..][..len as usize]);
            }
            2 => image.flush().await.unwrap(),
            3..=4 => check(&image, &model, offset, len as usize).await,
            _ => {
                let byte = (round % 251 + 1) as u8;
                let mut bytes = vec![0; len as usize];
                (0..)
                    .zip(bytes.chunks_mut(512))
                    .for_each(|(n, sector)| sector.fill(byte ^ n as u8));
                write(&image, &mut model, offset, &bytes).await;
            }
        }
    }
    check(&image, &model, 0, SIZE as usize).await;
    model
}

/// Opens the chain, runs requests, and closes it; returns the expected contents.
fn session(options: &ChainOptions, model: Model, seed: u64) -> Model {
    let chain = Chain::open(options).unwrap();
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    tools::block_on(&executor, async move {
        let image = Rc::new(chain.image(&handle).unwrap());
        check(&image, &model, 0, SIZE as usize).await;
        let model = work(image.clone(), model, seed, 150).await;
        image.close().await.unwrap();
        model
    })
}

/// Runs `work` on `a.qcow2`.
fn on_image<T: 'static>(scratch: &Scratch, work: impl AsyncFnOnce(Image) -> T + 'static) -> T {
    on_image_with(&ChainOptions::new(scratch.path("a.qcow2")), work)
}

fn on_image_with<T: 'static>(
    options: &ChainOptions,
    work: impl AsyncFnOnce(Image) -> T + 'static,
) -> T {
    let chain = Chain::open(options).unwrap();
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    tools::block_on(&executor, async move { work(chain.image(&handle).unwrap()).await })
}

/// Checks that QEMU reads the expected contents, and finds the image consistent.
fn judged_by_qemu(scratch: &Scratch, name: &str, model: &Model) {
    let expected = scratch.path("expected.raw");
    std::fs::write(&expected, &model.0).unwrap();
    qemu_img(&["check", "-f", "qcow2", scratch.name(name)]);
    qemu_img(&[
        "compare",
        "-f",
        "qcow2",
        "-F",
        "raw",
        scratch.name(name),
        scratch.name("expected.raw"),
    ]);
}

#[test]
fn images_by_qemu_are_written_here_and_read_by_qemu() {
    let matrix = [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=4k",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=2",
        "refcount_bits=64,cluster_size=4k",
        "extended_l2=on",
        "extended_l2=on,cluster_size=128k",
        "extended_l2=on,cluster_size=16k,refcount_bits=8",
        "preallocation=metadata",
        "lazy_refcounts=on",
        "data_file=data.bin",
        "data_file=data.bin,data_file_raw=on",
    ];
    for (number, options) in matrix.into_iter().enumerate() {
        println!("{options}");
        let scratch = Scratch::new("matrix");
        let data = scratch.path("data.bin");
        let options = options.replace("data.bin", data.to_str().unwrap());
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &options,
            scratch.name("a.qcow2"),
            &SIZE.to_string(),
        ]);
        let mut model = Model(vec![0; SIZE as usize]);
        for session_number in 0..2 {
            let options = ChainOptions::new(scratch.path("a.qcow2"));
            model = session(&options, model, number as u64 * 2 + session_number);
            judged_by_qemu(&scratch, "a.qcow2", &model);
        }
    }
}

#[test]
fn overlays_over_all_kinds_of_bases() {
    let bases = [
        ("raw", ""),
        ("qcow2", "compat=0.10"),
        ("qcow2", "extended_l2=on"),
        ("qcow2", "compression_type=zstd"),
    ];
    let overlays =
        ["compat=1.1", "compat=0.10", "extended_l2=on,cluster_size=128k", "cluster_size=4k"];
    for (number, (format, base)) in bases.into_iter().enumerate() {
        for (other, overlay) in overlays.into_iter().enumerate() {
            println!("{overlay} over {format} {base}");
            let scratch = Scratch::new("overlay");
            let mut rng = Rng::new(number as u64);
            // Shorter than the overlay; partly compressible, partly not, partly zeroes.
            let short = (SIZE - (3 << 20)) as usize + 512;
            let mut model = Model(vec![0; SIZE as usize]);
            for piece in model.0[..short].chunks_mut(40_000) {
                match rng.below(3) {
                    0 => piece.fill(rng.below(256) as u8),
                    1 => rng.fill(piece),
                    _ => {}
                }
            }
            std::fs::write(scratch.path("source.raw"), &model.0[..short]).unwrap();
            let mut convert = vec!["convert", "-f", "raw", "-O", format];
            if format == "qcow2" {
                convert.extend(["-o", base]);
                if base != "extended_l2=on" {
                    convert.push("-c");
                }
            }
            convert.extend([scratch.name("source.raw"), scratch.name("base")]);
            qemu_img(&convert);
            qemu_img(&[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                overlay,
                "-F",
                format,
                "-b",
                "base",
                scratch.name("a.qcow2"),
                &SIZE.to_string(),
            ]);
            let before = std::fs::read(scratch.path("base")).unwrap();
            let options = ChainOptions {
                format: Some(Format::Qcow2),
                ..ChainOptions::new(scratch.path("a.qcow2"))
            };
            let model = session(&options, model, (number * 4 + other) as u64);
            judged_by_qemu(&scratch, "a.qcow2", &model);
            assert!(before == std::fs::read(scratch.path("base")).unwrap(), "the base was changed");
        }
    }
}

/// Behind the end of a middle image a chain reads as zeroes, not as its longer backing image.
#[test]
fn a_shorter_middle_image_hides_its_backing_image_behind_its_end() {
    let scratch = Scratch::new("short");
    std::fs::write(scratch.path("base.raw"), vec![7; SIZE as usize]).unwrap();
    let create = |name: &'static str, below: &str, format: &str, size: u64| {
        let options = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-F",
            format,
            "-b",
            below,
            scratch.name(name),
            &size.to_string(),
        ];
        qemu_img(&options);
    };
    create("middle.qcow2", "base.raw", "raw", 5 << 20);
    create("a.qcow2", "middle.qcow2", "qcow2", SIZE);
    create("b.qcow2", "a.qcow2", "qcow2", SIZE);
    let mut model = Model(vec![0; SIZE as usize]);
    model.0[..5 << 20].fill(7);
    for name in ["a.qcow2", "b.qcow2"] {
        judged_by_qemu(&scratch, name, &model);
        session(&ChainOptions::new(scratch.path(name)), Model(model.0.clone()), 5);
        // Undo the writes: the next case must find the middle image unchanged.
        create(name, if name == "a.qcow2" { "middle.qcow2" } else { "a.qcow2" }, "qcow2", SIZE);
    }
}
