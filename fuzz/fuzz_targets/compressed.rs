//! Compressed clusters as data: see `images/compressed.rs`.

#![no_main]

#[path = "images/compressed.rs"]
mod compressed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| compressed::fuzz(data));
