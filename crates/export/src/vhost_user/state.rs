//! The state of a session: what a front end has set, as data.
//!
//! In: one [`Change`] for each message. Out: the [`Effect`] that the handler ([`super::session`])
//! must carry out on reactors. The state has no threads, reactors or mappings, so it can be
//! serialised, and another handler can take the state over. What must hold: [`SessionState::apply`]
//! makes a change as a whole, or refuses it and leaves the state unchanged. The only exception is
//! [`Change::Addresses`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockyard_disk::ImageFiles;
use blockyard_ring::log_covers;
use vhost::vhost_user::message::{
    VhostUserInflight, VhostUserProtocolFeatures, VhostUserVringAddrFlags,
};

use super::channel::BackChannel;
use super::config;
use super::inflight::queue_bytes;
use super::virtqueue::used_bytes;

/// Maximum number of entries of a virtqueue (virtio 1.2, 2.7).
const MAX_ENTRIES: u32 = 32768;

/// The settings that a front end has sent.
#[derive(Debug)]
pub struct SessionState {
    /// Feature bits that the driver has accepted.
    pub features: u64,
    pub protocol: VhostUserProtocolFeatures,
    /// The guest sees a volatile write cache.
    pub write_back: bool,
    /// The memory table, in the order of the messages.
    pub memory: Vec<MemoryRegion>,
    pub inflight: Option<InflightFile>,
    /// The log of changed memory.
    pub log: Option<LogFile>,
    /// The eventfd that tells the front end of changes of the log.
    pub log_event: Option<OwnedFd>,
    /// The socket for messages to the front end, with the acknowledgements that the front end owes
    /// on it. The threads that send these messages share it.
    pub back_channel: Option<Arc<BackChannel>>,
    pub vrings: Vec<Vring>,
    /// The files of the disk's images, as far as they were kept for the next server.
    pub images: Option<ImageFiles>,
}

/// A region of the memory table.
#[derive(Debug)]
pub struct MemoryRegion {
    /// Guest-physical address.
    pub guest: u64,
    /// Address in the front end's process.
    pub user: u64,
    pub size: u64,
    /// Offset of the region in its file, in bytes.
    pub offset: u64,
    /// The region's file. `None` if the process had too few descriptors left to keep it. Then
    /// another handler cannot take this session over.
    pub file: Option<OwnedFd>,
}

impl MemoryRegion {
    /// Returns whether two regions have the same addresses and offset.
    pub fn is_same(&self, other: &MemoryRegion) -> bool {
        let place = |region: &Self| (region.guest, region.user, region.size, region.offset);
        place(self) == place(other)
    }
}

/// The file of an in-flight region, and the region's offset and length in it.
#[derive(Debug)]
pub struct InflightFile {
    pub file: OwnedFd,
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    pub queues: u16,
    /// This program made the region for itself, because the front end has none. The value: the
    /// region has the layout for packed rings.
    pub own: Option<bool>,
}

/// The file of a log of changed memory, and the log's offset and length in it.
#[derive(Debug)]
pub struct LogFile {
    pub file: OwnedFd,
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// One ring's settings, as the front end sent them.
#[derive(Debug, Default)]
pub struct Vring {
    pub size: u32,
    pub parts: Option<Parts>,
    /// Guest address at which writes to the used ring are logged. `None`: they are not logged.
    pub log: Option<u64>,
    /// The index at which the ring starts. While the ring runs: the index at which it started.
    pub base: u32,
    /// This session has stopped the ring after its last request. So nothing of the ring is in
    /// flight, and the front end's base is valid. (After a back end was killed, only the in-flight
    /// region has the position.)
    pub is_base_valid: bool,
    /// Another server has served the ring since `base` was set, and has died. The ring itself and
    /// the in-flight region have the position.
    pub is_base_lost: bool,
    /// The base that the front end has set while the ring ran disabled. The front end has emptied
    /// the ring since (User Mode Linux sends no GET_VRING_BASE when a driver ends), so the next
    /// kick descriptor starts the ring there.
    pub next_base: Option<u32>,
    pub kick: Option<OwnedFd>,
    pub call: Option<OwnedFd>,
    pub error: Option<OwnedFd>,
    pub enabled: bool,
    /// The ring runs. In a released state: the next handler must start the ring.
    pub started: bool,
}

/// Addresses of a ring's parts in the front end's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    pub descriptors: u64,
    /// The available ring (packed: the driver area).
    pub available: u64,
    /// The used ring (packed: the device area).
    pub used: u64,
}

