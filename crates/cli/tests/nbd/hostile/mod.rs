//! Broken or hostile clients. In all cases the daemon continues, its memory is bounded, another
//! client works, and SIGTERM ends it within bounded time while the sockets are open.

mod floods;
mod options;
mod requests;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use blockyard_nbd::wire::{
    self, Headers, OptionHeader, OptionReply, Request, SimpleReply, cmd, opt, rep,
};

use crate::common::{Daemon, Folder, SOON};
use crate::fixture::{MB, NbdServer};

/// Maximum memory of a daemon in kilobytes: 256 MiB of requests for each of two reactors, and its
/// own memory.
const MOST_MEMORY: u64 = 640 << 10;

/// A client that can send arbitrary bytes.
struct Raw {
    stream: UnixStream,
    headers: Headers,
}

impl Raw {
    /// Connects, and sends nothing.
    fn silent(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(SOON * 2)).unwrap();
        stream.set_write_timeout(Some(SOON * 2)).unwrap();
        Raw { stream, headers: Headers::Simple }
    }

    /// Connects, and reads the greeting. Options can follow.
    #[track_caller]
    fn greeted(socket: &Path) -> Self {
        let mut raw = Self::silent(socket);
        let greeting = raw.read(18);
        assert_eq!(
            (wire::u64_at(&greeting, 0), wire::u64_at(&greeting, 8)),
            (wire::GREETING, wire::OPTION)
        );
        raw.write(&3u32.to_be_bytes());
        raw
    }

    /// Enters the transmission phase of the export `disk`.
    #[track_caller]
    fn ready(socket: &Path, headers: Headers) -> Self {
        Self::ready_for("disk", socket, headers)
    }

    #[track_caller]
    fn ready_for(name: &str, socket: &Path, headers: Headers) -> Self {
        let mut raw = Self::greeted(socket);
        let option = match headers {
            Headers::Simple => None,
            Headers::Structured => Some(opt::STRUCTURED_REPLY),
            Headers::Extended => Some(opt::EXTENDED_HEADERS),
        };
        if let Some(option) = option {
            raw.option(option, &[]);
            assert_eq!(raw.reply().0.reply, rep::ACK);
        }
        raw.option(opt::GO, &go(name));
        loop {
            match raw.reply().0.reply {
                rep::ACK => break,
                rep::INFO => {}
                other => panic!("GO is answered with {other:#x}"),
            }
        }
        raw.headers = headers;
        raw
    }

    #[track_caller]
    fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    #[track_caller]
    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        self.option_of(option, data.len() as u32, data);
    }

    /// Sends an option with the length `len`, which may differ from that of `data`.
    fn option_of(&mut self, option: u32, len: u32, data: &[u8]) {
        let mut bytes = Vec::new();
        OptionHeader { option, len }.put(&mut bytes);
        bytes.extend(data);
        self.write(&bytes);
    }

    #[track_caller]
    fn reply(&mut self) -> (OptionReply, Vec<u8>) {
        let reply = OptionReply::parse(&self.read(OptionReply::BYTES)).unwrap();
        let data = self.read(reply.len as usize);
        (reply, data)
    }

    /// Sends the header of a request.
    #[track_caller]
    fn request(&mut self, command: u16, offset: u64, len: u64) {
        let flags = if command == cmd::WRITE && self.headers == Headers::Extended {
            wire::flag::PAYLOAD_LEN
        } else {
            0
        };
        self.flagged(command, flags, offset, len);
    }

    #[track_caller]
    fn flagged(&mut self, command: u16, flags: u16, offset: u64, len: u64) {
        let mut bytes = Vec::new();
        Request { flags, command, cookie: 7, offset, len }.put(self.headers, &mut bytes);
        self.write(&bytes);
    }

    /// Reads a simple reply without data. Returns its error.
    #[track_caller]
    fn error(&mut self) -> u32 {
        SimpleReply::parse(&self.read(SimpleReply::BYTES)).unwrap().error
    }

    /// Checks that the server has closed the connection (end or reset) without further data.
    #[track_caller]
    fn ends(mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert!(rest.is_empty(), "it said {} bytes more", rest.len()),
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::ConnectionReset, "{e}"),
        }
    }
}

/// Returns the data of an option NBD_OPT_GO or NBD_OPT_INFO.
fn go(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), &[0, 0]].concat()
}

/// A well-behaved client, connected before the bad ones.
struct Good(Raw, u64);

impl Good {
    fn new(socket: &Path) -> Self {
        Good(Raw::ready(socket, Headers::Simple), 0)
    }

    /// Writes and reads back. An answer that does not come fails by the time limit of [`Raw`].
    #[track_caller]
    fn works(&mut self) {
        self.1 += 1;
        let (offset, data) = ((self.1 % 64) << 14, vec![self.1 as u8; 4096]);
        self.0.request(cmd::WRITE, offset, 4096);
        self.0.write(&data);
        assert_eq!(self.0.error(), 0);
        self.0.request(cmd::READ, offset, 4096);
        assert_eq!(self.0.error(), 0);
        assert!(self.0.read(4096) == data, "read something else than was written");
    }

    #[track_caller]
    fn is_unharmed(&mut self) {
        for _ in 0..20 {
            self.works();
        }
    }
}

fn disk() -> (Folder, NbdServer) {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &[]);
    (folder, disk)
}

/// Checks that the daemon ends soon after SIGTERM with status 0, and that its log is short. `held`:
/// open connections.
#[track_caller]
fn ends<T>(disk: NbdServer, held: T) -> String {
    let memory = disk.daemon.kilobytes("VmHWM");
    assert!(memory < MOST_MEMORY, "it took {memory} kB");
    let log = stop(disk.daemon);
    drop(held);
    assert!(log.len() < 64 << 10, "{} bytes of log", log.len());
    assert!(!log.contains("panicked"), "{log}");
    log
}

#[track_caller]
fn stop(daemon: Daemon) -> String {
    // This limits the time.
    daemon.stop()
}
