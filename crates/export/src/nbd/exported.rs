//! A disk that is exported under a name, and the clients that may use it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_disk::Disk;
use blockyard_nbd::wire::{self, Headers, export};

use crate::PollMode;

/// A disk that is exported under a name.
#[derive(Debug)]
pub struct Exported {
    pub disk: Arc<Disk>,
    pub name: String,
    /// Description of the export, for clients that ask for it.
    pub description: String,
    pub(super) flags: u16,
    pub(super) block: BlockSize,
    /// How idle connections poll.
    pub(super) poll: PollMode,
    /// Names that give access: a client needs a certificate with one of these names. An empty list
    /// admits no client. Without a list, any client may use the disk.
    allowed: Mutex<Option<Vec<String>>>,
    /// Number of connections that have chosen the export.
    places: Arc<AtomicUsize>,
}

/// A connection's place among those that have chosen its export.
#[derive(Debug)]
pub struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns `text` shortened to the protocol's longest string, and without NUL.
fn as_string(text: &str) -> String {
    let mut len = 0;
    let fits = |c: &char| {
        len += c.len_utf8();
        len <= wire::MOST_STRING
    };
    text.chars().filter(|c| *c != '\0').take_while(fits).collect()
}

/// Multiples, in bytes, that requests should have.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSize {
    pub minimum: u32,
    pub preferred: u32,
}

impl Exported {
    /// Returns the transmission flags for a client that has chosen these headers.
    pub(super) fn flags(&self, headers: Headers) -> u16 {
        let (mut flags, extended) = (self.flags, headers == Headers::Extended);
        if headers == Headers::Simple {
            flags &= !export::SEND_DF;
        }
        if extended { flags } else { flags & !export::BLOCK_STATUS_PAYLOAD }
    }

    /// `block`: minimum block size in bytes to report to clients. It is raised to the disk's own
    /// minimum if it is less. `None`: the disk's own minimum.
    pub fn new(disk: Arc<Disk>, name: &str, description: &str, block: Option<u32>) -> Self {
        let source = disk.source();
        let mut flags = export::HAS_FLAGS | export::SEND_FLUSH | export::SEND_FUA | export::SEND_DF;
        flags |= export::CAN_MULTI_CONN | export::SEND_CACHE | export::BLOCK_STATUS_PAYLOAD;
        flags |= match disk.options().read_only {
            true => export::READ_ONLY,
            false => export::SEND_TRIM | export::SEND_WRITE_ZEROES | export::SEND_FAST_ZERO,
        };
        // A raw image accepts single bytes, because unaligned requests are copied through a buffer
        // for O_DIRECT. Other images need sectors.
        let minimum = if source.chain().is_some() { blockyard_image::SECTOR as u32 } else { 1 };
        let minimum = block.unwrap_or(minimum).clamp(minimum, 4096).next_power_of_two();
        let preferred = source.logical_block().max(4096);
        let (name, description) = (as_string(name), as_string(description));
        let block = BlockSize { minimum, preferred };
        Exported {
            disk,
            name,
            description,
            flags,
            block,
            poll: PollMode::Auto,
            allowed: Mutex::default(),
            places: Arc::default(),
        }
    }

    /// Sets how idle connections poll. The default is [`PollMode::Auto`].
    pub fn polled(self, poll: PollMode) -> Self {
        Exported { poll, ..self }
    }

    /// Restricts the disk to clients with a certificate that has one of these names. An empty list
    /// admits no client. `None`: any client may use the disk.
    pub fn only_for(self, names: Option<&[String]>) -> Self {
        self.allow(names);
        self
    }

    /// Replaces the list of permitted names.
    pub(super) fn allow(&self, names: Option<&[String]>) {
        let names = names.map(<[String]>::to_vec);
        *self.allowed.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// Takes a place, if fewer than `most` are taken.
    pub(super) fn place(&self, most: usize) -> Option<Place> {
        let next = |taken| if taken < most { Some(taken + 1) } else { None };
        let taken = self.places.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        taken.ok().map(|_| Place(self.places.clone()))
    }

    /// Returns whether this client may use the disk.
    pub(super) fn is_for(&self, peer: &Peer) -> bool {
        let knows = |name: &String| peer.names.iter().any(|has| has.eq_ignore_ascii_case(name));
        let allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
        allowed.as_ref().is_none_or(|names| names.iter().any(knows))
    }
}

/// A client's identity, as far as the server knows it.
#[derive(Debug, Default)]
pub struct Peer {
    pub tls: bool,
    /// The names in its certificate, which was verified.
    pub names: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_to_strings_of_the_protocol() {
        assert_eq!(as_string("a disk"), "a disk");
        assert_eq!(as_string("a\0 disk\0"), "a disk");
        let long = as_string(&"ü".repeat(3000));
        assert_eq!((long.len(), long.chars().count()), (4096, 2048));
    }
}
