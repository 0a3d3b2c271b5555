//! The closed gate of a disk: how its image is exchanged for another while a guest uses it.
//!
//! ```text
//!   control thread   close ─────────────► work on the image ── exchange ── open
//!   each reactor     requests in flight end │ new ones wait here          │ they go on, on the new image
//! ```
//! In: the closing, from a thread that is no reactor. Out: a time in which nothing is in flight.
//! What must hold: every request that begins before the gate closes ends before
//! [`Disk::close_gate`] answers, every other one begins after it was opened; the gate opens again
//! whatever happens.

use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use blockyard_image::Store;
use blockyard_ring::Handle;

use crate::backend::Source;
use crate::dirty::DirtyMap;
use crate::disk::Disk;
use crate::gate::Answer;
use crate::served::{Served, View};

/// How long requests in flight may take to end. Those that came meanwhile wait as long.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Why a gate was not closed, or what could not be done behind it.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    #[error("requests that were in flight have not ended in {} s", PATIENCE.as_secs())]
    Patience,
    #[error("a reactor cannot open the image")]
    Reactor(#[source] std::io::Error),
}

/// A closed gate: nothing of its disk is in flight. Dropped, it opens.
pub struct ClosedGate {
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
    pub fn close_gate(self: &Arc<Self>, purpose: &'static str) -> Result<ClosedGate, GateError> {
        let gate = ClosedGate { disk: self.clone(), since: Instant::now(), purpose };
        self.serving().closed = true;
        gate.each(|served, _, reply| served.gate.close(Some(reply)))?;
        Ok(gate)
    }
}

impl ClosedGate {
    /// Every reactor goes on with this image, or, if one of them cannot, none does. `dirty`: what
    /// notes where is written.
    pub fn exchange(
        &self,
        source: &Source,
        dirty: Option<&Arc<DirtyMap>>,
    ) -> Result<(), GateError> {
        let (new, map) = (source.clone(), dirty.cloned());
        self.each(move |served, handle, reply| {
            let view = View::open(handle, &new, map.clone());
            let _ = reply.send(view.map(|view| *served.next.borrow_mut() = Some(Rc::new(view))));
        })?;
        {
            let mut serving = self.disk.serving();
            serving.source = source.clone();
            serving.dirty = dirty.cloned();
        }
        let (new, map) = (source.clone(), dirty.cloned());
        let exchanged = self.each(move |served, handle, reply| {
            // A reactor that has opened the disk between the two has looked at neither.
            let view = served
                .next
                .take()
                .map_or_else(|| View::open(handle, &new, map.clone()).map(Rc::new), Ok);
            let gone = |e: &std::io::Error| Rc::new(View::gone(e));
            let (view, answer) = view.map_or_else(|e| (gone(&e), Err(e)), |view| (view, Ok(())));
            served.exchange(view);
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
        self.disk.serving().source = Source::Gone { size: self.disk.capacity(), why: why.clone() };
        let _ = self.each(move |served, _, reply| {
            served.exchange(Rc::new(View::gone(&std::io::Error::other(why.clone()))));
            let _ = reply.send(Ok(()));
        });
    }

    /// Asks every reactor that has the disk open, all at once, and waits for their answers; the
    /// first error.
    fn each(
        &self,
        ask: impl Fn(&Served<Store>, &Handle, mpsc::Sender<Answer>) + Clone + Send + 'static,
    ) -> Result<(), GateError> {
        let (sender, answers) = mpsc::channel();
        let until = Instant::now() + PATIENCE;
        for reactor in self.disk.serving().reactors.clone() {
            let (disk, sender, ask) = (self.disk.clone(), sender.clone(), ask.clone());
            reactor.run(move |handle| {
                if let Some(served) = Served::known(handle, &disk) {
                    ask(&served, handle, sender);
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
                Err(mpsc::RecvTimeoutError::Timeout) => return Err(GateError::Patience),
            }
        }
        failed.map_or(Ok(()), |e| Err(GateError::Reactor(e)))
    }
}

impl Drop for ClosedGate {
    fn drop(&mut self) {
        self.disk.serving().closed = false;
        for reactor in self.disk.serving().reactors.clone() {
            let disk = self.disk.clone();
            reactor.run(move |handle| {
                if let Some(served) = Served::known(handle, &disk) {
                    served.next.take();
                    served.gate.open();
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
