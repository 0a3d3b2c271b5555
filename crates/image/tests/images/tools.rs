//! Other programs and long work, each with a limit. A test fails after the limit, says for what it
//! has waited, and leaves no process.

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use blockyard_ring::Executor;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

/// Longer than any program or work of these tests takes on a busy host.
const LIMIT: Duration = Duration::from_secs(300);

/// Returns a command that runs a program of `guests/setup tree`.
pub fn tool(name: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/tool"));
    command.arg(name);
    command
}

/// Runs a command to its end. Kills a program that has not ended after the limit.
#[track_caller]
pub fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
    // The thread below may collect the process at any time, and then its number has no meaning.
    let process = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let (sender, ended) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(LIMIT) else {
        let _ = rustix::process::pidfd_send_signal(process.unwrap(), Signal::KILL);
        panic!("{command:?} has not ended within {LIMIT:?}");
    };
    output.unwrap()
}

/// Returns the standard output of a command, which must succeed.
#[track_caller]
pub fn good(command: &mut Command) -> String {
    let output = output(command);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {out}{error}");
    out
}

/// Waits for the end of a process. Kills a process that has not ended after the limit.
#[track_caller]
pub fn end(child: &mut Child, what: &str) -> ExitStatus {
    // The number of a process that has been collected has no meaning.
    if let Some(status) = child.try_wait().unwrap() {
        return status;
    }
    let process = rustix::process::pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(&process, PollFlags::IN)];
    let has_ended =
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&limit))).unwrap() > 0;
    if !has_ended {
        let _ = child.kill();
    }
    let status = child.wait().unwrap();
    assert!(has_ended, "{what} has not ended within {LIMIT:?}");
    status
}

/// Runs an executor until `work` is done. After the limit the executor is stopped, and the test
/// fails.
#[track_caller]
pub fn block_on<T: 'static>(executor: &Executor, work: impl Future<Output = T> + 'static) -> T {
    let (ends, ended) = channel::<()>();
    let remote = executor.remote();
    std::thread::spawn(move || {
        if ended.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            remote.run(|handle| handle.stop());
        }
    });
    let result = executor.block_on(work);
    drop(ends);
    result.unwrap_or_else(|e| panic!("the work of an executor (at most {LIMIT:?}): {e}"))
}

/// Does work on another thread. After the limit the test fails, and the thread is left.
#[track_caller]
pub fn within<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, ended) = channel();
    let thread = std::thread::spawn(move || {
        let result = work();
        let _ = sender.send(result);
    });
    match ended.recv_timeout(LIMIT) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("not within {LIMIT:?}: {what}"),
        // The work has panicked.
        Err(RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().expect_err("it has sent no result"))
        }
    }
}
