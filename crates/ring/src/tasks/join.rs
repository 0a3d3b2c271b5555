//! Runs several operations concurrently in one task.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

type Begun<'a, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'a>>;

/// Runs all futures, at most `at_a_time` of them concurrently. After the first error it starts no
/// more, waits for those that run, and returns that error.
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

    /// Operations that end when the test says so, with the result that it sets.
    #[derive(Default)]
    struct Operations {
        results: [Cell<Option<Result<(), usize>>>; 8],
        begun: RefCell<Vec<usize>>,
    }

    impl Operations {
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
    fn at_most_at_a_time_operations_run_and_one_that_ends_makes_room() {
        let operations = Operations::default();
        let mut work = pin!(all(3, (0..8).map(|number| operations.run(number))));
        assert!(poll(work.as_mut()).is_pending());
        assert_eq!(*operations.begun.borrow(), [0, 1, 2]);
        // Operations may end in any order. Each one that ends makes room for the next.
        operations.end(1, Ok(()));
        operations.end(3, Ok(()));
        assert!(poll(work.as_mut()).is_pending());
        assert_eq!(*operations.begun.borrow(), [0, 1, 2, 3, 4]);
        (0..8).for_each(|number| operations.end(number, Ok(())));
        assert_eq!(poll(work.as_mut()), Poll::Ready(Ok(())));
        assert_eq!(*operations.begun.borrow(), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn the_first_error_is_returned_after_all_started_operations_end() {
        let operations = Operations::default();
        let mut work = pin!(all(3, (0..8).map(|number| operations.run(number))));
        assert!(poll(work.as_mut()).is_pending());
        operations.end(2, Err(2));
        assert!(poll(work.as_mut()).is_pending(), "two are running");
        operations.end(0, Err(0));
        assert!(poll(work.as_mut()).is_pending(), "one is running");
        assert_eq!(operations.begun(), 3, "no operation starts after an error");
        operations.end(1, Ok(()));
        assert_eq!(poll(work.as_mut()), Poll::Ready(Err(2)));
        assert_eq!(operations.begun(), 3);
    }

    #[test]
    fn an_empty_list_completes_at_once() {
        let nothing = Vec::<std::future::Ready<Result<(), usize>>>::new();
        assert_eq!(poll(pin!(all(3, nothing))), Poll::Ready(Ok(())));
    }
}
