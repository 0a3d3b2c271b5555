//! A server with an API, and requests to it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, until};

pub struct Server {
    pub daemon: Daemon,
    pub folder: Folder,
}

impl Server {
    /// Starts a server without disks.
    #[track_caller]
    pub fn start() -> Self {
        Self::with(Folder::new(), &[])
    }

    /// Starts a server with the configuration file `toml` in the folder.
    #[track_caller]
    pub fn configured(text: &str) -> Self {
        Self::configured_in(Folder::new(), text)
    }

    /// The same in a folder that has other files.
    #[track_caller]
    pub fn configured_in(folder: Folder, text: &str) -> Self {
        configure(&folder, text);
        let file = folder.join("toml").to_str().unwrap().to_string();
        Self::with(folder, &["--config", &file])
    }

    /// The same with the folder `dead` on a file system that does not answer.
    #[track_caller]
    pub fn beside_dead(folder: Folder, text: &str) -> Self {
        configure(&folder, text);
        let file = folder.join("toml").to_str().unwrap().to_string();
        Self::run(beside_dead(&folder), folder, &["--config", &file])
    }

    #[track_caller]
    fn with(folder: Folder, options: &[&str]) -> Self {
        Self::run(Command::new(BLOCKYARD), folder, options)
    }

    #[track_caller]
    fn run(mut command: Command, folder: Folder, options: &[&str]) -> Self {
        command.arg("serve").args(options).arg("--api").arg(folder.join("api"));
        command.arg("--allow-folder").arg(folder.join("."));
        let mut daemon = Daemon::start(&mut command);
        daemon.wait_ready();
        Server { daemon, folder }
    }

    pub fn configure(&self, text: &str) {
        configure(&self.folder, text);
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join("api")
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        stream
    }

    /// Sends a request with any text as body. Returns the status and the body of the answer.
    #[track_caller]
    pub fn send(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = self.connect();
        let len = body.len();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len}\r\n\
             \r\n{body}"
        );
        // The server may answer and close before it has read a body that is too large.
        let _ = stream.write_all(text.as_bytes());
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or(Value::Null))
    }

    /// Makes a call that succeeds.
    #[track_caller]
    pub fn good(&self, method: &str, path: &str, body: Value) -> Value {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let (status, answer) = self.send(method, path, &text);
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        answer
    }

    /// Makes a call that fails. Returns the problem document.
    #[track_caller]
    pub fn bad(&self, method: &str, path: &str, body: &str, expected: u16) -> Value {
        let (status, answer) = self.send(method, path, body);
        assert_eq!(status, expected, "{method} {path} {body}: {answer}");
        assert_eq!(answer["status"], status, "{answer}");
        let is_text = |key: &str| answer[key].as_str().is_some_and(|text| !text.is_empty());
        assert!(is_text("type") && is_text("title") && is_text("detail"), "{answer}");
        answer
    }

    /// Waits for the end of a job. Returns it as it is then.
    #[track_caller]
    pub fn ended(&self, job: &Value) -> Value {
        let (path, mut now) = (format!("/v1/jobs/{}", job["number"]), Value::Null);
        until("the job ends", SOON, || {
            now = self.good("GET", &path, Value::Null);
            now["state"] != "running"
        });
        now
    }

    /// Returns the keys of a disk in memory, with a vhost-user socket named after it.
    pub fn keys(&self, name: &str) -> Value {
        json!({ "name": name, "image": "ram:1M", "vhost-user": self.folder.join(name) })
    }

    /// Returns the names of all disks.
    pub fn names(&self) -> Vec<String> {
        let answer = self.good("GET", "/v1/disks", Value::Null);
        let disks = answer["disks"].as_array().unwrap().iter();
        disks.map(|disk| disk["name"].as_str().unwrap().to_string()).collect()
    }
}

/// Returns the program as a command that sees the folder `dead` on a file system that does not
/// answer.
pub fn beside_dead(folder: &Folder) -> Command {
    let mount = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/api/dead.py");
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "python3", mount]);
    command.arg(folder.join("dead")).arg(BLOCKYARD);
    command
}

pub fn configure(folder: &Folder, text: &str) {
    std::fs::write(folder.join("toml"), text.replace("FOLDER", folder.to_str().unwrap())).unwrap();
}
