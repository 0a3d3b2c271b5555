//! What the server says, made of the fuzzer's bytes.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_nbd::wire::{
    self, Chunk, Headers, OptionHeader, OptionReply, Request, SimpleReply, chunk, cmd, export,
    info, opt, rep,
};

use crate::bytes::Bytes;

/// Of the export.
pub const SIZE: u64 = 1 << 20;
/// The byte that no answer has.
pub const NEVER: u8 = 0xaa;
/// Connections that are answered; later ones are closed.
const CONNECTIONS: usize = 6;

#[derive(Clone)]
pub struct Script {
    /// Settled by a good server before the fuzzer's bytes begin; None: they begin with the
    /// greeting.
    headers: Option<Headers>,
    /// The bytes are said as they are, to whatever the client says.
    raw: bool,
    contexts: bool,
    pub read_only: bool,
    bytes: Arc<[u8]>,
}

impl Script {
    pub fn of(data: &[u8]) -> Self {
        let mode = data.first().copied().unwrap_or(0);
        let headers = match mode & 3 {
            0 => None,
            1 => Some(Headers::Simple),
            2 => Some(Headers::Structured),
            _ => Some(Headers::Extended),
        };
        let (raw, contexts, read_only) = (mode & 8 != 0, mode & 4 != 0, mode & 16 != 0);
        Script {
            headers,
            raw,
            contexts,
            read_only,
            bytes: data.get(1..).unwrap_or_default().into(),
        }
    }

    /// It may say any byte as data.
    pub fn lies(&self) -> bool {
        self.raw || self.headers.is_none()
    }
}

pub struct Server {
    path: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(script: Script) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("blockyard-fuzz-{}-{number}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let stop = ended.clone();
        let thread = std::thread::spawn(move || {
            let mut bytes = Bytes(&script.bytes);
            for (number, stream) in listener.incoming().enumerate() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                if number < CONNECTIONS {
                    // The client may go in the middle of anything.
                    let _ = talk(stream.unwrap(), &script, &mut bytes);
                }
            }
        });
        Server { path, ended, thread: Some(thread) }
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///x?socket={}", self.path.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.path);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn talk(mut stream: UnixStream, script: &Script, bytes: &mut Bytes<'_>) -> std::io::Result<()> {
    // Longer than the client's patience: it is the one to go.
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let Some(headers) = script.headers else {
        stream.write_all(bytes.0)?;
        bytes.0 = &[];
        std::io::copy(&mut stream, &mut std::io::sink())?;
        return Ok(());
    };
    settle(&mut stream, headers, script)?;
    if script.raw {
        stream.write_all(bytes.0)?;
        bytes.0 = &[];
    }
    loop {
        let mut header = vec![0; headers.request_bytes()];
        stream.read_exact(&mut header)?;
        let request = Request::parse(headers, &header).expect("the client's request");
        if request.command == cmd::DISC {
            return Ok(());
        }
        if request.command == cmd::WRITE {
            stream.read_exact(&mut vec![0; request.len as usize])?;
        }
        if script.raw {
            continue;
        }
        let answer = answer(headers, &request, bytes);
        match answer {
            Some(answer) => stream.write_all(&answer)?,
            None => return Ok(()),
        }
    }
}

/// A good negotiation.
fn settle(stream: &mut UnixStream, headers: Headers, script: &Script) -> std::io::Result<()> {
    let mut hello = wire::GREETING.to_be_bytes().to_vec();
    hello.extend(wire::OPTION.to_be_bytes());
    hello.extend(3u16.to_be_bytes());
    stream.write_all(&hello)?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; OptionHeader::BYTES];
        stream.read_exact(&mut header)?;
        let header = OptionHeader::parse(&header).expect("the client's option");
        stream.read_exact(&mut vec![0; header.len as usize])?;
        let mut out = Vec::new();
        let mut say = |reply, data: &[u8]| {
            OptionReply { option: header.option, reply, len: data.len() as u32 }.put(&mut out);
            out.extend(data);
        };
        match (header.option, headers) {
            (opt::EXTENDED_HEADERS, Headers::Extended)
            | (opt::STRUCTURED_REPLY, Headers::Structured) => {
                say(rep::ACK, b"");
            }
            (opt::SET_META_CONTEXT, _) if script.contexts => {
                say(rep::META_CONTEXT, &[&1u32.to_be_bytes()[..], b"base:allocation"].concat());
                say(rep::ACK, b"");
            }
            (opt::GO, _) => {
                let flags =
                    export::HAS_FLAGS | export::SEND_FLUSH | export::SEND_FUA | export::SEND_TRIM;
                let flags = flags
                    | export::SEND_WRITE_ZEROES
                    | export::SEND_FAST_ZERO
                    | export::CAN_MULTI_CONN;
                let facts =
                    [&info::EXPORT.to_be_bytes()[..], &SIZE.to_be_bytes(), &flags.to_be_bytes()]
                        .concat();
                say(rep::INFO, &facts);
                say(rep::ACK, b"");
            }
            _ => say(rep::ERR_UNSUP, b""),
        }
        stream.write_all(&out)?;
        if header.option == opt::GO {
            return Ok(());
        }
    }
}

