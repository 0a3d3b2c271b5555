//! A small NBD server that follows a script, which may give wrong answers. It offers simple or
//! structured replies, and serves one connection after the other until it is dropped.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use blockyard_nbd::wire::{
    self, Chunk, Headers, OptionReply, Request, SimpleReply, chunk, cmd, opt, rep,
};

pub const SIZE: u64 = 1 << 20;
/// ID of the meta context base:allocation.
const CONTEXT: u32 = 9;
const FLUSH_TRIM_ZEROES: u16 = 1 | 1 << 2 | 1 << 5 | 1 << 6;

/// Script of a server: returns the answer's bytes, or None to close the connection.
pub type Script = Box<dyn FnMut(usize, &Request, &mut Disk) -> Option<Vec<u8>> + Send>;

/// The disk that the server offers.
pub struct Disk {
    pub headers: Headers,
    pub size: u64,
    pub flags: u16,
    pub bytes: Vec<u8>,
    pub written: Vec<u8>,
    /// Minimum block size that the server announces, if it is not 0.
    pub minimum: u32,
    /// Makes the server answer the next write from its header. Then it reads nothing until the
    /// sender is dropped.
    pub hasty: Option<Receiver<()>>,
}

/// Ends idle connections when a test says so. Clones are the same.
#[derive(Clone, Default)]
pub struct Idle(Arc<Mutex<IdleState>>);

#[derive(Default)]
struct IdleState {
    /// Whether each connection ends after its handshake.
    ends: bool,
    /// The connection that is served.
    served: Option<UnixStream>,
    /// Number of connections that this has ended, and that the client has closed too.
    ended: usize,
}

impl Idle {
    /// Ends the connection, and from now on each further one after its handshake.
    pub fn end(&self) {
        let mut state = self.0.lock().unwrap();
        state.ends = true;
        if let Some(stream) = &state.served {
            stream.shutdown(Shutdown::Write).unwrap();
        }
    }

    /// Serves connections again.
    pub fn serve(&self) {
        self.0.lock().unwrap().ends = false;
    }

    /// Returns how many connections have ended so far, on both sides.
    pub fn ended(&self) -> usize {
        self.0.lock().unwrap().ended
    }

    fn begin(&self, stream: &UnixStream) {
        let mut state = self.0.lock().unwrap();
        if state.ends {
            let _ = stream.shutdown(Shutdown::Write);
        }
        state.served = stream.try_clone().ok();
    }

    fn is_over(&self) {
        let mut state = self.0.lock().unwrap();
        let was_served = state.served.take().is_some();
        state.ended += usize::from(state.ends && was_served);
    }
}

pub struct Server {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
    /// Number of connections that the server has served.
    pub connections: Arc<AtomicUsize>,
    /// Number of connections that the client has made, also while the server serves another one.
    pub attempts: Arc<AtomicUsize>,
    pub idle: Idle,
    ended: Arc<Mutex<bool>>,
}

