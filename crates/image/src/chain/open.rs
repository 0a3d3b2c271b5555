//! Opens a chain, image by image, and makes each reactor's view of it.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use blockyard_ring::{Executor, Handle};
use blockyard_storage::{ImageFile, OpenOptions, Overlaid};

use crate::SECTOR;
use crate::cow::{Cow, CowOptions};
use crate::error::{ErrorKind, ImageError};
use crate::journal::{ImageKey, ImageSafety};
use crate::layers::format::{Format, UnknownFormat};
use crate::layers::image::Image;
use crate::layers::layer::Layer;
use crate::qcow2::{Header, Qcow2, Qcow2Options, snapshot};
use crate::raw::Raw;
use crate::tools::apply_journal_of;

use super::cache_shares;
use super::error::{ChainError, Role};
use super::left::LeftImage;
use super::member::ChainLayer;
use super::names::{Allowed, PendingImage};
use super::options::ChainOptions;
use super::shared::Candidate;
use crate::layers::meta::Meta;

/// A ring for opening chains, created at its first use. A thread that opens many chains keeps it.
#[derive(Default)]
pub struct Opener(Cell<Option<Executor>>);

/// An opened chain, the topmost image first.
#[derive(Debug)]
pub struct Chain {
    pub(crate) layers: Vec<Arc<ChainLayer>>,
    pub(crate) options: ChainOptions,
    pub(crate) cut: Option<String>,
}

impl Opener {
    /// Creates the ring now, so that the next chain is opened sooner.
    pub fn prepare(&self) -> io::Result<()> {
        let executor = self.0.take().map_or_else(Executor::new, Ok)?;
        self.0.set(Some(executor));
        Ok(())
    }
}

impl ChainOptions {
    /// Returns whether the topmost image is as the server before has left it.
    fn is_as_left(&self, file: &ImageFile) -> bool {
        self.left.is_some() && file.fd().and_then(|fd| LeftImage::of(&**fd)) == self.left
    }

    /// Returns how the changed metadata of the image at `depth` survive a death of the process.
    /// Only the topmost image is written to by a guest. The target of a commit needs no journal of
    /// its own, but the one of a dead server is replayed before the first write.
    pub(super) fn safety_of(&self, depth: usize, file: &ImageFile) -> ImageSafety {
        let safety = |file: &ImageFile| {
            self.crash_safety.of(file.fd().and_then(|fd| ImageKey::of(&**fd).ok()))
        };
        match depth {
            0 => safety(file),
            _ if self.commit_into == Some(depth) => safety(file).without_journal(),
            _ => ImageSafety::default(),
        }
    }
}

impl Chain {
    /// Returns why the last image's backing file was not opened, if the options let the chain end
    /// above it.
    pub fn cut(&self) -> Option<&str> {
        self.cut.as_deref()
    }

    /// Opens the chain, on the calling thread: the metadata are read through a temporary ring.
    pub fn open(options: &ChainOptions) -> Result<Self, ChainError> {
        Chain::open_by(&Opener::default(), options)
    }

    /// Like [`Chain::open`], with the ring of `opener`.
    pub fn open_by(opener: &Opener, options: &ChainOptions) -> Result<Self, ChainError> {
        if options.only_locked && !options.read_only {
            apply_journal_of(options)?;
        }
        let kept = opener.0.take().map_or_else(Executor::new, Ok);
        let executor = kept.map_err(ChainError::Executor)?;
        let (handle, options) = (executor.handle().clone(), options.clone());
        let chain = executor
            .block_on(async move { Chain::open_on(&handle, options).await })
            .map_err(ChainError::Executor)??;
        // Connections to servers live as long as their ring. These must end now.
        let is_local = |file: &Arc<ImageFile>| file.opened().is_none();
        if chain
            .layers
            .iter()
            .all(|layer| is_local(&layer.file) && layer.data.as_ref().is_none_or(is_local))
        {
            opener.0.set(Some(executor));
        }
        Ok(chain)
    }

