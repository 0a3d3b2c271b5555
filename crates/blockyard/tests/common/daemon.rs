//! `blockyard serve` as a process.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{BLOCKYARD, SOON, TOOL, until, wait};

/// A running daemon; dropped, it is killed.
pub struct Daemon {
    child: Child,
    out: Gathered,
    log: Gathered,
}

/// How long the last words of one that has ended are waited for, when who is left behind by it
/// keeps its output open.
const WORDS: Duration = Duration::from_secs(2);

impl Daemon {
    /// `blockyard serve IMAGE --vhost-user SOCKET OPTIONS...`, ready.
    #[track_caller]
    pub fn serve(image: impl AsRef<OsStr>, socket: &Path, options: &[&str]) -> Self {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg(image).arg("--vhost-user").arg(socket).args(options);
        let mut daemon = Self::start(&mut command);
        daemon.wait_ready();
        daemon
    }

    /// The same right after another daemon of the same image was killed: the kernel may still be
    /// taking that one's requests apart, and then its lock lingers.
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

    /// Any command that starts a daemon; not waited for.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::start_with(command)
    }

    /// The same, with what `command` has for standard input, output and error.
    #[track_caller]
    pub fn start_with(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
        let out = child.stdout.take().map(Gathered::from).unwrap_or_default();
        let log = child.stderr.take().map(Gathered::from).unwrap_or_default();
        Daemon { child, out, log }
    }

    /// Waits for the line `ready`; panics with the log when the daemon ends instead.
    #[track_caller]
    pub fn wait_ready(&mut self) {
        assert!(self.became_ready(), "the daemon ended before it was ready: {}", self.log());
    }

    /// True when it is ready, false when it has ended.
    #[track_caller]
    pub fn became_ready(&mut self) -> bool {
        let mut ended = false;
        until("the daemon is ready", SOON, || {
            ended = self.child.try_wait().unwrap().is_some();
            ended || self.ready()
        });
        if ended {
            self.hear();
        }
        self.ready()
    }

    fn ready(&self) -> bool {
        self.out.text().lines().any(|line| line == "ready")
    }

    /// The last words of one that has ended may still be on their way.
    fn hear(&self) {
        let start = Instant::now();
        while !(self.out.is_whole() && self.log.is_whole()) && start.elapsed() < WORDS {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to standard error so far.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// What it has written to standard output so far.
    pub fn out(&self) -> String {
        self.out.text()
    }

    /// Waits until the log holds `text`.
    #[track_caller]
    pub fn wait_log(&self, text: &str) {
        until(&format!("the log says {text:?}"), SOON, || self.log.text().contains(text));
    }

    /// Waits until the log holds `text` past its first `from` bytes (a `log().len()` of before);
    /// returns what is there.
    #[track_caller]
    pub fn wait_log_after(&self, from: usize, text: &str) -> String {
        until(&format!("the log says {text:?}"), SOON, || self.log.text()[from..].contains(text));
        self.log()[from..].to_string()
    }

    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        kill_process(pid, signal).unwrap_or_else(|e| panic!("signalling the daemon: {e}"));
    }

    pub fn running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// kill -9.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM; the status it ends with.
    #[track_caller]
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended(SOON)
    }

    /// SIGTERM, which must end it with status 0; its whole log.
    #[track_caller]
    pub fn stop(mut self) -> String {
        let status = self.terminate();
        assert!(status.success(), "{status}: {}", self.log());
        self.log()
    }

    /// The status it ends with by itself, within `limit`; then all that it has said is known.
    #[track_caller]
    pub fn ended(&mut self, limit: Duration) -> ExitStatus {
        let status = wait(&mut self.child, limit);
        let status =
            status.unwrap_or_else(|| panic!("still there after {limit:?}: {}", self.log()));
        self.hear();
        status
    }

    /// Waits until it has answered a request of this kind (`read`, `write`, `flush`, ...), of a
    /// disk by its name if there are many.
    #[track_caller]
    pub fn until_served(&self, kind: &str, disk: &str) {
        let (kind, disk) = (format!(" {kind}: queue time"), format!("disk=\"{disk}"));
        until(&format!("{kind} {disk}"), TOOL, || {
            self.signal(Signal::USR1);
            std::thread::sleep(Duration::from_millis(20));
            self.log.text().lines().any(|line| line.contains(&kind) && line.contains(&disk))
        });
    }

    /// Descriptors it has open, as their links in /proc say, sorted.
    pub fn descriptors(&self) -> Vec<String> {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        // One may go while we look.
        let link = |e: std::io::Result<std::fs::DirEntry>| std::fs::read_link(e.ok()?.path()).ok();
        let mut links: Vec<_> =
            entries.filter_map(link).map(|l| l.to_string_lossy().into_owned()).collect();
        links.sort();
        links
    }

    /// How often each thread has been switched away from, of its own will and not, by number and
    /// name.
    #[track_caller]
    pub fn switches(&self) -> BTreeMap<String, (u64, u64)> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let count = |task: std::io::Result<std::fs::DirEntry>| {
            let path = task.unwrap().path();
            let status = std::fs::read_to_string(path.join("status")).unwrap();
            let field = |name: &str| {
                status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_string()
            };
            let count = |name: &str| field(name).parse().unwrap();
            let thread =
                format!("{} {}", path.file_name().unwrap().to_string_lossy(), field("Name:"));
            (thread, (count("voluntary_ctxt_switches:"), count("nonvoluntary_ctxt_switches:")))
        };
        tasks.map(count).collect()
    }

    /// Waits until none of its threads is awake now and then any more; how often each has been.
    /// What cannot be done without waiting the kernel gives to threads of its own, and the last of
    /// those waits for 5 s for more.
    #[track_caller]
    pub fn quiet(&self) -> BTreeMap<String, (u64, u64)> {
        std::thread::sleep(Duration::from_secs(6));
        let mut before = self.switches();
        until("its threads have come to rest", TOOL, || {
            std::thread::sleep(Duration::from_secs(1));
            let now = self.switches();
            std::mem::replace(&mut before, now.clone()) == now
        });
        before
    }

    /// A field of /proc/PID/status that counts kilobytes, for one VmRSS, in kilobytes.
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
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("---- log of the daemon ----\n{}", self.log());
        }
    }
}

/// Text that is gathered line by line, until its end.
#[derive(Default)]
struct Gathered {
    text: Arc<Mutex<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Gathered {
    fn from(from: impl Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let into = text.clone();
        let thread = std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            while from.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                into.lock().unwrap().push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
        });
        Gathered { text, thread: Some(thread) }
    }

    fn text(&self) -> String {
        self.text.lock().unwrap().clone()
    }

    fn is_whole(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}
