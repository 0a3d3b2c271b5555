//! A macro that forwards methods of [`Storage`](crate::Storage) to another storage.

/// Implements the named methods of `Storage` by forwarding. The braces list patterns of `self`,
/// each with `inline` or `boxed` and the storage to forward to. `boxed` keeps the future of a rare
/// storage from enlarging the others' futures.
///
/// ```text
///   forward! { { Recorded { storage, .. } => inline storage } read len lost }
/// ```
macro_rules! forward {
    (inline $call:expr) => { $call };
    (boxed $call:expr) => { Box::pin($call) };
    (@ read { $($from:pat => $how:ident $to:expr),* }) => {
        #[inline]
        async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
            match self { $($from => forward!($how $to.read(segments, offset)).await),* }
        }
    };
    (@ write { $($from:pat => $how:ident $to:expr),* }) => {
        #[inline]
        async fn write(
            &self,
            segments: Segments,
            offset: u64,
            durable: bool,
        ) -> (Segments, io::Result<usize>) {
            match self { $($from => forward!($how $to.write(segments, offset, durable)).await),* }
        }
    };
    (@ sync $arms:tt) => { forward!(@@ sync () () -> (); $arms); };
    (@ discard $arms:tt) => {
        forward!(@@ discard (offset: u64, len: u64) (offset, len) -> (); $arms);
    };
    (@ zero $arms:tt) => {
        forward!(@@ zero (offset: u64, len: u64, unmap: bool) (offset, len, unmap) -> (); $arms);
    };
    (@ zero_fast $arms:tt) => {
        forward!(
            @@ zero_fast (offset: u64, len: u64, unmap: bool) (offset, len, unmap) -> (); $arms
        );
    };
    (@ allocate $arms:tt) => {
        forward!(@@ allocate (offset: u64, len: u64) (offset, len) -> (); $arms);
    };
    (@ set_len $arms:tt) => { forward!(@@ set_len (len: u64) (len) -> (); $arms); };
    (@ next_data $arms:tt) => {
        forward!(@@ next_data (offset: u64) (offset) -> Option<std::ops::Range<u64>>; $arms);
    };
    (@ next_data_within $arms:tt) => {
        forward!(
            @@ next_data_within (range: std::ops::Range<u64>) (range)
                -> Option<std::ops::Range<u64>>;
            $arms
        );
    };
    (@@ $name:ident ($($arg:ident: $type:ty),*) $args:tt -> $out:ty;
        { $($from:pat => $how:ident $to:expr),* }
    ) => {
        async fn $name(&self, $($arg: $type),*) -> io::Result<$out> {
            match self { $($from => forward!($how $to.$name $args).await),* }
        }
    };
    // The futures of `len` are small, so they are never boxed.
    (@ len { $($from:pat => $how:ident $to:expr),* }) => {
        async fn len(&self) -> io::Result<u64> {
            match self { $($from => $to.len().await),* }
        }
    };
    (@ allocated $arms:tt) => { forward!(@now allocated -> io::Result<Option<u64>>; $arms); };
    (@ lost $arms:tt) => { forward!(@now lost -> Option<io::Error>; $arms); };
    (@ keeps_unsynced $arms:tt) => { forward!(@now keeps_unsynced -> bool; $arms); };
    (@ lookups $arms:tt) => { forward!(@now lookups -> $crate::LookupFigures; $arms); };
    (@ geometry $arms:tt) => { forward!(@now geometry -> $crate::Geometry; $arms); };
    (@ capabilities $arms:tt) => { forward!(@now capabilities -> $crate::Capabilities; $arms); };
    (@ alignment $arms:tt) => { forward!(@now alignment -> $crate::Alignment; $arms); };
    (@now $name:ident -> $out:ty; { $($from:pat => $how:ident $to:expr),* }) => {
        fn $name(&self) -> $out {
            match self { $($from => $to.$name()),* }
        }
    };
    ($arms:tt $($method:ident)*) => { $( forward!(@ $method $arms); )* };
}
