//! Signals to the front end, which determines their cost: it can add waiters to their descriptor.
//!
//! ```text
//!   queue ── signal ──► bell (Direct, Measured)
//!                └────► thread of the device ──► bell (Elsewhere)
//! ```
//!
//! In: signals of a queue. Out: each reaches the guest, from the reactor or from a thread.
//! [`SlowCalls`] decides which.
//!
//! What must hold
//! - The thread has at most one signal of a queue to send, because several that wait are one signal
//!   to the guest. No signal is lost while the bell changes hands.
//! - A front end that brings a new descriptor, or connects again, gains nothing: the device
//!   remembers what its signals took.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_disk::Disk;
use blockyard_ring::Clock;
use blockyard_ring::doorbell::Doorbell;
use blockyard_ring::pool::Pool;
use blockyard_ring::{CallMode, SlowCallCounters, SlowCalls};
use rustix::net::{AddressFamily, SendFlags, SocketType, sockopt};

use super::lock;
use crate::log::Log;

/// Time after which a thread without signals ends.
const LINGER: Duration = Duration::from_secs(1);

/// Most error signals that wait for the thread. A further one is left out.
const MOST_ERRORS: usize = 8;

/// Signals that take as long are reported in the log.
const REPORTED: Duration = Duration::from_millis(1);

/// The thread that sends a device's slow signals. It runs only while there are some.
pub struct SignalThread {
    pool: Pool,
    disk: Arc<Disk>,
    log: Log,
    /// With what a new descriptor begins.
    policy: Mutex<SlowCalls>,
    /// Number of error signals that wait.
    errors: Arc<AtomicUsize>,
}

impl std::fmt::Debug for SignalThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignalThread").field("disk", &self.disk.name()).finish_non_exhaustive()
    }
}

impl SignalThread {
    pub fn new(disk: Arc<Disk>) -> Arc<Self> {
        let pool = Pool::new("signals", 1, LINGER);
        let (log, policy, errors) = Default::default();
        Arc::new(SignalThread { pool, disk, log, policy, errors })
    }

