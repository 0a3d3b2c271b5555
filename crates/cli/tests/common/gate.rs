//! A way to a server that a test closes and opens: what waits for the server lasts until then.
//!
//! ```text
//!   disk of a server ──► gate, a thread of this process ──► NBD server of the image
//! ```
//!
//! A stopped server (SIGSTOP) would not do: a continuation of all processes would end the stop.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};

use super::{BLOCKYARD, Daemon, Folder};

/// The way to a server. It is open at first.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

/// Opens the gate again when it is dropped.
pub struct Closed<'a>(&'a Gate);

impl Gate {
    pub fn set(&self, is_closed: bool) {
        *self.0.0.lock().unwrap() = is_closed;
        self.0.1.notify_all();
    }

    /// Closes the gate until the returned value is dropped.
    pub fn close(&self) -> Closed<'_> {
        self.set(true);
        Closed(self)
    }

    /// Passes what `from` sends to `to`, while the gate is open.
    fn pass(&self, mut from: UnixStream, mut to: UnixStream) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            let is_closed = self.0.0.lock().unwrap();
            drop(self.0.1.wait_while(is_closed, |is_closed| *is_closed).unwrap());
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }

    /// Listens on `socket`, and connects each client with `server`.
    pub fn start(&self, socket: &Path, server: &Path) {
        let (listener, server) = (UnixListener::bind(socket).unwrap(), server.to_path_buf());
        let gate = self.clone();
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // The server may have ended.
                let Ok(server) = UnixStream::connect(&server) else { continue };
                let (gate, answering) = (gate.clone(), Gate::default());
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || gate.pass(client, server));
                std::thread::spawn(move || answering.pass(back.0, back.1));
            }
        });
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// An NBD server of an image, and the gate before it. Dropping it ends the server.
pub struct Gated {
    gate: Gate,
    socket: PathBuf,
    _server: Daemon,
}

impl Gated {
    /// Serves this image. The gate is open.
    pub fn start(folder: &Folder, image: &Path) -> Self {
        let [socket, real] = ["gated", "real"].map(|name| folder.join(name));
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg(image).args(["--name", "far", "--sandbox", "off", "--nbd"]);
        let mut server = Daemon::start(command.arg(format!("unix:{}", real.display())));
        server.wait_ready();
        let gate = Gate::default();
        gate.start(&socket, &real);
        Gated { gate, socket, _server: server }
    }

    /// Returns the name of the image for a disk.
    pub fn image(&self) -> String {
        format!("nbd+unix:///far?socket={}", self.socket.display())
    }

    /// Closes the gate until the returned value is dropped.
    pub fn close(&self) -> Closed<'_> {
        self.gate.close()
    }
}
