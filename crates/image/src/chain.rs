//! Opening a chain: an image and its backing images, as files on the host.
//!
//! In: a path, a format, and the folders in which backing files may lie. Out: a [`Chain`], which may be sent to and shared
//! by all reactors; each makes its own [`Image`] of it.
//! What must hold: a format is told or known by the file's name, never guessed; no file is opened outside the folders,
//! whatever an image names; a chain ends.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_ring::sim::Journal;
use blockyard_ring::{Executor, Handle, Storage};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::SECTOR;
use crate::cache::CacheMode;
use crate::cache_shares;
use crate::cow::{self, Cow, CowOptions};
use crate::error::{ImageError, Kind};
use crate::file_id::FileId;
use crate::format::Format;
use crate::image::Image;
use crate::layer::Layer;
use crate::nbd::uri::{self, Uri};
use crate::open::{self, ImageFile, OpenError, OpenOptions, OpenedFiles, Overlaid};
use crate::qcow2::{self, Header, Qcow2, Qcow2Options, snapshot};
use crate::store::Store;

#[cfg(test)]
mod tests;

/// Images of one chain, at most.
pub const MAX_DEPTH: usize = 200;

#[derive(Clone, Debug)]
pub struct ChainOptions {
    pub path: PathBuf,
    /// None: the file's name tells.
    pub format: Option<Format>,
    pub read_only: bool,
    /// The topmost image's files are opened (and locked) for writing, but the disk is only read: for work on structures.
    pub only_locked: bool,
    /// What the images above this one hold is to go into it: it is opened for writing.
    pub commit_into: Option<usize>,
    pub cache: CacheMode,
    /// Bytes of L2 tables kept in memory, of all images together; None: all, up to a limit.
    pub l2_cache: Option<u64>,
    /// Load metadata when the chain is opened.
    pub prime: bool,
    pub copy_on_read: bool,
    /// Backing and data files lie in or below these; no folder: in or below that of the image itself. NBD URIs among them
    /// allow exports.
    pub folders: Vec<PathBuf>,
    /// Lock no file of a chain that is only read: other programs may write to it meanwhile (`qemu-img --force-share`).
    pub force_share: bool,
    /// Show the disk as it was when this snapshot of the topmost image (a name or an id) was taken. For readers only.
    pub snapshot: Option<String>,
    /// End the chain above a backing file that may not be opened, instead of an error: see [`Chain::cut`].
    pub cut_outside: bool,
    /// Open the topmost image alone, as if nothing were below.
    pub no_backing: bool,
    /// A COW file's backing file may differ from what the COW file says of it.
    pub accept_changed_backing: bool,
    /// Of images that lie on an NBD server.
    pub nbd: crate::nbd::Options,
    /// Of the topmost image.
    pub overlaid: Overlaid,
    /// Notes what is done to the images' files, for simulated power cuts.
    pub journal: Option<Journal>,
    /// The topmost image's files, if they do not have their names yet.
    pub files: OpenedFiles,
}

impl ChainOptions {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        ChainOptions {
            path: path.into(),
            format: None,
            read_only: false,
            only_locked: false,
            commit_into: None,
            cache: CacheMode::default(),
            l2_cache: None,
            prime: false,
            copy_on_read: false,
            folders: Vec::new(),
            force_share: false,
            snapshot: None,
            cut_outside: false,
            no_backing: false,
            accept_changed_backing: false,
            nbd: crate::nbd::Options::default(),
            overlaid: Overlaid::default(),
            journal: None,
            files: OpenedFiles::default(),
        }
    }
}

/// Why a chain cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("image {}: {error}", path.display())]
    Image { path: PathBuf, error: ImageError },
    #[error("image {}: its format is not known by its name: say --format raw, qcow2 or cow", path.display())]
    Format { path: PathBuf },
    #[error("image {}: its backing file {}: {what}", path.display(), backing)]
    Backing { path: PathBuf, backing: String, what: String },
    /// The file exists, and lies where no image may name files.
    #[error("image {}: its backing file {backing}: {} lies outside {allowed}: say --backing-folder to allow its folder", path.display(), real.display())]
    Outside { path: PathBuf, backing: String, real: PathBuf, allowed: String },
    #[error("starting io_uring")]
    Executor(#[source] std::io::Error),
}

