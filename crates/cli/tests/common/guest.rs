//! Runs a script in a virtual machine (see guests/README.md).

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{BLOCKYARD, Folder, SOON, TOOL, collect, end, guests, run, wait};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestKind {
    Uml,
    Qemu,
    Xen,
}

/// A running guest. Dropping it ends the guest.
pub struct Guest {
    runner: Child,
    lines: Receiver<String>,
    errors: Option<Receiver<String>>,
    seen: String,
    end: Instant,
    /// Folder with the script and with the folder of QEMU's runner. `None` for a guest that serves
    /// many tests.
    folder: Option<Folder>,
}

/// Smallest limit of a run. It only ends guests that hang: on a busy machine an emulated guest
/// takes several times its usual time.
const LEAST_LIMIT: Duration = Duration::from_secs(300);

impl Guest {
    /// Boots a guest with `options` for its runner, such as disks, and runs a script in it. A
    /// failed command ends the script (`set -e`). The run must take less than `limit`.
    #[track_caller]
    pub fn start<S: Into<OsString>>(
        kind: GuestKind,
        options: impl IntoIterator<Item = S>,
        script: &str,
        limit: Duration,
    ) -> Self {
        let folder = Folder::new();
        // QEMU's runner puts its folder into `folder`, where `job` finds it. UML's runner does not,
        // because UML would put its memory there.
        let temporary = (kind == GuestKind::Qemu).then(|| folder.to_path_buf());
        Self::start_in(kind, options, script, limit, folder, temporary)
    }

    /// Starts a QEMU guest that outlives this test, because later tests use it. It ends with this
    /// process, although no destructor runs then. It leaves no files. It has started when it prints
    /// a line that begins with `ready`.
    #[track_caller]
    pub fn start_to_stay<S: Into<OsString>>(
        options: impl IntoIterator<Item = S>,
        script: &str,
        limit: Duration,
        ready: &str,
    ) -> Self {
        let options =
            ["--lease".into()].into_iter().chain(options.into_iter().map(Into::<OsString>::into));
        let mut guest =
            Self::start_in(GuestKind::Qemu, options, script, limit, Folder::new(), None);
        // The runner boots it up to three times.
        guest.begin_part(3 * LEAST_LIMIT);
        guest.expect(ready);
        guest.folder = None;
        guest
    }

    fn start_in<S: Into<OsString>>(
        kind: GuestKind,
        options: impl IntoIterator<Item = S>,
        script: &str,
        limit: Duration,
        folder: Folder,
        temporary: Option<PathBuf>,
    ) -> Self {
        let limit = limit.max(LEAST_LIMIT);
        let runner = guests().join(match kind {
            GuestKind::Uml => "uml",
            GuestKind::Qemu => "qemu",
            GuestKind::Xen => "xen",
        });
        let file = folder.join("script");
        std::fs::write(&file, format!("set -euo pipefail\n{script}\n")).unwrap();
        let mut command = Command::new(runner);
        command.args(options.into_iter().map(Into::into));
        command.arg("--timeout").arg(limit.as_secs().to_string()).arg(file);
        // The input ends with this process (`--lease`).
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(temporary) = temporary {
            command.env("TMPDIR", temporary);
        }
        let mut runner = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
        let (send, lines) = channel();
        let out = BufReader::new(runner.stdout.take().unwrap());
        std::thread::spawn(move || {
            out.lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        let errors = Some(collect(runner.stderr.take().unwrap()));
        // The runner has the same limit, and prints details when it expires. This limit is longer,
        // for a runner that hangs.
        let end = Instant::now() + limit + SOON;
        Guest { runner, lines, errors, seen: String::new(), end, folder: Some(folder) }
    }

    /// Begins a new part of the run: clears the collected output, and gives the guest `limit` from
    /// now.
    pub fn begin_part(&mut self, limit: Duration) {
        self.seen.clear();
        self.end = Instant::now() + limit;
    }

    /// Returns a disk option for a vhost-user socket.
    pub fn vhost(socket: &Path, more: &str) -> [OsString; 2] {
        let mut disk = OsString::from("vhost=");
        disk.push(socket);
        disk.push(more);
        ["--disk".into(), disk]
    }

    /// Waits for an output line that begins with `prefix`. Returns the rest of the line.
    #[track_caller]
    pub fn expect(&mut self, prefix: &str) -> String {
        loop {
            match self.line() {
                Some(line) => {
                    if let Some(rest) = line.strip_prefix(prefix) {
                        return rest.to_string();
                    }
                }
                None => {
                    let failure = self.failure();
                    panic!("the guest ended before it said {prefix:?}: {failure}");
                }
            }
        }
    }

    /// Returns the file from which a QEMU guest reads its script at boot. Each boot consumes it, so
    /// it must be provided again before a reset.
    #[track_caller]
    pub fn job(&self) -> PathBuf {
        let folder = self.folder.as_ref().expect("the guest has a folder");
        let mut entries =
            std::fs::read_dir(&**folder).unwrap().map(|e| e.unwrap().path().join("job.tar"));
        entries.find(|job| job.exists()).expect("the runner's folder has a job.tar")
    }

    pub fn seen(&self) -> String {
        self.seen.clone()
    }
    /// Returns whether the guest runs. Does not wait.
    pub fn running(&mut self) -> bool {
        self.runner.try_wait().unwrap().is_none()
    }

    /// Waits until the guest ends successfully. Returns its whole output.
    #[track_caller]
    pub fn finish(mut self) -> String {
        while self.line().is_some() {}
        let status = wait(&mut self.runner, SOON).expect("the runner ends with its output");
        assert!(status.success(), "{status}: {}", self.failure());
        std::mem::take(&mut self.seen)
    }

    fn line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(self.end.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                self.seen += &line;
                self.seen.push('\n');
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("the guest's runner does not end:\n{}", self.seen)
            }
        }
    }

