//! A reply: the protocol's error code, and the bytes to send.

use blockyard_disk::{Failure, Op};
use blockyard_nbd::wire::{self, Chunk, Headers, SimpleReply, chunk, cmd, errno};
use blockyard_ring::Segments;

/// A reply to `request`. `status` is an error code of the protocol.
pub struct Reply {
    pub request: wire::Request,
    pub status: Result<(), u32>,
    pub body: Body,
}

/// The contents of a reply.
pub enum Body {
    None,
    /// Data of a read. (The buffer of a write returns to the quota in this variant, too.)
    Buffer(Segments),
    /// Payloads of the block status chunks.
    Chunks(Vec<Vec<u8>>),
}

/// Returns the protocol's error code for a failure.
pub fn error_of(failure: Failure, op: Op) -> u32 {
    match failure {
        Failure::Io | Failure::Poisoned => errno::EIO,
        Failure::NoSpace => errno::ENOSPC,
        Failure::ReadOnly => errno::EPERM,
        Failure::OutOfRange if op == Op::Read => errno::EINVAL,
        Failure::OutOfRange => errno::ENOSPC,
        // Clients accept ENOTSUP only for fast zeroes.
        Failure::Unsupported if matches!(op, Op::WriteZeroes { fast: true, .. }) => errno::ENOTSUP,
        Failure::Unsupported => errno::EIO,
    }
}

fn reason(error: u32) -> &'static str {
    match error {
        errno::EPERM => "the export is read-only",
        errno::EINVAL => "the request is not valid: its range, its flags or its command",
        errno::ENOSPC => "no space is left, or the range is beyond the end",
        errno::ENOTSUP => "not supported here",
        _ => "the disk failed: see the server's log",
    }
}

impl Reply {
    /// Returns the number of bytes of read data in the body.
    pub fn data_bytes(&self) -> u64 {
        match &self.body {
            Body::Buffer(data) if self.request.command == cmd::READ => data.len() as u64,
            _ => 0,
        }
    }

    /// Appends the reply to `out`, except the data of a read.
    pub fn put(&self, headers: Headers, out: &mut Vec<u8>) {
        let wire::Request { cookie, offset, .. } = self.request;
        let header = |kind, len: usize, last| {
            let flags = if last { chunk::DONE } else { 0 };
            Chunk { flags, kind, cookie, offset, len: len as u64 }
        };
        match (headers, self.status, &self.body) {
            // A client without structured replies gets simple ones.
            (Headers::Simple, status, _) => {
                SimpleReply { error: status.err().unwrap_or(0), cookie }.put(out)
            }
            (Headers::Structured, Ok(()), Body::None) => SimpleReply { error: 0, cookie }.put(out),
            (_, Err(error), _) => {
                let text = reason(error).as_bytes();
                header(chunk::ERROR, 6 + text.len(), true).put(headers, out);
                out.extend(error.to_be_bytes());
                out.extend((text.len() as u16).to_be_bytes());
                out.extend(text);
            }
            (_, Ok(()), Body::Buffer(data))
                if self.request.command == cmd::READ && !data.is_empty() =>
            {
                header(chunk::OFFSET_DATA, 8 + data.len(), true).put(headers, out);
                out.extend(offset.to_be_bytes());
            }
            (_, Ok(()), Body::Chunks(chunks)) => {
                let kind = block_status_kind(headers);
                for (at, payload) in chunks.iter().enumerate() {
                    header(kind, payload.len(), at + 1 == chunks.len()).put(headers, out);
                    out.extend(payload);
                }
            }
            (Headers::Structured, Ok(()), _) if self.request.command != cmd::READ => {
                SimpleReply { error: 0, cookie }.put(out);
            }
            (_, Ok(()), _) => header(chunk::NONE, 0, true).put(headers, out),
        }
    }
}

fn block_status_kind(headers: Headers) -> u16 {
    if headers == Headers::Extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If other operations returned ENOTSUP, a client would conclude that the server cannot write
    /// zeroes at all.
    #[test]
    fn not_supported_is_returned_for_fast_zeroes_only() {
        let zeroes = |fast| Op::WriteZeroes { unmap: true, fua: false, fast };
        assert_eq!(error_of(Failure::Unsupported, zeroes(true)), errno::ENOTSUP);
        for op in [zeroes(false), Op::Discard, Op::Read] {
            assert_eq!(error_of(Failure::Unsupported, op), errno::EIO);
        }
        assert_eq!(error_of(Failure::OutOfRange, zeroes(false)), errno::ENOSPC);
    }
}
