//! `serve --keep-sessions`: the holder or systemd starts a killed server again, and front ends that
//! cannot connect again go on. `service_manager.py` stands for systemd.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockyard_bench::client::LoadOptions;
use blockyard_driver::connection::PROTOCOL_WITHOUT_INFLIGHT;
use blockyard_driver::{Plan, status};
use rustix::process::{Pid, kill_process};

use crate::common::{BLOCKYARD, Daemon, SOON, Signal, until};
use crate::guest::{Guest, pattern};
use crate::handover::{Case, ctl, end_server};
use crate::interrupted::Message;

/// What keeps the sessions and starts the server again.
#[derive(Clone, Copy, PartialEq)]
pub enum Keeper {
    Holder,
    Systemd,
}

/// Starts the holder of a server, or a service, and waits until the server is ready.
pub fn keep(case: &Case, keeper: Keeper) -> Daemon {
    keep_with(case, keeper, &[])
}

/// Like `keep`, with more options of the server.
pub fn keep_with(case: &Case, keeper: Keeper, options: &[&str]) -> Daemon {
    keep_command(case, keeper, case.command().args(options))
}

/// Like `keep`, for the server of a command.
pub fn keep_command(case: &Case, keeper: Keeper, command: &mut Command) -> Daemon {
    command.arg("--keep-sessions");
    let mut service = Command::new("python3");
    if keeper == Keeper::Systemd {
        service.arg("-IS");
        service.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/service_manager.py"));
        service.arg(case.folder.join("notify")).arg(command.get_program());
        service.args(command.get_args());
        service.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    }
    let mut holder = Daemon::start(if keeper == Keeper::Systemd { &mut service } else { command });
    holder.wait_ready();
    holder
}

/// Ends the server, and expects that nothing is kept any more.
pub fn end(mut holder: Daemon, keeper: Keeper) -> String {
    assert!(holder.terminate().success(), "{}", holder.log());
    if keeper == Keeper::Systemd {
        assert!(holder.out().ends_with("stored: 0, dropped: 0\n"), "{}", holder.out());
    }
    holder.log()
}

fn twenty_kills(load: &LoadOptions, case: &Case, keeper: Keeper) {
    let holder = keep(case, keeper);
    case.under_load(load, |goes_on| {
        // A kill before the connection is kept disconnects the front end.
        holder.until_served("write", "");
        for _ in 0..20 {
            holder.until_goes_on(32);
            goes_on();
            holder.kill_kept();
        }
        holder.until_goes_on(32);
    });
    let log = end(holder, keeper);
    assert!(log.contains("the last server died: continuing 1 exports"), "{log}");
    assert!(log.contains("were in flight when the last back end ended"), "{log}");
    assert!(!case.socket.exists());
    case.is_clean();
}

#[test]
fn kills_are_not_noticed_by_a_front_end_without_in_flight_region() {
    let case = Case::new();
    twenty_kills(&LoadOptions { no_inflight: true, ..case.load() }, &case, Keeper::Holder);
}

#[test]
fn kills_are_not_noticed_with_packed_rings() {
    let case = Case::new();
    twenty_kills(
        &LoadOptions { no_inflight: true, packed: true, ..case.load() },
        &case,
        Keeper::Holder,
    );
}

#[test]
fn kills_are_not_noticed_by_a_front_end_with_its_own_region() {
    let case = Case::new();
    twenty_kills(&case.load(), &case, Keeper::Holder);
}

#[test]
fn kills_are_not_noticed_if_systemd_keeps_the_descriptors() {
    let case = Case::new();
    twenty_kills(&LoadOptions { no_inflight: true, ..case.load() }, &case, Keeper::Systemd);
}

fn upgrade(case: &Case, holder: &Daemon) {
    holder.upgrade_kept(|| ctl(case, &["upgrade", "--json"]).good());
}

/// The memory of a front end that has left would stay allocated.
#[test]
fn nothing_is_kept_of_a_front_end_that_has_left() {
    let case = Case::new();
    let holder = keep(&case, Keeper::Holder);
    let kept = || std::fs::read_dir(format!("/proc/{}/fd", holder.pid())).unwrap().count();
    // The server's process is the last that the holder gets before a front end.
    until("the holder has the server", SOON, || {
        holder.descriptors().iter().any(|target| target.contains("pidfd"))
    });
    let before = kept();
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    until("the session is kept", SOON, || kept() > before);
    guest.leave();
    until("the holder has closed its descriptors", SOON, || kept() == before);
    end(holder, Keeper::Holder);
}

