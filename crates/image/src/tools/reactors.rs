//! The same work on several threads, each with an executor of its own.

use std::future::Future;

use blockyard_ring::{Executor, Handle};

use crate::chain::ChainError;

/// Runs what `work` gives on each of `threads` threads; their results, or the first error, when all have ended.
pub fn on_reactors<T, F>(threads: usize, work: impl Fn(Handle) -> F + Sync) -> Result<Vec<T>, ChainError>
where
    T: Send + 'static,
    F: Future<Output = Result<T, ChainError>> + 'static,
{
    let run = || {
        let executor = Executor::new().map_err(ChainError::Executor)?;
        let future = work(executor.handle().clone());
        executor.block_on(future).map_err(ChainError::Executor)?
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(run)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // All are waited for, whatever the first says.
        let results: Vec<Result<T, ChainError>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}
