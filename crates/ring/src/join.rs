//! Several operations at once, in one task.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

type Begun<'a, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'a>>;

/// Runs all, at most `at_a_time` together; gives the first error, after all that were begun have ended.
pub async fn all<'a, E>(
    at_a_time: usize,
    work: impl IntoIterator<Item = impl Future<Output = Result<(), E>> + 'a>,
) -> Result<(), E> {
    let mut left = work.into_iter();
    let mut begun: Vec<Begun<'a, E>> = Vec::new();
    let mut failed = None;
    poll_fn(|cx| {
        loop {
            while begun.len() < at_a_time && failed.is_none() {
                let Some(next) = left.next() else { break };
                begun.push(Box::pin(next));
            }
            let before = begun.len();
            begun.retain_mut(|one| match one.as_mut().poll(cx) {
                Poll::Ready(result) => {
                    failed = failed.take().or(result.err());
                    false
                }
                Poll::Pending => true,
            });
            if begun.len() == before {
                return if begun.is_empty() { Poll::Ready(()) } else { Poll::Pending };
            }
        }
    })
    .await;
    failed.map_or(Ok(()), Err)
}
