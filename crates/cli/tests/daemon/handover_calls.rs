//! Hand-overs that are refused before a disk pauses, and those that wait for a call of the API that
//! changes the configuration.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockyard_driver::status;

use crate::common::{BLOCKYARD, Daemon, Finished, Gated, SOON, StateFolder, until};
use crate::guest::Guest;
use crate::handover::{Case, ctl, end_server, is_running, script};

/// The reason of a server that refuses a second hand-over.
const ANOTHER_RUNS: &str = "another hand-over runs";

/// Starts a server with the disks `a` and `b`, and a folder `conf.d`. `b` is this image with these
/// keys. Its end needs a flush, because a guest has written to it.
fn serve(case: &Case, image: &str, keys: &str) -> (Daemon, PathBuf) {
    let disk = |name: &str, image: &str| {
        let socket = case.folder.join(format!("{name}.s"));
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = {image:?}\nvhost-user = {socket:?}\n\
             cache = \"writeback\"\n"
        )
    };
    let image_of_a = case.folder.image("a.img", 1 << 20);
    let (a, b) = (disk("a", image_of_a.to_str().unwrap()), disk("b", image));
    let config = case.folder.join("config.toml");
    std::fs::write(&config, format!("{a}{b}{keys}\n")).unwrap();
    std::fs::create_dir(case.folder.join("conf.d")).unwrap();
    let mut daemon = Daemon::start(&mut case.configured(&config));
    daemon.wait_ready();
    let mut guest = Guest::connect(&case.folder.join("b.s"));
    assert_eq!(guest.write(8, &[7; 4096]), status::OK);
    guest.leave();
    (daemon, config)
}

/// Like [`serve`]. The returned storage is that of `b`.
fn serve_gated(case: &Case) -> (Daemon, PathBuf, Gated) {
    let storage = Gated::start(&case.folder, &case.folder.image("b.img", 1 << 20));
    let (daemon, config) = serve(case, &storage.image(), "nbd-timeout = 300");
    (daemon, config, storage)
}

fn is_closing(case: &Case) -> bool {
    ctl(case, &["list"]).good().contains("closing")
}

/// Removes `b`. Calls `meanwhile` when the call has begun. The call writes its file after that,
/// because it waits for the storage.
fn while_removed(case: &Case, storage: &Gated, meanwhile: impl FnOnce()) {
    let kept = case.folder.join("conf.d/90-ctl-b.toml");
    std::thread::scope(|scope| {
        let closed = storage.close();
        let removed = scope.spawn(|| ctl(case, &["remove", "--persist", "--force", "b"]));
        until("the disk is being removed", SOON, || is_closing(case));
        meanwhile();
        assert!(!kept.exists());
        drop(closed);
        removed.join().unwrap().good();
    });
    assert!(kept.exists());
}

/// Upgrades the server. An upgrade that has waited for a call for as long as it may asks to try
/// again later, and one beside another upgrade is refused: both are tried again.
fn upgrade(case: &Case) -> Finished {
    loop {
        let done = ctl(case, &["upgrade", "--json"]);
        let again = ["has not ended", ANOTHER_RUNS];
        if !again.iter().any(|why| done.err.contains(why)) {
            return done;
        }
    }
}

fn names(case: &Case) -> Vec<String> {
    let disks = ctl(case, &["list", "--json"]).good();
    let disks: serde_json::Value = serde_json::from_str(&disks).unwrap();
    let rows = disks["disks"].as_array().unwrap().iter();
    rows.map(|row| row["name"].as_str().unwrap().to_string()).collect()
}

/// The new server would read the configuration of before the call.
#[test]
fn an_upgrade_begins_after_the_call_that_changes_the_configuration() {
    let case = Case::new();
    let (daemon, _, storage) = serve_gated(&case);
    let upgraded = std::thread::scope(|scope| {
        let mut upgraded = None;
        while_removed(&case, &storage, || {
            upgraded = Some(scope.spawn(|| upgrade(&case)));
            // The listener, and the connections of the two calls.
            until("the upgrade has connected", SOON, || sockets_at(&case.api) > 2);
            until("an upgrade waits", SOON, || ctl(&case, &["upgrade"]).err.contains(ANOTHER_RUNS));
        });
        upgraded.unwrap().join().unwrap().good()
    });
    let upgraded: serde_json::Value = serde_json::from_str(&upgraded).unwrap();
    until("the old server has ended", SOON, || !is_running(daemon.pid() as i32));
    assert_eq!(names(&case), ["a"]);
    end_server(upgraded["pid"].as_u64().unwrap() as i32);
}

