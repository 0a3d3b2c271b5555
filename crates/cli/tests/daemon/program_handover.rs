//! The program of an `exec:` image at hand-overs: it goes on with the next server, or with the old
//! one if the next one fails. Its death hurts its own disk only. The program moves data, so that a
//! server which asks before it is the owner would lose them.

use std::path::Path;

use blockyard_driver::status;

use crate::common::{Daemon, SOON, until};
use crate::guest::{Guest, pattern};
use crate::handover::{Case, ctl, end_server, failing, is_running, script};
use crate::interrupted_handover::{MESSAGES, between, server, serves, upgrade};

const MIB: u64 = 1 << 20;
/// Bytes that `cowd.py` moves at a time.
const BLOCK: u64 = 64 << 10;

/// Returns a disk that `cowd.py` copies on write. The program writes its process number to `pid`.
fn copied() -> Case {
    let case = Case::new();
    case.folder.image("store", 32 * MIB);
    case.folder.image("table", 0);
    let cowd = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/exec/cowd.py");
    let names = "export BASE=base.img STORE=store TABLE=table";
    let folder = case.folder.display();
    let body = format!("cd {folder}\n{names}\necho $$ >pid\nexec python3 -IS {cowd}");
    let program = script(&case, "cowd", &body);
    Case { top: format!("exec:{}", program.display()).into(), ..case }
}

fn process(case: &Case) -> i32 {
    std::fs::read_to_string(case.folder.join("pid")).unwrap().trim().parse().unwrap()
}

fn serve_without_sandbox(case: &Case) -> Daemon {
    let mut daemon = Daemon::start(case.command().args(["--sandbox", "off"]));
    daemon.wait_ready();
    daemon
}

/// Ends the server, and waits for the end of its program.
fn ends(daemon: Daemon, program: i32) {
    daemon.stop();
    until("the program has ended", SOON, || !is_running(program));
}

/// Blocks with data that a guest has written, by the numbers of their patterns.
struct Written(Vec<u64>);

impl Written {
    /// Writes another block. All blocks that were written before have their data.
    fn another(&mut self, guest: &mut Guest) {
        let seed = self.0.len() as u64;
        assert_eq!(guest.write(seed * BLOCK / 512, &pattern(seed, 4096)), status::OK);
        self.0.push(seed);
        self.check(guest);
    }

    fn check(&self, guest: &mut Guest) {
        for seed in &self.0 {
            let read = guest.read(seed * BLOCK / 512, 4096).unwrap();
            assert!(read == pattern(*seed, 4096), "block {seed} of {}", self.0.len());
        }
    }
}

#[test]
fn two_hand_overs_under_load_keep_the_program() {
    let case = copied();
    let daemon = case.serve();
    let program = process(&case);
    let daemon = case.under_load(&case.load(), |goes_on| {
        serves(&case);
        let second = case.replace(daemon);
        serves(&case);
        let third = case.replace(second);
        serves(&case);
        goes_on();
        third
    });
    assert_eq!(process(&case), program);
    ends(daemon, program);
}

/// A new server that is not the owner ends, or dies. It must neither have asked the program for
/// places, nor have ended it.
#[test]
fn a_new_server_that_fails_leaves_the_program_to_the_old_one() {
    let case = copied();
    let daemon = serve_without_sandbox(&case);
    let program = process(&case);
    let daemon = case.under_load(&case.load(), |goes_on| {
        for (stage, next) in failing(&case) {
            serves(&case);
            let done = ctl(&case, &["upgrade", "--binary", next.to_str().unwrap()]);
            assert!(done.err.contains("not upgraded"), "{stage}: {}", done.err);
            goes_on();
        }
        for message in MESSAGES.iter().filter(|message| **message != "serves") {
            let old = upgrade(&case, message, "new");
            goes_on();
            assert_eq!(server(&case), Some(old), "{message}: {}", daemon.log());
        }
        serves(&case);
        let second = case.replace(daemon);
        serves(&case);
        let third = case.replace(second);
        serves(&case);
        third
    });
    assert_eq!(process(&case), program);
    ends(daemon, program);
}

