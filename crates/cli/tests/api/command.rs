//! `blockyard ctl`.

use std::process::Command;

use crate::common::{BLOCKYARD, Finished, TOOL, blockyard, run};
use crate::server::Server;

fn ctl(server: &Server, arguments: &[&str]) -> Finished {
    let socket = server.socket();
    blockyard(["ctl", "--api", socket.to_str().unwrap()].iter().chain(arguments))
}

#[test]
fn commands_print_tables_or_json_and_fail_with_the_reason() {
    let server = Server::start();
    let socket = format!("vhost-user={}", server.folder.join("s").display());
    let out = ctl(&server, &["add", "name=a", "image=ram:1M", &socket, "weight=50"]).good();
    assert!(out.contains("serving") && out.contains("weight"), "{out}");
    let out = ctl(&server, &["status"]).good();
    assert!(out.contains("1 disks") && out.contains("1 MiB"), "{out}");
    let out = ctl(&server, &["list", "--json"]).good();
    let list: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(list["disks"][0]["name"], "a");
    let out = ctl(&server, &["set", "a", "weight=", "iops=5000"]).good();
    assert!(out.contains("5000"), "{out}");
    assert!(ctl(&server, &["show", "a"]).good().contains("clients"));
    assert_eq!(ctl(&server, &["flush", "a"]).good(), "flushed a\n");
    assert_eq!(ctl(&server, &["refresh", "a"]).good(), "a: 1048576 -> 1048576 bytes\n");

    let failed = ctl(&server, &["set", "a", "wieght=5"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("did you mean `weight`?"), "{}", failed.err);
    let overlay = server.folder.join("overlay.qcow2");
    let failed = ctl(&server, &["snapshot", "a", overlay.to_str().unwrap()]);
    assert_eq!(failed.status.code(), Some(1), "memory has no overlay: {}", failed.out);
    assert!(failed.err.contains("job 1"), "{}", failed.err);
    assert!(ctl(&server, &["jobs"]).good().contains("failed"));
    let failed = ctl(&server, &["wait", "1"]);
    assert_eq!(failed.status.code(), Some(1));

    assert_eq!(ctl(&server, &["remove", "a"]).good(), "removed a\n");
    assert_eq!(ctl(&server, &["remove", "a"]).status.code(), Some(1));
}

#[test]
fn a_missing_server_is_one_clear_line() {
    let failed = blockyard(["ctl", "--api", "/no/such/socket", "list"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(
        failed.err.contains("/no/such/socket") && failed.err.contains("--api"),
        "{}",
        failed.err
    );
    assert_eq!(failed.err.lines().count(), 1, "{}", failed.err);
}

/// As bash does it for TAB after `blockyard ctl --api SOCKET show`.
#[test]
fn a_shell_completes_the_names_of_the_disks() {
    let server = Server::start();
    for name in ["web", "web-2", "$(touch ran)", "db"] {
        let mut keys = server.keys("s");
        keys["name"] = name.into();
        keys["vhost-user"] = server.folder.join(format!("s-{}", name.len())).to_str().into();
        server.good("POST", "/v1/disks", keys);
    }
    let complete = r#"
        source <("$0" completions bash)
        COMP_WORDS=("$0" ctl --api "$1" show "$2") COMP_CWORD=5
        _blockyard "$0" "$2" show
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let socket = server.socket();
    let completed = |begin: &str| {
        let mut bash = Command::new("bash");
        bash.current_dir(&*server.folder).args(["-c", complete, BLOCKYARD]);
        run(bash.arg(&socket).arg(begin), TOOL).good()
    };
    assert_eq!(completed("we"), "web\nweb-2\n");
    assert_eq!(completed("d"), "db\n");
    assert!(!completed("").contains("touch"));
    assert!(!server.folder.join("ran").exists(), "a name was run");
}
