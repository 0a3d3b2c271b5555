//! Hand-overs of a disk with a limit: what a drain admits is paid at the next server.

use std::collections::BTreeMap;
use std::ops::Range;

use blockyard_driver::{Data, request, status};

use crate::common::{Daemon, SOON, until};
use crate::guest::Guest;
use crate::handover::{Case, counters};

/// The next server counts on from the counters of this one.
#[track_caller]
fn go_on(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) {
    for (series, was) in before {
        let is = after.get(series);
        assert!(is.is_some_and(|is| is >= was), "{series}: {was}, then {is:?}");
    }
}

/// A drain admits the requests that wait in the queue. Each later server holds all other requests,
/// because the drain's debt goes on: 512 s for each request. The tests of `sched::carried` check
/// the times.
#[test]
fn counters_go_on_and_a_limit_holds_over_hand_overs() {
    const DEPTH: u16 = 8;
    const LIMIT: [&str; 2] = ["--bps", "1"];
    let case = Case::new();
    let mut daemon = Daemon::start(case.command().args(LIMIT));
    daemon.wait_ready();
    let mut guest = Guest::connect(&case.socket);
    // The limit admits one request, and the next one waits.
    guest.read(0, 512).unwrap();
    let submit = |guest: &mut Guest, slots: Range<u16>| {
        for slot in slots {
            guest.queue().submit(slot, request::IN, 0, Data::FromDevice(512));
        }
        guest.queue().publish().unwrap();
    };
    submit(&mut guest, 0..1);
    daemon.until_waiting("", 1);
    submit(&mut guest, 1..DEPTH);
    let (mut before, mut answered) = (counters(&case).unwrap(), 0);
    assert_eq!(guest.queue().reap().unwrap(), None, "the limit admits a second request");
    for handover in 0..5 {
        daemon = case.replace_by(daemon, case.takeover().args(LIMIT));
        // The new server has seen the requests in the ring.
        daemon.has_handled_all("");
        let first = answered;
        while let Some((_, status)) = guest.queue().reap().unwrap() {
            assert_eq!(status, status::OK);
            answered += 1;
        }
        match handover {
            0 => assert!((1..DEPTH).contains(&answered), "the drain has admitted {answered}"),
            _ => assert_eq!(answered, first, "hand-over {handover} admits requests"),
        }
        let after = counters(&case).unwrap();
        go_on(&before, &after);
        before = after;
    }
    // A server without the limit answers them.
    daemon = case.replace(daemon);
    until("all requests are answered", SOON, || {
        while let Some((_, status)) = guest.queue().reap().unwrap() {
            assert_eq!(status, status::OK);
            answered += 1;
        }
        answered == DEPTH
    });
    let after = counters(&case).unwrap();
    go_on(&before, &after);
    let reads = after.iter().find(|(series, _)| {
        series.starts_with("blockyard_disk_requests_total") && series.contains("\"read\"")
    });
    assert!(reads.is_some_and(|(_, reads)| *reads == f64::from(1 + DEPTH)), "{reads:?}");
    drop(guest);
    daemon.stop();
    case.is_clean();
}