/// An open image of a chain: its file, and what its format knows.
#[derive(Debug)]
pub struct ChainLayer {
    pub format: Format,
    pub file: Arc<ImageFile>,
    /// qcow2's external data file.
    pub data: Option<Arc<ImageFile>>,
    pub(crate) meta: Meta,
}

/// What reactors share of an open image, as its format has it.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    Raw,
    Qcow2(Arc<qcow2::Shared>),
    Cow(Arc<cow::Shared>),
}

impl ChainLayer {
    pub fn qcow2(&self) -> Option<&Arc<qcow2::Shared>> {
        match &self.meta {
            Meta::Qcow2(shared) => Some(shared),
            Meta::Raw | Meta::Cow(_) => None,
        }
    }

    pub fn cow(&self) -> Option<&Arc<cow::Shared>> {
        match &self.meta {
            Meta::Cow(shared) => Some(shared),
            Meta::Raw | Meta::Qcow2(_) => None,
        }
    }

    /// Bytes of the disk that it describes, in whole sectors.
    pub fn size(&self) -> u64 {
        match &self.meta {
            Meta::Raw => self.file.size().next_multiple_of(SECTOR),
            // A qcow2 image's size need not be whole sectors; what is beyond it reads as zeroes.
            Meta::Qcow2(shared) => shared.size().next_multiple_of(SECTOR),
            Meta::Cow(shared) => shared.size(),
        }
    }
}

/// An opened chain, the topmost image first.
#[derive(Debug)]
pub struct Chain {
    pub(crate) layers: Vec<Arc<ChainLayer>>,
    pub(crate) options: ChainOptions,
    pub(crate) cut: Option<String>,
}

impl Chain {
    /// Returns why the last image's backing file was not opened, if the options let the chain end above it.
    pub fn cut(&self) -> Option<&str> {
        self.cut.as_deref()
    }

    /// Opens the chain; its metadata are read by a ring of their own.
    pub fn open(options: &ChainOptions) -> Result<Self, ChainError> {
        let executor = Executor::new().map_err(ChainError::Executor)?;
        let (handle, options) = (executor.handle().clone(), options.clone());
        executor.block_on(async move { Chain::open_on(&handle, options).await }).map_err(ChainError::Executor)?
    }