/// The operator starts the next server with the options of the one before, and the holder stays.
#[test]
fn a_server_that_takes_over_by_hand_has_the_same_holder() {
    let case = Case::new();
    let holder = keep(&case, Keeper::Holder);
    let plan = Plan { protocol: PROTOCOL_WITHOUT_INFLIGHT, ..Plan::default() };
    let mut guest = Guest::with(&case.socket, &plan);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    let mut elsewhere = Command::new(BLOCKYARD);
    elsewhere.arg("serve").arg(&case.top).arg("--vhost-user").arg(&case.socket);
    elsewhere.arg("--control").arg(case.folder.join("elsewhere")).arg("--api").arg(&case.api);
    let mut refused = Daemon::start(elsewhere.arg("--takeover").arg(&case.control));
    assert!(!refused.ended(SOON).success());
    assert!(refused.log().contains("a restart changes that"), "{}", refused.log());
    let mut new = Daemon::start(&mut case.takeover());
    assert!(new.became_ready(), "{}\n---- holder ----\n{}", new.log(), holder.log());
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    new.kill();
    until("the holder has started a server", SOON, || holder.kept().is_some());
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    guest.leave();
    end(holder, Keeper::Holder);
}

/// A front end that connects while no server runs waits for the next one.
fn upgraded_and_killed(keeper: Keeper) {
    let case = Case::new();
    let holder = keep(&case, keeper);
    let plan = Plan { protocol: PROTOCOL_WITHOUT_INFLIGHT, ..Plan::default() };
    let mut guest = Guest::with(&case.socket, &plan);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    upgrade(&case, &holder);
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    holder.kill_kept();
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    assert_eq!(guest.write(8, &pattern(2, 4096)), status::OK);
    guest.leave();
    let mut guest = Guest::with(&case.socket, &plan);
    assert_eq!(guest.read(8, 4096).unwrap(), pattern(2, 4096));
    drop(guest);
    holder.kill_kept();
    end(holder, keeper);
    case.is_clean();
}

#[test]
fn a_session_goes_on_after_an_upgrade_and_a_kill() {
    upgraded_and_killed(Keeper::Holder);
    upgraded_and_killed(Keeper::Systemd);
}

/// A part of a message stays in the socket, where the next server finds it.
fn message_in_two_parts(keeper: Keeper) {
    let case = Case::new();
    let holder = keep(&case, keeper);
    let plan = Plan { protocol: PROTOCOL_WITHOUT_INFLIGHT, ..Plan::default() };
    let mut guest = Guest::with(&case.socket, &plan);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    for message in Message::all(&mut guest) {
        for (at, cut) in message.cuts().enumerate() {
            message.begin(&guest, cut);
            match at % 2 {
                0 => holder.kill_kept(),
                _ => upgrade(&case, &holder),
            }
            message.end(&guest, cut);
            assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
        }
    }
    drop(guest);
    end(holder, keeper);
    case.is_clean();
}

#[test]
fn a_message_in_two_parts_is_read_by_the_next_server() {
    message_in_two_parts(Keeper::Holder);
    message_in_two_parts(Keeper::Systemd);
}

/// A disk that the next configuration lacks ends at an upgrade. The keeper has nothing of it: a
/// server that starts after a death does not continue it.
fn upgraded_without_a_disk(keeper: Keeper) {
    let case = Case::new();
    let (image, socket) = (case.folder.image("second.img", 1 << 20), case.folder.join("s2"));
    let config = case.folder.join("toml");
    let disk = |image: &Path, socket: &Path| {
        format!("[[disk]]\nimage = {image:?}\nvhost-user = {socket:?}\n")
    };
    let first = disk(&case.top, &case.socket);
    std::fs::write(&config, first.clone() + &disk(&image, &socket)).unwrap();
    let holder = keep_command(&case, keeper, &mut case.configured(&config));
    let (mut guest, mut second) = (Guest::connect(&case.socket), Guest::connect(&socket));
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    assert_eq!(second.write(0, &pattern(2, 4096)), status::OK);
    std::fs::write(&config, &first).unwrap();
    upgrade(&case, &holder);
    assert_eq!(second.session.link.connection.socket().read(&mut [0]).unwrap(), 0);
    until("the file of its socket is gone", SOON, || !socket.exists());
    assert_eq!(crate::guest::bytes_of(&image, 0, 4096), pattern(2, 4096));
    holder.kill_kept();
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    holder.wait_log("does not have this disk: it ends");
    holder.wait_log("continuing 1 exports");
    // The configuration loses a disk, and then the server dies.
    std::fs::write(&config, disk(&image, &socket)).unwrap();
    holder.kill_kept();
    holder.wait_log("the configuration does not have it: its clients are lost");
    assert_eq!(guest.session.link.connection.socket().read(&mut [0]).unwrap(), 0);
    assert!(!case.socket.exists());
    let mut second = Guest::connect(&socket);
    assert_eq!(second.read(0, 4096).unwrap(), pattern(2, 4096));
    drop(second);
    end(holder, keeper);
}

