//! Quiesces a disk: no request is in flight while a control thread works on its image or exchanges
//! it.
//!
//! ```text
//!   control thread   quiesce ──────────► work on the image ── exchange ── resume
//!   each reactor     requests in flight end │ new ones wait            │ continue on the new one
//! ```
//!
//! In: a call from a thread that is no reactor. Out: a period without requests in flight.
//!
//! What must hold: every request that begins before the quiesce ends before [`Disk::quiesce`]
//! returns. Every other request begins after the quiesce. The quiesce ends in every case, also
//! after an error.

use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use blockyard_ring::Handle;

use crate::backend::Source;
use crate::current_image::CurrentImage;
use crate::disk::Disk;
use crate::local_disk::LocalDisk;
use crate::quiesce::Reply;
use crate::tracker::Tracker;

/// Longest time that a quiesce waits for the requests in flight. New requests are held back during
/// this time.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Why a disk was not quiesced, or its image not exchanged.
#[derive(Debug, thiserror::Error)]
pub enum QuiesceError {
    #[error("requests in flight have not ended within {} s", PATIENCE.as_secs())]
    Patience,
    #[error("a reactor cannot open the image")]
    Reactor(#[source] std::io::Error),
}

/// A quiesced disk: no request is in flight. Dropping this ends the quiesce.
pub struct QuiescedDisk {
    disk: Arc<Disk>,
    since: Instant,
    /// Reason of the quiesce, for the log.
    purpose: &'static str,
}

impl Disk {
    /// Quiesces the disk: waits until no request is in flight. `purpose` appears in the log.
    ///
    /// Must not run on a reactor, which would wait for itself. Only one quiesce may run at a time:
    /// the caller holds the lock of [`Disk::begin_work`]. Public for tests of the exports.
    #[doc(hidden)]
    pub fn quiesce(self: &Arc<Self>, purpose: &'static str) -> Result<QuiescedDisk, QuiesceError> {
        let quiesced = QuiescedDisk { disk: self.clone(), since: Instant::now(), purpose };
        self.serving_state().quiesced = true;
        quiesced.each(|local_disk, _, reply| {
            local_disk.stop_discards();
            local_disk.quiesce.start(Some(reply))
        })?;
        Ok(quiesced)
    }
}

impl QuiescedDisk {
    /// Exchanges the image on all reactors, or on none if one of them cannot open the new image.
    /// `tracker`: what a job has to know of requests that change the disk from now on.
    pub fn exchange(&self, source: &Source, tracker: Option<&Tracker>) -> Result<(), QuiesceError> {
        let (new, map) = (source.clone(), tracker.cloned());
        self.each(move |local_disk, handle, reply| {
            let image = CurrentImage::open(handle, &new, map.clone());
            let _ = reply.send(
                image.map(|image| *local_disk.next_image.borrow_mut() = Some(Rc::new(image))),
            );
        })?;
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

    /// Makes every later request fail, because no image is left to serve. `why` explains it.
    pub fn lose(&self, why: &str) {
        let why = why.to_string();
        self.disk.serving_state().source =
            Source::Gone { size: self.disk.capacity(), why: why.clone() };
        let _ = self.each(move |local_disk, _, reply| {
            local_disk.exchange(Rc::new(CurrentImage::gone(&std::io::Error::other(why.clone()))));
            let _ = reply.send(Ok(()));
        });
    }

    /// Sets the image that reactors open from now on, and that later work begins with. Reactors
    /// that have the disk open keep theirs.
    pub fn continue_from(&self, source: Source) {
        self.disk.serving_state().source = source;
    }

    /// Runs `ask` on every reactor that has the disk open, and waits for all replies. Returns the
    /// first error.
    fn each(
        &self,
        ask: impl Fn(&LocalDisk, &Handle, mpsc::Sender<Reply>) + Clone + Send + 'static,
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
        // Once this sender is dropped, a disconnected channel means that all reactors have replied
        // or ended.
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
