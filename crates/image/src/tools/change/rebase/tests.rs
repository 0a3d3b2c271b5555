//! A rebase on the simulated disk with a power cut at each event: the disk's contents stay the
//! same.

use blockyard_storage::sim::{Power, Sim, SimConfig, SimDisk, SimImage, pattern};

use super::*;
use crate::cow::{Cow, CowOptions};
use crate::layers::image::Image;
use crate::qcow2::{CreateOptions, Qcow2, Qcow2Options};
use crate::raw::Raw;
use blockyard_storage::Alignment;

const SHAPE: Alignment = Alignment { memory_align: 512, offset_align: 512 };
/// Size of the disk in bytes. The job compares 1 MiB at a time ([`PIECE`]). Of a larger disk it has
/// two pieces in flight.
const SIZE: u64 = 26 << 16;
/// Number of images that are checked after each power cut. A cut can leave many different ones.
const OUTCOMES: u64 = 2;

fn powered(image: &SimImage) -> SimDisk {
    SimDisk::new(image.clone(), SimConfig::new(1))
}

/// Makes the old base image, and a new one that is shorter, differs in places, and has zeroes and
/// data where the old one has none.
fn bases() -> [SimImage; 2] {
    let mut old = pattern(1, 0, 21 << 16);
    old[100_000..400_000].fill(0);
    let mut new = old.clone();
    new.resize(24 << 16, 0);
    new[4096..20_000].fill(7);
    new[200_000..300_000].fill(8);
    new[1_000_000..1_100_000].fill(0);
    new[1_430_000..1_530_000].fill(9);
    [SimImage::from_bytes(&old), SimImage::from_bytes(&new)]
}

/// How the topmost image is made: a qcow2 image with these options, or a COW file.
#[derive(Clone, Debug)]
enum Top {
    Qcow2(CreateOptions),
    Cow,
}

impl Top {
    async fn create(&self, raw: &Raw) {
        match self {
            Top::Qcow2(options) => qcow2::create(raw, None, options).await.map(|_| ()).unwrap(),
            Top::Cow => {
                let backing = cow::Backing { name: "old", size: SIZE, mtime: 0 };
                cow::create(raw, &cow::CreateOptions::new(backing)).await.map(|_| ()).unwrap();
            }
        }
    }

    async fn open(
        &self,
        disk: &SimDisk,
        base: &SimImage,
        read_only: bool,
    ) -> Result<Disk, ImageError> {
        let raw = Raw::on(disk.clone(), SHAPE);
        let top = match self {
            Top::Qcow2(_) => {
                let header = Header::read(&raw).await?;
                let options = Qcow2Options { read_only, ..Qcow2Options::default() };
                Layer::Qcow2(Qcow2::open(header, raw, None, &options).await?)
            }
            Top::Cow => Layer::Cow(
                Cow::open(raw, &CowOptions { read_only, ..CowOptions::default() }).await?,
            ),
        };
        let backing = Layer::Raw { raw: Raw::on(powered(base), SHAPE), size: base.len() };
        let image = Image::new(vec![top, backing], false);
        Disk::new(image, "top").await.map_err(|e| ImageError::refused("top", e.to_string()))
    }

    /// Makes the image, with some writes of its own.
    fn make(&self, base: &SimImage) -> SimImage {
        let (disk, top, base) = (powered(&SimImage::zeroed(0)), self.clone(), base.clone());
        let used = disk.clone();
        let work = async move {
            top.create(&Raw::on(used.clone(), SHAPE)).await;
            let disk = top.open(&used, &base, false).await.unwrap();
            for (at, len) in
                [(8192, 4096), (250_880, 1024), (1_050_624, 70_144), (SIZE - 4096, 4096)]
            {
                disk.write(Segments::from_bytes(&vec![5; len]), at).await.unwrap();
            }
            disk.write_zeroes(1_310_720, 119_808).await.unwrap();
            disk.close().await.unwrap();
        };
        Sim::new(1).block_on(work).unwrap();
        SimImage::from_bytes(&disk.contents())
    }

    fn shows(&self, image: &SimImage, base: &SimImage) -> Result<Vec<u8>, String> {
        let (disk, top, base) = (powered(image), self.clone(), base.clone());
        let work = async move {
            let disk = top.open(&disk, &base, true).await?;
            let segments = disk.read(Segments::buffer(SIZE as usize), 0).await;
            let mut bytes = vec![0; SIZE as usize];
            segments
                .map_err(|e| ImageError::refused("top", e.to_string()))?
                .copy_out(0, &mut bytes);
            Ok::<_, ImageError>(bytes)
        };
        Sim::new(1).block_on(work).unwrap().map_err(|e| e.to_string())
    }
}

/// Runs `rebase` on one reactor. Returns false after a power cut.
fn rebased(top: &Top, disk: &SimDisk, old: &SimImage, new: Option<&SimImage>, seed: u64) -> bool {
    let (top, used, old, new) = (top.clone(), disk.clone(), old.clone(), new.cloned());
    let done = Sim::new(seed).block_on(async move {
        let disk = top.open(&used, &old, false).await.map_err(|e| e.to_string())?;
        let new = match new {
            Some(new) => {
                let layer = Layer::Raw { raw: Raw::on(powered(&new), SHAPE), size: new.len() };
                Some(
                    Disk::new(Image::new(vec![layer], false), "new")
                        .await
                        .map_err(|e| e.to_string())?,
                )
            }
            None => None,
        };
        let (sweep, progress) = (Sweep::new(0..SIZE), Arc::default());
        let work = RebaseJob { compress: false, sweep, progress, shared_from: (2, 1) };
        work.run(&disk, new.as_ref()).await.map_err(|e| e.to_string())?;
        disk.close().await.map_err(|e| e.to_string())
    });
    if let Ok(Err(e)) = done
        && !disk.is_off()
    {
        panic!("{e}");
    }
    !disk.is_off()
}

#[test]
fn the_disk_is_unchanged_after_a_power_cut_at_any_event() {
    let [old, new] = bases();
    let qcow2 = |version, cluster_size, extended_l2| {
        Top::Qcow2(CreateOptions {
            version,
            cluster_size,
            extended_l2,
            ..CreateOptions::overlay(SIZE, "old", "raw")
        })
    };
    let tops = [qcow2(3, 65536, false), qcow2(3, 65536, true), qcow2(2, 4096, false), Top::Cow];
    for (number, top) in tops.into_iter().enumerate() {
        let image = top.make(&old);
        let expected = top.shows(&image, &old).unwrap();
        // The first case has no new backing file.
        let nothing = SimImage::zeroed(0);
        let next = (number != 0).then_some(&new);
        let mut cuts = 0;
        for events in 0.. {
            let config =
                SimConfig { power: Power::cut_after(events), ..SimConfig::new(events + 7) };
            let disk = SimDisk::new(image.clone(), config);
            let through = rebased(&top, &disk, &old, next, events);
            for _ in 0..OUTCOMES {
                let left = disk.power_cut();
                let shown = top.shows(&left, &old);
                assert!(
                    shown.as_ref() == Ok(&expected),
                    "{top:?}, cut after {events} events: {:?}",
                    shown.err()
                );
                if through {
                    let shown = top.shows(&left, next.unwrap_or(&nothing));
                    assert!(shown.as_ref() == Ok(&expected), "{top:?}, through: {:?}", shown.err());
                }
            }
            if through {
                break;
            }
            cuts += 1;
        }
        assert!(cuts > 10, "{top:?}: {cuts} cuts");
    }
}