#[test]
fn a_disk_that_an_upgrade_removes_leaves_nothing_at_the_keeper() {
    upgraded_without_a_disk(Keeper::Holder);
    upgraded_without_a_disk(Keeper::Systemd);
}

/// The store has room for one session. The log names the other one, and the kept one goes on.
#[test]
fn a_full_store_of_systemd_keeps_what_it_has() {
    let case = Case::new();
    let (image, socket) = (case.folder.image("second.img", 1 << 20), case.folder.join("s2"));
    let config = case.folder.join("toml");
    let disk = |image: &Path, socket: &Path| {
        format!("[[disk]]\nimage = {image:?}\nvhost-user = {socket:?}\n")
    };
    std::fs::write(&config, disk(&case.top, &case.socket) + &disk(&image, &socket)).unwrap();
    let mut command = case.configured(&config);
    let holder = keep_command(&case, Keeper::Systemd, command.env("FDSTORE", "1"));
    holder.wait_log("systemd's store of descriptors is full (1 of 1)");
    let names = ["disk.qcow2", "second.img"];
    let lost = names.map(|name| holder.log().contains(&format!("vhost-user:{name}: systemd's")));
    assert_eq!(lost.iter().filter(|lost| **lost).count(), 1, "{}", holder.log());
    let mut guests = [Guest::connect(&case.socket), Guest::connect(&socket)];
    for guest in &mut guests {
        // Each session works before the first kill.
        guest.read(0, 4096).unwrap();
    }
    for round in 0..3 {
        holder.kill_kept();
        for (at, guest) in guests.iter_mut().enumerate() {
            if lost[at] {
                let gone = guest.session.link.connection.socket().read(&mut [0]);
                assert!(matches!(gone, Ok(0)), "{gone:?}");
                guest.session.restart().unwrap();
            }
            assert_eq!(guest.write(round * 8, &pattern(round, 4096)), status::OK);
            assert_eq!(guest.read(round * 8, 4096).unwrap(), pattern(round, 4096));
        }
    }
    drop(guests);
    end(holder, Keeper::Systemd);
    case.is_clean();
}

/// Stops a keeper, and calls `before`. Then kills the server, and calls `meanwhile` before the next
/// server starts.
fn kill_stopped(keeper: &Daemon, before: impl FnOnce(), meanwhile: impl FnOnce()) {
    let mut server = None;
    until("the keeper has a server", SOON, || {
        server = keeper.kept();
        server.is_some()
    });
    keeper.signal(Signal::STOP);
    before();
    kill_process(Pid::from_raw(server.unwrap()).unwrap(), Signal::KILL).unwrap();
    meanwhile();
    keeper.signal(Signal::CONT);
}

/// Writes a configuration of two disks. Returns its file and the sockets of both. `more`: further
/// keys of the second disk.
fn two_disks(case: &Case, more: &str) -> (PathBuf, [PathBuf; 2]) {
    let (image, socket) = (case.folder.image("second.img", 1 << 20), case.folder.join("s2"));
    let (top, first) = (&case.top, case.socket.clone());
    let text = format!(
        "[[disk]]\nimage = {top:?}\nvhost-user = {first:?}\n\
         [[disk]]\nimage = {image:?}\nvhost-user = {socket:?}\n{more}"
    );
    let config = case.folder.join("toml");
    std::fs::write(&config, text).unwrap();
    (config, [first, socket])
}

/// The next server cannot start its other export, because another program has the address.
#[test]
fn a_session_waits_until_all_exports_of_its_disk_can_start() {
    let case = Case::new();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (config, sockets) = two_disks(&case, &format!("nbd = \"tcp:{address}\"\n"));
    let holder = keep_command(&case, Keeper::Holder, &mut case.configured(&config));
    let mut guests = sockets.map(|socket| Guest::connect(&socket));
    for (seed, guest) in guests.iter_mut().enumerate() {
        assert_eq!(guest.write(0, &pattern(seed as u64, 4096)), status::OK);
    }
    let mut taken = None;
    let take = || {
        until("the address is free", SOON, || {
            taken = TcpListener::bind(address).ok();
            taken.is_some()
        });
    };
    kill_stopped(&holder, || {}, take);
    holder.wait_log("1 of 2 disks are not served");
    assert_eq!(guests[0].read(0, 4096).unwrap(), pattern(0, 4096));
    drop(taken);
    holder.signal(Signal::HUP);
    assert_eq!(guests[1].read(0, 4096).unwrap(), pattern(1, 4096));
    guests.into_iter().for_each(Guest::leave);
    end(holder, Keeper::Holder);
    case.is_clean();
}