impl Parts {
    fn are_aligned(&self) -> bool {
        self.descriptors.is_multiple_of(16)
            && self.available.is_multiple_of(2)
            && self.used.is_multiple_of(4)
    }
}

/// The change of the state that one message requests.
#[derive(Debug)]
pub enum Change {
    Features {
        accepted: u64,
        /// The feature bits that the device offers.
        offered: u64,
    },
    Protocol {
        accepted: u64,
        /// The protocol features that the back end offers.
        offered: VhostUserProtocolFeatures,
    },
    Size {
        index: u32,
        entries: u32,
    },
    /// Changes the addresses of a ring. If the change is refused, the ring has no addresses, so
    /// that it cannot start with the old ones.
    Addresses {
        index: u32,
        flags: u32,
        parts: Parts,
        /// Guest address at which writes to the used ring are logged, if the flags ask for it.
        log: u64,
    },
    Base {
        index: u32,
        base: u32,
    },
    Kick {
        index: u32,
        fd: Option<OwnedFd>,
    },
    Call {
        index: u32,
        fd: Option<OwnedFd>,
    },
    Error {
        index: u32,
        fd: Option<OwnedFd>,
    },
    /// `state` is 0 or 1.
    Enable {
        index: u32,
        state: u32,
    },
}

/// The action that the handler must carry out after a change.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    None,
    /// The driver has accepted features. `before`: the features that the driver had accepted
    /// before. The handler may have to change the write cache.
    Features {
        before: u64,
    },
    /// Change what a running ring logs.
    Marks(usize),
    /// Start the ring. Stop it first if it runs.
    Restart(usize),
    /// Give a running ring its new call descriptor.
    Call(usize),
    /// Give a running ring its new error descriptor.
    Error(usize),
    /// Enable or disable a running ring.
    Enable(usize),
}

/// Most bytes of a log: bits for 16 TiB of guest addresses. A front end may send a log that is
/// longer than its memory table needs: QEMU shares one log among all its devices. Only the pages
/// that the table needs are allocated ([`SessionState::logged`]).
const MOST_LOG: u64 = 512 << 20;

/// Reasons why a message is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("SET_FEATURES of {0:#x}, which were not offered")]
    Features(u64),
    #[error("SET_PROTOCOL_FEATURES of {0:#x}, which were not offered")]
    Protocol(u64),
    #[error("a message for queue {index}, but there are {queues}")]
    NoSuchQueue { index: u32, queues: usize },
    #[error("queue {index}: a ring of {entries} entries is not possible")]
    Size { index: u32, entries: u32 },
    #[error("queue {index}: ring addresses that are not aligned, or unknown flags: \
             {:#x}, {:#x}, {:#x} (flags {flags:#x})",
        parts.descriptors, parts.available, parts.used)]
    Addresses { index: u32, flags: u32, parts: Parts },
    #[error(
        "queue {index}: the used ring is logged at {address:#x}, beyond a log of {bytes} bytes"
    )]
    RingBeyondLog { index: u32, address: u64, bytes: u64 },
    #[error("a log of {bytes} bytes, which is too small for memory at {address:#x}+{len:#x}")]
    LogRoom { bytes: u64, address: u64, len: u64 },
    #[error("a log of {0} bytes: at most {MOST_LOG} are possible")]
    LogSize(u64),
    #[error("queue {index}: SET_VRING_ENABLE of {state} is not valid")]
    Enable { index: u32, state: u32 },
    #[error("a message that needs {0:?}, which was not negotiated")]
    NotNegotiated(VhostUserProtocolFeatures),
    #[error("cannot make an in-flight region for {queues} queues of {entries} entries")]
    InflightShape { queues: u16, entries: u16 },
    #[error(
        "the in-flight region is too small: {bytes} bytes for {queues} queues of {entries} entries"
    )]
    InflightRoom { bytes: u64, queues: u16, entries: u16 },
}

