//! An NBD server, one request at a time.
//!
//! In: an address as NBD's URI specification writes it. Out: a [`Target`]. Fixed newstyle negotiation with NBD_OPT_GO, simple
//! replies, no TLS (the NBD protocol's proto.md). What must hold: what the server says is checked before it is used; a
//! server that goes silent ends the run.

use std::fmt;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Access, SECTOR, Target};

const PORT: u16 = 10809;
const LIMIT: Duration = Duration::from_secs(60);

const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;
/// No answer to an option is longer, in bytes.
const REPLY_MOST: u32 = 64 << 10;

const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_DISC: u16 = 2;
const CMD_FLUSH: u16 = 3;
const CMD_FLAG_FUA: u16 = 1;
const READ_ONLY: u16 = 1 << 1;
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;
/// Without a word of the server a request is at most so long, in bytes (the protocol's default).
const LARGEST: u32 = 32 << 20;

#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    host: Host,
    export: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Host {
    Tcp(String, u16),
    Unix(PathBuf),
}

impl Address {
    /// `nbd://HOST[:PORT][/EXPORT]` or `nbd+unix:///[EXPORT]?socket=PATH`.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = || format!("\"{text}\": say nbd://HOST[:PORT][/EXPORT] or nbd+unix:///[EXPORT]?socket=PATH");
        if let Some(rest) = text.strip_prefix("nbd+unix://") {
            let (export, socket) = rest.split_once("?socket=").with_context(wrong)?;
            anyhow::ensure!(!socket.is_empty(), wrong());
            return Ok(Address { host: Host::Unix(socket.into()), export: export.trim_start_matches('/').into() });
        }
        let rest = text.strip_prefix("nbd://").with_context(wrong)?;
        let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
        // (An IPv6 address is in brackets, and has colons of its own.)
        let (name, port) = match host.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
            Some((name, port)) => (name, port.parse().ok().with_context(wrong)?),
            None => (host, PORT),
        };
        let name = name.trim_start_matches('[').trim_end_matches(']');
        anyhow::ensure!(!name.is_empty(), wrong());
        Ok(Address { host: Host::Tcp(name.into(), port), export: export.into() })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Unix(path) => write!(f, "nbd+unix:///{}?socket={}", self.export, path.display()),
            Host::Tcp(name, port) if name.contains(':') => write!(f, "nbd://[{name}]:{port}/{}", self.export),
            Host::Tcp(name, port) => write!(f, "nbd://{name}:{port}/{}", self.export),
        }
    }
}

/// Both kinds of sockets.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

pub struct Nbd {
    stream: BufReader<Box<dyn Stream>>,
    size: u64,
    flags: u16,
    block: u64,
    cookie: u64,
}

