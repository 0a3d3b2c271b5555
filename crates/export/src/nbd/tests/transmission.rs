//! The transmission phase of one connection, tested byte by byte.

use blockyard_nbd::wire::{Chunk, chunk, errno, flag, rep};

use super::*;

/// A client that has chosen [`NAME`].
struct Asker {
    stream: UnixStream,
    headers: Headers,
}

impl Asker {
    fn new(server: &Paired, headers: Headers) -> Self {
        if headers == Headers::Simple {
            return Asker { stream: Client::ready(server.connect()).0, headers };
        }
        let mut stream = server.connect();
        let _greeting: [u8; 18] = bytes(&mut stream);
        stream
            .write_all(&u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes())
            .unwrap();
        let name = [&(NAME.len() as u32).to_be_bytes(), NAME.as_bytes()].concat();
        let context = b"base:allocation";
        let query =
            [&1u32.to_be_bytes()[..], &(context.len() as u32).to_be_bytes(), context].concat();
        let headers_option = if headers == Headers::Extended {
            opt::EXTENDED_HEADERS
        } else {
            opt::STRUCTURED_REPLY
        };
        for (option, data) in [
            (headers_option, vec![]),
            (opt::SET_META_CONTEXT, [name.clone(), query].concat()),
            (opt::GO, [name, vec![0, 0]].concat()),
        ] {
            let mut message = wire::OPTION.to_be_bytes().to_vec();
            message.extend([option, data.len() as u32].map(u32::to_be_bytes).as_flattened());
            message.extend(data);
            stream.write_all(&message).unwrap();
            loop {
                let head: [u8; 20] = bytes(&mut stream);
                stream.read_exact(&mut vec![0; wire::u32_at(&head, 16) as usize]).unwrap();
                if wire::u32_at(&head, 12) == rep::ACK {
                    break;
                }
                assert_eq!(wire::u32_at(&head, 12) & rep::ERROR, 0);
            }
        }
        Asker { stream, headers }
    }

    fn send(&mut self, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) {
        let message = self.message(command, flags, offset, len, payload);
        self.stream.write_all(&message).unwrap();
    }

    fn message(&self, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        Request { flags, command, cookie: offset ^ 0x5a, offset, len }
            .put(self.headers, &mut bytes);
        bytes.extend(payload);
        bytes
    }

    /// Returns the error code of the simple reply to a request at `offset`.
    fn simple(&mut self, offset: u64) -> u32 {
        let head: [u8; 16] = bytes(&mut self.stream);
        let reply = wire::SimpleReply::parse(&head).expect("a simple answer");
        assert_eq!(reply.cookie, offset ^ 0x5a);
        reply.error
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) -> u32 {
        self.send(command, flags, offset, len, payload);
        self.simple(offset)
    }

    /// Returns the next chunk and its payload.
    fn chunk(&mut self) -> (Chunk, Vec<u8>) {
        let mut head = vec![0; self.headers.chunk_bytes()];
        self.stream.read_exact(&mut head).unwrap();
        let chunk = Chunk::parse(self.headers, &head).expect("a chunk");
        let mut payload = vec![0; chunk.len as usize];
        self.stream.read_exact(&mut payload).unwrap();
        (chunk, payload)
    }
}

#[test]
fn written_data_are_read_back() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, Headers::Simple);
    let long: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 7) as u8).collect();
    for (offset, data) in [(3, &b"abc"[..]), (4096, &long[..]), (SIZE - 2, &b"xy"[..])] {
        assert_eq!(asker.ask(cmd::WRITE, flag::FUA, offset, data.len() as u64, data), 0);
        asker.send(cmd::READ, 0, offset, data.len() as u64, &[]);
        assert_eq!(asker.simple(offset), 0);
        let mut read = vec![0; data.len()];
        asker.stream.read_exact(&mut read).unwrap();
        assert!(read == data, "at {offset}");
    }
    assert_eq!(asker.ask(cmd::FLUSH, 0, 0, 0, &[]), 0);
    assert_eq!(asker.ask(cmd::CACHE, 0, 0, SIZE, &[]), 0);
    assert_eq!(asker.ask(cmd::WRITE_ZEROES, flag::NO_HOLE, 4096, 4096, &[]), 0);
    assert_eq!(asker.ask(cmd::TRIM, 0, 8192, 4096, &[]), 0);
    asker.send(cmd::READ, 0, 4096, 4096, &[]);
    assert_eq!((asker.simple(4096), bytes::<4096>(&mut asker.stream)), (0, [0; 4096]));
}

