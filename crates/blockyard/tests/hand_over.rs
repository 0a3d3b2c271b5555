//! Disks that move from one process to the next one: the example `upgrade`, with a guest and an NBD
//! client that stay connected.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use blockyard::{Access, Disk, ErrorKind, Files, Limits, Shape, Target, Yard};
use blockyard_image::OpenedFiles;
use blockyard_image::qcow2::CreateOptions;
use blockyard_image::tools::{self, NewImage};
use blockyard_nbd::wire::{Headers, OptionHeader, Request, SimpleReply, cmd, handshake, opt};

mod common;
#[path = "../examples/upgrade.rs"]
#[allow(dead_code)]
mod upgrade;

use common::{Guest, LIMIT, Scratch, find_line, lines, script, wait};

const SIZE: usize = 1 << 20;
const BLOCK: usize = 4096;

/// A process of the example. It ends with this value.
struct Process(Child, Receiver<String>);

/// The environment variable with the folder of the example's process.
const FOLDER: &str = "BLOCKYARD_TEST_FOLDER";

/// The image of the example's process, instead of a target.
const IMAGE: &str = "disk.qcow2";
/// The program of the image of the example's process, instead of a target.
const PROGRAM: &str = "program";

/// Returns the disk of the folder's image.
fn image(folder: &Path) -> io::Result<Disk> {
    let disk = Disk::image("disk", folder.join(IMAGE));
    Ok(disk.vhost_user(folder.join("vm.sock")).nbd_unix(folder.join("nbd.sock")))
}

/// Returns the disk of the folder's program.
fn program(folder: &Path) -> io::Result<Disk> {
    let disk = Disk::image("disk", format!("exec:{}", folder.join(PROGRAM).display()));
    Ok(disk.vhost_user(folder.join("vm.sock")).nbd_unix(folder.join("nbd.sock")))
}

/// Becomes a process of the example, if a test has started this process for that.
fn run_if_child() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        let folder = Path::new(&folder);
        let disk = match [IMAGE, PROGRAM].map(|name| folder.join(name).exists()) {
            [true, _] => image,
            [_, true] => program,
            _ => upgrade::disk,
        };
        let ended = upgrade::run(folder, disk);
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
        command.env("BLOCKYARD_STATE_FOLDER", Journals::of(scratch));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = lines(child.stdout.take().unwrap());
        Process(child, lines)
    }

    /// Waits for a line that begins with `prefix`.
    fn expect(&mut self, prefix: &str) -> String {
        let found = find_line(&self.1, |line| line.starts_with(prefix));
        found.unwrap_or_else(|| panic!("the process ended without {prefix:?}"))
    }

    fn is_killed(&mut self) {
        self.0.kill().unwrap();
        wait(&mut self.0);
    }

    fn ends(mut self) {
        assert!(wait(&mut self.0).success());
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
    /// Connects to a process that has just started, with a disk of zeroes.
    fn connect_to(process: &mut Process, scratch: &Scratch) -> Self {
        process.expect("serves");
        let guest = Guest::connect(&scratch.path("vm.sock"));
        Writer { guest, known: vec![0; SIZE], count: 0 }
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

    /// Connects again, because the process has died, and finds all that was answered.
    fn connect_again(self, socket: &Path) -> Self {
        let Writer { guest, known, count } = self;
        drop(guest);
        let mut guest = Guest::connect(socket);
        assert!(guest.read(0, SIZE) == known, "answered writes are lost");
        Writer { guest, known, count }
    }
}

/// An NBD client of the disk, without options.
struct NbdClient(UnixStream);

impl NbdClient {
    fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        let flags = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        let mut request = flags.to_be_bytes().to_vec();
        OptionHeader { option: opt::EXPORT_NAME, len: 4 }.put(&mut request);
        request.extend(b"disk");
        stream.write_all(&request).unwrap();
        let mut export = [0; 10];
        stream.read_exact(&mut export).unwrap();
        assert_eq!(export[..8], (SIZE as u64).to_be_bytes());
        NbdClient(stream)
    }

    fn read(&mut self, offset: usize) -> Vec<u8> {
        let (offset, len) = (offset as u64, BLOCK as u64);
        let read = Request { flags: 0, command: cmd::READ, cookie: 7, offset, len };
        let mut request = Vec::new();
        read.put(Headers::Simple, &mut request);
        self.0.write_all(&request).unwrap();
        let mut reply = vec![0; SimpleReply::BYTES + BLOCK];
        self.0.read_exact(&mut reply).expect("a read is answered in time");
        assert_eq!(SimpleReply::parse(&reply), Ok(SimpleReply { error: 0, cookie: 7 }));
        reply.split_off(SimpleReply::BYTES)
    }
}

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.file("disk.img", &vec![0; SIZE]);
    scratch
}

