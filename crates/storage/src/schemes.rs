//! The table of storages: how each is named, what opens it, and its form on one reactor.
//!
//! What must hold: the table adds no cost to a file, because each request goes through a `match`
//! that the compiler inlines. Other storages use boxed futures, so that those of files stay small.

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_ring::Segments;

use crate::error::StorageError;
use crate::file::HostFile;
use crate::nbd::{self, Nbd};
use crate::open::{OpenOptions, Opened};
use crate::sim::Recorded;
use crate::storage::Storage;
use crate::target::{AskWorker, Mapped, Passed, exec};

/// A kind of storage names that are no paths, and what opens them.
pub trait Scheme: Sync {
    /// Returns the syntax of such names, for messages and help.
    fn forms(&self) -> &'static str;
    /// Returns whether the name belongs to this scheme, well-formed or not.
    fn owns(&self, name: &str) -> bool;
    fn open(&self, name: &str, options: &OpenOptions) -> Result<Arc<dyn Opened>, StorageError>;
    /// Returns the normalized form, which is the same for all names of the same storage.
    fn normalize(&self, name: &str) -> Result<String, StorageError>;
    /// Returns the name to open, if the operator's `allowed` permits images to refer to `name`. It
    /// may add what only the operator knows, such as certificates.
    fn permit(&self, allowed: &str, name: &str) -> Option<String>;
    /// Returns what the operator can allow, so that the name is permitted.
    fn allowance(&self, name: &str) -> String;
}

macro_rules! storages {
    ($($(#[$doc:meta])* $variant:ident($storage:ty) $how:ident $(named by $scheme:path)?;)*) => {
        /// The storage of an image on one reactor.
        #[derive(Clone)]
        pub enum Store { $($(#[$doc])* $variant($storage)),* }

        /// The kinds of names that are no paths.
        pub static SCHEMES: &[&dyn Scheme] = &[$($(&$scheme,)?)*];

        impl Storage for Store {
            forward! { { $(Store::$variant(storage) => $how storage),* }
                read write sync discard zero zero_fast allocate set_len len next_data
                allocated lost geometry capabilities alignment
            }
        }
    };
}

// Add further storages here. Without `named by`, no name opens the storage.
storages! {
    /// A file or block device of this host: any name that no scheme owns.
    File(HostFile) inline;
    /// An export of an NBD server.
    Nbd(Nbd) boxed named by nbd::NbdScheme;
    /// A map of a target, on files and devices of this host.
    Mapped(Rc<Mapped<HostFile, AskWorker>>) boxed named by exec::ExecScheme;
    /// A device of a target.
    Passed(Passed) boxed;
    /// A file with a journal of its operations, for simulated power cuts.
    Recorded(Box<Recorded<HostFile>>) boxed;
}

/// Returns the scheme of a name; None: it is a path.
pub fn scheme_of(name: &Path) -> Option<(&'static dyn Scheme, &str)> {
    let name = name.to_str()?;
    SCHEMES.iter().find(|scheme| scheme.owns(name)).map(|scheme| (*scheme, name))
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use blockyard_ring::host::Geometry;

    use super::*;
    use crate::sim::{Journal, Sim};
    use crate::storage::{Alignment, Capabilities};

    #[test]
    fn a_name_selects_the_scheme_that_owns_it() {
        for name in ["nbd://host/a", "nbds://host", "nbd+unix:///?socket=/s", "nbdx://wrong"] {
            let (scheme, text) = scheme_of(Path::new(name)).unwrap();
            assert_eq!((scheme.forms(), text), (nbd::NbdScheme.forms(), name));
        }
        for path in ["disk.qcow2", "/a/nbd", "nbd:x", "./http://host", "a:b"] {
            assert!(scheme_of(Path::new(path)).is_none(), "{path}");
        }
    }

    #[test]
    fn an_allowance_completes_the_names_that_it_permits() {
        let scheme = nbd::NbdScheme;
        let permit = |allowed, name| scheme.permit(allowed, name);
        assert_eq!(permit("nbd://host", "nbd://host:10809/a").as_deref(), Some("nbd://host/a"));
        assert_eq!(
            permit("nbds://host?tls-certificates=/c", "nbds://host/a").as_deref(),
            Some("nbds://host/a?tls-certificates=/c")
        );
        for (allowed, name) in [
            ("nbd://host", "nbd://other/a"),
            ("nbd://host/a", "nbd://host/b"),
            ("/folder", "nbd://host/a"),
        ] {
            assert_eq!(permit(allowed, name), None, "{allowed} {name}");
        }
        assert_eq!(
            scheme.normalize("nbd://host:10809/a").unwrap(),
            scheme.normalize("nbd://host/a").unwrap()
        );
    }

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
        async fn set_len(&self, _: u64) -> io::Result<()> {
            Ok(())
        }
        async fn len(&self) -> io::Result<u64> {
            Ok(77)
        }
        async fn next_data(&self, offset: u64) -> io::Result<Option<std::ops::Range<u64>>> {
            Ok(Some(offset..offset + 1))
        }
        fn allocated(&self) -> io::Result<Option<u64>> {
            Ok(Some(5))
        }
        fn lost(&self) -> Option<io::Error> {
            Some(io::ErrorKind::TimedOut.into())
        }
        fn geometry(&self) -> Geometry {
            Geometry {
                logical_block: 4096,
                direct_offset: 4096,
                direct_memory: 512,
                ..Geometry::default()
            }
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
        assert_eq!(layer.allocated().unwrap(), Some(5));
        assert_eq!(layer.lost().unwrap().kind(), io::ErrorKind::TimedOut);
        let work = async move {
            assert_eq!(layer.read(Segments::default(), 9).await.1.unwrap(), 9);
            assert_eq!(layer.len().await.unwrap(), 77);
            assert_eq!(layer.next_data(3).await.unwrap(), Some(3..4));
            assert_eq!(layer.sync().await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
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
