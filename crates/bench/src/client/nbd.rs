//! The run on an NBD export: a connection for each queue, with many requests in flight.
//!
//! In: options and an address. Out: the report. The client negotiates simple replies only. What
//! must hold: no read and no write of a socket blocks, because a server may stop reading until the
//! client reads its replies; the cookie of each reply is that of a request in flight.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use blockyard_driver::{Data, RequestQueue, request, status};
use blockyard_nbd::Uri;
use blockyard_nbd::negotiate::Terms;
use blockyard_nbd::wire::{Headers, Request, SimpleReply, cmd, errno, export};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::crew::Crew;
use super::report::{Report, Target};
use super::workload::Pattern;
use super::{LoadOptions, LoadSetup};
use crate::targets::nbd::{Stream, connect};

const SECTOR: u64 = 512;
/// Size of the receive buffer in bytes. A longer rest of a read goes directly to its slot.
const BUFFER: usize = 256 << 10;

pub fn run(options: &LoadOptions, uri: &Uri) -> Result<Report> {
    let mut queues = Vec::new();
    let mut size = 0;
    let limit = Duration::from_secs_f64(options.timeout.min(10.0));
    for _ in 0..options.queues {
        let connected = connect(uri, limit);
        let (stream, terms) = connected.with_context(|| format!("the NBD server at {uri}"))?;
        check(options, &terms)?;
        size = terms.size;
        queues.push(Queue::new(stream, options.depth, options.largest() as usize)?);
    }
    let setup = LoadSetup::new(options, size)?;
    let target =
        Target { kind: "nbd", capacity_bytes: size, seed: setup.seed, ..Target::default() };
    let crew = Crew::run(&setup, queues, options.back_end(), |queue| queue.wake.try_clone())?;
    Ok(Report::new(options, target, &crew.tally, &crew.meter, 0))
}

fn check(options: &LoadOptions, terms: &Terms) -> Result<()> {
    let (bs, largest) = (options.bs, options.largest());
    let (minimum, maximum) = (u64::from(terms.minimum), u64::from(terms.maximum));
    let discards = options.rw == Pattern::Randtrim;
    anyhow::ensure!(bs.is_multiple_of(minimum), "--bs {bs}: the export has blocks of {minimum}");
    anyhow::ensure!(
        discards || largest <= maximum,
        "--bs {largest}: the server allows {maximum} bytes in a request"
    );
    anyhow::ensure!(
        !(options.rw.writes() && terms.has(export::READ_ONLY)),
        "the export is read-only"
    );
    anyhow::ensure!(
        !options.flushes() || terms.has(export::SEND_FLUSH),
        "--flush-every, --end-flush: the server has no flush"
    );
    anyhow::ensure!(
        !discards || terms.has(export::SEND_TRIM),
        "--rw randtrim: the server has no trim"
    );
    Ok(())
}

#[derive(Clone, Copy, Default)]
struct Slot {
    in_flight: bool,
    /// Number of bytes that follow a good reply.
    reply_bytes: usize,
}

/// A connection with requests in slots. A request's cookie is its slot.
struct Queue {
    stream: Box<dyn Stream>,
    /// An eventfd that ends a sleep.
    wake: OwnedFd,
    slots: Vec<Slot>,
    in_flight: usize,
    /// The data of all slots, `slot_bytes` each.
    data: RefCell<Vec<u8>>,
    slot_bytes: usize,
    /// Requests with their data. The socket has taken the first `sent` bytes.
    out: Vec<u8>,
    sent: usize,
    /// The receive buffer. The bytes `from..to` are not used yet.
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    /// The last read returned less than it could take, so the next one would return nothing.
    drained: bool,
    /// The read whose data come next, and the number of bytes that its slot has.
    reading: Option<(usize, usize)>,
}

impl Queue {
    fn new(stream: Box<dyn Stream>, slots: u16, slot_bytes: usize) -> Result<Self> {
        rustix::io::ioctl_fionbio(stream.as_fd(), true)?;
        Ok(Queue {
            stream,
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            slots: vec![Slot::default(); slots.into()],
            in_flight: 0,
            data: RefCell::new(vec![0; usize::from(slots) * slot_bytes]),
            slot_bytes,
            out: Vec::new(),
            sent: 0,
            buffer: vec![0; BUFFER],
            from: 0,
            to: 0,
            drained: false,
            reading: None,
        })
    }

