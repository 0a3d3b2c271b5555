use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;
use crate::testing::waits;
use crate::{Executor, Signal, SlowCallFigures};

#[test]
fn bytes_go_both_ways() {
    let (ours, mut theirs) = waits::peers();
    ours.set_nonblocking(true).unwrap();
    let executor = Executor::new().unwrap();
    let reader = ours.try_clone().unwrap();
    let (has_sent, sent_at_once) = std::sync::mpsc::channel();
    let peer = std::thread::spawn(move || {
        theirs.write_all(b"01234").unwrap();
        let is_read = || rustix::io::ioctl_fionread(&reader).unwrap() == 0;
        waits::until("the first bytes are read", is_read);
        theirs.write_all(b"56789").unwrap();
        // The message exceeds the socket's buffers, so it is sent in several steps if no byte is
        // read during the first one.
        waits::receive(&sent_at_once, "the first step is done");
        let mut all = vec![0; 3 << 20];
        theirs.read_exact(&mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == 7));
    });
    let socket = Socket::new(executor.handle(), ours).unwrap();
    waits::block_on(&executor, async move {
        let (segments, read) = socket.read_full(Segments::buffer(10)).await;
        read.unwrap();
        let mut bytes = [0; 10];
        segments.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"0123456789");
        let (one, two) =
            (Segments::from_bytes(&[7; 1 << 20]), Segments::from_bytes(&vec![7; 2 << 20]));
        let mut out = Segments::default();
        out.gather(&one, 0, one.len());
        out.gather(&two, 0, two.len());
        let at_once = socket.write_now(&out).unwrap();
        // A busy host can make calls slow, which leaves them to a kernel worker.
        let elsewhere = socket.0.calls.borrow_mut().mode(Instant::now()) == CallMode::Elsewhere;
        assert!((at_once > 0 || elsewhere) && at_once < out.len(), "{at_once}");
        has_sent.send(()).unwrap();
        let rest = out.slice(at_once, out.len() - at_once);
        socket.write_full(rest).await.1.unwrap();
        let (_, end) = socket.read_full(Segments::buffer(1)).await;
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    })
    .unwrap();
    waits::join(peer, "all bytes have arrived");
}

#[test]
fn other_tasks_run_while_a_peer_has_always_sent_more() {
    let (ours, mut theirs) = waits::peers();
    const CALLS: usize = 4096;
    theirs.write_all(&[1; CALLS * 16]).unwrap();
    let executor = Executor::new().unwrap();
    let socket = Socket::new(executor.handle(), ours).unwrap();
    let (handle, turns) = (executor.handle().clone(), Rc::new(Cell::new(0)));
    let counted = turns.clone();
    executor.handle().spawn(async move {
        loop {
            counted.set(counted.get() + 1);
            handle.yield_now().await;
        }
    });
    waits::block_on(&executor, async move {
        for _ in 0..CALLS {
            assert_eq!(socket.read(Segments::buffer(16)).await.1.unwrap(), 16);
        }
    })
    .unwrap();
    assert!(turns.get() >= CALLS * CALL / AT_ONCE, "{} turns", turns.get());
}

#[test]
fn a_kernel_worker_makes_the_calls_of_a_peer_that_makes_them_slow() {
    let (ours, mut theirs) = waits::peers();
    let executor = Executor::new().unwrap();
    let socket = Socket::new(executor.handle(), ours).unwrap();
    let answer = std::thread::spawn(move || {
        let mut bytes = [0; 5];
        theirs.read_exact(&mut bytes).unwrap();
        theirs.write_all(&bytes).unwrap();
    });
    waits::block_on(&executor, async move {
        let counters = Rc::<SlowCallCounters>::default();
        socket.count_slow_calls(counters.clone());
        (0..2).for_each(|_| socket.was_slow(Instant::now(), Duration::MAX, Duration::MAX));
        let SlowCallFigures { slow, measured, elsewhere, .. } = counters.figures();
        assert_eq!((slow, measured, elsewhere), (2, 1, 1));
        let out = Segments::from_bytes(b"bytes");
        assert_eq!(socket.write_now(&out).unwrap(), 0);
        assert!(socket.0.slot.leaves_to_worker(1));
        socket.write_full(out).await.1.unwrap();
        let (segments, read) = socket.read_full(Segments::buffer(5)).await;
        read.unwrap();
        let mut bytes = [0; 5];
        segments.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"bytes");
        // The peer's calls count as fast again.
        *socket.0.calls.borrow_mut() = SlowCalls::default();
        let _ = socket.write_now(&segments);
        assert!(!socket.0.slot.leaves_to_worker(1));
    })
    .unwrap();
    waits::join(answer, "the answer is sent");
}

