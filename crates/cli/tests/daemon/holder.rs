//! `serve --keep-sessions`: the holder starts a killed server again, and front ends that cannot
//! connect again go on.

use std::time::Duration;

use blockyard_bench::client::LoadOptions;
use blockyard_driver::connection::PROTOCOL_WITHOUT_INFLIGHT;
use blockyard_driver::{Plan, status};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Daemon, SOON, TOOL, until};
use crate::guest::{Guest, pattern};
use crate::handover::{Case, ctl};

/// Starts the holder of a server, and waits until the server is ready.
fn keep(case: &Case) -> Daemon {
    let mut holder = Daemon::start(case.command().arg("--keep-sessions"));
    holder.wait_ready();
    holder
}

/// Returns the process number of the holder's server. Processes that helped a dead server became
/// children of the holder before its next server did.
fn server(holder: &Daemon) -> Option<i32> {
    let pid = holder.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next_back()?.parse().ok()
}

/// Kills the server with SIGKILL. Waits until the next one is ready.
fn kill(holder: &Daemon) {
    let ready = || holder.out().lines().filter(|line| *line == "ready").count();
    let (before, old) = (ready(), server(holder).expect("the holder has a server"));
    kill_process(Pid::from_raw(old).unwrap(), Signal::KILL).unwrap();
    until("the next server is ready", SOON, || ready() > before);
    assert_ne!(server(holder), Some(old));
}

fn twenty_kills(load: &LoadOptions, case: &Case) {
    let holder = keep(case);
    case.under_load(load, |goes_on| {
        // A kill in the middle of a message loses the message.
        holder.until_served("write", "");
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(50));
            goes_on();
            kill(&holder);
        }
        std::thread::sleep(Duration::from_millis(100));
    });
    let log = holder.stop();
    assert!(log.contains("the last server died: continuing 1 exports"), "{log}");
    assert!(log.contains("were in flight when the last back end ended"), "{log}");
    assert!(!case.socket.exists());
    case.is_clean();
}

#[test]
fn kills_are_not_noticed_by_a_front_end_without_in_flight_region() {
    let case = Case::new();
    twenty_kills(&LoadOptions { no_inflight: true, ..case.load() }, &case);
}

#[test]
fn kills_are_not_noticed_with_packed_rings() {
    let case = Case::new();
    twenty_kills(&LoadOptions { no_inflight: true, packed: true, ..case.load() }, &case);
}

#[test]
fn kills_are_not_noticed_by_a_front_end_with_its_own_region() {
    let case = Case::new();
    twenty_kills(&case.load(), &case);
}

/// A front end that connects while no server runs waits for the next one.
#[test]
fn a_session_goes_on_after_an_upgrade_and_a_kill() {
    let case = Case::new();
    let holder = keep(&case);
    let plan = Plan { protocol: PROTOCOL_WITHOUT_INFLIGHT, ..Plan::default() };
    let mut guest = Guest::with(&case.socket, &plan);
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK);
    let upgraded = ctl(&case, &["upgrade", "--json"]).good();
    let upgraded: serde_json::Value = serde_json::from_str(&upgraded).unwrap();
    let new = upgraded["pid"].as_i64().map(|pid| pid as i32);
    until("the new server is the holder's child", TOOL, || server(&holder) == new);
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    kill(&holder);
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    assert_eq!(guest.write(8, &pattern(2, 4096)), status::OK);
    guest.leave();
    let mut guest = Guest::with(&case.socket, &plan);
    assert_eq!(guest.read(8, 4096).unwrap(), pattern(2, 4096));
    drop(guest);
    holder.stop();
    case.is_clean();
}

/// A server that cannot start is not started for ever.
#[test]
fn a_server_that_exits_ends_the_holder_with_its_status() {
    let case = Case::new();
    let first = keep(&case);
    let mut second = Daemon::start(case.command().arg("--keep-sessions"));
    assert_eq!(second.ended(SOON).code(), Some(1), "{}", second.log());
    assert!(second.log().contains("in use"), "{}", second.log());
    first.stop();
}
