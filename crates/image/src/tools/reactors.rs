//! Executors for work that has none: one on this thread, or one on each of several.

use std::future::Future;

use blockyard_ring::{Executor, Handle};

use crate::chain::ChainError;

/// Runs what `work` gives on this thread.
pub fn on_reactor<T, F>(work: impl FnOnce(Handle) -> F) -> Result<T, ChainError>
where
    T: 'static,
    F: Future<Output = Result<T, ChainError>> + 'static,
{
    let executor = Executor::new().map_err(ChainError::Executor)?;
    let future = work(executor.handle().clone());
    executor.block_on(future).map_err(ChainError::Executor)?
}

/// Runs what `work` gives on each of `threads` threads; the first error, when all have ended.
pub fn on_reactors<F>(threads: usize, work: impl Fn(Handle) -> F + Sync) -> Result<(), ChainError>
where
    F: Future<Output = Result<(), ChainError>> + 'static,
{
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..threads.max(1)).map(|_| scope.spawn(|| on_reactor(&work))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // All are waited for, whatever the first says.
        let results: Vec<Result<(), ChainError>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}