    async fn open_on(handle: &Handle, options: ChainOptions) -> Result<Self, ChainError> {
        let allowed = Allowed::by(&options);
        let mut chain = Chain { layers: Vec::new(), options, cut: None };
        let mut seen = Vec::new();
        let mut next = Some(Next {
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
            let image = image.with_tls_of(&allowed);
            next = chain.open_layer(handle, image, &allowed).await?;
            if chain.options.no_backing {
                break;
            }
        }
        cache_shares::apply(&chain.layers, chain.options.l2_cache);
        if chain.options.prime {
            let image = chain.image(handle).map_err(ChainError::Executor)?;
            if let Err(e) = image.prime().await {
                tracing::warn!("image {}: loading its metadata ahead: {e}", chain.options.path.display());
            }
        }
        Ok(chain)
    }

    /// Opens one image, and says which is below it.
    async fn open_layer(
        &mut self,
        handle: &Handle,
        image: Next,
        allowed: &Allowed,
    ) -> Result<Option<Next>, ChainError> {
        let Next { path, format, .. } = &image;
        let (depth, into) = (self.layers.len(), self.options.commit_into);
        let files_read_only = if depth == 0 { self.options.read_only } else { into != Some(depth) };
        let read_only = files_read_only || depth == 0 && self.options.only_locked;
        let format =
            format.or_else(|| Format::of_name(path)).ok_or_else(|| ChainError::Format { path: path.clone() })?;
        let overlaid = match depth {
            0 => self.options.overlaid.clone(),
            _ => Overlaid::Below(self.layers.iter().map(|above| above.file.path().into()).collect()),
        };
        let new_data = self.options.files.data.take();
        let open = |next: &Next| {
            let ChainOptions { cache, nbd, force_share, ref journal, .. } = self.options;
            let (found, overlaid, journal) = (next.found.clone(), overlaid.clone(), journal.clone());
            let open = OpenOptions::new(&next.path, files_read_only, cache);
            let options = OpenOptions { found, nbd, force_share, overlaid, journal, ..open };
            ImageFile::open(&options).map(Arc::new)
        };
        let file = open(&image)?;
        let wrong = |error| ChainError::Image { path: path.clone(), error };
        let failed = |e| wrong(ImageError::io("file", None, "opening it for io_uring", e));
        let raw = |file: &Arc<ImageFile>| file.raw(handle);
        let (meta, data, below) = match format {
            Format::Raw => (Meta::Raw, None, None),
            Format::Qcow2 => {
                let main = raw(&file).map_err(failed)?;
                let mut header = Header::read(&main).await.map_err(wrong)?;
                if let (0, true, Some(name)) = (depth, read_only, &self.options.snapshot) {
                    snapshot::show(&main, &mut header, name).await.map_err(wrong)?;
                }
                let data = match data_file_name(&header).map_err(wrong)? {
                    Some(name) => {
                        let next = image.names(name, Some(Format::Raw));
                        Some(open(&match new_data {
                            Some(fd) => Next { found: Some(fd), ..next },
                            None => next.find(allowed)?,
                        })?)
                    }
                    None => None,
                };
                let below = self.below_qcow2(&image, &header)?;
                let data_raw = data.as_ref().map(raw).transpose().map_err(failed)?;
                // Only the topmost image's file may be without a name: it is found already, and no image names it.
                let (l2_cache, unfinished) = (self.options.l2_cache, depth == 0 && image.found.is_some());
                let options = Qcow2Options { read_only, l2_cache, unfinished, ..Qcow2Options::default() };
                let view = Qcow2::open(header, main, data_raw, &options).await.map_err(wrong)?;
                (Meta::Qcow2(view.shared().clone()), data, below)
            }
            Format::Cow => {
                let options = CowOptions {
                    read_only,
                    accept_changed_backing: self.options.accept_changed_backing || self.options.no_backing,
                    ..CowOptions::default()
                };
                let view = Cow::open(raw(&file).map_err(failed)?, &options).await.map_err(wrong)?;
                let below = self.below_cow(&image, &view, allowed)?;
                (Meta::Cow(view.shared().clone()), None, below)
            }
        };
        self.layers.push(Arc::new(ChainLayer { format, file, data, meta }));
        Ok(below)
    }

    fn below_qcow2(&self, image: &Next, header: &Header) -> Result<Option<Next>, ChainError> {
        let Some(name) = header.backing.as_deref().filter(|_| !self.options.no_backing) else { return Ok(None) };
        let wrong = |what: String| ChainError::Backing { path: image.path.clone(), backing: name.into(), what };
        let format = match header.backing_format.as_deref() {
            Some(format) => Some(format.parse().map_err(wrong)?),
            None => Format::of_name(Path::new(name)),
        };
        let what = "its format is told neither by the image nor by its name: `blockyard image rebase --unsafe` can write it down";
        let format = Some(format.ok_or_else(|| wrong(what.into()))?);
        Ok(Some(image.names(name, format)))
    }

    /// A COW file's backing file is raw, and has not changed since.
    fn below_cow<S: Storage>(
        &self,
        image: &Next,
        view: &Cow<S>,
        allowed: &Allowed,
    ) -> Result<Option<Next>, ChainError> {
        if self.options.no_backing {
            return Ok(None);
        }
        let next = image.names(&view.header().backing, Some(Format::Raw));
        if next.export().is_some() {
            return Err(next.refuse("a cow image's backing file is a file of this host"));
        }
        let next = next.find(allowed)?;
        let Some(found) = &next.found else { return Ok(Some(next)) };
        let stat = rustix::fs::fstat(found).map_err(|e| next.refuse(e.to_string()))?;
        let wrong = |error| ChainError::Image { path: image.path.clone(), error };
        view.check_backing(stat.st_size as u64, stat.st_mtime).map_err(wrong)?;
        Ok(Some(next))
    }

    /// The chain on one reactor.
    pub fn image(&self, handle: &Handle) -> std::io::Result<Image<Store>> {
        self.part(handle, 0..self.layers.len())
    }

    /// Some images of the chain, on one reactor, as if there were no others.
    pub fn part(&self, handle: &Handle, part: Range<usize>) -> std::io::Result<Image<Store>> {
        let raw = |file: &Arc<ImageFile>| file.raw(handle);
        let layer = |layer: &Arc<ChainLayer>| {
            let main = raw(&layer.file)?;
            Ok(match &layer.meta {
                Meta::Raw => Layer::Raw { raw: main, size: layer.file.size().next_multiple_of(SECTOR) },
                Meta::Qcow2(shared) => {
                    Layer::Qcow2(Qcow2::view(shared.clone(), main, layer.data.as_ref().map(raw).transpose()?))
                }
                Meta::Cow(shared) => Layer::Cow(Cow::view(shared.clone(), main)),
            })
        };
        let layers: std::io::Result<Vec<_>> = self.layers[part].iter().map(layer).collect();
        Ok(Image::new(layers?, self.options.copy_on_read && !self.options.read_only))
    }

    /// Bytes of the guest's disk, in whole sectors.
    pub fn size(&self) -> u64 {
        self.top().size()
    }

    /// What the topmost image allocates at a time, and its cluster, in bytes.
    pub fn units(&self) -> (u64, u64) {
        match &self.top().meta {
            Meta::Raw => (SECTOR, SECTOR),
            Meta::Qcow2(shared) => (shared.shape().unit, shared.shape().cluster_size()),
            // Sectors; but reads are in one piece where a page is.
            Meta::Cow(_) => (SECTOR, 4096),
        }
    }

    pub fn options(&self) -> &ChainOptions {
        &self.options
    }

    pub fn layers(&self) -> &[Arc<ChainLayer>] {
        &self.layers
    }

    /// The images' files and formats, the topmost first, as a log shows them.
    pub fn describe(&self) -> String {
        let layer = |layer: &Arc<ChainLayer>| {
            let data = layer.data.as_ref().map(|data| format!(" with data file {}", data.path().display()));
            format!("{} ({}{})", layer.file.path().display(), layer.format, data.unwrap_or_default())
        };
        self.layers.iter().map(layer).collect::<Vec<_>>().join(" over ")
    }

    /// The image that is written to.
    pub fn top(&self) -> &ChainLayer {
        &self.layers[0]
    }
}

/// What must not be in a chain twice.
#[derive(PartialEq)]
enum Place {
    File(FileId),
    Export(Box<Uri>),
}

/// An image to be opened.
struct Next {
    path: PathBuf,
    format: Option<Format>,
    /// The image whose backing (or data) file it is, and the name it has there.
    named_by: Option<(PathBuf, String)>,
    /// What is under the path, or is to be. An image's names are judged and opened by this alone: a link may change at any time.
    found: Option<Arc<OwnedFd>>,
}

impl Next {
    /// A file that this image names: relative names begin at its own folder.
    fn names(&self, name: &str, format: Option<Format>) -> Next {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let path = if uri::is_uri(name) { name.into() } else { folder.join(name) };
        Next { path, format, named_by: Some((self.path.clone(), name.into())), found: None }
    }

