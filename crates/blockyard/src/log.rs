//! Standard error and standard output of a server: each has a bounded queue, and a thread that
//! writes it.
//!
//! In: messages of any thread. Out: the same text, in order. What must hold: no caller waits for a
//! reader of the text, and no failure to write it harms a disk. A message that finds its queue
//! full, or that cannot be written, is dropped and counted; the next write that succeeds is
//! followed by the count. At the end of the program a flush waits for a bounded time.
//! (`tracing-appender` does not serve: its guard prints by `println!` in its destructor, and it
//! does not tell what it lost.)

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use blockyard_program::output;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// Most bytes that a queue holds.
const QUEUED: usize = 1 << 20;
/// How long the end of the program waits for queued text to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a line on standard output waits for the log messages before it.
const ORDER: Duration = Duration::from_millis(100);

static ERRORS: Queue = Queue::new("standard error");
static OUTPUT: Queue = Queue::new("standard output");
/// Whether the queues have threads.
static QUEUED_MODE: AtomicBool = AtomicBool::new(false);

/// Starts the log. `server`: standard error and standard output are written through queues. A
/// command writes them itself, and waits for their readers.
pub fn start(level: tracing::Level, server: bool) -> io::Result<()> {
    if server {
        ERRORS.spawn("log", Stream(io::stderr()))?;
        OUTPUT.spawn("output", Stream(io::stdout()))?;
        QUEUED_MODE.store(true, Ordering::Release);
    }
    let writer = if server {
        BoxMakeWriter::new(|| Message(&ERRORS))
    } else {
        BoxMakeWriter::new(io::stderr)
    };
    blockyard_program::log::start(level, writer);
    Ok(())
}

/// Prints a line of a server on standard output. Log messages from before come first, unless they
/// take too long.
pub fn say(line: &str) {
    ERRORS.flush(ORDER);
    OUTPUT.push(format!("{line}\n").as_bytes());
}

/// Prints a line on standard error, behind the log, and waits a bounded time until it is written.
/// For the end of the program.
pub fn last_words(line: &str) {
    if QUEUED_MODE.load(Ordering::Acquire) {
        ERRORS.push(format!("{line}\n").as_bytes());
        flush();
    } else {
        output::note(line);
    }
}

/// Waits until all queued text is written, but not for long. The end of the program loses what is
/// not.
pub fn flush() {
    if QUEUED_MODE.load(Ordering::Acquire) {
        let start = Instant::now();
        OUTPUT.flush(LAST_WORDS);
        ERRORS.flush(LAST_WORDS.saturating_sub(start.elapsed()));
    }
}

/// Waits at most 100 ms until all queued text is written. For a panic hook: its thread may hold a
/// lock of the log, so this never waits for a lock.
pub fn flush_in_panic() {
    let deadline = Instant::now() + Duration::from_millis(100);
    while QUEUED_MODE.load(Ordering::Acquire)
        && !(OUTPUT.is_idle() && ERRORS.is_idle())
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes one message of the subscriber, which comes in one piece, into a queue.
struct Message(&'static Queue);

impl Write for Message {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A standard stream, written without the lock that the standard library has for it: a panic
/// message must not wait there behind a write that blocks.
struct Stream<F>(F);

impl<F: AsFd> Write for Stream<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.0, bytes) {
                // Another process has made the open file non-blocking.
                Err(Errno::AGAIN) => {
                    _ = rustix::event::poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None)
                }
                done => return Ok(done?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Queue {
    name: &'static str,
    state: Mutex<State>,
    /// There is something to write.
    more: Condvar,
    /// The thread has nothing to write any more.
    idle: Condvar,
}

struct State {
    bytes: Vec<u8>,
    /// The thread is writing.
    busy: bool,
    /// Messages that were lost since a line last told so, and why the last of them was.
    dropped: u64,
    why: Option<io::Error>,
}

impl Queue {
    const fn new(name: &'static str) -> Self {
        let state = State { bytes: Vec::new(), busy: false, dropped: 0, why: None };
        Queue { name, state: Mutex::new(state), more: Condvar::new(), idle: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message, or drops it.
    fn push(&self, message: &[u8]) {
        let mut state = self.state();
        if state.bytes.len() + message.len() > QUEUED {
            state.dropped += 1;
            return;
        }
        state.bytes.extend_from_slice(message);
        drop(state);
        self.more.notify_one();
    }

    /// Waits until nothing is queued, at most for `limit`. Returns whether that is so.
    fn flush(&self, limit: Duration) -> bool {
        let unwritten = |state: &mut State| state.busy || !state.bytes.is_empty();
        let waited = self.idle.wait_timeout_while(self.state(), limit, unwritten);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Whether nothing is queued or being written, as far as that can be seen without waiting.
    fn is_idle(&self) -> bool {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        !state.busy && state.bytes.is_empty()
    }

    fn spawn(&'static self, thread: &str, out: impl Write + Send + 'static) -> io::Result<()> {
        std::thread::Builder::new().name(thread.into()).spawn(|| self.work(out)).map(drop)
    }

    /// Writes what is queued, forever.
    fn work(&self, mut out: impl Write) {
        let mut batch = Vec::new();
        // Whether the stream ends in the middle of a line.
        let mut torn = false;
        loop {
            {
                let mut state = self.state();
                state.busy = false;
                if state.bytes.is_empty() {
                    self.idle.notify_all();
                    let waited = self.more.wait_while(state, |state| state.bytes.is_empty());
                    state = waited.unwrap_or_else(PoisonError::into_inner);
                }
                state.busy = true;
                batch.clear();
                std::mem::swap(&mut batch, &mut state.bytes);
            }
            if torn {
                batch.insert(0, b'\n');
            }
            let (written, result) = write_all(&mut out, &batch);
            torn = written.checked_sub(1).map_or(torn, |last| batch[last] != b'\n');
            match result {
                Ok(()) => self.tell_dropped(&mut out),
                Err(e) => {
                    let lost = batch[written..].iter().filter(|byte| **byte == b'\n').count();
                    let mut state = self.state();
                    state.dropped += lost as u64;
                    state.why = Some(e);
                }
            }
        }
    }

    /// Writes how many messages were dropped. If that fails too, the next success tells it.
    fn tell_dropped(&self, out: &mut impl Write) {
        let (dropped, why) = {
            let mut state = self.state();
            (std::mem::take(&mut state.dropped), state.why.take())
        };
        if dropped == 0 {
            return;
        }
        let plural = if dropped == 1 { "" } else { "s" };
        let reason = why.as_ref().map_or_else(|| "it was not read".into(), ToString::to_string);
        let line = format!(
            "blockyard: {dropped} message{plural} dropped, because of {}: {reason}\n",
            self.name
        );
        if write_all(out, line.as_bytes()).1.is_err() {
            let mut state = self.state();
            state.dropped += dropped;
            state.why = why;
        }
    }
}

/// Writes all of `bytes`, or returns how many were written before it failed.
fn write_all(out: &mut impl Write, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match out.write(&bytes[written..]) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(n) => written += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (written, Err(e)),
        }
    }
    (written, Ok(()))
}

#[cfg(test)]
mod tests;
