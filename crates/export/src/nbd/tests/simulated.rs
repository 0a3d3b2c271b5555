//! The transmission phase on the simulated disk and clock, over a socket pair. The client is a task
//! of the same executor. It sends and receives its bytes in pieces, and has many requests in
//! flight. The disk completes them in seeded order.
//!
//! What must hold: each request is answered once. Reads return what the writes have left. After a
//! power cut the disk holds what flushes, FUA and the end of the connection have promised. A
//! connection that has ended holds no memory.

use std::collections::BTreeMap;

use blockyard_nbd::wire::{Chunk, SimpleReply, chunk, errno, flag};
use blockyard_ring::Executor;
use blockyard_storage::sim::{
    Fault, FlushToken, OpKind as SimKind, Oracle, ReadToken, Rng, SimConfig, SimDisk, SimImage,
    WriteToken, pattern,
};

use super::super::connection::Connection;
use super::connected::{Connected, connect, simulated, until};
use super::*;

const SEEDS: u64 = 18;
const SIZE: u64 = 1 << 20;
const SECTOR: u64 = 512;
const REQUESTS: usize = 250;
const MOST_IN_FLIGHT: usize = 40;

/// A request that the client has sent.
enum Sent {
    Write(WriteToken, bool),
    Read(u64, u64, ReadToken),
    Flush(FlushToken),
    Cache,
    Status,
}

/// How the load ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    /// The power fails while requests are in flight.
    PowerCut,
    /// The client announces its end after the last answer.
    Announced,
    /// The client closes its socket while requests are in flight.
    Closed,
}

struct Load {
    handle: Handle,
    rng: Rng,
    headers: Headers,
    sim: SimDisk,
    connection: Rc<Connection>,
    client: UnixStream,
    ended: Rc<Cell<Option<End>>>,
    oracle: Oracle,
    /// Bytes that are not sent yet, and bytes that are not parsed yet.
    out: Vec<u8>,
    input: Vec<u8>,
    sent: BTreeMap<u64, Sent>,
    /// Number of requests so far, which is the cookie of the next one.
    next: u64,
    answered: usize,
    /// Number of requests that were answered after a later one.
    overtaken: usize,
    latest: u64,
}

impl Load {
    fn new(handle: &Handle, seed: u64, headers: Headers) -> Self {
        let mut rng = Rng::new(seed);
        let iops = rng.one_in(2).then(|| rng.between(500, 20_000));
        let sim = SimDisk::new(SimImage::zeroed(SIZE), SimConfig::new(seed));
        let Connected { connection, client } = connect(handle, headers, &sim, (SIZE, iops));
        let ended = serve(&connection);
        Load {
            handle: handle.clone(),
            rng,
            headers,
            sim,
            connection,
            client,
            ended,
            oracle: Oracle::new(),
            out: Vec::new(),
            input: Vec::new(),
            sent: BTreeMap::new(),
            next: 0,
            answered: 0,
            overtaken: 0,
            latest: 0,
        }
    }

    fn range(&mut self) -> (u64, u64) {
        // A few requests are longer than the guaranteed memory of a connection.
        let most = if self.rng.one_in(40) { 700 << 10 } else { 8 << 10 };
        let len = self.rng.between(1, most / SECTOR) * SECTOR;
        (self.rng.below((SIZE - len) / SECTOR + 1) * SECTOR, len)
    }

    /// Begins a request.
    fn begin(&mut self) {
        let (offset, len) = self.range();
        let fua = self.rng.one_in(4);
        let flags = if fua { flag::FUA } else { 0 };
        let kinds = if self.headers == Headers::Simple { 15 } else { 16 };
        let mut payload = Vec::new();
        let (command, flags, sent) = match self.rng.below(kinds) {
            0 => (cmd::FLUSH, 0, Sent::Flush(self.oracle.flush_started())),
            1 => {
                let hole = if self.rng.one_in(2) { flag::NO_HOLE } else { 0 };
                let token = self.oracle.zero_started(offset, len);
                (cmd::WRITE_ZEROES, flags | hole, Sent::Write(token, fua))
            }
            2 => {
                let token = self.oracle.discard_started(offset, len);
                (cmd::TRIM, flags, Sent::Write(token, fua))
            }
            3 => (cmd::CACHE, 0, Sent::Cache),
            4..9 => (cmd::READ, 0, Sent::Read(offset, len, self.oracle.read_started())),
            9..15 => {
                payload = pattern(self.next, offset, len as usize);
                let token = self.oracle.write_started(offset, &payload);
                (cmd::WRITE, flags, Sent::Write(token, fua))
            }
            _ => (cmd::BLOCK_STATUS, 0, Sent::Status),
        };
        let (offset, len) = if command == cmd::FLUSH { (0, 0) } else { (offset, len) };
        let has_length = command == cmd::WRITE && self.headers == Headers::Extended;
        let flags = flags | if has_length { flag::PAYLOAD_LEN } else { 0 };
        let request = Request { flags, command, cookie: self.next, offset, len };
        request.put(self.headers, &mut self.out);
        self.out.extend(payload);
        self.sent.insert(self.next, sent);
        self.next += 1;
    }

