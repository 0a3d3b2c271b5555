//! The option phase of a client: what server and client agree on.
//!
//! In: a connected, blocking stream with a deadline of its own, and an export's name. Out:
//! [`Terms`]. What must hold: the length of each reply is bounded; numbers that no disk can have
//! are refused here.

use std::io::{Read, Write};

use crate::error::{NbdError, NbdErrorKind};
use crate::wire::{self, Headers, OptionHeader, OptionReply, export, handshake, info, opt, rep};

/// Maximum length of a reply to an option in bytes, and maximum number of replies to one option.
const REPLY_MOST: u32 = 16 << 10;
const REPLIES_MOST: usize = 64;
/// Maximum number of characters of a server's message that are logged.
const MESSAGE_MOST: usize = 200;
const ALLOCATION: &str = "base:allocation";
/// Maximum of the minimum block size in bytes (the protocol's limit).
const BLOCK_MOST: u32 = 64 << 10;

/// The terms that server and client have agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Size of the export in bytes.
    pub size: u64,
    /// See [`wire::export`].
    pub flags: u16,
    /// Minimum, preferred and maximum block size in bytes.
    pub minimum: u32,
    pub preferred: u32,
    pub maximum: u32,
    pub headers: Headers,
    /// Id of the meta context base:allocation.
    pub allocation: Option<u32>,
}