#[test]
fn the_connection_continues_after_a_refused_request() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, Headers::Simple);
    let payload = [0x25; 512];
    let too_long = u64::from(wire::MOST_PAYLOAD) + 1;
    for (command, flags, offset, len, error) in [
        (cmd::READ, 0, SIZE - 511, 512, errno::EINVAL),
        (cmd::READ, 0, u64::MAX, 512, errno::EINVAL),
        (cmd::READ, flag::DF, 0, 512, errno::EINVAL),
        (cmd::READ, 0, 0, too_long, errno::EINVAL),
        (cmd::WRITE, 0, SIZE - 511, 512, errno::ENOSPC),
        (cmd::WRITE, flag::NO_HOLE, 0, 512, errno::EINVAL),
        (cmd::WRITE_ZEROES, 0, SIZE, 1, errno::ENOSPC),
        (cmd::TRIM, 0, SIZE, 1, errno::EINVAL),
        (cmd::FLUSH, 0, 1, 0, errno::EINVAL),
        (cmd::BLOCK_STATUS, 0, 0, 512, errno::EINVAL),
        (77, 0, 0, 0, errno::EINVAL),
    ] {
        let sent = if command == cmd::WRITE { &payload[..] } else { &[] };
        assert_eq!(
            asker.ask(command, flags, offset, len, sent),
            error,
            "{command} {flags:#x} {offset} {len}"
        );
    }
    Client(asker.stream).reads();
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let server = Paired::offering([Exported::new(disk(NAME, true), NAME, "", None)]);
    let mut asker = Asker::new(&server, Headers::Simple);
    assert_eq!(asker.ask(cmd::WRITE, 0, 0, 4, b"data"), errno::EPERM);
    assert_eq!(asker.ask(cmd::TRIM, 0, 0, 512, &[]), errno::EPERM);
    assert_eq!(asker.ask(cmd::WRITE_ZEROES, 0, 0, 512, &[]), errno::EPERM);
    assert_eq!(asker.ask(cmd::FLUSH, 0, 0, 0, &[]), 0);
    Client(asker.stream).reads();
}

#[test]
fn requests_must_be_multiples_of_the_export_s_block_size() {
    let server = Paired::offering([Exported::new(disk(NAME, false), NAME, "", Some(512))]);
    let mut asker = Asker::new(&server, Headers::Simple);
    assert_eq!(asker.ask(cmd::WRITE, 0, 512, 256, &[0; 256]), errno::EINVAL);
    assert_eq!(asker.ask(cmd::TRIM, 0, 256, 512, &[]), errno::EINVAL);
    assert_eq!(asker.ask(cmd::CACHE, 0, 1, 1, &[]), 0, "it changes nothing");
    assert_eq!(asker.ask(cmd::WRITE, 0, 512, 512, &[0; 512]), 0);
}

#[test]
fn structured_answers_have_offsets_and_error_messages() {
    for headers in [Headers::Structured, Headers::Extended] {
        let server = Paired::new();
        let mut asker = Asker::new(&server, headers);
        asker.send(cmd::READ, flag::DF, 4096, 512, &[]);
        let (data, payload) = asker.chunk();
        assert_eq!(
            (data.kind, data.flags, data.cookie),
            (chunk::OFFSET_DATA, chunk::DONE, 4096 ^ 0x5a)
        );
        assert_eq!((wire::u64_at(&payload, 0), &payload[8..]), (4096, &[0; 512][..]));
        asker.send(cmd::READ, 0, SIZE, 1, &[]);
        let (error, payload) = asker.chunk();
        assert_eq!((error.kind, error.flags), (chunk::ERROR, chunk::DONE));
        assert_eq!(
            (wire::u32_at(&payload, 0), payload.len()),
            (errno::EINVAL, 6 + usize::from(payload[5]))
        );
        asker.send(cmd::BLOCK_STATUS, flag::REQ_ONE, 0, 4096, &[]);
        let (status, payload) = asker.chunk();
        let extended = headers == Headers::Extended;
        assert_eq!(
            status.kind,
            if extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS }
        );
        assert_eq!((wire::u32_at(&payload, 0), payload.len()), (1, if extended { 24 } else { 12 }));
        // With extended headers the payload has a length. Without them there is no payload.
        asker.send(
            cmd::TRIM,
            flag::PAYLOAD_LEN,
            0,
            if extended { 4 } else { 0 },
            if extended { b"data" } else { &[] },
        );
        assert_eq!(wire::u32_at(&asker.chunk().1, 0), errno::EINVAL);
        asker.send(cmd::READ, 0, 0, 1, &[]);
        assert_eq!(asker.chunk().1.len(), 9);
    }
}

#[test]
fn many_requests_are_each_answered_once() {
    const MANY: u64 = 1000;
    let server = Paired::new();
    let mut asker = Asker::new(&server, Headers::Simple);
    let mut requests = Vec::new();
    for cookie in 0..MANY {
        Request { flags: 0, command: cmd::READ, cookie, offset: cookie * 8, len: 8 }
            .put(Headers::Simple, &mut requests);
    }
    let mut sender = asker.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || sender.write_all(&requests).unwrap());
    let mut cookies: Vec<u64> =
        (0..MANY).map(|_| wire::u64_at(&bytes::<24>(&mut asker.stream), 8)).collect();
    cookies.sort_unstable();
    assert!(cookies.into_iter().eq(0..MANY));
    sender.join().unwrap();
}

