//! What the client says, made of the fuzzer's bytes; and the saying of it.

use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_nbd::wire::{Headers, OptionHeader, Request, cmd, flag, opt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::bytes::Bytes;

/// The longest that a conversation may take, on a busy machine.
const SOON: Duration = Duration::from_secs(20);
/// Bytes of a write's data, at most: of longer ones the client goes in the middle.
const MOST_DATA: u64 = 32 << 10;

/// A whole conversation's client side.
#[derive(Default)]
pub struct Talk {
    pub bytes: Vec<u8>,
    /// Settled by a good client before the fuzzer's bytes begin; None: they begin with the
    /// handshake.
    pub headers: Option<Headers>,
    /// Requests by their cookies, if they are known, all of them, and well-formed up to the end.
    pub requests: Option<Vec<Request>>,
    /// The client goes without a word, and reads nothing of what there may still be.
    vanishes: bool,
}

impl Talk {
    pub fn of(data: &[u8]) -> Self {
        let mut bytes = Bytes(data);
        let mode = bytes.u8();
        let mut talk = Talk { vanishes: mode & 16 != 0, ..Talk::default() };
        talk.headers = match mode & 3 {
            0 => None,
            1 => Some(Headers::Simple),
            2 => Some(Headers::Structured),
            _ => Some(Headers::Extended),
        };
        let raw = mode & 8 != 0;
        if let Some(headers) = talk.headers {
            talk.settle(headers, mode & 4 != 0, mode & 32 != 0);
        } else if !raw {
            talk.bytes.extend(3u32.to_be_bytes());
        }
        match (raw, talk.headers) {
            (true, _) => talk.bytes.extend(bytes.0),
            (false, None) => talk.options(&mut bytes),
            (false, Some(headers)) => talk.requests(headers, &mut bytes),
        }
        talk
    }

    /// A good handshake.
    fn settle(&mut self, headers: Headers, contexts: bool, read_only: bool) {
        let name: &[u8] = if read_only { b"ro" } else { b"disk" };
        self.bytes.extend(3u32.to_be_bytes());
        match headers {
            Headers::Simple => {}
            Headers::Structured => self.option(opt::STRUCTURED_REPLY, &[]),
            Headers::Extended => self.option(opt::EXTENDED_HEADERS, &[]),
        }
        let named = [&(name.len() as u32).to_be_bytes(), name].concat();
        if contexts && headers != Headers::Simple {
            let query = |name: &[u8]| [&(name.len() as u32).to_be_bytes(), name].concat();
            let queries = [query(b"base:allocation"), query(b"qemu:allocation-depth")].concat();
            self.option(
                opt::SET_META_CONTEXT,
                &[&named[..], &2u32.to_be_bytes(), &queries].concat(),
            );
        }
        self.option(opt::GO, &[&named[..], &[0, 0]].concat());
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        OptionHeader { option, len: data.len() as u32 }.put(&mut self.bytes);
        self.bytes.extend(data);
    }

    /// Options of any kind, with data that begin as they should or do not.
    fn options(&mut self, bytes: &mut Bytes<'_>) {
        while !bytes.0.is_empty() {
            let (option, shape) = (u32::from(bytes.u8() % 14), bytes.u8());
            let mut data = Vec::new();
            if shape & 1 != 0 {
                let name: &[u8] = if shape & 2 != 0 { b"disk" } else { b"" };
                data.extend((name.len() as u32).to_be_bytes());
                data.extend(name);
            }
            if shape & 4 != 0 {
                data.extend(u32::from(shape >> 6).to_be_bytes());
            }
            let len = usize::from(bytes.u8());
            data.extend(bytes.some(len));
            // Now and then the header says something else than is there.
            let len = if shape & 0x38 == 0x38 {
                u32::from(u16::from_le_bytes(bytes.array())) << (shape >> 6 << 3)
            } else {
                data.len() as u32
            };
            OptionHeader { option, len }.put(&mut self.bytes);
            self.bytes.extend(data);
        }
    }

    fn requests(&mut self, headers: Headers, bytes: &mut Bytes<'_>) {
        let mut requests = Vec::new();
        let mut whole = true;
        while !bytes.0.is_empty() && whole {
            let (command, shape) = (u16::from(bytes.u8() % 10), bytes.u8());
            let mut flags = u16::from(bytes.u8()) & 0x3f;
            let offset = (u64::from(u16::from_le_bytes(bytes.array())) << (shape & 7))
                + u64::from(bytes.u8());
            let mut len = u64::from(u16::from_le_bytes(bytes.array())) << ((shape >> 3 & 3) << 2);
            if shape & 0xe0 == 0xe0 {
                len = u64::MAX >> (len & 63);
            }
            if headers != Headers::Extended {
                len &= u64::from(u32::MAX);
            }
            let mut data = Vec::new();
            if command == cmd::WRITE {
                if headers == Headers::Extended && shape & 0x80 == 0 {
                    flags |= flag::PAYLOAD_LEN;
                }
                data.resize(len.min(MOST_DATA) as usize, shape);
                whole = len <= MOST_DATA;
            } else if headers == Headers::Extended && flags & flag::PAYLOAD_LEN != 0 {
                // With any other command, too, what the flag announces comes behind the header.
                len &= 31;
                let payload = bytes.some(len as usize);
                data.extend(payload);
                data.resize(len as usize, 0);
            }
            let request = Request { flags, command, cookie: requests.len() as u64, offset, len };
            request.put(headers, &mut self.bytes);
            self.bytes.extend(data);
            requests.push(request);
        }
        if whole {
            self.requests = Some(requests);
        }
    }

    /// Says all of it, and takes what comes, to the end.
    pub fn hold(&self, socket: &Path) -> Vec<u8> {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_nonblocking(true).unwrap();
        let start = Instant::now();
        let (mut left, mut said, mut room) = (&self.bytes[..], Vec::new(), [0; 16384]);
        let mut open = true;
        loop {
            while open {
                // (The fuzzer's main function leaves SIGPIPE as it is, which would end it.)
                match send(&stream, left, SendFlags::NOSIGNAL) {
                    Ok(n) if n < left.len() => left = &left[n..],
                    Err(Errno::AGAIN) => break,
                    // All bytes are sent, or the server reads no more.
                    _ => {
                        if self.vanishes {
                            return Vec::new();
                        }
                        let _ = stream.shutdown(Shutdown::Write);
                        open = false;
                    }
                }
            }
            match stream.read(&mut room) {
                Ok(0) => return said,
                Ok(n) => said.extend(&room[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    let wanted = if open { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
                    let _ = poll(
                        &mut [PollFd::new(&stream, wanted)],
                        Some(&Timespec { tv_sec: 1, tv_nsec: 0 }),
                    );
                }
                Err(_) => return said,
            }
            assert!(
                start.elapsed() < SOON,
                "the connection does not end: {} bytes to say, {} heard",
                left.len(),
                said.len()
            );
        }
    }
}
