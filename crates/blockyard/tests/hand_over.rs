//! Disks that move from one process to the next one: the example `upgrade`, with a guest and an NBD
//! client that stay connected.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use blockyard::{Access, Disk, ErrorKind, Shape, Target, Yard};

mod common;
#[path = "../examples/upgrade.rs"]
#[allow(dead_code)]
mod upgrade;

use common::{Guest, Scratch};

const SIZE: usize = 1 << 20;
const BLOCK: usize = 4096;

/// A process of the example. It ends with this value.
struct Process(Child, Lines<BufReader<ChildStdout>>);

/// The environment variable with the folder of the example's process.
const FOLDER: &str = "BLOCKYARD_TEST_FOLDER";

/// Becomes a process of the example, if a test has started this process for that.
fn run_if_child() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        let ended = upgrade::run(Path::new(&folder));
        let _ = ended.as_ref().inspect_err(|e| eprintln!("upgrade: {e}"));
        std::process::exit(ended.is_err().into());
    }
}

impl Process {
    /// Starts this program again, as a process of the example.
    fn start(scratch: &Scratch) -> Self {
        let test = std::thread::current().name().unwrap().to_string();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &test, "--nocapture"]).env(FOLDER, scratch.path(""));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Process(child, lines)
    }

    /// Waits for a line that begins with `prefix`.
    fn expect(&mut self, prefix: &str) -> String {
        let found = self.1.by_ref().map_while(Result::ok).find(|line| line.starts_with(prefix));
        found.unwrap_or_else(|| panic!("the process ended without {prefix:?}"))
    }

    fn ends(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A guest that knows what it has written.
struct Writer {
    guest: Guest,
    known: Vec<u8>,
    count: usize,
}

impl Writer {
    fn connect(socket: &Path) -> Self {
        Writer { guest: Guest::connect(socket), known: vec![0; SIZE], count: 0 }
    }

    /// Writes `count` blocks, and reads each back with the block of an earlier write.
    fn work(&mut self, count: usize) {
        for _ in 0..count {
            self.count += 1;
            let at = self.count * 7 % (SIZE / BLOCK) * BLOCK;
            let bytes: Vec<_> = (0..BLOCK).map(|i| (self.count * 31 + i) as u8).collect();
            self.guest.write(at, &bytes);
            self.known[at..at + BLOCK].copy_from_slice(&bytes);
            let other = self.count * 13 % (SIZE / BLOCK) * BLOCK;
            for at in [at, other] {
                assert_eq!(self.guest.read(at, BLOCK), self.known[at..at + BLOCK], "{at}");
            }
        }
    }
}

/// An NBD client of the disk, without options.
struct NbdClient(UnixStream);

impl NbdClient {
    fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        // Flags (fixed newstyle, no zeroes), and NBD_OPT_EXPORT_NAME.
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk").unwrap();
        let mut export = [0; 10];
        stream.read_exact(&mut export).unwrap();
        assert_eq!(export[..8], (SIZE as u64).to_be_bytes());
        NbdClient(stream)
    }

    fn read(&mut self, offset: usize) -> Vec<u8> {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0; 4]);
        request.extend(7u64.to_be_bytes());
        request.extend((offset as u64).to_be_bytes());
        request.extend((BLOCK as u32).to_be_bytes());
        self.0.write_all(&request).unwrap();
        let mut reply = vec![0; 16 + BLOCK];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..16], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        reply.split_off(16)
    }
}

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.file("disk.img", &vec![0; SIZE]);
    scratch
}

#[test]
fn clients_stay_connected_while_the_program_is_replaced() {
    run_if_child();
    let scratch = scratch("upgrade");
    let mut running = Process::start(&scratch);
    running.expect("serves");
    let mut writer = Writer::connect(&scratch.path("vm.sock"));
    let mut client = NbdClient::connect(&scratch.path("nbd.sock"));
    for _ in 0..10 {
        writer.work(50);
        let mut next = Process::start(&scratch);
        next.expect("serves");
        running.expect("handed disk over");
        std::mem::replace(&mut running, next).ends();
        writer.work(50);
        assert_eq!(client.read(7 * BLOCK), writer.known[7 * BLOCK..8 * BLOCK]);
    }
    writer.guest.flush();
    // New clients come to the present process.
    NbdClient::connect(&scratch.path("nbd.sock"));
    assert_eq!(std::fs::read(scratch.path("disk.img")).unwrap(), writer.known);
}

#[test]
fn a_next_process_that_is_killed_leaves_the_disks_to_one_of_both() {
    run_if_child();
    let scratch = scratch("killed");
    let mut running = Process::start(&scratch);
    running.expect("serves");
    let mut writer = Writer::connect(&scratch.path("vm.sock"));
    for round in 0..20 {
        let mut next = Process::start(&scratch);
        next.expect("takes over");
        // The more requests, the later.
        writer.work(round);
        next.0.kill().unwrap();
        next.0.wait().unwrap();
        // Either the running process goes on, or it has handed over before the kill.
        let line = running.1.next().unwrap().unwrap();
        if line.starts_with("handed") {
            // The guest has lost its disk with the process that was killed.
            std::fs::remove_file(scratch.path("control")).unwrap();
            running = Process::start(&scratch);
            running.expect("serves");
            let known = std::mem::take(&mut writer.known);
            writer = Writer { known, ..Writer::connect(&scratch.path("vm.sock")) };
        } else {
            assert!(line.starts_with("goes on"), "{line}");
        }
        writer.work(20);
    }
}

