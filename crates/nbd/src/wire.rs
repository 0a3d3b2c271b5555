//! Numbers and headers of the NBD protocol, for both sides.
//!
//! All are big-endian on the wire. Source: the NBD project's proto.md. What must hold: this module
//! checks magic numbers only. The reader of a value checks the rest.

/// The server's greeting. [`OPTION`] and the handshake flags follow it.
pub const GREETING: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// Begins the greeting's second half, and each option of a client.
pub const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;

/// The port that IANA has assigned to NBD.
pub const PORT: u16 = 10809;
/// Maximum number of bytes of a name or description.
pub const MOST_STRING: usize = 4096;
/// Maximum number of bytes of a request if no other limit is negotiated.
pub const MOST_PAYLOAD: u32 = 32 << 20;

/// Handshake flags of the server. The client answers with those that it accepts.
pub mod handshake {
    pub const FIXED_NEWSTYLE: u16 = 1;
    pub const NO_ZEROES: u16 = 2;
}

/// Options (NBD_OPT_*).
pub mod opt {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options (NBD_REP_*).
pub mod rep {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error.
    pub const ERROR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR | 1;
    pub const ERR_POLICY: u32 = ERROR | 2;
    pub const ERR_INVALID: u32 = ERROR | 3;
    pub const ERR_PLATFORM: u32 = ERROR | 4;
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR | 10;
}

/// Types of information in [`rep::INFO`] (NBD_INFO_*).
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export (NBD_FLAG_*).
pub mod export {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const ROTATIONAL: u16 = 1 << 4;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Commands (NBD_CMD_*).
pub mod cmd {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags (NBD_CMD_FLAG_*).
pub mod flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks of structured and extended replies (NBD_REPLY_TYPE_*).
pub mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Set in every error.
    pub const IS_ERROR: u16 = 1 << 15;
    pub const ERROR: u16 = IS_ERROR | 1;
    pub const ERROR_OFFSET: u16 = IS_ERROR | 2;
    /// A flag of the chunk's header: the last chunk of its reply.
    pub const DONE: u16 = 1;
}

/// Errors (NBD_E*).
pub mod errno {
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    pub const ENOMEM: u32 = 12;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const EOVERFLOW: u32 = 75;
    pub const ENOTSUP: u32 = 95;
    pub const ESHUTDOWN: u32 = 108;
}

/// Flags of the meta context `base:allocation` (NBD_STATE_*).
pub mod state {
    pub const HOLE: u32 = 1;
    pub const ZERO: u32 = 2;
}

/// The headers of requests and replies, as negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Headers {
    #[default]
    Simple,
    /// NBD_OPT_STRUCTURED_REPLY.
    Structured,
    /// NBD_OPT_EXTENDED_HEADERS.
    Extended,
}

impl Headers {
    pub fn request_bytes(self) -> usize {
        match self {
            Headers::Simple | Headers::Structured => 28,
            Headers::Extended => 32,
        }
    }