    /// Prints the output. For a QEMU guest with a folder, also prints the console and where the
    /// threads of the emulator wait. This tells a guest that hangs from a server that does not
    /// answer.
    fn show(&mut self) {
        self.seen.extend(self.lines.try_iter().flat_map(|line| [line, "\n".into()]));
        eprintln!("---- output of the guest ----\n{}", self.seen);
        let Some(folder) = self.folder.as_ref().map(|folder| folder.to_path_buf()) else { return };
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            if let Ok(console) = std::fs::read(entry.path().join("console")) {
                let console = String::from_utf8_lossy(&console);
                let from = console.lines().count().saturating_sub(40);
                let last: Vec<_> = console.lines().skip(from).collect();
                eprintln!("---- console of the guest ----\n{}", last.join("\n"));
            }
        }
        for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let is_ours = std::fs::read(process.path().join("cmdline")).is_ok_and(|command| {
                let command = String::from_utf8_lossy(&command);
                command.contains("qemu-system") && command.contains(&*folder.to_string_lossy())
            });
            let tasks = std::fs::read_dir(process.path().join("task"));
            for task in tasks.into_iter().flatten().flatten().filter(|_| is_ours) {
                let read = |name| std::fs::read_to_string(task.path().join(name));
                let [name, call, stat] =
                    ["comm", "syscall", "stat"].map(|name| read(name).unwrap_or_default());
                eprintln!("thread {}: call {}: {stat}", name.trim(), call.trim());
            }
        }
    }

    fn failure(&mut self) -> String {
        let errors = self.errors.take().and_then(|errors| errors.recv_timeout(SOON).ok());
        format!("\n---- output ----\n{}---- errors ----\n{}", self.seen, errors.unwrap_or_default())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.runner.try_wait().is_ok_and(|s| s.is_some()) {
            return;
        }
        if std::thread::panicking() {
            self.show();
        }
        // The runner ends the guest and removes its folder.
        let _ = kill_process(Pid::from_child(&self.runner), Signal::TERM);
        if wait(&mut self.runner, SOON).is_none() {
            end(&mut self.runner);
        }
    }
}

/// The shell function `nap SECONDS` for scripts of guests. It starts no program, because emulated
/// that takes 30 ms of a processor or more.
pub const NAP: &str = r#"
[[ -p /run/never ]] || mkfifo /run/never
exec {never}<>/run/never
nap() { read -rt "$1" -u $never || :; }
"#;

/// Boots a guest, runs a script, expects success, and returns the output.
#[track_caller]
pub fn run_guest<S: Into<OsString>>(
    kind: GuestKind,
    options: impl IntoIterator<Item = S>,
    script: &str,
) -> String {
    Guest::start(kind, options, script, Duration::from_secs(60)).finish()
}

/// Returns the path of a copy of the program without debug information, which makes it large. The
/// boot of a guest copies the program. A process strips it once, and keeps the result in a file
/// without a name, of which nothing is left when the process ends.
#[track_caller]
pub fn stripped_program(folder: &Folder) -> PathBuf {
    static STRIPPED: OnceLock<File> = OnceLock::new();
    let stripped = STRIPPED.get_or_init(|| {
        let path = folder.join("stripped");
        run(Command::new("strip").arg("-o").arg(&path).arg(BLOCKYARD), TOOL).good();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    });
    let program = folder.join("blockyard");
    std::fs::copy(format!("/proc/self/fd/{}", stripped.as_raw_fd()), &program).unwrap();
    program
}
