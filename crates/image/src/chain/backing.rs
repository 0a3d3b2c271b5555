//! Opens the backing image for writing while the chain is in use: for a commit of a served disk.
//!
//! In: the open chain. Out: a second chain that begins at the backing image, for the commit to
//! write to; and later the first chain again, with its files re-read.
//!
//! Invariants: nothing else has the backing image open, and it leaves the images that chains
//! [share](super::shared). No other process can write to it at any moment. Reactors may still read
//! the backing image through L2 tables that they cached before it was opened for writing. They find
//! unchanged data wherever the topmost image has none ([`Image::hold_freed`]). So a backing image
//! with the journal of a dead server is refused: a replay would change the running disk.

use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::Handle;

use super::cache_shares;
use super::error::ChainError;
use super::member::ChainLayer;
use super::open::Chain;
use super::options::ChainOptions;
use crate::cow::{Cow, CowOptions};
use crate::error::ImageError;
use crate::journal::ImageSafety;
use crate::layers::format::Format;
use crate::layers::image::Image;
use crate::layers::meta::Meta;
use crate::qcow2::{self, Header, Qcow2, Qcow2Options};
use crate::raw::Raw;
use crate::tools::session_of;
use blockyard_storage::{ImageFile, OpenError, OpenOptions, Overlaid};

const TOP: &str = "overlay to be committed";
const BACKING: &str = "backing image to be committed into";

/// A writable backing image. On drop the writer's lock is released; readers keep theirs.
pub struct WritableBacking {
    chain: Chain,
    /// Pairs of descriptors of one file: the one opened for writing, and the one of the chain in
    /// use.
    locks: Vec<(Arc<ImageFile>, Arc<ImageFile>)>,
}

impl WritableBacking {
    /// Returns the backing image with the images below it. While reactors still read these images
    /// through L2 tables that they cached, the writer must keep the guard of [`Image::hold_freed`].
    pub fn image(&self, handle: &Handle) -> Result<Image, ChainError> {
        let failed =
            |e| self.chain.wrong(ImageError::io("file", None, "opening it for io_uring", e));
        self.chain.image(handle).map_err(failed)
    }

    /// Returns the chain that begins at the backing image.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Returns an error if a dead server has left a journal for the backing image, with this file.
    async fn has_no_journal(&self, handle: &Handle, file: &ImageFile) -> Result<(), ChainError> {
        let wrong = |error| ChainError::Image { path: file.path().into(), error };
        let failed = |e| wrong(ImageError::io(BACKING, None, "opening it for io_uring", e));
        let options = &self.chain.options;
        let raw = Raw::open(file, handle).map_err(failed)?;
        let format = options.format.unwrap_or(Format::Raw);
        let session = session_of(&raw, format).await.map_err(wrong)?;
        let safety = options.safety_of(0, file).without_journal();
        if safety.claim(session).map_err(wrong)?.is_none() {
            return Ok(());
        }
        Err(wrong(ImageError::refused(
            BACKING,
            "a server that died has left a journal of changes that the running disk does not show: \
             end the disk, and apply the journal (blockyard image commit, or image check --repair \
             leaks) or give it up (image check --discard-journal)",
        )))
    }

    fn lock(&mut self, reader: &Arc<ImageFile>) -> Result<Arc<ImageFile>, ChainError> {
        let writer = Arc::new(reader.writer()?);
        self.locks.push((writer.clone(), reader.clone()));
        Ok(writer)
    }
}

impl Drop for WritableBacking {
    fn drop(&mut self) {
        for (writer, reader) in &self.locks {
            if let Err(e) = writer.hand_lock_to(reader) {
                tracing::warn!(
                    "image {}: cannot turn its write lock into a read lock: {e}",
                    reader.path().display()
                );
            }
        }
    }
}

impl Chain {
    fn wrong(&self, error: ImageError) -> ChainError {
        ChainError::Image { path: self.options.path.clone(), error }
    }

