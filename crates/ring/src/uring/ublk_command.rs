//! A command of a queue of a ublk device.

/// A command of a queue, as in its SQE.
#[derive(Clone, Copy)]
pub(crate) struct Command {
    pub op: u32,
    pub queue: u16,
    pub tag: u16,
    pub result: i32,
    /// Entry of the table of buffers for the next request's data.
    pub entry: Option<u16>,
}

impl Command {
    /// Returns the 16 command bytes of the SQE (`struct ublksrv_io_cmd`), and its address field.
    pub fn encode(&self, memory: &[libc::iovec]) -> ([u8; 16], u64) {
        let mut bytes = [0; 16];
        bytes[0..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        let address = memory.first().map_or(0, |v| v.iov_base as u64);
        bytes[8..16].copy_from_slice(&address.to_ne_bytes());
        (bytes, self.entry.map_or(0, u64::from))
    }
}