impl SessionState {
    /// Returns the state of a front end that has set nothing yet.
    pub fn new(queues: u16, write_back: bool) -> Self {
        SessionState {
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            write_back,
            memory: Vec::new(),
            inflight: None,
            log: None,
            log_event: None,
            back_channel: None,
            vrings: (0..queues).map(|_| Vring::default()).collect(),
            images: None,
        }
    }

    /// Makes one change. Returns the action that the handler must carry out.
    pub fn apply(&mut self, change: Change) -> Result<Effect, Refusal> {
        match change {
            Change::Features { accepted, offered } => {
                let unknown = accepted & !offered;
                if unknown != 0 {
                    return Err(Refusal::Features(unknown));
                }
                return Ok(Effect::Features {
                    before: std::mem::replace(&mut self.features, accepted),
                });
            }
            Change::Protocol { accepted, offered } => {
                let unknown = accepted & !offered.bits();
                if unknown != 0 {
                    return Err(Refusal::Protocol(unknown));
                }
                self.protocol = VhostUserProtocolFeatures::from_bits_retain(accepted);
            }
            Change::Size { index, entries } => {
                if entries == 0 || entries > MAX_ENTRIES {
                    return Err(Refusal::Size { index, entries });
                }
                self.vring(index)?.1.size = entries;
            }
            Change::Addresses { index, flags, parts, log } => {
                return self.set_addresses(index, flags, parts, log);
            }
            Change::Base { index, base } => {
                let has_enable = self.has(config::F_PROTOCOL);
                let vring = self.vring(index)?.1;
                vring.base = base;
                vring.next_base =
                    Some(base).filter(|_| vring.started && has_enable && !vring.enabled);
            }
            Change::Kick { index, fd } => {
                let (at, vring) = self.vring(index)?;
                vring.kick = fd;
                return Ok(Effect::Restart(at));
            }
            Change::Call { index, fd } => {
                let (at, vring) = self.vring(index)?;
                vring.call = fd;
                return Ok(Effect::Call(at));
            }
            Change::Error { index, fd } => {
                let (at, vring) = self.vring(index)?;
                vring.error = fd;
                return Ok(Effect::Error(at));
            }
            Change::Enable { index, state } => {
                if !self.has(config::F_PROTOCOL) || state > 1 {
                    return Err(Refusal::Enable { index, state });
                }
                let (at, vring) = self.vring(index)?;
                vring.enabled = state == 1;
                if vring.enabled {
                    // The ring goes on where it was.
                    vring.next_base = None;
                }
                return Ok(Effect::Enable(at));
            }
        }
        Ok(Effect::None)
    }

    fn set_addresses(
        &mut self,
        index: u32,
        flags: u32,
        parts: Parts,
        log: u64,
    ) -> Result<Effect, Refusal> {
        let bytes = self.log.as_ref().map(|log| log.len);
        let (is_packed, event_idx) = (self.has(config::F_PACKED), self.has(config::F_EVENT_IDX));
        let (at, vring) = self.vring(index)?;
        let flags = VhostUserVringAddrFlags::from_bits(flags)
            .filter(|_| parts.are_aligned())
            .ok_or(Refusal::Addresses { index, flags, parts })
            .inspect_err(|_| vring.parts = None)?;
        let log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let used = used_bytes(vring.size, is_packed, event_idx);
        if let (Some(address), Some(bytes)) = (log, bytes)
            && !log_covers(bytes, address, used)
        {
            vring.parts = None;
            return Err(Refusal::RingBeyondLog { index, address, bytes });
        }
        (vring.parts, vring.log) = (Some(parts), log);
        Ok(Effect::Marks(at))
    }

    /// Returns an error if a log is too small for the guest's memory, or for a logged ring.
    pub fn check_log_room(&self, bytes: u64) -> Result<(), Refusal> {
        if bytes > MOST_LOG {
            return Err(Refusal::LogSize(bytes));
        }
        for region in &self.memory {
            let (address, len) = (region.guest, region.size);
            if !log_covers(bytes, address, len) {
                return Err(Refusal::LogRoom { bytes, address, len });
            }
        }
        for index in 0..self.vrings.len() {
            if let Some((address, used)) = self.logged_ring(index)
                && !log_covers(bytes, address, used)
            {
                return Err(Refusal::RingBeyondLog { index: index as u32, address, bytes });
            }
        }
        Ok(())
    }

