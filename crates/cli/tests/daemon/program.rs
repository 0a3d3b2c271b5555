//! `exec:` images: the program starts before the sandbox closes, and its death hurts its own disk.
//! Limits and reservations apply to the disk. It goes on with the next server.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use blockyard_driver::status;

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, Signal, TOOL, run, until};
use crate::guest::{Guest, pattern};

/// Makes a program for which the whole disk is a file in another folder. It writes its process
/// number to `pid`.
fn program(folder: &Folder, data: &Path) -> String {
    let text = format!(
        "#!/bin/bash\necho $$ >{pid}\n\
         printf '%s\\n' 'blockyard-map 1' 'size 1048576' 'granule 4096' 'data w {data}' ready\n\
         while read -r word number how offset length; do\n\
         [[ $word = locate ]] && echo \"ok $number $length at 0 $offset\" || echo \"ok $number\"\n\
         done\n",
        pid = folder.join("pid").display(),
        data = data.display()
    );
    format!("exec:{}", folder.script("program", &text).display())
}

#[test]
fn a_program_says_where_the_data_of_a_disk_lie() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let data = elsewhere.image("data", 1 << 20);
    let (image, socket) = (program(&folder, &data), folder.join("s"));
    let mut daemon = Daemon::serve(&image, &socket, &[]);
    let mut guest = Guest::connect(&socket);
    let bytes = pattern(3, 64 << 10);
    assert_eq!(guest.write(8, &bytes), status::OK);
    assert_eq!(guest.flush(), status::OK);
    assert!(guest.read(8, bytes.len()).unwrap() == bytes);
    assert!(std::fs::read(&data).unwrap()[4096..][..bytes.len()] == bytes);
    let pid: i32 = std::fs::read_to_string(folder.join("pid")).unwrap().trim().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    daemon.wait_log("the program fails, and so does its disk: it has ended");
    assert_eq!(guest.read(1024, 4096), Err(status::IOERR));
    assert!(guest.read(8, bytes.len()).unwrap() == bytes, "what is remembered still works");
    guest.leave();
    assert!(daemon.terminate().success());
}

#[test]
fn a_program_that_does_not_start_leaves_the_other_disks_served() {
    let folder = Folder::new();
    let (image, config) = (folder.image("disk.img", 1 << 20), folder.join("toml"));
    let disk = |name: &str, image: &str| {
        let socket = folder.join(name);
        format!("[[disk]]\nname = {name:?}\nimage = {image:?}\nvhost-user = {socket:?}\n")
    };
    let text = disk("good", image.to_str().unwrap()) + &disk("bad", "exec:/bin/true");
    std::fs::write(&config, text).unwrap();
    let mut command = Command::new(BLOCKYARD);
    let mut daemon = Daemon::start(command.arg("serve").arg("--config").arg(&config));
    daemon.wait_ready();
    let mut guest = Guest::connect(&folder.join("good"));
    assert_eq!(guest.write(8, &pattern(3, 4096)), status::OK);
    daemon.wait_log("1 of 2 disks are not served");
    guest.leave();
    daemon.stop();
}

#[test]
fn a_program_ends_with_its_server() {
    let folder = Folder::new();
    let image = program(&folder, &folder.image("data", 1 << 20));
    let mut daemon = Daemon::serve(image, &folder.join("s"), &[]);
    let pid = std::fs::read_to_string(folder.join("pid")).unwrap();
    assert!(daemon.terminate().success());
    let process = Path::new("/proc").join(pid.trim());
    until("the program has ended", SOON, || !process.exists());
}

/// Returns a configuration with this disk.
fn disk(folder: &Folder, name: &str, image: &str) -> String {
    let socket = folder.join(name);
    format!("[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\nvhost-user = {socket:?}\n")
}

#[test]
fn a_server_in_a_sandbox_starts_no_program_later() {
    let folder = Folder::new();
    let image = program(&folder, &folder.image("data", 1 << 20));
    let config = folder.join("toml");
    let one = disk(&folder, "one", "ram:1M");
    std::fs::write(&config, &one).unwrap();
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).args(["serve", "--config"]).arg(&config));
    daemon.wait_ready();
    std::fs::write(&config, one + &disk(&folder, "two", &image)).unwrap();
    daemon.signal(Signal::HUP);
    daemon.wait_log("a server in a sandbox cannot start a program");
    daemon.wait_log("reloaded: ");
    assert!(daemon.running());
    assert!(Guest::connect(&folder.join("one")).read(0, 512).is_ok());
    assert!(daemon.terminate().success());
}

#[test]
fn a_program_ends_with_its_disk_and_leaves_no_zombie() {
    let folder = Folder::new();
    let image = program(&folder, &folder.image("data", 1 << 20));
    let (config, one) = (folder.join("toml"), disk(&folder, "one", "ram:1M"));
    std::fs::write(&config, one.clone() + &disk(&folder, "two", &image)).unwrap();
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).args(["serve", "--config"]).arg(&config));
    daemon.wait_ready();
    let pid = std::fs::read_to_string(folder.join("pid")).unwrap();
    std::fs::write(&config, one).unwrap();
    daemon.signal(Signal::HUP);
    let process = Path::new("/proc").join(pid.trim());
    until("the program has ended", SOON, || !process.exists());
    daemon.stop();
}

