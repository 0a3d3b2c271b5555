//! Front ends that stop and start their queues to bypass their disk's limits.

use blockyard_driver::request::OUT;

use super::beside::beside;
use super::daemon::{Daemon, OTHER, VICTIM};
use super::guest::{BOTH, Guest, Layout, SIZE, into, out};

/// Offers writes at a limit of one byte per second: only the first one is admitted in time, and the
/// wait queue fills.
fn offer(guest: &mut Guest, chains: u16) {
    let (header, data) = (guest.header(OUT, 0), guest.bytes(&[7; 4096]));
    for _ in 0..chains {
        let status = guest.status();
        let table = guest.table(&[out(header, 16), out(data, 4096), into(status, 1)]);
        guest.rings[0].offer(&[table]);
    }
    guest.rings[0].kick();
}

fn answered(guest: &mut Guest) -> usize {
    std::iter::from_fn(|| guest.rings[0].reap(1)).count()
}

/// A drain admits the requests in the wait queue. Their cost delays the next start, whichever way
/// the queue was stopped.
#[test]
fn queues_that_stop_and_start_do_not_exceed_their_limits() {
    for layout in BOTH {
        let daemon = Daemon::limited("bps = 1");
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        offer(&mut guest, 1);
        guest.rings[0].wait(1);
        offer(&mut guest, SIZE / 2);
        // The queue takes some requests, which wait, and then no more. Only a stop admits them.
        daemon.until_waiting(VICTIM);
        guest.connection.stop_ring(0).unwrap();
        let passed = answered(&mut guest);
        assert!(
            passed < usize::from(SIZE / 2),
            "{layout:?}: a drain lets pass all that was offered"
        );
        assert!(passed > 0, "{layout:?}: the queue took nothing");
        for round in 0..20 {
            guest.rings[0].clear();
            guest.start_ring(0).unwrap();
            offer(&mut guest, 1);
            guest.connection.stop_ring(0).unwrap();
            assert_eq!(answered(&mut guest), 0, "{layout:?}, round {round}");
        }
        // A front end that disconnects and reconnects has the same debt.
        drop(guest);
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        offer(&mut guest, 1);
        guest.connection.stop_ring(0).unwrap();
        assert_eq!(answered(&mut guest), 0, "{layout:?}: after another connection");
        other.works(0, 0);
        daemon.end();
    }
}

/// A queue that stops and starts in a loop does not delay a neighbour.
#[test]
fn beside_a_queue_that_stops_and_starts() {
    let daemon = Daemon::limited("iops = 100");
    beside("a queue that stops and starts", &daemon, |attack| {
        let mut guest = Guest::start(&attack.socket(VICTIM), Layout::Split);
        let (header, data, status) =
            (guest.header(OUT, 0), guest.bytes(&[7; 4096]), guest.status());
        let table = guest.table(&[out(header, 16), out(data, 4096), into(status, 1)]);
        while attack.goes_on() {
            for _ in 0..SIZE {
                guest.rings[0].offer(&[table]);
            }
            guest.rings[0].kick();
            guest.reset_ring(0);
        }
    });
    daemon.end();
}