#[test]
fn no_kernel_worker_waits_for_a_peer_that_sends_nothing() {
    for brings_descriptors in [false, true] {
        let (ours, mut theirs) = waits::peers();
        let executor = Executor::new().unwrap();
        let mut socket = Socket::new(executor.handle(), ours).unwrap();
        Rc::get_mut(&mut socket.0).unwrap().brings_descriptors = brings_descriptors;
        (0..2).for_each(|_| socket.was_slow(Instant::now(), Duration::MAX, Duration::MAX));
        socket.0.slot.leave_all_to_worker(true);
        let handle = executor.handle().clone();
        waits::block_on(&executor, async move {
            let (before, reading) = (handle.uring().in_flight(), socket.clone());
            let done = Signal::new(&handle);
            let read = done.clone();
            handle.spawn(async move {
                assert_eq!(reading.read(Segments::buffer(5)).await.1.unwrap(), 5);
                read.ring();
            });
            while handle.uring().in_flight() == before {
                handle.yield_now().await;
            }
            assert_eq!(handle.uring().for_workers(), 0, "descriptors: {brings_descriptors}");
            theirs.write_all(b"bytes").unwrap();
            done.wait().await;
        })
        .unwrap();
    }
}

#[test]
fn a_shutdown_completes_waiting_operations() {
    let (ours, theirs) = waits::peers();
    let executor = Executor::new().unwrap();
    let socket = Socket::new(executor.handle(), ours).unwrap();
    let (other, handle) = (socket.clone(), executor.handle().clone());
    waits::block_on(&executor, async move {
        handle.spawn(async move { other.shutdown() });
        assert_eq!(socket.read(Segments::buffer(10)).await.1.unwrap(), 0);
        assert!(socket.write_full(Segments::buffer(10)).await.1.is_err());
    })
    .unwrap();
    drop(theirs);
}

/// Returns a socket with small buffers, and its peer.
fn narrow(executor: &Executor) -> (Socket, UnixStream) {
    let (ours, theirs) = waits::peers();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
    (Socket::new(executor.handle(), ours).unwrap(), theirs)
}

/// A message that is sent in several steps is complete and in order, whatever its entries.
#[test]
fn a_write_continues_where_the_last_one_stopped() {
    let executor = Executor::new().unwrap();
    let (socket, mut theirs) = narrow(&executor);
    let bytes: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
    let peer = std::thread::spawn(move || {
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).unwrap();
        all
    });
    let sent = bytes.clone();
    waits::block_on(&executor, async move {
        let whole = Segments::from_bytes(&sent);
        let mut pieces = Segments::default();
        for (offset, len) in [(0, 70_001), (70_001, 3), (70_004, 129_996)] {
            let piece = Segments::from_bytes(&sent[offset..offset + len]);
            pieces.gather(&piece, 0, len);
        }
        assert_eq!((pieces.len(), pieces.count()), (whole.len(), 3));
        let steps = Cell::new(0);
        let (pieces, done) = write_rest(pieces, 0, async |segments, done| {
            steps.set(steps.get() + 1);
            socket.write(segments, done).await
        })
        .await;
        done.unwrap();
        assert_eq!(
            (pieces.len(), pieces.count()),
            (whole.len(), 3),
            "the segments come back unchanged"
        );
        assert!(steps.get() > 1, "it took one step only");
    })
    .unwrap();
    assert!(waits::join(peer, "all bytes have arrived") == bytes);
}

