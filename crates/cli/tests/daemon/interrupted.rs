//! A server that is killed in the middle of its work, under verified load on one disk: while other
//! disks are added, removed and changed, while it replays a journal, and in the middle of a message
//! of a front end. The next server starts, and the client reads each answered write.
//!
//! `BLOCKYARD_KILLS=N` sets the number of kills of each test.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{Data, request, status};
use blockyard_storage::sim::Rng;
use vhost::vhost_user::message::FrontendReq;

use crate::common::{
    BLOCKYARD, Daemon, Folder, SOON, Signal, StateFolder, TOOL, blockyard, end_of, run, tool,
    tool_command,
};
use crate::guest::{Guest, base_bytes, pattern, write_base};
use crate::handover::MORE;
use crate::killed::{Over, kills};

const SIZE: usize = 24 << 20;
const BLOCK: usize = 4096;
/// Kills come after less than this many writes more than before the work. The work takes the time
/// of 150 to 450 writes.
const LATEST: u64 = 500;

/// Two overlays of a raw base, and a configuration file. The first one has the load.
struct Host {
    folder: Folder,
    state: StateFolder,
    daemon: Option<Daemon>,
}

impl Host {
    fn new(format: &str) -> Self {
        let folder = Folder::new();
        write_base(&folder.join("base"), SIZE);
        for name in ["busy", "other"] {
            let image = folder.join(name).with_extension(format);
            let make = ["image", "create", "-q", "-f", format, "-F", "raw", "-b", "base"];
            blockyard(make.iter().copied().chain([image.to_str().unwrap()])).good();
        }
        std::fs::create_dir(folder.join("conf.d")).unwrap();
        let host = Host { folder, state: StateFolder::new(), daemon: None };
        host.configure(None);
        host
    }

    fn image(&self, name: &str) -> PathBuf {
        ["qcow2", "cow"]
            .map(|format| self.folder.join(name).with_extension(format))
            .into_iter()
            .find(|path| path.exists())
            .unwrap()
    }

    fn keys(&self, name: &str) -> [String; 3] {
        let value = |key: &str, path: &Path| format!("{key}={:?}", path.display().to_string());
        let (image, socket) = (self.image(name), self.socket(name));
        [format!("name={name:?}"), value("image", &image), value("vhost-user", &socket)]
    }

    /// Writes the configuration file. `other`: more keys of the other disk. None: it has only one.
    fn configure(&self, other: Option<&str>) {
        let mut text = format!("[[disk]]\n{}\n", self.keys("busy").join("\n"));
        if let Some(more) = other {
            text += &format!("[[disk]]\n{}\n{more}\n", self.keys("other").join("\n"));
        }
        std::fs::write(self.folder.join("toml"), text).unwrap();
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.folder.join(name).with_extension("s")
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.arg("serve").arg("--config").arg(self.folder.join("toml"));
        command.arg("--api").arg(self.folder.join("api"));
        command.arg("--state-folder").arg(self.state.path());
        command
    }

    /// Starts a server. Tries again while the kernel cancels requests of a killed one, which has
    /// the lock until then.
    fn start(&mut self) {
        let begin = Instant::now();
        loop {
            let mut daemon = Daemon::start(&mut self.command(BLOCKYARD));
            let (is_ready, log) = (daemon.became_ready(), daemon.log());
            if is_ready && !log.contains("are not served") {
                self.daemon = Some(daemon);
                return;
            }
            assert!(log.contains("is in use by"), "not about a lock: {log}");
            assert!(begin.elapsed() < SOON, "the lock is still there: {log}");
        }
    }

    fn kill(&mut self) {
        self.daemon.take().unwrap().kill();
    }

    fn serves(&self) {
        let daemon = self.daemon.as_ref().unwrap();
        daemon.until_served_more_than(daemon.served("write", "busy") + MORE, "write", "busy");
    }

    fn ctl(&self, arguments: &[&str]) -> Command {
        let mut ctl = Command::new(BLOCKYARD);
        ctl.arg("ctl").arg("--api").arg(self.folder.join("api")).args(arguments);
        ctl
    }

    #[track_caller]
    fn good(&self, arguments: &[&str]) {
        run(&mut self.ctl(arguments), TOOL).good();
    }