/// Returns the number of the sockets with this path: the listener, and the server's ends of
/// connections.
fn sockets_at(path: &Path) -> usize {
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    all.lines().filter(|line| line.ends_with(path.to_str().unwrap())).count()
}

/// A server that an operator has started read the configuration before it reached the old one.
#[test]
fn a_take_over_fails_if_a_call_has_changed_the_configuration_meanwhile() {
    let case = Case::new();
    let (daemon, config, storage) = serve_gated(&case);
    let takeover = |config: &Path| {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg("--config").arg(config);
        command.arg("--control").arg(&case.control).arg("--api").arg(&case.api);
        Daemon::start(command.arg("--takeover").arg(&case.control))
    };
    let mut new = None;
    while_removed(&case, &storage, || {
        new = Some(takeover(&config));
        // The new server reads its configuration, then it connects.
        until("the new server has connected", SOON, || sockets_at(&case.control) > 1);
    });
    let mut new = new.unwrap();
    assert!(!new.became_ready(), "{}", new.log());
    assert!(new.log().contains("the configuration has changed"), "{}", new.log());
    assert_eq!(names(&case), ["a"]);
    // The next attempt reads the new configuration.
    let mut old = daemon;
    let mut new = takeover(&config);
    new.wait_ready();
    assert!(old.ended(SOON).success(), "{}", old.log());
    assert_eq!(names(&case), ["a"]);
    new.stop();
}

#[test]
fn a_take_over_during_an_upgrade_learns_why_it_is_refused() {
    let case = Case::new();
    let mut daemon = Daemon::start(case.command().args(["--sandbox", "off"]));
    daemon.wait_ready();
    let pid = case.folder.join("pid");
    let hung = script(
        &case,
        "hung",
        &format!("echo $$ >{pid:?}.tmp; mv {pid:?}.tmp {pid:?}; exec sleep 999"),
    );
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| ctl(&case, &["upgrade", "--binary", hung.to_str().unwrap()]));
        until("the new server has started", SOON, || pid.exists());
        let mut refused = Daemon::start(case.takeover().args(["--sandbox", "off"]));
        assert!(!refused.became_ready());
        let why = format!("the running server keeps its disks: {ANOTHER_RUNS}");
        assert!(refused.log().contains(&why), "{}", refused.log());
        daemon.wait_log("nothing is handed over: another hand-over runs");
        end_server(std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap());
        assert!(upgrade.join().unwrap().err.contains("not upgraded"));
    });
    daemon.stop();
}

/// The old server could not take back an image with a journal in another folder.
#[test]
fn a_new_server_with_another_folder_of_journals_is_refused() {
    let case = Case::new();
    let mut daemon = case.serve();
    let other = PathBuf::from(format!("/dev/shm/by-other-{}", std::process::id()));
    let mut refused = Daemon::start(case.takeover().arg("--state-folder").arg(&other));
    assert!(!refused.became_ready(), "{}", refused.log());
    let _ = std::fs::remove_dir(&other);
    let why = format!("not in {}: a restart changes that", other.display());
    assert!(refused.log().contains(&why), "{}", refused.log());
    daemon.wait_log(&why);
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(8, &[7; 4096]), status::OK);
    guest.leave();
    assert!(daemon.running());
    daemon.stop();
}

