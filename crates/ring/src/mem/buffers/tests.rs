//! Tests of registered buffers, with the running kernel. Registering needs a few MiB of locked
//! memory if the user is not root (`ulimit -l`).

use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use super::*;
use crate::files::file::UringFile;
use crate::mem::memory::GuestMemory;
use crate::mem::segments::Segments;
use crate::tasks::executor::{Executor, Handle};
use crate::tasks::registration::Registration;
use crate::testing::{own_process, waits};

const PAGE: u64 = 4096;

impl Registration {
    /// Replaces the memory, and does all steps.
    fn replace(&mut self, memory: &GuestMemory) {
        self.set(memory);
        while self.step() {}
    }
}

impl Handle {
    /// Registers memory with this executor's ring, as far as possible.
    fn register_memory(&self, memory: &GuestMemory) -> Registration {
        let mut registration = Registration::new(self);
        registration.replace(memory);
        registration
    }
}

/// Returns adjacent regions of guest memory, each in its own file, and the files.
fn guest(sizes: &[u64]) -> (GuestMemory, Vec<OwnedFd>) {
    let (mut memory, mut files, mut at) = (GuestMemory::default(), Vec::new(), 0);
    for size in sizes {
        let (region, fd) = Region::memfd("test", at, at, *size).unwrap();
        memory = memory.with(region).unwrap();
        files.push(fd);
        at += size;
    }
    (memory, files)
}

fn file(handle: &Handle) -> UringFile {
    let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    UringFile::new(handle, Arc::new(fd)).unwrap()
}

fn segments(memory: &Rc<GuestMemory>, pieces: &[(u64, u64)]) -> Segments {
    let mut segments = Segments::default();
    segments.reset(memory);
    pieces.iter().for_each(|(addr, len)| segments.push_guest(*addr, *len).unwrap());
    segments
}

fn bytes(segments: &Segments) -> Vec<u8> {
    let mut bytes = vec![0; segments.len()];
    segments.copy_out(0, &mut bytes);
    bytes
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + 1).wrapping_mul(seed * 2 + 1) >> 3) as u8).collect()
}

/// Returns how many operations in flight name a registered buffer.
fn named(handle: &Handle) -> u32 {
    handle.buffers(|b, _| b.uses.iter().sum())
}

fn free(handle: &Handle) -> usize {
    handle.buffers(|b, _| if let Table::Ready { free, .. } = &b.table { free.len() } else { 0 })
}

/// Returns the result of `future`, and whether its operation named a registered buffer.
async fn watched<T>(handle: &Handle, future: impl Future<Output = T>) -> (T, bool) {
    let (mut future, before, mut most) = (pin!(future), named(handle), 0);
    let value = std::future::poll_fn(|cx| {
        let poll = future.as_mut().poll(cx);
        most = most.max(named(handle));
        poll
    });
    (value.await, most > before)
}

/// Writes `pieces` to the file and reads them back elsewhere. Returns whether the write and the
/// read named a registered buffer.
async fn moves(handle: &Handle, memory: &Rc<GuestMemory>, pieces: &[(u64, u64)]) -> [bool; 2] {
    let (file, from) = (file(handle), segments(memory, pieces));
    let want = pattern(pieces[0].0 + pieces.len() as u64, from.len());
    from.copy_in(0, &want);
    let ((from, n), wrote) = watched(handle, file.write(from, PAGE, false)).await;
    assert_eq!(n.unwrap(), want.len(), "{pieces:?}");
    from.zero(0, want.len());
    let plain = file.read(Segments::buffer(want.len()), PAGE).await;
    assert!(bytes(&plain.0) == want, "content of the file, {pieces:?}");
    let ((into, n), read) = watched(handle, file.read(from, PAGE)).await;
    assert_eq!(n.unwrap(), want.len(), "{pieces:?}");
    assert!(bytes(&into) == want, "content read into {pieces:?}");
    [wrote, read]
}

fn good(registration: &Registration, regions: usize) {
    let outcome = registration.outcome();
    assert_eq!((outcome.regions, outcome.refused), (regions, None), "{outcome}");
}

