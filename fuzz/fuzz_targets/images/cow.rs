//! A COW file as data: whatever it holds, it is opened or refused, read, checked, and written to
//! only if it is sound.
//!
//! Input: the length of the hole behind the file's bytes, in units of 4 KiB, the work's seed and
//! its memory; then the bytes.

use blockyard_image::cow::{self, Cow, CowOptions, Repair};
use blockyard_image::{Alignment, CopyDown, Image, Layer, Raw};
use blockyard_ring::Segments;
use blockyard_storage::sim::Rng;

use super::file::{File, run};

const PLAIN: Alignment = Alignment { memory_align: 1, offset_align: 1 };

/// Disks are merged, and repaired to their full length, up to these sizes: what is larger takes
/// long.
const MERGED: u64 = 1 << 16;
const REPAIRED: u64 = 1 << 30;

fn raw(file: &File) -> Raw {
    Raw::on(file.clone(), PLAIN)
}

async fn open(file: &File, read_only: bool, bitmap_memory: u64) -> Option<Cow> {
    let options = CowOptions { read_only, bitmap_memory, ..CowOptions::default() };
    Cow::open(raw(file), &options).await.ok()
}

fn over(cow: Cow, base: &File) -> Image {
    let size = cow.size();
    Image::new(vec![Layer::Cow(cow), Layer::Raw { raw: raw(base), size }], false)
}

fn place(rng: &mut Rng, size: u64) -> (u64, u64) {
    let offset = rng.below(size / 512) * 512;
    (offset, (rng.between(1, 128) * 512).min(size - offset))
}

async fn read_some(image: &Image, rng: &mut Rng) {
    for _ in 0..8 {
        let (offset, len) = place(rng, image.size());
        image
            .read(Segments::buffer(len as usize), offset)
            .await
            .1
            .expect("a file in memory is read");
    }
}

/// What is written is read again, also when the file is opened anew.
async fn change_some(file: &File, base: &File, rng: &mut Rng, memory: u64) {
    let Some(cow) = open(file, false, memory).await.filter(|cow| cow.size() > 0) else { return };
    let image = over(cow, base);
    let mut last = None;
    for round in 1..9u8 {
        let (offset, len) = place(rng, image.size());
        match rng.below(4) {
            0 => image.discard(offset, len).await.unwrap(),
            1 => image.write_zeroes(offset, len, rng.one_in(2)).await.unwrap(),
            2 => image.flush().await.unwrap(),
            _ => {
                image
                    .write(Segments::from_bytes(&vec![round; len as usize]), offset)
                    .await
                    .1
                    .unwrap();
                last = Some((offset, len, round));
                continue;
            }
        }
        last = None;
    }
    image.close().await.unwrap();
    let image = over(open(file, false, memory).await.expect("what was sound is sound"), base);
    if let Some((offset, len, round)) = last {
        let (segments, result) = image.read(Segments::buffer(len as usize), offset).await;
        let mut bytes = vec![0; len as usize];
        segments.copy_out(0, &mut bytes);
        assert!(result.is_ok() && bytes.iter().all(|&b| b == round));
    }
}

/// Whatever could be read can be repaired, and then has no fault.
async fn repair(file: &File) {
    let all = Repair { leaks: true, corruptions: true };
    let small =
        cow::info(&raw(file)).await.is_ok_and(|report| report.header.backing_size <= REPAIRED);
    if small && cow::check(&raw(file), all).await.is_ok() {
        let report = cow::info(&raw(file)).await.unwrap();
        assert!(report.corruptions.is_empty() && report.leaked == 0, "{report:?}");
        assert!(open(file, true, u64::MAX).await.is_some());
    }
}

async fn merge_and_commit(file: &File, base: &File) {
    let Some(cow) = open(file, false, u64::MAX).await.filter(|cow| cow.size() <= MERGED) else {
        return;
    };
    let merged = File::default();
    cow::merge(&cow, &raw(base), &raw(&merged), |_| ()).await.unwrap();
    let size = cow.size();
    let below = Layer::Raw { raw: raw(&File::new(&[], size)), size };
    let (from, into) = (Image::new(vec![Layer::Cow(cow)], false), Image::new(vec![below], false));
    CopyDown::new(0..size, 1, Default::default())
        .run(&from, &into, async |_| Ok(()))
        .await
        .unwrap();
    cow::make_empty(&raw(file)).await.unwrap();
    assert_eq!(cow::info(&raw(file)).await.unwrap().own_sectors, 0);
}

pub fn fuzz(data: &[u8]) {
    let Some((lead, bytes)) = data.split_at_checked(4) else { return };
    let hole = u64::from(u16::from_le_bytes([lead[0], lead[1]])) * 4096;
    let (mut rng, memory) = (Rng::new(lead[2].into()), if lead[3] % 2 == 0 { 1 } else { u64::MAX });
    let (file, base) = (File::new(bytes, bytes.len() as u64 + hole), File::new(&[7; 5000], 5000));
    run(async {
        if let Some(cow) = open(&file, true, memory).await.filter(|cow| cow.size() > 0) {
            cow.prime().await.unwrap();
            read_some(&over(cow, &base), &mut rng).await;
        }
        let _ = cow::info(&raw(&file)).await;
        assert_eq!(file.writes.get(), 0, "it was written to without leave");
        change_some(&file, &base, &mut rng, memory).await;
        assert_eq!(base.writes.get(), 0, "the backing file was written to");
        repair(&file).await;
        merge_and_commit(&file, &base).await;
    });
}
