//! The storage of an image on one reactor.
//!
//! What must hold: a file costs nothing more, because each of its requests goes through a `match`
//! that the compiler inlines. Other storages use boxed futures, so that those of files stay small.

use std::io;
use std::rc::Rc;

use blockyard_ring::Segments;

use crate::boxed::AnyStore;
use crate::file::HostFile;
use crate::sim::{Liar, Recorded, SimDisk};
use crate::storage::Storage;

/// The storage of an image on one reactor.
#[derive(Clone)]
pub enum Store {
    /// A file or block device of this host.
    File(HostFile),
    /// A file with a journal of its operations, for simulated power cuts.
    Recorded(Box<Recorded<HostFile>>),
    /// Any other storage: what a scheme has opened, or a simulated disk.
    Other(AnyStore),
}

impl Store {
    /// Returns `storage` behind a pointer.
    pub fn other(storage: impl Storage) -> Self {
        Store::Other(Rc::new(storage))
    }
}

impl From<SimDisk> for Store {
    fn from(disk: SimDisk) -> Self {
        Store::other(disk)
    }
}

impl From<Liar> for Store {
    fn from(disk: Liar) -> Self {
        Store::other(disk)
    }
}

impl Storage for Store {
    forward! {
        {
            Store::File(HostFile { file, .. }) => inline file,
            Store::Recorded(recorded) => boxed recorded,
            // Its futures are boxed already.
            Store::Other(other) => inline other
        }
        read write
    }
    forward! {
        {
            Store::File(file) => inline file,
            Store::Recorded(recorded) => boxed recorded,
            Store::Other(other) => inline other
        }
        sync discard zero zero_fast allocate set_len len next_data next_data_within
        allocated lost keeps_unsynced lookups geometry capabilities alignment
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Arc;

    use blockyard_ring::host::Geometry;

    use super::*;
    use crate::sim::{Journal, Sim};
    use crate::storage::{Alignment, Capabilities, LookupFigures};

    /// A storage with alignment requirements. Each method returns a different value, so that a test
    /// notices a wrapper that forwards a call to the wrong method.
    #[derive(Clone)]
    struct Demanding;

    impl Storage for Demanding {
        async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
            (segments, Ok(offset as usize))
        }
        async fn write(
            &self,
            segments: Segments,
            offset: u64,
            durable: bool,
        ) -> (Segments, io::Result<usize>) {
            (segments, Ok(offset as usize + usize::from(durable)))
        }
        fn sync(&self) -> impl Future<Output = io::Result<()>> {
            ready(Err(io::ErrorKind::BrokenPipe.into()))
        }
        async fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::NotFound.into())
        }
        async fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
            Err(io::ErrorKind::WouldBlock.into())
        }
        async fn zero_fast(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
            Err(io::ErrorKind::AddrInUse.into())
        }
        async fn allocate(&self, _: u64, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::AddrNotAvailable.into())
        }
        async fn set_len(&self, _: u64) -> io::Result<()> {
            Ok(())
        }
        async fn len(&self) -> io::Result<u64> {
            Ok(77)
        }
        async fn next_data(&self, offset: u64) -> io::Result<Option<std::ops::Range<u64>>> {
            Ok(Some(offset..offset + 1))
        }
        async fn next_data_within(
            &self,
            range: std::ops::Range<u64>,
        ) -> io::Result<Option<std::ops::Range<u64>>> {
            Ok(Some(range.end..range.end + 1))
        }
        fn allocated(&self) -> io::Result<Option<u64>> {
            Ok(Some(5))
        }
        fn lost(&self) -> Option<io::Error> {
            Some(io::ErrorKind::TimedOut.into())
        }
        fn keeps_unsynced(&self) -> bool {
            true
        }
        fn geometry(&self) -> Geometry {
            Geometry {
                logical_block: 4096,
                direct_offset: 4096,
                direct_memory: 512,
                ..Geometry::default()
            }
        }
        fn lookups(&self) -> LookupFigures {
            LookupFigures { hits: 3, ..LookupFigures::default() }
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities { direct: true, fixed_length: true }
        }
    }

    #[test]
    fn a_layer_over_a_storage_forwards_what_it_does_not_change() {
        let scratch = std::env::temp_dir().join(format!("blockyard-layer-{}", std::process::id()));
        std::fs::write(&scratch, [0; 512]).unwrap();
        let layer = Recorded::new(Demanding, &Journal::default(), &scratch).unwrap();
        std::fs::remove_file(&scratch).unwrap();
        assert_eq!(layer.alignment(), Alignment { memory_align: 512, offset_align: 4096 });
        assert_eq!(layer.geometry(), Demanding.geometry());
        assert_eq!(layer.capabilities(), Demanding.capabilities());
        assert_eq!(layer.lookups().hits, 3);
        assert_eq!(layer.allocated().unwrap(), Some(5));
        assert_eq!(layer.lost().unwrap().kind(), io::ErrorKind::TimedOut);
        assert!(layer.keeps_unsynced());
        let work = async move {
            assert_eq!(layer.read(Segments::default(), 9).await.1.unwrap(), 9);
            assert_eq!(layer.len().await.unwrap(), 77);
            assert_eq!(layer.next_data(3).await.unwrap(), Some(3..4));
            assert_eq!(layer.next_data_within(3..5).await.unwrap(), Some(5..6));
            assert_eq!(layer.sync().await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        };
        Sim::new(1).block_on(work).unwrap();
    }

    #[test]
    fn a_storage_behind_a_pointer_is_called_as_it_is() {
        let other = Store::other(Demanding);
        assert_eq!(other.alignment(), Demanding.alignment());
        assert_eq!(other.geometry(), Demanding.geometry());
        assert_eq!(other.capabilities(), Demanding.capabilities());
        assert_eq!(other.lookups().hits, 3);
        assert_eq!(other.allocated().unwrap(), Some(5));
        assert_eq!(other.lost().unwrap().kind(), io::ErrorKind::TimedOut);
        assert!(other.keeps_unsynced());
        let work = async move {
            let kind = |done: io::Result<()>| done.unwrap_err().kind();
            assert_eq!(other.read(Segments::default(), 9).await.1.unwrap(), 9);
            assert_eq!(other.write(Segments::default(), 9, true).await.1.unwrap(), 10);
            assert_eq!(other.len().await.unwrap(), 77);
            assert_eq!(other.next_data(3).await.unwrap(), Some(3..4));
            assert_eq!(other.next_data_within(3..5).await.unwrap(), Some(5..6));
            assert_eq!(kind(other.sync().await), io::ErrorKind::BrokenPipe);
            assert_eq!(kind(other.discard(0, 1).await), io::ErrorKind::NotFound);
            assert_eq!(kind(other.zero(0, 1, true).await), io::ErrorKind::WouldBlock);
            assert_eq!(kind(other.zero_fast(0, 1, true).await), io::ErrorKind::AddrInUse);
            assert_eq!(kind(other.allocate(0, 1).await), io::ErrorKind::AddrNotAvailable);
            other.set_len(1).await.unwrap();
        };
        Sim::new(1).block_on(work).unwrap();
    }

    /// The table must not make the future of a request on a file as large as that of other
    /// storages.
    #[test]
    fn the_table_adds_little_to_the_future_of_a_request_on_a_file() {
        let executor = blockyard_ring::Executor::new().unwrap();
        let file = Arc::new(std::fs::File::open("/proc/self/exe").unwrap());
        let file = blockyard_ring::UringFile::new(executor.handle(), file).unwrap();
        let alone = size_of_val(&file.read(Segments::default(), 0));
        let store = Store::File(HostFile {
            file,
            geometry: Geometry::default(),
            capabilities: Capabilities::default(),
        });
        let through = size_of_val(&store.read(Segments::default(), 0));
        // A call through the table may make a future larger than the file's own, but only by the
        // call's arguments and its state.
        assert!(
            through <= alone + size_of::<Segments>() + 64,
            "{through} bytes, {alone} without the table"
        );
    }
}
