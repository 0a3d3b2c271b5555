//! The image below the topmost one, opened for writing while the chain is in use: for a commit of a
//! served disk.
//!
//! In: the open chain. Out: a second chain that begins at the image below, for the commit to write
//! to; and the chain anew, as its files are then. What must hold: nobody else has the image below
//! open, and at no moment may anybody else write to it; reactors that read it by what they knew of
//! it before find there what it had wherever the topmost image has nothing ([`WritableBacking::hold`]).

use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::Handle;

use super::cache_shares;
use super::error::ChainError;
use super::member::{ChainLayer, Meta};
use super::open::Chain;
use super::options::ChainOptions;
use crate::cow::{Cow, CowOptions};
use crate::error::ImageError;
use crate::format::Format;
use crate::image::Image;
use crate::qcow2::{self, Header, Qcow2, Qcow2Options};
use crate::raw::Raw;
use blockyard_storage::ImageFile;
use blockyard_storage::Store;

const TOP: &str = "overlay to be committed";

/// See the module's page. Dropped, it gives the writer's lock back: those who read keep theirs.
pub struct WritableBacking {
    chain: Chain,
    /// The files that are open for writing, and as the chain in use has them.
    locks: Vec<(Arc<ImageFile>, Arc<ImageFile>)>,
}

impl WritableBacking {
    /// The image below, and what lies under it. Whoever writes to it keeps [`Image::hold_freed`] as
    /// long as others read it by what they knew before.
    pub fn image(&self, handle: &Handle) -> Result<Image<Store>, ChainError> {
        let failed =
            |e| self.chain.wrong(ImageError::io("file", None, "opening it for io_uring", e));
        self.chain.image(handle).map_err(failed)
    }

    pub fn chain(&self) -> &Chain {
        &self.chain
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
                tracing::warn!("image {}: locking it for reading: {e}", reader.path().display());
            }
        }
    }
}

impl Chain {
    fn wrong(&self, error: ImageError) -> ChainError {
        ChainError::Image { path: self.options.path.clone(), error }
    }

    /// Opens the image below the topmost one for writing. Whether the topmost one can be emptied
    /// afterwards is looked at first.
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
        // While it is committed into, the image below is open twice, and keeps as much as before
        // each time.
        let l2_cache = backing.qcow2().map(|shared| shared.cache_bytes().1);
        let opened = backing.open_again(handle, file, data, false, l2_cache).await?;
        writable.chain.layers =
            std::iter::once(Arc::new(opened)).chain(rest.iter().cloned()).collect();
        if self.size() > writable.chain.size() {
            let what = format!(
                "the backing image has {} bytes, and the disk {}",
                writable.chain.size(),
                self.size()
            );
            return refuse(&format!("{what}: enlarge it first (blockyard image resize)"));
        }
        Ok(writable)
    }

    /// Leaves the topmost image without contents of its own, durably. It was closed, and nothing is
    /// in flight.
    pub async fn empty_top(&self, handle: &Handle) -> Result<(), ChainError> {
        let file = &self.top().file;
        let raw = Raw::open(file, handle)
            .map_err(|e| self.wrong(ImageError::io(TOP, None, "opening it for io_uring", e)))?;
        qcow2::empty::make_empty(&raw).await.map_err(|e| self.wrong(e))
    }

    /// The same chain, with these of its images as their files are now. The topmost one can be
    /// written to, if it was.
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
            *layer = Arc::new(
                layer.open_again(handle, file, data, read_only, self.options.l2_cache).await?,
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
                let options = Qcow2Options { read_only, l2_cache, ..Qcow2Options::default() };
                Meta::Qcow2(
                    Qcow2::open(header, main, data, &options)
                        .await
                        .map_err(wrong)?
                        .shared()
                        .clone(),
                )
            }
            Format::Cow => {
                let options =
                    CowOptions { read_only, accept_changed_backing: true, ..CowOptions::default() };
                let main = raw(&file).map_err(failed)?;
                Meta::Cow(Cow::open(main, &options).await.map_err(wrong)?.shared().clone())
            }
        };
        Ok(ChainLayer { format: self.format, file, data, meta })
    }
}
