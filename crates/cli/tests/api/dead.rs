//! Disks with images on a file system that does not answer.

use serde_json::{Value, json};

use crate::common::{Finished, Folder, SOON, blockyard, run};
use crate::server::{Server, beside_dead, configure};

/// Returns the keys of a disk that is called "h".
fn hanging(server: &Server) -> Value {
    let image = server.folder.join("dead/h.img");
    json!({ "name": "h", "image": image, "vhost-user": server.folder.join("h") })
}

/// Returns a folder with a part `dead`, which is to be such a file system.
fn folder() -> Folder {
    let folder = Folder::new();
    std::fs::create_dir(folder.join("dead")).unwrap();
    std::fs::create_dir(folder.join("conf.d")).unwrap();
    folder
}

const GOOD: &str = "[[disk]]\nname = \"a\"\nimage = \"ram:1M\"\nvhost-user = \"FOLDER/a\"\n";
/// Returns the text of such a disk in the configuration file.
fn dead(name: &str) -> String {
    format!(
        "[[disk]]\nname = \"{name}\"\nimage = \"FOLDER/dead/{name}.img\"\n\
         vhost-user = \"FOLDER/{name}\"\n"
    )
}

#[test]
fn a_disk_on_a_dead_file_system_is_not_added_and_leaves_nothing() {
    let server = Server::beside_dead(folder(), GOOD);
    let keys = hanging(&server).to_string();
    // The first call waits, and the others find that it still does.
    for path in ["/v1/disks", "/v1/disks?persist=true", "/v1/disks"] {
        let problem = server.bad("POST", path, &keys, 503);
        assert!(problem["detail"].as_str().unwrap().contains("/dead/h.img"), "{problem}");
        assert_eq!(server.names(), ["a"]);
    }
    let kept = std::fs::read_dir(server.folder.join("conf.d")).unwrap();
    assert_eq!(kept.count(), 0);
    // The name and the socket are free.
    let mut other = hanging(&server);
    other["image"] = "ram:1M".into();
    server.good("POST", "/v1/disks", other);
}

#[test]
fn a_dead_file_system_of_one_disk_delays_no_changes_of_others_that_are_kept() {
    let server = Server::beside_dead(folder(), GOOD);
    server.configure(&(GOOD.to_string() + &dead("h")));
    let api = server.socket();
    let ctl =
        |words: &[&str]| blockyard(["ctl", "--api", api.to_str().unwrap()].iter().chain(words));
    ctl(&["set", "--persist", "a", "weight=300"]).good();
    let reloaded = server.good("POST", "/v1/reload", Value::Null);
    assert_eq!(reloaded["failed"][0]["disk"], "h", "{reloaded}");
    let error = reloaded["failed"][0]["error"].as_str().unwrap();
    assert!(error.contains("/dead/h.img"), "{reloaded}");
    ctl(&["remove", "--persist", "a"]).good();
    assert_eq!(server.names(), [""; 0]);
    // Its overlay would be on that file system.
    server.good("POST", "/v1/disks", server.keys("b"));
    let overlay = json!({ "overlay": server.folder.join("dead/top.qcow2") }).to_string();
    let problem = server.bad("POST", "/v1/disks/b/snapshot", &overlay, 503);
    assert!(problem["detail"].as_str().unwrap().contains("/dead"), "{problem}");
}

#[test]
fn a_server_starts_without_the_disks_on_a_dead_file_system() {
    let names: Vec<_> = (0..9).map(|number| format!("h{number}")).collect();
    let disks: String = names.iter().map(|name| dead(name)).collect();
    let server = Server::beside_dead(folder(), &(GOOD.to_string() + &disks));
    assert_eq!(server.names(), ["a"]);
    server.daemon.wait_log("9 of 10 disks are not served");
    let log = server.daemon.log();
    assert!(log.contains("/dead/h0.img: its file system has not answered"), "{log}");
    assert!(log.contains("/dead/h8.img: not looked at"), "{log}");
}

#[test]
fn a_start_with_a_disk_on_a_dead_file_system_only_fails() {
    // Each one waits for the file system, so they wait at the same time.
    std::thread::scope(|scope| {
        for option in ["--check-config", "--no-fair-share"] {
            scope.spawn(move || {
                let folder = folder();
                configure(&folder, &dead("h"));
                let mut command = beside_dead(&folder);
                command.args(["serve", option, "--config"]).arg(folder.join("toml"));
                let Finished { status, err, .. } = run(&mut command, SOON);
                assert!(!status.success() && err.contains("/dead/h.img"), "{option}: {err}");
                assert!(!folder.join("h").exists(), "{option}: the socket");
            });
        }
    });
}
