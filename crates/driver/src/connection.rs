//! The vhost-user connection: negotiation, memory, queues, and messages with any content.
//!
//! In: a socket's path. Out: the back end's offer, and the result of the negotiation. Most messages
//! use the `vhost` crate's `Frontend`. This module writes the other messages itself: ring indices
//! (16 bits in the crate, but packed rings need 32), eventfds, and messages of hostile tests. A
//! test can drop the connection at any time, which closes it.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, ErrorKind::Late, Result, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};

use super::ring::RingAddresses;
use super::{Memory, feature};

/// Protocol features that this front end accepts if the back end offers them.
pub const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// The same without the in-flight buffer, as a front end that cannot connect again.
pub const PROTOCOL_WITHOUT_INFLIGHT: VhostUserProtocolFeatures =
    PROTOCOL.difference(VhostUserProtocolFeatures::INFLIGHT_SHMFD);

/// Maximum number of queues, because a queue index is one byte in the messages.
const QUEUES_MAX: u64 = 256;
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;
const HEADER: usize = 12;

/// The first fields of virtio-blk's configuration space, which every back end has. The units are
/// those of the specification: a sector has 512 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockConfig {
    pub capacity_sectors: u64,
    pub size_max: u32,
    pub seg_max: u32,
    pub blk_size: u32,
    pub physical_block_exp: u8,
    pub alignment_offset: u8,
    pub min_io_blocks: u16,
    pub opt_io_blocks: u32,
    pub wce: u8,
    pub num_queues: u16,
    pub max_discard_sectors: u32,
    pub max_discard_seg: u32,
    pub discard_sector_alignment: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_write_zeroes_seg: u32,
    pub write_zeroes_may_unmap: u8,
}

impl BlockConfig {
    /// Size in bytes of the configuration space up to the last field of this structure.
    pub const BYTES: usize = 60;

    fn parse(bytes: &[u8; Self::BYTES]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        BlockConfig {
            capacity_sectors: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            size_max: u32_at(8),
            seg_max: u32_at(12),
            blk_size: u32_at(20),
            physical_block_exp: bytes[24],
            alignment_offset: bytes[25],
            min_io_blocks: u16_at(26),
            opt_io_blocks: u32_at(28),
            wce: bytes[32],
            num_queues: u16_at(34),
            max_discard_sectors: u32_at(36),
            max_discard_seg: u32_at(40),
            discard_sector_alignment: u32_at(44),
            max_write_zeroes_sectors: u32_at(48),
            max_write_zeroes_seg: u32_at(52),
            write_zeroes_may_unmap: bytes[56],
        }
    }
}

/// The back end's record of requests in flight (the in-flight buffer), which the front end keeps
/// across a crash of the back end.
pub struct Inflight {
    pub layout: VhostUserInflight,
    pub file: File,
}

/// The description of a queue for the back end.
#[derive(Clone)]
pub struct RingSetup {
    pub index: u16,
    pub size: u16,
    pub addresses: RingAddresses,
    pub kick: Arc<OwnedFd>,
    pub call: Arc<OwnedFd>,
}

/// A connection to a back end, and the result of its negotiation.
pub struct Connection {
    frontend: Frontend,
    /// A copy of the connection's socket, used to send raw messages and to watch for events.
    socket: UnixStream,
    pub offered: u64,
    pub features: u64,
    pub offered_protocol: VhostUserProtocolFeatures,
    pub protocol: VhostUserProtocolFeatures,
    /// Number of queues that the back end supports, or 1 if the front end has not queried it.
    pub queues_max: u64,
}

impl Drop for Connection {
    /// Shuts the socket down, which ends the connection at once. A close ends the connection only
    /// when the last copy of the descriptor is closed. A process that another thread is starting
    /// holds a copy until its exec.
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl Connection {
    /// Connects, without negotiation.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_within(path, Duration::from_secs(10))
    }

    /// Connects. Waits at most `limit` if the back end's backlog is full.
    pub fn open_within(path: &Path, limit: Duration) -> Result<Self> {
        let socket =
            connect(path, limit).context(format!("cannot connect to {}", path.display()))?;
        let frontend = Frontend::from_stream(socket.try_clone()?, QUEUES_MAX);
        Ok(Connection {
            frontend,
            socket,
            offered: 0,
            features: 0,
            offered_protocol: VhostUserProtocolFeatures::empty(),
            protocol: VhostUserProtocolFeatures::empty(),
            queues_max: 1,
        })
    }

