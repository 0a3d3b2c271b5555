//! The command that starts a server in the background, as its server sees it.
//!
//! The server's standard input is a pipe of the command. The command writes one byte after it has
//! printed the device. If the pipe ends without that byte, no user knows the device.
//! What must hold: an image is not locked for ever by a server that no user knows.

use std::io::Write;
use std::process::ChildStdin;

use anyhow::Context;
use rustix::io::Errno;
use rustix::process::Signal;

/// Tells the server that its device is printed. If the server has ended, its device tells it.
pub fn confirm(server: Option<ChildStdin>) {
    let _ = server.map(|mut server| server.write_all(b"\n"));
}

/// Ends this server, as SIGTERM does, if the command that started it ends before it has printed
/// the device.
pub fn follow() -> anyhow::Result<()> {
    let follow = || {
        if !is_confirmed() {
            tracing::warn!("the command that started this server was killed: the server ends");
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::TERM);
        }
    };
    let thread = std::thread::Builder::new().name("starter".into());
    thread.spawn(follow).context("starting the thread that waits for `attach`")?;
    Ok(())
}

fn is_confirmed() -> bool {
    loop {
        match rustix::io::read(std::io::stdin(), &mut [0; 1]) {
            Err(Errno::INTR) => {}
            read => return read == Ok(1),
        }
    }
}