#[test]
fn reads_and_writes_fail_if_the_peer_closes_meanwhile() {
    let executor = Executor::new().unwrap();
    let (socket, mut theirs) = narrow(&executor);
    let handle = executor.handle().clone();
    waits::block_on(&executor, async move {
        // The socket's buffer is full, so the write waits; the peer closes meanwhile.
        while socket.write_now(&Segments::buffer(4096)).unwrap() > 0 {}
        let (writer, written) = (socket.clone(), Rc::new(Cell::new(None)));
        let (result, done) = (written.clone(), crate::Signal::new(&handle));
        let ended = done.clone();
        handle.spawn(async move {
            let (segments, sent) = writer.write_full(Segments::buffer(1 << 20)).await;
            assert_eq!(segments.len(), 1 << 20);
            result.set(Some(sent.unwrap_err().kind()));
            ended.ring();
        });
        handle.yield_now().await;
        assert_eq!(written.take(), None, "the write waits for room");
        theirs.write_all(b"012").unwrap();
        let (segments, read) = socket.read(Segments::buffer(10)).await;
        assert_eq!((segments.len(), read.unwrap()), (10, 3));
        theirs.write_all(b"34567").unwrap();
        drop(theirs);
        done.wait().await;
        assert!(matches!(
            written.take(),
            Some(io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
        ));
        // The peer has left bytes unread. The kernel may report that before it returns what
        // the peer had sent.
        let end = socket.read_full(Segments::buffer(6)).await.1.unwrap_err().kind();
        assert!(
            matches!(end, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset),
            "{end:?}"
        );
        assert!(socket.write_now(&Segments::buffer(1)).is_err());
    })
    .unwrap();
}

#[test]
fn bytes_before_the_end_are_read_and_the_end_is_no_error() {
    let executor = Executor::new().unwrap();
    let (ours, mut theirs) = waits::peers();
    let socket = Socket::new(executor.handle(), ours).unwrap();
    assert_eq!(socket.read_now(&Segments::buffer(4)).unwrap(), None, "no bytes have arrived");
    theirs.write_all(b"abcde").unwrap();
    drop(theirs);
    waits::block_on(&executor, async move {
        let (segments, read) = socket.read_full(Segments::buffer(4)).await;
        read.unwrap();
        let mut bytes = [0; 4];
        segments.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"abcd");
        assert_eq!(socket.read_now(&Segments::buffer(4)).unwrap(), Some(1));
        assert_eq!(socket.read_now(&Segments::buffer(4)).unwrap(), Some(0));
        assert_eq!(socket.read(Segments::buffer(4)).await.1.unwrap(), 0);
    })
    .unwrap();
}

#[test]
fn canceled_operations_lose_no_bytes() {
    let executor = Executor::new().unwrap();
    let (socket, mut theirs) = narrow(&executor);
    let handle = executor.handle().clone();
    waits::block_on(&executor, async move {
        // Twice, because the connection goes on after a cancellation.
        for byte in [b'a', b'b'] {
            let (other, later) = (socket.clone(), handle.clone());
            handle.spawn(async move {
                // The operation has been submitted then.
                later.yield_now().await;
                other.cancel();
            });
            let error = socket.read(Segments::buffer(10)).await.1.unwrap_err();
            assert!(is_canceled(&error), "{error}");
            theirs.write_all(&[byte]).unwrap();
            let (read, n) = socket.read(Segments::buffer(10)).await;
            let mut got = [0];
            read.copy_out(0, &mut got);
            assert_eq!((n.unwrap(), got[0]), (1, byte));
        }
        let mut full = 0;
        loop {
            match socket.write_now(&Segments::buffer(4096)).unwrap() {
                0 => break,
                n => full += n,
            }
        }
        let (other, later) = (socket.clone(), handle.clone());
        handle.spawn(async move {
            later.yield_now().await;
            other.cancel();
        });
        let error = socket.write(Segments::buffer(4096), 0).await.1.unwrap_err();
        assert!(is_canceled(&error), "{error}");
        drop(socket);
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), full);
    })
    .unwrap();
}

#[test]
fn a_kept_connection_outlives_its_socket_and_others_do_not() {
    for kept in [true, false] {
        let executor = Executor::new().unwrap();
        let (ours, mut theirs) = waits::peers();
        // A second descriptor: closing the first one alone does not end the connection.
        let second = ours.try_clone().unwrap();
        let socket = Socket::new(executor.handle(), ours).unwrap();
        let clone = socket.clone();
        drop(socket);
        assert_eq!(clone.write_now(&Segments::from_bytes(b"first")).unwrap(), 5);
        let fd = kept.then(|| clone.keep().unwrap());
        drop(clone);
        let sent = (&second).write(b" last");
        assert_eq!(sent.is_ok(), kept);
        drop((fd, second));
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).unwrap();
        assert_eq!(all, if kept { &b"first last"[..] } else { b"first" });
    }
}

#[test]
fn writes_continue_after_a_shutdown_of_reading() {
    let executor = Executor::new().unwrap();
    let (ours, mut theirs) = waits::peers();
    let socket = Socket::new(executor.handle(), ours).unwrap();
    let (other, handle) = (socket.clone(), executor.handle().clone());
    waits::block_on(&executor, async move {
        handle.spawn(async move { other.shutdown_read() });
        assert_eq!(socket.read(Segments::buffer(10)).await.1.unwrap(), 0);
        socket.write_full(Segments::from_bytes(b"still")).await.1.unwrap();
    })
    .unwrap();
    let mut bytes = [0; 5];
    theirs.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"still");
}