    /// Sends some of the waiting bytes, and receives some.
    fn transfer(&mut self) {
        let most = if self.rng.one_in(3) { 40 } else { 100_000 };
        let piece = (self.rng.between(1, most) as usize).min(self.out.len());
        if let Ok(n) = self.client.write(&self.out[..piece]) {
            self.out.drain(..n);
        }
        let mut room = vec![0; self.rng.between(1, most) as usize];
        if let Ok(n) = self.client.read(&mut room) {
            self.input.extend(&room[..n]);
        }
        while let Some((cookie, answer)) = self.reply() {
            self.take(cookie, &answer.unwrap());
        }
    }

    /// Removes the next whole reply from the input. Returns its cookie, and its data or its error.
    fn reply(&mut self) -> Option<(u64, Result<Vec<u8>, u32>)> {
        let (reply, len) =
            parse(self.headers, &self.input, |cookie| match self.sent.get(&cookie) {
                Some(Sent::Read(_, len, _)) => *len as usize,
                _ => 0,
            })?;
        self.input.drain(..len);
        Some(reply)
    }

    /// Checks an answer. An answer to a request that has none outstanding is an error.
    fn take(&mut self, cookie: u64, data: &[u8]) {
        self.answered += 1;
        match self.sent.remove(&cookie).expect("it was sent, and not answered before") {
            Sent::Write(token, durable) => self.oracle.write_answered(token, true, durable),
            Sent::Flush(token) => self.oracle.flush_answered(token, true),
            Sent::Read(offset, len, token) => {
                assert_eq!(data.len() as u64, len);
                self.oracle.check_read(token, offset, data).unwrap();
            }
            Sent::Cache => assert!(data.is_empty()),
            Sent::Status => assert!(data.len() >= 12, "a context and an extent"),
        }
        self.overtaken += usize::from(cookie < self.latest);
        self.latest = self.latest.max(cookie);
    }

    /// Runs the load until `count` requests are answered.
    async fn run(&mut self, count: usize) {
        let began = Instant::now();
        while self.answered < count {
            assert!(began.elapsed() < LIMIT, "{} answers", self.answered);
            for _ in 0..self.rng.below(6) {
                if self.sent.len() < MOST_IN_FLIGHT && self.next < REQUESTS as u64 {
                    self.begin();
                }
            }
            for _ in 0..self.rng.below(5) {
                self.transfer();
                self.handle.yield_now().await;
            }
            if self.rng.one_in(3) {
                let time = Duration::from_micros(self.rng.between(1, 2000));
                self.handle.sleep(time).await;
            }
        }
    }

    /// Ends the connection, which makes all answered writes durable.
    async fn end(&mut self, ending: Ending) {
        let flush = self.oracle.flush_started();
        if ending == Ending::Announced {
            assert!(self.sent.is_empty() && self.out.is_empty());
            let request = Request { flags: 0, command: cmd::DISC, cookie: 0, offset: 0, len: 0 };
            request.put(self.headers, &mut self.out);
            self.client.write_all(&self.out).unwrap();
        } else {
            self.client.shutdown(std::net::Shutdown::Both).unwrap();
        }
        let (mut end, ended) = (None, self.ended.clone());
        until(&self.handle, "the connection ends", || {
            end = ended.take();
            end.is_some()
        })
        .await;
        match end.unwrap() {
            End::Gone => {}
            End::Broken(why) if ending == Ending::Closed => {
                assert_eq!(why, "it disconnected in the middle of a request");
            }
            _ => panic!("the client has announced its end"),
        }
        self.oracle.flush_answered(flush, true);
        let Connection { in_flight, unanswered, held, unsent, .. } = &*self.connection;
        assert_eq!((in_flight.get(), unanswered.get(), held.get(), unsent.get()), (0, 0, 0, 0));
        assert_eq!(self.connection.usage().held(), 0);
        assert!(!self.connection.heavy.get());
    }

