//! The waits of tests. Each waits for an event. If the event does not come within [`LIMIT`], the
//! test fails and names it, and no process or executor of the wait goes on.

use std::io;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::Executor;

/// Longer than any event of a test takes on a busy host.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Waits until `holds` returns true.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        std::thread::yield_now();
    }
}

/// Receives the next value of a channel.
#[track_caller]
pub fn receive<T>(receiver: &Receiver<T>, what: &str) -> T {
    match receiver.recv_timeout(LIMIT) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("not within {LIMIT:?}: {what}"),
        Err(RecvTimeoutError::Disconnected) => panic!("the sender has gone: {what}"),
    }
}

/// Waits for the end of a thread, and returns its result. If the thread has panicked, this panics
/// too.
#[track_caller]
pub fn join<T: Send + 'static>(thread: JoinHandle<T>, what: &str) -> T {
    let (sender, ended) = channel();
    std::thread::spawn(move || sender.send(thread.join()));
    match receive(&ended, what) {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Does work that may block its thread. After the limit the test fails, and the thread is left.
#[track_caller]
pub fn within<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    join(std::thread::spawn(work), what)
}

/// Runs an executor until `future` is done. After the limit the executor is stopped, which is an
/// error.
pub fn block_on<T: 'static>(
    executor: &Executor,
    future: impl Future<Output = T> + 'static,
) -> io::Result<T> {
    let watch = Watch::of(executor);
    let result = executor.block_on(future);
    watch.check()?;
    result
}

/// Runs an executor until a task or another thread stops it. A stop by the limit is an error.
pub fn run(executor: &Executor) -> io::Result<()> {
    let watch = Watch::of(executor);
    executor.run()?;
    watch.check()
}

/// Stops an executor after the limit, unless the watch ends before.
struct Watch {
    has_expired: Arc<AtomicBool>,
    _ends: Sender<()>,
}

impl Watch {
    fn of(executor: &Executor) -> Self {
        let (ends, ended) = channel();
        let (remote, has_expired) = (executor.remote(), Arc::new(AtomicBool::new(false)));
        let expires = has_expired.clone();
        std::thread::spawn(move || {
            if ended.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                expires.store(true, Ordering::SeqCst);
                remote.run(|handle| handle.stop());
            }
        });
        Watch { has_expired, _ends: ends }
    }

    fn check(&self) -> io::Result<()> {
        if self.has_expired.load(Ordering::SeqCst) {
            let text = format!("the executor's work has not ended within {LIMIT:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        Ok(())
    }
}

/// Returns two connected sockets. Reads and writes of the second one fail after the limit.
pub fn peers() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(LIMIT)).unwrap();
    theirs.set_write_timeout(Some(LIMIT)).unwrap();
    (ours, theirs)
}

/// Waits for the end of a process. Kills a process that has not ended after the limit.
#[track_caller]
pub fn end(child: &mut Child, what: &str) -> ExitStatus {
    // The number of a process that has been collected has no meaning.
    if let Some(status) = child.try_wait().unwrap() {
        return status;
    }
    let has_ended = has_ended(Pid::from_child(child));
    if !has_ended {
        let _ = child.kill();
    }
    let status = child.wait().unwrap();
    assert!(has_ended, "a process has not ended within {LIMIT:?}: {what}");
    status
}

/// Waits until a child of this process has ended. Does not take its status. Returns false after the
/// limit.
pub fn has_ended(child: Pid) -> bool {
    let process = rustix::process::pidfd_open(child, PidfdFlags::empty()).unwrap();
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(&process, PollFlags::IN)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&limit))).unwrap() > 0
}

/// Runs a command, and returns its output. Kills a process that has not ended after the limit.
#[track_caller]
pub fn output(command: &mut Command, what: &str) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    rest(command.spawn().unwrap(), what)
}

/// Waits for the end of a process, and returns the rest of its output. Kills a process that has not
/// ended after the limit.
#[track_caller]
pub fn rest(child: Child, what: &str) -> Output {
    // The thread below may collect the process at any time, and then its number has no meaning.
    let process = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let (sender, ended) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(LIMIT) else {
        let _ = rustix::process::pidfd_send_signal(process.unwrap(), Signal::KILL);
        panic!("a process has not ended within {LIMIT:?}: {what}");
    };
    output.unwrap()
}