/// The old server has no journals, so it would not find those of the new one.
#[test]
fn a_server_without_journals_takes_back_what_a_new_one_with_journals_has_served() {
    let case = Case::new();
    let [pid, fifo] = ["pid", "fifo"].map(|name| case.folder.join(name));
    let state = StateFolder::new();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let mut command = case.command();
    command.args(["--sandbox", "off"]).env("BLOCKYARD_STATE_FOLDER", "/proc/none");
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    daemon.wait_log("without journals");
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &[1; 4096]), status::OK);
    let proxy = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/between.py");
    let body = format!(
        "echo $$ >{pid:?}\nexec python3 -IS {proxy} took wait:{} {BLOCKYARD} \"$@\" --state-folder {:?}",
        fifo.display(),
        state.path()
    );
    let program = script(&case, "slow", &body);
    std::thread::scope(|scope| {
        let upgrade =
            scope.spawn(|| ctl(&case, &["upgrade", "--binary", program.to_str().unwrap()]));
        until("the new server has the disk", SOON, || fifo.with_extension("held").exists());
        // The new server answers: it changes metadata.
        for number in 1..8 {
            assert_eq!(guest.write(number << 11, &[number as u8; 4096]), status::OK);
        }
        let new: i32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
        let new = rustix::process::Pid::from_raw(new).unwrap();
        rustix::process::kill_process(new, rustix::process::Signal::KILL).unwrap();
        std::fs::write(&fifo, "").unwrap();
        assert!(upgrade.join().unwrap().err.contains("not upgraded"));
    });
    for number in 1..8 {
        assert_eq!(guest.read(number << 11, 4096), Ok(vec![number as u8; 4096]));
    }
    assert_eq!(guest.write(0, &[2; 4096]), status::OK);
    // After an upgrade the journals begin.
    let new = case.replace_by(daemon, case.takeover().arg("--state-folder").arg(state.path()));
    assert_eq!(guest.write(9 << 11, &[9; 4096]), status::OK);
    assert_eq!(state.journals(), 1, "{}", new.log());
    guest.leave();
    new.stop();
    case.is_clean();
}

/// The old server ends its disk after the new one has begun to serve, and that takes some time.
#[test]
fn a_disk_with_another_name_waits_until_the_old_server_has_ended_its_own() {
    let case = Case::new();
    let image = case.folder.image("b.img", 1 << 20);
    let (daemon, config) = serve(&case, image.to_str().unwrap(), "filters = [\"delay:flush=2s\"]");
    let text = std::fs::read_to_string(&config).unwrap();
    let renamed = text.replace("name = \"b\"", "name = \"c\"").replace("b.s\"", "c.s\"");
    std::fs::write(&config, renamed).unwrap();
    let upgraded = ctl(&case, &["upgrade", "--json"]).good();
    let upgraded: serde_json::Value = serde_json::from_str(&upgraded).unwrap();
    until("the old server has ended", SOON, || !is_running(daemon.pid() as i32));
    // The new server tries again until it can lock the image.
    until("the disk is served", SOON, || names(&case) == ["a", "c"]);
    let mut guest = Guest::connect(&case.folder.join("c.s"));
    assert_eq!(guest.read(8, 4096).unwrap(), [7; 4096]);
    guest.leave();
    end_server(upgraded["pid"].as_u64().unwrap() as i32);
}

/// A mistake more often than an order to close the disks. An empty file is an order.
#[test]
fn an_upgrade_without_a_file_of_the_configuration_is_refused() {
    let case = Case::new();
    let folder = case.folder.join("etc");
    let (main, parts) = (folder.join("blockyard.toml"), folder.join("conf.d"));
    std::fs::create_dir_all(&parts).unwrap();
    let write = |file: &Path, name: &str| {
        let image = case.folder.image(&format!("{name}.img"), 1 << 20);
        let socket = case.folder.join(format!("{name}.s"));
        let text = format!("[[disk]]\nname = {name:?}\nimage = {image:?}\n");
        std::fs::write(file, format!("{text}vhost-user = {socket:?}\n")).unwrap();
    };
    write(&main, "a");
    write(&parts.join("b.toml"), "b");
    let mut daemon = Daemon::start(&mut case.configured(&folder));
    daemon.wait_ready();
    let mut guest = Guest::connect(&case.folder.join("a.s"));
    for missing in [&main, &parts] {
        let away = case.folder.join("away");
        std::fs::rename(missing, &away).unwrap();
        let expected = format!("configuration {}: the f", missing.display());
        for call in ["reload", "upgrade"] {
            let failed = ctl(&case, &[call]);
            assert_eq!(failed.status.code(), Some(1), "{call}: {}", failed.err);
            assert!(failed.err.contains(&expected), "{call}: {}", failed.err);
        }
        assert_eq!(names(&case), ["a", "b"]);
        assert_eq!(guest.write(0, &[7; 4096]), status::OK);
        std::fs::rename(&away, missing).unwrap();
    }
    std::fs::write(&main, "").unwrap();
    let done: serde_json::Value =
        serde_json::from_str(&ctl(&case, &["upgrade", "--json"]).good()).unwrap();
    assert_eq!(done["ended"], serde_json::json!(["a"]));
    assert_eq!(names(&case), ["b"]);
    let mut last = [0];
    assert_eq!(guest.session.link.connection.socket().read(&mut last).unwrap(), 0);
    end_server(done["pid"].as_u64().unwrap() as i32);
}

