//! A chain of images on simulated disks that share one power supply.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use blockyard_image::journal::ImageSafety;
use blockyard_image::qcow2::check::{self, Repair, Report};
use blockyard_image::qcow2::{Header, Qcow2, Qcow2Options, rebuild_refcounts};
use blockyard_image::{Alignment, Image, ImageError, Layer, Raw, Store};
use blockyard_storage::Storage;
use blockyard_storage::sim::{Sim, SimConfig, SimDisk, SimImage};

use super::build::build;
use super::check::{Findings, Parsed, Snapshot};
use super::plan::{LayerPlan, Plan};

/// An image's files while the power is off. Raw images have no header.
#[derive(Clone)]
pub struct Files {
    pub main: SimImage,
    pub data: Option<SimImage>,
    pub qcow2: bool,
}

/// Returns the file name of the n-th image from the top.
pub fn file_name(n: usize) -> String {
    format!("layer-{n}")
}

/// Makes the initial images of the plan, topmost first.
pub fn make(plan: &Plan) -> Vec<Files> {
    let sim = |bytes: &[u8]| SimImage::from_bytes(bytes).atomic(plan.atomic);
    let layer = |layer: &LayerPlan| match layer {
        LayerPlan::Raw(size) => {
            let bytes = blockyard_storage::sim::pattern(plan.seed ^ size, 0, *size as usize);
            Files { main: sim(&bytes), data: None, qcow2: false }
        }
        LayerPlan::Qcow2(recipe) => {
            let built = build(recipe);
            Files { main: sim(&built.file), data: built.data.as_deref().map(sim), qcow2: true }
        }
    };
    plan.layers.iter().map(layer).collect()
}

/// Returns what the guest sees of `layers`, read by the reference reader.
pub fn contents(layers: &[Files]) -> Result<Vec<u8>, String> {
    layers.iter().rev().try_fold(Vec::new(), |below, files| {
        let bytes = files.main.bytes();
        if !files.qcow2 {
            return Ok(bytes);
        }
        Parsed::new(&bytes).read(None, files.data.as_ref().map(SimImage::bytes).as_deref(), &below)
    })
}

/// Contents of a chain that a user can see: the disk and its snapshots.
#[derive(Clone, PartialEq, Eq)]
pub struct View {
    pub disk: Vec<u8>,
    /// Names of the snapshots and their contents.
    pub snapshots: Vec<(String, Vec<u8>)>,
}

impl View {
    /// Describes the difference to another view.
    pub fn differs(&self, other: &View) -> String {
        let name =
            |view: &View| view.snapshots.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let sides = std::iter::once(("disk", &self.disk, &other.disk));
        let snapshots = self.snapshots.iter().zip(&other.snapshots);
        let sides =
            sides.chain(snapshots.map(|((name, ours), (_, theirs))| (&name[..], ours, theirs)));
        let differences =
            sides.filter(|(_, ours, theirs)| ours != theirs).map(|(name, ours, theirs)| {
                let at = ours.iter().zip(theirs).position(|(a, b)| a != b);
                format!("{name} of {} and {} bytes, from byte {at:?} on", ours.len(), theirs.len())
            });
        format!(
            "snapshots {:?} and {:?}; {}",
            name(self),
            name(other),
            differences.collect::<Vec<_>>().join(", ")
        )
    }
}

/// Returns what the topmost image shows. `parsed`: its main file. `data`: its data file. `below`:
/// [`contents`] of the images below.
pub fn view(parsed: &Parsed, data: Option<&SimImage>, below: &[u8]) -> Result<View, String> {
    let disk = parsed.read(None, data.map(SimImage::bytes).as_deref(), below)?;
    let shown = |(n, snapshot): (usize, &Snapshot)| {
        Ok((snapshot.name.clone(), parsed.read(Some(n), None, below)?))
    };
    let snapshots =
        parsed.snapshots.iter().enumerate().map(shown).collect::<Result<_, String>>()?;
    Ok(View { disk, snapshots })
}

pub fn check(files: &Files) -> Findings {
    Parsed::new(&files.main.bytes()).check()
}

/// Returns the image after the repair that the dirty bit demands at the next open for writing.
pub fn counted(files: &Files) -> Result<Files, String> {
    let main = work_on(&files.main, async |raw| rebuild_refcounts(&raw).await.map(|_| ()))?;
    Ok(Files { main, ..files.clone() })
}

/// Checks the image, as [`counted`] returns it if the dirty bit is set.
pub fn counted_check(files: &Files) -> Result<Findings, String> {
    let bytes = files.main.bytes();
    Ok(if is_dirty(&bytes) { check(&counted(files)?) } else { Parsed::new(&bytes).check() })
}