#[test]
fn only_operations_inside_one_region_use_registered_buffers() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        let memory = Rc::new(guest(&[1 << 20, 1 << 20]).0);
        let page = |n: u64| n * 2 * PAGE;
        assert_eq!(
            moves(&handle, &memory, &[(0, PAGE)]).await,
            [false; 2],
            "nothing is registered yet"
        );
        let registration = handle.register_memory(&memory);
        good(&registration, 2);
        assert_eq!(registration.outcome().bytes, 2 << 20);
        let vectored = registration.outcome().vectored;
        assert_eq!(moves(&handle, &memory, &[(0, PAGE)]).await, [true; 2]);
        assert_eq!(moves(&handle, &memory, &[(3, 1)]).await, [true; 2], "a byte");
        assert_eq!(moves(&handle, &memory, &[(0, 1 << 20)]).await, [true; 2], "a whole region");
        assert_eq!(
            moves(&handle, &memory, &[((2 << 20) - 5, 5)]).await,
            [true; 2],
            "the other one's end"
        );
        for count in [2, 3, 9, 100] {
            let pieces: Vec<_> = (0..count).map(|n| (page(n) + n, 100 + n * 7)).collect();
            assert_eq!(moves(&handle, &memory, &pieces).await, [vectored; 2], "{count} pieces");
        }
        let across = [(0, PAGE), ((1 << 20) + PAGE, PAGE)];
        assert_eq!(moves(&handle, &memory, &across).await, [false; 2], "two regions");
        // This process's own memory is never registered.
        let (_, own) =
            watched(&handle, file(&handle).write(Segments::buffer(4096), 0, false)).await;
        assert!(!own);
        // Overlapping segments that are in all longer than a registered buffer may be.
        let mut heap = segments(&memory, &[(0, 1 << 20)]);
        (1..=MOST >> 20).for_each(|n| heap.push_guest(n as u64 % 2 * 8, (1 << 20) - 8).unwrap());
        handle.buffers(|b, _| assert_eq!(b.take(heap.iovecs(), heap.len()), NONE));
        drop(registration);
        assert_eq!((named(&handle), free(&handle)), (0, usize::from(ENTRIES)));
        assert_eq!(
            moves(&handle, &memory, &[(0, PAGE)]).await,
            [false; 2],
            "nothing is registered any more"
        );
    };
    waits::block_on(&executor, all).unwrap();
}

#[test]
fn a_large_region_is_registered_in_several_buffers() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        handle.buffers(|b, _| b.most = 16 * PAGE as usize);
        let memory = Rc::new(guest(&[40 * PAGE, PAGE]).0);
        let registration = handle.register_memory(&memory);
        good(&registration, 2);
        assert_eq!(free(&handle), usize::from(ENTRIES) - 4);
        for (piece, registered) in [
            ((0, 16 * PAGE), true),
            ((16 * PAGE, 16 * PAGE), true),
            ((32 * PAGE, 8 * PAGE), true),
            ((16 * PAGE - 1, 2), false),
            ((0, 40 * PAGE), false),
            ((40 * PAGE, PAGE), true),
        ] {
            assert_eq!(moves(&handle, &memory, &[piece]).await, [registered; 2], "{piece:?}");
        }
        assert_eq!(
            moves(&handle, &memory, &[(0, 512), (17 * PAGE, 512)]).await,
            [false; 2],
            "two buffers"
        );
    };
    waits::block_on(&executor, all).unwrap();
}

/// To register all of a large region takes long, so other tasks run between the steps.
#[test]
fn a_region_that_is_registered_in_steps_is_found_when_it_is_whole() {
    const STEPS: usize = 8;
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        handle.buffers(|b, _| b.most = PAGE as usize);
        let memory = Rc::new(guest(&[STEPS as u64 * PAGE]).0);
        let mut registration = Registration::new(&handle);
        registration.set(&memory);
        let mut steps = 0;
        while registration.step() {
            steps += 1;
            assert_eq!(free(&handle), usize::from(ENTRIES) - steps, "one buffer in a step");
            let is_whole = steps == STEPS;
            assert_eq!(registration.is_settled(), is_whole);
            assert_eq!(moves(&handle, &memory, &[(0, PAGE)]).await, [is_whole; 2], "{steps} steps");
        }
        assert_eq!((steps, registration.has_work()), (STEPS, false));
        good(&registration, 1);
    };
    waits::block_on(&executor, all).unwrap();
}

