//! An NBD server, one request at a time.
//!
//! In: an NBD URI without TLS. Out: a [`Target`]. The client negotiates simple replies only,
//! because it has one request in flight. What must hold: a server that hangs ends the run.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result};
use blockyard_nbd::Uri;
use blockyard_nbd::negotiate::{self, Terms};
use blockyard_nbd::uri::Host;
use blockyard_nbd::wire::{Headers, Request, SimpleReply, cmd, export, flag};

use super::{Access, SECTOR, Target};

const LIMIT: Duration = Duration::from_secs(60);

/// A TCP or Unix socket.
pub trait Stream: Read + Write + AsFd + Send {}
impl<T: Read + Write + AsFd + Send> Stream for T {}

pub struct Nbd {
    stream: BufReader<Box<dyn Stream>>,
    terms: Terms,
    cookie: u64,
}

/// Parses the address of an export.
pub fn parse(text: &str) -> Result<Uri> {
    let uri = Uri::parse(text).map_err(anyhow::Error::msg)?;
    anyhow::ensure!(!uri.tls, "{text}: this command measures without TLS (nbd, nbd+unix)");
    Ok(uri)
}

/// Connects to a server, and negotiates simple replies.
pub fn connect(uri: &Uri) -> Result<(Box<dyn Stream>, Terms)> {
    let mut stream: Box<dyn Stream> = match &uri.host {
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
    let terms =
        negotiate::greet(&mut stream).and_then(|()| negotiate::go(&mut stream, &uri.export));
    let terms = terms.map_err(anyhow::Error::msg).context("negotiating")?;
    Ok((stream, terms))
}

impl Nbd {
    pub fn open(uri: &Uri, access: Access) -> Result<Self> {
        let (stream, terms) = connect(uri)?;
        let most = u64::from(terms.maximum);
        anyhow::ensure!(
            access.largest <= most,
            "requests may have {most} bytes, not {}",
            access.largest
        );
        anyhow::ensure!(
            !(access.writes && terms.has(export::READ_ONLY)),
            "the export is read-only"
        );
        Ok(Nbd { stream: BufReader::new(stream), terms, cookie: 0 })
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, len: usize) -> Result<()> {
        self.cookie += 1;
        let mut header = Vec::with_capacity(28);
        let request = Request { flags, command, cookie: self.cookie, offset, len: len as u64 };
        request.put(Headers::Simple, &mut header);
        Ok(self.stream.get_mut().write_all(&header)?)
    }

    fn answered(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        let mut header = [0; SimpleReply::BYTES];
        self.stream.read_exact(&mut header)?;
        let reply = SimpleReply::parse(&header).ok().filter(|reply| reply.cookie == self.cookie);
        let reply = reply.context("the server's answer is none to this request")?;
        anyhow::ensure!(
            reply.error == 0,
            "{}: the server answers with error {}",
            what(),
            reply.error
        );
        Ok(())
    }
}

impl Target for Nbd {
    fn size(&self) -> u64 {
        self.terms.size
    }

    fn block(&self) -> u64 {
        u64::from(self.terms.minimum).max(SECTOR)
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.ask(cmd::READ, 0, offset, bytes.len())?;
        self.answered(|| format!("reading {} bytes at offset {offset}", bytes.len()))?;
        Ok(self.stream.read_exact(bytes)?)
    }

    fn write(&mut self, offset: u64, bytes: &mut [u8], durable: bool) -> Result<()> {
        let fua = durable && self.terms.has(export::SEND_FUA);
        self.ask(cmd::WRITE, if fua { flag::FUA } else { 0 }, offset, bytes.len())?;
        self.stream.get_mut().write_all(bytes)?;
        self.answered(|| format!("writing {} bytes at offset {offset}", bytes.len()))?;
        if durable && !fua && self.terms.has(export::SEND_FLUSH) {
            self.ask(cmd::FLUSH, 0, 0, 0)?;
            self.answered(|| "flushing".into())?;
        }
        Ok(())
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // NBD_CMD_DISC has no reply.
        let _ = self.ask(cmd::DISC, 0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_under_tls_are_refused() {
        assert_eq!(parse("nbd+unix:///x?socket=/run/s").unwrap().export, "x");
        assert!(parse("nbds://host/x").unwrap_err().to_string().contains("without TLS"));
    }
}
