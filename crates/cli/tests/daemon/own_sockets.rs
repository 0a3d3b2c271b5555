//! The sockets of the server itself (API, `--control`) and the answers of an upgrade.

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::common::{BLOCKYARD, Daemon, SOON};
use crate::handover::{Case, ctl, end_server};

/// Writes a configuration that begins with `more` and has a disk. Returns its path.
fn configure(case: &Case, more: &str) -> std::path::PathBuf {
    let (config, socket) = (case.folder.join("config.toml"), case.folder.join("a.s"));
    let image = case.folder.join("a.img");
    std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&image)
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    let disk = format!("[[disk]]\nname = \"a\"\nimage = {image:?}\nvhost-user = {socket:?}\n");
    std::fs::write(&config, format!("{more}{disk}")).unwrap();
    config
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o777
}

#[test]
fn a_hand_over_applies_a_new_mode_of_the_api_socket() {
    let case = Case::new();
    let mut daemon = Daemon::start(&mut case.configured(&configure(&case, "")));
    daemon.wait_ready();
    assert_eq!(mode(&case.api), 0o600);
    let replace = |daemon: Daemon, more: &str| {
        let config = configure(&case, more);
        case.replace_by(daemon, case.configured(&config).arg("--takeover").arg(&case.control))
    };
    let daemon = replace(daemon, "socket-mode = \"666\"\n");
    assert_eq!(mode(&case.api), 0o666);
    let daemon = replace(daemon, "");
    assert_eq!(mode(&case.api), 0o600);
    // The path has another file now, and the server does not change that one.
    std::fs::rename(&case.api, case.folder.join("moved")).unwrap();
    std::fs::write(&case.api, "").unwrap();
    std::fs::set_permissions(&case.api, std::fs::Permissions::from_mode(0o640)).unwrap();
    let daemon = replace(daemon, "socket-mode = \"666\"\n");
    assert_eq!(mode(&case.api), 0o640);
    daemon.stop();
    assert!(case.api.exists(), "the server has not made this file");
}

#[test]
fn a_hand_over_does_not_take_the_api_or_the_control_socket_away() {
    let case = Case::new();
    let config = configure(&case, "");
    let mut daemon = Daemon::start(&mut case.configured(&config));
    daemon.wait_ready();
    let command = || {
        let mut command = std::process::Command::new(BLOCKYARD);
        command.arg("serve").arg("--config").arg(&config).arg("--takeover").arg(&case.control);
        command
    };
    for (option, path, lacks) in
        [("--api", &case.api, "--control: the"), ("--control", &case.control, "api (--api): the")]
    {
        let mut new = Daemon::start(command().arg(option).arg(path));
        let status = new.ended(SOON);
        assert_eq!(status.code(), Some(1), "{status}: {}", new.log());
        let why = format!("{lacks} running server listens on ");
        assert!(new.log().contains(&why), "{}", new.log());
        // The old server says the same.
        daemon.wait_log(&why);
        assert!(case.api.exists() && case.control.exists());
    }
    ctl(&case, &["show", "a"]).good();
    daemon.stop();
}

#[test]
fn the_answer_of_an_upgrade_has_the_mistake_of_the_configuration() {
    let case = Case::new();
    let config = configure(&case, "");
    let mut daemon = Daemon::start(&mut case.configured(&config));
    daemon.wait_ready();
    let missing = case.folder.join("no-such-folder");
    for more in [
        format!("allow-folders = [{missing:?}]\n"),
        format!("[nbd]\ntls-certificates = {missing:?}\n"),
    ] {
        configure(&case, &more);
        let failed = ctl(&case, &["upgrade"]);
        assert_eq!(failed.status.code(), Some(1), "{}", failed.err);
        assert!(failed.err.contains("no-such-folder"), "{more}: {}", failed.err);
        ctl(&case, &["show", "a"]).good();
    }
    configure(&case, "");
    let done: serde_json::Value =
        serde_json::from_str(&ctl(&case, &["upgrade", "--json"]).good()).unwrap();
    assert!(daemon.ended(SOON).success(), "{}", daemon.log());
    end_server(done["pid"].as_u64().unwrap() as i32);
}

#[test]
fn an_http_client_on_the_control_socket_is_named_as_a_stranger() {
    let case = Case::new();
    let daemon = case.serve();
    let mut client = UnixStream::connect(&case.control).unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // The server may reset the connection, because it has not read all.
    let _ = client.read_to_end(&mut answer);
    daemon.wait_log("is no blockyard that takes over");
    assert!(!daemon.log().contains("ulimit"), "{}", daemon.log());
    daemon.stop();
}

#[test]
fn a_server_without_any_disk_names_the_reason_of_each() {
    let case = Case::new();
    let config = case.folder.join("config.toml");
    let disk = |name: &str| {
        let [image, socket] =
            ["img", "s"].map(|extension| case.folder.join(name).with_extension(extension));
        format!("[[disk]]\nname = {name:?}\nimage = {image:?}\nvhost-user = {socket:?}\n")
    };
    std::fs::write(&config, ["one", "two", "three"].map(disk).concat()).unwrap();
    let mut daemon = Daemon::start(&mut case.configured(&config));
    let status = daemon.ended(SOON);
    assert_eq!(status.code(), Some(1), "{status}: {}", daemon.log());
    for name in ["one.img", "two.img", "three.img"] {
        assert!(daemon.log().contains(name), "{name}: {}", daemon.log());
    }
}
