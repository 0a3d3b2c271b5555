//! What the sandbox refuses: files and sockets outside of the folders that the server was given.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, run};
use crate::server::Server;

/// Checks that a disk is refused, with a message that names the folder and the option.
#[track_caller]
fn refused(server: &Server, disk: &Value, folder: &Folder) {
    let answer = server.bad("POST", "/v1/disks", &disk.to_string(), 422);
    let option = format!("--allow-folder {}", folder.to_str().unwrap());
    assert!(answer["detail"].as_str().unwrap().contains(&option), "{answer}");
}

#[test]
fn disks_outside_of_the_folders_are_refused_and_the_message_names_the_option() {
    let (server, elsewhere) = (Server::start(), Folder::new());
    let outside = elsewhere.image("disk", 1 << 20);
    let socket = server.folder.join("s");
    refused(&server, &json!({ "image": outside, "vhost-user": socket }), &elsewhere);
    let link = server.folder.join("link");
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    refused(&server, &json!({ "image": link, "vhost-user": socket }), &elsewhere);
    let there = elsewhere.join("s");
    refused(&server, &json!({ "image": "ram:1M", "vhost-user": there }), &elsewhere);
    let address = format!("unix:{}", there.display());
    refused(&server, &json!({ "image": "ram:1M", "name": "n", "nbd": address }), &elsewhere);
    assert_eq!(server.names(), [""; 0]);
}

#[test]
fn a_backing_file_outside_is_refused_by_the_kernel_although_the_disk_allows_its_folder() {
    let (server, elsewhere) = (Server::start(), Folder::new());
    let (base, top) = (elsewhere.image("base.img", 1 << 20), server.folder.join("top.qcow2"));
    let mut create = Command::new(BLOCKYARD);
    create.args(["image", "create", "-F", "raw", "-b"]).arg(&base).arg(&top);
    assert!(run(&mut create, SOON).status.success());
    let socket = server.folder.join("s");
    let disk = json!({
        "image": top, "vhost-user": socket, "backing-folders": [elsewhere.join(".")],
    });
    refused(&server, &disk, &elsewhere);
    assert!(!socket.exists());
}

#[test]
fn a_reload_says_which_option_a_disk_outside_needs() {
    let (server, elsewhere) = (
        Server::configured("[[disk]]\nimage = \"ram:1M\"\nvhost-user = \"FOLDER/a\"\n"),
        Folder::new(),
    );
    let image = elsewhere.image("disk", 1 << 20);
    server.configure(&format!(
        "[[disk]]\nimage = \"ram:1M\"\nvhost-user = \"FOLDER/a\"\n\
         [[disk]]\nname = \"b\"\nimage = \"{}\"\nvhost-user = \"FOLDER/b\"\n",
        image.display()
    ));
    let answer = server.good("POST", "/v1/reload", Value::Null);
    let error = answer["failed"][0]["error"].as_str().unwrap();
    assert!(error.contains("--allow-folder"), "{answer}");
    assert_eq!(server.names(), ["ram:1M"]);
}

#[test]
fn a_server_without_a_sandbox_warns_and_uses_every_folder() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let api = folder.join("api");
    let mut command = Command::new(BLOCKYARD);
    command.args(["serve", "--sandbox", "off", "--api"]).arg(&api);
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    daemon.wait_log("the sandbox is off");
    let server = Server { daemon, folder };
    let image: PathBuf = elsewhere.image("disk", 1 << 20);
    let disk = json!({ "image": image, "vhost-user": elsewhere.join("s") });
    server.good("POST", "/v1/disks", disk);
    assert_eq!(server.names(), ["disk"]);
}

#[test]
fn an_unknown_user_and_a_missing_folder_are_refused() {
    let folder = Folder::new();
    for (option, value, status, message) in [
        ("--user", "no such user", 1, "this host has no such user"),
        ("--allow-folder", "/no/such/folder", 2, "--allow-folder /no/such/folder: there is no"),
        ("--sandbox", "maybe", 2, "it must be on or off"),
    ] {
        let mut command = Command::new(BLOCKYARD);
        command.arg("serve").arg("--api").arg(folder.join("api")).args([option, value]);
        let done = run(&mut command, SOON);
        assert_eq!(done.status.code(), Some(status), "{}", done.err);
        assert!(done.err.contains(message), "{}", done.err);
    }
}