impl Terms {
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Reads the greeting, and sends the client's flags.
pub fn greet(stream: &mut impl Stream) -> Result<(), NbdError> {
    let greeting: [u8; 18] = bytes(stream)?;
    let (magic, option) = (wire::u64_at(&greeting, 0), wire::u64_at(&greeting, 8));
    if magic != wire::GREETING {
        return Err(NbdError::protocol("what answers there is no NBD server"));
    }
    let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
    if option != wire::OPTION || flags & handshake::FIXED_NEWSTYLE == 0 {
        return Err(NbdError::protocol("the server does not know fixed newstyle negotiation"));
    }
    let ours = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    send(stream, &u32::from(ours).to_be_bytes())
}

/// Requests TLS (NBD_OPT_STARTTLS). The next byte belongs to TLS.
pub fn start_tls(stream: &mut impl Stream) -> Result<(), NbdError> {
    match ask(stream, opt::STARTTLS, &[], |_, _| {
        Err(NbdError::protocol("the server answers STARTTLS with more than yes or no"))
    })? {
        Answer::Granted => Ok(()),
        Answer::Refused(_, message) if message.is_empty() => {
            Err(NbdError::new(NbdErrorKind::Refused, "the server has no TLS"))
        }
        Answer::Refused(_, message) => Err(NbdError::new(
            NbdErrorKind::Refused,
            format!("the server has no TLS (\"{message}\")"),
        )),
    }
}

/// Negotiates all features that this client uses, and the export.
pub fn agree(stream: &mut impl Stream, name: &str) -> Result<Terms, NbdError> {
    let mut headers = Headers::Simple;
    for (option, these) in
        [(opt::EXTENDED_HEADERS, Headers::Extended), (opt::STRUCTURED_REPLY, Headers::Structured)]
    {
        match ask(stream, option, &[], |_, _| Ok(()))? {
            Answer::Granted => {
                headers = these;
                break;
            }
            Answer::Refused(rep::ERR_TLS_REQD, _) => {
                return Err(refusal(name, rep::ERR_TLS_REQD, ""));
            }
            Answer::Refused(..) => {}
        }
    }
    let mut allocation = None;
    if headers != Headers::Simple {
        let mut data = named(name);
        data.extend(1u32.to_be_bytes());
        data.extend((ALLOCATION.len() as u32).to_be_bytes());
        data.extend(ALLOCATION.as_bytes());
        // A refusal is no error: without this context the client only does not know where holes
        // are.
        ask(stream, opt::SET_META_CONTEXT, &data, |kind, data| {
            if kind == rep::META_CONTEXT && data.len() >= 4 && &data[4..] == ALLOCATION.as_bytes() {
                allocation = Some(wire::u32_at(data, 0));
            }
            Ok(())
        })?;
    }
    Ok(Terms { headers, allocation, ..go(stream, name)? })
}

/// Requests the export (NBD_OPT_GO). Requests and replies have simple headers, unless the server
/// has granted others before.
pub fn go(stream: &mut impl Stream, name: &str) -> Result<Terms, NbdError> {
    let mut data = named(name);
    data.extend(1u16.to_be_bytes());
    data.extend(info::BLOCK_SIZE.to_be_bytes());
    let (mut told, mut blocks) = (None, None);
    let answer = ask(stream, opt::GO, &data, |kind, data| {
        let of = (kind == rep::INFO)
            .then(|| data.first_chunk().map(|kind| u16::from_be_bytes(*kind)))
            .flatten();
        match (of, data.len()) {
            (Some(info::EXPORT), 12) => {
                told = Some((wire::u64_at(data, 2), u16::from_be_bytes([data[10], data[11]])));
            }
            (Some(info::BLOCK_SIZE), 14) => {
                blocks =
                    Some((wire::u32_at(data, 2), wire::u32_at(data, 6), wire::u32_at(data, 10)));
            }
            (Some(info::EXPORT | info::BLOCK_SIZE), len) => {
                return Err(NbdError::protocol(format!(
                    "the server describes the export in {len} bytes"
                )));
            }
            _ => {}
        }
        Ok(())
    })?;
    if let Answer::Refused(error, message) = answer {
        return Err(refusal(name, error, &message));
    }
    let (size, flags) =
        told.ok_or_else(|| NbdError::protocol("the server does not say how large the export is"))?;
    let blocks = blocks.unwrap_or((1, 4096, wire::MOST_PAYLOAD));
    let (headers, allocation) = (Headers::Simple, None);
    let terms = Terms {
        size,
        flags,
        minimum: blocks.0,
        preferred: blocks.1,
        maximum: blocks.2,
        headers,
        allocation,
    };
    terms.sound()
}

impl Terms {
    /// Checks the server's numbers, and adapts sizes to this client. Returns an error if a number
    /// is impossible.
    fn sound(mut self) -> Result<Self, NbdError> {
        if !self.has(export::HAS_FLAGS) {
            return Err(unsuitable(format!("the export's flags {:#x} are none", self.flags)));
        }
        if self.size == 0 || self.size > i64::MAX as u64 {
            return Err(unsuitable(format!("an export of {} bytes is no disk", self.size)));
        }
        // NBD specification, "Block size constraints": the maximum is at least the preferred size,
        // or that of the export. Otherwise a request would have millions of parts.
        let Terms { minimum, preferred, maximum, .. } = self;
        let good = minimum.is_power_of_two()
            && minimum <= BLOCK_MOST
            && preferred.is_power_of_two()
            && u64::from(maximum) >= self.size.min(preferred.max(minimum).max(512).into());
        if !good {
            return Err(unsuitable(format!(
                "blocks of {minimum}, {preferred} and at most {maximum} bytes cannot be"
            )));
        }
        self.preferred = preferred.clamp(minimum.max(512), 2 << 20);
        self.maximum = maximum.min(wire::MOST_PAYLOAD) & !(minimum - 1);
        // Requests must be whole blocks, so they cannot reach the bytes after the last whole block.
        self.size &= !u64::from(minimum - 1);
        if self.size == 0 {
            return Err(unsuitable("the export is smaller than its block".into()));
        }
        Ok(self)
    }
}

fn named(name: &str) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data
}

/// A stream for the option phase.
pub trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// The last reply to an option.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Granted,
    /// The error number, and the server's message.
    Refused(u32, String),
}

/// Sends an option. Calls `part` with each reply before the last one.
pub fn ask(
    stream: &mut impl Stream,
    option: u32,
    data: &[u8],
    mut part: impl FnMut(u32, &[u8]) -> Result<(), NbdError>,
) -> Result<Answer, NbdError> {
    let mut out = Vec::with_capacity(OptionHeader::BYTES + data.len());
    OptionHeader { option, len: data.len() as u32 }.put(&mut out);
    out.extend(data);
    send(stream, &out)?;
    for _ in 0..REPLIES_MOST {
        let header: [u8; OptionReply::BYTES] = bytes(stream)?;
        let reply = OptionReply::parse(&header)
            .map_err(|_| NbdError::protocol("the answer to an option is none"))?;
        if reply.option != option {
            return Err(NbdError::protocol(format!(
                "option {option} is answered as if it were {}",
                reply.option
            )));
        }
        if reply.len > REPLY_MOST {
            return Err(NbdError::protocol(format!(
                "the answer to option {option} has {} bytes",
                reply.len
            )));
        }
        let mut data = vec![0; reply.len as usize];
        stream.read_exact(&mut data).map_err(gone)?;
        match reply.reply {
            rep::ACK => return Ok(Answer::Granted),
            error if error & rep::ERROR != 0 => {
                return Ok(Answer::Refused(error, printable(&data)));
            }
            kind => part(kind, &data)?,
        }
    }
    Err(NbdError::protocol(format!("the answer to option {option} has no end")))
}

