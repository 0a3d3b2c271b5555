//! What the sandbox refuses: files and sockets outside of the folders that the server was given.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, run, tool, until};
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

/// Creates a qcow2 image with this backing name, which need not exist.
fn overlay(server: &Server, name: &str, backing: &str) -> PathBuf {
    let top = server.folder.join(name);
    let options = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", backing];
    tool("qemu-img", options.into_iter().chain([top.to_str().unwrap(), "1M"])).good();
    top
}

#[test]
fn a_hostile_image_and_a_hostile_caller_read_no_file_of_the_host() {
    let server = Server::start();
    let (socket, etc) = (server.folder.join("s"), PathBuf::from("/etc"));
    let far = "../".repeat(20);
    for (at, backing) in
        ["/etc/shadow", "/etc/hosts", "/proc/self/environ", &format!("{far}etc/passwd"), "link"]
            .into_iter()
            .enumerate()
    {
        std::os::unix::fs::symlink("/etc/passwd", server.folder.join("link")).ok();
        let image = overlay(&server, &format!("{at}.qcow2"), backing);
        let disk = json!({ "image": image, "vhost-user": socket });
        let answer = server.bad("POST", "/v1/disks", &disk.to_string(), 422);
        assert!(answer["detail"].as_str().unwrap().contains("backing"), "{backing}: {answer}");
        // The caller allows the folder, but the operator has not.
        let disk = json!({
            "image": image, "vhost-user": socket, "backing-folders": [etc, "/proc/self"],
        });
        let answer = server.bad("POST", "/v1/disks", &disk.to_string(), 422);
        let detail = answer["detail"].as_str().unwrap();
        assert!(detail.contains("--allow-folder /etc"), "{backing}: {answer}");
    }
    for secret in ["/etc/shadow", "/proc/self/mem", "/sys/kernel/notes", "/dev/mem"] {
        if !std::path::Path::new(secret).exists() {
            continue;
        }
        for read_only in [false, true] {
            let disk = json!({ "image": secret, "vhost-user": socket, "read-only": read_only });
            let answer = server.bad("POST", "/v1/disks", &disk.to_string(), 422);
            let detail = answer["detail"].as_str().unwrap();
            assert!(detail.contains("the sandbox refuses folder"), "{secret}: {answer}");
        }
    }
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
fn a_snapshot_into_another_folder_names_the_option() {
    let (server, elsewhere) = (Server::start(), Folder::new());
    let (base, socket) = (server.folder.join("base.qcow2"), server.folder.join("s"));
    tool("qemu-img", ["create", "-q", "-f", "qcow2", base.to_str().unwrap(), "1M"]).good();
    let disk = json!({
        "name": "a", "image": base, "vhost-user": socket, "backing-folders": [*server.folder],
    });
    server.good("POST", "/v1/disks", disk);
    let overlay = elsewhere.join("top.qcow2");
    let job = server.good("POST", "/v1/disks/a/snapshot", json!({ "overlay": overlay }));
    let mut error = String::new();
    until("the job fails", SOON, || {
        let job = server.good("GET", &format!("/v1/jobs/{}", job["number"]), Value::Null);
        error = job["error"].as_str().unwrap_or_default().to_string();
        !error.is_empty()
    });
    let option = format!("--allow-folder {}", elsewhere.to_str().unwrap());
    assert!(error.contains(&option), "{error}");
    assert!(!overlay.exists());
}

/// Checks that a disk is refused, because it names the configuration.
#[track_caller]
fn reserved(server: &Server, disk: &Value) {
    let answer = server.bad("POST", "/v1/disks", &disk.to_string(), 422);
    let detail = answer["detail"].as_str().unwrap();
    assert!(detail.contains("it belongs to the server's configuration"), "{disk}: {answer}");
}

/// The sandbox cannot tell the files apart, because the images are beside the configuration.
#[test]
fn no_disk_uses_the_files_of_the_configuration() {
    let folder = Folder::new();
    std::fs::create_dir(folder.join("conf.d")).unwrap();
    let main = "[[disk]]\nname = \"a\"\nimage = \"FOLDER/base.qcow2\"\nvhost-user = \"FOLDER/a\"\n";
    let base = folder.join("base.qcow2");
    tool("qemu-img", ["create", "-q", "-f", "qcow2", base.to_str().unwrap(), "1M"]).good();
    let server = Server::configured_in(folder, main);
    let at = |name: &str| server.folder.join(name);
    server.good("POST", "/v1/disks?persist=true", server.keys("x"));
    let part = at("conf.d/90-ctl-x.toml");
    std::os::unix::fs::symlink(&part, at("link")).unwrap();
    std::os::unix::fs::symlink(at("conf.d"), at("folder")).unwrap();
    std::fs::hard_link(&part, at("hard")).unwrap();
    let texts = || [&part, &at("toml")].map(|path| std::fs::read(path).unwrap());
    let before = texts();
    // A reload knows the new file's other name.
    server.good("POST", "/v1/reload", Value::Null);
    let nbd = format!("unix:{}", at("w").display());
    for image in [&part, &at("link"), &at("hard"), &at("folder/90-ctl-x.toml"), &at("toml")] {
        for read_only in [false, true] {
            reserved(
                &server,
                &json!({
                    "name": "w", "image": image, "format": "raw", "nbd": nbd,
                    "read-only": read_only,
                }),
            );
        }
    }
    reserved(&server, &json!({ "name": "w", "image": BLOCKYARD, "format": "raw", "nbd": nbd }));
    let top = overlay(&server, "top.qcow2", "conf.d/90-ctl-x.toml");
    reserved(&server, &json!({ "name": "w", "image": top, "nbd": nbd }));
    for socket in ["conf.d/s", "folder/s", "conf.d/50.toml"].map(at) {
        reserved(&server, &json!({ "name": "w", "image": "ram:1M", "vhost-user": socket }));
    }
    for overlay in ["conf.d/top.qcow2", "folder/top.qcow2", "conf.d/zz.toml"].map(at) {
        let snapshot = json!({ "overlay": overlay, "persist": true }).to_string();
        let answer = server.bad("POST", "/v1/disks/a/snapshot", &snapshot, 422);
        let detail = answer["detail"].as_str().unwrap();
        assert!(detail.contains("it belongs to the server's configuration"), "{answer}");
        assert!(!overlay.exists());
    }
    assert_eq!((server.names(), texts()), (vec!["a".to_string(), "x".to_string()], before));
}

#[test]
fn an_overlay_is_as_private_as_its_base() {
    let server = Server::start();
    let base = server.folder.join("base.img");
    for (at, mode) in [0o600, 0o660, 0o640].into_iter().enumerate() {
        std::fs::write(&base, vec![0; 1 << 20]).unwrap();
        let _ = std::os::unix::fs::chown(&base, None, Some(12));
        std::fs::set_permissions(&base, Permissions::from_mode(mode)).unwrap();
        let disk = json!({
            "name": "a", "image": base, "format": "raw",
            "vhost-user": server.folder.join("s"),
        });
        server.good("POST", "/v1/disks", disk);
        let overlay = server.folder.join(format!("{at}.qcow2"));
        let job = server.good("POST", "/v1/disks/a/snapshot", json!({ "overlay": overlay }));
        until("the snapshot ends", SOON, || {
            let job = server.good("GET", &format!("/v1/jobs/{}", job["number"]), Value::Null);
            job["state"] == "done"
        });
        let attributes = |path: &PathBuf| {
            let meta = std::fs::metadata(path).unwrap();
            (meta.mode() & 0o7777, meta.uid(), meta.gid())
        };
        assert_eq!(attributes(&overlay), attributes(&base));
        server.good("DELETE", "/v1/disks/a", Value::Null);
        // It has a record of its overlay.
        std::fs::remove_file(&base).unwrap();
    }
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
