//! A panic in a server ends the process.
//!
//! If only the thread ended, the process would look alive while nothing serves its disks. What must
//! hold: the process prints one line with the thread and the reason, and ends by a signal, so that
//! its supervisor restarts it. Printing waits at most 100 ms for the reader of standard error.

use std::io;
use std::panic::PanicHookInfo;

use rustix::event::{PollFd, PollFlags, Timespec};

/// Installs a panic hook that ends the process, for all threads.
pub fn end_the_process() {
    std::panic::set_hook(Box::new(|panic| {
        crate::process::log::flush_in_panic();
        write_to_stderr(&line(panic));
        std::process::abort();
    }));
}

fn line(panic: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("without a name");
    let why = panic.payload_as_str().unwrap_or("a panic without a message").replace('\n', " ");
    let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
    format!(
        "blockyard: thread {thread} panicked{place}: {why}; the server aborts, so that its \
         supervisor restarts it\n"
    )
}

/// Writes to standard error if it becomes writable within 100 ms. Does not use the log, because the
/// panic may come from there.
fn write_to_stderr(line: &str) {
    let stderr = io::stderr();
    let soon = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    if rustix::event::poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&soon))
        .is_ok_and(|ready| ready > 0)
    {
        let _ = rustix::io::write(&stderr, line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use rustix::fs::{MemfdFlags, memfd_create};

    use crate::process::awaited::end_of;

    const CHILD: &str = "BLOCKYARD_TEST_PANICS";

    /// Runs this test again in a child process, and panics on a thread there.
    #[test]
    fn a_thread_that_panics_ends_the_process_with_one_line() {
        if std::env::var_os(CHILD).is_some() {
            super::end_the_process();
            let thread = std::thread::Builder::new().name("reactor-7".into());
            let _ = thread.spawn(|| panic!("on\npurpose")).unwrap().join();
            return;
        }
        let name = "process::panics::tests::a_thread_that_panics_ends_the_process_with_one_line";
        let program = std::env::current_exe().unwrap();
        // A file takes all of the output, however much it is.
        let mut output = File::from(memfd_create("stderr", MemfdFlags::CLOEXEC).unwrap());
        let mut child = Command::new(program)
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .stdout(Stdio::null())
            .stderr(output.try_clone().unwrap())
            .spawn()
            .unwrap();
        let status = end_of(&mut child);
        let mut stderr = Vec::new();
        output.rewind().unwrap();
        output.read_to_end(&mut stderr).unwrap();
        let stderr = String::from_utf8_lossy(&stderr);
        let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("blockyard: ")).collect();
        assert_eq!(lines.len(), 1, "{stderr}");
        assert!(lines[0].starts_with("blockyard: thread reactor-7 panicked at "), "{stderr}");
        assert!(lines[0].contains(": on purpose; the server aborts"), "{stderr}");
        let abort = rustix::process::Signal::ABORT.as_raw();
        assert_eq!(status.signal(), Some(abort), "{status:?}");
    }
}
