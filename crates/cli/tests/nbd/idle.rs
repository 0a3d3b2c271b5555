//! A server without requests: it sleeps, or busy-polls for a while (`--poll`).

use std::time::Duration;

use crate::common::{Folder, TOOL, until};
use crate::fixture::{NbdServer, python, start_in_background};

/// Returns how often the reactor went to sleep.
fn sleeps(disk: &NbdServer) -> u64 {
    let switches = disk.daemon.switches();
    switches
        .iter()
        .filter(|(name, _)| name.ends_with(" reactor-0"))
        .map(|(_, (slept, _))| slept)
        .sum()
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
        disk.daemon.sleeps_for(Duration::from_secs(4));
        drop(client);
        disk.daemon.stop();
    }
}

#[test]
fn the_server_busy_polls_for_the_configured_time() {
    let folder = Folder::new();
    let slept = ["off", "100000"].map(|poll| {
        let disk = NbdServer::start("ram:64M", folder.join("s"), &["--poll", poll]);
        let code = "import time\nh = nbd.NBD()\nh.connect_uri(URI)\n\
                    for i in range(300):\n    h.pwrite(b'x' * 4096, i * 4096)\n    time.sleep(0.003)\nh.shutdown()";
        let before = sleeps(&disk);
        python(&disk.uri(), code).good();
        let slept = sleeps(&disk) - before;
        disk.daemon.stop();
        slept
    });
    let [off, looking] = slept;
    // Of 300 requests. On a busy machine the next request may arrive before the server sleeps.
    assert!(off >= 200, "without looking it sleeps before each request: {off}");
    assert!(looking < 100, "a request every 3 ms is waited for awake: {looking} sleeps");
}
