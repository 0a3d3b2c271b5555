//! The result of the option phase, and the requests that it allows.

use std::cell::Cell;
use std::sync::Arc;

use blockyard_nbd::wire::{self, Headers, cmd, errno, export, flag};

use super::block_status::Contexts;
use super::exported::{Exported, Place};

/// The chosen export, header format and contexts.
pub struct Terms {
    pub exported: Arc<Exported>,
    pub headers: Headers,
    pub contexts: Contexts,
    /// Counts the connection until it takes no more requests.
    pub place: Cell<Option<Place>>,
}

impl Terms {
    /// Returns the error code if the request is not allowed or not valid.
    pub fn check(&self, request: &wire::Request) -> Result<(), u32> {
        let wire::Request { flags, command, offset, len, .. } = *request;
        let extended = self.headers == Headers::Extended;
        let allowed = flag::FUA
            | match command {
                cmd::READ if self.headers != Headers::Simple => flag::DF,
                cmd::WRITE if extended => flag::PAYLOAD_LEN,
                cmd::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
                cmd::BLOCK_STATUS if extended => flag::REQ_ONE | flag::PAYLOAD_LEN,
                cmd::BLOCK_STATUS => flag::REQ_ONE,
                _ => 0,
            };
        if flags & !allowed != 0 {
            return Err(errno::EINVAL);
        }
        let writes = matches!(command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        match command {
            cmd::FLUSH if offset == 0 && len == 0 => return Ok(()),
            cmd::READ
            | cmd::WRITE
            | cmd::TRIM
            | cmd::WRITE_ZEROES
            | cmd::CACHE
            | cmd::BLOCK_STATUS => {}
            _ => return Err(errno::EINVAL),
        }
        // A write has a payload even without PAYLOAD_LEN, because QEMU's client omits that flag.
        let status_payload = command == cmd::BLOCK_STATUS && flags & flag::PAYLOAD_LEN != 0;
        if writes && self.exported.disk.options().read_only {
            return Err(errno::EPERM);
        }
        if matches!(command, cmd::READ | cmd::WRITE) && len > wire::MOST_PAYLOAD.into() {
            return Err(errno::EINVAL);
        }
        if command == cmd::BLOCK_STATUS
            && (self.contexts.is_empty() || (len == 0 && !status_payload))
        {
            return Err(errno::EINVAL);
        }
        let end = if status_payload { Some(offset) } else { offset.checked_add(len) };
        if end.is_none_or(|end| end > self.exported.disk.capacity()) {
            let grows = matches!(command, cmd::WRITE | cmd::WRITE_ZEROES);
            return Err(if grows { errno::ENOSPC } else { errno::EINVAL });
        }
        let block = u64::from(self.exported.block.minimum);
        let moves = matches!(command, cmd::READ | cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        if moves && (offset | len) & (block - 1) != 0 {
            return Err(errno::EINVAL);
        }
        Ok(())
    }

    /// Returns false if each write must be durable before its reply.
    pub fn write_back(&self) -> bool {
        self.exported.flags & export::SEND_FLUSH == 0
            || self.exported.disk.options().cache.write_back()
    }
}