/// Returns the header of the file with these bytes.
pub fn header(bytes: &[u8]) -> Result<Header, ImageError> {
    Header::parse(bytes, bytes.len() as u64)
}

pub fn is_dirty(bytes: &[u8]) -> bool {
    header(bytes).is_ok_and(|header| header.has_dirty())
}

/// Runs the crate's check; returns its report.
pub fn our_check(files: &Files) -> Result<Report, String> {
    let report = Rc::new(RefCell::new(None));
    let told = report.clone();
    work_on(&files.main, async move |raw| {
        *told.borrow_mut() = Some(check::check(&raw, None, Repair::No).await?);
        Ok(())
    })?;
    Ok(report.take().expect("the check has ended"))
}

/// Returns the image after some work, on a disk with power.
fn work_on(
    image: &SimImage,
    work: impl AsyncFnOnce(Raw) -> Result<(), ImageError> + 'static,
) -> Result<SimImage, String> {
    let disk = SimDisk::new(image.clone(), SimConfig::new(1));
    let raw = Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
    Sim::new(1)
        .block_on(async move { work(raw).await })
        .map_err(|e| e.to_string())?
        .map_err(|e| e.to_string())?;
    Ok(disk.power_cut())
}

/// The files with the power on.
pub struct Disks {
    pub layers: Vec<(SimDisk, Option<SimDisk>)>,
    pub qcow2: Vec<bool>,
    /// How the topmost image's metadata survive a death of the process.
    pub safety: ImageSafety,
}

impl Disks {
    pub fn new(layers: &[Files], mut config: impl FnMut() -> SimConfig) -> Self {
        let mut on = |image: &SimImage| SimDisk::new(image.clone(), config());
        let disks = layers
            .iter()
            .map(|files| (on(&files.main), files.data.as_ref().map(&mut on)))
            .collect();
        let qcow2 = layers.iter().map(|files| files.qcow2).collect();
        Disks { layers: disks, qcow2, safety: ImageSafety::default() }
    }

    pub fn all(&self) -> impl Iterator<Item = &SimDisk> {
        self.layers.iter().flat_map(|(main, data)| std::iter::once(main).chain(data))
    }

    /// Returns the files of the topmost image.
    pub fn top(&self) -> impl Iterator<Item = &SimDisk> {
        std::iter::once(&self.layers[0].0).chain(&self.layers[0].1)
    }

    /// Cuts the power, and returns one of the many possible states of the files.
    pub fn power_cut(&self) -> Vec<Files> {
        let files = |((main, data), &qcow2): (&(SimDisk, Option<SimDisk>), &bool)| Files {
            main: main.power_cut(),
            data: data.as_ref().map(SimDisk::power_cut),
            qcow2,
        };
        self.layers.iter().zip(&self.qcow2).map(files).collect()
    }

    /// Ends the process, and returns one of the many states that this may leave.
    pub fn process_death(&self) -> Vec<Files> {
        let files = |((main, data), &qcow2): (&(SimDisk, Option<SimDisk>), &bool)| Files {
            main: main.process_death(),
            data: data.as_ref().map(SimDisk::process_death),
            qcow2,
        };
        self.layers.iter().zip(&self.qcow2).map(files).collect()
    }

    /// Opens the chain from the `top`-th image on, that image for writing. Returns one view for
    /// each reactor.
    pub async fn open(
        &self,
        plan: &Plan,
        top: usize,
        wrap: impl Fn(SimDisk) -> Store,
    ) -> io::Result<Vec<Image>> {
        let mut views: Vec<Vec<Layer>> = (0..plan.reactors).map(|_| Vec::new()).collect();
        for (n, (main, data)) in self.layers.iter().enumerate().skip(top) {
            let raw = |disk: &SimDisk| Raw::on(wrap(disk.clone()), plan.shape);
            let (file, data) = (raw(main), data.as_ref().map(raw));
            if !self.qcow2[n] {
                let size = main.len().await?;
                views.iter_mut().for_each(|view| view.push(Layer::Raw { raw: file.clone(), size }));
                continue;
            }
            let header = Header::read(&file).await?;
            let (l2_cache, reserve) = (plan.cache, plan.reserve);
            let options = Qcow2Options {
                read_only: n > top,
                l2_cache,
                reserve,
                always_partial: true,
                safety: if n == top { self.safety.clone() } else { ImageSafety::default() },
                ..Qcow2Options::default()
            };
            let first = Qcow2::open(header, file.clone(), data.clone(), &options).await?;
            let shared = first.shared().clone();
            views.iter_mut().for_each(|view| {
                view.push(Layer::Qcow2(Qcow2::view(shared.clone(), file.clone(), data.clone())));
            });
        }
        Ok(views.into_iter().map(|layers| Image::new(layers, plan.copy_on_read)).collect())
    }
}
