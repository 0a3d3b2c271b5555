//! Puts a new overlay on an open chain in use: an external snapshot of a served disk.
//!
//! In: the chain, and the overlay's path. Out: a second chain with the new overlay as topmost
//! image. The images below are the same open images as in the first chain. The caller replaces the
//! first chain ([`GrownChain::keep`]), or drops the new one, which removes the overlay.
//!
//! Invariants: the overlay is complete, durable and locked before it is in any chain. A later open
//! by the rules of its folder finds its backing image. At no moment can another process write to an
//! image of either chain.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_ring::{Handle, sandbox};
use blockyard_storage::file::access::PRIVATE;
use blockyard_storage::{FileId, ImageFile, OpenOptions, Overlaid, scheme_of};

use super::cache_shares;
use super::error::ChainError;
use super::member::ChainLayer;
use super::names::{Allowed, MAX_DEPTH};
use super::open::Chain;
use super::options::ChainOptions;
use crate::error::ImageError;
use crate::journal::CrashSafety;
use crate::layers::format::Format;
use crate::layers::meta::Meta;
use crate::qcow2::{self, CreateOptions, Header, Preallocation, Qcow2, Qcow2Options};
use crate::raw::Raw;

pub(crate) const OVERLAY: &str = "new overlay";

/// A chain with a new overlay, not yet in use.
pub struct GrownChain {
    chain: Arc<Chain>,
    /// The former topmost image, opened for writing.
    writer: Arc<ChainLayer>,
    recorded: bool,
    unfinished: Unfinished,
}

