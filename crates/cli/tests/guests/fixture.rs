//! A disk, its daemon, and a guest that uses it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::common::{Daemon, Folder, Guest, GuestKind, NAP, SOON, Signal, TOOL, md5, until};

/// Shell functions for the scripts.
const PRELUDE: &str = r#"
# Sends a word to the host, and waits until it has grown the first disk (GuestFixture::go_on).
tell() { # WORD...
    local before now
    read -r before </sys/block/vda/size
    echo "tell $*"
    for ((i = 0; i < 3000; i++)); do
        read -r now </sys/block/vda/size
        [[ $now == "$before" ]] || return 0
        nap 0.02
    done
    echo "the host did not make the disk larger within 60 s"
    return 1
}

# Runs fio: random data with checksums, 32 requests in flight, output only if it fails.
load() { # ARGUMENTS...
    fio --eta=never --output=/tmp/fio.log --ioengine=libaio --direct=1 --iodepth=32 --verify=crc32c --verify_fatal=1 \
        --group_reporting "$@" || { cat /tmp/fio.log && return 1; }
}
"#;

/// Bytes by which each `go_on` grows the disk.
pub const STEP: u64 = 1 << 20;

pub struct GuestFixture {
    pub folder: Folder,
    pub image: PathBuf,
    pub socket: PathBuf,
    options: Vec<String>,
    daemon: Option<Daemon>,
}

impl GuestFixture {
    /// Starts a daemon with an empty image of `bytes` bytes.
    #[track_caller]
    pub fn new(bytes: u64, options: &[&str]) -> Self {
        Self::new_in(Folder::new(), bytes, options)
    }

    /// Like `new`, and the daemon has an API.
    #[track_caller]
    pub fn with_api(bytes: u64, options: &[&str]) -> Self {
        let folder = Folder::new();
        let api = folder.join("api");
        Self::new_in(folder, bytes, &[&["--api", api.to_str().unwrap()], options].concat())
    }

    #[track_caller]
    fn new_in(folder: Folder, bytes: u64, options: &[&str]) -> Self {
        let (image, socket) = (folder.image("disk.img", bytes), folder.join("disk.sock"));
        let daemon = Daemon::serve(&image, &socket, options);
        let options = options.iter().map(|o| o.to_string()).collect();
        GuestFixture { folder, image, socket, options, daemon: Some(daemon) }
    }

    /// Boots a guest with the disk and other options of its runner.
    #[track_caller]
    pub fn boot(
        &self,
        kind: GuestKind,
        more: &str,
        options: &[&str],
        script: &str,
        limit: Duration,
    ) -> Guest {
        let options = options.iter().map(|o| o.into()).chain(Guest::vhost(&self.socket, more));
        Guest::start(kind, options, &script_with_prelude(script), limit)
    }

    pub fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("the daemon runs")
    }

    /// Lets a guest continue that waits in `tell`.
    #[track_caller]
    pub fn go_on(&self) {
        go_on(&self.image, self.daemon.as_ref().expect("the daemon runs"));
    }

    /// Drains the disk, and waits until the drain holds a request. The daemon must have an API.
    #[track_caller]
    pub fn hold_a_request(&self) {
        hold_a_request(&self.folder.join("api"), "disk.img");
    }

    /// Kills the daemon and starts it again.
    #[track_caller]
    pub fn kill_and_restart(&mut self) {
        self.daemon.take().expect("the daemon runs").kill();
        let options: Vec<_> = self.options.iter().map(String::as_str).collect();
        self.daemon = Some(Daemon::serve_again(&self.image, &self.socket, &options));
    }

    /// Stops the daemon, which must exit with status 0. Returns its log.
    #[track_caller]
    pub fn stop(&mut self) -> String {
        self.daemon.take().expect("the daemon runs").stop()
    }

    /// Waits until the daemon has completed a request of the kind.
    #[track_caller]
    pub fn until_served(&mut self, kind: &str) {
        self.daemon().until_served(kind, "");
    }
}

/// Lets a guest continue that waits in `tell`. `image`: that of its first disk.
#[track_caller]
pub fn go_on(image: &Path, daemon: &Daemon) {
    let file = File::options().write(true).open(image).unwrap();
    file.set_len(file.metadata().unwrap().len() + STEP).unwrap();
    daemon.signal(Signal::HUP);
}

/// Makes a call of an API, which must succeed. Returns its answer.
#[track_caller]
pub fn ask(api: &Path, call: &str, body: &str) -> Value {
    let mut stream = UnixStream::connect(api).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let about = "host: x\r\nconnection: close\r\ncontent-type: application/json";
    let len = body.len();
    let request = format!("{call} HTTP/1.1\r\n{about}\r\ncontent-length: {len}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    assert!(head.starts_with("HTTP/1.1 200 "), "{call}: {answer}");
    serde_json::from_str(body).unwrap()
}

/// Returns the figures of a server's first disk.
#[track_caller]
pub fn figures(api: &Path) -> Value {
    ask(api, "GET /v1/figures", "")["disks"][0].clone()
}

/// Drains the server's first disk, which has this name. Waits until the drain holds a request. A
/// drained disk holds each request that comes, and the drain ends with the server. So a kill of the
/// server finds a request in flight, at whatever point of its load the guest is.
#[track_caller]
pub fn hold_a_request(api: &Path, disk: &str) {
    ask(api, &format!("POST /v1/disks/{disk}/drain"), r#"{"seconds":600}"#);
    until("a request is held", TOOL, || figures(api)["in_flight"].as_u64() > Some(0));
}

/// Returns the MD5 sum of the first `bytes` of a file, which it copies to `part`.
#[track_caller]
pub fn md5_of_first(bytes: u64, file: &Path, part: &Path) -> String {
    let mut first = File::open(file).unwrap().take(bytes);
    std::io::copy(&mut first, &mut File::create(part).unwrap()).unwrap();
    md5(part)
}

pub fn script_with_prelude(script: &str) -> String {
    format!("{NAP}{PRELUDE}{script}")
}

/// Lines of statistics from a log.
pub struct Statistics(pub String);

impl Statistics {
    /// Returns a figure (`requests`, `bytes`, `errors`) of a kind of request (`read`, `write`,
    /// `flush`, `discard`, `write-zeroes`), summed over all disks. Returns 0 if there were none.
    pub fn figure(&self, kind: &str, figure: &str) -> u64 {
        let mark = format!(" {kind}: queue time");
        let lines = self.0.lines().filter(|l| l.contains(&mark));
        let value = |line: &str| {
            let (_, rest) = line.split_once(&format!("{figure}="))?;
            rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok()
        };
        lines.map(|l| value(l).unwrap_or_else(|| panic!("no {figure}: {l}"))).sum()
    }
}