/// The folder of the journals of an image's process, on tmpfs.
struct Journals(PathBuf);

impl Journals {
    fn of(scratch: &Scratch) -> PathBuf {
        let path = scratch.path("");
        Path::new("/dev/shm").join(path.file_name().unwrap())
    }

    /// Makes an image in the folder.
    fn with_image(scratch: &Scratch) -> Self {
        let image = scratch.file(IMAGE, &[]);
        // Each write is one to a new cluster.
        let options = CreateOptions { cluster_size: 4096, ..CreateOptions::new(SIZE as u64) };
        let new = NewImage::Qcow2 { options, data: None };
        tools::create(image.as_ref(), &OpenedFiles::default(), new).unwrap();
        Journals(Journals::of(scratch))
    }

    /// Returns the number of files in the folder.
    fn count(&self) -> usize {
        std::fs::read_dir(&self.0).map_or(0, Iterator::count)
    }
}

impl Drop for Journals {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn clients_stay_connected_while_the_program_is_replaced() {
    run_if_child();
    let scratch = scratch("upgrade");
    let mut running = Process::start(&scratch);
    let writer = Writer::connect_to(&mut running, &scratch);
    let writer = is_replaced(&scratch, running, writer, 10);
    assert_eq!(std::fs::read(scratch.path("disk.img")).unwrap(), writer.known);
}

#[test]
fn unflushed_writes_of_an_image_are_there_after_its_program_is_killed_or_replaced() {
    run_if_child();
    let scratch = scratch("upgrade-image");
    let journals = Journals::with_image(&scratch);
    let mut running = Process::start(&scratch);
    let mut writer = Writer::connect_to(&mut running, &scratch);
    for _ in 0..3 {
        writer.work(10);
        assert!(journals.count() > 0, "the changes of metadata are in no journal");
        running.is_killed();
        std::fs::remove_file(scratch.path("control")).unwrap();
        running = Process::start(&scratch);
        running.expect("serves");
        writer = writer.connect_again(&scratch.path("vm.sock"));
    }
    writer = is_replaced(&scratch, running, writer, 3);
    let mut running = Process::start(&scratch);
    running.expect("serves");
    writer.connect_again(&scratch.path("vm.sock"));
}

/// A process that serves an image twice. At first its journals' folder cannot be used.
fn serve_with_late_journals(folder: &Path) {
    let journals = std::env::var_os("BLOCKYARD_STATE_FOLDER").unwrap();
    std::fs::write(&journals, "no folder").unwrap();
    let yard = Yard::start(1).unwrap();
    yard.serve(image(folder).unwrap()).unwrap();
    yard.remove("disk").unwrap();
    std::fs::remove_file(&journals).unwrap();
    yard.serve(image(folder).unwrap()).unwrap();
    println!("serves");
    loop {
        std::thread::park(); // until it is killed
    }
}

#[test]
fn an_image_has_a_journal_when_the_folder_can_be_used_again() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        serve_with_late_journals(Path::new(&folder));
    }
    let scratch = scratch("late-journals");
    let journals = Journals::with_image(&scratch);
    let mut running = Process::start(&scratch);
    let mut writer = Writer::connect_to(&mut running, &scratch);
    writer.work(1);
    assert!(journals.count() > 0, "the changes of metadata are in no journal");
}

