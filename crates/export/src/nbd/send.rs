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