    async fn open_on(handle: &Handle, options: ChainOptions) -> Result<Self, ChainError> {
        let allowed = Allowed::by(&options);
        let mut chain = Chain { layers: Vec::new(), options, cut: None };
        let mut seen = Vec::new();
        let mut next = Some(PendingImage {
            path: chain.options.path.clone(),
            format: chain.options.format,
            named_by: None,
            found: chain.options.files.image.take(),
        });
        while let Some(image) = next {
            let image = match image.find(&allowed) {
                Err(error @ ChainError::Outside { .. }) if chain.options.cut_outside => {
                    chain.cut = Some(error.to_string());
                    break;
                }
                found => found?,
            };
            image.may_be_opened(chain.layers.len(), &mut seen)?;
            let image = image.permitted(&allowed);
            next = chain.open_layer(handle, image, &allowed).await?;
            if chain.options.no_backing {
                break;
            }
        }
        chain.check_abandoned()?;
        cache_shares::apply(&chain.layers, chain.options.l2_cache);
        if chain.options.prime && chain.options.left.is_none() {
            let image = chain.image(handle).map_err(ChainError::Executor)?;
            if let Err(e) = image.prime().await {
                tracing::warn!(
                    "image {}: cannot load its metadata in advance: {e}",
                    chain.options.path.display()
                );
            }
        }
        Ok(chain)
    }

    /// Opens one image; returns its backing image, if any.
    async fn open_layer(
        &mut self,
        handle: &Handle,
        image: PendingImage,
        allowed: &Allowed,
    ) -> Result<Option<PendingImage>, ChainError> {
        let PendingImage { path, format, .. } = &image;
        let format = format
            .or_else(|| Format::of_name(path))
            .ok_or_else(|| ChainError::Format { path: path.clone() })?;
        let shared = self.may_be_shared(&image, format);
        if let Some(sharing) = shared.as_ref().and_then(Candidate::find) {
            let layer = ChainLayer::shared(sharing);
            let backing = match layer.qcow2() {
                Some(shared) => self.below_qcow2(&image, &shared.header())?,
                None => None,
            };
            self.layers.push(Arc::new(layer));
            return Ok(backing);
        }
        let (layer, backing) =
            self.open_files(handle, image, format, allowed, shared.is_some()).await?;
        let sharing = shared
            .filter(|_| layer.data.is_none())
            .and_then(|shared| shared.share(&layer.file, &layer.meta));
        self.layers.push(Arc::new(sharing.map_or(layer, ChainLayer::shared)));
        Ok(backing)
    }

    /// Returns the file of a backing image, if the options let chains share it.
    fn may_be_shared(&self, image: &PendingImage, format: Format) -> Option<Candidate> {
        let options = &self.options;
        let is_read = !self.layers.is_empty() && self.has_read_only_files();
        if !is_read || options.force_share || options.journal.is_some() {
            return None;
        }
        let (images, found) = (options.shared.clone()?, image.found.as_ref()?);
        Candidate::of(images, found, image.path.clone(), format, options.cache)
    }

    /// Returns whether the next image's files are opened for reading only.
    fn has_read_only_files(&self) -> bool {
        match self.layers.len() {
            0 => self.options.read_only,
            depth => self.options.commit_into != Some(depth),
        }
    }

