//! Sends the replies of a connection.
//!
//! In: replies, as requests end. Out: writes, each of which carries all replies that are ready,
//! headers and data. What must hold: a reply is sent as a whole, or the connection ends. The server
//! takes the buffer of the request back after that.

use std::rc::Rc;

use blockyard_nbd::wire::cmd;
use blockyard_ring::{MOST_PIECES, Segments};

use super::connection::{Connection, is_heavy};
use super::reply::{Body, Reply};

/// Maximum number of bytes of headers and block status in one write.
const HEADERS: usize = 64 << 10;

impl Connection {
    /// Sends replies until the last one is sent.
    pub async fn send(self: Rc<Self>) {
        let header_buffer = Segments::buffer(HEADERS);
        let (mut batch, mut text, mut out) =
            (Vec::new(), Vec::with_capacity(HEADERS), Segments::default());
        loop {
            self.to_send.clear();
            if self.replies.borrow().is_empty() {
                if self.ended.get() && self.in_flight.get() == 0 {
                    return;
                }
                self.idle.busy_poll(|| self.replies.borrow().is_empty() && !self.ended.get()).await;
                self.to_send.wait().await;
                continue;
            }
            std::mem::swap(&mut batch, &mut *self.replies.borrow_mut());
            let mut from = 0;
            while from < batch.len() {
                let to =
                    self.gather(&batch[from..], &header_buffer, &mut text, &mut out).await + from;
                if !self.broken.get() && !out.is_empty() {
                    let sent;
                    (out, sent) = self.stream.write(out).await;
                    if sent.is_err() {
                        self.disconnect();
                    }
                }
                out.release();
                for reply in &mut batch[from..to] {
                    self.forget(reply);
                }
                self.sent.ring();
                from = to;
            }
            batch.clear();
        }
    }

    /// Gathers as many replies as fit in one write into `out`. Returns their number. A reply with
    /// headers and payloads longer than [`HEADERS`] is sent alone, in parts.
    async fn gather(
        &self,
        replies: &[Reply],
        header_buffer: &Segments,
        text: &mut Vec<u8>,
        out: &mut Segments,
    ) -> usize {
        let mut count = 0;
        text.clear();
        for reply in replies {
            let before = text.len();
            reply.put(self.terms.headers, text);
            if text.len() > HEADERS && count == 0 {
                self.send_long(text, header_buffer).await;
                return 1;
            }
            if text.len() > HEADERS || out.count() + 3 > MOST_PIECES {
                text.truncate(before);
                break;
            }
            header_buffer.copy_in(before, &text[before..]);
            out.gather(header_buffer, before, text.len() - before);
            if let (cmd::READ, Ok(()), Body::Buffer(data)) =
                (reply.request.command, reply.status, &reply.body)
            {
                out.gather(data, 0, data.len());
            }
            count += 1;
        }
        count
    }

    async fn send_long(&self, text: &[u8], header_buffer: &Segments) {
        for part in text.chunks(HEADERS) {
            header_buffer.copy_in(0, part);
            if !self.broken.get()
                && self.stream.write(header_buffer.slice(0, part.len())).await.1.is_err()
            {
                self.disconnect();
            }
        }
    }

    /// Ends the connection, because the client reads nothing or is gone.
    fn disconnect(&self) {
        self.broken.set(true);
        self.served.release_paused();
        self.stream.shutdown();
    }

    fn forget(&self, reply: &mut Reply) {
        self.unsent.set(self.unsent.get() - reply.data_bytes());
        if is_heavy(&reply.request) {
            self.heavy.set(false);
        }
        if let Body::Buffer(segments) = std::mem::replace(&mut reply.body, Body::None) {
            self.give_back(segments, reply.request.len as usize);
        }
        self.finished();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};
    use std::os::unix::net::UnixStream;

    use blockyard_nbd::wire::{self, Headers, SimpleReply, errno};
    use blockyard_ring::Handle;
    use blockyard_storage::sim::{SimConfig, SimDisk, SimImage};

    use super::super::tests::connected::{Connected, connect, simulated, until};
    use super::*;

