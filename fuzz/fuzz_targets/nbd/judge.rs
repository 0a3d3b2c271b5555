//! Whether what the server has said is its protocol.

use blockyard_image::nbd::wire::{self, Chunk, Headers, OptionReply, SimpleReply, chunk, cmd, rep};

use crate::client::Talk;

struct Said<'a>(&'a [u8]);

impl<'a> Said<'a> {
    /// None: the connection was broken off here, as it may be at any place once the client has gone.
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (now, later) = self.0.split_at_checked(len)?;
        self.0 = later;
        Some(now)
    }
}

pub fn judge(talk: &Talk, said: &[u8]) {
    let mut said = Said(said);
    let Some(greeting) = said.take(18) else { return };
    assert_eq!((wire::u64_at(greeting, 0), wire::u64_at(greeting, 8)), (wire::GREETING, wire::OPTION));
    // Without a good handshake before it nobody knows where options end and requests begin (NBD_OPT_EXPORT_NAME).
    let Some(headers) = talk.headers else { return };
    loop {
        let Some(bytes) = said.take(OptionReply::BYTES) else { return };
        let reply = OptionReply::parse(bytes).expect("an option's reply");
        if said.take(reply.len as usize).is_none() {
            return;
        }
        assert!(reply.reply & rep::ERROR == 0, "a good option is refused: {reply:?}");
        if reply.option == wire::opt::GO && reply.reply == rep::ACK {
            break;
        }
    }
    let answered = if headers == Headers::Simple { simple(talk, said) } else { structured(talk, headers, said) };
    let (Some(answered), Some(requests)) = (answered, &talk.requests) else { return };
    // Up to a DISC, or what the server will not skip, all are answered.
    for (cookie, request) in requests.iter().enumerate() {
        if request.command == cmd::DISC {
            break;
        }
        assert!(answered.contains(&(cookie as u64)), "no answer: {request:?}");
    }
}

/// Cookies that were answered, each once. None: the stream was broken off, or what was asked is not known.
fn simple(talk: &Talk, mut said: Said<'_>) -> Option<Vec<u64>> {
    let requests = talk.requests.as_ref()?;
    let mut answered = Vec::new();
    while !said.0.is_empty() {
        let reply = SimpleReply::parse(said.take(SimpleReply::BYTES)?).expect("a simple reply");
        let request = requests.get(reply.cookie as usize).unwrap_or_else(|| panic!("nobody asked: {reply:?}"));
        once(&mut answered, reply.cookie);
        if reply.error == 0 && request.command == cmd::READ {
            said.take(request.len as usize)?;
        }
    }
    Some(answered)
}

fn structured(talk: &Talk, headers: Headers, mut said: Said<'_>) -> Option<Vec<u64>> {
    let mut answered = Vec::new();
    let known = talk.requests.as_ref();
    while !said.0.is_empty() {
        // Structured replies are for reads and block status; others may be answered simply, without extended headers.
        if headers == Headers::Structured && wire::u32_at(said.0.get(..4)?, 0) == SimpleReply::MAGIC {
            let reply = SimpleReply::parse(said.take(SimpleReply::BYTES)?).unwrap();
            let reads = known.is_some_and(|known| known[reply.cookie as usize].command == cmd::READ);
            assert!(!reads, "a read has a simple reply");
            once(&mut answered, reply.cookie);
            continue;
        }
        let header = Chunk::parse(headers, said.take(headers.chunk_bytes())?).expect("a chunk");
        let payload = said.take(header.len as usize)?;
        assert!(!answered.contains(&header.cookie), "a chunk behind the last: {header:?}");
        if let Some(known) = known {
            let request = known.get(header.cookie as usize).unwrap_or_else(|| panic!("nobody asked: {header:?}"));
            if header.kind == chunk::OFFSET_DATA {
                let at = wire::u64_at(payload, 0);
                let end = at.checked_add(header.len - 8).unwrap();
                assert!(at >= request.offset && end <= request.offset + request.len, "{header:?} of {request:?}");
            }
        }
        if header.kind & chunk::IS_ERROR != 0 {
            assert!(payload.len() >= 6 && wire::u32_at(payload, 0) != 0, "an error without a number: {header:?}");
        }
        if header.flags & chunk::DONE != 0 {
            once(&mut answered, header.cookie);
        }
    }
    Some(answered)
}

fn once(answered: &mut Vec<u64>, cookie: u64) {
    assert!(!answered.contains(&cookie), "answered twice: {cookie}");
    answered.push(cookie);
}
