//! What all commands use: the reactors, what disks share, the jobs and the observer.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blockyard_export::Reactors;
use blockyard_image::SharedImages;

use crate::interface::observer::{Event, Observer};
use crate::jobs::Jobs;
use crate::openings::Openings;
use crate::shares::Shares;

/// State that all commands use.
pub(crate) struct Context {
    pub reactors: Arc<Reactors>,
    pub shares: Shares,
    /// Backing images that the disks have in common.
    pub images: SharedImages,
    pub jobs: Jobs,
    pub observer: Option<Arc<dyn Observer>>,
    /// Whether the yard is closing. If so, no disk is added.
    pub is_closing: AtomicBool,
    /// Disks with exports that start, or that wait for the end of a hand-over.
    pub openings: Arc<Openings>,
}

impl Context {
    pub fn report(&self, event: Event) {
        self.observer.iter().for_each(|observer| observer.event(event.clone()));
    }
}