#[test]
fn a_region_that_is_gone_before_it_is_whole_keeps_no_entry() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        handle.buffers(|b, _| b.most = PAGE as usize);
        let mut registration = Registration::new(&handle);
        registration.set(&guest(&[4 * PAGE, PAGE]).0);
        assert!(registration.step() && registration.step());
        assert_eq!(free(&handle), usize::from(ENTRIES) - 2);
        registration.set(&GuestMemory::default());
        assert!(registration.is_settled() && registration.has_work());
        // The event loop clears one buffer in an iteration.
        let mut iterations = 0;
        while registration.has_work() {
            handle.yield_now().await;
            iterations += 1;
            assert!(free(&handle) <= usize::from(ENTRIES) - 2 + iterations);
        }
        assert_eq!((iterations, free(&handle)), (2, usize::from(ENTRIES)));
        assert_eq!(registration.outcome().regions, 0);
    };
    waits::block_on(&executor, all).unwrap();
}

#[test]
fn a_region_is_registered_until_its_last_registration_ends() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        let memory = Rc::new(guest(&[PAGE, PAGE]).0);
        let mut first = handle.register_memory(&memory);
        let second = handle.register_memory(&memory.without(PAGE, PAGE).unwrap());
        assert_eq!(free(&handle), usize::from(ENTRIES) - 2);
        let less = Rc::new(memory.without(0, PAGE).unwrap());
        first.replace(&less);
        good(&first, 1);
        assert_eq!(
            moves(&handle, &memory, &[(0, PAGE)]).await,
            [true; 2],
            "the second registration still has it"
        );
        drop(second);
        assert_eq!(moves(&handle, &memory, &[(0, PAGE)]).await, [false; 2]);
        assert_eq!(moves(&handle, &memory, &[(PAGE, PAGE)]).await, [true; 2]);
        first.replace(&memory);
        good(&first, 2);
        assert_eq!(moves(&handle, &memory, &[(0, PAGE)]).await, [true; 2]);
    };
    waits::block_on(&executor, all).unwrap();
}

