//! Runs every input of the stored fuzzing corpora (initial inputs and former findings) through the
//! fuzz targets.

#[path = "../../../../../fuzz/fuzz_targets/images/compressed.rs"]
mod compressed;
#[path = "../../../../../fuzz/fuzz_targets/images/cow.rs"]
mod cow;
#[path = "../../../../../fuzz/fuzz_targets/images/file.rs"]
mod file;
#[path = "../../../../../fuzz/fuzz_targets/images/header.rs"]
mod header;
#[path = "../../../../../fuzz/fuzz_targets/images/qcow2.rs"]
mod qcow2;

use std::path::Path;

fn all_of(target: &str, fuzz: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let inputs: Vec<_> = corpus.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(inputs.len() > 2, "{}: {inputs:?}", corpus.display());
    for input in inputs {
        // The test harness shows this output only if the test fails.
        println!("{}", input.display());
        fuzz(&std::fs::read(&input).unwrap());
    }
}

#[test]
fn qcow2_images() {
    all_of("qcow2", qcow2::fuzz);
}

#[test]
fn qcow2_headers() {
    all_of("header", header::fuzz);
}

#[test]
fn compressed_clusters() {
    all_of("compressed", compressed::fuzz);
}

#[test]
fn cow_files() {
    all_of("cow", cow::fuzz);
}
