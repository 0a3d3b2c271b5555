//! A qcow2 image as data: whatever it holds, it is opened or refused, read, checked, and written to
//! only if it is sound.
//!
//! Input: the file's length and the work's seed, then the file's bytes.

use blockyard_image::qcow2::{Header, Qcow2, Qcow2Options};
use blockyard_image::{Alignment, Image, Layer, Raw};
use blockyard_ring::Segments;
use blockyard_storage::sim::Rng;

use super::file::{File, run};

const PLAIN: Alignment = Alignment { memory_align: 1, offset_align: 1 };

async fn open(file: &File, data: &File, read_only: bool) -> Option<Image> {
    let raw = Raw::on(file.clone(), PLAIN);
    let header = Header::read(&raw).await.ok()?;
    let data = header.has_data_file().then(|| Raw::on(data.clone(), PLAIN));
    let options = Qcow2Options { read_only, l2_cache: Some(1 << 16), ..Qcow2Options::default() };
    Some(Image::new(
        vec![Layer::Qcow2(Qcow2::open(header, raw, data, &options).await.ok()?)],
        false,
    ))
}

fn place(rng: &mut Rng, size: u64) -> (u64, u64) {
    let offset = rng.below(size.div_ceil(512)) * 512;
    (offset, (rng.between(1, 128) * 512).min(size.next_multiple_of(512) - offset))
}

async fn read_some(image: &Image, rng: &mut Rng) {
    for _ in 0..8 {
        let (offset, len) = place(rng, image.size());
        let _ = image.read(Segments::buffer(len as usize), offset).await;
    }
}

async fn change_some(image: &Image, rng: &mut Rng) {
    for round in 0..8u8 {
        let (offset, len) = place(rng, image.size());
        let _ = match rng.below(5) {
            0 => image.discard(offset, len).await,
            1 => image.write_zeroes(offset, len, rng.one_in(2)).await,
            2 => image.flush().await,
            _ => image.write(Segments::from_bytes(&vec![round; len as usize]), offset).await.1,
        };
    }
    let _ = image.close().await;
}

pub fn fuzz(data: &[u8]) {
    let Some((lead, bytes)) = data.split_at_checked(4) else { return };
    let hole = u64::from(u16::from_le_bytes([lead[0], lead[1]]));
    let mut rng = Rng::new(u64::from(lead[2]));
    let (file, other) = (File::new(bytes, bytes.len() as u64 + hole * 64), File::new(&[], 0));
    run(async {
        if let Some(image) = open(&file, &other, true).await
            && image.size() > 0
        {
            read_some(&image, &mut rng).await;
        }
        assert_eq!(file.writes.get() + other.writes.get(), 0, "it was written to without leave");
        if let Some(image) = open(&file, &other, false).await
            && image.size() > 0
        {
            change_some(&image, &mut rng).await;
            assert!(open(&file, &other, false).await.is_some(), "what was sound is not any more");
        }
    });
}
