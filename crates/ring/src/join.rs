//! Several operations at once, in one task.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

type Begun<'a, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'a>>;

/// Runs all, at most `at_a_time` together; gives the first error, after all that were begun have
/// ended.
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

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    /// Pieces of work that end when the test says so, with the result that it gives.
    #[derive(Default)]
    struct Pieces {
        results: [Cell<Option<Result<(), usize>>>; 8],
        begun: RefCell<Vec<usize>>,
    }

    impl Pieces {
        async fn run(&self, number: usize) -> Result<(), usize> {
            self.begun.borrow_mut().push(number);
            poll_fn(|_| self.results[number].take().map_or(Poll::Pending, Poll::Ready)).await
        }

        fn end(&self, number: usize, result: Result<(), usize>) {
            self.results[number].set(Some(result));
        }

        fn begun(&self) -> usize {
            self.begun.borrow().len()
        }
    }

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn no_more_than_asked_for_run_at_a_time_and_one_that_ends_makes_room() {
        let pieces = Pieces::default();
        let mut work = pin!(all(3, (0..8).map(|number| pieces.run(number))));
        assert!(poll(work.as_mut()).is_pending());
        assert_eq!(*pieces.begun.borrow(), [0, 1, 2]);
        // In any order; those that can end at once make room at once.
        pieces.end(1, Ok(()));
        pieces.end(3, Ok(()));
        assert!(poll(work.as_mut()).is_pending());
        assert_eq!(*pieces.begun.borrow(), [0, 1, 2, 3, 4]);
        (0..8).for_each(|number| pieces.end(number, Ok(())));
        assert_eq!(poll(work.as_mut()), Poll::Ready(Ok(())));
        assert_eq!(*pieces.begun.borrow(), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn the_first_error_is_given_when_all_that_were_begun_have_ended() {
        let pieces = Pieces::default();
        let mut work = pin!(all(3, (0..8).map(|number| pieces.run(number))));
        assert!(poll(work.as_mut()).is_pending());
        pieces.end(2, Err(2));
        assert!(poll(work.as_mut()).is_pending(), "two are running");
        pieces.end(0, Err(0));
        assert!(poll(work.as_mut()).is_pending(), "one is running");
        assert_eq!(pieces.begun(), 3, "nothing more is begun after an error");
        pieces.end(1, Ok(()));
        assert_eq!(poll(work.as_mut()), Poll::Ready(Err(2)));
        assert_eq!(pieces.begun(), 3);
    }

    #[test]
    fn nothing_to_do_is_done() {
        let nothing = Vec::<std::future::Ready<Result<(), usize>>>::new();
        assert_eq!(poll(pin!(all(3, nothing))), Poll::Ready(Ok(())));
    }
}