    /// Returns the size of a chunk's header in bytes.
    pub fn chunk_bytes(self) -> usize {
        match self {
            Headers::Simple => SimpleReply::BYTES,
            Headers::Structured => 20,
            Headers::Extended => 32,
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    (u32::from(u16_at(bytes, at)) << 16) | u32::from(u16_at(bytes, at + 2))
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    (u64::from(u32_at(bytes, at)) << 32) | u64::from(u32_at(bytes, at + 4))
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u64,
}

impl Request {
    const MAGIC: u32 = 0x2560_9513;
    const EXTENDED_MAGIC: u32 = 0x21e4_1c71;

    /// Parses [`Headers::request_bytes`] bytes. Returns a wrong magic as the error.
    #[inline]
    pub fn parse(headers: Headers, bytes: &[u8]) -> Result<Self, u32> {
        let (magic, len) = match headers {
            Headers::Simple | Headers::Structured => (Self::MAGIC, u32_at(bytes, 24).into()),
            Headers::Extended => (Self::EXTENDED_MAGIC, u64_at(bytes, 24)),
        };
        if u32_at(bytes, 0) != magic {
            return Err(u32_at(bytes, 0));
        }
        let (flags, command) = (u16_at(bytes, 4), u16_at(bytes, 6));
        Ok(Request { flags, command, cookie: u64_at(bytes, 8), offset: u64_at(bytes, 16), len })
    }

    /// Appends the header to `bytes`. Without extended headers `len` has 32 bits.
    pub fn put(&self, headers: Headers, out: &mut Vec<u8>) {
        let extended = headers == Headers::Extended;
        out.extend(if extended { Self::EXTENDED_MAGIC } else { Self::MAGIC }.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend(self.command.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        match extended {
            true => out.extend(self.len.to_be_bytes()),
            false => out.extend((self.len as u32).to_be_bytes()),
        }
    }
}

/// A simple reply. The data of a read follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    pub error: u32,
    pub cookie: u64,
}

impl SimpleReply {
    pub const MAGIC: u32 = 0x6744_6698;
    pub const BYTES: usize = 16;

    pub fn parse(bytes: &[u8]) -> Result<Self, u32> {
        match u32_at(bytes, 0) {
            Self::MAGIC => Ok(SimpleReply { error: u32_at(bytes, 4), cookie: u64_at(bytes, 8) }),
            other => Err(other),
        }
    }

    #[inline]
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend(Self::MAGIC.to_be_bytes());
        out.extend(self.error.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
    }
}

/// A chunk's header. `len` bytes of payload follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    /// The offset of the request. Only extended headers have it.
    pub offset: u64,
    pub len: u64,
}

impl Chunk {
    pub const MAGIC: u32 = 0x668e_33ef;
    pub const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

    /// Parses [`Headers::chunk_bytes`] bytes. Returns a wrong magic as the error.
    pub fn parse(headers: Headers, bytes: &[u8]) -> Result<Self, u32> {
        let extended = headers == Headers::Extended;
        if u32_at(bytes, 0) != if extended { Self::EXTENDED_MAGIC } else { Self::MAGIC } {
            return Err(u32_at(bytes, 0));
        }
        let (offset, len) = if extended {
            (u64_at(bytes, 16), u64_at(bytes, 24))
        } else {
            (0, u32_at(bytes, 16).into())
        };
        Ok(Chunk {
            flags: u16_at(bytes, 4),
            kind: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset,
            len,
        })
    }

    #[inline]
    pub fn put(&self, headers: Headers, out: &mut Vec<u8>) {
        let extended = headers == Headers::Extended;
        out.extend(if extended { Self::EXTENDED_MAGIC } else { Self::MAGIC }.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend(self.kind.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        if extended {
            out.extend(self.offset.to_be_bytes());
            out.extend(self.len.to_be_bytes());
        } else {
            out.extend((self.len as u32).to_be_bytes());
        }
    }
}

/// The header of a client's option. `len` bytes of data follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    pub option: u32,
    pub len: u32,
}

impl OptionHeader {
    pub const BYTES: usize = 16;

    pub fn parse(bytes: &[u8]) -> Result<Self, u64> {
        match u64_at(bytes, 0) {
            OPTION => Ok(OptionHeader { option: u32_at(bytes, 8), len: u32_at(bytes, 12) }),
            other => Err(other),
        }
    }

    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend(OPTION.to_be_bytes());
        out.extend(self.option.to_be_bytes());
        out.extend(self.len.to_be_bytes());
    }
}

/// The header of a server's reply to an option. `len` bytes of data follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReply {
    pub option: u32,
    pub reply: u32,
    pub len: u32,
}

impl OptionReply {
    pub const BYTES: usize = 20;

    pub fn parse(bytes: &[u8]) -> Result<Self, u64> {
        match u64_at(bytes, 0) {
            OPTION_REPLY => Ok(OptionReply {
                option: u32_at(bytes, 8),
                reply: u32_at(bytes, 12),
                len: u32_at(bytes, 16),
            }),
            other => Err(other),
        }
    }

    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend(OPTION_REPLY.to_be_bytes());
        out.extend(self.option.to_be_bytes());
        out.extend(self.reply.to_be_bytes());
        out.extend(self.len.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_parsed() {
        for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
            let request = Request {
                flags: 1,
                command: cmd::WRITE,
                cookie: 7 << 40,
                offset: 5 << 33,
                len: 4096,
            };
            let mut bytes = Vec::new();
            request.put(headers, &mut bytes);
            assert_eq!(bytes.len(), headers.request_bytes());
            assert_eq!(Request::parse(headers, &bytes), Ok(request));
            bytes[0] ^= 1;
            assert!(Request::parse(headers, &bytes).is_err());
        }
        for headers in [Headers::Structured, Headers::Extended] {
            let offset = if headers == Headers::Extended { 9 << 33 } else { 0 };
            let chunk = Chunk {
                flags: chunk::DONE,
                kind: chunk::OFFSET_DATA,
                cookie: 7 << 40,
                offset,
                len: 4104,
            };
            let mut bytes = Vec::new();
            chunk.put(headers, &mut bytes);
            assert_eq!(
                (bytes.len(), Chunk::parse(headers, &bytes)),
                (headers.chunk_bytes(), Ok(chunk))
            );
        }
        let mut bytes = Vec::new();
        SimpleReply { error: errno::EIO, cookie: 3 }.put(&mut bytes);
        OptionHeader { option: opt::GO, len: 12 }.put(&mut bytes);
        OptionReply { option: opt::GO, reply: rep::ERR_UNKNOWN, len: 0 }.put(&mut bytes);
        assert_eq!(SimpleReply::parse(&bytes), Ok(SimpleReply { error: 5, cookie: 3 }));
        assert_eq!(OptionHeader::parse(&bytes[16..]), Ok(OptionHeader { option: 7, len: 12 }));
        let reply = OptionReply { option: 7, reply: 0x8000_0006, len: 0 };
        assert_eq!(OptionReply::parse(&bytes[32..]), Ok(reply));
        assert_eq!(OptionReply::parse(&bytes[16..]), Err(OPTION));
    }
}