/// An answer whose parts the fuzzer chooses: mostly of the right kind, with a number here and there
/// that it chooses, too. None: the server goes.
fn answer(headers: Headers, request: &Request, bytes: &mut Bytes<'_>) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let cookie = request.cookie;
    let shape = bytes.u8();
    if shape == 0xff {
        return None;
    }
    if headers == Headers::Simple || shape & 7 == 7 {
        let error = if shape & 8 != 0 { u32::from_le_bytes(bytes.array()) } else { 0 };
        let cookie = if shape & 0x30 == 0x30 {
            cookie ^ u64::from(u32::from_le_bytes(bytes.array()))
        } else {
            cookie
        };
        SimpleReply { error, cookie }.put(&mut out);
        if error == 0 && request.command == cmd::READ && shape & 0x40 == 0 {
            out.resize(out.len() + request.len as usize, 1);
        }
        return Some(out);
    }
    // Chunks, as many as it likes; the good ones of a read make a whole of it.
    let mut at = 0;
    for n in 0..=shape & 7 {
        let last = n == shape & 7;
        let (kind, payload) = piece(headers, request, &mut at, last, bytes);
        let flags = if last { chunk::DONE } else { u16::from(shape & 0x80 != 0) };
        let len = if shape & 0x78 == 0x78 {
            u32::from_le_bytes(bytes.array()).into()
        } else {
            payload.len() as u64
        };
        let offset = if shape & 0x38 == 0x38 {
            u32::from_le_bytes(bytes.array()).into()
        } else {
            request.offset
        };
        Chunk { flags, kind, cookie, offset, len }.put(headers, &mut out);
        out.extend(payload);
    }
    out.iter_mut().filter(|byte| **byte == NEVER).for_each(|byte| *byte = 0);
    Some(out)
}

/// A chunk's kind and payload. `at`: what of a read was answered so far.
fn piece(
    headers: Headers,
    request: &Request,
    at: &mut u64,
    last: bool,
    bytes: &mut Bytes<'_>,
) -> (u16, Vec<u8>) {
    let (kind, left) = (bytes.u8(), request.len - *at);
    let some = |unit: u64| if last { left } else { left.min(u64::from(kind >> 3) * unit + 1) };
    let mut payload = Vec::new();
    let said = match (request.command, kind & 7) {
        (cmd::READ, 0..=3) if left > 0 => {
            let here = request.offset + *at;
            let offset = if kind == 0xfb { u32::from_le_bytes(bytes.array()).into() } else { here };
            payload.extend(offset.to_be_bytes());
            payload.resize(8 + some(512) as usize, 1);
            *at += some(512);
            chunk::OFFSET_DATA
        }
        (cmd::READ, 4..=5) if left > 0 => {
            let len =
                if kind == 0xfc { u32::from_le_bytes(bytes.array()) } else { some(4096) as u32 };
            payload.extend((request.offset + *at).to_be_bytes());
            payload.extend(len.to_be_bytes());
            *at += some(4096);
            chunk::OFFSET_HOLE
        }
        (cmd::BLOCK_STATUS, 0..=5) => return status(headers, kind, bytes),
        (_, 6) => {
            let len = usize::from(bytes.u8());
            payload.extend(u32::from(kind >> 4).to_be_bytes());
            let message = bytes.some(len).to_vec();
            let len =
                if kind & 16 != 0 { u16::from(bytes.u8()) << 8 } else { message.len() as u16 };
            payload.extend(len.to_be_bytes());
            payload.extend(message);
            if kind & 8 != 0 { chunk::ERROR_OFFSET } else { chunk::ERROR }
        }
        (_, 7) => {
            // Any kind, with anything behind it.
            let said = u16::from_be_bytes(bytes.array());
            let len = usize::from(bytes.u8());
            payload.extend(bytes.some(len));
            said
        }
        _ => chunk::NONE,
    };
    (said, payload)
}

fn status(headers: Headers, kind: u8, bytes: &mut Bytes<'_>) -> (u16, Vec<u8>) {
    let extended = headers == Headers::Extended && kind & 1 == 0;
    let context = if kind & 0xf0 == 0xf0 { u32::from_le_bytes(bytes.array()) } else { 1 };
    let many = u32::from(kind >> 3 & 7) + 1;
    let mut payload = Vec::from(context.to_be_bytes());
    if extended {
        payload.extend(many.to_be_bytes());
    }
    for _ in 0..many {
        let (len, flags) = (u32::from_le_bytes(bytes.array()), u32::from(bytes.u8()));
        if extended {
            payload.extend((u64::from(len) << (flags & 8)).to_be_bytes());
            payload.extend(u64::from(flags).to_be_bytes());
        } else {
            payload.extend(len.to_be_bytes());
            payload.extend(flags.to_be_bytes());
        }
    }
    (if extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS }, payload)
}
