//! A server without requests: it sleeps, or busy-polls for a while (`--poll`).

use crate::common::{Folder, TOOL, until};
use crate::fixture::{NbdServer, python, start_in_background};

/// Returns the identifier of the reactor's thread.
fn reactor(disk: &NbdServer) -> String {
    let switches = disk.daemon.switches();
    let thread = switches.keys().find_map(|name| name.strip_suffix(" reactor-0"));
    thread.expect("the server has a reactor").to_string()
}

#[test]
fn an_idle_client_costs_no_cpu_time() {
    let folder = Folder::new();
    // The maximum time for busy-polling is among them: it must end too.
    for poll in ["auto", "100000"] {
        let disk = NbdServer::start("ram:64M", folder.join("s"), &["--poll", poll]);
        // The client sends enough requests for the server to try busy-polling and to keep it.
        let code = "import nbd, sys, time\nh = nbd.NBD()\nh.connect_uri(sys.argv[1])\n\
                    for i in range(20000): h.pread(4096, i % 1000 * 4096)\nprint('ready', flush=True)\ntime.sleep(600)";
        let mut client = start_in_background("python3", ["-B", "-c", code, &disk.uri()]);
        until("the client has asked", TOOL, || client.out().contains("ready") || !client.running());
        disk.daemon.falls_asleep();
        drop(client);
        disk.daemon.stop();
    }
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
    assert!(shortest < 0.1, "without busy-polling it sleeps after {shortest} s at the earliest");
    assert!(longest >= 0.1, "with a busy-poll of 100 ms it sleeps after {longest} s at the latest");
}