fn unsuitable(what: String) -> NbdError {
    NbdError::new(NbdErrorKind::Unsuitable, what)
}

fn refusal(name: &str, error: u32, message: &str) -> NbdError {
    let what = match error {
        rep::ERR_UNKNOWN => "the server has no such export",
        rep::ERR_TLS_REQD => "the server demands TLS: say nbds:// (or nbds+unix://)",
        rep::ERR_POLICY => "the server's policy forbids it",
        rep::ERR_SHUTDOWN => "the server is shutting down",
        rep::ERR_UNSUP => "the server does not know NBD_OPT_GO",
        rep::ERR_BLOCK_SIZE_REQD => {
            "the server demands block sizes that this client did not ask for"
        }
        _ => "the server refuses the export",
    };
    let message = if message.is_empty() { String::new() } else { format!(" (\"{message}\")") };
    NbdError::new(NbdErrorKind::Refused, format!("{what}{message}"))
        .about(format!("export \"{name}\""))
}

/// Returns a server's message for a line of the log.
pub fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().take(MESSAGE_MOST).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn bytes<const N: usize>(stream: &mut impl Stream) -> Result<[u8; N], NbdError> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map_err(gone)?;
    Ok(bytes)
}

fn send(stream: &mut impl Stream, bytes: &[u8]) -> Result<(), NbdError> {
    stream.write_all(bytes).and_then(|()| stream.flush()).map_err(gone)
}

