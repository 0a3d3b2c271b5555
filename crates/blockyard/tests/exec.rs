//! `exec:` images: another program is the map, and its faults hurt only its own disk.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{TryRecvError, sync_channel};
use std::time::Instant;

use blockyard::{Disk, ErrorKind, Yard};
use rustix::fs::{FlockOperation, flock};

mod common;

use common::{Guest, LIMIT, Loop, Scratch, lines, output, script, wait};

const BLOCK: usize = 64 << 10;
/// virtio-blk's status of a failed request.
const IOERR: u8 = 1;

fn base() -> Vec<u8> {
    (0..16 * BLOCK).map(|at| (at / 512 + at % 7) as u8).collect()
}

#[test]
fn the_python_example_keeps_what_was_written() {
    let scratch = Scratch::new("python");
    let files = [scratch.file("base", &base()), scratch.file("store", &vec![0; base().len()])];
    keeps_what_was_written(&scratch, &files);
}

#[test]
fn the_python_example_works_on_block_devices() {
    let scratch = Scratch::new("python-devices");
    let devices = [("base", base(), 4096), ("store", vec![0x55; base().len()], 512)];
    let devices =
        devices.map(|(name, bytes, sector)| Loop::new(&scratch.file(name, &bytes), sector));
    keeps_what_was_written(&scratch, &devices.each_ref().map(|device| device.0.clone()));
}

#[test]
fn the_python_example_refuses_a_base_of_part_of_a_block_and_a_smaller_store() {
    let scratch = Scratch::new("python-odd");
    let [odd, large, small] =
        [BLOCK + 512, 2 * BLOCK, BLOCK].map(|len| scratch.file(&len.to_string(), &vec![1; len]));
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/exec/cowd.py");
    for (base, store, what) in [
        (&odd, &odd, "is no multiple of 65536 bytes"),
        (&large, &small, "as large, with truncate -s 131072"),
    ] {
        let mut command = Command::new(&example);
        command.env("BASE", base).env("STORE", store).env("TABLE", scratch.file("table", &[]));
        let output = output(command.stdin(Stdio::null()));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(what), "{error}");
    }
}

/// Returns whether a process waits for a lock of a file.
fn waits_for_a_lock(process: u32) -> bool {
    let (locks, process) = (std::fs::read_to_string("/proc/locks").unwrap(), process.to_string());
    locks.lines().any(|line| {
        // 1: -> FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
        let words: Vec<_> = line.split_whitespace().collect();
        words.get(1..3) == Some(&["->", "FLOCK"][..]) && words.get(5) == Some(&&*process)
    })
}

#[test]
fn the_python_example_reads_its_table_after_the_one_before_has_left_it() {
    let scratch = Scratch::new("python-locked");
    let files = ["base", "store"].map(|name| scratch.file(name, &base()));
    let table = scratch.file("table", &[]);
    // This test is the one before.
    let mut before = std::fs::File::options().write(true).open(&table).unwrap();
    flock(&before, FlockOperation::LockExclusive).unwrap();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/exec/cowd.py");
    let mut command = Command::new(example);
    command.env("BASE", &files[0]).env("STORE", &files[1]).env("TABLE", &table);
    let mut program = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let said = lines(program.stdout.take().unwrap());
    let began = Instant::now();
    while !waits_for_a_lock(program.id()) {
        assert_eq!(said.try_recv(), Err(TryRecvError::Empty), "it does not wait for the lock");
        assert!(began.elapsed() < LIMIT, "it neither waits for the lock nor says anything");
    }
    assert_eq!(std::fs::metadata(&table).unwrap().len(), 0);
    // Block 2 is at place 5.
    let entries: Vec<u8> =
        (0..16).flat_map(|block| (u64::from(block == 2) * 5).to_le_bytes()).collect();
    before.write_all(&entries).unwrap();
    flock(&before, FlockOperation::Unlock).unwrap();
    while said.recv_timeout(LIMIT).unwrap() != "ready" {}
    assert!(std::fs::read(&table).unwrap() == entries, "it has overwritten a flushed write");
    writeln!(program.stdin.take().unwrap(), "locate 1 r 131072 65536").unwrap();
    assert_eq!(said.recv_timeout(LIMIT).unwrap(), "ok 1 65536 at 1 262144");
    assert!(wait(&mut program).success());
}

