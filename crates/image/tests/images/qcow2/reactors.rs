//! One image on two reactors, each on its own thread, with clients on both and a table cache that
//! is far too small.
//!
//! Sectors are assigned to clients in stripes: many clients share clusters, but no two share a
//! sector. Each client knows the contents of its sectors and checks every read. At the end QEMU
//! reads and checks the image.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Barrier, Mutex};

use blockyard_image::{CacheMode, Chain, ChainOptions, Format, Image};
use blockyard_ring::{Executor, Segments, Signal};
use blockyard_storage::sim::Rng;

use super::peer::{Scratch, qemu_img};
use crate::compared::note_discard;
use crate::tools;

const SECTOR: u64 = 512;
const SIZE: u64 = 6 << 20;
const REACTORS: u64 = 2;
const CLIENTS: u64 = 8;
/// Number of sectors in a stripe, in the first and in the second half of the disk.
const STRIPES: [u64; 2] = [3, 205];
/// Number of steps of each client.
const STEPS: u64 = 300;

/// Returns the client that a sector belongs to.
fn owner(sector: u64) -> u64 {
    let coarse = sector >= SIZE / SECTOR / 2;
    sector / STRIPES[usize::from(coarse)] % (REACTORS * CLIENTS)
}

struct Client {
    number: u64,
    image: Rc<Image>,
    /// The expected disk; valid only in the client's own sectors.
    disk: Vec<u8>,
    rng: Rng,
}

impl Client {
    /// Returns a range of the client's own sectors.
    fn range(&mut self) -> (usize, usize) {
        let sectors = SIZE / SECTOR;
        let mut start = self.rng.below(sectors);
        while owner(start) != self.number {
            start = (start + 1) % sectors;
        }
        let most = if self.rng.one_in(2) { 8 } else { 205 };
        let longest =
            (start..sectors).take(most).take_while(|&s| owner(s) == self.number).count() as u64;
        ((start * SECTOR) as usize, (self.rng.between(1, longest) * SECTOR) as usize)
    }

    async fn read(&self, (at, len): (usize, usize)) -> Vec<u8> {
        let (segments, result) = self.image.read(Segments::buffer(len), at as u64).await;
        result.unwrap();
        let mut bytes = vec![0; len];
        segments.copy_out(0, &mut bytes);
        bytes
    }

    async fn step(&mut self) {
        let range = self.range();
        let (at, len) = range;
        let mine = at..at + len;
        match self.rng.below(16) {
            0 => {
                self.image.write_zeroes(at as u64, len as u64, self.rng.one_in(2)).await.unwrap();
                self.disk[mine].fill(0);
            }
            1 => {
                self.image.discard(at as u64, len as u64).await.unwrap();
                let now = self.read(range).await;
                note_discard(&now, &mut self.disk[mine]);
            }
            2 => self.image.flush().await.unwrap(),
            3 => self.image.populate(at as u64, len as u64).await.unwrap(),
            4..9 => self.check(range).await,
            _ => {
                let mut bytes = vec![0; len];
                self.rng.fill(&mut bytes);
                self.image.write(Segments::from_bytes(&bytes), at as u64).await.1.unwrap();
                self.disk[mine].copy_from_slice(&bytes);
            }
        }
    }

    async fn check(&self, range: (usize, usize)) {
        let found = self.read(range).await;
        let expected = &self.disk[range.0..][..range.1];
        if let Some(wrong) = found.chunks(512).zip(expected.chunks(512)).position(|(a, b)| a != b) {
            panic!(
                "client {}: sector {} differs from what was written",
                self.number,
                range.0 / 512 + wrong
            );
        }
    }
}

/// Runs one reactor's clients; returns what each expects of the disk.
fn reactor(chain: &Chain, number: u64, seed: u64, disk: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let image = Rc::new(chain.image(&handle).unwrap());
    let (left, found) = (Rc::new(Cell::new(CLIENTS)), Rc::new(std::cell::RefCell::new(Vec::new())));
    let done = Rc::new(Signal::new(&handle));
    for client in number * CLIENTS..(number + 1) * CLIENTS {
        let rng = Rng::new(seed ^ client);
        let mut client = Client { number: client, image: image.clone(), disk: disk.to_vec(), rng };
        let (left, found, done) = (left.clone(), found.clone(), done.clone());
        handle.spawn(async move {
            for _ in 0..STEPS {
                client.step().await;
            }
            found.borrow_mut().push((client.number, client.disk));
            left.set(left.get() - 1);
            done.ring();
        });
    }
    let all = found.clone();
    let end = async move {
        while left.get() > 0 {
            done.wait().await;
        }
    };
    tools::block_on(&executor, end);
    all.take()
}

/// Runs all clients and closes the image; returns the expected contents.
fn run(options: &ChainOptions, seed: u64, mut disk: Vec<u8>) -> Vec<u8> {
    let chain = Arc::new(Chain::open(options).unwrap());
    let (start, found) = (Barrier::new(REACTORS as usize), Mutex::new(Vec::new()));
    std::thread::scope(|threads| {
        for number in 0..REACTORS {
            let (chain, start, found, disk) = (&chain, &start, &found, &disk);
            threads.spawn(move || {
                start.wait();
                let clients = reactor(chain, number, seed, disk);
                found.lock().unwrap().extend(clients);
            });
        }
    });
    for (number, client) in found.into_inner().unwrap() {
        for sector in (0..SIZE / SECTOR).filter(|&s| owner(s) == number) {
            let at = (sector * SECTOR) as usize;
            disk[at..at + 512].copy_from_slice(&client[at..at + 512]);
        }
    }
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    tools::block_on(&executor, async move { chain.image(&handle).unwrap().close().await }).unwrap();
    disk
}

#[test]
fn clients_on_two_reactors_read_what_they_wrote() {
    let images = [
        ("cluster_size=512", true),
        ("cluster_size=512,refcount_bits=64", false),
        ("cluster_size=4k,compat=0.10", true),
        ("cluster_size=16k,extended_l2=on", true),
        ("cluster_size=64k,extended_l2=on", false),
        ("cluster_size=64k", true),
    ];
    for (seed, (options, overlay)) in (1..).zip(images) {
        println!("{options}, over a base: {overlay}");
        let scratch = Scratch::new("reactors");
        let (top, expected) = (scratch.name("a.qcow2"), scratch.name("expected.raw"));
        let mut rng = Rng::new(seed);
        let mut disk = vec![0; SIZE as usize];
        let size = SIZE.to_string();
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", options];
        if overlay {
            disk.chunks_mut(60_000).step_by(2).for_each(|piece| piece.fill(rng.next_u64() as u8));
            std::fs::write(scratch.path("base.raw"), &disk).unwrap();
            create.extend(["-F", "raw", "-b", "base.raw"]);
        }
        create.extend([top, &size]);
        qemu_img(&create);
        let options = ChainOptions {
            format: Some(Format::Qcow2),
            l2_cache: Some(0),
            cache: if rng.one_in(2) { CacheMode::None } else { CacheMode::Writeback },
            copy_on_read: rng.one_in(3),
            ..ChainOptions::new(scratch.path("a.qcow2"))
        };
        let disk = run(&options, seed, disk);
        std::fs::write(scratch.path("expected.raw"), &disk).unwrap();
        qemu_img(&["check", "-f", "qcow2", top]);
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", top, expected]);
    }
}
