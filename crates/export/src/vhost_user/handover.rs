//! Hands an export over to another server, and continues the export of another server.
//!
//! What must hold: the front end sees neither a disconnection nor an unanswered message. If another
//! server cannot continue, this one can, with the same parcel. A front end that has made its
//! session unusable (it truncates its memory) is disconnected, and the hand-over goes on.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use blockyard_disk::{Disk, LocalDisk};
use blockyard_ring::parcel::Parcel;

use super::conversation::{Conversation, Disconnect};
use super::handed::{HandedSocket, Served, pack, pack_with_sources};
use super::kept::{Kept, Sourced};
use super::queue::QueueHandle;
use super::{QueueShape, Shared, Tuning, VhostUser, begin, begin_with, lock, ring};
use crate::export::{Obstacle, STOP_TIME};
use crate::{Handed, Listener, Reactors, custody, descriptors, keeper};

/// The name of this protocol in a hand-over, and in counts of clients.
pub const KIND: &str = "vhost-user";

impl VhostUser {
    /// Continues an export of another server. The rings of its front end run when this returns. The
    /// front end's messages are read when this process is the owner of the connection (see
    /// [`crate::custody`]).
    pub fn resume(
        disk: Arc<Disk>,
        handed: HandedSocket,
        shape: QueueShape,
        tuning: Tuning,
        reactors: Arc<Reactors>,
    ) -> io::Result<Self> {
        // Until the session runs, an error must leave the socket's file to another server, or to a
        // later attempt of this one.
        handed.listener.keep_file();
        let configured = usize::from(shape.queues);
        if let Some(queues) = handed.queues().filter(|queues| *queues != configured) {
            return Err(io::Error::other(format!(
                "the front end has negotiated with {queues} queues, and the disk is configured \
                 with {}",
                shape.queues
            )));
        }
        handed.check_images(&disk)?;
        let export = Shared::new(disk, shape, tuning, reactors)?;
        let HandedSocket { listener, served, waiting } = handed;
        let (next, acceptor) = (export.clone(), export.reactors.acceptor()?);
        let on_client = move |entrance| begin(&next, entrance);
        let registration = if served.is_none() && waiting.is_empty() {
            let registration = acceptor.register(listener, on_client)?;
            export.keep_listener(registration.listener());
            registration.listener().remove_file();
            registration
        } else {
            let (registration, entrance) = acceptor.register_entered(listener, on_client)?;
            let first = served.map(|served| First::resume(&export, served)).transpose()?;
            begin_with(&export, entrance, first, waiting)?;
            registration.listener().remove_file();
            registration
        };
        let registration = Some(registration);
        Ok(VhostUser { export, registration, descriptor_time: super::DESCRIPTOR_TIME })
    }
}

/// The front end of another server's session.
pub(super) enum First {
    GoesOn(Conversation),
    /// The session cannot go on. The owner of the connection ends it.
    Ends(UnixStream, Disconnect),
}

impl First {
    /// Continues a session. A fault of its front end ends the session alone. A lack of this server
    /// is an error, because another server may continue the session.
    fn resume(export: &Arc<Shared>, served: Served) -> io::Result<First> {
        let stream = served.front_end.stream.try_clone()?;
        match Conversation::resume(export, served) {
            Ok(conversation) => Ok(First::GoesOn(conversation)),
            Err(why @ Disconnect::Unusable(_)) => Ok(First::Ends(stream, why)),
            Err(e) => Err(io::Error::other(e)),
        }
    }
}

impl Shared {
    fn key(&self) -> String {
        format!("{KIND}:{}", self.device.disk.name())
    }

    /// Keeps the export at the holder, for the next server if this one dies.
    ///
    /// A server that takes over leaves there what the old one has put there. `kept`: what the
    /// keeper has of the session.
    pub(super) fn keep(&self, parcel: io::Result<Sourced>, kept: &mut Kept) {
        if !custody::is_owner() {
            return;
        }
        let key = self.key();
        let keep = |parcel: &Parcel| keeper::keep(&key, parcel);
        if let Some(e) = kept.change(parcel, keep, || keeper::forget(&key)) {
            let what = format_args!("the front end is lost if this server dies: {e}");
            self.device.log.warn(self.device.disk.name(), None, what);
        }
    }

    pub(super) fn keep_listener(&self, listener: &Listener) {
        if keeper::is_on() {
            let parcel = pack_with_sources(listener, None, &Default::default());
            self.keep(parcel, &mut Kept::default());
        }
    }

    /// The export ends, so the next server does not need it.
    pub(super) fn forget(&self) {
        if custody::is_owner() {
            keeper::forget(&self.key());
        }
    }
}

/// Returns why an export cannot be handed over.
pub(super) fn obstacle(export: &VhostUser) -> Option<Obstacle> {
    descriptors::obstacle().filter(|_| lock(&export.export.connection).is_some())
}

/// Stops an export, and returns its parcel.
pub(super) fn hand_over(export: &mut VhostUser) -> Option<Handed> {
    let listener = export.registration.as_ref()?.listener().clone();
    listener.keep_file();
    export.export.handing_over.store(true, Ordering::SeqCst);
    // No thread begins after this.
    drop(export.registration.take());
    let shared = export.export.clone();
    shared.stop.store(true, Ordering::SeqCst);
    // Requests in flight must not wait for throttles any more.
    shared.each_served(LocalDisk::suspend_for_next);
    if let Some(connection) = &*lock(&shared.connection) {
        ring(&connection.wake);
    }
    let ended = export.ends(Instant::now() + STOP_TIME) || {
        // Another process decides when the descriptor answers.
        let device = &shared.device;
        let what =
            format_args!("a descriptor of the front end blocks its session: disconnecting it");
        device.log.warn(device.disk.name(), None, what);
        if let Some(connection) = &*lock(&shared.connection) {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        export.ends(Instant::now() + STOP_TIME)
    };
    if !ended {
        QueueHandle::stop_all(&shared.device, &shared.reactors);
    }
    shared.each_served(LocalDisk::resume);
    let released = lock(&shared.released).take();
    let parcel = released.unwrap_or_else(|| pack(&listener, None, &Default::default()));
    handed(&shared, parcel)
}

fn handed(shared: &Shared, parcel: io::Result<Parcel>) -> Option<Handed> {
    match parcel {
        Ok(parcel) => Some(Handed { kind: KIND, parcel }),
        Err(e) => {
            let device = &shared.device;
            let what = format_args!("cannot hand the front end over, it is disconnected: {e}");
            device.log.warn(device.disk.name(), None, what);
            None
        }
    }
}