#[test]
fn the_program_of_an_image_runs_on_while_its_server_is_replaced() {
    run_if_child();
    let scratch = scratch("upgrade-program");
    let text = format!(
        "#!/bin/bash\ncd '{}' && echo start >>starts\n\
         printf '%s\\n' 'blockyard-map 1' 'size {SIZE}' 'granule {BLOCK}' \
         \"data w $PWD/disk.img\" ready\n\
         while read -r word number how offset length; do\n\
         [ $word = locate ] && echo \"ok $number $length at 0 $offset\"\n\
         [ $word = flush ] && echo \"ok $number\"\ndone\n",
        scratch.path("").display()
    );
    let image = script(&scratch, PROGRAM, &text);
    let mut running = Process::start(&scratch);
    let mut writer = Writer::connect_to(&mut running, &scratch);
    // The next process has the program when its export fails.
    let disk = || Disk::image("disk", &image);
    fails_with_another_socket(&scratch, &mut running, &mut writer, 5, disk);
    let writer = is_replaced(&scratch, running, writer, 3);
    assert_eq!(std::fs::read(scratch.path("disk.img")).unwrap(), writer.known);
    assert_eq!(std::fs::read_to_string(scratch.path("starts")).unwrap(), "start\n");
}

/// Replaces the process so often under a guest and an NBD client. At the end it is killed.
fn is_replaced(
    scratch: &Scratch,
    mut running: Process,
    mut writer: Writer,
    times: usize,
) -> Writer {
    let mut client = NbdClient::connect(&scratch.path("nbd.sock"));
    for _ in 0..times {
        writer.work(50);
        let mut next = Process::start(scratch);
        next.expect("serves");
        running.expect("handed disk over");
        std::mem::replace(&mut running, next).ends();
        writer.work(50);
        assert_eq!(client.read(7 * BLOCK), writer.known[7 * BLOCK..8 * BLOCK]);
    }
    // New clients come to the present process.
    NbdClient::connect(&scratch.path("nbd.sock"));
    writer.guest.flush();
    running.is_killed();
    std::fs::remove_file(scratch.path("control")).unwrap();
    writer
}

#[test]
fn a_next_process_that_is_killed_leaves_the_disks_to_one_of_both() {
    run_if_child();
    is_killed_meanwhile(&scratch("killed"), 20);
}

#[test]
fn a_next_process_that_is_killed_loses_no_write_of_an_image() {
    run_if_child();
    let scratch = scratch("killed-image");
    let _journals = Journals::with_image(&scratch);
    is_killed_meanwhile(&scratch, 12);
}

