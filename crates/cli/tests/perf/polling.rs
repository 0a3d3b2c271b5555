//! How long an NBD server without requests busy-polls (`--poll`).

use crate::common::Folder;
use crate::figures::Figures;
use crate::nbd_server::{NbdServer, python};

/// Returns the identifier of the reactor's thread.
fn reactor(disk: &NbdServer) -> String {
    let switches = disk.daemon.switches();
    let thread = switches.keys().find_map(|name| name.strip_suffix(" reactor-0"));
    thread.expect("the server has a reactor").to_string()
}

/// The time from a request to the reactor's next sleep: the busy-poll's, or more on a slow machine.
/// A look that comes late, or a sleep for another reason, changes single times only.
#[test]
fn the_server_busy_polls_for_the_configured_time() {
    const CODE: &str = "import os, time\n\
        def slept():\n    \
            return int(open(STATUS).read().split('\\nvoluntary_ctxt_switches:')[1].split()[0])\n\
        h = nbd.NBD()\nh.connect_uri(URI)\nfor i in range(TIMES):\n    \
            before, start = slept(), time.monotonic()\n    \
            h.pwrite(b'x' * 4096, i * 4096)\n    \
            while slept() == before: os.sched_yield()\n    \
            print(time.monotonic() - start)\nh.shutdown()";
    let folder = Folder::new();
    let times = |poll: &str, times: u32| -> Vec<f64> {
        let disk = NbdServer::start("ram:64M", folder.join("s"), &["--poll", poll]);
        let thread = reactor(&disk);
        let status = format!("'/proc/{}/task/{thread}/status'", disk.daemon.pid());
        let code = format!("STATUS = {status}\nTIMES = {times}\n{CODE}");
        let out = python(&disk.uri(), &code).good();
        disk.daemon.stop();
        out.lines().map(|line| line.parse().unwrap()).collect()
    };
    let (off, polling) = (times("off", 100), times("100000", 5));
    let shortest = off.iter().copied().fold(f64::INFINITY, f64::min);
    let longest = polling.iter().copied().fold(0.0, f64::max);
    let mut figures = Figures::default();
    figures.row("s until it sleeps without busy-polling, at the earliest", shortest, 0.0..0.1);
    figures.row("s until it sleeps after 100 ms of it, at the latest", longest, 0.1..0.15);
    figures.judge();
}
