//! `blockyard ctl`.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};
use serde_json::{Value, json};

use crate::common::{BLOCKYARD, Finished, SOON, TOOL, blockyard, run};
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
    assert!(out.contains(", 1 disk,") && out.contains("1 MiB"), "{out}");
    let out = ctl(&server, &["list", "--json"]).good();
    let list: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(list["disks"][0]["name"], "a");
    let out = ctl(&server, &["set", "a", "weight=", "iops=5000"]).good();
    assert!(out.contains("5000"), "{out}");
    let show = || ctl(&server, &["show", "a"]).good();
    assert!(show().lines().any(|line| line.starts_with("clients") && line.ends_with('0')));
    let guest = Session::<SplitRing>::start(&server.folder.join("s"), &Plan::default()).unwrap();
    let shown = show();
    let line = shown.lines().skip_while(|line| !line.starts_with("CLIENT")).nth(1);
    let cells: Vec<_> = line.unwrap_or_else(|| panic!("{shown}")).split("  ").collect();
    let cells: Vec<_> = cells.iter().map(|cell| cell.trim()).filter(|c| !c.is_empty()).collect();
    let [client, _program, user, since, features] = cells[..] else { panic!("{shown}") };
    assert_eq!(client, format!("pid {}", std::process::id()));
    assert!(user.parse::<u32>().is_ok() && since.ends_with('Z'), "{shown}");
    assert!(features.starts_with("0x"), "{shown}");
    drop(guest);
    // Waits until the server has noticed it.
    ctl(&server, &["disconnect", "a"]).good();
    assert_eq!(ctl(&server, &["flush", "a"]).good(), "flushed a\n");
    assert_eq!(ctl(&server, &["refresh", "a"]).good(), "a: 1048576 -> 1048576 bytes\n");

    let failed = ctl(&server, &["set", "a", "wieght=5"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("did you mean `weight`?"), "{}", failed.err);
    let grown = ctl(&server, &["resize", "a", "+1M"]);
    assert_eq!(grown.status.code(), Some(2), "{}", grown.out);
    assert!(grown.err.contains("without a sign"), "{}", grown.err);
    let overlay = server.folder.join("overlay");
    let failed = ctl(&server, &["snapshot", "a", overlay.to_str().unwrap()]);
    assert!(failed.err.contains("overlay.qcow2, or use persist=true"), "{}", failed.err);
    let overlay = server.folder.join("overlay.qcow2");
    let failed = ctl(&server, &["snapshot", "a", overlay.to_str().unwrap()]);
    assert_eq!(failed.status.code(), Some(1), "memory has no overlay: {}", failed.out);
    assert!(failed.err.contains("job 1"), "{}", failed.err);
    assert!(ctl(&server, &["jobs"]).good().contains("failed"));
    let failed = ctl(&server, &["wait", "1"]);
    assert_eq!(failed.status.code(), Some(1));

    // An empty variable is like none.
    let mut command = Command::new(BLOCKYARD);
    let unset = run(command.args(["ctl", "list"]).env("BLOCKYARD_API", ""), TOOL);
    assert!(unset.err.contains("/run/blockyard/api.sock"), "{}", unset.err);
    assert_eq!(ctl(&server, &["remove", "a"]).good(), "removed a\n");
    assert_eq!(ctl(&server, &["remove", "a"]).status.code(), Some(1));
}

/// Writes to a disk.
fn write(socket: &Path) {
    let mut guest = Session::<SplitRing>::start(socket, &Plan::default()).unwrap();
    let (write, mut data) = (Data::ToDevice(4096), [7; 4096]);
    let written = guest.queues[0].call(request::OUT, 0, write, &mut data, SOON).unwrap();
    assert_eq!(written, status::OK);
}

#[test]
fn a_removed_disk_that_cannot_be_flushed_is_a_failure() {
    let failing = "image = \"ram:1M\"\nfilters = [\"error:flush=1\"]\n";
    let disk = |name: &str| {
        format!("[[disk]]\nname = \"{name}\"\nvhost-user = \"FOLDER/{name}\"\n{failing}")
    };
    let server = Server::configured(&["a", "b", "c", "d"].map(disk).concat());
    for name in ["a", "b", "c"] {
        write(&server.folder.join(name));
    }
    let failed = ctl(&server, &["remove", "--force", "a"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("writes since its last flush may be lost"), "{}", failed.err);
    assert_eq!(failed.out, "removed a, not flushed\n");
    let failed = ctl(&server, &["remove", "--force", "--json", "b"]);
    assert_eq!(failed.status.code(), Some(1));
    let answer: Value = serde_json::from_str(&failed.out).unwrap();
    assert_eq!(answer, json!({ "name": "b", "flushed": false }));
    assert_eq!(server.names(), ["c", "d"]);
    // The disk d has no writes that can be lost.
    server.configure("");
    let failed = ctl(&server, &["reload", "--json"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.err.contains("the reload of 1 disk failed"), "{}", failed.err);
    let answer: Value = serde_json::from_str(&failed.out).unwrap();
    assert_eq!(answer["removed"], json!(["d"]), "{answer}");
    assert_eq!(answer["failed"][0]["disk"], "c", "{answer}");
    let why = answer["failed"][0]["error"].as_str().unwrap();
    assert!(why.contains("writes since its last flush may be lost"), "{answer}");
    assert_eq!(server.names(), [""; 0]);
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

#[test]
fn a_path_that_is_no_text_is_one_clear_line() {
    let server = Server::start();
    let path = std::ffi::OsStr::from_bytes(b"/tmp/\xff.qcow2");
    for command in [&["snapshot", "web"][..], &["upgrade", "--binary"]] {
        let mut ctl = Command::new(BLOCKYARD);
        ctl.arg("ctl").arg("--api").arg(server.socket()).args(command).arg(path);
        let failed = run(&mut ctl, TOOL);
        assert_eq!(failed.status.code(), Some(1), "{}", failed.err);
        assert!(failed.err.contains("paths in UTF-8 only"), "{}", failed.err);
        assert_eq!(failed.err.lines().count(), 1, "{}", failed.err);
    }
}

/// As bash does it for TAB after `blockyard ctl --api SOCKET show`. It splits `--api=SOCKET` at the
/// sign.
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
        COMP_WORDS=("$0" ctl --api $3 "$1" show "$2") COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _blockyard "$0" "$2" show
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let socket = server.socket();
    let completed_by = |sign: &str, begin: &str| {
        let mut bash = Command::new("bash");
        bash.current_dir(&*server.folder).args(["-c", complete, BLOCKYARD]);
        run(bash.arg(&socket).args([begin, sign]), TOOL).good()
    };
    let completed = |begin: &str| completed_by("", begin);
    assert_eq!(completed_by("=", "we"), "web\nweb-2\n");
    assert_eq!(completed("we"), "web\nweb-2\n");
    assert_eq!(completed("d"), "db\n");
    assert!(!completed("").contains("touch"));
    assert!(!server.folder.join("ran").exists(), "a name was run");
}
