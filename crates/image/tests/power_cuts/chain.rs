//! A chain of images on simulated disks that share one power supply.

use std::io;

use blockyard_image::qcow2::{Header, Qcow2, Qcow2Options};
use blockyard_image::{Image, Layer, Raw};
use blockyard_ring::Storage;
use blockyard_ring::sim::{SimConfig, SimDisk, SimImage};

use super::build::build;
use super::check::{Findings, Parsed};
use super::plan::{LayerPlan, Plan};

/// An image's files with the power off. Raw images have no header.
#[derive(Clone)]
pub struct Files {
    pub main: SimImage,
    pub data: Option<SimImage>,
    pub qcow2: bool,
}

/// The name of the n-th image from above, where it is a file.
pub fn file_name(n: usize) -> String {
    format!("layer-{n}")
}

/// As the plan has them to begin with, the topmost first.
pub fn make(plan: &Plan) -> Vec<Files> {
    let sim = |bytes: &[u8]| SimImage::from_bytes(bytes).atomic(plan.atomic);
    let layer = |layer: &LayerPlan| match layer {
        LayerPlan::Raw(size) => {
            let bytes = blockyard_ring::sim::pattern(plan.seed ^ size, 0, *size as usize);
            Files { main: sim(&bytes), data: None, qcow2: false }
        }
        LayerPlan::Qcow2(recipe) => {
            let built = build(recipe);
            Files { main: sim(&built.file), data: built.data.as_deref().map(sim), qcow2: true }
        }
    };
    plan.layers.iter().map(layer).collect()
}

/// What the guest sees of the images from `layers[0]` on, by the slow way.
pub fn contents(layers: &[Files]) -> Result<Vec<u8>, String> {
    layers.iter().rev().try_fold(Vec::new(), |below, files| {
        let bytes = files.main.bytes();
        if !files.qcow2 {
            return Ok(bytes);
        }
        Parsed::new(&bytes).read(None, files.data.as_ref().map(SimImage::bytes).as_deref(), &below)
    })
}

/// What the snapshots of the topmost image show, where it is over nothing.
pub fn snapshots(files: &Files) -> Result<Vec<Vec<u8>>, String> {
    let bytes = files.main.bytes();
    let parsed = Parsed::new(&bytes);
    (0..parsed.snapshots()).map(|n| parsed.read(Some(n), None, &[])).collect()
}

pub fn check(files: &Files) -> Findings {
    Parsed::new(&files.main.bytes()).check()
}

/// The files with the power on.
pub struct Disks {
    pub layers: Vec<(SimDisk, Option<SimDisk>)>,
    qcow2: Vec<bool>,
}

impl Disks {
    pub fn new(layers: &[Files], mut config: impl FnMut() -> SimConfig) -> Self {
        let mut on = |image: &SimImage| SimDisk::new(image.clone(), config());
        let disks = layers.iter().map(|files| (on(&files.main), files.data.as_ref().map(&mut on))).collect();
        Disks { layers: disks, qcow2: layers.iter().map(|files| files.qcow2).collect() }
    }

    pub fn all(&self) -> impl Iterator<Item = &SimDisk> {
        self.layers.iter().flat_map(|(main, data)| std::iter::once(main).chain(data))
    }

    /// The files of the topmost image.
    pub fn top(&self) -> impl Iterator<Item = &SimDisk> {
        std::iter::once(&self.layers[0].0).chain(&self.layers[0].1)
    }

    /// What a cut leaves: one of many possibilities.
    pub fn power_cut(&self) -> Vec<Files> {
        let files = |((main, data), &qcow2): (&(SimDisk, Option<SimDisk>), &bool)| Files {
            main: main.power_cut(),
            data: data.as_ref().map(SimDisk::power_cut),
            qcow2,
        };
        self.layers.iter().zip(&self.qcow2).map(files).collect()
    }

    /// Opens the chain, and gives as many views of it as there are reactors.
    pub async fn open<S: Storage + Clone>(
        &self,
        plan: &Plan,
        wrap: impl Fn(SimDisk) -> S,
    ) -> io::Result<Vec<Image<S>>> {
        let mut views: Vec<Vec<Layer<S>>> = (0..plan.reactors).map(|_| Vec::new()).collect();
        for (n, (main, data)) in self.layers.iter().enumerate() {
            let raw = |disk: &SimDisk| Raw::on(wrap(disk.clone()), plan.shape);
            let (file, data) = (raw(main), data.as_ref().map(raw));
            if !self.qcow2[n] {
                let size = main.len().await?;
                views.iter_mut().for_each(|view| view.push(Layer::Raw { raw: file.clone(), size }));
                continue;
            }
            let header = Header::read(&file).await?;
            let options = Qcow2Options { read_only: n > 0, l2_cache: plan.cache, reserve: plan.reserve };
            let first = Qcow2::open(header, file.clone(), data.clone(), &options).await?;
            let shared = first.shared().clone();
            views.iter_mut().for_each(|view| {
                view.push(Layer::Qcow2(Qcow2::view(shared.clone(), file.clone(), data.clone())));
            });
        }
        Ok(views.into_iter().map(|layers| Image::new(layers, plan.copy_on_read)).collect())
    }
}