/// A file that is removed on drop, unless it is kept.
struct Unfinished(Option<PathBuf>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for GrownChain {
    fn drop(&mut self) {
        if self.unfinished.0.is_some() {
            self.take_record_back();
            // The chain has no overlay again: divide the cache memory among the images below it.
            cache_shares::apply(&self.chain.layers[1..], self.chain.options.l2_cache);
        }
    }
}

impl GrownChain {
    /// Returns the chain with the overlay as topmost image.
    pub fn chain(&self) -> &Arc<Chain> {
        &self.chain
    }

    /// Records the overlay in the backing image, durably: from then on that image cannot be opened
    /// for writing. Call it before the first write to the overlay.
    pub fn record(&mut self) -> Result<(), ChainError> {
        // Set this first, so that a partly written record is removed with the overlay too.
        self.recorded = true;
        let file = &self.writer.file;
        let recorded = file.record_overlay(&self.chain.options.path);
        recorded.map_err(|e| {
            let what = "recording its overlay (it needs a file system with extended attributes)";
            ChainError::Image {
                path: file.path().into(),
                error: ImageError::io("image", None, what, e),
            }
        })
    }

    /// Takes [`GrownChain::record`] back. Drop does it too.
    pub fn take_record_back(&mut self) {
        if std::mem::take(&mut self.recorded)
            && let Err(e) = self.writer.file.remove_overlay_record()
        {
            let path = self.writer.file.path().display();
            tracing::warn!("image {path}: cannot remove the record of its overlay: {e}");
        }
    }

    /// Leaves the overlay, which is empty, for a later start. The first chain stays in use.
    pub fn leave(mut self) {
        self.unfinished.0 = None;
        cache_shares::apply(&self.chain.layers[1..], self.chain.options.l2_cache);
    }

    /// Keeps the overlay, which is in use now, and turns the backing image's lock into a reader's
    /// lock.
    pub fn keep(mut self) {
        self.unfinished.0 = None;
        let hand = |from: &ImageFile, to: &ImageFile| {
            if let Err(e) = from.hand_lock_to(to) {
                tracing::warn!(
                    "image {}: cannot turn its write lock into a read lock: {e}",
                    from.path().display()
                );
            }
        };
        let backing = &self.chain.layers[1];
        hand(&self.writer.file, &backing.file);
        if let (Some(from), Some(to)) = (&self.writer.data, &backing.data) {
            hand(from, to);
        }
    }
}

impl Chain {
    /// Returns a chain of one raw image. `crash_safety` and `folders`: those of an overlay which is
    /// put on it.
    pub fn of_raw(
        file: &Arc<ImageFile>,
        crash_safety: CrashSafety,
        folders: Vec<PathBuf>,
    ) -> Chain {
        let options = ChainOptions {
            format: Some(Format::Raw),
            read_only: file.read_only(),
            cache: file.cache(),
            journal: file.journal().cloned(),
            crash_safety,
            folders,
            ..ChainOptions::new(file.path())
        };
        let layer = ChainLayer {
            format: Format::Raw,
            file: file.clone(),
            data: None,
            meta: Meta::Raw,
            sharing: None,
        };
        Chain { layers: vec![Arc::new(layer)], options, cut: None }
    }

    /// Creates a qcow2 image at `path`, where no file may exist, on top of this chain. `shape` sets
    /// the new image's layout; its size and its backing file come from the chain. None: the layout
    /// is that of `blockyard image create -b`.
    pub async fn grow(
        &self,
        handle: &Handle,
        path: &Path,
        shape: Option<&CreateOptions>,
    ) -> Result<GrownChain, ChainError> {
        let wrong = |error| ChainError::Image { path: path.into(), error };
        if self.layers.len() >= MAX_DEPTH {
            return Err(wrong(ImageError::refused(
                OVERLAY,
                format!("the chain has {MAX_DEPTH} images already"),
            )));
        }
        let options = ChainOptions {
            path: path.into(),
            format: Some(Format::Qcow2),
            // What the operator has abandoned was an overlay of the old image.
            overlaid: Overlaid::default(),
            ..self.options.clone()
        };
        let backing = self.name_for(&options).map_err(wrong)?;
        let create = self.plan(shape, backing).map_err(wrong)?;
        let (file, unfinished) = new_file(&options, &self.top().file)?;
        let raw = || {
            Raw::open(&file, handle)
                .map_err(|e| wrong(ImageError::io(OVERLAY, None, "opening it for io_uring", e)))
        };
        qcow2::create(&raw()?, None, &create).await.map_err(wrong)?;
        sync_folder(path)
            .map_err(|e| wrong(ImageError::io(OVERLAY, None, "syncing its folder", e)))?;
        let size = file.refresh_size();
        size.map_err(|e| wrong(ImageError::io(OVERLAY, None, "finding its length", e)))?;
        let header = Header::read(&raw()?).await.map_err(wrong)?;
        let opened = Qcow2Options {
            l2_cache: options.l2_cache,
            safety: options.safety_of(0, &file),
            ..Qcow2Options::default()
        };
        let view = Qcow2::open(header, raw()?, None, &opened).await.map_err(wrong)?;
        let meta = Meta::Qcow2(view.shared().clone());
        let overlay = ChainLayer { format: Format::Qcow2, file, data: None, meta, sharing: None };
        let writer = self.layers[0].clone();
        let mut layers = vec![Arc::new(overlay), Arc::new(writer.as_read_only())];
        layers.extend(self.layers[1..].iter().cloned());
        cache_shares::apply(&layers, options.l2_cache);
        Ok(GrownChain {
            chain: Arc::new(Chain { layers, options, cut: None }),
            writer,
            recorded: false,
            unfinished,
        })
    }

    /// Returns the name of the backing image as the overlay stores it. Fails if an image of the
    /// chain lies outside the overlay's allowed folders.
    fn name_for(&self, options: &ChainOptions) -> Result<String, ImageError> {
        let allowed = Allowed::by(options);
        for layer in &self.layers {
            for file in [Some(&layer.file), layer.data.as_ref()].into_iter().flatten() {
                if let Some(path) = outside_of(&allowed, file)? {
                    return Err(ImageError::refused(OVERLAY, outside(file, &path)));
                }
            }
        }
        stored_name(&self.top().file, &options.path)
    }

    fn plan(
        &self,
        shape: Option<&CreateOptions>,
        backing: String,
    ) -> Result<CreateOptions, ImageError> {
        let format = self.top().format.to_string();
        let usual = CreateOptions::overlay(self.size(), backing, format);
        let Some(shape) = shape else { return Ok(usual) };
        if shape.data_file.is_some() || shape.preallocation != Preallocation::Off {
            return Err(ImageError::refused(
                OVERLAY,
                "it can have neither a data file nor preallocation",
            ));
        }
        Ok(CreateOptions { size: usual.size, backing: usual.backing, ..shape.clone() })
    }
}

impl ChainLayer {
    /// Returns the same open image through read-only descriptors, if they can be opened. They are
    /// not locked yet.
    fn as_read_only(&self) -> ChainLayer {
        let reader = |file: &Arc<ImageFile>| {
            file.reader().map(Arc::new).unwrap_or_else(|e| {
                tracing::debug!(
                    "image {}: cannot open it again for reading: {e}",
                    file.path().display()
                );
                file.clone()
            })
        };
        let data = self.data.as_ref().map(reader);
        let (file, meta) = (reader(&self.file), self.meta.clone());
        ChainLayer { format: self.format, file, data, meta, sharing: None }
    }
}

/// Creates an empty locked file; fails if a file exists. It has mode, owner and group of `base`,
/// because it continues the data of that file.
fn new_file(
    options: &ChainOptions,
    base: &ImageFile,
) -> Result<(Arc<ImageFile>, Unfinished), ChainError> {
    let path = &options.path;
    let wrong = |error| ChainError::Image { path: path.clone(), error };
    if sandbox::is_reserved(path) {
        let what =
            "it belongs to the server's configuration or is a program of it, which no disk may use";
        return Err(wrong(ImageError::refused(OVERLAY, what)));
    }
    let made = File::options().write(true).create_new(true).mode(PRIVATE).open(path);
    let made = made.map_err(|e| {
        let is_refused = e.kind() == io::ErrorKind::PermissionDenied;
        let advice = is_refused.then(|| sandbox::advice(path)).flatten();
        wrong(match (e.kind(), advice) {
            (io::ErrorKind::AlreadyExists, _) => {
                ImageError::refused(OVERLAY, "the file exists already")
            }
            (_, Some(advice)) => ImageError::refused(OVERLAY, advice),
            _ => ImageError::io(OVERLAY, None, "creating it", e),
        })
    })?;
    let unfinished = Unfinished(Some(path.clone()));
    if let Err(e) = base.share_access(&made) {
        let (path, base) = (path.display(), base.path().display());
        tracing::warn!("overlay {path}: it has not the permissions of {base}: {e}");
    }
    let open = OpenOptions {
        journal: options.journal.clone(),
        ..OpenOptions::new(path, false, options.cache)
    };
    Ok((Arc::new(ImageFile::open(&open)?), unfinished))
}

/// Returns the path of a file if an overlay may not name it.
pub(crate) fn outside_of(
    allowed: &Allowed,
    file: &ImageFile,
) -> Result<Option<PathBuf>, ImageError> {
    if let Some(opened) = file.opened() {
        let is_allowed = allowed.permit(&opened.name()).is_some();
        return Ok((!is_allowed).then(|| file.path().into()));
    }
    let path = real(file.path())?;
    let is_allowed = allowed.folders.iter().any(|folder| path.starts_with(folder));
    Ok((!is_allowed).then_some(path))
}

/// Says what to do about an overlay that may not name `file`, which is at `path`.
fn outside(file: &ImageFile, path: &Path) -> String {
    const KEY: &str = "key backing-folders of the disk, --backing-folder";
    let place = path.display();
    if let Some((scheme, name)) = scheme_of(path) {
        return match scheme.normalize(name) {
            Ok(_) => format!(
                "its backing file {place} is not a file of this host, and is not allowed: allow \
                 {} ({KEY})",
                scheme.allowance(name)
            ),
            Err(e) => format!("its backing file would be {place}: {e}"),
        };
    }
    if file.opened().is_some() {
        return format!("its backing file would be {place}, which no image can name");
    }
    let what = format!("its backing file {place} lies outside the allowed folders");
    // A file beside a device is gone after the next start of the host.
    if file.is_device() {
        return format!("{what}: allow a folder that contains it ({KEY})");
    }
    let folder = folder(path).display();
    format!("{what}: put the overlay beside it, into {folder}, or allow that folder ({KEY})")
}

/// Returns the name of the image `base` as an overlay at `path` stores it.
pub(crate) fn stored_name(base: &ImageFile, path: &Path) -> Result<String, ImageError> {
    if let Some(opened) = base.opened() {
        return Ok(opened.name());
    }
    let base = named(base)?;
    let beside = std::fs::canonicalize(folder(path)).ok().as_deref() == base.parent();
    let name = if beside { base.file_name().map(PathBuf::from).unwrap_or_default() } else { base };
    let name = name
        .to_str()
        .ok_or_else(|| ImageError::refused(OVERLAY, "its backing file's name is not UTF-8"))?;
    // A name with a colon would be parsed as a protocol.
    Ok(if name.contains(':') && !name.starts_with('/') { format!("./{name}") } else { name.into() })
}

/// Returns the absolute path of an image, for an overlay. The link to a device names it better than
/// the device's own name, which may be that of another one after the next start of the host.
fn named(base: &ImageFile) -> Result<PathBuf, ImageError> {
    if base.is_device()
        && let Ok(path) = std::path::absolute(base.path())
        && FileId::of_path(&path).ok() == base.id()
    {
        return Ok(path);
    }
    real(base.path())
}

fn real(path: &Path) -> Result<PathBuf, ImageError> {
    std::fs::canonicalize(path).map_err(|e| {
        ImageError::refused(OVERLAY, format!("its backing file {}: {e}", path.display()))
    })
}

pub(crate) fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder(path))?.sync_all()
}
