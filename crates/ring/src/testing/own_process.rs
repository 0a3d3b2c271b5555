//! Tests that need a process of their own.

use std::process::Command;

use super::waits;

const CHILD: &str = "BLOCKYARD_TEST_IN_A_PROCESS_OF_ITS_OWN";

/// Runs `body` in a child process, which runs the calling test again and no other one.
pub fn run(body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = std::thread::current().name().unwrap().to_string();
    child.args(["--exact", &name, "--nocapture"]).env(CHILD, "1");
    let done = waits::output(&mut child, &name);
    let out = String::from_utf8_lossy(&done.stdout);
    assert!(
        done.status.success() && out.contains("1 passed"),
        "{out}{}",
        String::from_utf8_lossy(&done.stderr)
    );
}