#[test]
fn a_next_process_that_fails_leaves_the_disks_where_they_are() {
    run_if_child();
    let scratch = scratch("fails");
    let mut running = Process::start(&scratch);
    running.expect("serves");
    let mut writer = Writer::connect(&scratch.path("vm.sock"));
    writer.work(20);
    let shape = Shape { size: SIZE as u64, granule: 4096 };
    let fails = || Target::device("file", shape, async |_, _| Err::<Nothing, _>(failure()));
    let next = UnixStream::connect(scratch.path("control")).unwrap();
    let disk = |_: &str| {
        let disk = Disk::target("disk", fails()).vhost_user(scratch.path("vm.sock"));
        Some(disk.nbd_unix(scratch.path("nbd.sock")))
    };
    let error = Yard::take_over(1, next, disk).map(drop).unwrap_err();
    assert!(error.to_string().contains("not today"), "{error}");
    assert!(running.expect("goes on").contains("not today"));
    writer.work(20);
    // The target has the file when the export fails.
    for _ in 0..20 {
        let next = UnixStream::connect(scratch.path("control")).unwrap();
        let disk = |_: &str| {
            let target = Target::device("file", shape, async |_, _| Ok(Nothing));
            let target = target.file(scratch.path("disk.img"), Access::Write);
            Some(Disk::target("disk", target).vhost_user(scratch.path("other.sock")))
        };
        let error = Yard::take_over(1, next, disk).map(drop).unwrap_err();
        assert!(error.to_string().contains("other.sock"), "{error}");
        running.expect("goes on");
        writer.work(5);
    }
    // One that ends without a word.
    drop(UnixStream::connect(scratch.path("control")).unwrap());
    running.expect("goes on");
    writer.work(20);
    // Another protocol.
    let mut next = UnixStream::connect(scratch.path("control")).unwrap();
    next.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    drop(next);
    running.expect("goes on");
    writer.work(20);
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let yard = Yard::start(1).unwrap();
    let refused = yard.hand_over(ours, |name| panic!("{name}")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::HandOver);
}

/// A process with a disk that cannot be flushed. Prints the disks that it has after a hand-over.
fn serve_unflushed(folder: &Path) {
    let yard = Yard::start(1).unwrap();
    let shape = Shape { size: SIZE as u64, granule: 4096 };
    let disk = |name: &str| {
        let target = Target::device("unflushed", shape, async |_, _| Ok(Unflushed));
        Disk::target(name, target).vhost_user(folder.join("vm.sock"))
    };
    yard.serve(disk("disk")).unwrap();
    let control = UnixListener::bind(folder.join("control")).unwrap();
    println!("serves");
    let error = yard.hand_over(control.accept().unwrap().0, disk).unwrap_err();
    println!("has {:?} after: {error}", yard.disks());
}

#[test]
fn a_disk_that_could_not_be_flushed_is_not_served_again() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        serve_unflushed(Path::new(&folder));
        std::process::exit(0);
    }
    let scratch = scratch("unflushed");
    let mut running = Process::start(&scratch);
    running.expect("serves");
    let mut writer = Writer::connect(&scratch.path("vm.sock"));
    writer.guest.write(0, &[1; BLOCK]);
    let next = UnixStream::connect(scratch.path("control")).unwrap();
    let disk = |_: &str| -> Option<Disk> { panic!("the disk has ended") };
    Yard::take_over(1, next, disk).map(drop).unwrap_err();
    let line = running.expect("has []");
    assert!(line.contains("could not be flushed: writes may be lost"), "{line}");
    assert!(!scratch.path("vm.sock").exists());
}

fn failure() -> std::io::Error {
    std::io::Error::other("not today")
}

struct Nothing;

impl blockyard::Device for Nothing {
    async fn read(&self, _: u64, _: blockyard::Lent) -> std::io::Result<()> {
        Ok(())
    }

    async fn write(&self, _: u64, _: blockyard::Lent) -> std::io::Result<()> {
        Ok(())
    }

    async fn flush(&self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Takes writes, and cannot flush them.
struct Unflushed;

impl blockyard::Device for Unflushed {
    async fn read(&self, _: u64, _: blockyard::Lent) -> std::io::Result<()> {
        Ok(())
    }

    async fn write(&self, _: u64, _: blockyard::Lent) -> std::io::Result<()> {
        Ok(())
    }

    async fn flush(&self) -> std::io::Result<()> {
        Err(failure())
    }
}
