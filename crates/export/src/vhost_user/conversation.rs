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

use blockyard_ring::parcel;
use rustix::event::EventfdFlags;
use vhost::vhost_user::message::FrontendReq;
use vhost::vhost_user::{BackendReqHandler, Error};

use super::handed::{self, Present, Served};
use super::session::Session;
use super::socket::{self, Next};
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
    /// Copies of the socket.
    for_handler: UnixStream,
    for_export: UnixStream,
    wake: OwnedFd,
}

impl Prepared {
    fn new(stream: UnixStream) -> Result<Self, Disconnect> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let copy = || stream.try_clone().map_err(Disconnect::Copying);
        let wake = rustix::event::eventfd(0, flags).map_err(|e| Disconnect::Copying(e.into()))?;
        Ok(Prepared { for_handler: copy()?, for_export: copy()?, wake, stream })
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
        let session = Session::new(export.clone(), process, export.new_state())
            .map_err(|e| Disconnect::Protocol(e.into()))?;
        Ok(Self::of(export, prepared, process, session))
    }

    /// Continues to serve a front end of another server. Its rings run from now on. Its messages
    /// are not read before [`Conversation::run`].
    pub fn resume(export: &Arc<Shared>, served: Served) -> Result<Self, Disconnect> {
        let Served { front_end: FrontEnd { stream, process }, since, state } = served;
        let prepared = Prepared::new(stream)?;
        let (features, protocol) = (state.features, state.protocol.bits());
        let session = Session::new(export.clone(), process, state)
            .map_err(|e| Disconnect::Protocol(e.into()))?;
        let mut conversation = Self::of(export, prepared, process, session);
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
        let Prepared { stream, for_handler, for_export, wake } = prepared;
        let messages = Messages::new(stream, for_handler, session);
        let client = Client::connected(&for_export);
        let (since, wake) = (client.since, Arc::new(wake));
        let counted = export.device.disk.client(KIND, client.id());
        let connection = Connection { stream: for_export, wake: wake.clone(), client, counted };
        *lock(&export.connection) = Some(connection);
        Conversation { messages, wake, process, since }
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
        let result = loop {
            // The holder has the state before the front end sends its next message.
            self.keep(export, listener);
            let (stream, wake) = (&self.messages.stream, self.wake.as_fd());
            if let Err(e) = waiting.until_whole(stream, wake, self.process) {
                break Err(Disconnect::Protocol(e.into()));
            }
            if is_stopped() {
                break Ok(());
            }
            match self.messages.next() {
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

    /// Keeps the session at the holder, if there is one.
    fn keep(&self, export: &Arc<Shared>, listener: &Listener) {
        if !keeper::is_on() {
            return;
        }
        let session = lock(&self.messages.session);
        let (stream, state) = (&self.messages.stream, &session.state);
        let present = Present { stream, process: self.process, since: self.since, state };
        export.keep(handed::pack(listener, Some(present), &VecDeque::new()));
    }
}

/// The messages of one front end, and the session that handles them.
pub struct Messages {
    stream: UnixStream,
    pub(super) session: Arc<Mutex<Session>>,
    handler: BackendReqHandler<Mutex<Session>>,
}

impl Messages {
    /// `copy`: a copy of `stream`.
    pub fn new(stream: UnixStream, copy: UnixStream, session: Session) -> Self {
        let session = Arc::new(Mutex::new(session));
        let handler = BackendReqHandler::from_stream(copy, session.clone());
        Messages { stream, session, handler }
    }

    /// Makes the `vhost` crate's handler know the features that the front end has negotiated with
    /// another server. The crate has no call for that. So it reads the messages of a negotiation
    /// from a socket pair, and then its descriptor is made to refer to the front end's connection.
    fn negotiated(&mut self, features: u64, protocol: u64) -> Result<(), Disconnect> {
        let failed = |e: Box<dyn std::error::Error + Send + Sync>| Disconnect::Protocol(e);
        let (mut front, back) = UnixStream::pair().map_err(Disconnect::Copying)?;
        let mut handler = BackendReqHandler::from_stream(back, self.session.clone());
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
            front.write_all(&message).map_err(Disconnect::Copying)?;
            handler.handle_request().map_err(|e| failed(e.into()))?;
            if value.is_none() {
                front.read_exact(&mut [0; ANSWER]).map_err(Disconnect::Copying)?;
            }
        }
        parcel::replace(&handler, self.stream.as_fd()).map_err(Disconnect::Copying)?;
        self.handler = handler;
        Ok(())
    }

    /// Waits for the next message and handles it. Returns false if the front end has disconnected.
    pub fn next(&mut self) -> Result<bool, Disconnect> {
        match socket::next(&self.stream).map_err(|e| Disconnect::Protocol(e.into()))? {
            Next::Gone => Ok(false),
            Next::Taken { request, reply, message } => {
                let answered = lock(&self.session).answer(&self.stream, request, reply, message);
                answered.map(|()| true).map_err(|e| Disconnect::Protocol(e.into()))
            }
            Next::Other { request } => match self.handler.handle_request() {
                Ok(()) => Ok(true),
                // Disconnect, because the front end would wait for the answer without a limit.
                Err(e) if socket::has_data_answer(request) => Err(Disconnect::Protocol(e.into())),
                Err(Error::ReqHandlerError(_) | Error::InvalidOperation(_)) => Ok(true),
                Err(Error::Disconnected) => Ok(false),
                Err(e) => Err(Disconnect::Protocol(e.into())),
            },
        }
    }
}