/// Kills the next process at different moments of a hand-over.
fn is_killed_meanwhile(scratch: &Scratch, times: usize) {
    let mut running = Process::start(scratch);
    let mut writer = Writer::connect_to(&mut running, scratch);
    for round in 0..times {
        let mut next = Process::start(scratch);
        next.expect("takes over");
        // The more requests, the later.
        writer.work(round);
        next.is_killed();
        // Either the running process goes on, or it has handed over before the kill.
        let line = running.1.recv_timeout(LIMIT).unwrap();
        if line.starts_with("handed") {
            // The guest has lost its disk with the process that was killed. That process may have
            // been making the socket anew.
            let _ = std::fs::remove_file(scratch.path("control"));
            running = Process::start(scratch);
            running.expect("serves");
            writer = writer.connect_again(&scratch.path("vm.sock"));
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
    let mut writer = Writer::connect_to(&mut running, &scratch);
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
    fails_with_another_socket(&scratch, &mut running, &mut writer, 20, || {
        let target = Target::device("file", shape, async |_, _| Ok(Nothing));
        Disk::target("disk", target.file(scratch.path("disk.img"), Access::Write))
    });
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

#[test]
fn a_next_process_that_starts_its_target_too_late_leaves_the_disks_where_they_are() {
    run_if_child();
    let scratch = scratch("too-late");
    let mut running = Process::start(&scratch);
    let mut writer = Writer::connect_to(&mut running, &scratch);
    writer.work(20);
    let next = UnixStream::connect(scratch.path("control")).unwrap();
    let disk = |_: &str| {
        let shape = Shape { size: SIZE as u64, granule: 4096 };
        // It has the file, and its start does not end.
        let target = Target::device("file", shape, async |files: Files, _| {
            let _files = files;
            std::future::pending::<io::Result<Nothing>>().await
        });
        let limits = Limits { start: Duration::ZERO, ..Limits::default() };
        let target = target.file(scratch.path("disk.img"), Access::Write).limits(limits);
        let disk = Disk::target("disk", target).vhost_user(scratch.path("vm.sock"));
        Some(disk.nbd_unix(scratch.path("nbd.sock")))
    };
    let error = Yard::take_over(1, next, disk).map(drop).unwrap_err();
    assert!(error.to_string().contains("not ready in time"), "{error}");
    assert!(running.expect("goes on").contains("not ready in time"));
    writer.work(20);
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
    let mut writer = Writer::connect_to(&mut running, &scratch);
    writer.guest.write(0, &[1; BLOCK]);
    let next = UnixStream::connect(scratch.path("control")).unwrap();
    let shape = Shape { size: SIZE as u64, granule: 4096 };
    let disk = |name: &str| {
        let target = Target::device("unflushed", shape, async |_, _| Ok(Unflushed));
        Some(Disk::target(name, target).vhost_user(scratch.path("vm.sock")))
    };
    Yard::take_over(1, next, disk).map(drop).unwrap_err();
    let line = running.expect("has []");
    assert!(line.contains("could not be flushed: writes may be lost"), "{line}");
    assert!(!scratch.path("vm.sock").exists());
}

#[test]
fn a_next_process_that_fails_leaves_an_image_with_its_unflushed_writes() {
    run_if_child();
    let scratch = scratch("fails-image");
    let _journals = Journals::with_image(&scratch);
    let mut running = Process::start(&scratch);
    let mut writer = Writer::connect_to(&mut running, &scratch);
    writer.work(20);
    // The image cannot be opened.
    let next = UnixStream::connect(scratch.path("control")).unwrap();
    let missing = || Disk::image("disk", scratch.path("missing.qcow2"));
    let disk = |_: &str| Some(missing().vhost_user(scratch.path("vm.sock")));
    let error = Yard::take_over(1, next, disk).map(drop).unwrap_err();
    assert!(error.to_string().contains("missing.qcow2"), "{error}");
    running.expect("goes on");
    writer.work(20);
    // The image is open when the export fails.
    fails_with_another_socket(&scratch, &mut running, &mut writer, 10, || {
        Disk::image("disk", scratch.path(IMAGE))
    });
    let mut client = NbdClient::connect(&scratch.path("nbd.sock"));
    assert_eq!(client.read(7 * BLOCK), writer.known[7 * BLOCK..8 * BLOCK]);
    assert!(writer.guest.read(0, SIZE) == writer.known);
}

/// Takes the disk over with another socket, which fails, so often.
fn fails_with_another_socket(
    scratch: &Scratch,
    running: &mut Process,
    writer: &mut Writer,
    times: usize,
    disk: impl Fn() -> Disk,
) {
    for _ in 0..times {
        let next = UnixStream::connect(scratch.path("control")).unwrap();
        let disk = |_: &str| Some(disk().vhost_user(scratch.path("other.sock")));
        let error = Yard::take_over(1, next, disk).map(drop).unwrap_err();
        assert!(error.to_string().contains("other.sock"), "{error}");
        running.expect("goes on");
        writer.work(5);
    }
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