/// A read of a pipe keeps its buffer while the region is removed and another one is registered.
#[test]
fn a_region_is_removed_while_an_operation_is_in_flight() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        for abandoned in [false, true] {
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            let pipe = UringFile::new(&handle, Arc::new(reader)).unwrap();
            let (memory, files) = guest(&[PAGE]);
            let registration = handle.register_memory(&memory);
            good(&registration, 1);
            let mut read =
                Some(Box::pin(pipe.read(segments(&Rc::new(memory), &[(16, 4)]), u64::MAX)));
            std::future::poll_fn(|cx| {
                assert!(read.as_mut().unwrap().as_mut().poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
            handle.yield_now().await;
            if abandoned {
                read = None;
            }
            drop(registration);
            // Only the operation keeps the region registered now.
            assert_eq!((named(&handle), free(&handle)), (1, usize::from(ENTRIES) - 1));
            let memory = Rc::new(guest(&[PAGE]).0);
            let _registration = handle.register_memory(&memory);
            assert_eq!(
                moves(&handle, &memory, &[(0, PAGE)]).await,
                [true; 2],
                "the next guest's region"
            );
            let before = handle.buffers(|b, _| b.leaving.len());
            rustix::io::write(&writer, b"late").unwrap();
            if let Some(read) = read {
                let (segments, n) = read.await;
                assert_eq!((n.unwrap(), bytes(&segments)), (4, b"late".to_vec()));
            }
            while named(&handle) > 0 {
                handle.yield_now().await;
            }
            assert_eq!(
                (before, handle.buffers(|b, _| b.leaving.len()), free(&handle)),
                (1, 0, usize::from(ENTRIES) - 1)
            );
            let mut seen = [0; 4];
            rustix::io::pread(&files[0], &mut seen, 16).unwrap();
            assert_eq!(&seen, b"late", "the data is in the guest's memory");
        }
    };
    waits::block_on(&executor, all).unwrap();
}

/// A region is removed when its operation exists, but the kernel has not consumed the operation
/// yet.
#[test]
fn a_region_is_removed_before_its_operation_is_submitted() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        let (memory, file) = (Rc::new(guest(&[PAGE]).0), file(&handle));
        let mut registration = handle.register_memory(&memory);
        let from = segments(&memory, &[(0, PAGE)]);
        from.copy_in(0, &pattern(1, PAGE as usize));
        let mut write = pin!(file.write(from, 0, false));
        std::future::poll_fn(|cx| {
            assert!(write.as_mut().poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        assert_eq!(named(&handle), 1);
        registration.replace(&guest(&[PAGE]).0);
        good(&registration, 1);
        assert_eq!(write.await.1.unwrap(), PAGE as usize);
        let read = file.read(Segments::buffer(PAGE as usize), 0).await;
        assert!(bytes(&read.0) == pattern(1, PAGE as usize));
    };
    waits::block_on(&executor, all).unwrap();
}

#[test]
fn regions_beyond_the_table_are_not_registered() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        handle.buffers(|buffers, _| buffers.most = PAGE as usize);
        let full = usize::from(ENTRIES) / MOST_BUFFERS;
        let size = MOST_BUFFERS as u64 * PAGE;
        let sizes: Vec<_> = [size].repeat(full).into_iter().chain([PAGE; 3]).collect();
        let memory = Rc::new(guest(&sizes).0);
        let mut registration = handle.register_memory(&memory);
        let outcome = registration.outcome();
        assert_eq!((outcome.regions, outcome.plain, free(&handle)), (full, 3, 0));
        assert_eq!(outcome.refused, Some(Refusal::Full));
        assert!(outcome.to_string().contains("3 regions are not: "), "{outcome}");
        assert_eq!(moves(&handle, &memory, &[(0, PAGE)]).await, [true; 2]);
        assert_eq!(moves(&handle, &memory, &[(full as u64 * size, PAGE)]).await, [false; 2]);
        let other = Rc::new(guest(&[PAGE]).0);
        registration.replace(&other);
        good(&registration, 1);
        assert_eq!(free(&handle), usize::from(ENTRIES) - 1);
        assert_eq!(moves(&handle, &other, &[(0, PAGE)]).await, [true; 2]);
    };
    waits::block_on(&executor, all).unwrap();
}

/// docs/configuration.md forbids pinning a guest that gives memory back. This test shows why.
#[test]
fn pages_that_the_guest_gave_back_stay_registered() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let all = async move {
        let (memory, files) = guest(&[4 * PAGE]);
        let (memory, file) = (Rc::new(memory), file(&handle));
        file.write(Segments::from_bytes(&pattern(1, 2 * PAGE as usize)), 0, false).await.1.unwrap();
        let registration = handle.register_memory(&memory);
        let vectored = registration.outcome().vectored;
        let holes = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&files[0], holes, 0, 4 * PAGE).unwrap();
        let (one, n) = file.read(segments(&memory, &[(0, PAGE)]), 0).await;
        assert_eq!(n.unwrap(), PAGE as usize);
        assert!(
            bytes(&one).iter().all(|b| *b == 0),
            "the read reached the guest's new page, as if it were not registered"
        );
        let (two, n) = file.read(segments(&memory, &[(PAGE, 512), (3 * PAGE, 512)]), 0).await;
        assert_eq!((n.unwrap(), bytes(&two).iter().any(|b| *b != 0)), (1024, !vectored));
        drop(registration);
        let (one, _) = file.read(one, 0).await;
        assert!(
            bytes(&one) == pattern(1, PAGE as usize),
            "without registration the read reaches the guest's page"
        );
    };
    waits::block_on(&executor, all).unwrap();
}

