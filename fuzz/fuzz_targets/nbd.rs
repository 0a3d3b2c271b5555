//! An NBD client of the fuzzer's own making, at a whole server: a real socket, reactors, disks in memory.
//!
//! Input: a byte that says how far a good client has brought the connection and what follows; then either that client's raw
//! bytes, or the options and requests that they describe. What must hold: nothing panics; the connection comes to its end
//! soon after the client's; what the server has said is well-formed; each request is answered at most once.

#![no_main]

#[path = "nbd/client.rs"]
mod client;
#[path = "nbd/judge.rs"]
mod judge;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_export::nbd::{Exported, Server, Settings};
use blockyard_export::{Listener, Reactors};
use blockyard_image::{CacheMode, ChainOptions};
use client::Talk;
use libfuzzer_sys::fuzz_target;

struct World {
    socket: PathBuf,
    _server: Server,
}

/// Two disks: one to write to, of 1 MiB, and one to look at only.
fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("blockyard-fuzz-nbd-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let socket = folder.join("s");
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        let server =
            Server::start(Listener::bind(&socket).unwrap(), "fuzz", Arc::new(Settings::default()), reactors).unwrap();
        for (name, read_only) in [("disk", false), ("ro", true)] {
            let (name, serial, cache) = (name.to_string(), "fuzz".into(), CacheMode::None);
            let options = DiskOptions { name: name.clone(), serial, read_only, cache, filters: Vec::new() };
            let disk = Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()));
            server.add(Exported::new(disk, &name, "a disk of the fuzzer's", None));
        }
        World { socket, _server: server }
    })
}

fuzz_target!(|data: &[u8]| {
    let talk = Talk::of(data);
    let said = talk.hold(&world().socket);
    judge::judge(&talk, &said);
});
