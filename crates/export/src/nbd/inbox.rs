//! The receive buffer of a connection.
//!
//! In: a connection's bytes, as they arrive. Out: headers, copied once, and payloads. Of a payload,
//! only the part that arrived together with its header is copied. The rest is read into its own
//! buffer.

use std::io;
use std::ops::Range;

use blockyard_ring::Segments;

use super::spool::Spool;
use super::stream::Stream;

/// Size of the buffer, and therefore the maximum size of a read, in bytes.
const SIZE: usize = 128 << 10;

/// The received bytes that are not parsed yet.
pub struct Inbox {
    buffer: Segments,
    start: usize,
    end: usize,
    /// The header of a request during the receipt of its payload.
    header: ([u8; 32], usize),
    /// The request that had a part of its payload when the connection was handed over.
    begun: Option<Spool>,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox {
            buffer: Segments::buffer(SIZE),
            start: 0,
            end: 0,
            header: ([0; 32], 0),
            begun: None,
        }
    }
}

impl Inbox {
    /// Returns the next `len` bytes if they have arrived.
    #[inline]
    pub fn take<const N: usize>(&mut self, len: usize) -> Option<[u8; N]> {
        if self.end - self.start < len {
            return None;
        }
        let mut bytes = [0; N];
        self.buffer.copy_out(self.start, &mut bytes[..len]);
        self.start += len;
        Some(bytes)
    }

    /// Notes the header of a request, until its payload is complete.
    #[inline]
    pub fn begin(&mut self, header: &[u8; 32], len: usize) {
        self.header = (*header, len);
    }

    /// Keeps the header and a part of the payload, if the reading ended because another server
    /// continues the connection.
    fn keep(
        &mut self,
        stream: &Stream,
        error: io::Error,
        payload: impl FnOnce(&mut Spool) -> io::Result<()>,
    ) -> io::Error {
        if !stream.has_left(&error) {
            return error;
        }
        let (header, len) = self.header;
        let keep = || {
            let mut spool = Spool::new()?;
            spool.push(&header[..len])?;
            payload(&mut spool)?;
            io::Result::Ok(spool)
        };
        match keep() {
            Ok(spool) => self.begun = Some(spool),
            Err(e) => return e,
        }
        error
    }

    /// Returns all bytes that were received and not handled, behind those of `first`.
    pub fn into_unread(mut self, stream: &Stream, first: &[u8]) -> io::Result<Option<Spool>> {
        let mut spool = Spool::new()?;
        spool.push(first)?;
        if let Some(begun) = self.begun.take() {
            spool.push_spool(begun)?;
        }
        spool.push_segments(&self.buffer, self.start, self.end - self.start)?;
        if let Some(later) = stream.take_unread() {
            spool.push_spool(later)?;
        }
        Ok(spool.unless_empty())
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Reads more bytes. Returns false if the client has ended the connection.
    pub async fn fill(&mut self, stream: &Stream) -> io::Result<bool> {
        let left = self.end - self.start;
        if left > 0 && self.start > 0 {
            self.buffer.copy_from(0, &self.buffer, self.start, left);
        }
        (self.start, self.end) = (0, left);
        let n = stream.read(self.buffer.slice(left, SIZE - left)).await.1?;
        self.end += n;
        Ok(n > 0)
    }

    /// Returns the next `len` bytes. If the connection ends before these bytes, that is an error.
    pub async fn exactly(&mut self, stream: &Stream, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let here = (self.end - self.start).min(len - done);
            self.buffer.copy_out(self.start, &mut bytes[done..done + here]);
            self.start += here;
            done += here;
            if done == len {
                break;
            }
            match self.fill(stream).await {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(e) => return Err(self.keep(stream, e, |spool| spool.push(&bytes[..done]))),
            }
        }
        Ok(bytes)
    }

    /// Fills `range` of `payload` with the next bytes. The read that completes the payload may also
    /// receive bytes that follow the payload. The inbox keeps those bytes.
    pub async fn payload(
        &mut self,
        stream: &Stream,
        payload: &Segments,
        range: Range<usize>,
    ) -> io::Result<()> {
        let Range { start, end } = range;
        let mut done = start + (self.end - self.start).min(end - start);
        payload.copy_from(start, &self.buffer, self.start, done - start);
        self.start += done - start;
        while done < end {
            let mut target = Segments::default();
            target.gather(payload, done, end - done);
            if end == payload.len() {
                target.gather(&self.buffer, 0, SIZE);
            }
            let n = match stream.read_payload(target).await.1 {
                Ok(n) => n,
                Err(e) => {
                    // A long payload arrives in several ranges of the same buffer.
                    let all = |spool: &mut Spool| spool.push_segments(payload, 0, done);
                    return Err(self.keep(stream, e, all));
                }
            };
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let here = n.min(end - done);
            done += here;
            (self.start, self.end) = (0, n - here);
        }
        stream.payload_complete();
        Ok(())
    }