/// The new server has opened the first disk when the old one refuses to hand the second one over.
/// It ends at once, because it has taken no request that waits for the program.
#[test]
fn a_new_server_that_is_not_the_owner_takes_no_request() {
    let case = copied();
    let config = case.folder.join("both.toml");
    let (image, socket) = (case.top.display(), case.socket.display());
    let other = case.folder.join("other");
    let text = format!(
        "[[disk]]\nimage = \"{image}\"\nvhost-user = \"{socket}\"\n\
         [[disk]]\nname = \"memory\"\nimage = \"ram:1M\"\nvhost-user = {other:?}\n"
    );
    std::fs::write(&config, text).unwrap();
    let mut daemon = Daemon::start(&mut case.configured(&config));
    daemon.wait_ready();
    let program = process(&case);
    case.under_load(&case.load(), |goes_on| {
        for _ in 0..3 {
            serves(&case);
            let mut new =
                Daemon::start(case.configured(&config).arg("--takeover").arg(&case.control));
            assert_eq!(new.ended(SOON).code(), Some(1), "{}", new.log());
            assert!(new.log().contains("its data are in the memory"), "{}", new.log());
            goes_on();
        }
        serves(&case);
    });
    assert_eq!(process(&case), program);
    let log = daemon.stop();
    assert_eq!(log.matches("served again").count(), 3, "{log}");
    assert!(!log.contains("killing it"), "{log}");
    until("the program has ended", SOON, || !is_running(program));
}

/// The places of these writes are in no table of the program before a flush, which this cache mode
/// ignores.
#[test]
fn what_no_flush_has_covered_is_there_after_a_hand_over() {
    let case = copied();
    let unsafe_mode = ["--cache", "unsafe"];
    let mut daemon = Daemon::start(case.command().args(unsafe_mode));
    daemon.wait_ready();
    let program = process(&case);
    let (mut guest, mut written) = (Guest::connect(&case.socket), Written(Vec::new()));
    for _ in 0..3 {
        written.another(&mut guest);
        written.another(&mut guest);
        daemon = case.replace_by(daemon, case.takeover().args(unsafe_mode));
        written.check(&mut guest);
    }
    drop(guest);
    ends(daemon, program);

    let daemon = case.serve();
    let program = process(&case);
    let mut guest = Guest::connect(&case.socket);
    written.check(&mut guest);
    drop(guest);
    ends(daemon, program);
}

/// Serves the disk of a program before another one, and hands both over while the other one is
/// under load. The message ends the program. `work`: with a guest of the program's disk, and the
/// result of the upgrade.
fn program_dies(message: &str, before: impl FnOnce(&mut Guest), after: impl FnOnce(Guest, &str)) {
    let (case, other) = (copied(), Case::new());
    let disk = |case: &Case, name: &str| {
        let (image, socket) = (case.top.display(), case.socket.display());
        format!("[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\nvhost-user = \"{socket}\"\n")
    };
    let config = case.folder.join("both.toml");
    std::fs::write(&config, disk(&case, "program") + &disk(&other, "other")).unwrap();
    let mut daemon = Daemon::start(case.configured(&config).args(["--sandbox", "off"]));
    daemon.wait_ready();
    let mut guest = Guest::connect(&case.socket);
    before(&mut guest);
    let pid = case.folder.join("pid");
    let between = between(&case, message, pid.to_str().unwrap());
    let last = other.under_load(&other.load(), |goes_on| {
        serves(&case);
        let done = ctl(&case, &["upgrade", "--binary", between.to_str().unwrap()]);
        after(guest, &(done.out + &done.err));
        serves(&case);
        goes_on();
        server(&case).unwrap()
    });
    assert!(!is_running(process(&case)));
    if last as u32 == daemon.pid() {
        daemon.stop();
    } else {
        assert!(daemon.ended(SOON).success(), "{}", daemon.log());
        end_server(last);
    }
    other.is_clean();
}

/// All places are durable: the next server has the disk, without its program.
#[test]
fn a_program_that_dies_during_a_hand_over_hurts_its_own_disk() {
    for message in ["take", "given", "took", "commit"] {
        let before = |guest: &mut Guest| {
            assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
            assert_eq!(guest.flush(), status::OK);
        };
        program_dies(message, before, |mut guest, done| {
            assert!(done.contains("serves the disks"), "{message}: {done}");
            assert_eq!(guest.read(0, 4096), Err(status::IOERR), "{message}");
        });
    }
}

/// A server that continued the disk would report success for flushes that cover lost writes.
#[test]
fn a_program_that_dies_before_its_last_flush_ends_its_own_disk() {
    let before = |guest: &mut Guest| assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    program_dies("take", before, |guest, done| {
        assert!(done.contains("disk \"program\" could not be flushed, and has ended"), "{done}");
        drop(guest);
    });
}

