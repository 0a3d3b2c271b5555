//! A front end that is served: its connection, its messages, and the session that handles them.
//!
//! In: a front end that has connected, or one of another server. Out: the end of its session, or
//! its state for the next server.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use blockyard_disk::KnownFiles;
use rustix::event::EventfdFlags;
use vhost::vhost_user::message::FrontendReq;
use vhost::vhost_user::{BackendReqHandler, Error};

use super::handed::{self, Present, Served};
use super::kept::Kept;
use super::refusal::as_unusable;
use super::session::Session;
use super::socket::{self, Answer, Incoming};
use super::state::SessionState;
use super::waiting::{FrontEnd, Waiting};
use super::{Connection, KIND, Shared, lock};
use crate::{Client, Listener, keeper};

/// Version of the protocol in the flags of a message.
const MESSAGE_VERSION: u32 = 1;
/// Length of an answer with one number, in bytes.
const ANSWER: usize = 20;

/// Reasons why a front end is disconnected.
#[derive(Debug, thiserror::Error)]
pub enum Disconnect {
    #[error("cannot duplicate the socket of its connection: {0}")]
    Copying(io::Error),
    #[error("it truncated memory that it shares, or its huge pages ran out")]
    LostMemory,
    /// A session of another server that cannot go on. The front end alone is the reason.
    #[error("{0}")]
    Unusable(String),
    /// A message that cannot be answered.
    #[error("{0}")]
    Protocol(Box<dyn std::error::Error + Send + Sync>),
}

/// A session that has ended so that another server continues it.
pub struct Leaving {
    stream: UnixStream,
    process: Option<i32>,
    since: Option<SystemTime>,
    state: SessionState,
}

impl Leaving {
    pub fn present(&self) -> Present<'_> {
        let Leaving { stream, process, since, state } = self;
        Present { stream, process: *process, since: *since, state }
    }
}

/// A connection with all that a session needs besides its state.
struct Prepared {
    stream: UnixStream,
    /// A copy of the socket.
    for_export: UnixStream,
    /// Connects [`Messages`] and the `vhost` crate's handler.
    pair: (UnixStream, UnixStream),
    wake: Arc<OwnedFd>,
}

impl Prepared {
    fn new(stream: UnixStream) -> Result<Self, Disconnect> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let for_export = stream.try_clone().map_err(Disconnect::Copying)?;
        let pair = UnixStream::pair().map_err(Disconnect::Copying)?;
        let wake = rustix::event::eventfd(0, flags).map_err(|e| Disconnect::Copying(e.into()))?;
        Ok(Prepared { stream, for_export, pair, wake: Arc::new(wake) })
    }
}

/// A front end that is served.
pub struct Conversation {
    messages: Messages,
    wake: Arc<OwnedFd>,
    process: Option<i32>,
    since: Option<SystemTime>,
}

impl Conversation {
    /// Begins to serve a front end that has just connected.
    pub fn begin(export: &Arc<Shared>, front_end: FrontEnd) -> Result<Self, Disconnect> {
        let FrontEnd { stream, process } = front_end;
        let prepared = Prepared::new(stream)?;
        let session =
            Session::new(export.clone(), process, export.new_state(), prepared.wake.clone())
                .map_err(|e| Disconnect::Protocol(e.into()))?;
        Ok(Self::of(export, prepared, process, session))
    }

    /// Continues to serve a front end of another server. Its rings run from now on, except those of
    /// a disk that must wait (see [`crate::custody`]). Its messages are not read before
    /// [`Conversation::run`]. Error [`Disconnect::Unusable`]: no server can continue it.
    pub fn resume(export: &Arc<Shared>, served: Served) -> Result<Self, Disconnect> {
        let Served { front_end: FrontEnd { stream, process }, since, state } = served;
        let prepared = Prepared::new(stream)?;
        let (features, protocol) = (state.features, state.protocol.bits());
        let session = Session::new(export.clone(), process, state, prepared.wake.clone());
        let session = session.map_err(|e| match as_unusable(&e) {
            Some(why) => Disconnect::Unusable(why.to_string()),
            None => Disconnect::Protocol(e.into()),
        })?;
        let mut conversation = Self::of(export, prepared, process, session);
        lock(&conversation.messages.session).may_repeat = true;
        if let Err(e) = conversation.messages.negotiated(features, protocol) {
            lock(&conversation.messages.session).release();
            return Err(e);
        }
        if let Some(connection) = &mut *lock(&export.connection) {
            connection.client.since = since;
            connection.client.features = Some(features).filter(|features| *features != 0);
        }
        Ok(Conversation { since, ..conversation })
    }