    /// Skips `len` bytes.
    pub async fn skip(&mut self, stream: &Stream, mut len: u64) -> io::Result<()> {
        let all = len;
        loop {
            let here = len.min((self.end - self.start) as u64);
            self.start += here as usize;
            len -= here;
            if len == 0 {
                return Ok(());
            }
            match self.fill(stream).await {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // The next server skips the payload too, so its bytes do not matter.
                Err(e) => return Err(self.keep(stream, e, |spool| spool.push_zeroes(all - len))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use blockyard_ring::Handle;
    use blockyard_storage::sim::Rng;

    use super::super::tests::connected::simulated;
    use super::*;

    /// Returns a stream, and the client's end of its socket.
    fn pair(handle: &Handle) -> (Stream, UnixStream) {
        let (client, theirs) = UnixStream::pair().unwrap();
        (Stream::new(handle, theirs).unwrap(), client)
    }

    fn bytes_of(segments: &Segments) -> Vec<u8> {
        let mut bytes = vec![0; segments.len()];
        segments.copy_out(0, &mut bytes);
        bytes
    }

    /// Returns the next `N` bytes. Reads until they have arrived.
    async fn next<const N: usize>(inbox: &mut Inbox, stream: &Stream) -> [u8; N] {
        loop {
            if let Some(bytes) = inbox.take::<N>(N) {
                return bytes;
            }
            assert!(inbox.fill(stream).await.unwrap(), "the connection has ended");
        }
    }

    #[test]
    fn a_header_is_taken_only_when_it_is_whole() {
        simulated(async |handle| {
            let (stream, mut client) = pair(&handle);
            let mut inbox = Inbox::default();
            assert!(inbox.is_empty() && inbox.take::<4>(4).is_none());
            client.write_all(b"abc").unwrap();
            assert!(inbox.fill(&stream).await.unwrap());
            assert!(!inbox.is_empty() && inbox.take::<4>(4).is_none());
            client.write_all(b"defg").unwrap();
            assert!(inbox.fill(&stream).await.unwrap());
            // A header may be shorter than the array that it is returned in.
            assert_eq!(inbox.take::<4>(2), Some(*b"ab\0\0"));
            assert_eq!(inbox.take::<4>(4), Some(*b"cdef"));
            assert!(inbox.take::<4>(4).is_none());
            client.shutdown(Shutdown::Write).unwrap();
            assert!(!inbox.fill(&stream).await.unwrap(), "the client has gone");
            assert!(!inbox.is_empty(), "one byte of a header is left");
        });
    }

    /// Headers, payloads and skipped bytes of random lengths arrive in pieces of random lengths.
    /// The client sends a piece when the inbox waits.
    #[test]
    fn bytes_come_in_order_whatever_their_pieces_are() {
        const ALL: usize = 1 << 20;
        for seed in 0..20 {
            println!("seed {seed}");
            simulated(async move |handle| {
                let mut rng = Rng::new(seed);
                let mut sent = vec![0; ALL];
                rng.fill(&mut sent);
                let (stream, client) = pair(&handle);
                client.set_nonblocking(true).unwrap();
                let (mut pieces, mut out, sending) = (rng.fork(), sent.clone(), handle.clone());
                handle.spawn(async move {
                    let mut client = client;
                    while !out.is_empty() {
                        let most = *pieces.pick(&[3, 500, 200_000]);
                        let piece = (pieces.between(1, most) as usize).min(out.len());
                        let n = client.write(&out[..piece]).unwrap_or(0);
                        out.drain(..n);
                        sending.sleep(std::time::Duration::from_micros(1)).await;
                    }
                });
                let (mut inbox, mut at) = (Inbox::default(), 0);
                while at < ALL {
                    let most = *rng.pick(&[40, 5000, 300_000]);
                    let len = (rng.between(1, most) as usize).min(ALL - at);
                    match rng.below(4) {
                        0 if ALL - at >= 28 => {
                            let header = next::<28>(&mut inbox, &stream).await;
                            assert!(header[..] == sent[at..at + 28], "a header at {at}");
                            at += 28;
                            continue;
                        }
                        1 => {
                            let bytes = inbox.exactly(&stream, len).await.unwrap();
                            assert!(bytes == sent[at..at + len], "bytes at {at}");
                        }
                        2 => inbox.skip(&stream, len as u64).await.unwrap(),
                        _ => {
                            // A long payload arrives in two ranges of its buffer.
                            let payload = Segments::buffer(len);
                            let middle = rng.below(len as u64) as usize;
                            for range in [0..middle, middle..len] {
                                inbox.payload(&stream, &payload, range).await.unwrap();
                            }
                            assert!(bytes_of(&payload) == sent[at..at + len], "{len} at {at}");
                        }
                    }
                    at += len;
                }
                assert!(inbox.is_empty());
            });
        }
    }

    #[test]
    fn a_connection_that_ends_in_a_payload_is_an_error() {
        simulated(async |handle| {
            for kind in 0..3 {
                let (stream, mut client) = pair(&handle);
                let mut inbox = Inbox::default();
                client.write_all(&[1; 100]).unwrap();
                drop(client);
                let payload = Segments::buffer(101);
                let ended = match kind {
                    0 => inbox.exactly(&stream, 101).await.map(drop),
                    1 => inbox.skip(&stream, 101).await,
                    _ => inbox.payload(&stream, &payload, 0..101).await,
                };
                assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{kind}");
            }
        });
    }

    /// Returns all bytes that are left for the next server.
    fn unread(inbox: Inbox, stream: &Stream, first: &[u8]) -> Vec<u8> {
        let Some(mut spool) = inbox.into_unread(stream, first).unwrap() else { return Vec::new() };
        let (room, mut all) = (Segments::buffer(1000), Vec::new());
        while !spool.is_empty() {
            let n = spool.read(&room).unwrap();
            all.extend(&bytes_of(&room)[..n]);
        }
        all
    }

    /// Another server continues the connection in the middle of a payload. It gets the header
    /// again, and what has arrived of the payload.
    #[test]
    fn a_payload_that_was_begun_goes_to_the_next_server_with_its_header() {
        for arrived in [0, 10, 50] {
            for kind in 0..3 {
                simulated(async move |handle| {
                    let (stream, mut client) = pair(&handle);
                    let (stream, mut inbox) = (std::rc::Rc::new(stream), Inbox::default());
                    client.write_all(b"HEADER").unwrap();
                    client.write_all(&vec![7; arrived]).unwrap();
                    let header = next::<6>(&mut inbox, &stream).await;
                    let mut whole = [0; 32];
                    whole[..6].copy_from_slice(&header);
                    inbox.begin(&whole, 6);
                    let (leaving, at) = (stream.clone(), handle.clone());
                    handle.spawn(async move {
                        at.sleep(std::time::Duration::from_secs(1)).await;
                        leaving.leave();
                        // The test waits for the kernel, and not only for the clock.
                        loop {
                            at.sleep(std::time::Duration::from_secs(1)).await;
                        }
                    });
                    let payload = Segments::buffer(100);
                    let ended = match kind {
                        0 => inbox.exactly(&stream, 100).await.map(drop),
                        1 => inbox.skip(&stream, 100).await,
                        _ => inbox.payload(&stream, &payload, 0..100).await,
                    };
                    assert!(stream.has_left(&ended.unwrap_err()), "{kind}");
                    // The next server skips the payload too, so its bytes do not matter.
                    let byte = if kind == 1 { 0 } else { 7 };
                    let expected = [b"beforeHEADER", &vec![byte; arrived][..]].concat();
                    assert!(unread(inbox, &stream, b"before") == expected, "{kind} {arrived}");
                });
            }
        }
    }

    #[test]
    fn bytes_that_were_received_and_not_handled_go_to_the_next_server() {
        simulated(async |handle| {
            let (stream, mut client) = pair(&handle);
            let mut inbox = Inbox::default();
            client.write_all(b"one two").unwrap();
            assert_eq!(next::<4>(&mut inbox, &stream).await, *b"one ");
            assert_eq!(unread(inbox, &stream, b"zero "), b"zero two");
            assert_eq!(unread(Inbox::default(), &stream, b""), b"");
        });
    }
}
