//! An NBD server of the fuzzer's own making, at the client for images on NBD servers: a real
//! socket, its whole negotiation, and replies of all kinds.
//!
//! Input: a byte that says how far a good server has brought the connection, and with which
//! headers; then either that server's raw bytes, or what it is to answer to each request. What must
//! hold: nothing panics, and each request ends soon, with data that the server has sent or with an
//! error.

#![no_main]

#[path = "nbd/bytes.rs"]
mod bytes;
#[path = "remote/server.rs"]
mod server;

use std::time::{Duration, Instant};

use blockyard_image::{CacheMode, ImageFile, OpenOptions, Raw, nbd};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::Storage;
use libfuzzer_sys::fuzz_target;
use server::{SIZE, Script, Server};

/// The longest that all requests may take together, on a busy machine.
const SOON: Duration = Duration::from_secs(20);
const PATIENCE: nbd::Options =
    nbd::Options { reconnect: Duration::from_millis(1), timeout: Duration::from_millis(25) };

fuzz_target!(|data: &[u8]| {
    let script = Script::of(data);
    let server = Server::start(script.clone());
    let options = OpenOptions {
        nbd: PATIENCE,
        ..OpenOptions::new(server.uri(), script.read_only, CacheMode::None)
    };
    let start = Instant::now();
    // A server that does not negotiate is an error, and that is all.
    if let Ok(file) = ImageFile::open(&options) {
        let executor = Executor::new().unwrap();
        let raw = Raw::open(&file, executor.handle()).unwrap();
        let lies = script.lies();
        executor
            .block_on(async move {
                for (offset, len) in [(0, 4096), (512, 65536), (SIZE - 4096, 4096)] {
                    let (segments, result) =
                        raw.read(Segments::from_bytes(&vec![server::NEVER; len]), offset).await;
                    if result.is_ok() {
                        // Every byte has come, or is a hole: none is what was there before. (The
                        // server never sends it.)
                        let mut bytes = vec![0; len];
                        segments.copy_out(0, &mut bytes);
                        assert!(
                            lies || !bytes.contains(&server::NEVER),
                            "bytes at {offset}+{len} never came"
                        );
                    }
                    let _ = raw.status(offset, 1 << 19).await;
                }
                let _ = raw.write(Segments::from_bytes(&[7; 4096]), 8192, true).await;
                let _ = raw.write_zeroes(16384, 8192, true).await;
                let _ = raw.write_zeroes_fast(0, SIZE, false).await;
                let _ = raw.discard(65536, 65536).await;
                let _ = raw.flush().await;
                let _ = raw.storage().next_data(0).await;
            })
            .unwrap();
    }
    assert!(start.elapsed() < SOON, "requests took {:?}", start.elapsed());
});
