//! Sends in-band calls from a thread of its own.
//!
//! In: from the reactors, the numbers of the queues that must interrupt their guest. Out: messages
//! on the back channel. The front end acknowledges each message before the next one is sent. What
//! must hold: a reactor never waits for the front end, however late the acknowledgement is. Each
//! queue has at most one pending call, so memory is bounded. A call costs a reactor an atomic
//! exchange and a wake-up: no lock and no allocation. A session has one such thread, and a device
//! has one session.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Thread;

use super::channel::BackChannel;
use super::lock;

/// Sends the calls of one session. Drop ends its thread.
pub struct Caller {
    calls: Arc<Calls>,
    thread: Thread,
}

struct Calls {
    channel: Mutex<Arc<BackChannel>>,
    /// For each queue: whether a call is pending.
    wanted: Box<[AtomicBool]>,
    ended: AtomicBool,
}

impl Caller {
    /// Starts the thread for a session with this number of queues.
    pub fn start(channel: Arc<BackChannel>, queues: u16) -> io::Result<Arc<Self>> {
        let wanted = (0..queues).map(|_| AtomicBool::new(false)).collect();
        let calls =
            Arc::new(Calls { channel: Mutex::new(channel), wanted, ended: AtomicBool::new(false) });
        let shared = calls.clone();
        let thread = std::thread::Builder::new().name("calls".into()).stack_size(128 << 10);
        let thread = thread.spawn(move || shared.send())?.thread().clone();
        Ok(Arc::new(Caller { calls, thread }))
    }

    /// Sends all later calls on another channel, including the calls of running queues.
    pub fn use_channel(&self, channel: Arc<BackChannel>) {
        *lock(&self.calls.channel) = channel;
    }

    /// Makes the thread send a call for a queue. Calls for the same queue that are pending at the
    /// same time are sent as one.
    pub fn call(&self, queue: u16) {
        if !self.calls.wanted[usize::from(queue)].swap(true, Ordering::AcqRel) {
            self.thread.unpark();
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.calls.ended.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

impl Calls {
    fn send(&self) {
        while !self.ended.load(Ordering::Acquire) {
            for (queue, wanted) in (0..).zip(&self.wanted) {
                if !self.ended.load(Ordering::Acquire) && wanted.swap(false, Ordering::AcqRel) {
                    let channel = lock(&self.channel).clone();
                    channel.vring_call(queue);
                }
            }
            // If `unpark` was called after the check, it has left a token, so `park` returns at
            // once.
            std::thread::park();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Returns the queue of the next call.
    fn next(peer: &mut UnixStream) -> u8 {
        let mut message = [0; 20];
        peer.read_exact(&mut message).unwrap();
        message[12]
    }

    fn acknowledge(peer: &mut UnixStream) {
        let mut reply = [0; 20];
        reply[..12].copy_from_slice(&[4, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0]);
        peer.write_all(&reply).unwrap();
    }

    #[test]
    fn calls_wait_for_acknowledgements_but_reactors_do_not() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let caller = Caller::start(Arc::new(BackChannel::new(ours.into(), true)), 4).unwrap();
        caller.call(2);
        assert_eq!(next(&mut peer), 2);
        // Request more calls than a socket holds before the front end acknowledges the first one.
        // They are sent as one call.
        (0..1_000_000).for_each(|_| caller.call(3));
        acknowledge(&mut peer);
        assert_eq!(next(&mut peer), 3);
        acknowledge(&mut peer);
        caller.call(1);
        assert_eq!(next(&mut peer), 1);
        acknowledge(&mut peer);
        let (ours, mut other) = UnixStream::pair().unwrap();
        caller.use_channel(Arc::new(BackChannel::new(ours.into(), true)));
        caller.call(0);
        assert_eq!(next(&mut other), 0, "calls use the new channel");
        acknowledge(&mut other);
        assert_eq!(peer.read(&mut [0; 1]).unwrap(), 0, "the end of the first channel");
        drop(caller);
        assert_eq!(other.read(&mut [0; 1]).unwrap(), 0, "its end is the channel's end");
    }
}
