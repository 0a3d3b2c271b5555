//! A COW file as data: see `images/cow.rs`.

#![no_main]

#[path = "images/cow.rs"]
mod cow;
#[path = "images/file.rs"]
mod file;

libfuzzer_sys::fuzz_target!(|data: &[u8]| cow::fuzz(data));
