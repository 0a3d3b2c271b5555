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

    /// Sets the flag, as a signal does.
    #[cfg(test)]
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
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
const ENDING: Duration = Duration::from_secs(60);
/// Time that a server has until it listens.
const LISTENS: Duration = Duration::from_secs(60);
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
            let ended = self.child.try_wait()?.is_some();
            if ended {
                self.hear();
            }
            anyhow::ensure!(
                begin.elapsed() < LISTENS && !ended,
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

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::*;
    use crate::scratch::{HANG, Scratch, until};

    fn bash(script: &str) -> Process {
        let mut command = Command::new("bash");
        Process::start(command.args(["-c", script])).unwrap()
    }

    /// Reads all lines.
    fn lines(process: &Process) -> Vec<String> {
        let stop = Stop::default();
        let next = || process.line(&stop, Instant::now() + HANG).unwrap().map(|(_, line)| line);
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn output_comes_line_by_line_and_the_status_is_that_of_the_process() {
        let mut good = bash("echo first; echo aside >&2; printf last; exec >&-; exec 2>&-");
        assert_eq!(lines(&good), ["first", "last"]);
        good.finish().unwrap();
        assert_eq!(good.errors(), "aside\n");
        let mut bad = bash("echo part; echo 'no such disk' >&2; exit 3");
        assert_eq!(lines(&bad), ["part"]);
        let error = bad.finish().unwrap_err().to_string();
        assert_eq!(error, "bash: exit status: 3: no such disk");
        let killed = bash("kill -KILL $$").finish().unwrap_err().to_string();
        assert!(killed.contains("signal: 9"), "{killed}");
    }

    #[test]
    fn a_process_has_the_variables_of_its_command_and_no_input() {
        let mut command = Command::new("bash");
        command.args(["-c", "echo $COLOUR; read -r line || echo nothing"]).env("COLOUR", "blue");
        let process = Process::start(&command).unwrap();
        assert_eq!(lines(&process), ["blue", "nothing"]);
        let missing = Process::start(&Command::new("/nonexistent/program")).unwrap().finish();
        let error = missing.unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent/program: exit status: 127"), "{error}");
    }

    #[test]
    fn a_process_that_says_nothing_is_an_error_and_an_interruption_ends_the_wait() {
        let (process, stop) = (bash("echo why >&2; exec sleep 600"), Stop::default());
        until("it has spoken", || !process.errors().is_empty());
        let error = process.line(&stop, Instant::now()).unwrap_err().to_string();
        assert_eq!(error, "bash says nothing any more: why\n");
        stop.request();
        let end = process.line(&stop, Instant::now() + HANG).unwrap_err();
        assert!(end.is::<Interrupted>() && stop.is_requested());
    }

    #[test]
    fn the_end_of_a_process_is_that_of_its_group() {
        let exists = |pid: &str| Path::new("/proc").join(pid).exists();
        // Neither of them ends by SIGTERM alone: the shell ends, and the other one ignores it.
        let mut process =
            bash("(trap '' TERM; exec sleep 600) & echo $!; trap 'exit 0' TERM; wait");
        let stop = Stop::default();
        let (_, child) = process.line(&stop, Instant::now() + HANG).unwrap().unwrap();
        assert!(exists(&child));
        process.end().unwrap();
        assert!(!exists(&process.pid().to_string()));
        until("the child has ended", || !exists(&child));
        process.end().unwrap();
        // The drop ends a process, too.
        let process = bash("exec sleep 600");
        let pid = process.pid().to_string();
        drop(process);
        assert!(!exists(&pid));
    }

    #[test]
    fn a_socket_listens_after_listen_and_only_at_its_whole_path() {
        let scratch = Scratch::new();
        let socket = scratch.join("s");
        assert!(!listens(&socket).unwrap());
        // Between bind and listen, the file of the socket exists, and a connection is refused.
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let bound = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&bound, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        assert!(socket.exists() && !listens(&socket).unwrap());
        rustix::net::listen(&bound, 1).unwrap();
        assert!(listens(&socket).unwrap());
        assert!(!listens(Path::new("s")).unwrap() && !listens(&scratch.join("ss")).unwrap());
        let mut process = bash("exec sleep 600");
        process.until_it_listens(&socket, &Stop::default()).unwrap();
        // A process that ends does not listen.
        let mut gone = bash("echo 'address in use' >&2; exit 1");
        let never = scratch.join("never");
        let error = gone.until_it_listens(&never, &Stop::default()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the server does not listen on {}", never.display())));
        let stop = Stop::default();
        stop.request();
        assert!(process.until_it_listens(&never, &stop).unwrap_err().is::<Interrupted>());
    }

    #[test]
    fn a_filled_file_has_no_holes_and_the_same_bytes_each_time() {
        let (scratch, stop) = (Scratch::new(), Stop::default());
        let (a, b) = (scratch.join("a"), scratch.join("b"));
        fill(&a, (2 << 20) + 1000, &stop).unwrap();
        fill(&b, (2 << 20) + 1000, &stop).unwrap();
        let bytes = std::fs::read(&a).unwrap();
        assert_eq!(bytes.len(), (2 << 20) + 1000);
        assert!(bytes == std::fs::read(&b).unwrap(), "the contents differ");
        assert!(bytes.chunks(512).all(|sector| sector.iter().any(|byte| *byte != 0)));
        assert!(bytes[..1 << 20] != bytes[1 << 20..2 << 20], "each piece has other bytes");
        let error = format!("{:#}", fill(Path::new("/nonexistent/a"), 1, &stop).unwrap_err());
        assert!(error.starts_with("writing /nonexistent/a: "), "{error}");
        stop.request();
        assert!(fill(&a, 1 << 20, &stop).unwrap_err().is::<Interrupted>());
    }
}
