//! Sends the answers of a connection.
//!
//! In: answers, as requests end. Out: as many as are there in one write, headers and data side by
//! side. What must hold: an answer goes out whole, or the connection ends; what its request held is
//! given back afterwards.

use std::rc::Rc;

use blockyard_nbd::wire::cmd;
use blockyard_ring::{MOST_PIECES, Segments};

use super::connection::{Connection, is_heavy};
use super::reply::{Body, Reply};

/// Bytes of headers (and block status) that go out at a time.
const HEADERS: usize = 64 << 10;

impl Connection {
    /// Sends answers until the last one.
    pub async fn send(self: Rc<Self>) {
        let room = Segments::buffer(HEADERS);
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
                let to = self.gather(&batch[from..], &room, &mut text, &mut out).await + from;
                if !self.broken.get() && !out.is_empty() {
                    let sent;
                    (out, sent) = self.stream.write(out).await;
                    if sent.is_err() {
                        self.give_up();
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

    /// Puts as many replies into `out` as go in one write; how many. One whose text is long goes by
    /// itself, in parts.
    async fn gather(
        &self,
        replies: &[Reply],
        room: &Segments,
        text: &mut Vec<u8>,
        out: &mut Segments,
    ) -> usize {
        let mut count = 0;
        text.clear();
        for reply in replies {
            let before = text.len();
            reply.put(self.terms.headers, text);
            if text.len() > HEADERS && count == 0 {
                self.send_long(text, room).await;
                return 1;
            }
            if text.len() > HEADERS || out.count() + 3 > MOST_PIECES {
                text.truncate(before);
                break;
            }
            room.copy_in(before, &text[before..]);
            out.gather(room, before, text.len() - before);
            if let (cmd::READ, Ok(()), Body::Buffer(data)) =
                (reply.request.command, reply.status, &reply.body)
            {
                out.gather(data, 0, data.len());
            }
            count += 1;
        }
        count
    }

    async fn send_long(&self, text: &[u8], room: &Segments) {
        for part in text.chunks(HEADERS) {
            room.copy_in(0, part);
            if !self.broken.get() && self.stream.write(room.slice(0, part.len())).await.1.is_err() {
                self.give_up();
            }
        }
    }

    /// The client does not listen: nothing more is sent, nor taken.
    fn give_up(&self) {
        self.broken.set(true);
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
        self.went();
    }
}