    fn of(
        export: &Arc<Shared>,
        prepared: Prepared,
        process: Option<i32>,
        session: Session,
    ) -> Self {
        let Prepared { stream, for_export, pair, wake } = prepared;
        let messages = Messages::new(stream, pair, session);
        let client = Client::connected(&for_export);
        let since = client.since;
        let counted = export.device.disk.client(KIND, client.id());
        let connection = Connection { stream: for_export, wake: wake.clone(), client, counted };
        *lock(&export.connection) = Some(connection);
        Conversation { messages, wake, process, since }
    }

    /// Lets the rings take requests that waited until this process is the owner.
    pub fn run_held(&self) {
        lock(&self.messages.session).run_held();
    }

    /// Handles the front end's messages until it disconnects, or until the export stops. Returns
    /// the session if another server continues it.
    pub fn run(
        mut self,
        export: &Arc<Shared>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Option<Leaving>, Disconnect> {
        let listener = waiting.listener();
        let is_stopped = || export.stop.load(Ordering::SeqCst);
        let alarm = lock(&self.messages.session).alarm.clone();
        let new_images = &export.has_new_images;
        let is_over = || is_stopped() || alarm.is_raised() || new_images.load(Ordering::SeqCst);
        let keeping = (self.process, self.since);
        let keep = |messages: &Messages| messages.keep(export, listener, keeping);
        keep(&self.messages);
        let result = loop {
            let (stream, wake) = (&self.messages.stream, self.wake.as_fd());
            if let Err(e) = waiting.until_whole(stream, wake, self.process, &is_over) {
                break Err(Disconnect::Protocol(e.into()));
            }
            if alarm.is_raised() {
                break Err(Disconnect::LostMemory);
            }
            if is_stopped() {
                break Ok(());
            }
            if new_images.swap(false, Ordering::SeqCst) {
                // After the flag is cleared, and before the next look at the reasons to wake.
                let _ = rustix::io::read(wake, &mut [0; 8]);
                keep(&self.messages);
                continue;
            }
            match self.messages.next(keep) {
                Ok(true) if lock(&self.messages.session).ends => {
                    break Err(Disconnect::Protocol("its disk cannot be used now".into()));
                }
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(e) => break Err(e),
            }
        };
        let leaves = result.is_ok() && export.handing_over.load(Ordering::SeqCst);
        let Conversation { messages: Messages { stream, session, .. }, process, since, .. } = self;
        let state = {
            let mut session = lock(&session);
            if leaves { session.release_for_next() } else { session.release() }
        };
        *lock(&export.channel) = None;
        let connection = lock(&export.connection).take();
        if let Some(connection) = connection {
            connection.counted.ends(match &result {
                Err(e) => e.to_string(),
                Ok(()) if leaves => "another server continues it".into(),
                Ok(()) if is_stopped() => "the export has ended".into(),
                Ok(()) => "it has closed its connection".into(),
            });
        }
        if !leaves {
            export.keep_listener(listener);
        }
        // Closing the front end's descriptors may block.
        result.map(|()| leaves.then_some(Leaving { stream, process, since, state }))
    }
}

/// The messages of one front end, and the session that handles them.
pub struct Messages {
    stream: UnixStream,
    pub(super) session: Arc<Mutex<Session>>,
    /// The `vhost` crate's handler, and the other end of its socket. It does not read the front
    /// end's socket, because a message that it has read would be lost if this server died.
    handler: BackendReqHandler<Mutex<Session>>,
    inner: UnixStream,
    kept: Mutex<Kept>,
    images: Mutex<KnownFiles>,
}

impl Messages {
    /// `pair`: a new socket pair.
    pub fn new(stream: UnixStream, pair: (UnixStream, UnixStream), session: Session) -> Self {
        let session = Arc::new(Mutex::new(session));
        let (inner, outer) = pair;
        let handler = BackendReqHandler::from_stream(outer, session.clone());
        let (kept, images) = Default::default();
        Messages { stream, session, handler, inner, kept, images }
    }