/// A service manager that does not read is given up. What it has of a session that changes
/// afterwards is out of date, and the manager still has the socket. (The queue of a holder would
/// need thousands of descriptors in flight, which other tests of this user may lack then.)
#[test]
fn a_disk_with_a_session_that_is_out_of_date_is_served_again_at_once() {
    let case = Case::new();
    let (config, [first, second]) = two_disks(&case, "");
    let service = keep_command(&case, Keeper::Systemd, &mut case.configured(&config));
    let mut guest = Guest::connect(&first);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    // Each front end makes some messages, until the queue is full.
    let fill = || {
        until("the manager is given up", SOON, || {
            drop(Guest::connect(&second));
            service.log().contains("nothing is kept any more")
        });
    };
    kill_stopped(&service, fill, || {});
    let starts = || service.out().lines().filter(|line| *line == "ready").count();
    until("the next server is ready", SOON, || starts() > 1);
    service.wait_log("what was kept of it is out of date: its front end is lost");
    assert!(!service.log().contains("are not served"), "{}", service.log());
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    let mut anew = Guest::connect(&second);
    assert_eq!(anew.write(0, &pattern(2, 4096)), status::OK);
    anew.leave();
    guest.leave();
    end(service, Keeper::Systemd);
    case.is_clean();
}

/// The holder is the service's main process. A server is no child of systemd, which would not see
/// its end.
#[test]
fn an_upgrade_under_a_holder_names_no_main_process() {
    let case = Case::new();
    let path = case.folder.join("notify");
    let notified = UnixDatagram::bind(&path).unwrap();
    notified.set_read_timeout(Some(SOON)).unwrap();
    let mut command = case.command();
    command.env("NOTIFY_SOCKET", &path).env_remove("FDSTORE").env_remove("WATCHDOG_USEC");
    let holder = keep_command(&case, Keeper::Holder, &mut command);
    let receive = || {
        let mut bytes = [0; 256];
        let len = notified.recv(&mut bytes)?;
        std::io::Result::Ok(String::from_utf8_lossy(&bytes[..len]).trim().to_string())
    };
    assert_eq!(receive().unwrap(), "READY=1");
    // The old server has ended then.
    upgrade(&case, &holder);
    assert_eq!(receive().unwrap(), "READY=1", "of the new server");
    notified.set_nonblocking(true).unwrap();
    assert!(receive().is_err(), "nothing else");
    end(holder, Keeper::Holder);
}

#[test]
fn a_server_that_has_lost_its_holder_refuses_an_upgrade_and_serves_on() {
    let case = Case::new();
    let holder = keep(&case, Keeper::Holder);
    let mut guest = Guest::connect(&case.socket);
    let server = crate::interrupted_handover::server(&case).unwrap();
    holder.kill();
    for _ in 0..2 {
        let refused = ctl(&case, &["upgrade"]);
        let why = "this server has lost its holder, and an upgrade would end with it: restart the \
                   server";
        assert!(refused.err.contains(why), "{}", refused.err);
    }
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    guest.leave();
    end_server(server);
    case.is_clean();
}

/// The sessions wait until the mistake is mended.
#[test]
fn a_mistake_in_the_configuration_and_a_death_lose_no_session() {
    let case = Case::new();
    let config = case.folder.join("toml");
    let (top, socket) = (&case.top, &case.socket);
    let good = format!("[[disk]]\nimage = {top:?}\nvhost-user = {socket:?}\n");
    std::fs::write(&config, &good).unwrap();
    let holder = keep_command(&case, Keeper::Holder, &mut case.configured(&config));
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    let server = crate::interrupted_handover::server(&case).unwrap();
    std::fs::write(&config, format!("{good}weigth = 5\n")).unwrap();
    let process = rustix::process::Pid::from_raw(server).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    holder.wait_log("unknown key `weigth`");
    holder.wait_log("the next server does not start: trying again");
    std::fs::write(&config, &good).unwrap();
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    // A mistake in a key that only a start reads, and a disk that does not fit its session.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = format!("metrics = \"{}\"\n{good}", taken.local_addr().unwrap());
    let queues = format!("{good}queues = 7\n");
    for (bad, message) in [(metrics, "metrics"), (queues, "is configured with 7")] {
        let server = crate::interrupted_handover::server(&case).unwrap();
        std::fs::write(&config, bad).unwrap();
        let process = rustix::process::Pid::from_raw(server).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
        holder.wait_log(message);
        std::fs::write(&config, &good).unwrap();
        assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
        assert!(case.socket.exists(), "later front ends cannot connect");
    }
    guest.leave();
    end(holder, Keeper::Holder);
    case.is_clean();
}

/// A server that cannot start is not started for ever.
#[test]
fn a_server_that_exits_ends_the_holder_with_its_status() {
    let case = Case::new();
    let first = keep(&case, Keeper::Holder);
    let mut second = Daemon::start(case.command().arg("--keep-sessions"));
    assert_eq!(second.ended(SOON).code(), Some(1), "{}", second.log());
    assert!(second.log().contains("in use"), "{}", second.log());
    first.stop();
}
