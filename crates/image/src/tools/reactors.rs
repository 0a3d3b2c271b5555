//! Runs work on temporary executors: one on this thread, or one on each of several threads.

use std::future::Future;

use blockyard_ring::{Executor, Handle};

use crate::chain::ChainError;

/// Runs the future that `work` returns, on this thread.
pub fn on_reactor<T, F>(work: impl FnOnce(Handle) -> F) -> Result<T, ChainError>
where
    T: 'static,
    F: Future<Output = Result<T, ChainError>> + 'static,
{
    let executor = Executor::new().map_err(ChainError::Executor)?;
    let future = work(executor.handle().clone());
    executor.block_on(future).map_err(ChainError::Executor)?
}

/// Runs the future that `work` returns on each of `threads` threads. When all have ended, returns
/// the first error.
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
        // Wait for all threads, whatever the first result is.
        let results: Vec<Result<(), ChainError>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}