    /// Returns the next reply's slot and error number.
    fn header(&mut self) -> Result<(usize, u32)> {
        let reply = SimpleReply::parse(&self.buffer[self.from..self.to]);
        self.from += SimpleReply::BYTES;
        let reply = reply.ok().context("the server has sent bytes that are no simple reply")?;
        let slot = usize::try_from(reply.cookie).ok();
        let slot = slot.filter(|slot| self.slots.get(*slot).is_some_and(|s| s.in_flight));
        let slot = slot.with_context(|| {
            format!("the server replies to cookie {}, which is not in flight", reply.cookie)
        })?;
        Ok((slot, reply.error))
    }

    fn end(&mut self, slot: usize, error: u32) -> (u16, u8) {
        self.slots[slot].in_flight = false;
        self.in_flight -= 1;
        let status = match error {
            0 => status::OK,
            errno::ENOTSUP => status::UNSUPP,
            _ => status::IOERR,
        };
        (slot as u16, status)
    }

    /// Moves received bytes to a read's slot, from the byte `done` on. Returns how many bytes the
    /// slot has then, or `None` if the socket has no more bytes now.
    fn fill(&mut self, slot: usize, done: usize) -> Result<Option<usize>> {
        let rest = self.slots[slot].reply_bytes - done;
        let at = slot * self.slot_bytes + done;
        let to = &mut self.data.get_mut()[at..at + rest];
        let buffered = self.to - self.from;
        if buffered > 0 {
            let n = buffered.min(rest);
            to[..n].copy_from_slice(&self.buffer[self.from..self.from + n]);
            self.from += n;
            return Ok(Some(done + n));
        }
        if rest >= BUFFER {
            let n = receive(&mut self.stream, to, &mut self.drained)?;
            return Ok(n.map(|n| done + n));
        }
        Ok(self.refill()?.then_some(done))
    }

    /// Reads more bytes into the buffer. Returns false if the socket has none now.
    fn refill(&mut self) -> Result<bool> {
        self.buffer.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        let n = receive(&mut self.stream, &mut self.buffer[self.to..], &mut self.drained)?;
        self.to += n.unwrap_or(0);
        Ok(n.is_some())
    }
}

/// Reads what the socket has. Returns `None` if it has nothing.
fn receive(
    stream: &mut Box<dyn Stream>,
    bytes: &mut [u8],
    drained: &mut bool,
) -> Result<Option<usize>> {
    if std::mem::take(drained) {
        return Ok(None);
    }
    loop {
        match stream.read(bytes) {
            Ok(0) => anyhow::bail!("the server closed the connection in the middle of the run"),
            Ok(n) => {
                *drained = n < bytes.len();
                return Ok(Some(n));
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).context("reading replies"),
        }
    }
}

impl RequestQueue for Queue {
    type Error = anyhow::Error;

    fn submit(&mut self, slot: u16, request: u32, sector: u64, data: Data) {
        let slot = usize::from(slot);
        assert!(!self.slots[slot].in_flight, "slot {slot} is in flight");
        let bytes = &self.data.get_mut()[slot * self.slot_bytes..][..self.slot_bytes];
        let (command, offset, len) = match (request, data) {
            (request::IN, Data::FromDevice(len)) => (cmd::READ, sector * SECTOR, len.into()),
            (request::OUT, Data::ToDevice(len)) => (cmd::WRITE, sector * SECTOR, len.into()),
            (request::FLUSH, _) => (cmd::FLUSH, 0, 0),
            (request::DISCARD, _) => {
                let mut range = [0; request::RANGE];
                range.copy_from_slice(&bytes[..request::RANGE]);
                let (sector, sectors) = request::parse_range(range);
                (cmd::TRIM, sector * SECTOR, u64::from(sectors) * SECTOR)
            }
            (other, _) => panic!("request type {other} is not supported"),
        };
        Request { flags: 0, command, cookie: slot as u64, offset, len }
            .put(Headers::Simple, &mut self.out);
        if command == cmd::WRITE {
            self.out.extend_from_slice(&bytes[..len as usize]);
        }
        let reply_bytes = if command == cmd::READ { len as usize } else { 0 };
        self.slots[slot] = Slot { in_flight: true, reply_bytes };
        self.in_flight += 1;
    }

