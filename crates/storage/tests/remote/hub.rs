//! The bounds of what goes through a connection that reactors share.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use blockyard_nbd::wire::{Headers, cmd};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::Storage;

use crate::server::{Server, done};
use crate::{LONG, SOON, on_image, open, run, script};

const MB: usize = 1 << 20;
/// Number of bytes that may be in the hub at a time.
const IN_HUB: usize = 16 * MB;

/// A large request is sent in parts, and each part of a write is copied in an iteration of its own.
#[test]
fn large_requests_are_copied_in_parts_and_the_reactor_yields_in_between() {
    let (lens, seen) = {
        let lens = Arc::new(Mutex::new(Vec::new()));
        (lens.clone(), lens)
    };
    let server = Server::start(
        Headers::Extended,
        |_, disk| disk.size = 64 * MB as u64,
        script(move |_, request, disk| {
            if request.command == cmd::WRITE {
                seen.lock().unwrap().push(request.len);
            }
            Some(done(request, disk))
        }),
    );
    on_image(&server, LONG, async move |store| {
        let mut write = pin!(store.write(Segments::buffer(8 * MB), 0, false));
        poll_fn(|cx| {
            assert!(write.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        // The server receives this after all that the first poll has sent.
        store.discard(0, 4096).await.unwrap();
        assert_eq!(*lens.lock().unwrap(), [MB as u64]);
        write.await.1.unwrap();
        assert_eq!(*lens.lock().unwrap(), [MB as u64; 8]);
    });
}

/// Writes wait while the copies of others take all the memory. Requests without data do not.
#[test]
fn the_copies_of_all_requests_take_bounded_memory() {
    const LEN: usize = 12 * MB;
    let (held, received) = {
        let held = Arc::new(AtomicUsize::new(0));
        (held.clone(), held)
    };
    let mut answers = Some(Vec::new());
    let server = Server::start(
        Headers::Extended,
        |_, disk| disk.size = 64 * MB as u64,
        script(move |_, request, disk| {
            let answer = done(request, disk);
            match (&mut answers, request.command) {
                (Some(answers), cmd::WRITE) => {
                    answers.extend(answer);
                    received.fetch_add(request.len as usize, Ordering::SeqCst);
                    Some(Vec::new())
                }
                _ => Some([answers.take().unwrap_or_default(), answer].concat()),
            }
        }),
    );
    let file = open(&server, LONG);
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let ended = Rc::new(Cell::new(0));
    for number in 0..2 {
        let (store, ended) = (file.storage(&handle).unwrap(), ended.clone());
        handle.spawn(async move {
            let at = (number * LEN) as u64;
            store.write(Segments::buffer(LEN), at, false).await.1.unwrap();
            ended.set(ended.get() + 1);
        });
    }
    let store = file.storage(&handle).unwrap();
    let test = async move {
        let start = Instant::now();
        while held.load(Ordering::SeqCst) < IN_HUB {
            assert!(start.elapsed() < SOON, "the server has too few writes");
            handle.yield_now().await;
        }
        // The others would be sent now.
        for _ in 0..1000 {
            handle.yield_now().await;
        }
        store.discard(0, 4096).await.unwrap();
        assert_eq!(held.load(Ordering::SeqCst), IN_HUB);
        while ended.get() < 2 {
            assert!(start.elapsed() < SOON, "the writes have not ended");
            handle.yield_now().await;
        }
    };
    run(&executor, test);
}
