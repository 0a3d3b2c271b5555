//! A qcow2 image as data: see `images/qcow2.rs`.

#![no_main]

#[path = "images/file.rs"]
mod file;
#[path = "images/qcow2.rs"]
mod qcow2;

libfuzzer_sys::fuzz_target!(|data: &[u8]| qcow2::fuzz(data));
