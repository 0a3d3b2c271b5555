//! What an outage costs a disk: nothing, unless acknowledged writes may be lost. Lost memory of a
//! request is no outage.

use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;

use blockyard_nbd::wire::{Headers, cmd, errno, export, flag};
use blockyard_ring::{Executor, GuestMemory, Region, Segments};
use blockyard_storage::{CacheMode, ImageFile, OpenOptions, Storage};

use crate::server::{SIZE, Server, done, good, simple};
use crate::{SHORT, SOON, TALKING, is_pattern, on_image, run, script};

/// A flush fails during an outage that is longer than the time to connect again. It has lost
/// nothing if the writes before it were flushed. It succeeds when the server is back.
#[test]
fn a_flush_that_fails_in_an_outage_has_lost_nothing() {
    let down = Arc::new(AtomicBool::new(false));
    let is_down = down.clone();
    let server = Server::start(
        Headers::Simple,
        |_, _| (),
        script(move |_, request, disk| {
            (!is_down.load(Ordering::SeqCst)).then(|| good(request, disk))
        }),
    );
    on_image(&server, TALKING, async move |store| {
        store.write(Segments::from_bytes(&[1; 512]), 0, false).await.1.unwrap();
        store.sync().await.unwrap();
        down.store(true, Ordering::SeqCst);
        let error = store.sync().await.unwrap_err().to_string();
        assert!(error.contains("cannot be reached"), "{error}");
        assert!(store.keeps_unsynced() && store.lost().is_none());
        down.store(false, Ordering::SeqCst);
        let start = Instant::now();
        while let Err(e) = store.sync().await {
            assert!(start.elapsed() < SOON, "{e}");
        }
        store.write(Segments::from_bytes(&[2; 512]), 0, false).await.1.unwrap();
        down.store(true, Ordering::SeqCst);
        store.sync().await.unwrap_err();
        assert!(!store.keeps_unsynced(), "a write was not flushed");
    });
}

/// A durable write ends in a flush at the server. Its failure may be the only report of the loss of
/// other writes.
#[test]
fn a_durable_write_that_fails_may_have_lost_others() {
    for (error, flushed, keeps) in
        [(errno::EIO, false, false), (errno::EIO, true, true), (errno::ENOSPC, false, true)]
    {
        let server = Server::start(
            Headers::Simple,
            |_, disk| disk.flags |= export::SEND_FUA,
            script(move |_, request, disk| {
                let fails = request.flags & flag::FUA != 0;
                Some(if fails { simple(error, request.cookie) } else { good(request, disk) })
            }),
        );
        on_image(&server, TALKING, async move |store| {
            store.write(Segments::from_bytes(&[1; 512]), 0, false).await.1.unwrap();
            if flushed {
                store.sync().await.unwrap();
            }
            store.write(Segments::from_bytes(&[2; 512]), 512, true).await.1.unwrap_err();
            assert_eq!(store.keeps_unsynced(), keeps);
            assert_eq!(store.sync().await.is_ok(), keeps);
        });
    }
}

/// The client ends a connection because of a wrong answer. The server lives, and may still execute
/// a write that it has received, so the client must not send that write again.
#[test]
fn a_write_is_not_repeated_if_the_client_has_ended_the_connection() {
    let writes = Arc::new(AtomicUsize::new(0));
    let received = writes.clone();
    let server = Server::start(
        Headers::Simple,
        |_, _| (),
        script(move |number, request, disk| {
            let writes = usize::from(request.command == cmd::WRITE);
            received.fetch_add(writes, Ordering::SeqCst);
            Some(if number == 1 { vec![0x42; 64] } else { good(request, disk) })
        }),
    );
    on_image(&server, TALKING, async move |store| {
        let written = store.write(Segments::buffer(512), 0, false).await.1;
        assert_eq!(writes.load(Ordering::SeqCst), 1, "the write was repeated");
        let error = written.unwrap_err().to_string();
        assert!(error.contains("may still execute"), "{error}");
        assert!(store.lost().is_some());
        store.read(Segments::buffer(512), 0).await.1.unwrap();
    });
}

/// A server answers a write before it has received its data, and receives nothing more. Then no
/// request is in flight, and later ones wait to be sent. They fail in time.
#[test]
fn a_server_that_takes_no_bytes_costs_bounded_time() {
    let (release, released) = channel::<()>();
    let mut released = Some(released);
    let server = Server::start(
        Headers::Simple,
        move |_, disk| disk.hasty = released.take(),
        script(|_, request, disk| Some(done(request, disk))),
    );
    on_image(&server, SHORT, async move |store| {
        store.write(Segments::buffer(SIZE as usize), 0, false).await.1.unwrap();
        let error = store.write(Segments::buffer(512), 0, false).await.1.unwrap_err().to_string();
        assert!(error.contains("has not answered for 8 s"), "{error}");
        assert!(store.lost().is_some(), "the first write was acknowledged");
        drop(release);
    });
}

/// A front end has truncated the memory that a read fills. The server is not at fault, so its
/// connection stays, and later answers are right.
#[test]
fn a_read_into_truncated_memory_keeps_the_connection() {
    // All of the memory is lost, or all after a part of a page.
    for left in [0, 300_001] {
        let server = Server::start(
            Headers::Structured,
            |_, disk| disk.flags |= export::CAN_MULTI_CONN,
            script(|_, request, disk| Some(good(request, disk))),
        );
        let connections = server.connections.clone();
        // Only with a connection of its own does the reactor receive directly into the memory.
        let options =
            OpenOptions { nbd: TALKING, ..OpenOptions::new(server.uri(), true, CacheMode::None) };
        let file = ImageFile::open(&options).unwrap();
        let executor = Executor::new().unwrap();
        let store = file.storage(executor.handle()).unwrap();
        let test = async move {
            let (region, memory_file) = Region::memfd("truncated", 0, 0, SIZE).unwrap();
            let memory = Rc::new(GuestMemory::default().with(region).unwrap());
            File::from(memory_file).set_len(left).unwrap();
            let mut segments = Segments::default();
            segments.reset(&memory);
            segments.push_guest(0, SIZE).unwrap();
            store.read(segments, 0).await.1.unwrap();
            let (segments, result) = store.read(Segments::buffer(4096), 8192).await;
            result.unwrap();
            assert!(is_pattern(&segments, 8192));
            assert_eq!(connections.load(Ordering::SeqCst), 1);
        };
        run(&executor, test);
    }
}