impl Nbd {
    pub fn open(address: &Address, access: Access) -> Result<Self> {
        let stream: Box<dyn Stream> = match &address.host {
            Host::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(LIMIT))?;
                stream.set_write_timeout(Some(LIMIT))?;
                Box::new(stream)
            }
            Host::Tcp(name, port) => {
                let stream = TcpStream::connect((name.as_str(), *port))?;
                stream.set_read_timeout(Some(LIMIT))?;
                stream.set_write_timeout(Some(LIMIT))?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        };
        let mut nbd = Nbd { stream: BufReader::new(stream), size: 0, flags: 0, block: SECTOR, cookie: 0 };
        nbd.negotiate(&address.export, access).context("negotiating")?;
        anyhow::ensure!(!(access.writes && nbd.flags & READ_ONLY != 0), "the export is read-only");
        Ok(nbd)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).context("the server closed the connection or fell silent")?;
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_be_bytes(self.bytes()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.bytes()?))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.stream.get_mut().write_all(bytes)?)
    }

    fn negotiate(&mut self, export: &str, access: Access) -> Result<()> {
        let (magic, option) = (self.u64()?, self.u64()?);
        anyhow::ensure!(magic == MAGIC && option == OPTION, "it is no NBD server, or an oldstyle one");
        let flags = self.u16()?;
        anyhow::ensure!(flags & FIXED_NEWSTYLE != 0, "the server does not know fixed newstyle negotiation");
        let name = export.as_bytes();
        let mut hello = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes().to_vec();
        hello.extend(OPTION.to_be_bytes());
        hello.extend(OPT_GO.to_be_bytes());
        hello.extend((name.len() as u32 + 8).to_be_bytes());
        hello.extend((name.len() as u32).to_be_bytes());
        hello.extend(name);
        hello.extend(1u16.to_be_bytes());
        hello.extend(INFO_BLOCK_SIZE.to_be_bytes());
        self.send(&hello)?;
        let mut largest = LARGEST;
        while let Some(answer) = self.option_reply()? {
            let at = |from: usize| answer.get(from..from + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
            match (answer.first_chunk().map(|kind| u16::from_be_bytes(*kind)), answer.len()) {
                (Some(INFO_EXPORT), 12) => {
                    self.size = u64::from(at(2).unwrap_or(0)) << 32 | u64::from(at(6).unwrap_or(0));
                    self.flags = u16::from_be_bytes([answer[10], answer[11]]);
                }
                (Some(INFO_BLOCK_SIZE), 14) => {
                    self.block = u64::from(at(2).unwrap_or(0)).max(SECTOR);
                    largest = at(10).unwrap_or(largest);
                }
                _ => {}
            }
        }
        anyhow::ensure!(self.size > 0, "the export is empty, or the server told no size");
        anyhow::ensure!(self.block.is_power_of_two(), "blocks of {} bytes are none", self.block);
        let most = u64::from(largest);
        anyhow::ensure!(access.largest <= most, "requests may have {most} bytes, not {}", access.largest);
        Ok(())
    }

    /// An answer to our option; None: that was all.
    fn option_reply(&mut self) -> Result<Option<Vec<u8>>> {
        let (magic, _option, kind, len) = (self.u64()?, self.u32()?, self.u32()?, self.u32()?);
        anyhow::ensure!(magic == OPTION_REPLY && len <= REPLY_MOST, "the answer to NBD_OPT_GO is none");
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data)?;
        match kind {
            REP_ACK => Ok(None),
            REP_INFO => Ok(Some(data)),
            _ if kind & REP_ERROR != 0 => {
                let why = String::from_utf8_lossy(&data).into_owned();
                anyhow::bail!("the server refuses the export (error {}) {why}", kind & !REP_ERROR)
            }
            _ => Ok(Some(Vec::new())),
        }
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, len: usize) -> Result<()> {
        self.cookie += 1;
        let mut header = Vec::with_capacity(28);
        header.extend(REQUEST.to_be_bytes());
        header.extend(flags.to_be_bytes());
        header.extend(command.to_be_bytes());
        header.extend(self.cookie.to_be_bytes());
        header.extend(offset.to_be_bytes());
        header.extend((len as u32).to_be_bytes());
        self.send(&header)
    }

    fn answered(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        let (magic, error, cookie) = (self.u32()?, self.u32()?, self.u64()?);
        anyhow::ensure!(magic == SIMPLE_REPLY && cookie == self.cookie, "the server's answer is none to this request");
        anyhow::ensure!(error == 0, "{}: the server answers with error {error}", what());
        Ok(())
    }
}

impl Target for Nbd {
    fn size(&self) -> u64 {
        self.size
    }

    fn block(&self) -> u64 {
        self.block
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.ask(CMD_READ, 0, offset, bytes.len())?;
        self.answered(|| format!("reading {} bytes at offset {offset}", bytes.len()))?;
        Ok(self.stream.read_exact(bytes)?)
    }

    fn write(&mut self, offset: u64, bytes: &mut [u8], durable: bool) -> Result<()> {
        let fua = durable && self.flags & SEND_FUA != 0;
        self.ask(CMD_WRITE, if fua { CMD_FLAG_FUA } else { 0 }, offset, bytes.len())?;
        self.send(bytes)?;
        self.answered(|| format!("writing {} bytes at offset {offset}", bytes.len()))?;
        if durable && !fua && self.flags & SEND_FLUSH != 0 {
            self.ask(CMD_FLUSH, 0, 0, 0)?;
            self.answered(|| "flushing".into())?;
        }
        Ok(())
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // There is no answer to it.
        let _ = self.ask(CMD_DISC, 0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let tcp =
            |name: &str, port, export: &str| Address { host: Host::Tcp(name.into(), port), export: export.into() };
        assert_eq!(Address::parse("nbd://host").unwrap(), tcp("host", PORT, ""));
        assert_eq!(Address::parse("nbd://host:1/a/b").unwrap(), tcp("host", 1, "a/b"));
        assert_eq!(Address::parse("nbd://[::1]/x").unwrap(), tcp("::1", PORT, "x"));
        assert_eq!(Address::parse("nbd://[::1]:7").unwrap(), tcp("::1", 7, ""));
        let unix = Address { host: Host::Unix("/run/s".into()), export: "x".into() };
        assert_eq!(Address::parse("nbd+unix:///x?socket=/run/s").unwrap(), unix);
        assert_eq!(unix.to_string(), "nbd+unix:///x?socket=/run/s");
        assert_eq!(tcp("::1", 7, "").to_string(), "nbd://[::1]:7/");
        for bad in ["nbd:", "nbd://", "nbd://:1", "nbd://h:x", "nbd+unix:///x", "nbd+unix:///x?socket=", "nbds://h"] {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
    }
}
