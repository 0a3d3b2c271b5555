//! Cache of decompressed clusters, because small requests often follow one another in a cluster.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use blockyard_ring::semaphore::Semaphore;
use blockyard_ring::{COMPUTING_THREADS, Handle};

use crate::qcow2::encoding::compression::{BrokenData, unpack};
use crate::qcow2::encoding::header::Compression;

/// Maximum size of the decompressed clusters that a reactor caches for an image, in bytes.
const KEPT: usize = 2 << 20;

/// Number of clusters of an image that a reactor decompresses at a time: for each thread one, and
/// one that waits for it. So many requests for one image do not delay those for another.
const AT_A_TIME: u64 = 2 * COMPUTING_THREADS as u64;

/// Cache of the clusters that were read last.
pub struct Decompressed {
    cache: RefCell<DecompressedClusters>,
    /// Bounds the clusters that are decompressed at a time, and so the memory of the results.
    pub(super) turns: Semaphore,
    /// The reactor. Its threads decompress. None: the task itself does, as in simulations.
    reactor: Option<Handle>,
}

/// Cached clusters by descriptor, valid for one value of `Qcow2::recompressed`.
#[derive(Default)]
struct DecompressedClusters {
    number: u64,
    clusters: VecDeque<(u64, Rc<Vec<u8>>)>,
}

impl Decompressed {
    /// Returns an empty cache. Threads of `reactor` decompress large clusters.
    pub fn new(reactor: Option<Handle>) -> Self {
        Decompressed { cache: RefCell::default(), turns: Semaphore::new(AT_A_TIME), reactor }
    }

    /// Decompresses a cluster. The data move to the thread that does it, and back.
    pub(super) async fn unpack(
        &self,
        packed: Vec<u8>,
        compression: Compression,
        size: usize,
    ) -> io::Result<Result<Vec<u8>, BrokenData>> {
        let unpack = move || unpack(&packed, compression, size);
        match &self.reactor {
            Some(reactor) => reactor.compute(size, unpack).await,
            None => Ok(unpack()),
        }
    }

    /// Returns the cluster if it is cached. `now`: the present value of `Qcow2::recompressed`.
    pub(super) fn find(&self, word: u64, now: u64) -> Option<Rc<Vec<u8>>> {
        let mut kept = self.cache.borrow_mut();
        if kept.number != now {
            *kept = DecompressedClusters { number: now, clusters: VecDeque::new() };
        }
        kept.clusters.iter().find(|(known, _)| *known == word).map(|(_, cluster)| cluster.clone())
    }

    pub(super) fn keep(&self, word: u64, now: u64, cluster: Rc<Vec<u8>>, size: usize) {
        let mut kept = self.cache.borrow_mut();
        if kept.number != now {
            return;
        }
        while (kept.clusters.len() + 1) * size > KEPT && !kept.clusters.is_empty() {
            kept.clusters.pop_front();
        }
        kept.clusters.push_back((word, cluster));
    }
}
