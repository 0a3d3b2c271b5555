//! Compressed clusters: threads decompress large ones, and the reactor goes on.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Waker};

use blockyard_image::{Chain, ChainOptions, Image};
use blockyard_ring::{COMPUTING_THREADS, Executor, Segments};

use super::peer::{Scratch, qemu_img};
use crate::tools;

const CLUSTER: u64 = 2 << 20;

async fn read(image: &Image, offset: u64) -> Vec<u8> {
    let (segments, result) = image.read(Segments::buffer(512), offset).await;
    result.unwrap();
    let mut bytes = vec![0; 512];
    segments.copy_out(0, &mut bytes);
    bytes
}

/// All threads are busy until the test opens a gate, so no cluster is decompressed until then.
#[test]
fn other_requests_go_on_while_large_clusters_wait_for_a_thread() {
    let scratch = Scratch::new("compressed");
    let contents: Vec<u8> = (0..2 * CLUSTER).map(|at| (at / 1000) as u8).collect();
    std::fs::write(scratch.path("a.raw"), &contents).unwrap();
    let (raw, packed) = (scratch.name("a.raw"), scratch.name("a.qcow2"));
    qemu_img(&["convert", "-c", "-O", "qcow2", "-o", "cluster_size=2M", "-f", "raw", raw, packed]);
    let open = |path| Chain::open(&ChainOptions { read_only: true, ..ChainOptions::new(path) });
    let (packed, raw) = (open(packed).unwrap(), open(raw).unwrap());
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let test = async move {
        let image = Rc::new(packed.image(&handle).unwrap());
        let neighbour = raw.image(&handle).unwrap();
        let (open, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let noop = &mut Context::from_waker(Waker::noop());
        let busy: Vec<_> = (0..COMPUTING_THREADS)
            .map(|_| {
                let gate = gate.clone();
                let wait = move || gate.lock().unwrap().recv().unwrap();
                let mut busy = Box::pin(handle.compute(usize::MAX, wait));
                assert!(busy.as_mut().poll(noop).is_pending());
                busy
            })
            .collect();
        let found = Rc::new(RefCell::new(Vec::new()));
        let (reader, answer) = (image.clone(), found.clone());
        handle.spawn(async move { *answer.borrow_mut() = read(&reader, CLUSTER + 512).await });
        let mut dropped = Box::pin(read(&image, 512));
        for at in 0..200 {
            assert!(dropped.as_mut().poll(noop).is_pending(), "after {at} reads of the neighbour");
            assert_eq!(read(&neighbour, at * 512).await, contents[at as usize * 512..][..512]);
        }
        assert!(found.borrow().is_empty(), "the reactor decompresses a large cluster itself");
        drop(dropped);
        (0..COMPUTING_THREADS).for_each(|_| open.send(()).unwrap());
        for one in busy {
            one.await.unwrap();
        }
        while found.borrow().is_empty() {
            handle.yield_now().await;
        }
        assert_eq!(*found.borrow(), contents[CLUSTER as usize + 512..][..512]);
        assert_eq!(read(&image, 512).await, contents[512..1024]);
    };
    tools::block_on(&executor, test);
}
