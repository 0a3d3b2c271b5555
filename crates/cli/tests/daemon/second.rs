//! A front end that connects while another one is connected.

use std::os::unix::net::UnixStream;

use blockyard_driver::status;

use crate::common::{Daemon, Folder};
use crate::guest::Guest;

#[test]
fn a_second_front_end_is_named_in_the_log() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let ours = std::process::id();
    for (mode, fate) in [("wait", "it waits until the first one"), ("refuse", "is refused")] {
        let daemon = Daemon::serve("ram:1M", &socket, &["--second-client", mode]);
        let mut first = Guest::connect(&socket);
        let _second = UnixStream::connect(&socket).unwrap();
        daemon.wait_log(&format!("a second front end (pid {ours})"));
        assert!(daemon.log().contains(fate), "{mode}: {}", daemon.log());
        assert_eq!(first.flush(), status::OK, "{mode}");
        daemon.stop();
    }
}