    #[cfg(test)]
    pub(super) fn for_tests() -> Arc<Self> {
        use blockyard_disk::{DiskOptions, Source};
        use blockyard_image::{CacheMode, ChainOptions};
        let options = DiskOptions {
            name: "test".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let image = ChainOptions::new("ram:1M");
        SignalThread::new(Arc::new(Disk::new(options, Source::open(&image).unwrap())))
    }

    /// Sends one signal about an error from the thread, unless many wait already.
    pub fn send_error(&self, fd: OwnedFd) {
        let errors = self.errors.clone();
        if errors.fetch_add(1, Ordering::SeqCst) >= MOST_ERRORS {
            errors.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let task = move |(): &()| {
            if let Ok(mut bell) = Bell::new(fd) {
                bell.ring();
            }
            errors.fetch_sub(1, Ordering::SeqCst);
        };
        // Without a thread the signal is lost, as if the front end had not asked for it.
        if self.pool.run(Box::new(task)).is_err() {
            self.errors.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Signals a descriptor.
enum Bell {
    Event(Doorbell),
    Stream(OwnedFd),
}

impl Bell {
    fn new(fd: OwnedFd) -> std::io::Result<Self> {
        if is_unix_stream(&fd) { Ok(Bell::Stream(fd)) } else { Doorbell::new(&fd).map(Bell::Event) }
    }

    #[inline]
    fn ring(&mut self) {
        match self {
            Bell::Event(bell) => bell.ring(),
            Bell::Stream(socket) => send(socket),
        }
    }

    /// Signals, and returns the processor time that it took.
    fn ring_measured(&mut self) -> Duration {
        let before = Clock::Thread.read();
        self.ring();
        Clock::Thread.read().saturating_sub(before)
    }
}

/// Sends a signal. Ignores a full socket, because the guest then has a signal that it has not read
/// yet.
fn send(socket: &OwnedFd) {
    let _ =
        rustix::net::send(socket, &1u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

pub(super) fn is_unix_stream(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    sockopt::socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
        && sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM)
}

/// What the queue and the thread share.
#[derive(Default)]
struct Handed {
    bell: Mutex<Option<Bell>>,
    /// A signal of the queue waits for the thread.
    is_wanted: AtomicBool,
    /// Longest time of a signal since the queue last looked, in nanoseconds.
    slowest_ns: AtomicU64,
}

impl Handed {
    fn ring(&self) {
        self.is_wanted.store(false, Ordering::SeqCst);
        if let Some(bell) = &mut *lock(&self.bell) {
            let took = u64::try_from(bell.ring_measured().as_nanos()).unwrap_or(u64::MAX);
            self.slowest_ns.fetch_max(took, Ordering::SeqCst);
        }
    }
}

/// The signals of one queue.
pub struct GuestSignal {
    /// None: the thread has it.
    bell: Option<Bell>,
    policy: SlowCalls,
    handed: Arc<Handed>,
    thread: Arc<SignalThread>,
    /// Number of slow signals of the thread since it got the bell. The second one is reported: the
    /// host can interrupt a thread once.
    slow_by_thread: u32,
}

impl GuestSignal {
    /// Returns error `InvalidInput` if the descriptor is neither an eventfd nor a Unix stream
    /// socket.
    pub fn new(fd: OwnedFd, thread: &Arc<SignalThread>) -> std::io::Result<Self> {
        let (bell, handed) = (Bell::new(fd)?, Arc::<Handed>::default());
        let mut policy = lock(&thread.policy).clone();
        let bell = match policy.mode(Instant::now()) {
            CallMode::Elsewhere => {
                *lock(&handed.bell) = Some(bell);
                None
            }
            CallMode::Direct | CallMode::Measured => Some(bell),
        };
        Ok(GuestSignal { bell, policy, handed, thread: thread.clone(), slow_by_thread: 0 })
    }

    /// Signals the guest, and counts slow signals. Never blocks.
    #[inline]
    pub fn ring(&mut self, counters: &SlowCallCounters) {
        let began = Instant::now();
        let mode = self.policy.mode(began);
        match &mut self.bell {
            Some(bell) if mode == CallMode::Direct => {
                bell.ring();
                let ended = Instant::now();
                self.made(ended, ended.saturating_duration_since(began), counters);
            }
            _ => self.ring_slow(began, mode, counters),
        }
    }

    #[cold]
    fn ring_slow(&mut self, now: Instant, mode: CallMode, counters: &SlowCallCounters) {
        if mode != CallMode::Elsewhere && self.take_back() {
            return self.ring_measured(now, counters);
        }
        let took = Duration::from_nanos(self.handed.slowest_ns.swap(0, Ordering::SeqCst));
        self.made(now, took, counters);
        if took >= REPORTED {
            self.slow_by_thread = self.slow_by_thread.saturating_add(1);
            if self.slow_by_thread == 2 {
                self.report(took);
            }
        }
        if !self.handed.is_wanted.swap(true, Ordering::SeqCst) {
            let handed = self.handed.clone();
            if self.thread.pool.run(Box::new(move |()| handed.ring())).is_err() {
                // The kernel refuses to start a thread. A lost signal would stop the guest.
                self.handed.ring();
            }
        }
    }

    /// Reports how long a signal took. Returns whether the thread sends them from now on.
    #[inline]
    fn made(&mut self, now: Instant, took: Duration, counters: &SlowCallCounters) -> bool {
        SlowCalls::is_slow(took) && self.was_slow(now, took, counters)
    }

    #[cold]
    fn was_slow(&mut self, now: Instant, took: Duration, counters: &SlowCallCounters) -> bool {
        let is_measured = self.policy.mode(now) != CallMode::Direct;
        let mut policy = lock(&self.thread.policy);
        // A signal of the mode `Direct` leads only to a measurement. See `SlowCalls`.
        if policy.mode(now) == CallMode::Direct || is_measured {
            policy.made(now, took);
        }
        let becomes = self.policy.made(now, took);
        counters.count(now, took, becomes);
        becomes == Some(CallMode::Elsewhere)
    }

    /// Returns whether the reactor has the bell. A signal that the thread has not sent yet is the
    /// next one of the reactor.
    fn take_back(&mut self) -> bool {
        if self.bell.is_none()
            && let Ok(mut bell) = self.handed.bell.try_lock()
        {
            self.bell = bell.take();
        }
        self.bell.is_some()
    }

    fn ring_measured(&mut self, now: Instant, counters: &SlowCallCounters) {
        let Some(bell) = &mut self.bell else { return };
        let took = bell.ring_measured();
        if self.made(now, took, counters) {
            *lock(&self.handed.bell) = self.bell.take();
            self.slow_by_thread = 0;
        }
    }

    /// Reports what the thread has measured. What the reactor has measured can be an interruption
    /// by the host, which counts as processor time.
    fn report(&self, took: Duration) {
        let SignalThread { disk, log, .. } = &*self.thread;
        let what = format_args!(
            "a signal to the front end takes {} us, because its descriptor has many waiters; a \
             thread sends the signals",
            took.as_micros()
        );
        log.warn(disk.name(), None, what);
    }
}

#[cfg(test)]
mod tests {
    use blockyard_ring::SlowCallFigures;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Waits for signals, and returns their number.
    fn signals(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    /// If a signal was lost, this test would not end.
    #[test]
    fn no_signal_is_lost_while_the_bell_changes_hands() {
        let thread = SignalThread::for_tests();
        for _ in 0..100 {
            let event = eventfd(0, EventfdFlags::empty()).unwrap();
            let mut signal = GuestSignal::new(event.try_clone().unwrap(), &thread).unwrap();
            signal.ring(&SlowCallCounters::default());
            assert_eq!(signals(&event), 1, "from the reactor");
            let (now, slow) = (Instant::now(), Duration::from_secs(1));
            for _ in 0..2 {
                signal.policy.made(now, slow);
            }
            *lock(&signal.handed.bell) = signal.bell.take();
            signal.ring(&SlowCallCounters::default());
            assert_eq!(signals(&event), 1, "from the thread");
            // The reactor takes the bell back before the thread has sent this signal, or after it.
            signal.ring(&SlowCallCounters::default());
            signal.policy = SlowCalls::default();
            signal.ring(&SlowCallCounters::default());
            assert!((1..=2).contains(&signals(&event)));
            while !signal.take_back() {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_slow_signal_of_the_thread_keeps_the_signals_there() {
        let thread = SignalThread::for_tests();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let mut signal = GuestSignal::new(event.try_clone().unwrap(), &thread).unwrap();
        let (now, slow) = (Instant::now(), Duration::from_secs(1));
        for _ in 0..2 {
            signal.policy.made(now, slow);
        }
        *lock(&signal.handed.bell) = signal.bell.take();
        signal.handed.slowest_ns.store(3_000_000_000, Ordering::SeqCst);
        signal.ring(&SlowCallCounters::default());
        assert_eq!(signals(&event), 1);
        assert_eq!(signal.policy.mode(now + 2999 * slow), CallMode::Elsewhere);
    }

    /// A front end replaces its descriptor before the second slow signal of each.
    #[test]
    fn new_descriptors_begin_where_the_last_ones_were() {
        let thread = SignalThread::for_tests();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let (now, slow) = (Instant::now(), Duration::from_secs(1));
        let counters = SlowCallCounters::default();
        for expected in [CallMode::Direct, CallMode::Measured, CallMode::Elsewhere] {
            let mut signal = GuestSignal::new(event.try_clone().unwrap(), &thread).unwrap();
            assert_eq!(signal.policy.mode(now), expected);
            signal.ring(&SlowCallCounters::default());
            assert_eq!(signals(&event), 1, "{expected:?}");
            signal.made(now, slow, &counters);
        }
        // Each queue decides from where the device was, so only one of them changed its mode.
        let SlowCallFigures { slow: all, measured, elsewhere, .. } = counters.figures();
        assert_eq!((all, measured, elsewhere), (3, 1, 1));
        // The time of a signal that the reactor has not measured is not blamed twice.
        let thread = SignalThread::for_tests();
        let signal = || GuestSignal::new(event.try_clone().unwrap(), &thread).unwrap();
        let mut both = [signal(), signal()];
        for signal in &mut both {
            assert!(!signal.made(now, slow, &counters));
        }
        assert_eq!(signal().policy.mode(now), CallMode::Measured);
    }

    #[test]
    fn error_signals_that_wait_are_few() {
        let thread = SignalThread::for_tests();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        thread.send_error(event.try_clone().unwrap());
        assert_eq!(signals(&event), 1);
        while thread.errors.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        // The thread waits meanwhile.
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let wait = move |(): &()| assert_eq!(rustix::io::read(&reader, &mut [0]), Ok(0));
        assert!(thread.pool.run(Box::new(wait)).is_ok());
        for _ in 0..2 * MOST_ERRORS {
            thread.send_error(event.try_clone().unwrap());
        }
        drop(writer);
        while thread.errors.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        assert_eq!(signals(&event), MOST_ERRORS as u64);
    }
}
