//! Kills of the old server, of the new one, or of both, at each message of a hand-over, under
//! verified load. `between.py` stands between them. `BLOCKYARD_KILLS=N` sets the number of kills of
//! each test.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use blockyard_bench::client::LoadOptions;
use serde_json::Value;

use crate::common::{BLOCKYARD, Daemon, SOON, until};
use crate::handover::{Case, ctl, end_server, is_running, requests, script};
use crate::holder::{Keeper, keep_with};
use crate::killed::kills;

pub const MESSAGES: [&str; 8] =
    ["hello", "welcome", "take", "given", "took", "ready", "commit", "serves"];
const VICTIMS: [&str; 3] = ["old", "new", "both"];

/// Returns a program that hands over to the real one, and kills at a message.
pub fn between(case: &Case, message: &str, victim: &str) -> PathBuf {
    let proxy = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/between.py");
    let body = format!("exec python3 -IS {proxy} {message} {victim} {BLOCKYARD} \"$@\"");
    script(case, &format!("{message}-{}", victim.replace('/', "-")), &body)
}

/// Returns the process of the server that answers the API.
pub fn server(case: &Case) -> Option<i32> {
    let mut stream = UnixStream::connect(&case.api).ok()?;
    stream.set_read_timeout(Some(SOON)).ok()?;
    stream.write_all(b"GET /v1 HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let server: Value = serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()?;
    Some(server["pid"].as_i64()? as i32)
}

/// Waits until requests of the load are answered.
pub fn serves(case: &Case) {
    let mut before = None;
    until("the API answers", SOON, || {
        before = requests(case);
        before.is_some()
    });
    until("requests are answered", SOON, || requests(case) > before);
}

/// Begins an upgrade in which the message kills the victim. Returns the process of the old server.
pub fn upgrade(case: &Case, message: &str, victim: &str) -> i32 {
    serves(case);
    let program = between(case, message, victim);
    let before = server(case).unwrap();
    let done = ctl(case, &["upgrade", "--binary", program.to_str().unwrap()]);
    assert!(!done.status.success() || message == "serves", "{message}, {victim}");
    before
}

/// Calls `kill` with each message, and with another victim each time. 24 kills are all pairs.
fn each(mut kill: impl FnMut(&str, &str)) {
    for number in 0..kills(8) as usize {
        let round = number / MESSAGES.len();
        kill(MESSAGES[number % MESSAGES.len()], VICTIMS[(number + round) % VICTIMS.len()]);
    }
}

/// No holder is there: the operator starts a server if none is left. The front end connects again.
#[test]
fn kills_at_each_message_of_a_hand_over_lose_no_answered_write() {
    let case = Case::new();
    // In a sandbox the server would not start the program between.
    let start = || {
        let mut daemon = Daemon::start(case.command().args(["--sandbox", "off"]));
        daemon.became_ready().then_some(daemon)
    };
    let mut daemons = vec![start().unwrap()];
    let load = LoadOptions { reconnect: true, ..case.load() };
    let last = case.under_load(&load, |goes_on| {
        each(|message, victim| {
            let before = upgrade(&case, message, victim);
            goes_on();
            let stays = victim == "new" && message != "serves";
            if stays {
                assert_eq!(server(&case), Some(before), "{message}, {victim}: the old one serves");
                return;
            }
            until("the old server has ended", SOON, || !is_running(before));
            until("a server runs", SOON, || {
                server(&case).is_some() || {
                    daemons.extend(start());
                    false
                }
            });
        });
        serves(&case);
        server(&case).unwrap()
    });
    end_server(last);
    for gone in [&case.socket, &case.control] {
        assert!(!gone.exists(), "{} is left", gone.display());
    }
    case.is_clean();
}

/// The front end cannot connect again, and sees nothing.
#[test]
fn kills_at_each_message_of_a_hand_over_under_a_holder_are_not_noticed() {
    let case = Case::new();
    let mut holder = keep_with(&case, Keeper::Holder, &["--sandbox", "off"]);
    let load = LoadOptions { no_inflight: true, ..case.load() };
    case.under_load(&load, |goes_on| {
        each(|message, victim| {
            let before = upgrade(&case, message, victim);
            let stays = victim == "new" && message != "serves";
            until("a server runs", SOON, || {
                server(&case).is_some_and(|now| stays || now != before)
            });
            goes_on();
            assert!(holder.running(), "{message}, {victim}: {}", holder.log());
        });
        serves(&case);
    });
    holder.stop();
    assert!(!case.socket.exists());
    case.is_clean();
}

/// The new server notices nothing. It has copies of the listening sockets, so another server cannot
/// start beside it.
#[test]
fn a_new_server_that_hangs_ends_with_the_old_one_under_a_holder() {
    let case = Case::new();
    let mut holder = keep_with(&case, Keeper::Holder, &["--sandbox", "off"]);
    let load = LoadOptions { no_inflight: true, ..case.load() };
    case.under_load(&load, |goes_on| {
        for message in ["welcome", "given", "took", "ready", "commit"] {
            let before = upgrade(&case, message, "hung");
            until("a server runs", SOON, || server(&case).is_some_and(|now| now != before));
            goes_on();
            assert!(holder.running(), "{message}: {}", holder.log());
        }
        serves(&case);
    });
    holder.stop();
    case.is_clean();
}

/// A session that a newer server has described is not guessed: the new server ends, and the old one
/// goes on.
#[test]
fn a_newer_format_leaves_the_old_server_serving() {
    let case = Case::new();
    let mut daemon = Daemon::start(case.command().args(["--sandbox", "off"]));
    daemon.wait_ready();
    let newer = between(&case, "given", "format");
    case.under_load(&case.load(), |_| {
        serves(&case);
        let done = ctl(&case, &["upgrade", "--binary", newer.to_str().unwrap()]);
        assert!(done.err.contains("format 2"), "{}", done.err);
        serves(&case);
    });
    daemon.stop();
    case.is_clean();
}