    /// Opens the files of the next image. `is_shared`: other chains may use the image, too.
    async fn open_files(
        &mut self,
        handle: &Handle,
        image: PendingImage,
        format: Format,
        allowed: &Allowed,
        is_shared: bool,
    ) -> Result<(ChainLayer, Option<PendingImage>), ChainError> {
        let (path, depth) = (&image.path, self.layers.len());
        let files_read_only = self.has_read_only_files();
        let read_only = files_read_only || depth == 0 && self.options.only_locked;
        let overlaid = match depth {
            0 => self.options.overlaid.clone(),
            _ => {
                Overlaid::Below(self.layers.iter().map(|above| above.file.path().into()).collect())
            }
        };
        let new_data = self.options.files.data.take();
        let open = |next: &PendingImage| {
            let ChainOptions { cache, nbd, force_share, ref journal, .. } = self.options;
            let (found, overlaid, journal) =
                (next.found.clone(), overlaid.clone(), journal.clone());
            let open = OpenOptions::new(&next.path, files_read_only, cache);
            let options = OpenOptions { found, nbd, force_share, overlaid, journal, ..open };
            ImageFile::open(&options).map(Arc::new)
        };
        let file = open(&image)?;
        let wrong = |error| ChainError::Image { path: path.clone(), error };
        let failed = |e| wrong(ImageError::io("file", None, "opening it for io_uring", e));
        let raw = |file: &Arc<ImageFile>| Raw::open(file, handle);
        let (meta, data, backing) = match format {
            Format::Raw => (Meta::Raw, None, None),
            Format::Qcow2 => {
                let main = raw(&file).map_err(failed)?;
                let mut header = Header::read(&main).await.map_err(wrong)?;
                if let (0, true, Some(name)) = (depth, read_only, &self.options.snapshot) {
                    snapshot::show(&main, &mut header, name).await.map_err(wrong)?;
                }
                let data = match data_file_name(&header).map_err(wrong)? {
                    Some(name) => {
                        let next = image.names(Role::Data, name, Some(Format::Raw));
                        Some(open(&match new_data {
                            Some(fd) => PendingImage { found: Some(fd), ..next },
                            None => next.find(allowed)?,
                        })?)
                    }
                    None => None,
                };
                let backing = self.below_qcow2(&image, &header)?;
                let data_raw = data.as_ref().map(raw).transpose().map_err(failed)?;
                // Only the topmost image's file can be unnamed yet: its descriptor was passed in,
                // and no image names it.
                let unfinished = depth == 0 && image.found.is_some();
                // The limit of a shared image only grows; see `cache_shares`.
                let l2_cache = if is_shared { Some(0) } else { self.options.l2_cache };
                let safety = self.options.safety_of(depth, &file);
                let is_below_writer = depth > 0 && !self.options.read_only;
                let is_sound = depth == 0 && self.options.is_as_left(&file);
                let keeps_disk = depth == 0 && self.options.keeps_disk;
                let options = Qcow2Options {
                    read_only,
                    l2_cache,
                    keeps_disk,
                    unfinished,
                    safety,
                    is_below_writer,
                    is_sound,
                    ..Default::default()
                };
                let view = Qcow2::open(header, main, data_raw, &options).await.map_err(wrong)?;
                (Meta::Qcow2(view.shared().clone()), data, backing)
            }
            Format::Cow => {
                let options = CowOptions {
                    read_only,
                    accept_changed_backing: self.options.accept_changed_backing
                        || self.options.no_backing,
                    is_below_writer: depth > 0 && !self.options.read_only,
                    safety: self.options.safety_of(depth, &file),
                    ..CowOptions::default()
                };
                let view = Cow::open(raw(&file).map_err(failed)?, &options).await.map_err(wrong)?;
                let backing = self.below_cow(&image, &view, allowed)?;
                (Meta::Cow(view.shared().clone()), None, backing)
            }
        };
        Ok((ChainLayer { format, file, data, meta, sharing: None }, backing))
    }

    fn below_qcow2(
        &self,
        image: &PendingImage,
        header: &Header,
    ) -> Result<Option<PendingImage>, ChainError> {
        let Some(name) = header.backing.as_deref().filter(|_| !self.options.no_backing) else {
            return Ok(None);
        };
        let wrong = |what: String, cause| ChainError::Named {
            path: image.path.clone(),
            role: Role::Backing,
            name: name.into(),
            what,
            cause,
        };
        let format = match header.backing_format.as_deref() {
            Some(format) => Some(
                format.parse().map_err(|e: UnknownFormat| wrong(e.to_string(), Some(e.into())))?,
            ),
            None => Format::of_name(Path::new(name)),
        };
        let what = "its format is unknown: neither the image nor its name gives it; `blockyard \
            image rebase --unsafe -F` stores it";
        let format = Some(format.ok_or_else(|| wrong(what.into(), None))?);
        Ok(Some(image.names(Role::Backing, name, format)))
    }