    fn connected(handle: &Handle, headers: Headers) -> Connected {
        let sim = SimDisk::new(SimImage::zeroed(1 << 20), SimConfig::new(1));
        connect(handle, headers, &sim, (1 << 20, None))
    }

    /// Queues the successful reply to a request that has arrived. `len`: length of the request.
    fn reply(connection: &Connection, command: u16, cookie: u64, (len, body): (usize, Body)) {
        connection.in_flight.set(connection.in_flight.get() + 1);
        connection.unanswered.set(connection.unanswered.get() + 1);
        connection.idle.enter();
        let request = wire::Request { flags: 0, command, cookie, offset: 0, len: len as u64 };
        connection.reply(&request, Ok(()), body);
    }

    /// Returns `len` bytes, all with this value.
    fn data(len: usize, byte: u64) -> (usize, Body) {
        (len, Body::Buffer(Segments::from_bytes(&vec![byte as u8; len])))
    }

    /// Returns how many of the queued replies are in each write.
    async fn writes(connection: &Connection) -> Vec<usize> {
        let replies = connection.replies.take();
        let (mut text, mut out) = (Vec::new(), Segments::default());
        let (buffer, mut from, mut counts) = (Segments::buffer(HEADERS), 0, Vec::new());
        while from < replies.len() {
            let count = connection.gather(&replies[from..], &buffer, &mut text, &mut out).await;
            assert!(out.count() <= MOST_PIECES && text.len() <= HEADERS);
            out.release();
            counts.push(count);
            from += count;
        }
        counts
    }

    #[test]
    fn all_replies_that_are_ready_are_sent_in_one_write() {
        simulated(async |handle| {
            let Connected { connection, .. } = connected(&handle, Headers::Simple);
            for cookie in 0..100 {
                reply(&connection, cmd::READ, cookie, data(512, cookie));
                reply(&connection, cmd::FLUSH, cookie, (0, Body::None));
            }
            assert_eq!(writes(&connection).await, [200]);
            // Each read may need three pieces of a write.
            (0..1000).for_each(|cookie| reply(&connection, cmd::READ, cookie, data(512, cookie)));
            let counts = writes(&connection).await;
            assert_eq!(counts.iter().sum::<usize>(), 1000);
            assert!(counts.len() > 1 && counts[0] > 300, "{counts:?}");
            // The headers alone are longer than their buffer.
            (0..5000).for_each(|cookie| reply(&connection, cmd::FLUSH, cookie, (0, Body::None)));
            assert_eq!(writes(&connection).await, [4096, 904]);
        });
    }

    /// Reads until the sender has ended.
    async fn received(handle: &Handle, client: &mut UnixStream, len: usize) -> Vec<u8> {
        let (mut all, mut room) = (Vec::new(), vec![0; 50_000]);
        until(handle, "all replies arrive", || {
            match client.read(&mut room) {
                Ok(n) => all.extend(&room[..n]),
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
            }
            all.len() >= len
        })
        .await;
        all
    }

    #[test]
    fn replies_arrive_whole_and_in_order_through_a_small_socket() {
        simulated(async |handle| {
            const LEN: usize = 40_000;
            let Connected { connection, mut client } = connected(&handle, Headers::Simple);
            let usage = connection.usage().clone();
            handle.spawn(connection.clone().send());
            for cookie in 1..=60 {
                let buffer = connection.take(LEN).await;
                buffer.copy_in(0, &[cookie as u8; LEN]);
                reply(&connection, cmd::READ, cookie, (LEN, Body::Buffer(buffer)));
            }
            assert_eq!(connection.unsent.get(), 60 * LEN as u64);
            let all = received(&handle, &mut client, 60 * (SimpleReply::BYTES + LEN)).await;
            for (cookie, part) in (1..=60).zip(all.chunks(SimpleReply::BYTES + LEN)) {
                let (head, data) = part.split_at(SimpleReply::BYTES);
                assert_eq!(SimpleReply::parse(head), Ok(SimpleReply { error: 0, cookie }));
                assert!(data.iter().all(|byte| u64::from(*byte) == cookie), "{cookie}");
            }
            until(&handle, "the sender forgets the replies", || connection.in_flight.get() == 0)
                .await;
            assert_eq!((connection.held.get(), connection.unsent.get(), usage.held()), (0, 0, 0));
        });
    }

