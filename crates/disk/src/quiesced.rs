//! Quiesces a disk: no request is in flight while a control thread works on its image or exchanges
//! it.
//!
//! ```text
//!   control thread   quiesce ──────────► work on the image ── exchange ── resume
//!   each reactor     requests in flight end │ new ones wait            │ continue on the new one
//! ```
//!
//! In: a call from a task of a control thread's own reactor. Out: a period without requests in
//! flight.
//!
//! What must hold: every request that begins before the quiesce ends before [`Disk::quiesce`]
//! returns. Every other request begins after the quiesce. The quiesce ends in every case, also
//! after an error.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_ring::{Executor, Handle};

use crate::backend::Source;
use crate::current_image::CurrentImage;
use crate::disk::Disk;
use crate::local_disk::LocalDisk;
use crate::poison::LostImage;
use crate::quiesce_error::{PATIENCE, QuiesceError};
use crate::replies::{Replier, replies};
use crate::tracker::Tracker;

/// A quiesced disk: no request is in flight. Dropping this ends the quiesce.
pub struct QuiescedDisk {
    disk: Arc<Disk>,
    /// The reactor of the control thread.
    handle: Handle,
    since: Instant,
    /// Reason of the quiesce, for the log.
    purpose: &'static str,
}

impl Disk {
    /// Quiesces the disk: waits until no request is in flight. `purpose` appears in the log.
    /// `handle`: the reactor of the caller's task. It must not be one that other tasks block.
    ///
    /// Only one quiesce may run at a time: the caller holds the lock of [`Disk::begin_work`]. Other
    /// crates call this in tests only.
    #[doc(hidden)]
    pub async fn quiesce_on(
        self: &Arc<Self>,
        handle: &Handle,
        purpose: &'static str,
    ) -> Result<QuiescedDisk, QuiesceError> {
        let (disk, handle, since) = (self.clone(), handle.clone(), handle.read_clock());
        let quiesced = QuiescedDisk { disk, handle, since, purpose };
        self.serving_state().quiesced = true;
        quiesced
            .each(|local_disk, _, reply| {
                local_disk.stop_discards();
                local_disk.quiesce.start(Some(reply))
            })
            .await?;
        Ok(quiesced)
    }

    /// Like [`Disk::quiesce_on`], on a thread that is no reactor. For tests of the exports.
    #[doc(hidden)]
    pub fn quiesce(self: &Arc<Self>, purpose: &'static str) -> Result<QuiescedDisk, QuiesceError> {
        let executor = Executor::new().map_err(QuiesceError::Ring)?;
        let (disk, handle) = (self.clone(), executor.handle().clone());
        let quiesced = executor.block_on(async move { disk.quiesce_on(&handle, purpose).await });
        quiesced.map_err(QuiesceError::Ring)?
    }
}

impl QuiescedDisk {
    /// Exchanges the image on all reactors, or on none if one of them cannot open the new image.
    /// `tracker`: what a job has to know of requests that change the disk from now on.
    pub(crate) async fn exchange(
        &self,
        source: &Source,
        tracker: Option<&Tracker>,
    ) -> Result<(), QuiesceError> {
        let (new, map) = (source.clone(), tracker.cloned());
        let prepared = self.each(move |local_disk, handle, reply| {
            let image = CurrentImage::open(handle, &new, map.clone());
            reply.send(
                image.map(|image| *local_disk.next_image.borrow_mut() = Some(Rc::new(image))),
            );
        });
        prepared.await?;
        {
            let mut serving = self.disk.serving_state();
            serving.source = source.clone();
            serving.tracker = tracker.cloned();
        }
        let (new, map) = (source.clone(), tracker.cloned());
        let exchanged = self.each(move |local_disk, handle, reply| {
            // A reactor that opened the disk between the two rounds has not prepared an image.
            let image = local_disk
                .next_image
                .take()
                .map_or_else(|| CurrentImage::open(handle, &new, map.clone()).map(Rc::new), Ok);
            let gone = |e: &io::Error| Rc::new(CurrentImage::gone(e));
            let (image, answer) =
                image.map_or_else(|e| (gone(&e), Err(e)), |image| (image, Ok(())));
            local_disk.exchange(image);
            reply.send(answer);
        });
        if let Err(e) = exchanged.await {
            tracing::error!(disk = self.disk.name(), "a reactor has lost the disk: {e}");
        }
        Ok(())
    }

    /// Makes every later request fail, because no image is left to serve. `why` explains it.
    pub(crate) async fn lose(&self, why: LostImage) {
        self.disk.serving_state().source =
            Source::Gone { size: self.disk.capacity(), why: why.clone() };
        let lost = self.each(move |local_disk, _, reply| {
            local_disk.exchange(Rc::new(CurrentImage::gone(&io::Error::other(why.to_string()))));
            reply.send(Ok(()));
        });
        let _ = lost.await;
    }

    /// Sets the image that reactors open from now on, and that later work begins with. Reactors
    /// that have the disk open keep theirs.
    pub fn continue_from(&self, source: Source) {
        self.disk.serving_state().source = source;
    }

    /// Runs `ask` on every reactor that has the disk open, and waits for all replies. Returns the
    /// first error.
    async fn each(
        &self,
        ask: impl Fn(&LocalDisk, &Handle, Replier) + Clone + Send + 'static,
    ) -> Result<(), QuiesceError> {
        let (replier, answers) = replies();
        for reactor in self.disk.serving_state().reactors.clone() {
            let (disk, replier, ask) = (self.disk.clone(), replier.clone(), ask.clone());
            reactor.run(move |handle| {
                if let Some(local_disk) = LocalDisk::known(handle, &disk) {
                    ask(&local_disk, handle, replier);
                }
            });
        }
        // The replies are complete when all reactors have replied or ended.
        drop(replier);
        answers.all(&self.handle, PATIENCE).await
    }
}

impl Drop for QuiescedDisk {
    fn drop(&mut self) {
        self.disk.serving_state().quiesced = false;
        for reactor in self.disk.serving_state().reactors.clone() {
            let disk = self.disk.clone();
            reactor.run(move |handle| {
                if let Some(local_disk) = LocalDisk::known(handle, &disk) {
                    local_disk.next_image.take();
                    local_disk.quiesce.resume();
                }
            });
        }
        let time = self.handle.read_clock().saturating_duration_since(self.since);
        self.disk.note_held_back(time);
        let ms = time.as_secs_f64() * 1e3;
        tracing::info!(
            disk = self.disk.name(),
            "{}: requests were held back for {ms:.1} ms",
            self.purpose
        );
    }
}

#[cfg(test)]
mod tests;