    /// Checks that a COW file's backing file, which is raw, has not changed.
    fn below_cow(
        &self,
        image: &PendingImage,
        view: &Cow,
        allowed: &Allowed,
    ) -> Result<Option<PendingImage>, ChainError> {
        if self.options.no_backing {
            return Ok(None);
        }
        let next = image.names(Role::Backing, &view.header().backing, Some(Format::Raw));
        if next.scheme().is_some() {
            return Err(next.refuse("a cow image's backing file is a file of this host"));
        }
        let next = next.find(allowed)?;
        let Some(found) = &next.found else { return Ok(Some(next)) };
        let stat = rustix::fs::fstat(found).map_err(|e| next.refuse_for(e))?;
        let wrong = |error| ChainError::Image { path: image.path.clone(), error };
        view.check_backing(stat.st_size as u64, stat.st_mtime).map_err(wrong)?;
        Ok(Some(next))
    }

    /// Returns one reactor's view of the chain.
    pub fn image(&self, handle: &Handle) -> std::io::Result<Image> {
        self.part(handle, 0..self.layers.len())
    }

    /// Returns one reactor's view of some images of the chain, as if there were no others.
    pub fn part(&self, handle: &Handle, part: Range<usize>) -> std::io::Result<Image> {
        let raw = |file: &Arc<ImageFile>| Raw::open(file, handle);
        let layer = |layer: &Arc<ChainLayer>| {
            let main = raw(&layer.file)?;
            Ok(match &layer.meta {
                Meta::Raw => {
                    Layer::Raw { raw: main, size: layer.file.size().next_multiple_of(SECTOR) }
                }
                Meta::Qcow2(shared) => {
                    let data = layer.data.as_ref().map(raw).transpose()?;
                    Layer::Qcow2(Qcow2::view(shared.clone(), main, data).computing_on(handle))
                }
                Meta::Cow(shared) => Layer::Cow(Cow::view(shared.clone(), main)),
            })
        };
        let layers: std::io::Result<Vec<_>> = self.layers[part].iter().map(layer).collect();
        Ok(Image::new(layers?, self.options.copy_on_read && !self.options.read_only))
    }

    /// Returns the size of the guest's disk in bytes, in whole sectors.
    pub fn size(&self) -> u64 {
        self.top().size()
    }

    /// Returns the topmost image's allocation unit and cluster size, both in bytes.
    pub fn units(&self) -> (u64, u64) {
        match &self.top().meta {
            Meta::Raw => (SECTOR, SECTOR),
            Meta::Qcow2(shared) => (shared.shape().unit, shared.shape().cluster_size()),
            // COW files allocate sectors; the larger unit avoids splitting reads of a page.
            Meta::Cow(_) => (SECTOR, 4096),
        }
    }

    /// Returns the options with which the chain was opened.
    pub fn options(&self) -> &ChainOptions {
        &self.options
    }

    /// Returns the images, topmost first.
    pub fn layers(&self) -> &[Arc<ChainLayer>] {
        &self.layers
    }

    /// Returns the images' files and formats, topmost first, for a log.
    pub fn describe(&self) -> String {
        let layer = |layer: &Arc<ChainLayer>| {
            let data = layer
                .data
                .as_ref()
                .map(|data| format!(" with data file {}", data.path().display()));
            format!(
                "{} ({}{})",
                layer.file.path().display(),
                layer.format,
                data.unwrap_or_default()
            )
        };
        self.layers.iter().map(layer).collect::<Vec<_>>().join(" over ")
    }

    /// Returns the path of the topmost image, as it was given.
    pub fn path(&self) -> &Path {
        self.layers[0].file.path()
    }

    /// Returns the topmost image, the one that is written to.
    pub fn top(&self) -> &ChainLayer {
        &self.layers[0]
    }
}

fn data_file_name(header: &Header) -> Result<Option<&str>, ImageError> {
    if !header.has_data_file() {
        return Ok(None);
    }
    let what = "the image has an external data file but does not store its name";
    header
        .data_file
        .as_deref()
        .map(Some)
        .ok_or_else(|| ImageError::new(ErrorKind::Unsupported, "qcow2 header", None, what))
}