/// Serves the base with `base()` and the store by the Python example, and writes, twice.
fn keeps_what_was_written(scratch: &Scratch, [base_path, store]: &[String; 2]) {
    let (bytes, table) = (base(), scratch.file("table", &[]));
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/exec/cowd.py");
    let example = std::fs::canonicalize(example).unwrap();
    let text = format!(
        "#!/bin/sh\nBASE={base_path} STORE={store} TABLE={table} exec {}\n",
        example.display()
    );
    let image = script(scratch, "cowd", &text);
    let mut expected = bytes.clone();
    for round in 0..2u8 {
        let yard = Yard::start(1).unwrap();
        let socket = scratch.path("socket");
        yard.serve(Disk::image("a", &image).vhost_user(&socket)).unwrap();
        let mut guest = Guest::connect(&socket);
        // The program has several questions at a time.
        let offsets: Vec<usize> = (0..15).map(|number| number * (BLOCK + 512)).collect();
        for (read, at) in guest.read_at_once(&offsets).iter().zip(offsets) {
            assert!(*read == expected[at..at + 4096], "round {round}, at {at}");
        }
        assert!(guest.read(0, expected.len()) == expected, "round {round}");
        for at in [0, 3 * BLOCK + 512, 5 * BLOCK - 1024] {
            let at = at + usize::from(round) * 4 * BLOCK;
            guest.write(at, &[round + 1; 4096]);
            expected[at..at + 4096].fill(round + 1);
        }
        guest.flush();
        assert!(guest.read(0, expected.len()) == expected, "round {round}");
        drop(guest);
        assert!(yard.remove("a").unwrap().is_flushed);
    }
    assert!(std::fs::read(base_path).unwrap() == bytes);
    assert_eq!(std::fs::metadata(&table).unwrap().len(), 16 * 8);
}

const HELLO: &str =
    "#!/bin/sh\nprintf 'blockyard-map 1\\nsize 1048576\\ngranule 4096\\nready\\n'\n";

#[test]
fn a_program_that_fails_hurts_only_its_own_disk() {
    let scratch = Scratch::new("programs");
    let good = script(
        &scratch,
        "good",
        &format!(
            "{HELLO}while read word number rest; do
        echo \"ok $number 4096 zero\"; done\n"
        ),
    );
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::image("good", &good).vhost_user(scratch.path("good.sock"))).unwrap();
    let mut neighbour = Guest::connect(&scratch.path("good.sock"));
    let faults = [
        ("ends", "read line; exit 1"),
        ("chatters", "read line; echo hello"),
        ("answers another", "read line; echo ok 999 4096 zero; exec sleep 1000"),
        ("lies", "while read a number rest; do echo \"ok $number 4096 at 3 0\"; done"),
        ("fails", "while read a number rest; do echo \"error $number no idea\"; done"),
        ("sends no line", "read line; exec cat /dev/zero"),
    ];
    for (fault, text) in faults {
        let image = script(&scratch, "bad", &format!("{HELLO}{text}\n"));
        let socket = scratch.path("bad.sock");
        yard.serve(Disk::image("bad", image).vhost_user(&socket)).unwrap();
        let mut guest = Guest::connect(&socket);
        assert_eq!(guest.try_read(0, 4096), Err(IOERR), "{fault}");
        assert_eq!(guest.try_read(8192, 4096), Err(IOERR), "{fault}");
        assert_eq!(neighbour.read(4096, 512), [0; 512], "{fault}");
        drop(guest);
        yard.remove("bad").unwrap();
    }
}

