//! Meta contexts, and the replies to NBD_CMD_BLOCK_STATUS.
//!
//! The contexts:
//! - `base:allocation` is the protocol's own.
//! - `qemu:allocation-depth` is QEMU's. 0: no image contains the bytes. 1: the topmost image
//!   contains them. 2: its backing image does, and so on.
//! - `blockyard:layers` describes images in chains. Bits 0 to 15: number of the layer that contains
//!   the bytes, from 1, or 0 if no layer does. Bit 16: the bytes read as zeroes. Bit 17: the bytes
//!   are data. Bit 18: the bytes are compressed.

use std::io;

use blockyard_disk::{Failure, LocalDisk, Op};
use blockyard_image::BlockStatus;
use blockyard_nbd::wire::{self, Headers, errno, flag, state};
use blockyard_ring::Handle;

use super::reply::error_of;
use crate::budget::{Budget, REQUEST};

/// Maximum number of extents in one reply, for each context. The client asks again for the rest.
const MOST_EXTENTS: usize = 4096;
/// Maximum number of lookups in the image for one reply. After these lookups, the server sends the
/// extents that it has found.
const MOST_LOOKUPS: usize = 16384;
/// Number of lookups after which the reactor serves its other tasks.
const LOOKUPS_AT_ONCE: usize = 64;
/// Maximum number of bytes of a request's payload: the effect length and the context ids.
pub const MOST_PAYLOAD: u64 = 8 + 4 * 16;

/// The metadata contexts that this server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    Allocation,
    Depth,
    Layers,
}

impl Context {
    pub const ALL: [Context; 3] = [Context::Allocation, Context::Depth, Context::Layers];

    /// Returns the context's name in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Context::Allocation => "base:allocation",
            Context::Depth => "qemu:allocation-depth",
            Context::Layers => "blockyard:layers",
        }
    }

    /// Returns the context's id in replies.
    pub fn id(self) -> u32 {
        self as u32 + 1
    }

    fn flags(self, status: &BlockStatus) -> u32 {
        let layer = if status.present { status.depth as u32 + 1 } else { 0 };
        match self {
            Context::Allocation => {
                (if status.data { 0 } else { state::HOLE })
                    | if status.zero { state::ZERO } else { 0 }
            }
            Context::Depth => layer,
            Context::Layers => {
                let bit = |set: bool, bit: u32| u32::from(set) << bit;
                layer.min(0xffff)
                    | bit(status.zero, 16)
                    | bit(status.data, 17)
                    | bit(status.compressed, 18)
            }
        }
    }
}

/// The contexts that a client has chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contexts(Vec<Context>);

impl Contexts {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = Context> {
        self.0.iter().copied()
    }

    /// Adds the contexts that `query` matches. If `listing`, a namespace alone (`base:`) matches
    /// all its contexts.
    pub fn choose(&mut self, query: &[u8], listing: bool) {
        for context in Context::ALL {
            let name = context.name().as_bytes();
            let namespace = name.split_inclusive(|byte| *byte == b':').next().unwrap_or(name);
            if (name == query || (listing && namespace == query)) && !self.0.contains(&context) {
                self.0.push(context);
            }
        }
    }

    /// Adds all contexts.
    pub fn choose_all(&mut self) {
        self.0 = Context::ALL.to_vec();
    }

    /// Parses the payload of a block status request: the effect length, and the chosen subset of
    /// these contexts. Returns `None` if the payload is not valid.
    pub fn narrowed(&self, payload: &[u8]) -> Option<(u64, Contexts)> {
        if payload.len() < 12 || !payload.len().is_multiple_of(4) {
            return None;
        }
        let mut chosen = Vec::new();
        for id in payload[8..].chunks(4).map(|id| wire::u32_at(id, 0)) {
            let context = self.iter().find(|context| context.id() == id)?;
            if chosen.contains(&context) {
                return None;
            }
            chosen.push(context);
        }
        Some((wire::u64_at(payload, 0), Contexts(chosen)))
    }
}

/// Rounds `status` to whole blocks. A block that contains data and a hole counts as data.
fn in_blocks(status: BlockStatus, block: u64) -> BlockStatus {
    match status.len & !(block - 1) {
        0 => BlockStatus { data: true, zero: false, len: block, ..status },
        len => BlockStatus { len, ..status },
    }
}