    /// Keeps the session at the holder, if there is one.
    fn keep(
        &self,
        export: &Shared,
        listener: &Listener,
        (process, since): (Option<i32>, Option<SystemTime>),
    ) {
        if !keeper::is_on() {
            return;
        }
        let mut session = lock(&self.session);
        session.state.images = lock(&self.images).of(&export.device.disk.source());
        let present = Present { stream: &self.stream, process, since, state: &session.state };
        let parcel = handed::pack_with_sources(listener, Some(present), &VecDeque::new());
        export.keep(parcel, &mut lock(&self.kept));
    }

    /// Makes the `vhost` crate's handler know the features that the front end has negotiated with
    /// another server. The crate has no call for that, so it gets the messages of a negotiation.
    fn negotiated(&mut self, features: u64, protocol: u64) -> Result<(), Disconnect> {
        let messages = [
            (FrontendReq::GET_FEATURES, None),
            (FrontendReq::GET_PROTOCOL_FEATURES, None),
            (FrontendReq::SET_PROTOCOL_FEATURES, Some(protocol)),
            (FrontendReq::SET_FEATURES, Some(features)),
        ];
        // A front end that has set no features yet must not seem to have refused all.
        for (request, value) in messages.into_iter().filter(|(_, value)| *value != Some(0)) {
            let body = value.map(u64::to_ne_bytes);
            let body = body.as_ref().map_or(&[][..], |body| &body[..]);
            let words = [request as u32, MESSAGE_VERSION, body.len() as u32];
            let header = words.iter().flat_map(|word| word.to_ne_bytes());
            let message: Vec<u8> = header.chain(body.iter().copied()).collect();
            self.inner.write_all(&message).map_err(Disconnect::Copying)?;
            self.handler.handle_request().map_err(|e| Disconnect::Protocol(e.into()))?;
            if value.is_none() {
                self.inner.read_exact(&mut [0; ANSWER]).map_err(Disconnect::Copying)?;
            }
        }
        Ok(())
    }

    /// Waits for the next message and handles it. Returns false if the front end has disconnected.
    ///
    /// The message stays in the socket until `keep` has kept the changed session. If this server
    /// dies, the next one finds the message, the change, or both. So to handle a message again must
    /// be harmless. The answer comes last, because a front end must not get two of them.
    pub fn next(&mut self, keep: impl FnOnce(&Self)) -> Result<bool, Disconnect> {
        let failed = |e: io::Error| Disconnect::Protocol(e.into());
        let Some(mut message) = socket::next(&self.stream).map_err(failed)? else {
            return Ok(false);
        };
        let handled = self.handle(&mut message);
        if handled.is_ok() {
            keep(self);
            let mut session = lock(&self.session);
            session.may_repeat = false;
            session.run_held();
        }
        message.consume(&self.stream).map_err(failed)?;
        if let Some(answer) = handled? {
            answer.send(&self.stream).map_err(failed)?;
        }
        Ok(true)
    }

    fn handle(&mut self, message: &mut Incoming) -> Result<Option<Answer>, Disconnect> {
        let failed = |e: io::Error| Disconnect::Protocol(e.into());
        let (request, reply) = (message.request, message.reply);
        if let Some(message) = message.parsed() {
            return lock(&self.session).answer(request, reply, message).map_err(failed);
        }
        message.forward(&self.inner).map_err(failed)?;
        match self.handler.handle_request() {
            Ok(()) => {}
            // Disconnect, because the front end would wait for the answer without a limit.
            Err(e) if socket::has_data_answer(request) => {
                return Err(Disconnect::Protocol(e.into()));
            }
            Err(Error::ReqHandlerError(_) | Error::InvalidOperation(_)) => {}
            Err(e) => return Err(Disconnect::Protocol(e.into())),
        }
        Answer::of_crate(&self.inner).map_err(failed)
    }
}