#[test]
fn the_processes_of_a_program_end_with_it() {
    let scratch = Scratch::new("group");
    let pipe = scratch.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // Fails at its first question, and goes on.
    let text = format!("{HELLO}read line; echo hello; exec sleep 1000\n");
    let inner = script(&scratch, "inner", &text).split_off("exec:".len());
    let wrappers = [
        ("waits for a child", format!("{inner} 3>'{}'\nexit 1", pipe.display())),
        ("leaves a child", format!("{inner} <&0 3>'{}' &", pipe.display())),
    ];
    for (how, text) in wrappers {
        // Each process of the program has the other end open.
        let (sender, ended) = sync_channel(1);
        let path = pipe.clone();
        std::thread::spawn(move || {
            let _ = sender.send(std::fs::read(path).unwrap());
        });
        let yard = Yard::start(1).unwrap();
        let image = script(&scratch, "wrapper", &format!("#!/bin/sh\n{text}\n"));
        let socket = scratch.path("socket");
        yard.serve(Disk::image("a", image).vhost_user(&socket)).unwrap();
        let mut guest = Guest::connect(&socket);
        assert_eq!(guest.try_read(0, 4096), Err(IOERR), "{how}");
        drop(guest);
        yard.remove("a").unwrap();
        assert_eq!(ended.recv_timeout(LIMIT), Ok(Vec::new()), "{how}: a process lives on");
    }
}

#[test]
fn a_program_takes_its_answers_back() {
    let scratch = Scratch::new("back");
    let data = scratch.file("data", &[vec![1; 4096], vec![2; 4096]].concat());
    let text = format!(
        "#!/bin/sh\nprintf 'blockyard-map 1\\nsize 1048576\\ngranule 4096\\n'\n\
         printf 'data r {data}\\nready\\n'\nnow=0\n\
         while read -r word number how offset length; do\n\
         [ $word = locate ] || continue\n\
         [ $offset = 8192 ] && now=4096 && echo 'invalidate 0 8192'\n\
         echo \"ok $number 4096 at 0 $now\"\ndone\n"
    );
    let image = script(&scratch, "program", &text);
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::image("a", image).read_only().vhost_user(scratch.path("s"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("s"));
    assert_eq!((guest.read(0, 512), guest.read(0, 512)), (vec![1; 512], vec![1; 512]));
    assert_eq!(guest.read(8192, 512), [2; 512]);
    let began = std::time::Instant::now();
    while guest.read(0, 512) != [2; 512] {
        assert!(began.elapsed().as_secs() < 60, "the old answer is still used");
    }
    drop(guest);
}

#[test]
fn a_program_lets_its_disk_grow() {
    let scratch = Scratch::new("grows");
    let text = format!(
        "{HELLO}while read -r word number how offset length; do\n\
         [ $offset = 8192 ] && echo 'size 2097152'\n\
         echo \"ok $number $length zero\"\ndone\n"
    );
    let image = script(&scratch, "program", &text);
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::image("a", image).read_only().vhost_user(scratch.path("s"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("s"));
    assert_eq!(guest.read(0, 512), [0; 512]);
    assert_eq!(yard.resize("a").unwrap(), None);
    assert_eq!(guest.read(8192, 512), [0; 512]);
    let resized = yard.resize("a").unwrap().map(|size| (size.old, size.new));
    assert_eq!(resized, Some((1 << 20, 2 << 20)));
    assert_eq!(guest.read((2 << 20) - 512, 512), [0; 512]);
    drop(guest);
}

#[test]
fn a_program_that_does_not_start_is_an_error() {
    let scratch = Scratch::new("nostart");
    let yard = Yard::start(1).unwrap();
    let error = |image: String| {
        let error = yard.serve(Disk::image("a", image)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Open);
        error.to_string()
    };
    let missing = error("exec:/nonexistent/program".into());
    assert!(missing.contains("cannot start /nonexistent/program"), "{missing}");
    let relative = error("exec:program".into());
    assert!(relative.contains("the form is exec:/path/of/program"), "{relative}");
    let ended = error(script(&scratch, "ended", "#!/bin/sh\nexit 0\n"));
    assert!(ended.ends_with("it ended at its start"), "{ended}");
    let other = error(script(&scratch, "other", "#!/bin/sh\necho hello; exec sleep 1000\n"));
    assert!(other.contains("it sent \"hello\" at its start, not \"blockyard-map 1\""), "{other}");
    let endless = error(script(&scratch, "endless", "#!/bin/sh\nexec cat /dev/zero\n"));
    let too_long = "it sent a line of more than 1048576 bytes at its start";
    assert!(endless.ends_with(too_long), "{endless}");
    let text = "#!/bin/sh\nprintf 'blockyard-map 1\\nsize 1000\\ngranule 4096\\nready\\n'\n";
    let odd = error(script(&scratch, "odd", text));
    assert!(odd.contains("its size of 1000 bytes is no multiple"), "{odd}");
}
