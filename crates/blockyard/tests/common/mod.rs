//! What the tests have in common: files, and a guest without a virtual machine.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

/// A folder that is removed at the end.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("blockyard-own-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.path(name).to_str().unwrap().into()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes a program of a shell script. Returns its image name. Another process writes the file: a
/// process that a second thread starts in the meantime would inherit a descriptor of this one, and
/// the kernel starts no program that is open for writing.
pub fn script(scratch: &Scratch, name: &str, text: &str) -> String {
    let path = scratch.path(name);
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(&path).stdin(Stdio::piped());
    let mut install = install.spawn().expect("install starts");
    install.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(wait(&mut install).success(), "writing {}", path.display());
    format!("exec:{}", path.display())
}

/// Waits for the end of a process. Kills a process that does not end in time.
#[track_caller]
pub fn wait(process: &mut Child) -> ExitStatus {
    let end = rustix::process::pidfd_open(Pid::from_child(process), PidfdFlags::empty()).unwrap();
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(&end, PollFlags::IN)];
    let ended = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&limit))).unwrap();
    if ended == 0 {
        let _ = process.kill();
    }
    let status = process.wait().unwrap();
    assert!(ended > 0, "a process has not ended within {LIMIT:?}");
    status
}

/// Runs a command to its end. Kills a command that does not end in time.
#[track_caller]
pub fn output(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (process, (sender, ended)) = (Pid::from_child(&child), channel());
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(COMMAND_LIMIT) else {
        let _ = rustix::process::kill_process(process, Signal::KILL);
        panic!("{command:?} has not ended within {COMMAND_LIMIT:?}");
    };
    output.unwrap()
}

/// Returns the lines of a pipe, as they arrive.
pub fn lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        // Reads to the end, so that the writer is never blocked.
        BufReader::new(pipe).lines().map_while(Result::ok).for_each(|line| {
            let _ = sender.send(line);
        });
    });
    lines
}

/// Waits for a line for which `is_wanted` returns true. None: the pipe has ended.
#[track_caller]
pub fn find_line(lines: &Receiver<String>, is_wanted: impl Fn(&str) -> bool) -> Option<String> {
    use std::sync::mpsc::RecvTimeoutError;
    loop {
        match lines.recv_timeout(LIMIT) {
            Ok(line) if is_wanted(&line) => return Some(line),
            Ok(_) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => panic!("no line within {LIMIT:?}"),
        }
    }
}

/// A loop device, for tests on block devices. Needs root and `losetup`.
pub struct Loop(pub String);

impl Loop {
    /// Makes a device of a file, with blocks of `sector` bytes.
    pub fn new(file: &str, sector: u32) -> Self {
        let sector = sector.to_string();
        Loop(losetup(&["--find", "--show", "--sector-size", &sector, file]))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        losetup(&["--detach", &self.0]);
    }
}

fn losetup(arguments: &[&str]) -> String {
    let output = Command::new("losetup").args(arguments).output();
    let output = output.expect("losetup (package util-linux) can be started");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "losetup {arguments:?} (as root): {error}");
    String::from_utf8(output.stdout).unwrap().trim_end().into()
}

/// A guest on a vhost-user socket.
pub struct Guest(Session<SplitRing>);

/// Largest request of a guest in bytes.
const PIECE: usize = 64 << 10;
/// Limit for hangs only.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Limit for commands that do much, such as `cargo tree`.
const COMMAND_LIMIT: Duration = Duration::from_secs(600);

impl Guest {
    pub fn connect(socket: &Path) -> Self {
        let plan = Plan { data_len: PIECE as u32, answer_limit: LIMIT, ..Plan::default() };
        Guest(Session::start(socket, &plan).unwrap())
    }

    fn call(&mut self, kind: u32, offset: usize, data: Data, bytes: &mut [u8]) -> u8 {
        self.0.queues[0].call(kind, offset as u64 / 512, data, bytes, LIMIT).unwrap()
    }

    /// Reads, or returns the status of the first request that fails.
    pub fn try_read(&mut self, offset: usize, len: usize) -> Result<Vec<u8>, u8> {
        let mut bytes = vec![0; len];
        for (number, piece) in bytes.chunks_mut(PIECE).enumerate() {
            let (at, data) = (offset + number * PIECE, Data::FromDevice(piece.len() as u32));
            match self.call(request::IN, at, data, piece) {
                status::OK => {}
                failed => return Err(failed),
            }
        }
        Ok(bytes)
    }

    pub fn try_write(&mut self, offset: usize, bytes: &[u8]) -> u8 {
        let mut bytes = bytes.to_vec();
        for (number, piece) in bytes.chunks_mut(PIECE).enumerate() {
            let (at, data) = (offset + number * PIECE, Data::ToDevice(piece.len() as u32));
            match self.call(request::OUT, at, data, piece) {
                status::OK => {}
                failed => return failed,
            }
        }
        status::OK
    }

    pub fn try_flush(&mut self) -> u8 {
        self.call(request::FLUSH, 0, Data::None, &mut [])
    }

    /// Sends a request for a range: a discard or zeroes.
    fn range(&mut self, kind: u32, offset: usize, len: usize) -> u8 {
        let mut range = request::range(offset as u64 / 512, len as u32 / 512);
        let data = Data::ToDevice(range.len() as u32);
        self.call(kind, 0, data, &mut range)
    }

    pub fn try_discard(&mut self, offset: usize, len: usize) -> u8 {
        self.range(request::DISCARD, offset, len)
    }

    pub fn discard(&mut self, offset: usize, len: usize) {
        assert_eq!(self.try_discard(offset, len), status::OK);
    }

    pub fn try_write_zeroes(&mut self, offset: usize, len: usize) -> u8 {
        self.range(request::WRITE_ZEROES, offset, len)
    }

    pub fn write_zeroes(&mut self, offset: usize, len: usize) {
        assert_eq!(self.try_write_zeroes(offset, len), status::OK);
    }

    pub fn read(&mut self, offset: usize, len: usize) -> Vec<u8> {
        self.try_read(offset, len).unwrap()
    }

    /// Waits until the requests that were submitted have succeeded.
    fn all_succeed(&mut self) {
        let queue = &mut self.0.queues[0];
        queue.publish().unwrap();
        while queue.in_flight() > 0 {
            match queue.reap().unwrap() {
                Some((_, status)) => assert_eq!(status, status::OK),
                None => queue.sleep(Some(LIMIT)).unwrap(),
            }
        }
    }

    /// Reads 4096 bytes at each of these offsets, all at once.
    pub fn read_at_once(&mut self, offsets: &[usize]) -> Vec<Vec<u8>> {
        let queue = &mut self.0.queues[0];
        for (slot, offset) in (0..).zip(offsets) {
            queue.submit(slot, request::IN, *offset as u64 / 512, Data::FromDevice(4096));
        }
        self.all_succeed();
        let queue = &self.0.queues[0];
        let read = |slot| {
            let mut bytes = vec![0; 4096];
            queue.read_data(slot, &mut bytes);
            bytes
        };
        (0..offsets.len() as u16).map(read).collect()
    }

    /// Writes 4096 zeroes at each of these offsets, all at once.
    pub fn write_at_once(&mut self, offsets: &[usize]) {
        let queue = &mut self.0.queues[0];
        for (slot, offset) in (0..).zip(offsets) {
            queue.submit(slot, request::OUT, *offset as u64 / 512, Data::ToDevice(4096));
        }
        self.all_succeed();
    }

    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert_eq!(self.try_write(offset, bytes), status::OK);
    }

    pub fn flush(&mut self) {
        assert_eq!(self.try_flush(), status::OK);
    }
}
