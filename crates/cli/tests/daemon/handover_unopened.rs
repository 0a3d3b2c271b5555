//! Disks that are not open: their storage does not answer, another program has locked their image,
//! or the configuration has a mistake. Upgrades leave them to the new server. After a crash they
//! delay no other disk.

use std::fs::File;
use std::io::copy;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use blockyard_driver::status;
use blockyard_ring::host::{self, Lock};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{BLOCKYARD, Daemon, Finished, SOON, until, until_disconnected, until_readable};
use crate::guest::{Guest, pattern};
use crate::handover::{Case, ctl, end_server, is_running, script};
use crate::holder::{Keeper, keep_command};

const SIZE: usize = 1 << 20;

/// Storage that accepts connections and does not answer, before [`Storage::answer`].
pub struct Storage {
    server: Daemon,
    real: PathBuf,
    listener: UnixListener,
}

impl Storage {
    /// The storage is at the socket `slow`, and the export `far` of a server at the socket `far`.
    pub fn new(case: &Case) -> Self {
        let [image, real, socket] = ["far.img", "far", "slow"].map(|name| case.folder.join(name));
        std::fs::write(&image, pattern(9, SIZE)).unwrap();
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg(image).args(["--name", "far", "--sandbox", "off", "--nbd"]);
        let mut server = Daemon::start(command.arg(format!("unix:{}", real.display())));
        server.wait_ready();
        Storage { server, real, listener: UnixListener::bind(socket).unwrap() }
    }

    /// Waits for the connection of a server that opens the disk.
    pub fn asked(&self) -> UnixStream {
        until_readable("the server asks its storage", &self.listener);
        self.listener.accept().unwrap().0
    }

