//! The closed gate of a disk: how its image is exchanged for another while a guest uses it.
//!
//! ```text
//!   control thread   close ─────────────► work on the image ── exchange ── open
//!   each reactor     requests in flight end │ new ones wait here          │ they go on, on the new image
//! ```
//! In: the closing, from a thread that is no reactor. Out: a time in which nothing is in flight.
//! What must hold: every request that begins before the gate closes ends before
//! [`Disk::quiesce`] answers, every other one begins after it was opened; the gate opens again
//! whatever happens.

use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use blockyard_image::Store;
use blockyard_ring::Handle;

use crate::backend::Source;
use crate::dirty::DirtyMap;
use crate::disk::Disk;
use crate::local_disk::{CurrentImage, LocalDisk};
use crate::quiesce::Reply;

/// How long requests in flight may take to end. Those that came meanwhile wait as long.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Why a gate was not closed, or what could not be done behind it.
#[derive(Debug, thiserror::Error)]
pub enum QuiesceError {
    #[error("requests that were in flight have not ended in {} s", PATIENCE.as_secs())]
    Patience,
    #[error("a reactor cannot open the image")]
    Reactor(#[source] std::io::Error),
}

/// A closed gate: nothing of its disk is in flight. Dropped, it opens.
pub struct QuiescedDisk {
    disk: Arc<Disk>,
    since: Instant,
    /// What it was closed for, as the log tells it.
    purpose: &'static str,
}

impl Disk {
    /// Closes the gate, and waits until no request is in flight. Not for a reactor's thread, which
    /// would wait for itself. One at a time: the caller has [`Disk::begin_work`]'s turn. Public for
    /// tests of exports, which hold requests by it.
    #[doc(hidden)]
    pub fn quiesce(self: &Arc<Self>, purpose: &'static str) -> Result<QuiescedDisk, QuiesceError> {
        let quiesced = QuiescedDisk { disk: self.clone(), since: Instant::now(), purpose };
        self.serving_state().closed = true;
        quiesced.each(|local_disk, _, reply| local_disk.quiesce.start(Some(reply)))?;
        Ok(quiesced)
    }
}

impl QuiescedDisk {
    /// Every reactor goes on with this image, or, if one of them cannot, none does. `dirty`: what
    /// notes where is written.
    pub fn exchange(
        &self,
        source: &Source,
        dirty: Option<&Arc<DirtyMap>>,
    ) -> Result<(), QuiesceError> {
        let (new, map) = (source.clone(), dirty.cloned());
        self.each(move |local_disk, handle, reply| {
            let image = CurrentImage::open(handle, &new, map.clone());
            let _ = reply.send(
                image.map(|image| *local_disk.next_image.borrow_mut() = Some(Rc::new(image))),
            );
        })?;
        {
            let mut serving = self.disk.serving_state();
            serving.source = source.clone();
            serving.dirty = dirty.cloned();
        }
        let (new, map) = (source.clone(), dirty.cloned());
        let exchanged = self.each(move |local_disk, handle, reply| {
            // A reactor that has opened the disk between the two has looked at neither.
            let image = local_disk
                .next_image
                .take()
                .map_or_else(|| CurrentImage::open(handle, &new, map.clone()).map(Rc::new), Ok);
            let gone = |e: &std::io::Error| Rc::new(CurrentImage::gone(e));
            let (image, answer) =
                image.map_or_else(|e| (gone(&e), Err(e)), |image| (image, Ok(())));
            local_disk.exchange(image);
            let _ = reply.send(answer);
        });
        if let Err(e) = exchanged {
            tracing::error!(disk = self.disk.name(), "a reactor has lost the disk: {e}");
        }
        Ok(())
    }

    /// There is no image to go on with: every request is answered with an error.
    pub fn lose(&self, why: &str) {
        let why = why.to_string();
        self.disk.serving_state().source =
            Source::Gone { size: self.disk.capacity(), why: why.clone() };
        let _ = self.each(move |local_disk, _, reply| {
            local_disk.exchange(Rc::new(CurrentImage::gone(&std::io::Error::other(why.clone()))));
            let _ = reply.send(Ok(()));
        });
    }

    /// Asks every reactor that has the disk open, all at once, and waits for their answers; the
    /// first error.
    fn each(
        &self,
        ask: impl Fn(&LocalDisk<Store>, &Handle, mpsc::Sender<Reply>) + Clone + Send + 'static,
    ) -> Result<(), QuiesceError> {
        let (sender, answers) = mpsc::channel();
        let until = Instant::now() + PATIENCE;
        for reactor in self.disk.serving_state().reactors.clone() {
            let (disk, sender, ask) = (self.disk.clone(), sender.clone(), ask.clone());
            reactor.run(move |handle| {
                if let Some(local_disk) = LocalDisk::known(handle, &disk) {
                    ask(&local_disk, handle, sender);
                }
            });
        }
        // Disconnected: all have answered, or have ended.
        drop(sender);
        let mut failed = None;
        loop {
            match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Ok(())) => {}
                Ok(Err(e)) => failed = failed.or(Some(e)),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => return Err(QuiesceError::Patience),
            }
        }
        failed.map_or(Ok(()), |e| Err(QuiesceError::Reactor(e)))
    }
}

impl Drop for QuiescedDisk {
    fn drop(&mut self) {
        self.disk.serving_state().closed = false;
        for reactor in self.disk.serving_state().reactors.clone() {
            let disk = self.disk.clone();
            reactor.run(move |handle| {
                if let Some(local_disk) = LocalDisk::known(handle, &disk) {
                    local_disk.next_image.take();
                    local_disk.quiesce.resume();
                }
            });
        }
        let time = self.since.elapsed();
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
