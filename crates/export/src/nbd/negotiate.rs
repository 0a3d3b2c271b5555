//! The option phase of fixed newstyle negotiation.
//!
//! In: a new connection. Out: the agreed terms, or the end of the connection. What must hold: an
//! option costs the server at most [`MOST_OPTION`] bytes of memory, and a client may send at most
//! [`MOST_OPTIONS`] options. The caller bounds the time. A client learns nothing of an export that
//! it may not use.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use blockyard_nbd::ServerTls;
use blockyard_nbd::wire::{self, Headers, OptionHeader, OptionReply, handshake, info, opt, rep};
use blockyard_ring::Segments;

use super::block_status::{Context, Contexts};
use super::exported::{Exported, Peer, Place};
use super::inbox::Inbox;
use super::refusal::{Refusal, RefusalKind};
use super::shared::{Settings, Shared};
use super::stream::Stream;
use super::terms::Terms;

/// Maximum number of bytes of an option's data that are read.
const MOST_OPTION: u32 = 64 << 10;
/// Maximum length in bytes of an option's data that the server skips before it sends the error "too
/// big".
const MOST_SKIPPED: u32 = 32 << 20;
const MOST_OPTIONS: u32 = 1024;
/// Maximum number of export names in an error message, and maximum length of each name in bytes.
/// Clients accept messages of up to 4096 bytes.
const MOST_NAMES: usize = 8;
const MOST_NAME: usize = 200;

/// The negotiation with one client.
pub struct Negotiation<'a> {
    shared: &'a Shared,
    tls: Option<&'a ServerTls>,
    stream: &'a Stream,
    inbox: &'a mut Inbox,
    peer: Peer,
    no_zeroes: bool,
    headers: Headers,
    /// The chosen contexts, and the name of the export for which the client chose them.
    contexts: Option<(Vec<u8>, Contexts)>,
}

/// The export and information for which a client asks.
struct Asked {
    exported: Arc<Exported>,
    name: Vec<u8>,
    infos: Vec<u16>,
    /// None: the client asks for information only.
    place: Option<Place>,
}

impl<'a> Negotiation<'a> {
    pub fn new(
        shared: &'a Shared,
        settings: &'a Settings,
        stream: &'a Stream,
        inbox: &'a mut Inbox,
    ) -> Self {
        let (tls, headers) = (settings.tls.as_ref(), Headers::Simple);
        Negotiation {
            shared,
            tls,
            stream,
            inbox,
            peer: Peer::default(),
            no_zeroes: false,
            headers,
            contexts: None,
        }
    }

    /// Returns the agreed terms and the client's identity, or `None` if the client has ended the
    /// negotiation.
    pub async fn run(mut self) -> io::Result<Option<(Terms, Peer)>> {
        let fixed = self.greet().await?;
        for _ in 0..MOST_OPTIONS {
            self.stream.option_turn().await;
            let header = self.inbox.exactly(self.stream, OptionHeader::BYTES).await?;
            let header = OptionHeader::parse(&header).map_err(|magic| {
                invalid(format!(
                    "an option begins with {magic:#018x}, which is not the magic of options"
                ))
            })?;
            if !fixed && header.option != opt::EXPORT_NAME {
                return Err(invalid(format!(
                    "option {} of a client that does not know fixed newstyle",
                    header.option
                )));
            }
            let long = header.len > MOST_OPTION;
            if long && (header.len > MOST_SKIPPED || header.option == opt::EXPORT_NAME) {
                return Err(invalid(format!(
                    "option {} has {} bytes, which is too long",
                    header.option, header.len
                )));
            }
            // Errors about TLS, about unknown options, and about options that take no data have
            // precedence over an error about the length.
            let data = match long {
                true => self.inbox.skip(self.stream, header.len.into()).await.map(|()| vec![0])?,
                false => self.inbox.exactly(self.stream, header.len as usize).await?,
            };
            if self.tls.is_some_and(|tls| tls.required)
                && !self.peer.tls
                && !matches!(header.option, opt::STARTTLS | opt::ABORT)
            {
                if header.option == opt::EXPORT_NAME {
                    return Err(invalid("it does not use TLS, which is required here".into()));
                }
                let refusal = Refusal::new(RefusalKind::TlsRequired, "TLS is required here");
                self.refuse_and_log(header.option, refusal).await?;
                continue;
            }
            match header.option {
                opt::EXPORT_NAME => {
                    let terms = self.export_name(&data).await?;
                    return Ok(Some((terms, self.peer)));
                }
                opt::ABORT => {
                    // The client may not wait for the acknowledgement.
                    let _ = self.answer(opt::ABORT, rep::ACK, &[]).await;
                    return Ok(None);
                }
                opt::STARTTLS => self.start_tls(&data).await?,
                opt::GO | opt::INFO | opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT if long => {
                    if header.option == opt::SET_META_CONTEXT {
                        self.contexts = None;
                    }
                    let why = format!("an option may have at most {MOST_OPTION} bytes");
                    let refusal = Refusal::new(RefusalKind::TooBig, why);
                    self.refuse(header.option, refusal).await?;
                }
                opt::GO => {
                    if let Some(terms) = self.go(&data).await? {
                        return Ok(Some((terms, self.peer)));
                    }
                }
                option => self.option(option, &data).await?,
            }
        }
        Err(invalid(format!("it has sent {MOST_OPTIONS} options and chosen no export")))
    }

