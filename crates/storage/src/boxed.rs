//! Any storage behind a pointer: its futures are boxed.
//!
//! In: a [`Storage`]. Out: the same as an [`AnyStore`], as a scheme returns it. So the code that
//! opens and uses images does not name the storages of the schemes, and tests pass it the simulated
//! disk.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;

use blockyard_ring::Segments;
use blockyard_ring::host::Geometry;

use crate::storage::{Alignment, Capabilities, LookupFigures, Storage};

/// Any storage on one reactor.
pub type AnyStore = Rc<dyn AnyStorage>;

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

macro_rules! any_storage {
    (
        later { $($later:ident($($arg:ident: $type:ty),*) -> $out:ty;)* }
        now { $($now:ident -> $value:ty;)* }
    ) => {
        /// A [`Storage`] with boxed futures. Each method is the one of [`Storage`].
        pub trait AnyStorage: 'static {
            $(fn $later(&self, $($arg: $type),*) -> Boxed<'_, $out>;)*
            $(fn $now(&self) -> $value;)*
        }

        impl<S: Storage> AnyStorage for S {
            $(fn $later(&self, $($arg: $type),*) -> Boxed<'_, $out> {
                Box::pin(Storage::$later(self, $($arg),*))
            })*
            $(fn $now(&self) -> $value {
                Storage::$now(self)
            })*
        }
    };
}

any_storage! {
    later {
        read(segments: Segments, offset: u64) -> (Segments, io::Result<usize>);
        write(segments: Segments, offset: u64, durable: bool) -> (Segments, io::Result<usize>);
        sync() -> io::Result<()>;
        discard(offset: u64, len: u64) -> io::Result<()>;
        zero(offset: u64, len: u64, unmap: bool) -> io::Result<()>;
        zero_fast(offset: u64, len: u64, unmap: bool) -> io::Result<()>;
        allocate(offset: u64, len: u64) -> io::Result<()>;
        set_len(len: u64) -> io::Result<()>;
        len() -> io::Result<u64>;
        next_data(offset: u64) -> io::Result<Option<Range<u64>>>;
        next_data_within(range: Range<u64>) -> io::Result<Option<Range<u64>>>;
    }
    now {
        allocated -> io::Result<Option<u64>>;
        lost -> Option<io::Error>;
        keeps_unsynced -> bool;
        lookups -> LookupFigures;
        geometry -> Geometry;
        capabilities -> Capabilities;
        alignment -> Alignment;
    }
}
