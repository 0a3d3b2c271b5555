//! Tests of files on a ring.

use std::future::poll_fn;
use std::sync::Mutex;
use std::task::Poll;

use super::*;
use crate::offload::workers;
use crate::policy::WriteFigures;
use crate::tasks::executor::Executor;
use crate::testing::waits;

fn file(executor: &Executor) -> (UringFile, Arc<OwnedFd>) {
    let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let fd = Arc::new(fd);
    (UringFile::new(executor.handle(), fd.clone()).unwrap(), fd)
}

#[test]
fn a_lock_ends_with_its_file_even_if_the_kernel_keeps_a_duplicate() {
    let path = std::env::temp_dir().join(format!("blockyard-locked-{}", std::process::id()));
    let open =
        || OwnedFd::from(std::fs::File::options().create(true).append(true).open(&path).unwrap());
    let first = open();
    assert!(host::lock(&first, host::Lock::Exclusive).unwrap());
    let _kernels = first.try_clone().unwrap();
    let first = LockedFile::from(first);
    assert!(!host::lock(open(), host::Lock::Exclusive).unwrap());
    drop(first);
    assert!(host::lock(open(), host::Lock::Exclusive).unwrap());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn data_that_was_written_is_read_back() {
    let executor = Executor::new().unwrap();
    let (file, _fd) = file(&executor);
    waits::block_on(&executor, async move {
        let (_, n) = file.write(Segments::from_bytes(b"hello, ring"), 4090, true).await;
        assert_eq!(n.unwrap(), 11);
        file.sync().await.unwrap();
        let (segments, n) = file.read(Segments::buffer(64), 4090).await;
        assert_eq!(n.unwrap(), 11, "a read stops at the end of the file");
        let mut bytes = [0; 11];
        segments.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"hello, ring");
        file.discard(4090, 5).await.unwrap();
        let (segments, _) = file.read(segments, 4090).await;
        segments.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"\0\0\0\0\0, ring");
        file.set_len(4092).await.unwrap();
        assert_eq!(file.len().await.unwrap(), 4092);
    })
    .unwrap();
}

#[test]
fn next_data_skips_holes() {
    let executor = Executor::new().unwrap();
    let (file, _fd) = file(&executor);
    waits::block_on(&executor, async move {
        file.set_len(1 << 20).await.unwrap();
        assert_eq!(file.next_data(0).await.unwrap(), None);
        file.write(Segments::from_bytes(&[7; 4096]), 65536, false).await.1.unwrap();
        assert_eq!(file.next_data(0).await.unwrap(), Some(65536..69632));
        assert_eq!(file.next_data(66000).await.unwrap(), Some(66000..69632));
        assert_eq!(file.next_data(69632).await.unwrap(), None);
        assert_eq!(file.next_data(2 << 20).await.unwrap(), None, "beyond the end");
        assert_eq!(file.allocated().unwrap(), Some(4096));
    })
    .unwrap();
}

#[test]
fn a_task_that_only_writes_lets_other_tasks_run() {
    let executor = Executor::new().unwrap();
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
    let fd = rustix::fs::open(std::env::temp_dir(), flags, 0o600.into()).unwrap();
    let file = UringFile::new(executor.handle(), Arc::new(fd)).unwrap();
    let (done, handle) = (Rc::new(std::cell::Cell::new(false)), executor.handle().clone());
    waits::block_on(&executor, async move {
        let seen = done.clone();
        handle.spawn(async move { seen.set(true) });
        let mut segments = Segments::from_bytes(b"again and again");
        for _ in 0..1000 {
            segments = file.write(segments, 0, false).await.0;
            if done.get() {
                return;
            }
        }
        panic!("the other task never ran");
    })
    .unwrap();
}