    /// Cuts the power, and checks what the disk holds.
    fn cut(&self) {
        for _ in 0..3 {
            self.oracle.allows_after_cut(0, &self.sim.power_cut().bytes()).unwrap();
        }
    }
}

/// Serves the connection in a task. Returns where the task stores how it has ended.
fn serve(connection: &Rc<Connection>) -> Rc<Cell<Option<End>>> {
    let ended = Rc::new(Cell::new(None));
    let (slot, receiver) = (ended.clone(), Receiver::on(connection.clone()));
    connection.handle.spawn(async move { slot.set(Some(receiver.run(Inbox::default()).await)) });
    ended
}

type Parsed = ((u64, Result<Vec<u8>, u32>), usize);

/// Parses the first reply of `input`: its cookie, and its data or its error. Also returns its
/// length. Returns `None` if the reply is not whole. `data_of`: number of data bytes behind a
/// simple reply.
fn parse(headers: Headers, input: &[u8], data_of: impl Fn(u64) -> usize) -> Option<Parsed> {
    let head = input.get(..SimpleReply::BYTES)?;
    if let Ok(SimpleReply { error, cookie }) = SimpleReply::parse(head) {
        assert_ne!(headers, Headers::Extended, "all replies are chunks");
        let reads = headers == Headers::Simple && error == 0;
        let end = head.len() + if reads { data_of(cookie) } else { 0 };
        let data = input.get(head.len()..end)?.to_vec();
        return Some(((cookie, if error == 0 { Ok(data) } else { Err(error) }), end));
    }
    let header = input.get(..headers.chunk_bytes())?;
    let Chunk { flags, kind, cookie, len, .. } = Chunk::parse(headers, header).unwrap();
    let end = header.len() + len as usize;
    let payload = input.get(header.len()..end)?;
    assert_eq!(flags, chunk::DONE, "one chunk is the whole answer");
    let answer = match kind {
        chunk::OFFSET_DATA => Ok(payload[8..].to_vec()),
        chunk::ERROR => Err(wire::u32_at(payload, 0)),
        chunk::NONE | chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => Ok(payload.to_vec()),
        other => panic!("chunk {other}"),
    };
    Some(((cookie, answer), end))
}

/// Runs the load with each seed and each ending. A failure shows the seed.
fn loads(headers: Headers) {
    let mut overtaken = 0;
    for seed in 0..SEEDS {
        let endings = [Ending::PowerCut, Ending::Announced, Ending::Closed];
        let ending = endings[seed as usize % endings.len()];
        println!("seed {seed}: {ending:?}");
        let executor = Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        let load = async move {
            let mut load = Load::new(&handle, seed, headers);
            let some = load.rng.between(1, REQUESTS as u64) as usize;
            load.run(if ending == Ending::Announced { REQUESTS } else { some }).await;
            if ending != Ending::PowerCut {
                load.end(ending).await;
            }
            load.cut();
            load.overtaken
        };
        overtaken += executor.block_on(load).unwrap();
        if ending == Ending::PowerCut {
            // Without power no request is answered, and none may be dropped.
            std::mem::forget(executor);
        }
    }
    assert!(overtaken > 100, "{overtaken} requests were overtaken: the order is that of arrival");
}

#[test]
fn requests_with_simple_replies_are_answered_once_in_any_order() {
    loads(Headers::Simple);
}

#[test]
fn requests_with_structured_replies_are_answered_once_in_any_order() {
    loads(Headers::Structured);
}

#[test]
fn requests_with_extended_headers_are_answered_once_in_any_order() {
    loads(Headers::Extended);
}

/// A client that sends whole requests, and waits for each answer.
struct Caller {
    handle: Handle,
    client: UnixStream,
    cookie: u64,
}

impl Caller {
    fn send(&mut self, command: u16, offset: u64, len: u64, payload: &[u8]) {
        self.cookie += 1;
        let mut bytes = Vec::new();
        Request { flags: 0, command, cookie: self.cookie, offset, len }
            .put(Headers::Simple, &mut bytes);
        bytes.extend(payload);
        self.client.write_all(&bytes).unwrap();
    }

    /// Returns the error code of the next answer, which has `len` bytes of data if there is none.
    async fn answer(&mut self, len: usize) -> u32 {
        let mut room = [0; 1 << 16];
        let mut read = 0;
        let client = &mut self.client;
        until(&self.handle, "an answer", || {
            read += client.read(&mut room[read..]).unwrap_or(0);
            parse(Headers::Simple, &room[..read], |_| len).is_some()
        })
        .await;
        let ((cookie, answer), end) = parse(Headers::Simple, &room[..read], |_| len).unwrap();
        assert_eq!((cookie, end), (self.cookie, read));
        answer.err().unwrap_or(0)
    }

