//! A client that connects again: its server is killed in a row, and no answered write is lost.

use std::path::Path;

use crate::common::{Folder, SOON, StateFolder, blockyard, tool, until};
use crate::durable::serve_again;
use crate::fixture::{start_in_background, uri};

/// `scripts/soak.d/server-kills` does 1000.
const KILLS: u64 = 50;
const SIZE: u64 = 16 << 20;

/// A kill comes when the client has had a random number of answers from the server. The client
/// verifies each block that it reads, and all blocks at the end. The overlay's base has zeroes.
#[test]
fn fifty_kills_lose_no_answered_write_of_a_client_that_connects_again() {
    let folder = Folder::new();
    folder.image("base", SIZE);
    let (image, socket, stop) = (folder.join("a.qcow2"), folder.join("s"), folder.join("stop"));
    let make = ["image", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base"];
    blockyard(make.into_iter().chain([image.to_str().unwrap()])).good();
    let state = StateFolder::new();
    let options = ["--state-folder", state.path().to_str().unwrap()];
    let mut server = serve_again(&image, &socket, &options);

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nbd/libnbd/reconnects.py");
    let (script, uri) = (script.to_str().unwrap(), uri(&socket, "disk"));
    let (size, stop_path) = (SIZE.to_string(), stop.to_str().unwrap());
    let mut client = start_in_background("python3", ["-B", script, &uri, &size, stop_path, "77"]);
    for kill in 0..=KILLS {
        until("the client has answers of this server", SOON, || {
            client.out().lines().count() as u64 > kill || !client.running()
        });
        assert!(client.running(), "after {kill} kills: {}", client.log());
        if kill < KILLS {
            server.kill();
            server = serve_again(&image, &socket, &options);
        }
    }
    std::fs::write(&stop, "").unwrap();
    // It reads all blocks.
    let (status, out) = (client.ended(SOON), client.out());
    let all = format!(" {KILLS} lost connections\n");
    assert!(out.ends_with(&all), "{status}: {out}{}", client.log());
    server.stop();
    tool("qemu-img", ["check", "-q", image.to_str().unwrap()]).good();
    assert_eq!(state.journals(), 0, "a journal is left");
}