    /// Sends SET_OWNER and negotiates features: those of `wanted` and `protocol` that the back end
    /// offers. Fails if the back end does not offer all features in `required`.
    pub fn negotiate(
        &mut self,
        wanted: u64,
        required: u64,
        protocol: VhostUserProtocolFeatures,
    ) -> Result<()> {
        self.frontend.set_owner().context("SET_OWNER")?;
        self.offered = self.frontend.get_features().context("GET_FEATURES")?;
        let missing = required & !self.offered;
        let names = feature::names(missing);
        ensure!(missing == 0, NotOffered, "the back end does not offer {names}");
        self.features = (wanted | required) & self.offered;
        if self.features & feature::PROTOCOL_FEATURES != 0 {
            self.offered_protocol =
                self.frontend.get_protocol_features().context("GET_PROTOCOL_FEATURES")?;
            self.protocol = protocol & self.offered_protocol;
            self.frontend.set_protocol_features(self.protocol).context("SET_PROTOCOL_FEATURES")?;
        }
        if self.acknowledged() {
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        if self.protocol.contains(VhostUserProtocolFeatures::MQ) {
            self.queues_max = self.frontend.get_queue_num().context("GET_QUEUE_NUM")?;
        }
        self.frontend.set_features(self.features).context("SET_FEATURES")
    }

    fn acknowledged(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Reads the device's configuration space.
    pub fn config(&mut self) -> Result<BlockConfig> {
        let empty = [0; BlockConfig::BYTES];
        let flags = VhostUserConfigFlags::empty();
        let (_, bytes) =
            self.frontend.get_config(0, empty.len() as u32, flags, &empty).context("GET_CONFIG")?;
        let bytes = bytes
            .as_slice()
            .try_into()
            .context("the reply to GET_CONFIG has another length than requested")?;
        Ok(BlockConfig::parse(bytes))
    }

    /// Sends the memory table, which has one region.
    pub fn set_memory(&mut self, memory: &Memory) -> Result<()> {
        self.frontend.set_mem_table(&[memory.region()]).context("SET_MEM_TABLE")?;
        Ok(())
    }

    /// Requests the in-flight buffer. Returns `None` if the protocol feature was not negotiated.
    pub fn inflight(&mut self, queues: u16, queue_size: u16) -> Result<Option<Inflight>> {
        if !self.protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            return Ok(None);
        }
        let ask = VhostUserInflight::new(0, 0, queues, queue_size);
        let (layout, file) = self.frontend.get_inflight_fd(&ask).context("GET_INFLIGHT_FD")?;
        // Other programs that this process starts must not inherit it.
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Some(Inflight { layout, file }))
    }

    /// Sends the in-flight buffer to the back end that made it, or to the next one.
    pub fn set_inflight(&mut self, inflight: &Inflight) -> Result<()> {
        self.frontend
            .set_inflight_fd(&inflight.layout, inflight.file.as_raw_fd())
            .context("SET_INFLIGHT_FD")
    }

    /// Sets up a queue with messages in QEMU's order, without enabling the queue.
    pub fn set_ring(&mut self, ring: &RingSetup, base: u32, memory: &Memory) -> Result<()> {
        let index = usize::from(ring.index);
        self.frontend.set_vring_num(index, ring.size).context("SET_VRING_NUM")?;
        self.vring_state(FrontendReq::SET_VRING_BASE, ring.index, base)
            .context("SET_VRING_BASE")?;
        let data = VringConfigData {
            queue_max_size: ring.size,
            queue_size: ring.size,
            flags: 0,
            desc_table_addr: memory.user_address(ring.addresses.desc),
            used_ring_addr: memory.user_address(ring.addresses.used),
            avail_ring_addr: memory.user_address(ring.addresses.avail),
            log_addr: None,
        };
        self.frontend.set_vring_addr(index, &data).context("SET_VRING_ADDR")?;
        let number = u64::from(ring.index).to_le_bytes();
        self.message(FrontendReq::SET_VRING_KICK as u32, &number, &[ring.kick.as_fd()])
            .context("SET_VRING_KICK")?;
        self.message(FrontendReq::SET_VRING_CALL as u32, &number, &[ring.call.as_fd()])
            .context("SET_VRING_CALL")
    }

    /// Enables or disables a queue. Without protocol features, a queue runs from its first kick on.
    pub fn enable(&mut self, index: u16, enable: bool) -> Result<()> {
        if self.features & feature::PROTOCOL_FEATURES == 0 {
            return Ok(());
        }
        self.frontend.set_vring_enable(index.into(), enable).context("SET_VRING_ENABLE")
    }