#[test]
fn a_dropped_operation_keeps_its_memory_until_its_completion() {
    let executor = Executor::new().unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let file = UringFile::new(executor.handle(), Arc::new(reader)).unwrap();
    waits::block_on(&executor, async move {
        {
            // Polled once, and dropped while the kernel still waits for data to fill the
            // buffer.
            let read = file.read(Segments::buffer(4096), u64::MAX);
            let mut read = Box::pin(read);
            std::future::poll_fn(|cx| {
                assert!(read.as_mut().poll(cx).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
        }
        file.slot.handle().yield_now().await;
        rustix::io::write(&writer, b"late").unwrap();
        let (segments, n) = {
            let handle = file.slot.handle().clone();
            for _ in 0..4 {
                handle.yield_now().await;
            }
            rustix::io::write(&writer, b"next").unwrap();
            file.read(Segments::buffer(4), u64::MAX).await
        };
        assert_eq!(n.unwrap(), 4);
        let mut bytes = [0; 4];
        segments.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"next", "the abandoned read took its own data");
    })
    .unwrap();
}

#[test]
fn another_thread_receives_the_reply_of_a_remote_call() {
    let executor = Executor::new().unwrap();
    let remote = executor.remote();
    let asker = std::thread::spawn(move || {
        let sum = remote.ask(|handle, reply| {
            let handle = handle.clone();
            handle.clone().spawn(async move {
                handle.yield_now().await;
                reply.send(handle.blocking(|| 41).await.unwrap() + 1);
            });
        });
        remote.run(|handle| handle.stop());
        sum
    });
    waits::run(&executor).unwrap();
    assert_eq!(waits::join(asker, "the reply arrives"), Some(42));
}

/// On submission the reactor's thread would copy the data of long transfers.
#[test]
fn a_kernel_worker_makes_long_page_cache_copies() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    waits::block_on(&executor, async move {
        let fd = rustix::fs::memfd_create("long", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = UringFile::new(&handle, Arc::new(fd)).unwrap();
        let socket = FileSlot::uncounted(&handle, file.slot.descriptor().clone());
        assert!(file.slot.leaves_to_worker((1 << 20) + 1));
        assert!(!file.slot.leaves_to_worker(1 << 20) && !socket.leaves_to_worker(1 << 30));
        let long = Segments::buffer(3 << 20);
        long.copy_in((3 << 20) - 4, b"last");
        assert_eq!(file.write(long, 0, false).await.1.unwrap(), 3 << 20);
        let (long, read) = file.read(Segments::buffer(3 << 20), 0).await;
        assert_eq!((read.unwrap(), long.find_nonzero(0, 3 << 20)), (3 << 20, Some((3 << 20) - 4)));
    })
    .unwrap();
}

/// The kernel zeroes the memory of a hole on submission, also for a direct read.
#[test]
fn a_kernel_worker_makes_long_direct_transfers() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    waits::block_on(&executor, async move {
        let path = std::env::temp_dir().join(format!("blockyard-direct-{}", std::process::id()));
        let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::RDWR;
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let fd = rustix::fs::open(&path, flags | rustix::fs::OFlags::DIRECT, mode).unwrap();
        rustix::fs::unlink(&path).unwrap();
        let file = UringFile::new(&handle, Arc::new(fd)).unwrap();
        assert!(file.slot.leaves_to_worker((4 << 20) + 1));
        assert!(!file.slot.leaves_to_worker(4 << 20));
    })
    .unwrap();
}

/// The kernel gives each change of extents a worker thread, and all of them wait for one lock.
#[test]
fn extents_are_changed_one_at_a_time() {
    const RANGES: u64 = 64;
    const LEN: u64 = 4096;
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    waits::block_on(&executor, async move {
        let fd = rustix::fs::memfd_create("extents", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = UringFile::new(&handle, Arc::new(fd)).unwrap();
        let data = Segments::buffer((RANGES * LEN) as usize);
        data.copy_in((RANGES * LEN) as usize - 4, b"last");
        file.write(data, 0, false).await.1.unwrap();
        let before = handle.uring().in_flight();
        let mut ranges: Vec<_> = (0..RANGES)
            .map(|range| {
                let file = file.clone();
                Box::pin(async move { file.discard(range * LEN, LEN).await.unwrap() })
            })
            .collect();
        let mut most = 0;
        std::future::poll_fn(|context| {
            ranges.retain_mut(|range| range.as_mut().poll(context).is_pending());
            most = most.max(handle.uring().in_flight() - before);
            if ranges.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        assert_eq!(most, 1);
        let (data, read) = file.read(Segments::buffer((RANGES * LEN) as usize), 0).await;
        assert_eq!(
            (read.unwrap() as u64, data.find_nonzero(0, (RANGES * LEN) as usize)),
            (RANGES * LEN, None)
        );
    })
    .unwrap();
}

#[test]
fn the_meter_counts_inline_writes() {
    let executor = Executor::new().unwrap();
    let meter = Rc::new(Meter::default());
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
    let fd = rustix::fs::open(std::env::temp_dir(), flags, 0o600.into()).unwrap();
    let file = UringFile::new(&executor.handle().metered(&meter), Arc::new(fd)).unwrap();
    // Report the first write as refused, as on a file system without non-blocking buffered writes.
    file.inline.tried(true);
    let write = async move {
        for _ in 0..3 {
            file.write(Segments::from_bytes(b"three times"), 0, false).await.1.unwrap();
        }
        file.write(Segments::from_bytes(b"durable"), 0, true).await.1.unwrap();
    };
    waits::block_on(&executor, write).unwrap();
    let WriteFigures { inline, left, .. } = meter.writes();
    assert_eq!(inline + left, 3, "{:?}", meter.writes());
    assert!(inline > 0);
}

/// A lookup may wait for the inode lock, and the reactor serves other disks meanwhile.
#[test]
fn lookups_of_a_served_disk_do_not_run_on_its_reactor() {
    let executor = Executor::new().unwrap();
    let fd = Arc::new(rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let meter = Rc::new(Meter::default());
    let handle = executor.handle().metered(&meter);
    let served = UringFile::new(&handle, fd.clone()).unwrap();
    let other = UringFile::new(executor.handle(), fd).unwrap();
    let work = async move {
        served.write(Segments::from_bytes(&[7; 4096]), 65536, false).await.1.unwrap();
        // All threads of the file are busy until the gate is dropped.
        let (closed, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let (workers, handle) = (&served.blocking.workers, served.slot.handle());
        let mut busy: Vec<_> = (0..workers::MOST)
            .map(|_| gate.clone())
            .map(|gate| {
                Box::pin(
                    workers
                        .call(handle.current_waker(), move || gate.lock().unwrap().recv().is_err()),
                )
            })
            .collect();
        for call in &mut busy {
            assert!(poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await.is_pending());
        }
        let mut lookup = Box::pin(served.next_data(0));
        assert!(poll_fn(|cx| Poll::Ready(lookup.as_mut().poll(cx))).await.is_pending());
        drop(closed);
        assert_eq!(lookup.await.unwrap(), Some(65536..69632));
        let mut lookup = Box::pin(other.next_data(0));
        assert!(poll_fn(|cx| Poll::Ready(lookup.as_mut().poll(cx))).await.is_ready());
    };
    waits::block_on(&executor, work).unwrap();
}
