//! Processes that end with their owner, also when the user interrupts the run; and files of random
//! bytes.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_program::signals::not_ignored;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// A flag that is set when the user interrupts the run.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

/// The error of an interrupted run.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

impl Stop {
    /// Installs handlers for SIGINT, SIGTERM and SIGHUP, which set the flag. Signals that the
    /// caller ignores stay ignored.
    pub fn on_signals() -> Result<Self> {
        let stop = Stop::default();
        for signal in not_ignored([SIGINT, SIGTERM, SIGHUP]) {
            signal_hook::flag::register(signal, stop.0.clone()).context("watching for signals")?;
        }
        Ok(stop)
    }

    #[inline]
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn check(&self) -> Result<()> {
        if self.is_requested() { Err(Interrupted.into()) } else { Ok(()) }
    }
}

/// A process. The drop sends SIGTERM, and SIGKILL if the process does not end.
pub struct Process {
    child: Child,
    name: String,
    lines: Receiver<(Instant, String)>,
    errors: Arc<Mutex<String>>,
    /// Thread that reads standard error until all writers have closed it.
    listener: JoinHandle<()>,
}

/// Time a process has to end. It removes its files, and its disk may be slow.
const ENDING: Duration = Duration::from_secs(30);
/// Time that a server has until it listens.
const LISTENS: Duration = Duration::from_secs(20);
/// Longest wait for the rest of an ended process: its last output, and the killed processes of its
/// group.
const REST: Duration = Duration::from_secs(2);

impl Process {
    /// Starts a process, whose output comes line by line. It ends also if this process is killed.
    pub fn start(command: &Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let mut under = Command::new("setpriv");
        under
            .args(["--pdeathsig", "TERM", "--"])
            .arg(command.get_program())
            .args(command.get_args());
        for (key, value) in command.get_envs() {
            if let Some(value) = value {
                under.env(key, value);
            }
        }
        // A process group of its own, so that a script's commands end with it.
        under.process_group(0);
        under.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = under
            .spawn()
            .with_context(|| format!("starting {name} (by setpriv, of util-linux)"))?;
        let (send, lines) = channel();
        let out = BufReader::new(child.stdout.take().context("no standard output")?);
        std::thread::spawn(move || {
            out.lines().map_while(Result::ok).try_for_each(|line| send.send((Instant::now(), line)))
        });
        let errors = Arc::new(Mutex::new(String::new()));
        let mut from = child.stderr.take().context("no standard error")?;
        let to = errors.clone();
        let listener = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                let mut text = to.lock().unwrap_or_else(|e| e.into_inner());
                // Keeps the first MiB only. The rest is read so that the process does not block.
                if text.len() < 1 << 20 {
                    text.push_str(&String::from_utf8_lossy(&bytes[..n]));
                }
            }
        });
        Ok(Process { child, name, lines, errors, listener })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns what the process has written to standard error so far.
    pub fn errors(&self) -> String {
        self.errors.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Waits until a process listens on a Unix socket. The file of the socket exists before that:
    /// between bind and listen a connection is refused.
    pub fn until_it_listens(&mut self, socket: &Path, stop: &Stop) -> Result<()> {
        let begin = Instant::now();
        while !listens(socket)? {
            stop.check()?;
            anyhow::ensure!(
                begin.elapsed() < LISTENS && self.child.try_wait()?.is_none(),
                "the server does not listen on {}: {}",
                socket.display(),
                self.errors().trim()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns the next line of output and its time. None: the process has closed its output.
    pub fn line(&self, stop: &Stop, limit: Instant) -> Result<Option<(Instant, String)>> {
        loop {
            stop.check()?;
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            anyhow::ensure!(
                Instant::now() < limit,
                "{} says nothing any more: {}",
                self.name,
                self.errors()
            );
        }
    }

    /// Waits for the end of the process. A status other than 0 is an error.
    pub fn finish(&mut self) -> Result<()> {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait()? {
                Some(status) => break status,
                None => {
                    anyhow::ensure!(
                        begin.elapsed() < ENDING,
                        "{} does not end: {}",
                        self.name,
                        self.errors().trim()
                    )
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        self.hear();
        anyhow::ensure!(status.success(), "{}: {status}: {}", self.name, self.errors().trim());
        Ok(())
    }

    /// Waits a limited time for the last output. A process that the ended process left behind may
    /// keep standard error open.
    fn hear(&self) {
        let begin = Instant::now();
        while !self.listener.is_finished() && begin.elapsed() < REST {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends SIGTERM, and waits for the end.
    pub fn end(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        let group = Pid::from_raw(self.child.id() as i32);
        if let Some(group) = group {
            kill_process_group(group, Signal::TERM)?;
        }
        let begin = Instant::now();
        while self.child.try_wait()?.is_none() {
            if begin.elapsed() > ENDING {
                group.map(|group| kill_process_group(group, Signal::KILL));
                self.child.kill()?;
                self.child.wait()?;
                anyhow::bail!("{} did not end, and was killed", self.name);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // The killed processes of the group need a moment to end. Until then they may create files.
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
            let begin = Instant::now();
            while test_kill_process_group(group).is_ok() && begin.elapsed() < REST {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.hear();
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Returns whether a process listens on a Unix socket that was bound by this path.
fn listens(socket: &Path) -> Result<bool> {
    const TABLE: &str = "/proc/net/unix";
    let table = std::fs::read(TABLE).with_context(|| format!("reading {TABLE}"))?;
    // Columns: address, references, protocol, flags, type, state, inode, path. Only listening
    // sockets have this flag (__SO_ACCEPTCON).
    let (flag, path) = (b" 00010000 ", socket.as_os_str().as_bytes());
    Ok(table.split(|byte| *byte == b'\n').any(|line| {
        line.windows(flag.len()).any(|part| part == flag)
            && line.strip_suffix(path).is_some_and(|rest| rest.ends_with(b" "))
    }))
}

/// Creates a durable file of random bytes without holes.
pub fn fill(path: &Path, size: u64, stop: &Stop) -> Result<()> {
    const PIECE: usize = 1 << 20;
    let write = || {
        let file = std::fs::File::create(path)?;
        let mut random = crate::client::workload::Random::new(1, 0);
        let mut words = vec![[0; 8]; PIECE / 8];
        let mut done = 0;
        while done < size {
            stop.check()?;
            for word in &mut words {
                *word = random.word().to_ne_bytes();
            }
            let len = (size - done).min(PIECE as u64);
            file.write_all_at(&words.as_flattened()[..len as usize], done)?;
            done += len;
        }
        anyhow::Ok(file.sync_all()?)
    };
    match write() {
        Err(e) if e.is::<Interrupted>() => Err(e),
        other => other.with_context(|| format!("writing {}", path.display())),
    }
}