    async fn ask(&mut self, command: u16, offset: u64, len: u64) -> u32 {
        let payload = if command == cmd::WRITE { vec![7; len as usize] } else { Vec::new() };
        self.send(command, offset, len, &payload);
        self.answer(if command == cmd::READ { len as usize } else { 0 }).await
    }
}

fn caller(handle: &Handle, config: SimConfig) -> (Caller, SimDisk, Rc<Connection>) {
    let sim = SimDisk::new(SimImage::zeroed(SIZE), config);
    let Connected { connection, client } = connect(handle, Headers::Simple, &sim, (SIZE, None));
    serve(&connection);
    (Caller { handle: handle.clone(), client, cookie: 0 }, sim, connection)
}

#[test]
fn an_error_of_the_disk_is_the_answer_of_its_request_alone() {
    simulated(async |handle| {
        let (mut caller, sim, connection) = caller(&handle, SimConfig::new(1));
        const EIO: i32 = 5;
        const ENOSPC: i32 = 28;
        sim.fail(Fault::new(SimKind::Read, EIO).within(4096..8192));
        sim.fail(Fault::new(SimKind::Write, ENOSPC));
        sim.fail(Fault::new(SimKind::Read, EIO).within(1 << 16..2 << 16));
        assert_eq!(caller.ask(cmd::READ, 0, 4096).await, 0);
        assert_eq!(caller.ask(cmd::READ, 4096, 4096).await, errno::EIO);
        assert_eq!(caller.ask(cmd::READ, 4096, 4096).await, 0, "the fault is over");
        assert_eq!(caller.ask(cmd::WRITE, 0, 512).await, errno::ENOSPC);
        assert_eq!(caller.ask(cmd::WRITE, 0, 512).await, 0);
        assert_eq!(caller.ask(cmd::CACHE, 0, SIZE).await, errno::EIO, "one piece fails");
        assert_eq!(caller.ask(cmd::CACHE, 0, SIZE).await, 0);
        assert_eq!(sim.failures(), 3);
        assert_eq!((connection.held.get(), connection.usage().held()), (0, 0));
    });
}

/// After a failed sync, the kernel may have dropped data. A later flush must not hide that.
#[test]
fn no_flush_succeeds_after_a_flush_that_failed() {
    simulated(async |handle| {
        let (mut caller, sim, _connection) = caller(&handle, SimConfig::new(2));
        sim.fail(Fault::new(SimKind::Sync, 5));
        assert_eq!(caller.ask(cmd::WRITE, 0, 4096).await, 0);
        assert_eq!(caller.ask(cmd::FLUSH, 0, 0).await, errno::EIO);
        assert_eq!(caller.ask(cmd::FLUSH, 0, 0).await, errno::EIO);
        assert_eq!(caller.ask(cmd::READ, 4096, 4096).await, 0, "reads go on");
        assert_eq!(sim.failures(), 1, "the disk was not asked again");
    });
}

/// The disk is so slow that all requests arrive before the first answer.
#[test]
fn a_connection_has_a_bounded_number_of_requests_in_flight() {
    const MANY: u64 = 1000;
    const LEN: u64 = 8;
    simulated(async |handle| {
        let mut config = SimConfig::new(3);
        config.latency.read = 5000;
        let (caller, sim, connection) = caller(&handle, config);
        let (mut client, mut out, mut room) = (caller.client, Vec::new(), [0; 4096]);
        for cookie in 0..MANY {
            Request { flags: 0, command: cmd::READ, cookie, offset: cookie * 512, len: LEN }
                .put(Headers::Simple, &mut out);
        }
        let (mut most, mut sent, mut answers, began) = (0, 0, 0, Instant::now());
        while answers as u64 != (SimpleReply::BYTES as u64 + LEN) * MANY {
            sent += client.write(&out[sent..]).unwrap_or(0);
            assert!(began.elapsed() < LIMIT, "{answers} bytes of answers");
            // Time would pass only after the disk has nothing to do.
            handle.yield_now().await;
            most = most.max(connection.in_flight.get());
            answers += client.read(&mut room).unwrap_or(0);
        }
        assert_eq!(most, 128);
        assert_eq!(sim.trace().len() as u64, 2 * MANY, "each has begun and ended");
    });
}
