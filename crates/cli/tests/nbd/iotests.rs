//! QEMU's own block tests over NBD, with our server instead of qemu-nbd (scripts/iotests).

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::{BLOCKYARD, run};

#[test]
fn qemus_own_tests_pass() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/iotests");
    let finished =
        run(Command::new(script).args(["--program", BLOCKYARD]), Duration::from_secs(300));
    let sum = finished.out.lines().last().unwrap_or_default();
    assert!(
        finished.status.success() && sum.contains(" 0 failed"),
        "{}{}",
        finished.out,
        finished.err
    );
}
