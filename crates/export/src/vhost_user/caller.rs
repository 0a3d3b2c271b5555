//! Sends in-band calls from the thread of the device's back channel.
//!
//! In: from the reactors, the numbers of the queues that must interrupt their guest. Out: messages
//! on the back channel. The front end acknowledges each message before the next one is sent. What
//! must hold: a reactor never waits for the front end, however late the acknowledgement is. Each
//! queue has at most one pending call, so memory is bounded.
//!
//! A device has one such thread, however often its front end connects again. A pool for all devices
//! would not do: a front end that acknowledges nothing keeps its thread for a second at a time.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockyard_ring::pool::Pool;

use super::channel::BackChannel;
use super::lock;

/// The thread has started before the first call, and stays, so that no reactor has to start it.
const LINGER: Duration = Duration::from_secs(365 * 86_400);

/// Returns the thread that waits for answers on the back channel of a device. It starts with its
/// first task.
pub fn thread(name: &'static str) -> Arc<Pool> {
    Arc::new(Pool::new(name, 1, LINGER))
}

/// Sends the calls of one session. After its drop no call begins.
pub struct Caller {
    calls: Arc<Calls>,
    thread: Arc<Pool>,
}

struct Calls {
    channel: Mutex<Arc<BackChannel>>,
    /// For each queue: whether a call is pending.
    wanted: Box<[AtomicBool]>,
    /// The thread sends calls, or will. It finds each call that is wanted meanwhile.
    sends: AtomicBool,
    ended: AtomicBool,
}

impl Caller {
    /// Returns the caller of a session with this number of queues. Starts `thread` if it does not
    /// run.
    pub fn start(
        channel: Arc<BackChannel>,
        queues: u16,
        thread: &Arc<Pool>,
    ) -> io::Result<Arc<Self>> {
        thread.run(Box::new(|()| {})).map_err(|refused| refused.error)?;
        let wanted = (0..queues).map(|_| AtomicBool::new(false)).collect();
        let (sends, ended) = Default::default();
        let calls = Arc::new(Calls { channel: Mutex::new(channel), wanted, sends, ended });
        Ok(Arc::new(Caller { calls, thread: thread.clone() }))
    }

    /// Sends all later calls on another channel, including the calls of running queues.
    pub fn use_channel(&self, channel: Arc<BackChannel>) {
        *lock(&self.calls.channel) = channel;
    }

    /// Makes the thread send a call for a queue. Calls for the same queue that are pending at the
    /// same time are sent as one.
    pub fn call(&self, queue: u16) {
        self.calls.wanted[usize::from(queue)].store(true, Ordering::SeqCst);
        if !self.calls.sends.swap(true, Ordering::SeqCst) {
            let calls = self.calls.clone();
            if self.thread.run(Box::new(move |()| calls.send())).is_err() {
                // The next call tries again. The thread runs, so this does not happen.
                self.calls.sends.store(false, Ordering::SeqCst);
            }
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.calls.ended.store(true, Ordering::SeqCst);
    }
}

impl Calls {
    fn send(&self) {
        let has_ended = || self.ended.load(Ordering::SeqCst);
        loop {
            for (queue, wanted) in (0..).zip(&self.wanted) {
                if !has_ended() && wanted.swap(false, Ordering::SeqCst) {
                    let channel = lock(&self.channel).clone();
                    channel.vring_call(queue);
                }
            }
            self.sends.store(false, Ordering::SeqCst);
            // A call that came after this thread had passed its queue has found `sends` true.
            let is_wanted = self.wanted.iter().any(|wanted| wanted.load(Ordering::SeqCst));
            if has_ended() || !is_wanted || self.sends.swap(true, Ordering::SeqCst) {
                return;
            }
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
        let channel = Arc::new(BackChannel::new(ours.into(), true));
        let caller = Caller::start(channel, 4, &thread("test")).unwrap();
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

    /// Returns the number of threads with this name.
    fn threads(name: &str) -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let named = |path: std::path::PathBuf| {
            // A thread may end meanwhile.
            std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        tasks.filter(|task| named(task.as_ref().unwrap().path())).count()
    }

    #[test]
    fn sessions_whose_front_ends_acknowledge_nothing_share_one_thread() {
        let thread = thread("calls bound");
        let mut peers: Vec<_> = (0..20)
            .map(|_| {
                let (ours, peer) = UnixStream::pair().unwrap();
                let channel = Arc::new(BackChannel::new(ours.into(), true));
                let caller = Caller::start(channel, 1, &thread).unwrap();
                caller.call(0);
                (caller, peer)
            })
            .collect();
        for (_, peer) in &mut peers {
            assert_eq!(next(peer), 0, "each call is sent");
            assert_eq!(threads("calls bound"), 1);
            acknowledge(peer);
        }
    }
}