/// RLIMIT_MEMLOCK is a limit of the process, and is one without CAP_IPC_LOCK only.
#[test]
fn operations_work_if_pages_cannot_be_pinned() {
    own_process::run(|| {
        let mut sets = rustix::thread::capabilities(None).unwrap();
        sets.effective.remove(rustix::thread::CapabilitySet::IPC_LOCK);
        rustix::thread::set_capabilities(None, sets).unwrap();
        // Some kernels count the ring itself as locked memory.
        let executor = Executor::new().unwrap();
        let limit =
            rustix::process::Rlimit { current: Some(700 * PAGE), maximum: Some(700 * PAGE) };
        rustix::process::setrlimit(rustix::process::Resource::Memlock, limit).unwrap();
        let handle = executor.handle().clone();
        let all = async move {
            // The region's second buffer exceeds the limit; then its first one is not registered
            // either.
            handle.buffers(|b, _| b.most = 512 * PAGE as usize);
            let memory = Rc::new(guest(&[1024 * PAGE]).0);
            let mut registration = handle.register_memory(&memory);
            let outcome = registration.outcome();
            assert_eq!(
                (outcome.regions, outcome.plain, outcome.refused),
                (0, 1, Some(Refusal::Pin(libc::ENOMEM)))
            );
            assert_eq!(
                outcome.to_string(),
                "guest memory is not registered with io_uring; requests work without it: cannot pin \
                 its pages: Cannot allocate memory (os error 12) (raise the limit of locked memory: \
                 ulimit -l)"
            );
            assert_eq!(free(&handle), usize::from(ENTRIES));
            assert_eq!(moves(&handle, &memory, &[(0, PAGE)]).await, [false; 2]);
            assert_eq!(moves(&handle, &memory, &[(0, PAGE), (2 * PAGE, PAGE)]).await, [false; 2]);
            registration.replace(&guest(&[512 * PAGE]).0);
            good(&registration, 1);
        };
        waits::block_on(&executor, all).unwrap();
    });
}

fn reserve(handle: &Handle, number: u16) -> Result<Vec<u16>, Refusal> {
    handle.buffers(|buffers, submitter| buffers.reserve(submitter, number))
}

#[test]
fn entries_are_reserved_all_or_none_and_can_be_returned() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle();
    let mut first = reserve(handle, 100).unwrap();
    assert_eq!((first.len(), free(handle)), (100, usize::from(ENTRIES) - 100));
    let second = reserve(handle, ENTRIES - 100).unwrap();
    assert_eq!(free(handle), 0);
    // No entry was reserved twice.
    first.extend(&second);
    first.sort();
    assert_eq!(first, (0..ENTRIES).collect::<Vec<_>>());
    assert_eq!(reserve(handle, 1), Err(Refusal::Full));
    handle.buffers(|buffers, _| buffers.give_back(second));
    assert_eq!(reserve(handle, ENTRIES - 99), Err(Refusal::Full));
    assert_eq!(free(handle), usize::from(ENTRIES) - 100, "a failed reservation takes nothing");
    assert_eq!(reserve(handle, 0), Ok(Vec::new()));
}

#[test]
fn a_region_that_does_not_fit_takes_no_entry() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle();
    let (memory, _files) = guest(&[PAGE * 3]);
    let mut reserved = reserve(handle, ENTRIES).unwrap();
    let two = reserved.split_off(usize::from(ENTRIES) - 2);
    handle.buffers(|buffers, _| {
        buffers.most = PAGE as usize;
        buffers.give_back(two);
    });
    // The region needs three buffers, and two entries are free.
    let mut registration = handle.register_memory(&memory);
    let outcome = registration.outcome();
    assert_eq!((outcome.regions, outcome.plain, outcome.refused), (0, 1, Some(Refusal::Full)));
    assert_eq!(free(handle), 2, "the two entries are free again");
    assert_eq!(handle.buffers(|buffers, _| buffers.found.len()), 0);
    // A later registration of the same region finds the entries that were freed.
    handle.buffers(|buffers, _| buffers.give_back(reserved.split_off(10)));
    registration.replace(&GuestMemory::default());
    registration.replace(&memory);
    good(&registration, 1);
    drop(registration);
    assert_eq!(free(handle), usize::from(ENTRIES) - 10);
}