    fn refuse(&self, what: impl Into<String>) -> ChainError {
        let (path, backing) = self.named_by.clone().unwrap_or_default();
        ChainError::Backing { path, backing, what: what.into() }
    }

    /// It is a server's export, right or wrong.
    fn export(&self) -> Option<Result<Uri, String>> {
        self.path.to_str().filter(|name| uri::is_uri(name)).map(Uri::parse)
    }

    /// An export that an image names is reached with the operator's certificates.
    fn with_tls_of(mut self, allowed: &Allowed) -> Next {
        if self.named_by.is_some()
            && let Some(Ok(uri)) = self.export()
            && let Some(by) = allowed.exports.iter().find(|export| export.takes_in(&uri))
        {
            self.path = by.complete(&uri).to_string().into();
        }
        self
    }

    fn may_be_opened(&self, depth: usize, seen: &mut Vec<Place>) -> Result<(), ChainError> {
        if depth >= MAX_DEPTH {
            return Err(self.refuse(format!("the chain is longer than {MAX_DEPTH} images")));
        }
        let me = match (self.export(), &self.found) {
            (Some(uri), _) => Place::Export(Box::new(uri.map_err(|e| self.refuse(e))?)),
            // What cannot be looked at cannot be opened either, and says why there.
            (None, found) => match found.as_ref().map_or_else(|| FileId::of_path(&self.path), FileId::of_fd) {
                Ok(id) => Place::File(id),
                Err(_) => return Ok(()),
            },
        };
        if seen.contains(&me) {
            return Err(self.refuse("it is in the chain already: the chain is a circle"));
        }
        seen.push(me);
        Ok(())
    }

