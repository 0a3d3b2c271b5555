//! Standard error and standard output of a server. Each has a bounded queue and a thread that
//! writes the queue to the stream.
//!
//! In: messages of any thread. Out: the same text, in order. What must hold: no caller waits for a
//! reader of the text, and no write error affects a disk. A message is dropped and counted if its
//! queue is full or its write fails. After the next successful write the thread writes the count.
//! At the end of the program a flush waits for a bounded time. (`tracing-appender` is unsuitable:
//! its guard calls `println!` in its destructor, and it does not report what it dropped.)

use std::borrow::Cow;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use blockyard_program::output;
use blockyard_ring::sandbox::{self, Kind};
use blockyard_ring::text::is_deceptive;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// Maximum number of bytes in a queue.
const QUEUED: usize = 1 << 20;
/// How long the end of the program waits for queued text to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a line on standard output waits for the log messages before it.
const ORDER: Duration = Duration::from_millis(100);

static ERRORS: Queue = Queue::new("standard error");
static OUTPUT: Queue = Queue::new("standard output");
/// Whether the queues have threads.
static QUEUED_MODE: AtomicBool = AtomicBool::new(false);

/// Starts the log. Messages are written directly, and wait for the reader, until
/// [`start_queues`].
pub fn start(level: tracing::Level) {
    blockyard_program::log::start(level, BoxMakeWriter::new(|| Message));
}

/// From now on, writes standard error and standard output through queues. A server calls this after
/// it has entered its sandbox, which the queues' threads inherit.
pub fn start_queues() -> io::Result<()> {
    ERRORS.spawn("log", Stream(io::stderr()))?;
    OUTPUT.spawn("output", Stream(io::stdout()))?;
    QUEUED_MODE.store(true, Ordering::Release);
    Ok(())
}

/// Prints a line of a server on standard output. Waits at most 100 ms until earlier log messages
/// are written.
pub fn say(line: &str) {
    ERRORS.flush(ORDER);
    OUTPUT.push(format!("{line}\n").as_bytes());
}

/// Prints a line on standard error after all log messages, and waits at most 1 s until it is
/// written. For the end of the program.
pub fn last_words(line: &str) {
    if QUEUED_MODE.load(Ordering::Acquire) {
        ERRORS.push(&visible(format!("{line}\n").as_bytes()));
        flush();
    } else {
        output::note(line);
    }
}

/// Waits at most 1 s until all queued text is written. The end of the program loses the rest.
pub fn flush() {
    if QUEUED_MODE.load(Ordering::Acquire) {
        let start = Instant::now();
        OUTPUT.flush(LAST_WORDS);
        ERRORS.flush(LAST_WORDS.saturating_sub(start.elapsed()));
    }
}

/// Waits at most 100 ms until all queued text is written. Never waits for a lock, because the
/// thread that panicked may hold a lock of the log.
pub fn flush_in_panic() {
    let deadline = Instant::now() + Duration::from_millis(100);
    while QUEUED_MODE.load(Ordering::Acquire)
        && !(OUTPUT.is_idle() && ERRORS.is_idle())
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Puts messages of the `tracing` subscriber into the queue of standard error, if it has a thread.
/// Each call of `write` is one message.
struct Message;

impl Write for Message {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = visible(bytes);
        if QUEUED_MODE.load(Ordering::Acquire) {
            ERRORS.push(&text);
            return Ok(bytes.len());
        }
        io::stderr().write_all(&text).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a message without characters that change or hide what a terminal shows. The subscriber
/// has escaped control characters of names already, and makes those for colours itself.
fn visible(message: &[u8]) -> Cow<'_, [u8]> {
    let hides = |c: char| !c.is_ascii() && is_deceptive(c);
    match std::str::from_utf8(message) {
        Ok(text) if text.contains(hides) => text.replace(hides, "?").into_bytes().into(),
        _ => message.into(),
    }
}

/// A standard stream, written without the lock of the standard library. A panic message must not
/// wait for that lock while a write blocks.
struct Stream<F>(F);

impl<F: AsFd> Write for Stream<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.0, bytes) {
                // Another process made the open file non-blocking. Wait until it is writable.
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
    /// Signals that `bytes` is not empty.
    more: Condvar,
    /// Signals that the thread has written everything.
    idle: Condvar,
}

struct State {
    bytes: Vec<u8>,
    /// The thread is writing.
    busy: bool,
    /// Number of messages dropped since the last report.
    dropped: u64,
    /// Error of the last failed write since then.
    last_error: Option<io::Error>,
}

impl Queue {
    const fn new(name: &'static str) -> Self {
        let state = State { bytes: Vec::new(), busy: false, dropped: 0, last_error: None };
        Queue { name, state: Mutex::new(state), more: Condvar::new(), idle: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message, or drops it if the queue is full.
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

    /// Waits until everything is written, at most for `limit`. Returns whether it is.
    fn flush(&self, limit: Duration) -> bool {
        let unwritten = |state: &mut State| state.busy || !state.bytes.is_empty();
        let waited = self.idle.wait_timeout_while(self.state(), limit, unwritten);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Returns whether nothing is queued or being written. Returns false if the lock is taken.
    fn is_idle(&self) -> bool {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        !state.busy && state.bytes.is_empty()
    }

    fn spawn(&'static self, thread: &str, out: impl Write + Send + 'static) -> io::Result<()> {
        std::thread::Builder::new().name(thread.into()).spawn(|| {
            sandbox::confine(Kind::Log);
            self.work(out)
        })?;
        Ok(())
    }

    /// Writes queued messages until the process ends.
    fn work(&self, mut out: impl Write) {
        let mut batch = Vec::new();
        // Whether the last write ended in the middle of a line.
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
                Ok(()) => self.report_dropped(&mut out),
                Err(e) => {
                    let lost = batch[written..].iter().filter(|byte| **byte == b'\n').count();
                    let mut state = self.state();
                    state.dropped += lost as u64;
                    state.last_error = Some(e);
                }
            }
        }
    }

    /// Writes the number of dropped messages. If that fails too, the next successful write reports
    /// them.
    fn report_dropped(&self, out: &mut impl Write) {
        let (dropped, last_error) = {
            let mut state = self.state();
            (std::mem::take(&mut state.dropped), state.last_error.take())
        };
        if dropped == 0 {
            return;
        }
        let plural = if dropped == 1 { "" } else { "s" };
        let reason = last_error
            .as_ref()
            .map_or_else(|| "its reader is too slow".into(), ToString::to_string);
        let line = format!(
            "blockyard: {dropped} message{plural} dropped, because of {}: {reason}\n",
            self.name
        );
        if write_all(out, line.as_bytes()).1.is_err() {
            let mut state = self.state();
            state.dropped += dropped;
            state.last_error = last_error;
        }
    }
}

/// Writes all of `bytes`. Returns the number of bytes written, and the error if one stopped it.
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