    /// Exchanges the greeting and the handshake flags. Returns whether the client supports fixed
    /// newstyle. A client without fixed newstyle cannot receive replies to options. Such a client
    /// can only choose an export.
    async fn greet(&mut self) -> io::Result<bool> {
        let mut greeting = Vec::new();
        greeting.extend(wire::GREETING.to_be_bytes());
        greeting.extend(wire::OPTION.to_be_bytes());
        greeting.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
        self.write(&greeting).await?;
        let flags = wire::u32_at(&self.inbox.exactly(self.stream, 4).await?, 0);
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            return Err(invalid(format!("its handshake flags {flags:#x} include unknown ones")));
        }
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        Ok(flags & u32::from(handshake::FIXED_NEWSTYLE) != 0)
    }

    /// Handles an option that does not end the option phase.
    async fn option(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let empty = || match data {
            [] => Ok(()),
            _ => Err(Refusal::invalid("this option has no data")),
        };
        let done = match option {
            opt::LIST => match empty() {
                Ok(()) => self.list().await.map(Ok)?,
                Err(refusal) => Err(refusal),
            },
            opt::INFO => return self.go_or_info(opt::INFO, data).await.map(drop),
            opt::STRUCTURED_REPLY => empty().and_then(|()| match self.headers {
                Headers::Extended => Err(Refusal::new(
                    RefusalKind::ExtendedHeaders,
                    "extended headers were chosen already",
                )),
                Headers::Structured => {
                    Err(Refusal::invalid("structured replies were chosen already"))
                }
                Headers::Simple => {
                    self.headers = Headers::Structured;
                    Ok(())
                }
            }),
            opt::EXTENDED_HEADERS => empty().and_then(|()| match self.headers {
                Headers::Extended => Err(Refusal::invalid("extended headers were chosen already")),
                _ => {
                    self.headers = Headers::Extended;
                    Ok(())
                }
            }),
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => match self.meta_context(option, data)
            {
                Ok(replies) => {
                    for (id, name) in replies {
                        let reply = [&id.to_be_bytes(), name.as_bytes()].concat();
                        self.answer(option, rep::META_CONTEXT, &reply).await?;
                    }
                    Ok(())
                }
                Err(refusal) => Err(refusal),
            },
            _ => {
                let why = format!("option {option} is not known here");
                Err(Refusal::new(RefusalKind::Unsupported, why))
            }
        };
        match done {
            Ok(()) => self.answer(option, rep::ACK, &[]).await,
            Err(refusal) => self.refuse(option, refusal).await,
        }
    }

    /// Starts TLS. Drops the state from before TLS. If the client has sent clear text after this
    /// option, the connection ends, because TLS does not protect that text.
    async fn start_tls(&mut self, data: &[u8]) -> io::Result<()> {
        let refusal = match self.tls {
            None => Refusal::new(RefusalKind::Policy, "TLS is not set up on this server"),
            Some(_) if self.peer.tls => Refusal::invalid("TLS is in use already"),
            Some(_) if !data.is_empty() => Refusal::invalid("this option has no data"),
            Some(tls) => {
                if !self.inbox.is_empty() {
                    return Err(invalid("it sends plain bytes behind STARTTLS".into()));
                }
                self.answer(opt::STARTTLS, rep::ACK, &[]).await?;
                self.peer = Peer { tls: true, names: self.stream.start_tls(tls).await? };
                (self.headers, self.contexts) = (Headers::Simple, None);
                return Ok(());
            }
        };
        self.refuse(opt::STARTTLS, refusal).await
    }

    async fn list(&mut self) -> io::Result<()> {
        for exported in self.shared.visible(&self.peer) {
            self.stream.option_turn().await;
            let name = exported.name.as_bytes();
            let mut reply = Vec::from((name.len() as u32).to_be_bytes());
            reply.extend(name);
            reply.extend(exported.description.as_bytes());
            self.answer(opt::LIST, rep::SERVER, &reply).await?;
        }
        Ok(())
    }

    /// Returns the contexts that the client selects or lists, with their ids.
    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
    ) -> Result<Vec<(u32, &'static str)>, Refusal> {
        let sets = option == opt::SET_META_CONTEXT;
        if sets {
            self.contexts = None;
        }
        let mut fields = Fields(data);
        let (name, queries) = (fields.string()?, fields.u32()?);
        if self.headers == Headers::Simple {
            return Err(Refusal::invalid("structured replies must be chosen first"));
        }
        let mut contexts = Contexts::default();
        for _ in 0..queries {
            contexts.choose(fields.string()?, !sets);
        }
        fields.end()?;
        self.find(name)?;
        if !sets && queries == 0 {
            contexts.choose_all();
        }
        let replies = contexts
            .iter()
            .map(|context: Context| (if sets { context.id() } else { 0 }, context.name()))
            .collect();
        if sets {
            self.contexts = Some((name.to_vec(), contexts));
        }
        Ok(replies)
    }

    async fn go(&mut self, data: &[u8]) -> io::Result<Option<Terms>> {
        Ok(self
            .go_or_info(opt::GO, data)
            .await?
            .map(|asked| self.terms(asked.exported, asked.place, &asked.name)))
    }

    async fn go_or_info(&mut self, option: u32, data: &[u8]) -> io::Result<Option<Asked>> {
        match self.asked_for(option, data) {
            Ok(asked) => {
                for (kind, bytes) in described(&asked.exported, &asked.infos, self.headers) {
                    let reply = [&kind.to_be_bytes(), &bytes[..]].concat();
                    self.answer(option, rep::INFO, &reply).await?;
                }
                self.answer(option, rep::ACK, &[]).await?;
                Ok(Some(asked))
            }
            Err(refusal) => {
                self.refuse_and_log(option, refusal).await?;
                Ok(None)
            }
        }
    }

    fn asked_for(&self, option: u32, data: &[u8]) -> Result<Asked, Refusal> {
        let mut fields = Fields(data);
        let (name, count) = (fields.string()?, fields.u16()?);
        let infos = (0..count).map(|_| fields.u16()).collect::<Result<Vec<_>, _>>()?;
        fields.end()?;
        let exported = self.find(name).map_err(|refusal| match self.tls {
            // The name may be that of an export which is visible only with TLS. The reply must be
            // the same for names that do not exist.
            Some(_) if !self.peer.tls && self.shared.has_exports_under_tls() => {
                Refusal::new(RefusalKind::TlsRequired, format!("without TLS {refusal}"))
            }
            _ => refusal,
        })?;
        let place = if option == opt::GO { Some(self.place(&exported)?) } else { None };
        Ok(Asked { exported, name: name.to_vec(), infos, place })
    }

    /// Returns the names of the exports that the client may use, for an error message.
    fn there_are(&self) -> String {
        let exports = self.shared.visible(&self.peer);
        if exports.is_empty() {
            return String::new();
        }
        let names = exports
            .iter()
            .take(MOST_NAMES)
            .map(|e| format!("\"{}\"", printable(e.name.as_bytes())));
        let names = names.collect::<Vec<_>>().join(", ");
        let more = exports.len().saturating_sub(MOST_NAMES);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!(": there is {names}{more}")
    }

    fn find(&self, name: &[u8]) -> Result<Arc<Exported>, Refusal> {
        let found = self.shared.find(name, &self.peer);
        found.ok_or_else(|| {
            let name = printable(name);
            let why = format!("there is no export \"{name}\"{}", self.there_are());
            Refusal::new(RefusalKind::UnknownExport, why)
        })
    }

    /// Takes a place for this connection at the export that it has chosen.
    fn place(&self, exported: &Exported) -> Result<Place, Refusal> {
        let most = self.shared.places();
        exported.place(most).ok_or_else(|| {
            let name = printable(exported.name.as_bytes());
            let why = format!("export \"{name}\" has {most} connections, and may not have more");
            Refusal::new(RefusalKind::Policy, why)
        })
    }

    fn terms(&mut self, exported: Arc<Exported>, place: Option<Place>, name: &[u8]) -> Terms {
        let contexts = self.contexts.take().filter(|(of, _)| of == name);
        Terms {
            exported,
            headers: self.headers,
            contexts: contexts.map(|(_, contexts)| contexts).unwrap_or_default(),
            place: Cell::new(place),
        }
    }

    /// Handles NBD_OPT_EXPORT_NAME. The protocol has no error reply for it, so a refusal ends the
    /// connection.
    async fn export_name(&mut self, name: &[u8]) -> io::Result<Terms> {
        let exported = self.find(name).map_err(|refusal| invalid(refusal.context))?;
        let place = self.place(&exported).map_err(|refusal| invalid(refusal.context))?;
        let mut reply = Vec::from(exported.disk.capacity().to_be_bytes());
        reply.extend(exported.flags(self.headers).to_be_bytes());
        if !self.no_zeroes {
            reply.extend([0; 124]);
        }
        self.write(&reply).await?;
        Ok(self.terms(exported, Some(place), name))
    }

    /// Refuses an option and writes the refusal to the log, because the client cannot get the
    /// export.
    async fn refuse_and_log(&mut self, option: u32, refusal: Refusal) -> io::Result<()> {
        let (name, from) = (&self.shared.address, self.stream.from());
        self.shared.log.warn(name, None, format_args!("a client was refused ({from}): {refusal}"));
        self.refuse(option, refusal).await
    }

    async fn refuse(&mut self, option: u32, refusal: Refusal) -> io::Result<()> {
        self.answer(option, refusal.reply(), refusal.context.as_bytes()).await
    }

    async fn answer(&mut self, option: u32, reply: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(OptionReply::BYTES + data.len());
        OptionReply { option, reply, len: data.len() as u32 }.put(&mut bytes);
        bytes.extend(data);
        self.write(&bytes).await
    }

    async fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write(Segments::from_bytes(bytes)).await.1
    }
}

