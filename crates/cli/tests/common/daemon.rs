//! `blockyard serve` as a process.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use super::{BLOCKYARD, SOON, TOOL, end, pause, until, wait};

/// A running daemon. Dropping it kills the process.
pub struct Daemon {
    child: Child,
    out: Gathered,
    log: Gathered,
}

impl Daemon {
    /// Starts `blockyard serve IMAGE --vhost-user SOCKET OPTIONS...` and waits until it is ready.
    #[track_caller]
    pub fn serve(image: impl AsRef<OsStr>, socket: &Path, options: &[&str]) -> Self {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg(image).arg("--vhost-user").arg(socket).args(options);
        let mut daemon = Self::start(&mut command);
        daemon.wait_ready();
        daemon
    }

    /// Like `serve`, directly after another daemon of the same image was killed. Retries, because
    /// the kernel may still cancel the killed daemon's requests and hold its lock.
    #[track_caller]
    pub fn serve_again(image: &Path, socket: &Path, options: &[&str]) -> Self {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg(image).arg("--vhost-user").arg(socket).args(options);
        let start = Instant::now();
        loop {
            let mut daemon = Self::start(&mut command);
            if daemon.became_ready() {
                return daemon;
            }
            let log = daemon.log();
            assert!(log.contains("is in use by"), "not about a lock: {log}");
            assert!(start.elapsed() < SOON, "the lock is still there after {SOON:?}: {log}");
        }
    }

