//! An export as a parcel: what the next server needs to serve the same front end.
//!
//! In: the state of a session, its connection and its listening sockets. Out: JSON and descriptors.
//! The JSON has the place of each descriptor in the list. A server that does not know the format
//! refuses the parcel. What must hold: reading a parcel changes nothing that the server which made
//! it still uses, because that server may have to go on.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockyard_disk::{Disk, ImageFiles};
use blockyard_ring::parcel::Parcel;
use serde::{Deserialize, Serialize};
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use super::channel::{BackChannel, Owed};
use super::dirty_memory;
use super::kept::Sourced;
use super::state::{InflightFile, LogFile, MemoryRegion, Parts, SessionState, Vring};
use super::waiting::FrontEnd;
use crate::Listener;
use crate::listener::WireListener;
use crate::packing::{Packed, Unpacked, wrong};

/// Version of the format. A change that an older server would misread needs a new number.
const FORMAT: u32 = 1;

/// An export that another server has handed over, or has left behind.
pub struct HandedSocket {
    pub(super) listener: Listener,
    pub(super) served: Option<Served>,
    pub(super) waiting: Vec<FrontEnd>,
}

/// The front end that is served.
pub(super) struct Served {
    pub front_end: FrontEnd,
    pub since: Option<SystemTime>,
    pub state: SessionState,
}

/// How the previous server ended its rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// It has answered all requests.
    Drained,
    /// It may have died, or another server may have served the rings since. Only the in-flight
    /// region shows which requests are unanswered.
    Died,
}

#[derive(Serialize, Deserialize)]
struct Wire {
    format: u32,
    listener: WireListener,
    served: Option<WireServed>,
    waiting: Vec<WireFrontEnd>,
}

#[derive(Serialize, Deserialize)]
struct WireFrontEnd {
    stream: usize,
    process: Option<i32>,
}

#[derive(Serialize, Deserialize)]
struct WireServed {
    front_end: WireFrontEnd,
    /// Seconds since 1970.
    since: Option<u64>,
    features: u64,
    protocol: u64,
    write_back: bool,
    memory: Vec<WireRegion>,
    inflight: Option<WireInflight>,
    log: Option<WireLog>,
    log_event: Option<usize>,
    back_channel: Option<WireChannel>,
    vrings: Vec<WireVring>,
    /// Earlier servers do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    images: Option<ImageFiles>,
}

#[derive(Serialize, Deserialize)]
struct WireRegion {
    guest: u64,
    user: u64,
    size: u64,
    offset: u64,
    file: usize,
}

#[derive(Serialize, Deserialize)]
struct WireInflight {
    file: usize,
    offset: u64,
    len: u64,
    queues: u16,
    own: Option<bool>,
}

#[derive(Serialize, Deserialize)]
struct WireLog {
    file: usize,
    offset: u64,
    len: u64,
}

#[derive(Serialize, Deserialize)]
struct WireChannel {
    socket: usize,
    acknowledged: bool,
    owed: u32,
    begun: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct WireVring {
    size: u32,
    parts: Option<[u64; 3]>,
    log: Option<u64>,
    base: u32,
    is_base_valid: bool,
    /// Earlier servers do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next_base: Option<u32>,
    kick: Option<usize>,
    call: Option<usize>,
    error: Option<usize>,
    enabled: bool,
    started: bool,
}

/// A session as it is, borrowed for a parcel.
pub(super) struct Present<'a> {
    pub stream: &'a UnixStream,
    pub process: Option<i32>,
    pub since: Option<SystemTime>,
    pub state: &'a SessionState,
}

/// Makes the parcel of an export.
pub(super) fn pack(
    listener: &Listener,
    served: Option<Present<'_>>,
    waiting: &VecDeque<FrontEnd>,
) -> io::Result<Parcel> {
    pack_with_sources(listener, served, waiting).map(|(parcel, _)| parcel)
}