    fn publish(&mut self) -> Result<()> {
        while self.sent < self.out.len() {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    // The server has not read all. Keeps what is left.
                    self.out.drain(..std::mem::take(&mut self.sent));
                    return Ok(());
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("sending requests"),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    fn reap(&mut self) -> Result<Option<(u16, u8)>> {
        loop {
            if let Some((slot, done)) = self.reading {
                if done == self.slots[slot].reply_bytes {
                    self.reading = None;
                    return Ok(Some(self.end(slot, 0)));
                }
                match self.fill(slot, done)? {
                    Some(done) => self.reading = Some((slot, done)),
                    None => return Ok(None),
                }
            } else if self.to - self.from >= SimpleReply::BYTES {
                match self.header()? {
                    (slot, 0) => self.reading = Some((slot, 0)),
                    (slot, error) => return Ok(Some(self.end(slot, error))),
                }
            } else if !self.refill()? {
                return Ok(None);
            }
        }
    }

    fn ready(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
            .is_ok_and(|n| n > 0)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn sleep(&mut self, limit: Option<Duration>) -> Result<()> {
        let limit =
            limit.map(|l| Timespec { tv_sec: l.as_secs() as _, tv_nsec: l.subsec_nanos().into() });
        let out = if self.out.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        let mut fds = [
            PollFd::new(&self.stream, PollFlags::IN | out),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, limit.as_ref()))?;
        Ok(())
    }

    /// NBD has no notifications.
    fn kick(&mut self) -> Result<()> {
        Ok(())
    }

    fn notifications(&mut self) -> Result<(u64, u64)> {
        Ok((0, 0))
    }

    fn write_data(&self, slot: u16, bytes: &[u8]) {
        assert!(bytes.len() <= self.slot_bytes, "a slot holds {} bytes", self.slot_bytes);
        let at = usize::from(slot) * self.slot_bytes;
        self.data.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn read_data(&self, slot: u16, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.slot_bytes, "a slot holds {} bytes", self.slot_bytes);
        let at = usize::from(slot) * self.slot_bytes;
        bytes.copy_from_slice(&self.data.borrow()[at..at + bytes.len()]);
    }

    /// The server stays for the whole run, so there is nothing to prepare.
    fn resume_base(&mut self, _known: bool) -> u32 {
        0
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // NBD_CMD_DISC has no reply. If requests are not sent yet, the close must do.
        if self.out.is_empty() {
            let mut header = Vec::new();
            Request { flags: 0, command: cmd::DISC, cookie: 0, offset: 0, len: 0 }
                .put(Headers::Simple, &mut header);
            let _ = self.stream.write(&header);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;
    use crate::scratch::HANG;

    /// A queue with slots of `bytes` bytes, and the server's end of its connection.
    fn queue(bytes: usize) -> (Queue, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(HANG)).unwrap();
        theirs.set_write_timeout(Some(HANG)).unwrap();
        (Queue::new(Box::new(ours), 4, bytes).unwrap(), theirs)
    }

    fn reply(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        SimpleReply { error, cookie }.put(&mut bytes);
        bytes.extend(data);
        bytes
    }

    fn next_request(server: &mut UnixStream) -> Request {
        let mut header = [0; 28];
        server.read_exact(&mut header).unwrap();
        Request::parse(Headers::Simple, &header).unwrap()
    }

    #[test]
    fn requests_have_their_form_and_replies_come_in_any_order() {
        let (mut queue, mut server) = queue(4096);
        queue.write_data(1, &[7; 4096]);
        queue.write_data(3, &request::range(16, 8));
        queue.submit(0, request::IN, 2, Data::FromDevice(512));
        queue.submit(1, request::OUT, 8, Data::ToDevice(4096));
        queue.submit(2, request::FLUSH, 0, Data::None);
        queue.submit(3, request::DISCARD, 0, Data::ToDevice(16));
        queue.publish().unwrap();
        let form = |r: Request| (r.command, r.cookie, r.offset, r.len);
        assert_eq!(form(next_request(&mut server)), (cmd::READ, 0, 1024, 512));
        assert_eq!(form(next_request(&mut server)), (cmd::WRITE, 1, 4096, 4096));
        let mut data = [0; 4096];
        server.read_exact(&mut data).unwrap();
        assert_eq!(data, [7; 4096]);
        assert_eq!(form(next_request(&mut server)), (cmd::FLUSH, 2, 0, 0));
        assert_eq!(form(next_request(&mut server)), (cmd::TRIM, 3, 8192, 4096));
        assert_eq!((queue.reap().unwrap(), queue.in_flight()), (None, 4));

        server.write_all(&reply(3, errno::ENOTSUP, &[])).unwrap();
        server.write_all(&reply(1, errno::EIO, &[])).unwrap();
        let read = reply(0, 0, &[9; 512]);
        // A reply may come in pieces.
        server.write_all(&read[..100]).unwrap();
        assert_eq!(queue.reap().unwrap(), Some((3, status::UNSUPP)));
        assert_eq!(queue.reap().unwrap(), Some((1, status::IOERR)));
        assert_eq!(queue.reap().unwrap(), None);
        server.write_all(&read[100..]).unwrap();
        server.write_all(&reply(2, 0, &[])).unwrap();
        assert!(queue.ready());
        assert_eq!(queue.reap().unwrap(), Some((0, status::OK)));
        let mut bytes = [0; 512];
        queue.read_data(0, &mut bytes);
        assert_eq!(bytes, [9; 512]);
        assert_eq!(queue.reap().unwrap(), Some((2, status::OK)));
        assert_eq!((queue.reap().unwrap(), queue.in_flight()), (None, 0));
        drop(queue);
        assert_eq!(next_request(&mut server).command, cmd::DISC);
    }

    /// The data of each direction are larger than all buffers of the socket.
    #[test]
    fn neither_side_waits_for_the_other() {
        const LARGE: usize = 4 << 20;
        let (mut queue, mut server) = queue(LARGE);
        queue.write_data(1, &[5; LARGE]);
        queue.submit(0, request::IN, 0, Data::FromDevice(LARGE as u32));
        queue.submit(1, request::OUT, 0, Data::ToDevice(LARGE as u32));
        let served = std::thread::spawn(move || {
            let mut data = vec![0; LARGE];
            assert_eq!(next_request(&mut server).cookie, 0);
            // The server replies before it reads the next request.
            server.write_all(&reply(0, 0, &vec![6; LARGE])).unwrap();
            assert_eq!(next_request(&mut server).cookie, 1);
            server.read_exact(&mut data).unwrap();
            assert!(data.iter().all(|b| *b == 5));
            server.write_all(&reply(1, 0, &[])).unwrap();
            server
        });
        let (mut done, start) = (Vec::new(), Instant::now());
        while done.len() < 2 {
            queue.publish().unwrap();
            match queue.reap().unwrap() {
                Some(reaped) => done.push(reaped),
                None => queue.sleep(Some(HANG)).unwrap(),
            }
            assert!(start.elapsed() < HANG, "only {done:?} within {HANG:?}");
        }
        assert_eq!(done, [(0, status::OK), (1, status::OK)]);
        let mut bytes = vec![0; LARGE];
        queue.read_data(0, &mut bytes);
        assert!(bytes.iter().all(|b| *b == 6));
        drop(served.join().unwrap());
    }

    #[test]
    fn replies_that_cannot_be_end_the_run() {
        for (bytes, says) in [
            (reply(1, 0, &[]), "cookie 1, which is not in flight"),
            (reply(u64::MAX, 0, &[]), "not in flight"),
            (vec![7; 16], "no simple reply"),
        ] {
            let (mut queue, mut server) = queue(512);
            queue.submit(0, request::FLUSH, 0, Data::None);
            server.write_all(&bytes).unwrap();
            let error = queue.reap().unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let (mut queue, server) = queue(512);
        queue.submit(0, request::FLUSH, 0, Data::None);
        drop(server);
        assert!(queue.reap().unwrap_err().to_string().contains("closed the connection"));
    }
}
