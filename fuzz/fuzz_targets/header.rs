//! The start of a qcow2 file as data: see `images/header.rs`.

#![no_main]

#[path = "images/header.rs"]
mod header;

libfuzzer_sys::fuzz_target!(|data: &[u8]| header::fuzz(data));