#[test]
fn a_connection_ends_with_its_last_answer() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, Headers::Simple);
    asker.send(cmd::WRITE, 0, 0, 3, b"end");
    // The server ignores a request after NBD_CMD_DISC. Both arrive at once, because the server
    // closes the connection.
    let end = asker.message(cmd::DISC, 0, 0, 0, &[]);
    let ignored = asker.message(cmd::READ, 0, 0, 3, &[]);
    asker.stream.write_all(&[end, ignored].concat()).unwrap();
    assert_eq!(asker.simple(0), 0);
    assert!(is_disconnected(&mut asker.stream));
    let mut other = Asker::new(&server, Headers::Simple);
    other.send(cmd::READ, 0, 0, 3, &[]);
    assert_eq!((other.simple(0), &bytes(&mut other.stream)), (0, b"end"));
}

#[test]
fn a_client_that_breaks_the_protocol_is_disconnected_alone() {
    let server = Paired::new();
    let mut other_client = Client::ready(server.connect());
    let mut broken = Asker::new(&server, Headers::Simple);
    broken.stream.write_all(&[0x11; 28]).unwrap();
    assert!(is_disconnected(&mut broken.stream), "no request's magic");
    let mut long = Asker::new(&server, Headers::Extended);
    long.send(cmd::TRIM, flag::PAYLOAD_LEN, 0, (64 << 20) + 1, &[]);
    assert!(is_disconnected(&mut long.stream), "more than is passed over");
    let mut short = Asker::new(&server, Headers::Simple);
    short.send(cmd::WRITE, 0, 0, 512, &[1; 100]);
    short.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(is_disconnected(&mut short.stream), "it goes in the middle of a payload");
    other_client.reads();
}

/// The deadline of a stop has passed while a client does not read its answer.
#[test]
fn a_stop_disconnects_a_client_that_does_not_read() {
    let mut server = Paired::new();
    let mut deaf = Asker::new(&server, Headers::Simple);
    deaf.send(cmd::READ, 0, 0, SIZE, &[]);
    // The answer has begun, and does not fit into the socket.
    assert_eq!(deaf.simple(0), 0);
    let mut offer = server.offers.remove(0);
    let (ended, end) = channel();
    std::thread::spawn(move || {
        offer.stop(Instant::now());
        ended.send(()).unwrap();
    });
    end.recv_timeout(LIMIT).expect("the export ends");
    let mut rest = 0;
    while let Ok(count @ 1..) = deaf.stream.read(&mut [0; 4096]) {
        rest += count as u64;
    }
    assert!(rest < SIZE, "the whole answer has fitted");
}

/// Clients that read nothing hold all buffers, and no time disconnects them. Small requests of
/// another client are answered, and a large one waits until buffers are free.
#[test]
fn clients_that_hold_all_buffers_block_only_large_requests() {
    let server = Paired::new();
    let reactor = server.server.reactors.next();
    let never_watch = reactor.ask(|handle, reply| {
        links::never_watch(handle);
        reply.send(());
    });
    never_watch.unwrap();
    let is_short = || {
        reactor
            .ask(|handle, reply| reply.send(handle.local::<buffers::Buffers>().are_short()))
            .unwrap()
    };
    let hears = |asker: &Asker| rustix::io::ioctl_fionread(&asker.stream).unwrap() > 0;
    let mut small = Asker::new(&server, Headers::Simple);
    let mut large = Asker::new(&server, Headers::Simple);
    let mut held: Vec<Asker> = (0..24).map(|_| Asker::new(&server, Headers::Simple)).collect();
    held.iter_mut().for_each(|asker| asker.send(cmd::READ, 0, 0, SIZE, &[]));
    let began = Instant::now();
    while !is_short() {
        assert!(began.elapsed() < LIMIT, "no request waits for memory");
        std::thread::yield_now();
    }
    large.send(cmd::READ, 0, 4096, 4 << 20, &[]);
    for round in 0..100 {
        let offset = round * 4096;
        assert_eq!(small.ask(cmd::WRITE, 0, offset, 4096, &[round as u8; 4096]), 0);
        small.send(cmd::READ, 0, offset, 4096, &[]);
        assert_eq!(small.simple(offset), 0);
        assert_eq!(bytes::<4096>(&mut small.stream), [round as u8; 4096]);
    }
    assert!(is_short() && !hears(&large));
    assert!(held.iter().filter(|asker| hears(asker)).count() < held.len(), "there was room");
    drop(held);
    assert_eq!(large.simple(4096), 0);
    large.stream.read_exact(&mut vec![0; 4 << 20]).unwrap();
}