fn gone(error: std::io::Error) -> NbdError {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    let (kind, what) = match error.kind() {
        UnexpectedEof | BrokenPipe | ConnectionReset => {
            (NbdErrorKind::Closed, "the server closed the connection while it negotiated")
        }
        TimedOut | WouldBlock => (NbdErrorKind::Silent, "the server does not answer"),
        _ => return NbdError::of(NbdErrorKind::Io, error).about("negotiating"),
    };
    NbdError { source: Some(error.into()), ..NbdError::new(kind, what) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that has sent all its replies before it reads options.
    struct Script {
        says: std::io::Cursor<Vec<u8>>,
        hears: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            self.says.read(buf)
        }
    }

    impl Write for Script {
        fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
            self.hears.write(buf)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn greeting(flags: u16) -> Vec<u8> {
        let mut bytes = wire::GREETING.to_be_bytes().to_vec();
        bytes.extend(wire::OPTION.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        bytes
    }

    fn reply(option: u32, reply: u32, data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        OptionReply { option, reply, len: data.len() as u32 }.put(&mut out);
        out.extend(data);
        out
    }

    fn export_info(size: u64, flags: u16) -> Vec<u8> {
        let mut data = info::EXPORT.to_be_bytes().to_vec();
        data.extend(size.to_be_bytes());
        data.extend(flags.to_be_bytes());
        reply(opt::GO, rep::INFO, &data)
    }

    fn block_info(sizes: [u32; 3]) -> Vec<u8> {
        let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
        data.extend(sizes.iter().flat_map(|n| n.to_be_bytes()));
        reply(opt::GO, rep::INFO, &data)
    }

    fn talk(parts: &[Vec<u8>]) -> Result<Terms, NbdError> {
        let mut script = Script { says: std::io::Cursor::new(parts.concat()), hears: Vec::new() };
        greet(&mut script)?;
        agree(&mut script, "disk")
    }

    fn simple() -> Vec<Vec<u8>> {
        vec![
            greeting(3),
            reply(opt::EXTENDED_HEADERS, rep::ERR_UNSUP, b""),
            reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, b"no"),
        ]
    }

    fn with(more: &[Vec<u8>]) -> Result<Terms, NbdError> {
        talk(&[simple(), more.to_vec()].concat())
    }

    #[test]
    fn old_and_new_servers_are_understood() {
        let go = reply(opt::GO, rep::ACK, b"");
        let terms = with(&[export_info(10 << 20, 1), go.clone()]).unwrap();
        assert_eq!(
            (terms.size, terms.headers, terms.allocation),
            (10 << 20, Headers::Simple, None)
        );
        assert_eq!((terms.minimum, terms.preferred, terms.maximum), (1, 4096, 32 << 20));
        let mut context = 5u32.to_be_bytes().to_vec();
        context.extend(b"base:allocation");
        let terms = talk(&[
            greeting(3),
            reply(opt::EXTENDED_HEADERS, rep::ACK, b""),
            reply(opt::SET_META_CONTEXT, rep::META_CONTEXT, &context),
            reply(opt::SET_META_CONTEXT, rep::ACK, b""),
            // An unrequested name is ignored.
            reply(opt::GO, rep::INFO, b"\0\x01disk"),
            export_info((10 << 20) + 700, 0x10d),
            block_info([512, 65536, u32::MAX]),
            go,
        ]);
        let terms = terms.unwrap();
        assert_eq!((terms.headers, terms.allocation), (Headers::Extended, Some(5)));
        assert_eq!((terms.size, terms.maximum), ((10 << 20) + 512, 32 << 20), "whole blocks");
        assert!(terms.has(export::CAN_MULTI_CONN) && !terms.has(export::READ_ONLY));
    }

    #[test]
    fn what_cannot_be_is_refused_and_said() {
        let go = || reply(opt::GO, rep::ACK, b"");
        for (more, says) in [
            (vec![go()], "does not say how large"),
            (vec![export_info(0, 1), go()], "0 bytes is no disk"),
            (vec![export_info(1 << 63, 1), go()], "is no disk"),
            (vec![export_info(4096, 0), go()], "flags 0x0 are none"),
            (vec![export_info(4096, 1), block_info([0, 0, 0]), go()], "cannot be"),
            (vec![export_info(4096, 1), block_info([513, 4096, 1 << 20]), go()], "cannot be"),
            (
                vec![export_info(4096, 1), block_info([1 << 20, 1 << 20, 1 << 20]), go()],
                "cannot be",
            ),
            (vec![export_info(4096, 1), block_info([4096, 4096, 512]), go()], "cannot be"),
            (vec![export_info(1 << 20, 1), block_info([1, 4096, 1]), go()], "cannot be"),
            (vec![export_info(1 << 20, 1), block_info([1, 1, 1]), go()], "cannot be"),
            (
                vec![export_info(4095, 1), block_info([4096, 4096, 4096]), go()],
                "smaller than its block",
            ),
            (vec![reply(opt::GO, rep::INFO, b"\0\0abc"), go()], "in 5 bytes"),
            (
                vec![reply(opt::GO, rep::ERR_UNKNOWN, b"none\nhere")],
                "no such export (\"none here\")",
            ),
            (vec![reply(opt::GO, rep::ERR_TLS_REQD, b"")], "nbds://"),
            (vec![reply(opt::STRUCTURED_REPLY, rep::ACK, b"")], "as if it were 8"),
            (vec![reply(opt::GO, rep::INFO, &[9; 20000])], "has 20000 bytes"),
            (vec![reply(opt::GO, rep::INFO, b""); 100], "has no end"),
            (vec![vec![7; 20]], "is none"),
            (vec![go()[..11].to_vec()], "closed the connection"),
        ] {
            let error = with(&more).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
        let kind = |more: &[Vec<u8>]| with(more).unwrap_err().kind;
        assert_eq!(kind(&[reply(opt::GO, rep::ERR_UNKNOWN, b"")]), NbdErrorKind::Refused);
        assert_eq!(kind(&[export_info(0, 1), go()]), NbdErrorKind::Unsuitable);
        assert_eq!(kind(&[vec![7; 20]]), NbdErrorKind::Protocol);
        assert_eq!(kind(&[go()[..11].to_vec()]), NbdErrorKind::Closed);
        for (hello, says) in [
            (vec![0; 18], "no NBD server"),
            (greeting(0), "fixed newstyle"),
            (b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0".to_vec(), "fixed newstyle"),
            (b"NBD".to_vec(), "closed the connection"),
        ] {
            let error = talk(&[hello]).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