impl Server {
    /// Starts the server. `setup` may change the disk before each connection.
    pub fn start(
        headers: Headers,
        mut setup: impl FnMut(usize, &mut Disk) + Send + 'static,
        mut script: Script,
    ) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("blockyard-nbd-{}-{number}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let ended = Arc::new(Mutex::new(false));
        let idle = Idle::default();
        let attempts = Arc::new(AtomicUsize::new(0));
        let (count, stop, ends) = (connections.clone(), ended.clone(), idle.clone());
        let (accepted, streams) = channel();
        let (attempted, is_over) = (attempts.clone(), ended.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                attempted.fetch_add(1, Ordering::SeqCst);
                let last = *is_over.lock().unwrap();
                if accepted.send(stream).is_err() || last {
                    return;
                }
            }
        });
        let bytes = (0..SIZE).map(|at| (at / 512 % 251) as u8).collect();
        let thread = std::thread::spawn(move || {
            let written = Vec::new();
            let (size, flags) = (SIZE, FLUSH_TRIM_ZEROES);
            let mut disk = Disk { headers, size, flags, bytes, written, minimum: 0, hasty: None };
            for stream in streams {
                if *stop.lock().unwrap() {
                    return;
                }
                let number = count.fetch_add(1, Ordering::SeqCst) + 1;
                setup(number, &mut disk);
                // The client may close the connection at any point.
                let _ = serve(stream.unwrap(), number, &mut disk, &mut script, &ends);
                ends.is_over();
            }
        });
        Server { path, thread: Some(thread), connections, attempts, idle, ended }
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///x?socket={}", self.path.display())
    }

    /// Connects to a server with this path, and waits until it greets. It has accepted all earlier
    /// connections then.
    pub fn touch(path: &Path) {
        UnixStream::connect(path).unwrap().read_exact(&mut [0; 18]).unwrap();
    }

    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        *self.ended.lock().unwrap() = true;
        let _ = UnixStream::connect(&self.path);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn serve(
    mut stream: UnixStream,
    number: usize,
    disk: &mut Disk,
    script: &mut Script,
    idle: &Idle,
) -> std::io::Result<()> {
    let mut hello = wire::GREETING.to_be_bytes().to_vec();
    hello.extend(wire::OPTION.to_be_bytes());
    hello.extend(3u16.to_be_bytes());
    stream.write_all(&hello)?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let header = wire::OptionHeader::parse(&header).unwrap();
        let mut data = vec![0; header.len as usize];
        stream.read_exact(&mut data)?;
        let mut out = Vec::new();
        let mut answer = |reply, data: &[u8]| {
            OptionReply { option: header.option, reply, len: data.len() as u32 }.put(&mut out);
            out.extend(data);
        };
        match (header.option, disk.headers) {
            (opt::EXTENDED_HEADERS, Headers::Extended)
            | (opt::STRUCTURED_REPLY, Headers::Structured) => answer(rep::ACK, b""),
            (opt::SET_META_CONTEXT, _) => {
                let mut context = CONTEXT.to_be_bytes().to_vec();
                context.extend(b"base:allocation");
                answer(rep::META_CONTEXT, &context);
                answer(rep::ACK, b"");
            }
            (opt::GO, _) => {
                let mut info = 0u16.to_be_bytes().to_vec();
                info.extend(disk.size.to_be_bytes());
                info.extend(disk.flags.to_be_bytes());
                answer(rep::INFO, &info);
                if disk.minimum > 0 {
                    let mut blocks = wire::info::BLOCK_SIZE.to_be_bytes().to_vec();
                    for size in [disk.minimum, 4096, 32 << 20] {
                        blocks.extend(size.to_be_bytes());
                    }
                    answer(rep::INFO, &blocks);
                }
                answer(rep::ACK, b"");
            }
            _ => answer(rep::ERR_UNSUP, b""),
        }
        stream.write_all(&out)?;
        if header.option == opt::GO {
            break;
        }
    }
    idle.begin(&stream);
    loop {
        let mut header = vec![0; disk.headers.request_bytes()];
        stream.read_exact(&mut header)?;
        let request = Request::parse(disk.headers, &header).unwrap();
        if request.command == cmd::DISC {
            return Ok(());
        }
        if request.command == cmd::WRITE
            && let Some(released) = disk.hasty.take()
        {
            stream.write_all(&done(&request, disk))?;
            let _ = released.recv();
            return Ok(());
        }
        disk.written
            .resize(if request.command == cmd::WRITE { request.len as usize } else { 0 }, 0);
        stream.read_exact(&mut disk.written)?;
        match script(number, &request, disk) {
            Some(bytes) => stream.write_all(&bytes)?,
            None => return Ok(()),
        }
    }
}

/// Answers a request correctly.
pub fn good(request: &Request, disk: &mut Disk) -> Vec<u8> {
    let range = request.offset as usize..(request.offset + request.len) as usize;
    match request.command {
        cmd::READ => data(request, disk, request.offset, &disk.bytes[range], chunk::DONE),
        cmd::WRITE => {
            let written = std::mem::take(&mut disk.written);
            disk.bytes[range].copy_from_slice(&written);
            done(request, disk)
        }
        _ => done(request, disk),
    }
}

pub fn done(request: &Request, disk: &Disk) -> Vec<u8> {
    match disk.headers {
        Headers::Simple => simple(0, request.cookie),
        _ => piece(request, disk, chunk::NONE, chunk::DONE, &[]),
    }
}

pub fn simple(error: u32, cookie: u64) -> Vec<u8> {
    let mut out = Vec::new();
    SimpleReply { error, cookie }.put(&mut out);
    out
}

/// Returns a chunk with this payload.
pub fn piece(request: &Request, disk: &Disk, kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let Request { cookie, offset, .. } = *request;
    Chunk { flags, kind, cookie, offset, len: payload.len() as u64 }.put(disk.headers, &mut out);
    out.extend(payload);
    out
}

/// Returns data with a claimed `offset`.
pub fn data(request: &Request, disk: &Disk, offset: u64, bytes: &[u8], flags: u16) -> Vec<u8> {
    if disk.headers == Headers::Simple {
        let mut out = simple(0, request.cookie);
        out.extend(bytes);
        return out;
    }
    let mut payload = offset.to_be_bytes().to_vec();
    payload.extend(bytes);
    piece(request, disk, chunk::OFFSET_DATA, flags, &payload)
}

/// Returns a block status of extents: the length and the state of each one.
pub fn status(request: &Request, disk: &Disk, extents: &[(u32, u32)]) -> Vec<u8> {
    let mut payload = CONTEXT.to_be_bytes().to_vec();
    for (len, state) in extents {
        payload.extend(len.to_be_bytes());
        payload.extend(state.to_be_bytes());
    }
    piece(request, disk, chunk::BLOCK_STATUS, chunk::DONE, &payload)
}
