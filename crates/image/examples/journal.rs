//! Measures the time that a record of the journal adds to a request that changes metadata, in
//! nanoseconds: `cargo run --release -p blockyard-image --example journal`.
//!
//! One thread, a journal on the tmpfs of /dev/shm. Each value is the median of several rounds; a
//! write-back ends each round, and its time is not counted. "ready": the first records after a
//! write-back, in kept memory. "many": 100,000 records, with the allocation of their memory.
//! "none": the calls of an image without a journal.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use blockyard_image::journal::{
    ImageKey, ImageSafety, Journal, JournalStore, Key, Record, StateFolder,
};

const ROUNDS: usize = 101;

/// Returns the median time of a record in nanoseconds, in rounds of `records`.
fn median(journal: &Journal, records: u64) -> f64 {
    let mut all: Vec<f64> = (0..ROUNDS as u64).map(|n| round(journal, n, records)).collect();
    all.sort_by(f64::total_cmp);
    all[ROUNDS / 2]
}

fn round(journal: &Journal, number: u64, records: u64) -> f64 {
    let start = Instant::now();
    for n in 0..records {
        let value = [black_box((n << 16) | (1 << 63)), number];
        journal.record(Record { key: Key::Cluster(black_box(n)), value });
        black_box(journal.must_flush());
    }
    let nanoseconds = start.elapsed().as_nanos() as f64 / records as f64;
    let write_back = journal.begin_write_back();
    journal.end_write_back(write_back, true);
    nanoseconds
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = format!("/dev/shm/blockyard-journal-price-{}", std::process::id());
    let image = std::env::temp_dir().join(format!("blockyard-price-{}", std::process::id()));
    let key = ImageKey::of(&File::create(&image)?)?;
    let store = JournalStore::from(StateFolder::open(&folder)?);
    let log = store.create(&key)?;
    let journal = Journal::new(ImageSafety::default(), Some(log));
    let none: Arc<Journal> = Journal::new(ImageSafety::default(), None);
    println!("ready\t{:.1} ns", median(&journal, 500));
    println!("many\t{:.1} ns", median(&journal, 100_000));
    println!("none\t{:.1} ns", median(&none, 100_000));
    drop(journal);
    let removed: io::Result<()> = store.remove(&key);
    removed.and(std::fs::remove_file(&image)).and(std::fs::remove_dir_all(&folder))?;
    Ok(())
}
