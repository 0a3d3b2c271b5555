//! A server without requests: it sleeps, also after it has busy-polled for a while (`--poll`).
//! `tests/perf` measures for how long.

use crate::common::{Folder, TOOL, until};
use crate::fixture::{NbdServer, start_in_background};

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