    /// Starts a command that is a daemon. Does not wait.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::start_with(command)
    }

    /// Like `start`, with the standard input, output and error of `command`.
    #[track_caller]
    pub fn start_with(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
        let out = child.stdout.take().map(Gathered::from).unwrap_or_default();
        let log = child.stderr.take().map(Gathered::from).unwrap_or_default();
        Daemon { child, out, log }
    }

    /// Waits for the line `ready`. Panics with the log if the daemon ends instead.
    #[track_caller]
    pub fn wait_ready(&mut self) {
        assert!(self.became_ready(), "the daemon ended before it was ready: {}", self.log());
    }

    /// Waits until the daemon is ready or has ended. Returns whether it is ready.
    #[track_caller]
    pub fn became_ready(&mut self) -> bool {
        let mut ended = false;
        until("the daemon is ready", SOON, || {
            ended = self.child.try_wait().unwrap().is_some();
            ended || self.ready()
        });
        if ended {
            self.collect_output();
        }
        self.ready()
    }

    fn ready(&self) -> bool {
        self.out.with(|out| out.lines().any(|line| line == "ready"))
    }

    /// Waits until all output of a daemon that ended is collected.
    #[track_caller]
    fn collect_output(&self) {
        until("the output of the ended daemon is read", SOON, || {
            self.out.has_all_so_far() && self.log.has_all_so_far()
        });
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the daemon's standard error so far.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Returns the daemon's standard output so far.
    pub fn out(&self) -> String {
        self.out.text()
    }

    /// Waits until the log has `text`.
    #[track_caller]
    pub fn wait_log(&self, text: &str) {
        until(&format!("the log says {text:?}"), SOON, || self.log.with(|log| log.contains(text)));
    }

    /// Waits until the log has `text` after its first `from` bytes. Returns the log from there.
    #[track_caller]
    pub fn wait_log_after(&self, from: usize, text: &str) -> String {
        let says = || self.log.with(|log| log[from..].contains(text));
        until(&format!("the log says {text:?}"), SOON, says);
        self.log()[from..].to_string()
    }

    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        kill_process(pid, signal).unwrap_or_else(|e| panic!("signalling the daemon: {e}"));
    }

    /// Waits until the daemon has taken the signals that were sent to it, or has ended.
    #[track_caller]
    pub fn until_signals_are_taken(&self) {
        let is_taken = |status: String| {
            let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
            pending.is_none_or(|mask| mask.trim().bytes().all(|digit| digit == b'0'))
        };
        let status = || std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        until("the signals are taken", SOON, || status().map_or(true, is_taken));
    }

    pub fn running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Kills the daemon with SIGKILL.
    pub fn kill(mut self) {
        end(&mut self.child);
    }

    /// Sends SIGTERM to the daemon. Returns its exit status.
    #[track_caller]
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended(SOON)
    }

    /// Sends SIGTERM to the daemon, expects status 0, and returns the whole log.
    #[track_caller]
    pub fn stop(mut self) -> String {
        let status = self.terminate();
        assert!(status.success(), "{status}: {}", self.log());
        self.log()
    }

    /// Waits at most `limit` until the daemon ends by itself. Returns the status. The log is
    /// complete then.
    #[track_caller]
    pub fn ended(&mut self, limit: Duration) -> ExitStatus {
        let status = wait(&mut self.child, limit);
        let status =
            status.unwrap_or_else(|| panic!("still there after {limit:?}: {}", self.log()));
        self.collect_output();
        status
    }

    /// Waits until the daemon has completed a request of this kind (`read`, `write`, `flush`, ...)
    /// on this disk.
    #[track_caller]
    pub fn until_served(&self, kind: &str, disk: &str) {
        self.until_served_more_than(0, kind, disk);
    }

    /// Waits until the daemon serves a front end that has connected again after a kill. The first
    /// writes may be those that were in flight, which the daemon repeats while the front end still
    /// connects. `more`: this number must be larger than that of the requests in flight.
    #[track_caller]
    pub fn until_goes_on(&self, more: u64) {
        self.until_served_more_than(more, "write", "");
    }

    /// Waits until the daemon has completed more than `count` requests of this kind on this disk. A
    /// daemon that holds sessions passes the question on to its current server.
    #[track_caller]
    pub fn until_served_more_than(&self, count: u64, kind: &str, disk: &str) {
        self.first_served(kind, disk, |served| served > count);
    }

    /// Returns how many requests of this kind the daemon has completed on this disk: at least one,
    /// for which it waits.
    #[track_caller]
    pub fn served(&self, kind: &str, disk: &str) -> u64 {
        self.first_served(kind, disk, |_| true)
    }

    /// Returns the first number of completed requests that is wanted. Asks again if the daemon has
    /// not answered, or with another number.
    #[track_caller]
    fn first_served(&self, kind: &str, disk: &str, is_wanted: impl Fn(u64) -> bool) -> u64 {
        let (kind, disk) = (format!(" {kind}: queue time"), format!("disk=\"{disk}"));
        let served = |line: &str| {
            let (_, rest) = line.split_once("requests=")?;
            let served = rest.split(' ').next()?.parse::<u64>().ok()?;
            (line.contains(&kind) && line.contains(&disk) && is_wanted(served)).then_some(served)
        };
        let (from, start) = (self.log.with(str::len), Instant::now());
        loop {
            let waited = start.elapsed();
            assert!(waited < TOOL, "not within {TOOL:?}: enough of{kind} {disk}");
            self.signal(Signal::USR1);
            let (asked, patience) = (Instant::now(), 4 * pause(waited));
            while asked.elapsed() < patience {
                std::thread::sleep(pause(asked.elapsed()));
                let found = self.log.with(|log| log[from..].lines().find_map(served));
                if let Some(found) = found {
                    return found;
                }
            }
        }
    }

    /// Returns the log line about the share of a disk that has had requests. "": of any disk.
    #[track_caller]
    pub fn share(&self, disk: &str) -> String {
        let from = self.log.with(str::len);
        self.signal(Signal::USR1);
        let of_disk = if disk.is_empty() { String::new() } else { format!("disk=\"{disk}\"") };
        let is_it = |line: &&str| line.contains("share: ") && line.contains(&of_disk);
        let mut line = None;
        until("the log has a line about the share", SOON, || {
            line = self.log.with(|log| log[from..].lines().find(is_it).map(String::from));
            line.is_some()
        });
        line.unwrap()
    }

    /// Waits until at least this many requests of a disk wait for its limits or its device.
    #[track_caller]
    pub fn until_waiting(&self, disk: &str, requests: u64) {
        until("requests wait for their share", SOON, || {
            let line = self.share(disk);
            let waiting =
                line.split("; ").find_map(|part| part.split_once(" wait")?.0.parse::<u64>().ok());
            waiting.is_some_and(|waiting| waiting >= requests)
        });
    }

    /// Waits until the daemon has handled what a front end of this process, which is still
    /// connected, has sent so far. Each reactor answers before the daemon logs the statistics. It
    /// answers twice, because the first answer may come before events that were there earlier.
    #[track_caller]
    pub fn has_handled_all(&self, disk: &str) {
        let clients = format!("clients: pid {} disk=\"{disk}", std::process::id());
        for _ in 0..2 {
            let from = self.log.with(str::len);
            self.signal(Signal::USR1);
            self.wait_log_after(from, &clients);
        }
    }

    /// Returns the targets of the daemon's open descriptors in /proc, sorted.
    pub fn descriptors(&self) -> Vec<String> {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        // A descriptor may be closed during the listing.
        let link = |e: std::io::Result<std::fs::DirEntry>| std::fs::read_link(e.ok()?.path()).ok();
        let mut links: Vec<_> =
            entries.filter_map(link).map(|l| l.to_string_lossy().into_owned()).collect();
        links.sort();
        links
    }

    /// Returns the process number of the server that this holder keeps the sessions of. Processes
    /// that helped a dead server are children of the holder, too, and processes that close sockets.
    /// The list of children can lack one while others end (proc(5)).
    pub fn kept(&self) -> Option<i32> {
        let pid = self.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        let is_server = |child: &&str| {
            let read = |file| std::fs::read(format!("/proc/{child}/{file}")).unwrap_or_default();
            let line = read("cmdline");
            line.split(|byte| *byte == 0).nth(1) == Some(b"serve") && read("comm") != b"closer\n"
        };
        children.split_whitespace().rfind(is_server)?.parse().ok()
    }

    /// Returns how many servers of this holder have been ready.
    fn starts(&self) -> usize {
        self.out().lines().filter(|line| *line == "ready").count()
    }

    /// Kills the server of this holder with SIGKILL. Waits until the next one is ready.
    #[track_caller]
    pub fn kill_kept(&self) {
        let (before, mut old) = (self.starts(), None);
        until("the holder has a server", TOOL, || {
            old = self.kept();
            old.is_some()
        });
        kill_process(Pid::from_raw(old.unwrap()).unwrap(), Signal::KILL).unwrap();
        until("the next server is ready", TOOL, || self.starts() > before);
        assert_ne!(self.kept(), old);
    }

    /// Replaces the server of this holder by `ctl upgrade`, which returns its answer as JSON. Waits
    /// until the new server is the holder's child and ready: the answer may come before.
    #[track_caller]
    pub fn upgrade_kept(&self, upgrade: impl FnOnce() -> String) {
        let before = self.starts();
        let answer: serde_json::Value = serde_json::from_str(&upgrade()).unwrap();
        let new = answer["pid"].as_i64().map(|pid| pid as i32);
        until("the new server is the holder's child", TOOL, || self.kept() == new);
        until("the new server is ready", TOOL, || self.starts() > before);
    }

    /// Returns the numbers of voluntary and involuntary context switches of each thread.
    #[track_caller]
    pub fn switches(&self) -> BTreeMap<String, (u64, u64)> {
        switches(self.pid())
    }

    /// Waits until each thread of the daemon sleeps, and none has a time at which it wakes: only an
    /// event from outside can wake them. Returns the names of the threads. Not of the kernel's
    /// io_uring workers, which the kernel wakes every 5 s.
    #[track_caller]
    pub fn falls_asleep(&self) -> Vec<String> {
        let counts = || {
            let mut counts = self.switches();
            counts.retain(|name, _| !name.contains(" iou-wrk-"));
            counts
        };
        let start = Instant::now();
        let names = loop {
            let before = counts();
            let call = |name: &String| {
                let thread = name.split(' ').next().unwrap();
                let call = format!("/proc/{0}/task/{thread}/syscall", self.pid());
                std::fs::read_to_string(call).unwrap_or_default()
            };
            let calls: BTreeMap<_, _> =
                before.keys().map(|name| (name.clone(), call(name))).collect();
            // With the same counts, no thread has been awake since the first count.
            let is_same = before == counts();
            if is_same && calls.values().all(|call| sleeps_without_limit(call)) {
                break calls.into_keys().collect();
            }
            assert!(start.elapsed() < TOOL, "still awake after {TOOL:?}: {calls:#?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        let timers = self.descriptors().iter().any(|file| file.contains("timerfd"));
        assert!(!timers, "{:?}", self.descriptors());
        names
    }

    /// Returns a field of /proc/PID/status in kilobytes, such as VmRSS.
    #[track_caller]
    pub fn kilobytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
        line.and_then(|l| l.split_whitespace().next()?.parse().ok())
            .unwrap_or_else(|| panic!("no {field}: {status}"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        end(&mut self.child);
        if std::thread::panicking() {
            eprintln!("---- log of the daemon ----\n{}", self.log());
        }
    }
}

/// Returns whether the watchdog has written a line. A slow machine causes such lines.
pub fn is_of_watchdog(line: &str) -> bool {
    line.contains(" stalls: one task ") || line.contains(" goes on after about ")
}

/// Returns the lines of a log that report errors or warnings. Not those of the watchdog, because a
/// host that stops all processes for a second causes them.
pub fn complaints(log: &str) -> Vec<String> {
    let complains = |line: &&str| !line.contains(" INFO ") && !is_of_watchdog(line);
    log.lines().filter(complains).map(String::from).collect()
}

/// Output of a process, collected line by line until its end.
#[derive(Default)]
struct Gathered {
    text: Arc<Mutex<Text>>,
    /// `None`: the output is not collected.
    pipe: Option<Arc<OwnedFd>>,
}

#[derive(Default)]
struct Text {
    lines: String,
    /// The begin of a line.
    rest: Vec<u8>,
}

impl Gathered {
    fn from(pipe: impl Into<OwnedFd>) -> Self {
        let (text, pipe) = (Arc::<Mutex<Text>>::default(), Arc::new(pipe.into()));
        let gathered = Gathered { text: text.clone(), pipe: Some(pipe.clone()) };
        std::thread::spawn(move || while gather(&pipe, &text) {});
        gathered
    }

    fn text(&self) -> String {
        self.with(str::to_string)
    }

    /// Calls `look` with the whole lines so far.
    fn with<T>(&self, look: impl FnOnce(&str) -> T) -> T {
        look(&self.text.lock().unwrap().lines)
    }

    /// Returns whether the text has all that was written until now. Another process may keep the
    /// pipe open after the end of the first one, such as the next server. So this does not wait
    /// for the end of the pipe.
    fn has_all_so_far(&self) -> bool {
        let Some(pipe) = &self.pipe else { return true };
        let mut text = self.text.lock().unwrap();
        let has_all = rustix::io::ioctl_fionread(pipe).unwrap() == 0;
        if has_all {
            text.end_line();
        }
        has_all
    }
}

impl Text {
    /// Adds bytes. Only whole lines are visible.
    fn add(&mut self, bytes: &[u8]) {
        self.rest.extend(bytes);
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.lines += &String::from_utf8_lossy(&self.rest[..end]);
        self.rest.drain(..end);
    }

    fn end_line(&mut self) {
        self.lines += &String::from_utf8_lossy(&std::mem::take(&mut self.rest));
    }
}

/// Waits for output and adds it to the text. Returns false at the end of the pipe. What is no
/// longer in the pipe is in the text, for a thread that has the lock.
fn gather(pipe: &OwnedFd, text: &Mutex<Text>) -> bool {
    let polled = rustix::event::poll(&mut [PollFd::new(pipe, PollFlags::IN)], None);
    if polled == Err(Errno::INTR) {
        return true;
    }
    let (mut text, mut bytes) = (text.lock().unwrap(), [0; 4096]);
    match rustix::io::read(pipe, &mut bytes) {
        Ok(n) if n > 0 => text.add(&bytes[..n]),
        Err(Errno::INTR) => {}
        _ => {
            text.end_line();
            return false;
        }
    }
    true
}

/// Returns the numbers of voluntary and involuntary context switches of each thread of a process.
#[track_caller]
fn switches(process: u32) -> BTreeMap<String, (u64, u64)> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let count = |task: std::io::Result<std::fs::DirEntry>| {
        let path = task.unwrap().path();
        // The thread may have ended.
        let status = std::fs::read_to_string(path.join("status")).ok()?;
        let field = |name: &str| {
            status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_string()
        };
        let count = |name: &str| field(name).parse().unwrap();
        let thread = format!("{} {}", path.file_name().unwrap().to_string_lossy(), field("Name:"));
        Some((thread, (count("voluntary_ctxt_switches:"), count("nonvoluntary_ctxt_switches:"))))
    };
    tasks.filter_map(count).collect()
}

/// Returns whether a thread waits in a system call that only an event ends. `call` is its
/// /proc/PID/task/TID/syscall: the number of the call and its arguments, or `running`.
fn sleeps_without_limit(call: &str) -> bool {
    let parse = |word: &str| match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    let Ok(words) = call.split_whitespace().take(7).map(parse).collect::<Result<Vec<_>, _>>()
    else {
        return false;
    };
    /// IORING_ENTER_EXT_ARG and IORING_ENTER_EXT_ARG_REG: the call has a time limit.
    const LIMITED: u64 = 1 << 3 | 1 << 6;
    match words[0] as i64 {
        libc::SYS_io_uring_enter => words[4] & LIMITED == 0,
        libc::SYS_futex | libc::SYS_epoll_pwait2 => words[4] == 0,
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => words[4] as i32 == -1,
        libc::SYS_poll => words[3] as i32 == -1,
        libc::SYS_ppoll => words[3] == 0,
        libc::SYS_read | libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_accept4 => true,
        // Another call is not known to sleep.
        _ => false,
    }
}