    /// Returns all guest addresses that are marked in a log: the memory table, and the used rings
    /// that are logged. Each item is an address and a length in bytes.
    pub fn logged(&self) -> impl Iterator<Item = (u64, u64)> {
        let rings = (0..self.vrings.len()).filter_map(|index| self.logged_ring(index));
        self.logged_memory().chain(rings)
    }

    /// Returns the guest address and the length in bytes of each region of the memory table.
    pub fn logged_memory(&self) -> impl Iterator<Item = (u64, u64)> {
        self.memory.iter().map(|region| (region.guest, region.size))
    }

    /// Returns the guest address at which writes to a used ring are logged, and the ring's length
    /// in bytes. `None`: they are not logged.
    pub fn logged_ring(&self, index: usize) -> Option<(u64, u64)> {
        let vring = self.vrings.get(index)?;
        let (is_packed, event_idx) = (self.has(config::F_PACKED), self.has(config::F_EVENT_IDX));
        Some((vring.log?, used_bytes(vring.size, is_packed, event_idx)))
    }

    /// Returns a ring and its index.
    pub fn vring(&mut self, index: u32) -> Result<(usize, &mut Vring), Refusal> {
        let queues = self.vrings.len();
        let vring =
            self.vrings.get_mut(index as usize).ok_or(Refusal::NoSuchQueue { index, queues })?;
        Ok((index as usize, vring))
    }

    /// Returns whether the driver has accepted a feature.
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Returns an error if a protocol feature was not negotiated.
    pub fn negotiated(&self, feature: VhostUserProtocolFeatures) -> Result<(), Refusal> {
        if self.protocol.contains(feature) { Ok(()) } else { Err(Refusal::NotNegotiated(feature)) }
    }

    /// Returns whether notifications are messages (VHOST_USER_PROTOCOL_F_INBAND_NOTIFICATIONS).
    pub fn in_band(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::INBAND_NOTIFICATIONS)
    }

    /// Returns whether messages may ask for an acknowledgement (VHOST_USER_PROTOCOL_F_REPLY_ACK).
    pub fn acknowledges(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Returns an error if this device cannot have an in-flight region of this shape.
    pub fn check_inflight_shape(&self, asked: &VhostUserInflight) -> Result<(), Refusal> {
        let (queues, entries) = (asked.num_queues, asked.queue_size);
        if queues == 0
            || usize::from(queues) > self.vrings.len()
            || entries == 0
            || u32::from(entries) > MAX_ENTRIES
        {
            return Err(Refusal::InflightShape { queues, entries });
        }
        Ok(())
    }

    /// Returns an error if an in-flight region is too small for its queues.
    pub fn check_inflight_room(&self, described: &VhostUserInflight) -> Result<(), Refusal> {
        let (queues, entries, bytes) =
            (described.num_queues, described.queue_size, described.mmap_size);
        let need = queue_bytes(entries, self.has(config::F_PACKED)) * u64::from(queues);
        if queues == 0 || entries == 0 || bytes < need {
            return Err(Refusal::InflightRoom { bytes, queues, entries });
        }
        Ok(())
    }

    /// Resets rings and features. Memory, in-flight region, protocol features and back channel
    /// stay, because the front end keeps them across a reset.
    pub fn reset(&mut self) {
        for vring in &mut self.vrings {
            *vring = Vring { is_base_valid: true, ..Vring::default() };
        }
        self.features = 0;
    }
}

impl Vring {
    /// Records that the ring was stopped at `base`. `None`: the ring's reactor has ended, so the
    /// ring's position is not known.
    pub fn stopped(&mut self, base: Option<u32>) {
        self.started = false;
        self.is_base_lost = false;
        self.is_base_valid = base.is_some();
        self.base = base.unwrap_or(self.base);
    }
}

#[cfg(test)]
mod tests;