    /// A reply with headers longer than the buffer for headers is sent in parts.
    #[test]
    fn a_long_reply_without_data_is_sent_alone() {
        simulated(async |handle| {
            let Connected { connection, mut client } = connected(&handle, Headers::Structured);
            handle.spawn(connection.clone().send());
            let contexts = [100_000, 3].map(|len| vec![5; len]).to_vec();
            for (cookie, body) in [(1, Body::None), (2, Body::Chunks(contexts)), (3, Body::None)] {
                let command = if cookie == 2 { cmd::BLOCK_STATUS } else { cmd::FLUSH };
                connection.heavy.set(cookie == 2 || connection.heavy.get());
                reply(&connection, command, cookie, (0, body));
            }
            let long = 2 * Headers::Structured.chunk_bytes() + 100_003;
            let all = received(&handle, &mut client, 2 * SimpleReply::BYTES + long).await;
            assert_eq!(all.len(), 2 * SimpleReply::BYTES + long);
            let (first, rest) = all.split_at(SimpleReply::BYTES);
            let (long, last) = rest.split_at(long);
            assert_eq!(SimpleReply::parse(first), Ok(SimpleReply { error: 0, cookie: 1 }));
            assert_eq!(SimpleReply::parse(last), Ok(SimpleReply { error: 0, cookie: 3 }));
            let chunk = wire::Chunk::parse(Headers::Structured, &long[..20]).unwrap();
            assert_eq!((chunk.flags, chunk.cookie, chunk.len), (0, 2, 100_000), "more follows");
            let end = wire::Chunk::parse(Headers::Structured, &long[100_020..100_040]).unwrap();
            assert_eq!((end.flags, end.cookie, end.len), (wire::chunk::DONE, 2, 3));
            until(&handle, "the next heavy request", || !connection.heavy.get()).await;
        });
    }

    #[test]
    fn a_client_that_is_gone_breaks_the_connection_and_frees_its_replies() {
        simulated(async |handle| {
            let Connected { connection, client } = connected(&handle, Headers::Simple);
            drop(client);
            handle.spawn(connection.clone().send());
            let buffer = connection.take(512).await;
            reply(&connection, cmd::READ, 1, (512, Body::Buffer(buffer)));
            until(&handle, "the reply is forgotten", || connection.in_flight.get() == 0).await;
            assert!(connection.broken.get() && connection.stream.is_shut());
            assert!(!connection.goes_on());
            assert_eq!((connection.held.get(), connection.usage().held()), (0, 0));
        });
    }

    /// A request in the middle of its work ends with an error if the connection ends, and without a
    /// reply if another server continues it.
    #[test]
    fn an_abandoned_request_is_an_error_or_belongs_to_the_next_server() {
        simulated(async |handle| {
            let request =
                wire::Request { flags: 0, command: cmd::CACHE, cookie: 9, offset: 0, len: 512 };
            for leaves in [false, true] {
                let Connected { connection, .. } = connected(&handle, Headers::Simple);
                connection.in_flight.set(1);
                connection.unanswered.set(1);
                connection.idle.enter();
                connection.heavy.set(true);
                if leaves {
                    connection.stream.leave();
                }
                connection.abandon(&request);
                let replies = connection.replies.borrow();
                let errors: Vec<_> = replies.iter().map(|reply| reply.status).collect();
                assert_eq!(connection.unanswered.get(), 0);
                if leaves {
                    assert_eq!((errors.len(), connection.in_flight.get()), (0, 0));
                    let left = connection.left.borrow();
                    assert_eq!(wire::Request::parse(Headers::Simple, &left), Ok(request));
                    assert!(!connection.heavy.get());
                } else {
                    assert_eq!(errors, [Err(errno::ESHUTDOWN)]);
                    assert!(connection.left.borrow().is_empty());
                }
            }
        });
    }
}