/// Returns the information about an export: the required items, and the items that the client asks
/// for.
fn described(exported: &Exported, asked: &[u16], headers: Headers) -> Vec<(u16, Vec<u8>)> {
    let mut all = Vec::new();
    let mut size = Vec::from(exported.disk.capacity().to_be_bytes());
    size.extend(exported.flags(headers).to_be_bytes());
    all.push((info::EXPORT, size));
    if asked.contains(&info::NAME) {
        all.push((info::NAME, exported.name.clone().into_bytes()));
    }
    if asked.contains(&info::DESCRIPTION) && !exported.description.is_empty() {
        all.push((info::DESCRIPTION, exported.description.clone().into_bytes()));
    }
    if asked.contains(&info::BLOCK_SIZE) {
        let block = exported.block;
        let sizes = [block.minimum, block.preferred, wire::MOST_PAYLOAD];
        all.push((info::BLOCK_SIZE, sizes.iter().flat_map(|size| size.to_be_bytes()).collect()));
    }
    all
}

/// Parser for an option's data.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Refusal> {
        let (now, later) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| Refusal::invalid("the option's data are too short"))?;
        self.0 = later;
        Ok(now)
    }

    fn u16(&mut self) -> Result<u16, Refusal> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn u32(&mut self) -> Result<u32, Refusal> {
        self.take(4).map(|bytes| wire::u32_at(bytes, 0))
    }

    fn string(&mut self) -> Result<&'a [u8], Refusal> {
        let len = self.u32()? as usize;
        let string = self.take(len)?;
        match len {
            0..=wire::MOST_STRING => Ok(string),
            _ => {
                let why = format!("a name may have at most {} bytes", wire::MOST_STRING);
                Err(Refusal::new(RefusalKind::TooBig, why))
            }
        }
    }

    fn end(&self) -> Result<(), Refusal> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Refusal::invalid("the option's data are too long"))
        }
    }
}

/// Returns a client's text with control characters escaped, for a log or a message.
fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[..text.len().min(MOST_NAME)]).escape_debug().to_string()
}

/// Returns an error for a client that breaks the protocol.
pub fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
