//! Whether what the server has said is its protocol.

use blockyard_nbd::wire::{
    self, Chunk, Headers, OptionReply, Request, SimpleReply, chunk, cmd, flag, rep,
};

use crate::client::Talk;

struct Said<'a>(&'a [u8]);

impl<'a> Said<'a> {
    /// None: the connection was broken off here, as it may be at any place once the client has
    /// gone.
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (now, later) = self.0.split_at_checked(len)?;
        self.0 = later;
        Some(now)
    }
}

pub fn judge(talk: &Talk, said: &[u8]) {
    let mut said = Said(said);
    let Some(greeting) = said.take(18) else { return };
    assert_eq!(
        (wire::u64_at(greeting, 0), wire::u64_at(greeting, 8)),
        (wire::GREETING, wire::OPTION)
    );
    // Without a good handshake before it, the judge cannot know where options end and requests
    // begin (NBD_OPT_EXPORT_NAME).
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
    let answered = if headers == Headers::Simple {
        simple(talk, said)
    } else {
        structured(talk, headers, said)
    };
    let (Some(answered), Some(requests)) = (answered, &talk.requests) else { return };
    // Up to a DISC, or what the server will not skip, all are answered.
    for (cookie, request) in requests.iter().enumerate() {
        if request.command == cmd::DISC {
            break;
        }
        assert!(answered.contains(&(cookie as u64)), "no answer: {request:?}");
    }
}

/// Cookies of answered requests, each once. None: the stream was cut off, or the requests are not
/// known.
fn simple(talk: &Talk, mut said: Said<'_>) -> Option<Vec<u64>> {
    let requests = talk.requests.as_ref()?;
    let mut answered = Vec::new();
    while !said.0.is_empty() {
        let reply = SimpleReply::parse(said.take(SimpleReply::BYTES)?).expect("a simple reply");
        let request = requests
            .get(reply.cookie as usize)
            .unwrap_or_else(|| panic!("a reply without a request: {reply:?}"));
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
        // Structured replies are for reads and block status; others may be answered simply, without
        // extended headers.
        if headers == Headers::Structured && wire::u32_at(said.0.get(..4)?, 0) == SimpleReply::MAGIC
        {
            let reply = SimpleReply::parse(said.take(SimpleReply::BYTES)?).unwrap();
            let reads =
                known.is_some_and(|known| known[reply.cookie as usize].command == cmd::READ);
            assert!(!reads, "a read has a simple reply");
            once(&mut answered, reply.cookie);
            continue;
        }
        let header = Chunk::parse(headers, said.take(headers.chunk_bytes())?).expect("a chunk");
        let payload = said.take(header.len as usize)?;
        assert!(!answered.contains(&header.cookie), "a chunk behind the last: {header:?}");
        if let Some(known) = known {
            let request = known
                .get(header.cookie as usize)
                .unwrap_or_else(|| panic!("a reply without a request: {header:?}"));
            assert!(
                headers != Headers::Extended || header.offset == request.offset,
                "{header:?} of {request:?}"
            );
            match header.kind {
                chunk::BLOCK_STATUS => status(request, &payload[4..], 8),
                chunk::BLOCK_STATUS_EXT => {
                    assert_eq!(
                        wire::u32_at(payload, 4) as usize,
                        (payload.len() - 8) / 16,
                        "descriptors"
                    );
                    status(request, &payload[8..], 16);
                }
                _ => {}
            }
            if header.kind == chunk::OFFSET_DATA {
                let at = wire::u64_at(payload, 0);
                let end = at.checked_add(header.len - 8).unwrap();
                assert!(
                    at >= request.offset && end <= request.offset + request.len,
                    "{header:?} of {request:?}"
                );
            }
        }
        if header.kind & chunk::IS_ERROR != 0 {
            assert!(
                payload.len() >= 6 && wire::u32_at(payload, 0) != 0,
                "an error without a number: {header:?}"
            );
        }
        if header.flags & chunk::DONE != 0 {
            once(&mut answered, header.cookie);
        }
    }
    Some(answered)
}

/// Descriptors of `each` bytes: some, none empty, and with one asked for, one, and not longer than
/// that.
fn status(request: &Request, descriptors: &[u8], each: usize) {
    assert!(
        !descriptors.is_empty() && descriptors.len().is_multiple_of(each),
        "{} bytes of {each}",
        descriptors.len()
    );
    let lengths = descriptors.chunks_exact(each).map(|descriptor| match each {
        8 => wire::u32_at(descriptor, 0).into(),
        _ => wire::u64_at(descriptor, 0),
    });
    let lengths: Vec<u64> = lengths.collect();
    assert!(lengths.iter().all(|&len| len > 0), "an empty extent: {lengths:?}");
    if request.flags & flag::PAYLOAD_LEN != 0 {
        return;
    }
    if request.flags & flag::REQ_ONE != 0 {
        assert!(lengths.len() == 1 && lengths[0] <= request.len, "{lengths:?} of {request:?}");
    }
    let before: u64 = lengths[..lengths.len() - 1].iter().sum();
    assert!(before < request.len, "{lengths:?} of {request:?}");
}

fn once(answered: &mut Vec<u64>, cookie: u64) {
    assert!(!answered.contains(&cookie), "answered twice: {cookie}");
    answered.push(cookie);
}