    /// Opens the backing image for writing. First checks that the topmost image can be emptied
    /// after a commit.
    pub async fn open_backing(&self, handle: &Handle) -> Result<WritableBacking, ChainError> {
        let refuse = |what: &str| Err(self.wrong(ImageError::refused(TOP, what)));
        let [top, backing, rest @ ..] = &self.layers[..] else {
            return refuse("it has no backing file to be committed into");
        };
        match &top.meta {
            Meta::Qcow2(shared) if shared.header().snapshot_count > 0 => {
                return refuse(
                    "it has internal snapshots, which would change with the backing image",
                );
            }
            Meta::Qcow2(_) => {}
            _ => return refuse("only a qcow2 image can be committed while it is in use"),
        }
        if let Some(fd) = backing.file.fd() {
            // Other overlays of the image would change. Such an overlay may be in no use now.
            let overlaid = Overlaid::Below(vec![top.file.path().into()]);
            let open = OpenOptions::new(backing.file.path(), true, self.options.cache);
            match (OpenOptions { overlaid, ..open }).check_record(&**fd) {
                Err(OpenError::Overlaid { overlay, .. }) => {
                    return refuse(&format!(
                        "its backing image belongs to overlay {}: use stream",
                        overlay.display()
                    ));
                }
                checked => checked?,
            }
        }
        if backing.sharing.as_ref().is_some_and(|sharing| !sharing.take_out()) {
            return Err(ChainError::Open(OpenError::Locked {
                path: backing.file.path().into(),
                holder: "another disk of this server".into(),
            }));
        }
        let options = ChainOptions {
            path: backing.file.path().into(),
            format: Some(backing.format),
            read_only: false,
            copy_on_read: false,
            prime: false,
            ..self.options.clone()
        };
        let mut writable = WritableBacking {
            chain: Chain { layers: Vec::new(), options, cut: None },
            locks: Vec::new(),
        };
        let file = writable.lock(&backing.file)?;
        let data = backing.data.as_ref().map(|data| writable.lock(data)).transpose()?;
        // During a commit the backing image is open twice. Each of the two has the limit of the L2
        // cache that the backing image had before the commit.
        let l2_cache = backing.qcow2().map(|shared| shared.cache_bytes().1);
        writable.has_no_journal(handle, &file).await?;
        // The overlay has all data until the backing image is durable.
        let safety = ImageSafety::default();
        let opened = backing.open_again(handle, file, data, false, l2_cache, safety).await?;
        writable.chain.layers =
            std::iter::once(Arc::new(opened)).chain(rest.iter().cloned()).collect();
        if self.size() > writable.chain.size() {
            let what = format!(
                "the backing image has {} bytes, and the disk {}",
                writable.chain.size(),
                self.size()
            );
            return refuse(&format!(
                "{what}: use stream; or end the disk, and run blockyard image commit, which \
                 enlarges the backing image"
            ));
        }
        Ok(writable)
    }

    /// Empties the topmost image, durably. It must be closed, with no request in flight.
    pub async fn empty_top(&self, handle: &Handle) -> Result<(), ChainError> {
        let file = &self.top().file;
        let raw = Raw::open(file, handle)
            .map_err(|e| self.wrong(ImageError::io(TOP, None, "opening it for io_uring", e)))?;
        qcow2::empty::make_empty(&raw).await.map_err(|e| self.wrong(e))
    }

    /// Returns the same chain, with some of its images re-read from their files. The topmost image
    /// is writable if it was writable before.
    pub async fn read_again(
        &self,
        handle: &Handle,
        which: Range<usize>,
    ) -> Result<Arc<Chain>, ChainError> {
        let mut layers = self.layers.clone();
        for (number, layer) in
            layers.iter_mut().enumerate().filter(|(number, _)| which.contains(number))
        {
            let read_only = number > 0 || self.options.read_only;
            let (file, data) = (layer.file.clone(), layer.data.clone());
            let safety = self.options.safety_of(number, &file);
            *layer = Arc::new(
                layer
                    .open_again(handle, file, data, read_only, self.options.l2_cache, safety)
                    .await?,
            );
        }
        cache_shares::apply(&layers, self.options.l2_cache);
        Ok(Arc::new(Chain { layers, options: self.options.clone(), cut: None }))
    }
}

impl ChainLayer {
    async fn open_again(
        &self,
        handle: &Handle,
        file: Arc<ImageFile>,
        data: Option<Arc<ImageFile>>,
        read_only: bool,
        l2_cache: Option<u64>,
        safety: ImageSafety,
    ) -> Result<ChainLayer, ChainError> {
        let wrong = |error| ChainError::Image { path: file.path().into(), error };
        let raw = |file: &Arc<ImageFile>| Raw::open(file, handle);
        let failed = |e| wrong(ImageError::io("file", None, "opening it for io_uring", e));
        let meta = match self.format {
            Format::Raw => Meta::Raw,
            Format::Qcow2 => {
                let main = raw(&file).map_err(failed)?;
                let header = Header::read(&main).await.map_err(wrong)?;
                let data = data.as_ref().map(raw).transpose().map_err(failed)?;
                let options =
                    Qcow2Options { read_only, l2_cache, safety, ..Qcow2Options::default() };
                Meta::Qcow2(
                    Qcow2::open(header, main, data, &options)
                        .await
                        .map_err(wrong)?
                        .shared()
                        .clone(),
                )
            }
            Format::Cow => {
                let options = CowOptions {
                    read_only,
                    accept_changed_backing: true,
                    safety,
                    ..CowOptions::default()
                };
                let main = raw(&file).map_err(failed)?;
                Meta::Cow(Cow::open(main, &options).await.map_err(wrong)?.shared().clone())
            }
        };
        Ok(ChainLayer { format: self.format, file, data, meta, sharing: None })
    }
}