/// Returns the payloads of the chunks that answer `request`, one for each context, or the error
/// code.
pub async fn chunks(
    served: &LocalDisk,
    contexts: &Contexts,
    request: &wire::Request,
    headers: Headers,
    block: u64,
    (reactor, budget): (&Handle, &Budget),
) -> Result<Vec<Vec<u8>>, u32> {
    let one = request.flags & flag::REQ_ONE != 0;
    let capacity = served.disk().capacity();
    let end = request.offset.checked_add(request.len).filter(|end| *end <= capacity);
    // A status covers whole blocks, up to the end of the disk.
    let whole = |end: &u64| {
        request.offset.is_multiple_of(block) && (end.is_multiple_of(block) || *end == capacity)
    };
    let end = end.filter(|end| request.len > 0 && whole(end)).ok_or(errno::EINVAL)?;
    // Without extended headers, lengths have 32 bits. The longest one is a multiple of 4096.
    let longest = if headers == Headers::Extended { u64::MAX } else { u64::from(!4095_u32) };
    let mut answers: Vec<(Context, Vec<(u64, u32)>)> =
        contexts.iter().map(|context| (context, Vec::new())).collect();
    let (mut at, mut lookups) = (request.offset, 0);
    while at < end && lookups < MOST_LOOKUPS {
        lookups += 1;
        if lookups % LOOKUPS_AT_ONCE == 0 {
            reactor.yield_now().await;
            budget.admit(reactor, LOOKUPS_AT_ONCE as u32 * REQUEST, 0).await;
        }
        let status = served
            .status(at, end - at)
            .await
            .map_err(|e: io::Error| error_of(Failure::of(&e), Op::Read))?;
        let status = in_blocks(status, block);
        let len = status.len.min(end - at);
        let mut full = false;
        for (context, extents) in &mut answers {
            let flags = context.flags(&status);
            match extents
                .last_mut()
                .filter(|(so_far, last)| *last == flags && *so_far <= longest - len.min(longest))
            {
                Some((so_far, _)) => *so_far += len,
                None => extents.push((len.min(longest), flags)),
            }
            // With REQ_ONE the reply ends where the first context changes.
            full |= extents.len() >= if one { 2 } else { MOST_EXTENTS };
        }
        if full || len > longest {
            break;
        }
        at += len;
    }
    Ok(answers
        .into_iter()
        .map(|(context, extents)| payload(context, &extents, one, headers))
        .collect())
}

fn payload(context: Context, extents: &[(u64, u32)], one: bool, headers: Headers) -> Vec<u8> {
    let extents = if one { &extents[..1] } else { extents };
    let mut out = Vec::from(context.id().to_be_bytes());
    if headers == Headers::Extended {
        out.extend((extents.len() as u32).to_be_bytes());
    }
    for (len, flags) in extents {
        if headers == Headers::Extended {
            out.extend(len.to_be_bytes());
            out.extend(u64::from(*flags).to_be_bytes());
        } else {
            out.extend((*len as u32).to_be_bytes());
            out.extend(flags.to_be_bytes());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_choose_contexts() {
        let chosen = |queries: &[&str], listing| {
            let mut contexts = Contexts::default();
            queries.iter().for_each(|query| contexts.choose(query.as_bytes(), listing));
            contexts.0
        };
        assert_eq!(
            chosen(&["base:allocation", "base:allocation", "x:y"], false),
            [Context::Allocation]
        );
        assert_eq!(chosen(&["base:", "qemu:"], false), []);
        assert_eq!(chosen(&["qemu:", "base:"], true), [Context::Depth, Context::Allocation]);
        assert_eq!(
            chosen(&["qemu:allocation-depth", "blockyard:layers"], true),
            [Context::Depth, Context::Layers]
        );
    }

    #[test]
    fn a_payload_selects_from_the_chosen_contexts() {
        let mut contexts = Contexts::default();
        contexts.choose(b"base:allocation", false);
        contexts.choose(b"blockyard:layers", false);
        let payload = |ids: &[u32]| {
            [
                &9u64.to_be_bytes()[..],
                &ids.iter().flat_map(|id| id.to_be_bytes()).collect::<Vec<_>>(),
            ]
            .concat()
        };
        assert_eq!(contexts.narrowed(&payload(&[3])), Some((9, Contexts(vec![Context::Layers]))));
        for wrong in [&[2][..], &[], &[1, 1], &[0]] {
            assert_eq!(contexts.narrowed(&payload(wrong)), None, "{wrong:?}");
        }
        assert_eq!(contexts.narrowed(&payload(&[1])[..11]), None);
    }
}