    /// Begins a command that fails if the server is killed.
    fn begin(&self, arguments: &[&str]) -> Child {
        self.ctl(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Removes what the API has written into the folder of the configuration.
    fn forget_changes(&self) {
        for entry in std::fs::read_dir(self.folder.join("conf.d")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            assert!(["90-ctl-other.toml", "90-ctl-other.new"].contains(&&*name), "{name}");
            std::fs::remove_file(path).unwrap();
        }
    }

    fn load(&self) -> LoadOptions {
        LoadOptions {
            rw: Pattern::Randrw,
            depth: 16,
            runtime: 3600.0,
            flush_every: 200,
            verify: true,
            reconnect: true,
            ..LoadOptions::for_socket(self.socket("busy"))
        }
    }

    /// Runs `work` under verified load on the first disk. In the end the images are clean, and
    /// neither a journal nor another file is left.
    fn under_load(mut self, work: impl FnOnce(&mut Self)) {
        self.start();
        let load = self.load();
        let report = std::thread::scope(|scope| {
            let client = scope.spawn(|| measure(&load));
            let over = Over(&load.over);
            self.serves();
            work(&mut self);
            self.serves();
            assert!(!client.is_finished(), "the load ended early");
            drop(over);
            client.join().unwrap().unwrap()
        });
        assert_eq!((report.errors, report.first_error), (0, None));
        assert!(report.verified_blocks > 16, "{} blocks: no load", report.verified_blocks);
        self.daemon.take().unwrap().stop();
        self.forget_changes();
        assert_eq!(self.state.journals(), 0, "a journal is left after a clean end");
        let mut left: Vec<_> = std::fs::read_dir(&*self.folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let images = ["busy", "other"].map(|name| self.image(name));
        let names = images.each_ref().map(|image| image.file_name().unwrap().to_str().unwrap());
        assert_eq!(left, ["base", names[0], "conf.d", names[1], "toml"]);
        images.iter().for_each(|image| is_clean(image));
        assert!(std::fs::read(self.folder.join("base")).unwrap() == base_bytes(SIZE));
    }
}

fn is_clean(image: &Path) {
    if image.extension().is_some_and(|extension| extension == "qcow2") {
        tool("qemu-img", ["check", image.to_str().unwrap()]).good();
    } else {
        blockyard(["image", "check", image.to_str().unwrap()]).good();
    }
}

/// What an operator does to the other disk. The second value: the disk is served before.
const CHANGES: [(&str, bool); 7] = [
    ("add", false),
    ("add --persist", false),
    ("remove", true),
    ("remove --persist", true),
    ("reload: added", false),
    ("reload: changed", true),
    ("reload: removed", true),
];

/// Blocks that the other disk's guest writes in each round.
fn blocks(round: u64) -> impl Iterator<Item = u64> {
    (0..40).map(move |n| (round * 40 + n) * 37 % (SIZE / BLOCK) as u64)
}

fn begin_change(host: &Host, change: &str) -> Child {
    let keys = host.keys("other");
    let add = |more: &[&str]| {
        host.begin(&[&["add"], more, &keys.each_ref().map(String::as_str)].concat())
    };
    let reload = |other: Option<&str>| {
        host.configure(other);
        host.begin(&["reload"])
    };
    match change {
        "add" => add(&[]),
        "add --persist" => add(&["--persist"]),
        "remove" => host.begin(&["remove", "other", "--force"]),
        "remove --persist" => host.begin(&["remove", "other", "--force", "--persist"]),
        "reload: added" => reload(Some("")),
        "reload: changed" => reload(Some("queues = 2")),
        _ => reload(None),
    }
}

/// Each change begins on a server of its own state, and ends with a kill after a seeded
/// number of answers. The next server can serve the other disk, which has each answered write.
#[test]
fn a_kill_while_disks_are_added_removed_and_reloaded_leaves_nothing_in_the_way() {
    let (count, mut rng) = (kills(CHANGES.len() as u64), Rng::new(20));
    Host::new("qcow2").under_load(|host| {
        for round in 0..count {
            let (change, is_served) = CHANGES[round as usize % CHANGES.len()];
            host.forget_changes();
            host.configure(is_served.then_some(""));
            host.good(&["reload"]);
            let guest = is_served.then(|| {
                let mut guest = Guest::connect(&host.socket("other"));
                for block in blocks(round) {
                    let data = pattern(round << 32 | block, BLOCK);
                    assert_eq!(guest.write(block * 8, &data), status::OK);
                }
                guest
            });
            let answered = host.daemon.as_ref().unwrap().served("write", "busy");
            let mut work = begin_change(host, change);
            let daemon = host.daemon.as_ref().unwrap();
            daemon.until_served_more_than(answered + rng.below(LATEST), "write", "busy");
            host.kill();
            end_of(&mut work, TOOL);
            drop(guest);
            host.start();
            host.serves();
            // The operator tries again. What the killed server had of the disk is no obstacle.
            host.forget_changes();
            host.configure(Some(""));
            host.good(&["reload"]);
            let mut guest = Guest::connect(&host.socket("other"));
            for block in blocks(round).filter(|_| is_served) {
                let found = guest.read(block * 8, BLOCK).unwrap();
                assert!(found == pattern(round << 32 | block, BLOCK), "{change}: block {block}");
            }
            guest.leave();
        }
    });
}

/// Starts a server that is killed at the n-th call of io_uring_enter of one of its threads: strace
/// counts them. Returns how it ended, or None if it became ready before. The killed server before
/// may still have its locks.
fn killed_at(host: &Host, call: u64) -> Option<ExitStatus> {
    let mut strace = tool_command("strace");
    strace.args(["-D", "-qq", "-f", "-o", "/dev/null", "-e", "trace=io_uring_enter"]);
    strace.arg("-e").arg(format!("inject=io_uring_enter:signal=KILL:when={call}"));
    let serve = host.command(BLOCKYARD);
    let mut daemon = Daemon::start(strace.arg(BLOCKYARD).args(serve.get_args()));
    if daemon.became_ready() {
        daemon.kill();
        return None;
    }
    let (status, log) = (daemon.ended(SOON), daemon.log());
    let is_killed = status.signal() == Some(Signal::KILL.as_raw());
    assert!(is_killed || log.contains("is in use by"), "call {call}: {status}: {log}");
    assert!(!is_killed || !log.contains("ERROR"), "killed at call {call}: {log}");
    Some(status)
}

fn killed_while_replaying(format: &str) {
    let mut rng = Rng::new(format.len() as u64);
    Host::new(format).under_load(|host| {
        // Calls of the start, with a replay: the opening thread has about 30.
        let mut call = 1 + rng.below(3);
        let (mut left, mut killed) = (kills(6), 0);
        while left > 0 {
            host.serves();
            host.kill();
            for _ in 0..3 {
                left = left.saturating_sub(1);
                call = match killed_at(host, call) {
                    Some(status) => {
                        killed += u64::from(status.signal().is_some());
                        call + 1 + rng.below(4)
                    }
                    None => 1 + rng.below(3),
                };
            }
            host.start();
        }
        assert!(killed > 0, "no server was killed");
    });
}

#[test]
fn kills_during_the_replay_of_a_qcow2_image_lose_no_answered_write() {
    killed_while_replaying("qcow2");
}

#[test]
fn kills_during_the_replay_of_a_cow_file_lose_no_answered_write() {
    killed_while_replaying("cow");
}

/// A message of a front end with a running ring: its bytes and its descriptor.
pub struct Message {
    request: FrontendReq,
    bytes: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Message {
    fn new(request: FrontendReq, body: &[u64], descriptor: Option<OwnedFd>) -> Self {
        // Version 1, and a request for an acknowledgement.
        let head = [request as u32, 1 | 8, body.len() as u32 * 8];
        let bytes = head.iter().flat_map(|word| word.to_le_bytes());
        let bytes = bytes.chain(body.iter().flat_map(|word| word.to_le_bytes())).collect();
        Message { request, bytes, descriptor }
    }

    /// Messages that change what the server has of a session.
    pub fn all(guest: &mut Guest) -> [Self; 4] {
        let region = guest.session.link.memory.region();
        let memory = format!("/proc/self/fd/{}", region.mmap_handle);
        let memory = std::fs::File::options().read(true).write(true).open(memory).unwrap();
        let table = [
            1,
            region.guest_phys_addr,
            region.memory_size,
            region.userspace_addr,
            region.mmap_offset,
        ];
        let call = guest.queue().call_eventfd().as_fd().try_clone_to_owned().unwrap();
        [
            Message::new(FrontendReq::SET_MEM_TABLE, &table, Some(memory.into())),
            Message::new(FrontendReq::SET_VRING_CALL, &[0], Some(call)),
            Message::new(FrontendReq::SET_VRING_ENABLE, &[1 << 32], None),
            Message::new(FrontendReq::GET_FEATURES, &[], None),
        ]
    }

    /// Lengths of the part that arrives first. A header comes in one part with its descriptor.
    pub fn cuts(&self) -> impl Iterator<Item = usize> {
        let (len, least) = (self.bytes.len(), if self.descriptor.is_some() { 12 } else { 1 });
        [1, 11, 12, 13, len - 1].into_iter().filter(move |cut| (least..len).contains(cut))
    }

    /// Sends the first bytes, and the descriptor.
    pub fn begin(&self, guest: &Guest, cut: usize) {
        let fds: Vec<_> = self.descriptor.iter().map(AsFd::as_fd).collect();
        guest.session.link.connection.send_bytes(&self.bytes[..cut], &fds).unwrap();
    }

    /// Sends the other bytes, and takes the answer.
    pub fn end(&self, guest: &Guest, cut: usize) {
        let connection = &guest.session.link.connection;
        connection.send_bytes(&self.bytes[cut..], &[]).unwrap();
        let (mut socket, mut answer) = (connection.socket(), [0; 20]);
        socket.set_read_timeout(Some(SOON)).unwrap();
        let what = format!("{:?} after {cut} bytes", self.request);
        socket.read_exact(&mut answer).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(answer[..4], (self.request as u32).to_le_bytes(), "{what}");
        let value = u64::from_le_bytes(answer[12..].try_into().unwrap());
        assert!(value == 0 || self.request == FrontendReq::GET_FEATURES, "{what}: {value}");
    }
}

/// The front end has writes in flight. It connects again, and finds all of them done once.
#[test]
fn a_kill_in_the_middle_of_a_message_ends_no_request() {
    const DEPTH: u16 = 8;
    let mut host = Host::new("qcow2");
    host.start();
    let mut guest = Guest::connect(&host.socket("busy"));
    let messages = Message::all(&mut guest);
    let cuts = messages.iter().flat_map(|message| message.cuts().map(move |cut| (message, cut)));
    let cuts: Vec<_> = cuts.collect();
    let count = kills(5) as usize;
    for (round, (message, cut)) in cuts.iter().cycle().step_by(3).take(count).enumerate() {
        let data = |slot: u16| pattern((round as u64) << 16 | u64::from(slot), BLOCK);
        let sector = |slot: u16| (round as u64 * 64 + u64::from(slot) * 17) % 4096 * 8;
        message.begin(&guest, *cut);
        for slot in 0..DEPTH {
            guest.queue().write_data(slot, &data(slot));
            guest.queue().submit(slot, request::OUT, sector(slot), Data::ToDevice(BLOCK as u32));
        }
        guest.queue().publish().unwrap();
        host.kill();
        host.start();
        guest.session.restart().unwrap();
        let (mut done, begin) = (0, Instant::now());
        while done < DEPTH {
            match guest.queue().reap().unwrap() {
                Some((_, answer)) => {
                    assert_eq!(answer, status::OK);
                    done += 1;
                }
                None => {
                    assert!(begin.elapsed() < SOON, "{done} answers in round {round}");
                    // A kill can take the signal of an answer with it.
                    guest.queue().sleep(Some(Duration::from_millis(20))).unwrap();
                }
            }
        }
        for slot in 0..DEPTH {
            assert!(guest.read(sector(slot), BLOCK).unwrap() == data(slot), "round {round}");
        }
    }
    drop(guest);
    host.daemon.take().unwrap().stop();
    assert_eq!(host.state.journals(), 0, "a journal is left after a clean end");
    is_clean(&host.image("busy"));
}