/// An upgrade is no restart: what calls have set, added and removed goes on. A value that an
/// operator has changed in the file meanwhile takes effect, and the answer says so.
#[test]
fn an_upgrade_keeps_what_calls_have_changed_and_tells_what_the_file_changes() {
    let case = Case::new();
    let keys = |name: &str| {
        let [image, socket] = ["img", "s"].map(|end| case.folder.join(format!("{name}.{end}")));
        if !image.exists() {
            case.folder.image(&format!("{name}.img"), 1 << 20);
        }
        format!("name={name} image={} vhost-user={}", image.display(), socket.display())
    };
    let file = |name: &str, more: &str| {
        let keys: Vec<_> = keys(name).split(' ').map(|key| key.replace('=', "=\"")).collect();
        format!("[[disk]]\n{}\"\n{more}", keys.join("\"\n"))
    };
    let config = case.folder.join("config.toml");
    let write = |weight: u32| {
        let text = file("a", &format!("weight = {weight}\niops = 70\n")) + &file("b", "");
        std::fs::write(&config, text).unwrap();
    };
    write(200);
    let mut daemon = Daemon::start(&mut case.configured(&config));
    daemon.wait_ready();
    let set = "set a weight=300 iops= latency-target=5ms cache=writeback";
    let add = format!("add {}", keys("c"));
    for call in [set, &add, "remove b", "set c bps=9"] {
        ctl(&case, &call.split(' ').collect::<Vec<_>>()).good();
    }
    let mut guest = Guest::connect(&case.folder.join("a.s"));
    let upgrade = || {
        let text = ctl(&case, &["upgrade", "--json"]).good();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    let settings = |disk: &str| {
        let text = ctl(&case, &["show", disk, "--json"]).good();
        let mut shown: serde_json::Value = serde_json::from_str(&text).unwrap();
        shown["settings"].take()
    };
    let before = ["a", "c"].map(settings);
    let first = upgrade();
    until("the first server has ended", SOON, || !is_running(daemon.pid() as i32));
    assert_eq!(names(&case), ["a", "c"]);
    assert_eq!(["a", "c"].map(settings), before);
    assert_eq!((&before[0]["weight"], &before[0]["iops"]), (&300.into(), &serde_json::Value::Null));
    // The second one knows it too. An operator changes a value in the file.
    write(400);
    let second = upgrade();
    let gone = first["pid"].as_u64().unwrap() as i32;
    until("the second server has ended", SOON, || !is_running(gone));
    let changed = serde_json::json!([{ "key": "weight", "old": "300", "new": "400" }]);
    assert_eq!(second["disks"][0]["changed"], changed);
    assert_eq!(first["disks"][0]["changed"], serde_json::json!([]));
    let now = settings("a");
    assert_eq!((&now["weight"], &now["latency_target_us"]), (&400.into(), &5000.into()));
    assert_eq!((&now["cache"], settings("c")), (&before[0]["cache"], before[1].clone()));
    let stream = std::os::unix::net::UnixStream::connect(&case.api).unwrap();
    let event = crate::handover::first_event(stream, "disk-changed");
    assert!(event.contains(r#""old":"300","new":"400""#), "{event}");
    assert_eq!(guest.write(8, &[7; 4096]), status::OK);
    guest.leave();
    // A reload has the file's values.
    ctl(&case, &["reload"]).good();
    assert_eq!(names(&case).len(), 3);
    assert_eq!(settings("a")["iops"]["rate"], 70);
    end_server(second["pid"].as_u64().unwrap() as i32);
}
