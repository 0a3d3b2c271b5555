//! Cuts the power at every event of an operation, and checks what is left.

use blockyard_image::qcow2::check::{self, FindingKind, Repair, Report};
use blockyard_image::qcow2::entry::{Cluster, EntryFormat, L1Entry, L2Entry};
use blockyard_image::qcow2::{Header, rebuild_refcounts};
use blockyard_image::{Alignment, ImageError, Raw};
use blockyard_storage::sim::{Power, Sim, SimConfig, SimDisk, SimImage};

/// Number of images that are checked after each power cut. A cut can leave many different ones.
const OUTCOMES: u64 = 6;

const DIRECT: Alignment = Alignment { memory_align: 512, offset_align: 512 };

/// Loads an image of the host into a simulated disk.
pub fn load(path: &str) -> SimImage {
    SimImage::from_bytes(&std::fs::read(path).unwrap())
}

/// Runs work on a disk with power.
pub fn on_image<T: 'static, F: Future<Output = T> + 'static>(
    image: &SimImage,
    work: impl FnOnce(Raw) -> F,
) -> (T, SimImage) {
    let disk = SimDisk::new(image.clone(), SimConfig::new(1));
    let value = Sim::new(1).block_on(work(Raw::on(disk.clone(), DIRECT))).unwrap();
    (value, SimImage::from_bytes(&disk.contents()))
}

/// Cuts the power after 0, 1, 2, ... events of `operation`, until the operation ends before the
/// cut. After each cut calls `judge` with two arguments: whether the operation ended before the
/// cut, and the image that the cut left. Returns the number of power cuts.
pub fn everywhere<F: Future<Output = Result<(), ImageError>> + 'static>(
    what: &str,
    image: &SimImage,
    operation: impl Fn(Raw) -> F,
    judge: impl Fn(bool, SimImage) -> Result<(), String>,
) -> u64 {
    for events in 0.. {
        let seed = events * 7 + 1;
        let config = SimConfig { power: Power::cut_after(events), ..SimConfig::new(seed) };
        let disk = SimDisk::new(image.clone(), config);
        let done = Sim::new(seed).block_on(operation(Raw::on(disk.clone(), DIRECT)));
        if let Ok(Err(e)) = &done
            && !disk.is_off()
        {
            panic!("{what}: {e}");
        }
        let through = !disk.is_off();
        for _ in 0..if through { 1 } else { OUTCOMES } {
            let left = disk.power_cut();
            judge(through, left)
                .unwrap_or_else(|e| panic!("{what}, cut after {events} events: {e}"));
        }
        if through {
            return events;
        }
    }
    unreachable!("every operation ends")
}

/// Returns the image as the next open finds it: repaired, if the dirty bit demands that. Its check
/// must find no corruption.
pub fn opened(image: &SimImage) -> Result<(SimImage, Report), String> {
    let header = header(image)?;
    let image = match header.has_dirty() {
        true => {
            let (result, image) =
                on_image(image, |raw| async move { rebuild_refcounts(&raw).await });
            result.map_err(|e| format!("the repair that the dirty bit demands: {e}"))?;
            image
        }
        false => image.clone(),
    };
    let (report, image) =
        on_image(&image, |raw| async move { check::check(&raw, None, Repair::No).await });
    let report = report.map_err(|e| e.to_string())?;
    Ok((image, report))
}

/// Like [`opened`], and refuses a corrupt image.
pub fn opened_sound(image: &SimImage) -> Result<SimImage, String> {
    let (image, report) = opened(image)?;
    if report.corruptions > 0 || report.check_errors > 0 {
        let first = report.findings.iter().find(|finding| finding.kind != FindingKind::Leak);
        return Err(format!(
            "{} corruptions, {} leaks: {first:#?}",
            report.corruptions, report.leaks
        ));
    }
    Ok(image)
}

pub fn header(image: &SimImage) -> Result<Header, String> {
    Header::parse(&image.bytes(), image.len()).map_err(|e| e.to_string())
}

fn word(bytes: &[u8], at: u64) -> u64 {
    bytes.get(at as usize..at as usize + 8).map_or(0, |b| u64::from_be_bytes(b.try_into().unwrap()))
}

/// Returns the disk's contents by an L1 table, without the crate's code. The image must have no
/// compressed clusters and no backing file.
pub fn guest_of(image: &SimImage, l1_offset: u64, l1_size: u64, size: u64) -> Vec<u8> {
    let (bytes, header) = (image.bytes(), header(image).unwrap());
    let (layout, cluster) = (EntryFormat::of(&header), header.cluster_size());
    let mut guest = vec![0; size as usize];
    for at in (0..size).step_by(cluster as usize) {
        let (l1_index, index) = (at / header.l2_reach(), at / cluster % header.l2_entries());
        let l1 = if l1_index < l1_size { word(&bytes, l1_offset + l1_index * 8) } else { 0 };
        let Some(table) = L1Entry::decode(l1, layout).unwrap().table else { continue };
        let entry = table + index * header.l2_entry_size();
        let bitmap = if layout.extended_l2 { word(&bytes, entry + 8) } else { 0 };
        let (host, data) =
            match L2Entry::decode(word(&bytes, entry), bitmap, layout).unwrap().cluster {
                Cluster::Standard { host } => (host, u32::MAX),
                Cluster::Subclusters { host: Some(host), bitmap } => (host, bitmap.data()),
                Cluster::Compressed { .. } => panic!("a compressed cluster"),
                _ => continue,
            };
        let piece = cluster / 32;
        for n in (0..32).filter(|n| data >> n & 1 == 1) {
            let (from, to) =
                ((host + n * piece) as usize, ((at + n * piece) as usize).min(guest.len()));
            let len = (piece as usize).min(guest.len() - to).min(bytes.len().saturating_sub(from));
            guest[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
    }
    guest
}

/// Returns the guest's disk.
pub fn guest(image: &SimImage) -> Vec<u8> {
    let header = header(image).unwrap();
    guest_of(image, header.l1_offset, header.l1_size.into(), header.size)
}