    /// Answers on this connection and on all later ones.
    pub fn answer(self, first: UnixStream) -> Daemon {
        let Storage { server, real, listener } = self;
        let relay = move |connection: UnixStream| {
            // The server may have ended.
            let Ok(storage) = UnixStream::connect(&real) else { return };
            let (connection, storage) = (Arc::new(connection), Arc::new(storage));
            for (from, to) in [(&connection, &storage), (&storage, &connection)] {
                let (from, to) = (from.clone(), to.clone());
                std::thread::spawn(move || {
                    let _ = copy(&mut &*from, &mut &*to);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        };
        std::thread::spawn(move || {
            relay(first);
            listener.incoming().map_while(Result::ok).for_each(relay);
        });
        server
    }
}

/// Starts a server with the disk `good`, which has a client.
fn serve(case: &Case) -> (Daemon, Guest) {
    let [image, socket] = ["good.img", "good.s"].map(|name| case.folder.join(name));
    File::create(&image).unwrap().set_len(SIZE as u64).unwrap();
    let config = case.folder.join("config.toml");
    let text = format!("[[disk]]\nname = \"good\"\nimage = {image:?}\nvhost-user = {socket:?}\n");
    std::fs::write(&config, text).unwrap();
    let mut daemon = Daemon::start(case.configured(&config).args(["--sandbox", "off"]));
    daemon.wait_ready();
    let mut guest = Guest::connect(&socket);
    works(&mut guest, 1);
    (daemon, guest)
}

fn works(guest: &mut Guest, fill: u8) {
    assert_eq!(guest.write(8, &[fill; 4096]), status::OK);
    assert_eq!(guest.read(8, 4096).unwrap(), [fill; 4096]);
}

/// Adds a disk on the storage. Returns when the storage or a failure has ended the call.
fn add(case: &Case) -> Finished {
    let [slow, socket] = ["slow", "slow.s"].map(|name| case.folder.join(name));
    let image = format!("image=nbd+unix:///far?socket={}", slow.display());
    let socket = format!("vhost-user={}", socket.display());
    ctl(case, &["add", "name=slow", &image, &socket, "nbd-timeout=300"])
}

fn state(case: &Case, disk: &str) -> Option<String> {
    let disks = ctl(case, &["list", "--json"]);
    let disks: serde_json::Value = serde_json::from_str(&disks.out).ok()?;
    let row = disks["disks"].as_array()?.iter().find(|row| row["name"] == disk)?;
    Some(row["state"].as_str()?.into())
}

fn is_served(case: &Case) {
    until("the disk is served", SOON, || state(case, "slow").as_deref() == Some("serving"));
    let mut guest = Guest::connect(&case.folder.join("slow.s"));
    assert_eq!(guest.read(8, 4096).unwrap(), pattern(9, SIZE)[8 * 512..][..4096]);
    guest.leave();
}

#[test]
fn a_disk_whose_storage_hangs_is_opened_by_the_new_server() {
    let case = Case::new();
    let storage = Storage::new(&case);
    let (daemon, mut guest) = serve(&case);
    let old = daemon.pid() as i32;
    let second = std::thread::scope(|scope| {
        let added = scope.spawn(|| add(&case));
        let first = storage.asked();
        assert_eq!(state(&case, "slow").as_deref(), Some("opening"));
        let shown = ctl(&case, &["upgrade", "--json"]).good();
        until("the old server has ended", SOON, || !is_running(old));
        works(&mut guest, 2);
        assert!(!added.join().unwrap().status.success(), "its server has ended");
        daemon.wait_log("it is not open yet: the new server opens it");
        drop(first);
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown["disks"].as_array().unwrap().len(), 1, "{shown}");
        shown["pid"].as_u64().unwrap() as i32
    });
    // Nothing waits for this storage, also in the next upgrade.
    let asked = storage.asked();
    assert_eq!(state(&case, "slow").as_deref(), Some("opening"));
    let shown = ctl(&case, &["upgrade", "--json"]).good();
    drop(asked);
    until("the second server has ended", SOON, || !is_running(second));
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let asked = storage.asked();
    works(&mut guest, 3);
    let server = storage.answer(asked);
    is_served(&case);
    works(&mut guest, 4);
    guest.leave();
    end_server(shown["pid"].as_u64().unwrap() as i32);
    server.stop();
}

/// The storage answers while the new server has the other disk.
#[test]
fn a_failed_upgrade_leaves_a_disk_whose_storage_hangs_to_the_old_server() {
    let case = Case::new();
    let storage = Storage::new(&case);
    let (daemon, mut guest) = serve(&case);
    let [given, end] = ["given", "end"].map(|name| case.folder.join(name));
    let half = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/half_server.py");
    let body = format!("python3 -IS {half} good took\ntouch {given:?}\nread < {end:?}\nexit 1");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &end, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let program = script(&case, "half", &body);
    let server = std::thread::scope(|scope| {
        let added = scope.spawn(|| add(&case));
        let asked = storage.asked();
        let upgrade =
            scope.spawn(|| ctl(&case, &["upgrade", "--binary", program.to_str().unwrap()]));
        until("the new server has the other disk", SOON, || given.exists());
        let server = storage.answer(asked);
        std::fs::write(&end, "\n").unwrap();
        let done = upgrade.join().unwrap();
        assert!(done.err.contains("not upgraded"), "{}", done.err);
        added.join().unwrap().good();
        server
    });
    works(&mut guest, 2);
    is_served(&case);
    guest.leave();
    daemon.stop();
    server.stop();
}

/// A server under a holder with the disks `a` and `b`, each with a client.
struct Kept {
    case: Case,
    holder: Daemon,
    guests: [Guest; 2],
}

impl Kept {
    fn new() -> Self {
        let case = Case::new();
        let disk = |name: &str| {
            let image = case.folder.image(&format!("{name}.img"), SIZE as u64);
            let socket = case.folder.join(format!("{name}.s"));
            format!("[[disk]]\nname = \"{name}\"\nimage = {image:?}\nvhost-user = {socket:?}\n")
        };
        let config = case.folder.join("config.toml");
        std::fs::write(&config, disk("a") + &disk("b")).unwrap();
        let holder = keep_command(&case, Keeper::Holder, &mut case.configured(&config));
        let mut guests = ["a.s", "b.s"].map(|socket| Guest::connect(&case.folder.join(socket)));
        guests.iter_mut().for_each(|guest| works(guest, 1));
        Kept { case, holder, guests }
    }

    fn config(&self) -> PathBuf {
        self.case.folder.join("config.toml")
    }

    fn upgrade(&self) {
        self.holder.upgrade_kept(|| ctl(&self.case, &["upgrade", "--json"]).good());
    }

    /// Gives `a` a number of queues that its session does not have, and kills the server. Returns
    /// the configuration of before.
    fn kill_with_a_mistake(&self) -> String {
        let good = std::fs::read_to_string(self.config()).unwrap();
        let name = "name = \"a\"\n";
        let bad = good.replace(name, &format!("{name}queues = 7\n"));
        std::fs::write(self.config(), bad).unwrap();
        self.holder.kill_kept();
        self.holder.wait_log("is configured with 7");
        good
    }

    /// Kills the server. Returns the image of `a`, which this process locks before the next server
    /// starts.
    fn kill_and_lock(&self) -> File {
        let mut server = None;
        until("the server runs", SOON, || {
            server = self.holder.kept();
            server.is_some()
        });
        let image = File::options().read(true).write(true).open(self.case.folder.join("a.img"));
        let image = image.unwrap();
        self.holder.signal(Signal::STOP);
        kill_process(Pid::from_raw(server.unwrap()).unwrap(), Signal::KILL).unwrap();
        until("the image is locked", SOON, || host::lock(&image, Lock::Exclusive).unwrap());
        self.holder.signal(Signal::CONT);
        image
    }

    /// Waits until the API answers, and has the disks in these states.
    fn has(&self, states: [&str; 2]) {
        until(&format!("{states:?}"), SOON, || {
            ["a", "b"].map(|disk| state(&self.case, disk)) == states.map(|state| Some(state.into()))
        });
    }
}

#[test]
fn after_a_crash_a_locked_disk_comes_back_by_itself_and_delays_no_other_one() {
    let mut kept = Kept::new();
    let image = kept.kill_and_lock();
    kept.has(["opening", "serving"]);
    let [a, b] = &mut kept.guests;
    works(b, 2);
    let shown = ctl(&kept.case, &["show", "a"]).good();
    assert!(shown.contains("opening"), "{shown}");
    drop(image);
    // Its connection has waited.
    works(a, 3);
    kept.has(["serving", "serving"]);
    let log = kept.holder.log();
    assert!(log.contains("disk \"a\" waits for the lock of its image"), "{log}");
    assert!(!log.contains("are not served"), "{log}");
    kept.guests.into_iter().for_each(Guest::leave);
    kept.holder.stop();
}

/// Its connection moves from server to server.
#[test]
fn an_upgrade_leaves_a_locked_disk_with_a_client_to_the_new_server() {
    let mut kept = Kept::new();
    let image = kept.kill_and_lock();
    kept.has(["opening", "serving"]);
    kept.upgrade();
    kept.has(["opening", "serving"]);
    works(&mut kept.guests[1], 2);
    drop(image);
    kept.guests.iter_mut().for_each(|guest| works(guest, 3));
    kept.has(["serving", "serving"]);
    kept.guests.into_iter().for_each(Guest::leave);
    kept.holder.stop();
    assert!(!kept.case.folder.join("a.s").exists());
}

/// The next configuration gives it the socket of a disk that a call has added.
#[test]
fn a_mistake_in_the_next_configuration_keeps_the_session_of_a_locked_disk() {
    let mut kept = Kept::new();
    let image = kept.kill_and_lock();
    kept.has(["opening", "serving"]);
    let socket = format!("vhost-user={}", kept.case.folder.join("c.s").display());
    ctl(&kept.case, &["add", "name=c", "image=null:1M", &socket]).good();
    let good = std::fs::read_to_string(kept.config()).unwrap();
    std::fs::write(kept.config(), good.replace("/a.s", "/c.s")).unwrap();
    kept.upgrade();
    kept.holder.wait_log("another disk has the socket");
    drop(image);
    std::fs::write(kept.config(), good).unwrap();
    ctl(&kept.case, &["reload"]).good();
    kept.guests.iter_mut().for_each(|guest| works(guest, 3));
    kept.has(["serving", "serving"]);
    kept.guests.into_iter().for_each(Guest::leave);
    kept.holder.stop();
}

/// No server opens it, and each of them passes its session on.
#[test]
fn upgrades_keep_the_session_of_a_disk_with_a_mistake_until_it_is_mended() {
    let mut kept = Kept::new();
    let good = kept.kill_with_a_mistake();
    for fill in [2, 3] {
        let from = kept.holder.log().len();
        kept.upgrade();
        kept.holder.wait_log_after(from, "is configured with 7");
        works(&mut kept.guests[1], fill);
    }
    std::fs::write(kept.config(), good).unwrap();
    ctl(&kept.case, &["reload"]).good();
    kept.guests.iter_mut().for_each(|guest| works(guest, 4));
    kept.has(["serving", "serving"]);
    kept.guests.into_iter().for_each(Guest::leave);
    kept.holder.stop();
    assert!(!kept.case.folder.join("a.s").exists());
}

/// The server before has not opened it.
#[test]
fn an_upgrade_ends_the_session_of_a_disk_that_the_next_configuration_lacks() {
    let mut kept = Kept::new();
    let good = kept.kill_with_a_mistake();
    let only_b = &good[good.rfind("[[disk]]").unwrap()..];
    std::fs::write(kept.config(), only_b).unwrap();
    kept.holder.upgrade_kept(|| {
        let answer = ctl(&kept.case, &["upgrade", "--json"]).good();
        let shown: serde_json::Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(shown["ended"], serde_json::json!(["a"]), "{shown}");
        answer
    });
    until_disconnected(kept.guests[0].session.link.connection.socket());
    assert!(!kept.case.folder.join("a.s").exists());
    works(&mut kept.guests[1], 2);
    // The holder has nothing of it.
    let from = kept.holder.log().len();
    kept.holder.kill_kept();
    kept.holder.wait_log_after(from, "continuing 1 exports");
    works(&mut kept.guests[1], 3);
    let [_, b] = kept.guests;
    b.leave();
    kept.holder.stop();
}

/// Nothing of it is left at the holder, and no file of its socket.
#[test]
fn a_server_ends_with_a_disk_that_is_locked() {
    let kept = Kept::new();
    let _image = kept.kill_and_lock();
    kept.has(["opening", "serving"]);
    kept.holder.stop();
    assert!(!kept.case.folder.join("a.s").exists());
}

/// A reload waits up to 10 minutes for the storage of a new disk.
#[test]
fn a_reload_that_waits_for_storage_is_named_and_delays_no_upgrade() {
    let case = Case::new();
    let storage = Storage::new(&case);
    let (daemon, mut guest) = serve(&case);
    let (old, config) = (daemon.pid() as i32, case.folder.join("config.toml"));
    let [slow, socket] = ["slow", "slow.s"].map(|name| case.folder.join(name));
    let text = std::fs::read_to_string(&config).unwrap();
    let disk = format!(
        "[[disk]]\nname = \"slow\"\nimage = \"nbd+unix:///far?socket={}\"\n\
         vhost-user = {socket:?}\nnbd-timeout = 300\n",
        slow.display()
    );
    std::fs::write(&config, text + &disk).unwrap();
    let new = std::thread::scope(|scope| {
        let reloaded = scope.spawn(|| ctl(&case, &["reload"]));
        let first = storage.asked();
        let refused = ctl(&case, &["reload", "--dry-run"]);
        for part in ["it has waited for ", "disk \"slow\", which is opening (`ctl show slow`)"] {
            assert!(refused.err.contains(part), "{}", refused.err);
        }
        let shown = ctl(&case, &["upgrade", "--json"]).good();
        let reloaded = reloaded.join().unwrap();
        assert!(
            reloaded.out.contains("is still opening after 2 s, and goes on"),
            "{}",
            reloaded.out
        );
        drop(first);
        until("the old server has ended", SOON, || !is_running(old));
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        shown["pid"].as_u64().unwrap() as i32
    });
    works(&mut guest, 2);
    let asked = storage.asked();
    let server = storage.answer(asked);
    is_served(&case);
    guest.leave();
    end_server(new);
    server.stop();
}
