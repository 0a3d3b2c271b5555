//! An NBD client of the fuzzer's own making, at a whole server: a real socket, reactors, disks in
//! memory.
//!
//! Input: a byte that says how far a good client has brought the connection and what follows; then
//! either that client's raw bytes, or the options and requests that they describe. What must hold:
//! nothing panics; the connection comes to its end soon after the client's; what the server has
//! said is well-formed; each request is answered at most once.

#![no_main]

#[path = "nbd/bytes.rs"]
mod bytes;
#[path = "nbd/client.rs"]
mod client;
#[path = "nbd/judge.rs"]
mod judge;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_export::nbd::{Exported, Offer, Server, Settings};
use blockyard_export::{Listener, Reactors};
use blockyard_image::{CacheMode, ChainOptions, Format};
use client::Talk;
use libfuzzer_sys::fuzz_target;

struct World {
    socket: PathBuf,
    _offers: Vec<Offer>,
}

/// Two disks of 1 MiB: one to write to, in memory, and one to look at only, a file of data and
/// holes.
fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let folder =
            std::env::temp_dir().join(format!("blockyard-fuzz-nbd-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let socket = folder.join("s");
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        let server = Server::start(
            Listener::bind(&socket).unwrap(),
            "fuzz",
            Arc::new(Settings::default()),
            reactors,
        )
        .unwrap();
        let holes = folder.join("holes.raw");
        let file = File::create(&holes).unwrap();
        file.set_len(1 << 20).unwrap();
        (0..16u64).for_each(|n| {
            file.write_all_at(&[n as u8 + 1; 4096], (n << 16) + (n % 3 << 12)).unwrap()
        });
        let mut offers = Vec::new();
        for (name, read_only) in [("disk", false), ("ro", true)] {
            let (name, serial, cache) = (name.to_string(), "fuzz".into(), CacheMode::None);
            let options = DiskOptions {
                name: name.clone(),
                serial,
                read_only,
                cache,
                filters: Vec::new(),
                on_enospc: Default::default(),
            };
            let image = if read_only { holes.clone() } else { "ram:1M".into() };
            let image =
                ChainOptions { read_only, format: Some(Format::Raw), ..ChainOptions::new(image) };
            let disk = Arc::new(Disk::new(options, Source::open(&image).unwrap()));
            offers.push(server.offer(Exported::new(disk, &name, "a disk of the fuzzer's", None)));
        }
        World { socket, _offers: offers }
    })
}

fuzz_target!(|data: &[u8]| {
    let talk = Talk::of(data);
    let said = talk.hold(&world().socket);
    judge::judge(&talk, &said);
});