    /// Finds the file that an image names, and refuses one that lies where no such file may lie. The caller opens what was
    /// found here: under the same path there may be another file by then.
    fn find(mut self, allowed: &Allowed) -> Result<Next, ChainError> {
        if self.named_by.is_none() || self.found.is_some() || self.is_allowed_export(allowed)? {
            return Ok(self);
        }
        let missing = |e: Errno| match e {
            Errno::NOENT => self.refuse(format!(
                "{} is missing: restore it, or name the place where it is now (blockyard image rebase --unsafe)",
                self.path.display()
            )),
            _ => self.refuse(format!("{}: {e}", self.path.display())),
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let found = rustix::fs::open(&self.path, flags, Mode::empty()).map_err(missing)?;
        let real = rustix::fs::readlink(open::through(&found), Vec::new()).map_err(missing)?;
        let real = Path::new(OsStr::from_bytes(real.to_bytes()));
        if !allowed.folders.iter().any(|folder| real.starts_with(folder)) {
            let list: Vec<_> = allowed.folders.iter().map(|f| f.display().to_string()).collect();
            let (path, backing) = self.named_by.clone().unwrap_or_default();
            return Err(ChainError::Outside { path, backing, real: real.into(), allowed: list.join(", ") });
        }
        self.found = Some(Arc::new(found));
        Ok(self)
    }

    /// Whether the name is that of a server's export, which may be opened; an error for what is no file either.
    fn is_allowed_export(&self, allowed: &Allowed) -> Result<bool, ChainError> {
        let Some((image, name)) = &self.named_by else { return Ok(false) };
        if uri::is_uri(name) {
            let uri = Uri::parse(name).map_err(|e| self.refuse(e))?;
            return match allowed.exports.iter().any(|export| export.takes_in(&uri)) {
                true => Ok(true),
                false => Err(self
                    .refuse(format!("it lies on a server: say --backing-folder {} to allow it", uri.whole_server()))),
            };
        }
        if image.to_str().is_some_and(uri::is_uri) && !Path::new(name).is_absolute() {
            return Err(self.refuse("an image on a server has no folder where a relative name begins"));
        }
        if name.split_once(':').is_some_and(|(scheme, _)| !scheme.is_empty() && !scheme.contains('/')) {
            return Err(self.refuse("only files are supported, by their path"));
        }
        Ok(false)
    }
}

/// Returns how many images two chains end with in common: the same files, in the same formats.
pub(crate) fn shared_layers(a: &[Arc<ChainLayer>], b: &[Arc<ChainLayer>]) -> usize {
    let same = |(a, b): &(&Arc<ChainLayer>, &Arc<ChainLayer>)| {
        a.format == b.format && a.file.id().is_some() && a.file.id() == b.file.id()
    };
    a.iter().rev().zip(b.iter().rev()).take_while(same).count()
}

/// What images may name as their backing or data files.
pub(crate) struct Allowed {
    pub folders: Vec<PathBuf>,
    pub exports: Vec<Uri>,
}

impl Allowed {
    pub fn by(options: &ChainOptions) -> Self {
        let parse = |name: &PathBuf| name.to_str().filter(|name| uri::is_uri(name)).map(Uri::parse);
        let own = options.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut folders: Vec<_> =
            options.folders.iter().filter(|name| parse(name).is_none()).map(|f| f.as_path()).collect();
        if folders.is_empty() {
            folders.push(own);
        }
        Allowed {
            folders: folders.iter().filter_map(|folder| std::fs::canonicalize(folder).ok()).collect(),
            // What is wrong with one is told where options are read.
            exports: options.folders.iter().filter_map(|name| parse(name)?.ok()).collect(),
        }
    }
}

fn data_file_name(header: &Header) -> Result<Option<&str>, ImageError> {
    if !header.has_data_file() {
        return Ok(None);
    }
    let what = "the image has an external data file, and does not say its name";
    header.data_file.as_deref().map(Some).ok_or_else(|| ImageError::new(Kind::Unsupported, "qcow2 header", None, what))
}
