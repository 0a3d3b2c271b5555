//! Child processes that signals for this process must not end.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// What a terminal, a service manager or the end of a session sends.
const ENDS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Makes the program start in a process group of its own, and with the signals ignored that end a
/// server: SIGTERM, SIGINT, SIGHUP. So a terminal's Ctrl-C and `systemctl stop`, which signal all
/// processes of the server, end the server only. The program may set handlers.
pub fn shield(command: &mut Command) {
    let ignore = || {
        for signal in ENDS {
            // SAFETY: SIG_IGN runs no code of this process.
            if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec. It calls only signal(2), which is
    // async-signal-safe, and allocates nothing.
    unsafe { command.process_group(0).pre_exec(ignore) };
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Stdio;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;
    use crate::testing::waits;

    #[test]
    fn signals_that_end_a_server_do_not_end_the_child() {
        let mut command = Command::new("sh");
        shield(&mut command);
        let script = "ps -o pgid= -p $$; read line; echo $line";
        let command = command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let pid = Pid::from_child(&child);
        for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
            kill_process(pid, signal).unwrap();
        }
        child.stdin.take().unwrap().write_all(b"alive\n").unwrap();
        let done = waits::rest(child, "the shell has a line to read");
        let said = String::from_utf8(done.stdout).unwrap();
        let words: Vec<_> = said.split_whitespace().collect();
        assert_eq!(words, [&*pid.as_raw_nonzero().to_string(), "alive"]);
        assert!(done.status.success());
    }
}
