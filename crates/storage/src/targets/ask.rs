//! How a disk asks its map.

use std::io;
use std::ops::Range;
use std::rc::Rc;

use super::map::{AnyMap, Discard, Extent, Map, Question};

/// Asks a map, on whichever thread it runs.
pub trait Ask: 'static {
    /// See [`Map::locate`].
    fn locate(&self, question: Question) -> impl Future<Output = io::Result<Vec<Extent>>>;
    /// See [`Map::flush`].
    fn flush(&self, moved: Vec<Range<u64>>) -> impl Future<Output = io::Result<()>>;
    /// See [`Map::discard`]. None: the map has no answer to such questions.
    fn discard(&self, asked: Discard) -> impl Future<Output = io::Result<Option<Vec<Extent>>>>;
}

/// Asks a map on the calling thread, for tests on simulated disks.
pub struct Direct(Rc<dyn AnyMap>);

impl Direct {
    /// Returns the map for [`Mapped`].
    pub fn new(map: impl Map) -> Self {
        Direct(Rc::new(map))
    }
}

impl Ask for Direct {
    async fn locate(&self, question: Question) -> io::Result<Vec<Extent>> {
        self.0.locate(question).await
    }

    async fn flush(&self, moved: Vec<Range<u64>>) -> io::Result<()> {
        self.0.flush(&moved).await
    }

    async fn discard(&self, asked: Discard) -> io::Result<Option<Vec<Extent>>> {
        self.0.discard(asked).await
    }
}