/// The configuration of the next server has another image. It ends the program as its owner, even
/// if the program does not end by itself.
#[test]
fn a_program_that_the_next_server_does_not_use_ends() {
    let case = Case::new();
    let body = "echo $$ >\"${0%/*}/pid\"\n\
                printf '%s\\n' 'blockyard-map 1' 'size 4096' 'granule 4096' ready\n\
                exec sleep infinity";
    let program = format!("exec:{}", script(&case, "program", body).display());
    let config = |name: &str, image: &str| {
        let (path, socket) = (case.folder.join(name), case.socket.display());
        let text =
            format!("[[disk]]\nname = \"a\"\nimage = \"{image}\"\nvhost-user = \"{socket}\"\n");
        std::fs::write(&path, text).unwrap();
        path
    };
    // In a sandbox a server may send no signals.
    let command = |config: &Path| {
        let mut command = case.configured(config);
        command.args(["--sandbox", "off"]);
        command
    };
    let mut daemon = Daemon::start(&mut command(&config("old", &program)));
    daemon.wait_ready();
    let program = process(&case);
    let image = case.folder.image("image", MIB);
    let mut next = command(&config("new", &image.display().to_string()));
    let daemon = case.replace_by(daemon, next.arg("--takeover").arg(&case.control));
    let mut guest = Guest::connect(&case.socket);
    Written(Vec::new()).another(&mut guest);
    until("the program has ended", SOON, || !is_running(program));
    drop(guest);
    daemon.stop();
}

#[test]
fn a_program_of_a_renamed_disk_does_not_run_twice() {
    let case = copied();
    let config = |file: &str, name: &str| {
        let (path, socket) = (case.folder.join(file), case.socket.display());
        let image = case.top.display();
        let text =
            format!("[[disk]]\nname = {name:?}\nimage = \"{image}\"\nvhost-user = \"{socket}\"\n");
        std::fs::write(&path, text).unwrap();
        path
    };
    let mut daemon = Daemon::start(&mut case.configured(&config("old", "a")));
    daemon.wait_ready();
    let program = process(&case);
    let mut guest = Guest::connect(&case.socket);
    let mut written = Written(Vec::new());
    written.another(&mut guest);
    let mut next = case.configured(&config("new", "b"));
    let mut next = Daemon::start(next.arg("--takeover").arg(&case.control));
    assert!(!next.ended(SOON).success());
    assert!(next.log().contains("its program runs for disk \"a\""), "{}", next.log());
    assert_eq!(process(&case), program, "no other one has started");
    written.another(&mut guest);
    drop(guest);
    ends(daemon, program);
}

/// A program that has sent a part of a line, and will send the rest to the next server.
#[test]
fn half_a_line_is_handed_over() {
    let case = Case::new();
    let lines = case.folder.join("lines.py");
    std::fs::write(&lines, HALF_A_LINE).unwrap();
    let (data, lines) = (case.folder.join("base.img"), lines.display());
    let body = format!("exec python3 -IS {lines} {}", data.display());
    let image = format!("exec:{}", script(&case, "lines", &body).display());
    let case = Case { top: image.into(), ..case };
    let bytes = std::fs::read(data).unwrap();
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    assert!(guest.read(0, 4096).unwrap() == bytes[..4096]);
    let daemon = case.replace(daemon);
    assert!(guest.read(8, 4096).unwrap() == bytes[4096..8192]);
    // The answer to the invalidation is the first line that makes the program answer this.
    assert!(guest.read(16, 4096).unwrap() == bytes[8192..12288]);
    drop(guest);
    daemon.stop();
}

/// Answers the third question after an `invalidated`, of which the `invalidate` is sent in two
/// parts.
const HALF_A_LINE: &str = r#"
import sys

def say(text):
    sys.stdout.write(text)
    sys.stdout.flush()

say(f"blockyard-map 1\nsize 16384\ngranule 4096\ndata w {sys.argv[1]}\nready\n")
said, was_done, asked = 0, False, []
for line in sys.stdin:
    word, *rest = line.split()
    if word == "flush":
        say(f"ok {rest[0]}\n")
    elif word == "invalidated":
        was_done = True
    else:
        number, how, offset, length = rest
        asked.append(f"ok {number} 4096 at 0 {offset}\n")
        said += 1
        if said == 1:
            say(asked.pop() + "invali")
        elif said == 2:
            say("date 0 4096\n" + asked.pop())
    if was_done:
        say("".join(asked))
        asked.clear()
"#;