    /// Stops a queue. The back end replies with the queue's base index when nothing is in flight
    /// any more.
    pub fn stop_ring(&mut self, index: u16) -> Result<u32> {
        self.frontend.get_vring_base(index.into()).context("GET_VRING_BASE")
    }

    /// Returns the `vhost` crate's front end, for all other messages.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// Returns the socket.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    fn vring_state(&self, request: FrontendReq, index: u16, number: u32) -> Result<()> {
        let payload = u64::from(index) | u64::from(number) << 32;
        self.message(request as u32, &payload.to_le_bytes(), &[])
    }

    /// Sends a message with any content. Waits for its acknowledgement if REPLY_ACK was negotiated.
    pub fn message(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let flags = if self.acknowledged() { VERSION | NEED_REPLY } else { VERSION };
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        for word in [request, flags, payload.len() as u32] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, fds)?;
        if !self.acknowledged() {
            return Ok(());
        }
        let mut reply = [0; HEADER + 8];
        (&self.socket).read_exact(&mut reply)?;
        let (head, value) = reply.split_at(HEADER);
        ensure!(
            head[..4] == request.to_le_bytes(),
            Protocol,
            "the back end replied to another message"
        );
        let value = u64::from_le_bytes(value.try_into()?);
        ensure!(value == 0, Refused, "the back end refused message {request} ({value})");
        Ok(())
    }

    /// Sends raw bytes, with descriptors attached to the first of them.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ensure!(
                control.push(SendAncillaryMessage::ScmRights(fds)),
                Usage,
                "more than 32 descriptors"
            );
        }
        let sent = rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
        std::io::Write::write_all(&mut (&self.socket), &bytes[sent..])?;
        Ok(())
    }

    /// Runs `work`. Shuts the socket down if `work` takes longer than `limit`, so that a back end
    /// that never replies causes an error instead of a hang.
    pub fn within<T>(
        &mut self,
        limit: Duration,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let socket = self.socket.try_clone()?;
        let guard = std::thread::spawn(move || {
            let late = wait.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if late {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
            late
        });
        let result = work(self);
        drop(done);
        let late = guard.join().unwrap_or(false);
        if late {
            let what = "another client may be connected to it";
            let late = format!("the back end has not replied for {limit:?}; {what}");
            result.context(late).map_err(|error| error.of_kind(Late))
        } else {
            result
        }
    }
}

/// Connects. Linux limits the wait in connect() on a Unix socket by the socket's send timeout. A
/// timeout of 0 would mean no limit.
fn connect(path: &Path, limit: Duration) -> Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left))?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let what = format!("the back end accepted no connection for {limit:?}");
                return Err(Error::new(Late, what));
            }
            result => break result?,
        }
    }
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The back end never accepts. The first connections wait in its backlog, and the next
    /// connection does not fit.
    #[test]
    fn a_back_end_that_never_replies_causes_an_error_in_bounded_time() {
        let folder = std::env::temp_dir().join(format!("blockyard-backlog-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("socket");
        let listener = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        let listener = listener.unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let limit = Duration::from_millis(20);
        let mut waiting = Connection::open_within(&path, limit).unwrap();
        let silent = waiting.within(limit, |c| c.negotiate(0, 0, PROTOCOL)).unwrap_err();
        assert_eq!(silent.kind(), Late);
        assert!(silent.to_string().contains("another client may be connected"), "{silent:?}");
        let mut others = Vec::new();
        let full = loop {
            match Connection::open_within(&path, limit) {
                Ok(other) => others.push(other),
                Err(error) => break error,
            }
            assert!(others.len() < 8, "the backlog is never full");
        };
        assert_eq!(full.kind(), Late);
        assert!(format!("{full:?}").contains("accepted no connection for 20ms"), "{full:?}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_configuration_space_is_parsed_as_specified() {
        let mut bytes = [0; BlockConfig::BYTES];
        bytes[..8].copy_from_slice(&0x1234_5678_9abc_def0u64.to_le_bytes());
        bytes[20..24].copy_from_slice(&4096u32.to_le_bytes());
        bytes[24] = 3;
        bytes[32] = 1;
        bytes[34..36].copy_from_slice(&7u16.to_le_bytes());
        bytes[36..40].copy_from_slice(&99u32.to_le_bytes());
        bytes[56] = 1;
        let config = BlockConfig::parse(&bytes);
        assert_eq!(config.capacity_sectors, 0x1234_5678_9abc_def0);
        assert_eq!(
            (config.blk_size, config.physical_block_exp, config.wce, config.num_queues),
            (4096, 3, 1, 7)
        );
        assert_eq!((config.max_discard_sectors, config.write_zeroes_may_unmap), (99, 1));
    }
}
