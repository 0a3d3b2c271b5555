//! Static probes (USDT) at the stations of a request, for bpftrace, perf and SystemTap.
//!
//! ```text
//!   request_begin ─► request_admitted ─► request_end       one request, or a run of merged ones
//!                         └─► request_paused ─┘            the host has no space
//!   sync_begin ─► sync_end                                 a sync for a flush group
//! ```
//!
//! A probe is one `nop` instruction, and a note in the program (section `.note.stapsdt`) that says
//! where the instruction is, and in which registers its arguments are. A tracer replaces the `nop`
//! while it runs. So a probe that nothing traces costs the `nop` and the loads of its arguments.
//!
//! Names and arguments are an interface: docs/trace.md lists them.

/// A request to a disk, as the probes show it.
#[derive(Clone, Copy)]
pub struct Probed<'a> {
    /// Number of the request, unique while the request lasts.
    pub id: u64,
    pub disk: &'a str,
    /// 0: read, 1: write, 2: flush, 3: discard, 4: write of zeroes.
    pub op: u8,
    /// Offset and length in bytes.
    pub offset: u64,
    pub len: u64,
}

/// The disk has received the request.
#[inline(always)]
pub fn request_begin(request: Probed<'_>) {
    let Probed { id, disk, op, offset, len } = request;
    ::probe::probe!(blockyard, request_begin, id, disk.as_ptr(), disk.len(), op, offset, len);
}

/// Limits, shares and quiesces have admitted the request.
#[inline(always)]
pub fn request_admitted(request: Probed<'_>) {
    let Probed { id, disk, op, offset, len } = request;
    ::probe::probe!(blockyard, request_admitted, id, disk.as_ptr(), disk.len(), op, offset, len);
}

/// The request has a result. `ok`: it has succeeded.
#[inline(always)]
pub fn request_end(request: Probed<'_>, ok: bool) {
    let Probed { id, disk, op, len, .. } = request;
    ::probe::probe!(blockyard, request_end, id, disk.as_ptr(), disk.len(), op, ok, len);
}

/// The request waits for space on the host.
#[inline(always)]
pub fn request_paused(request: Probed<'_>) {
    let Probed { id, disk, op, offset, len } = request;
    ::probe::probe!(blockyard, request_paused, id, disk.as_ptr(), disk.len(), op, offset, len);
}

/// A sync for waiting flushes begins.
#[inline(always)]
pub fn sync_begin(disk: &str) {
    ::probe::probe!(blockyard, sync_begin, disk.as_ptr(), disk.len());
}

/// A sync has ended. `ok`: it has succeeded.
#[inline(always)]
pub fn sync_end(disk: &str, ok: bool) {
    ::probe::probe!(blockyard, sync_end, disk.as_ptr(), disk.len(), ok);
}