/// Like `pack`. Also returns the identities of the descriptors.
pub(super) fn pack_with_sources(
    listener: &Listener,
    served: Option<Present<'_>>,
    waiting: &VecDeque<FrontEnd>,
) -> io::Result<Sourced> {
    let mut fds = Packed::default();
    let listener = listener.pack(&mut fds)?;
    let served = served.map(|served| pack_served(&served, &mut fds)).transpose()?;
    let mut others = Vec::new();
    for FrontEnd { stream, process } in waiting {
        others.push(WireFrontEnd { stream: fds.put(stream)?, process: *process });
    }
    fds.seal_with_sources(&Wire { format: FORMAT, listener, served, waiting: others })
}

fn pack_served(served: &Present<'_>, fds: &mut Packed) -> io::Result<WireServed> {
    let state = served.state;
    let front_end = WireFrontEnd { stream: fds.put(served.stream)?, process: served.process };
    let mut memory = Vec::new();
    for MemoryRegion { guest, user, size, offset, file } in &state.memory {
        let file = file.as_ref().ok_or_else(|| {
            io::Error::other("a descriptor of the guest's memory was not kept (ulimit -n)")
        })?;
        let file = fds.put(file)?;
        let (guest, user, size, offset) = (*guest, *user, *size, *offset);
        memory.push(WireRegion { guest, user, size, offset, file });
    }
    let inflight = match &state.inflight {
        Some(InflightFile { file, offset, len, queues, own }) => {
            let file = fds.put(file)?;
            let (offset, len, queues, own) = (*offset, *len, *queues, *own);
            Some(WireInflight { file, offset, len, queues, own })
        }
        None => None,
    };
    let log = match &state.log {
        Some(LogFile { file, offset, len }) => {
            Some(WireLog { file: fds.put(file)?, offset: *offset, len: *len })
        }
        None => None,
    };
    let log_event = fds.put_some(&state.log_event)?;
    let back_channel = match state.back_channel.as_ref().and_then(|channel| channel.owed()) {
        Some(Owed { socket, acknowledged, owed, begun }) => {
            Some(WireChannel { socket: fds.put(socket)?, acknowledged, owed, begun })
        }
        None => None,
    };
    let mut vrings = Vec::new();
    for vring in &state.vrings {
        vrings.push(WireVring {
            size: vring.size,
            parts: vring.parts.map(|p| [p.descriptors, p.available, p.used]),
            log: vring.log,
            base: vring.base,
            is_base_valid: vring.is_base_valid,
            next_base: vring.next_base,
            kick: fds.put_some(&vring.kick)?,
            call: fds.put_some(&vring.call)?,
            error: fds.put_some(&vring.error)?,
            enabled: vring.enabled,
            started: vring.started,
        });
    }
    let since = served.since.and_then(|since| since.duration_since(UNIX_EPOCH).ok());
    Ok(WireServed {
        front_end,
        since: since.map(|since| since.as_secs()),
        features: state.features,
        protocol: state.protocol.bits(),
        write_back: state.write_back,
        memory,
        inflight,
        log,
        log_event,
        back_channel,
        vrings,
        images: state.images.clone(),
    })
}