/// Returns the value of a metric of the only disk. `name`: with the labels after the disk's.
fn metric(api: &Path, name: &str) -> f64 {
    let mut stream = UnixStream::connect(api).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (name, label) = name.split_once(' ').unwrap_or((name, ""));
    let found = text
        .lines()
        .find(|line| line.starts_with(&format!("blockyard_disk_{name}{{")) && line.contains(label));
    let value = found.and_then(|line| line.rsplit_once(' '));
    value.unwrap_or_else(|| panic!("no {name}: {text}")).1.parse().unwrap()
}

#[test]
fn limits_reservations_and_statistics_are_those_of_other_disks() {
    let folder = Folder::new();
    let image = program(&folder, &folder.image("data", 1 << 20));
    let (socket, api) = (folder.join("s"), folder.join("api"));
    // The limit admits a request of one sector at once, and the next one after 512 s.
    let options = ["--name", "a", "--bps", "1", "--reserve-iops", "10", "--api"];
    let options = options.iter().copied().chain([api.to_str().unwrap()]).collect::<Vec<_>>();
    let daemon = Daemon::serve(&image, &socket, &options);
    let mut guest = Guest::connect(&socket);
    guest.read(0, 512).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(move || guest.read(8, 512).unwrap());
        until("the second request waits", SOON, || metric(&api, "queued_operations") == 1.0);
        assert_eq!(metric(&api, "requests_total operation=\"read\""), 1.0);
        let mut ctl = Command::new(BLOCKYARD);
        run(ctl.arg("ctl").arg("--api").arg(&api).args(["set", "a", "bps="]), TOOL).good();
        second.join().unwrap();
    });
    assert_eq!(metric(&api, "requests_total operation=\"read\""), 2.0);
    assert_eq!(metric(&api, "request_bytes_total operation=\"read\""), 1024.0);
    assert!(metric(&api, "throttled_seconds_total reason=\"limits\"") > 0.0);
    // The share is one of the device on which the program's data lie.
    assert_eq!(metric(&api, "reserved_requests_per_second"), 10.0);
    assert!(metric(&api, "share_used_seconds_total") > 0.0);
    daemon.stop();
}

/// The program notices neither a new server that fails nor two that take its disk over.
fn a_program_goes_on(sandbox: &str) {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let data = elsewhere.image("data", 1 << 20);
    let image = program(&folder, &data);
    let (one, both, control) = (folder.join("one.toml"), folder.join("toml"), folder.join("c"));
    let disks = disk(&folder, "one", &image);
    std::fs::write(&one, &disks).unwrap();
    // The server cannot hand over what is in its memory.
    std::fs::write(&both, disks + &disk(&folder, "two", "ram:1M")).unwrap();
    let serve = |config: &Path| {
        let mut command = Command::new(BLOCKYARD);
        command.args(["serve", "--sandbox", sandbox, "--config"]).arg(config);
        command.arg("--control").arg(&control);
        command
    };
    let mut daemon = Daemon::start(&mut serve(&both));
    daemon.wait_ready();
    let started = std::fs::read_to_string(folder.join("pid")).unwrap();
    let mut guest = Guest::connect(&folder.join("one"));
    let mut expected = vec![0; 1 << 20];
    let mut write_and_read = |number: usize| {
        let (at, bytes) = (number * (128 << 10), pattern(number as u64, 4096));
        assert_eq!(guest.write(at as u64 / 512, &bytes), status::OK);
        expected[at..at + bytes.len()].copy_from_slice(&bytes);
        assert_eq!(guest.flush(), status::OK);
        for at in (0..expected.len()).step_by(128 << 10) {
            let wanted = &expected[at..at + 4096];
            assert!(guest.read(at as u64 / 512, 4096).unwrap() == wanted, "after {number}");
        }
    };
    write_and_read(0);

    let mut fails = Daemon::start(serve(&both).arg("--takeover").arg(&control));
    assert!(!fails.ended(SOON).success());
    assert!(fails.log().contains("its data are in the memory"), "{}", fails.log());
    write_and_read(1);

    for number in 2..4 {
        let mut new = Daemon::start(serve(&one).arg("--takeover").arg(&control));
        assert!(new.became_ready(), "{}\n---- old ----\n{}", new.log(), daemon.log());
        assert!(daemon.ended(SOON).success(), "{}", daemon.log());
        daemon = new;
        write_and_read(number);
    }
    assert_eq!(std::fs::read_to_string(folder.join("pid")).unwrap(), started);
    let process = Path::new("/proc").join(started.trim());
    assert!(process.exists());
    drop(guest);
    daemon.stop();
    until("the program has ended", SOON, || !process.exists());
    assert!(std::fs::read(&data).unwrap() == expected);
}

#[test]
fn a_program_goes_on_with_the_next_server() {
    a_program_goes_on("on");
}

#[test]
fn a_program_goes_on_with_the_next_server_without_a_sandbox() {
    a_program_goes_on("off");
}
