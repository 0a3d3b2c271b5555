//! A server without requests: it sleeps, or busy-polls for a while (`--poll`).

use std::time::Duration;

use crate::common::{Folder, TOOL, until};
use crate::fixture::{NbdServer, python, start_in_background};

/// Returns the identifier of the reactor's thread, and how often that thread went to sleep.
fn reactor(disk: &NbdServer) -> (String, u64) {
    let switches = disk.daemon.switches();
    let thread = switches.iter().find_map(|(name, (slept, _))| {
        Some((name.strip_suffix(" reactor-0")?.to_string(), *slept))
    });
    thread.expect("the server has a reactor")
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

/// Without busy-polling, the server sleeps after each request, and the client waits for that before
/// the next one. With busy-polling, the client sends a request when the last one is answered.
#[test]
fn the_server_busy_polls_for_the_configured_time() {
    const SLEEPS: &str = "import os\ndef slept():\n    \
        return int(open(STATUS).read().split('\\nvoluntary_ctxt_switches:')[1].split()[0])\n";
    let folder = Folder::new();
    let [off, polling] = [("off", true), ("100000", false)].map(|(poll, waits)| {
        let disk = NbdServer::start("ram:64M", folder.join("s"), &["--poll", poll]);
        let (thread, before) = reactor(&disk);
        let status = format!("/proc/{}/task/{thread}/status", disk.daemon.pid());
        let wait = if waits { "while slept() == before: os.sched_yield()" } else { "pass" };
        let code = format!(
            "STATUS = '{status}'\n{SLEEPS}h = nbd.NBD()\nh.connect_uri(URI)\n\
             for i in range(300):\n    before = slept()\n    h.pwrite(b'x' * 4096, i * 4096)\n    \
             {wait}\nh.shutdown()"
        );
        python(&disk.uri(), &code).good();
        let slept = reactor(&disk).1 - before;
        disk.daemon.stop();
        slept
    });
    assert!(off >= 300, "without busy-polling it slept {off} times for 300 requests");
    // It sleeps only if the client does not run for 100 ms.
    assert!(polling < 150, "with busy-polling it slept {polling} times for 300 requests");
}