impl HandedSocket {
    /// Reads a parcel of [`crate::Export::hand_over`].
    pub fn unpack(parcel: Parcel, before: Before) -> io::Result<Self> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Format { format } = serde_json::from_slice(&parcel.bytes)?;
        if format != FORMAT {
            return Err(wrong(format!(
                "the state of a vhost-user socket has format {format}, and this server knows only \
                 {FORMAT}"
            )));
        }
        let wire: Wire = serde_json::from_slice(&parcel.bytes)?;
        let mut fds = Unpacked::new(parcel.fds);
        let listener = Listener::unpack(wire.listener, &mut fds)?;
        let served = wire.served.map(|served| unpack_served(served, &mut fds, before));
        let waiting = wire.waiting.into_iter().map(|other| unpack_front_end(&other, &mut fds));
        Ok(HandedSocket {
            listener,
            served: served.transpose()?,
            waiting: waiting.collect::<io::Result<_>>()?,
        })
    }

    /// As [`HandedSocket::unpack`], for a disk with this socket. A socket that the server has
    /// created at another path is an error.
    pub fn unpack_at(parcel: Parcel, before: Before, path: &Path) -> io::Result<Self> {
        let handed = Self::unpack(parcel, before)?;
        if let Some(other) = handed.listener.path().filter(|other| *other != path) {
            let (other, path) = (other.display(), path.display());
            handed.listener.keep_file();
            return Err(wrong(format!("the other server listens on {other}, not on {path}")));
        }
        Ok(handed)
    }

    /// Returns whether a parcel has a session with rings that run.
    pub fn runs_rings(parcel: &Parcel) -> bool {
        let served = serde_json::from_slice(&parcel.bytes).ok().and_then(|wire: Wire| wire.served);
        served.is_some_and(|served| served.vrings.iter().any(|vring| vring.started))
    }

    /// Returns an error if the disk's images are other files than those that the session has used.
    pub(super) fn check_images(&self, disk: &Disk) -> io::Result<()> {
        let earlier = self.served.as_ref().and_then(|served| served.state.images.as_ref());
        let Some(earlier) = earlier.filter(|_| !disk.is_inactive()) else { return Ok(()) };
        let present = ImageFiles::of(&disk.source()).unwrap_or_default();
        if present.may_continue(earlier) {
            return Ok(());
        }
        Err(io::Error::other(
            "the images are other files than those that the front end has used: put these back, \
             and reload; or remove the disk, which disconnects the front end",
        ))
    }

    /// Returns the number of the session's rings, or `None` if no front end is connected.
    pub fn queues(&self) -> Option<usize> {
        self.served.as_ref().map(|served| served.state.vrings.len())
    }
}

fn unpack_front_end(wire: &WireFrontEnd, fds: &mut Unpacked) -> io::Result<FrontEnd> {
    Ok(FrontEnd { stream: fds.take(wire.stream)?.into(), process: wire.process })
}

fn unpack_served(wire: WireServed, fds: &mut Unpacked, before: Before) -> io::Result<Served> {
    let mut state = SessionState::new(wire.vrings.len() as u16, wire.write_back);
    state.features = wire.features;
    state.protocol = VhostUserProtocolFeatures::from_bits_retain(wire.protocol);
    // The crate does not know all features that this server offers.
    let known = VhostUserProtocolFeatures::all().union(dirty_memory::PROTOCOL);
    if !known.contains(state.protocol) {
        return Err(wrong("a protocol feature that this server does not know"));
    }
    for WireRegion { guest, user, size, offset, file } in wire.memory {
        let file = Some(fds.take(file)?);
        state.memory.push(MemoryRegion { guest, user, size, offset, file });
    }
    if let Some(WireInflight { file, offset, len, queues, own }) = wire.inflight {
        let file = fds.take(file)?;
        state.inflight = Some(InflightFile { file, offset, len, queues, own });
    }
    if let Some(WireLog { file, offset, len }) = wire.log {
        state.log = Some(LogFile { file: fds.take(file)?, offset, len });
    }
    state.log_event = fds.take_some(wire.log_event)?;
    state.images = wire.images;
    if let Some(WireChannel { socket, acknowledged, owed, begun }) = wire.back_channel {
        let owed = Owed { socket: fds.take(socket)?, acknowledged, owed, begun };
        state.back_channel = Some(Arc::new(BackChannel::continued(owed)));
    }
    for (vring, wire) in state.vrings.iter_mut().zip(wire.vrings) {
        let is_lost = wire.started && before == Before::Died;
        *vring = Vring {
            size: wire.size,
            parts: wire.parts.map(|[descriptors, available, used]| Parts {
                descriptors,
                available,
                used,
            }),
            log: wire.log,
            base: wire.base,
            is_base_valid: wire.is_base_valid && !is_lost,
            is_base_lost: is_lost,
            next_base: wire.next_base,
            kick: fds.take_some(wire.kick)?,
            call: fds.take_some(wire.call)?,
            error: fds.take_some(wire.error)?,
            enabled: wire.enabled,
            started: wire.started,
        };
    }
    let since = wire.since.map(|since| UNIX_EPOCH + Duration::from_secs(since));
    Ok(Served { front_end: unpack_front_end(&wire.front_end, fds)?, since, state })
}

#[cfg(test)]
mod tests;
