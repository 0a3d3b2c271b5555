//! Errors in options, configuration files, image paths and socket paths.

use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, Mode};

use crate::common::{BLOCKYARD, Daemon, Folder, Signal, blockyard, tool};
use crate::guest::{Guest, pattern};

/// Runs `blockyard ARGS`, which must fail with `status` and one line that has all of `parts`.
#[track_caller]
fn refused(args: &[&str], status: i32, parts: &[&str]) -> String {
    let done = blockyard(args);
    let context = format!("blockyard {args:?}: {}\n{}{}", done.status, done.out, done.err);
    assert_eq!(done.status.code(), Some(status), "{context}");
    assert_eq!(
        (done.out.as_str(), done.err.lines().count()),
        ("", 1),
        "one line is wanted: {context}"
    );
    assert!(done.err.starts_with("blockyard: "), "{context}");
    for part in parts {
        assert!(done.err.contains(part), "{part:?} is not in it: {context}");
    }
    done.err
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn make_pipe(path: &Path) {
    rustix::fs::mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

#[test]
fn wrong_option_values_are_refused() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    for (more, parts) in [
        (&["--queues", "0"][..], &["'0'", "--queues", "from 1 to 256"][..]),
        (&["--queues", "257"], &["'257'", "from 1 to 256"]),
        (&["--queue-size", "100"], &["'100'", "a queue size is a power of two from 4 to 32768"]),
        (&["--queue-size", "2"], &["'2'", "from 4 to 32768"]),
        (
            &["--cache", "foo"],
            &["\"foo\" is not known", "writeback, writethrough, directsync, unsafe"],
        ),
        (&["--cahce", "none"], &["'--cahce'", "'--cache'"]),
        (&["--format", "vmdk"], &["\"vmdk\" is not known", "raw, qcow2 or cow"]),
        (&["--l2-cache", "much"], &["a size is a number of bytes"]),
        (&["--reactors", "0"], &["'0'", "--reactors"]),
        (&["--on-reactors", "x"], &["'x'", "a list of reactors is numbers from 0 on"]),
        (&["--on-reactors", "0", "--nbd", "unix:n"], &["--on-reactors is not for --nbd"]),
        (&["--poll", "often"], &["poll is auto, off, or microseconds"]),
        (&["--iops", "-5"], &["--iops: '-5' is negative, and a value here is not"]),
        (&["--bps", "-5M"], &["--bps: '-5M' is negative"]),
        (&["--l2-cache", "-5M"], &["--l2-cache: '-5M' is negative"]),
        (&["--bps", "5P"], &["limit \"5P\"", "suffix k, M, G or T"]),
        (&["--bps", "1.5M"], &["limit \"1.5M\"", "a whole number"]),
        (&["--cpus", "99"], &["--cpus", "cannot use processor 99: it may use "]),
        (&["--cpus", "4000"], &["--cpus", "cannot use processor 4000"]),
        (&["--log", "loud"], &["'loud'", "--log", "a level is error, warn, info, debug or trace"]),
        (&["--filter", "slow:read=1ms"], &["\"slow:read=1ms\" is not known", "delay:KIND=TIME"]),
        (&["--weight", "0"], &["'0'", "--weight", "from 1 to 10000"]),
        (&["--iops", "0"], &["limit \"0\"", "a rate is at least 1"]),
        (&["--bps", "10M,burst=20M"], &["--bps", "RATE[,max=RATE[,length=SECONDS]]"]),
        (&["--latency-target", "5"], &["\"5\"", "a unit (us, ms or s)"]),
        (
            &["--reserve-iops", "10", "--iops", "5"],
            &["disk \"disk\"", "reserve-iops is 10, more than the limit iops of 5"],
        ),
        (&["--group", "g"], &["'--group'"]),
        (&["--filter", "delay:read=5"], &["\"5\"", "a unit: us, ms or s"]),
        (&["--serial", "123456789012345678901"], &["has 21 bytes", "20"]),
        (&["--config", "x.toml"], &["--config", "cannot be used with"]),
        (&["--vhost-user", "other"], &["--vhost-user", "cannot be used multiple times"]),
    ] {
        let args = [&["serve", text(&image), "--vhost-user", text(&socket)], more].concat();
        refused(&args, 2, parts);
    }
    for (option, value, part) in [
        ("--api", "", "the path of the API's socket is empty"),
        ("--api", "a\nb", "no control characters"),
        ("--control", "a\nb", "no control characters"),
        ("--nbd", "unix:a\nb", "no control characters"),
        ("--vhost-user", "a\nb", "its vhost-user socket has a control character"),
    ] {
        let given = ["serve", text(&image), "--ublk", option, value];
        refused(&given, 2, &[option, part][usize::from(option == "--vhost-user")..]);
    }
    refused(&["attach"], 2, &["<IMAGE>"]);
    let missing = folder.join("missing");
    refused(&["man", text(&missing)], 1, &[text(&missing), "No such file"]);
    refused(&["serve"], 2, &["IMAGE"]);
    refused(&["serve", text(&image)], 2, &["--vhost-user"]);
    refused(&["serve", "--check-config"], 2, &["--config"]);
    refused(&["serv"], 2, &["'serv'", "'serve'"]);
    for size in ["null:0", "null:", "ram:1x", "ram:99999999T"] {
        refused(&["serve", size, "--vhost-user", text(&socket)], 1, &[size, "suffix k, M, G or T"]);
    }
    let model = "delay:1G,parallel=8,raed=1ms";
    refused(
        &["serve", model, "--vhost-user", text(&socket)],
        1,
        &[model, "\"raed=1ms\" is not known", "KIND=TIME"],
    );
    refused(
        &["serve", "ram:100T", "--vhost-user", text(&socket)],
        1,
        &["ram:100T", "choose a smaller one"],
    );
    assert!(!socket.exists());
}

#[test]
fn options_without_effect_are_refused() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    for (more, part) in [
        (&["--nbd-name", "x"][..], "disk \"disk\": --nbd-name is for --nbd"),
        (&["--nbd-block-size", "512"], "--nbd-block-size is for --nbd"),
        (&["--description", "x"], "--description is for --nbd"),
        (&["--xen-data", "map"], "--xen-data is for --xen"),
        (&["--read-only", "--on-enospc", "pause"], "disk \"disk\": --on-enospc is about writes"),
        (&["--read-only", "--abandon-overlay"], "--abandon-overlay is about writes"),
        (&["--socket-mode", "660"], "--socket-mode (key socket-mode) is for the API's socket"),
        (&["--socket-group", "kvm"], "--socket-group (key socket-group) is for the API's socket"),
    ] {
        let args = [&["serve", text(&image), "--vhost-user", text(&socket)], more].concat();
        refused(&args, 2, &[part]);
    }
    let file = folder.join("toml");
    let disk = format!("[[disk]]\nimage = \"ram:1M\"\nvhost-user = \"{}\"\n", text(&socket));
    let check = ["serve", "--check-config", "--config", text(&file)];
    let key = format!("socket-mode = \"660\"\n{disk}");
    std::fs::write(&file, &key).unwrap();
    refused(&check, 2, &["key socket-mode", "set --api"]);
    // The file has the API, and the options win.
    std::fs::write(&file, format!("api = \"{}\"\n{key}", text(&folder.join("api")))).unwrap();
    let options = ["--socket-mode", "600", "--socket-group", "0"];
    blockyard(check.iter().chain(&options)).good();
    // The disks of toolstacks come later.
    std::fs::write(&file, "").unwrap();
    let watch = ["--xen-watch", "vbd", "--xen-folder", text(&folder)];
    let valid = blockyard(check.iter().chain(&watch)).good();
    assert_eq!(valid, "configuration is valid: 0 disks\n");
}

/// Two texts of one address are one address, so the disks share a server.
#[test]
fn disks_share_an_address_however_it_is_written() {
    let folder = Folder::new();
    let (file, socket) = (folder.join("toml"), folder.join("n"));
    let disk = |name: &str, path: &str| {
        let address = format!("nbd = \"unix:{path}\"");
        format!("[[disk]]\nname = \"{name}\"\nimage = \"ram:1M\"\n{address}\n")
    };
    let disks = disk("a", "n") + &disk("b", "./n") + &disk("c", text(&socket));
    std::fs::write(&file, disks).unwrap();
    let mut command = Command::new(BLOCKYARD);
    command.args(["serve", "--config", text(&file)]).current_dir(text(&folder));
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    let list = tool("nbdinfo", ["--list", &format!("nbd+unix://?socket={}", text(&socket))]);
    let list = list.good();
    for name in ["a", "b", "c"] {
        assert!(list.contains(&format!("export=\"{name}\"")), "{list}");
    }
    daemon.stop();
}

#[test]
fn wrong_images_are_refused() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let serve = |image: &str, status, parts: &[&str]| {
        refused(
            &["serve", image, "--vhost-user", text(&socket)],
            status,
            &[&[image], parts].concat(),
        )
    };
    serve(text(&folder.join("nothing")), 1, &["there is no such file"]);
    serve(text(&folder.join("no/folder")), 1, &["there is no such file"]);
    serve("exec:", 1, &["the form is exec:/path/of/program"]);
    serve("exec:program", 1, &["the form is exec:/path/of/program"]);
    serve(text(&folder), 1, &["must be a regular file or a block device"]);
    serve("/dev/null", 1, &["must be a regular file or a block device", "use null:SIZE"]);
    let fifo = folder.join("fifo");
    make_pipe(&fifo);
    serve(text(&fifo), 1, &["must be a regular file or a block device"]);
    for name in ["disk.qcow2", "disk.QCOW2"] {
        serve(text(&folder.image(name, 1 << 20)), 1, &["qcow2 header at offset 0"]);
    }
    for name in ["disk.vmdk", "disk.VDI"] {
        serve(text(&folder.image(name, 1 << 20)), 2, &["which is not served", "--format raw"]);
    }
    assert!(!socket.exists());
    // The advice in the message works.
    let daemon = Daemon::serve(folder.join("disk.qcow2"), &socket, &["--format", "raw"]);
    assert_eq!(Guest::connect(&socket).capacity(), 1 << 20);
    daemon.stop();
}

#[test]
fn wrong_sockets_are_refused() {
    let folder = Folder::new();
    let image = folder.image("disk", 1 << 20);
    let serve = |socket: &Path, parts: &[&str]| {
        refused(&["serve", text(&image), "--vhost-user", text(socket)], 1, parts)
    };

    let live = folder.join("live");
    let listener = UnixListener::bind(&live).unwrap();
    serve(&live, &[text(&live), "another server listens on it"]);
    drop(listener);

    let file = folder.join("file");
    std::fs::write(&file, "precious").unwrap();
    serve(&file, &[text(&file), "that is no socket"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

    let nowhere = folder.join("nowhere/s");
    serve(
        &nowhere,
        &[
            text(&nowhere),
            "its folder",
            text(nowhere.parent().unwrap()),
            "does not exist: create it",
        ],
    );

    // A socket path has at most 107 bytes.
    let long = |len: usize| folder.join("x".repeat(len - folder.as_os_str().len() - 1));
    serve(&long(108), &["108 bytes", "107"]);
    let daemon = Daemon::serve(&image, &long(107), &[]);
    Guest::connect(&long(107)).leave();
    daemon.stop();
}

#[test]
fn a_stale_socket_is_replaced() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    Daemon::serve(&image, &socket, &[]).kill();
    assert!(
        std::fs::metadata(&socket).unwrap().file_type().is_socket(),
        "the killed daemon leaves its socket"
    );
    assert!(UnixStream::connect(&socket).is_err());
    let daemon = Daemon::serve(&image, &socket, &[]);
    let mut guest = Guest::connect(&socket);
    assert_eq!(guest.write(0, &pattern(1, 4096)), 0);
    daemon.stop();
    assert!(!socket.exists(), "a daemon that is ended takes its socket along");
}

const DISK: &str = "[[disk]]\nimage = \"ram:1M\"\nvhost-user = \"/nonexistent/s\"\n";

#[test]
fn wrong_configuration_files_are_refused() {
    let folder = Folder::new();
    let file = folder.join("disks.toml");
    let config = text(&file);
    refused(&["serve", "--config", config], 2, &[config, "cannot read it", "No such file"]);
    let other = DISK.replace("[[disk]]", "[[disk]]\nname = \"other\"");
    for (content, parts) in [
        (
            format!("{DISK}cach = \"none\"\n"),
            &["line 4: unknown key `cach`: did you mean `cache`?"][..],
        ),
        (
            format!("# A comment.\n\n{DISK}cache = \"fast\"\n"),
            &["line 6", "cache mode \"fast\" is not known"],
        ),
        (format!("{DISK}queues = \"four\"\n"), &["line 4: queues: \"four\"", "from 1 to 256"]),
        (format!("{DISK}read-only = maybe\n"), &["line 4"]),
        (format!("{DISK}[[disk\n"), &["line 4"]),
        (
            format!("{DISK}filters = [\"slow:read=1ms\"]\n"),
            &["line 4", "\"slow:read=1ms\" is not known"],
        ),
        (
            "\n[[disk]]\nimage = \"ram:1M\"\n".into(),
            &["disk \"ram:1M\": it has no export: set vhost-user"],
        ),
        (
            format!(
                "{DISK}nbd = \"unix:a\"\n{}",
                DISK.replace("/s\"", "/t\"\nnbd = \"unix:a\"")
                    .replace("ram:1M", "ram:2M")
                    .replace("[[disk]]", "[[disk]]\nnbd-name = \"ram:1M\"")
            ),
            &["disk \"ram:2M\": another disk has that name at unix:a"],
        ),
        (
            format!("reactors = 0\n{DISK}"),
            &["line 1: reactors: \"0\": a number of reactors is from 1 to 256"],
        ),
        (
            format!("{DISK}queues = 0\n"),
            &["line 4: queues: \"0\": a number of queues is from 1 to 256"],
        ),
        (
            format!("{DISK}queue-size = 100\n"),
            &["line 4: queue-size: \"100\": a queue size is a power of two"],
        ),
        (format!("{DISK}serial = \"123456789012345678901\"\n"), &["has 21 bytes"]),
        (format!("{DISK}{DISK}"), &["two disks are called \"ram:1M\""]),
        (format!("{DISK}{other}"), &["disk \"other\": another disk has the socket /nonexistent/s"]),
        (DISK.replace("ram:1M", "/x/disk.vmdk"), &["/x/disk.vmdk", "--format raw"]),
        (format!("{DISK}format = \"vmdk\"\n"), &["line 4", "format \"vmdk\" is not known"]),
        (
            format!("costs = \"/not/there\"\n{DISK}"),
            &["the key costs: /not/there: cannot read it: No such file"],
        ),
        (
            format!("costs = \"/proc/self/status\"\n{DISK}"),
            &["/proc/self/status is no file of costs", "line 1"],
        ),
        (String::new(), &["it has no disk", "[[disk]]"]),
        (DISK.replace("[[disk]]", "[disk]"), &["line 1: [disk] is one table", "write [[disk]]"]),
        (format!("{DISK}iops = 1.5\n"), &["line 4: iops: limit \"1.5\"", "a whole number"]),
        (format!("{DISK}prime = true\n"), &["ram:1M", "--prime is for qcow2 and cow"]),
        (format!("{DISK}activation = \"rings\"\n"), &["ram:1M", "that another server can open"]),
        (format!("{DISK}activation = \"ring\"\n"), &["line 4", "start or rings"]),
    ] {
        std::fs::write(&file, &content).unwrap();
        refused(&["serve", "--config", config], 2, parts);
        refused(&["serve", "--config", config, "--check-config"], 2, parts);
    }
}

#[test]
fn a_configuration_with_pipes_and_folders_is_refused_at_once() {
    let folder = Folder::new();
    let file = folder.join("disks.toml");
    let config = text(&file);
    make_pipe(&file);
    refused(&["serve", "--config", config], 2, &[config, "it is a pipe"]);
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, DISK).unwrap();
    let part = folder.join("conf.d/part.toml");
    std::fs::create_dir(folder.join("conf.d")).unwrap();
    make_pipe(&part);
    refused(&["serve", "--config", config], 2, &[text(&part), "it is a pipe"]);
    std::fs::remove_file(&part).unwrap();
    std::fs::create_dir(&part).unwrap();
    refused(&["serve", "--config", config], 2, &[text(&part), "it is a folder"]);
    std::fs::remove_dir(&part).unwrap();
    let costs = folder.join("costs");
    make_pipe(&costs);
    refused(
        &["serve", "--config", config, "--costs", text(&costs)],
        2,
        &[text(&costs), "it is a pipe"],
    );
}

#[test]
fn check_config_opens_the_images() {
    let folder = Folder::new();
    let (file, image, socket) = (folder.join("disks.toml"), folder.join("disk"), folder.join("s"));
    let disk = DISK.replace("/nonexistent/s", text(&folder.join("t")));
    let content = format!(
        "{disk}[[disk]]\nimage = \"{}\"\nvhost-user = \"{}\"\n",
        image.display(),
        socket.display()
    );
    std::fs::write(&file, content).unwrap();
    let arguments = ["serve", "--check-config", "--config", text(&file)];
    let place = format!("configuration {}: line ", text(&file));
    refused(
        &arguments,
        2,
        &[&place, "disk \"disk\": image ", text(&image), "there is no such file"],
    );
    // Another server may have the image open.
    folder.image("disk", 1 << 20);
    let daemon = Daemon::serve(&image, &folder.join("other"), &[]);
    assert_eq!(blockyard(arguments).good(), "configuration is valid: 2 disks\n");
    assert!(!socket.exists());
    daemon.stop();
    // The next start would not open the image for writing.
    let overlay = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&image, "user.blockyard.overlay", b"top.qcow2", overlay).unwrap();
    refused(&arguments, 2, &[&place, "disk \"disk\": image ", "a live snapshot has put overlay"]);
    let read_only = std::fs::read_to_string(&file).unwrap() + "read-only = true\n";
    std::fs::write(&file, read_only).unwrap();
    blockyard(arguments).good();
}

#[test]
fn check_config_finds_what_the_host_lacks() {
    let folder = Folder::new();
    let (file, plain) = (folder.join("disks.toml"), folder.image("plain", 512));
    let api = format!("api = \"{}\"\n", text(&folder.join("api")));
    let qcow2 = folder.join("disk.qcow2");
    blockyard(["image", "create", text(&qcow2), "1M"]).good();
    let socket = |path: &str| format!("[[disk]]\nimage = \"ram:1M\"\nvhost-user = \"{path}\"\n");
    let disk = socket(text(&folder.join("s")));
    for (content, parts) in [
        (format!("user = \"none-such\"\n{disk}"), &["user: none-such: this host has no"][..]),
        (
            format!("allow-folders = [\"/none/such\"]\n{disk}"),
            &["allow-folders: /none/such: there is no"],
        ),
        (format!("{api}socket-group = \"none-such\"\n{disk}"), &["no group \"none-such\""]),
        (format!("{disk}on-reactors = \"0,3\"\n"), &["line 4", "there is no reactor 3", "has 1"]),
        (disk.replace("ram:1M", "ram:"), &["line 2", "ram:: a size is a number"]),
        (
            socket(text(&plain)),
            &["line 3", "vhost-user: ", text(&plain), "a file that is no socket"],
        ),
        (format!("api = \"\"\n{disk}"), &["line 1: api: the path of the API's socket is empty"]),
        (format!("api = \"a\\nb\"\n{disk}"), &["line 1: api: \"a\\nb\"", "no control characters"]),
        (socket("a\\nb"), &["line 1", "its vhost-user socket has a control character"]),
        (format!("{disk}nbd = \"unix:a\\nb\"\n"), &["line 4: nbd: ", "no control characters"]),
        (format!("{disk}serial = \"a\\nb\"\n"), &["line 1", "a serial has no control characters"]),
        (disk.replace("ram:1M", ""), &["line 1", "the path of an image is empty"]),
        (
            disk.replace("ram:1M", "/a\\nb"),
            &["line 1", "image \"/a\\nb\"", "of an image has no control characters"],
        ),
        (socket(&"x".repeat(108)), &["line 3", "108 bytes, at most 107"]),
        (format!("api = \"/a/./b\"\n{}", socket("/a/b")), &["its socket /a/b is that of --api"]),
        (format!("api = \"fd:3\"\n{}", socket("fd:3")), &["its socket fd:3 is that of --api"]),
        (
            socket("/none/such/s"),
            &["line 3: disk \"ram:1M\": vhost-user: socket /none/such/s: its folder /none/such"],
        ),
        (
            format!("\n{disk}nbd = \"unix:/none/such/n\"\n"),
            &["line 5: disk \"ram:1M\": nbd: socket /none/such/n", "create it first"],
        ),
        (
            format!("\napi = \"/none/such/a\"\n{disk}"),
            &["disks.toml: line 2: api: socket /none/such/a: its folder /none/such does not exist"],
        ),
        (
            disk.clone() + &format!("nbd = \"unix:{}\"\n", text(&folder.join("s"))),
            &["two of its exports have the socket /"],
        ),
        (disk.clone() + &disk.replace("[[disk]]", "[[disk]]\nname = \"b\""), &["has the socket"]),
    ] {
        std::fs::write(&file, &content).unwrap();
        refused(&["serve", "--check-config", "--config", text(&file)], 2, parts);
    }
    std::fs::write(&file, &disk).unwrap();
    let check = ["serve", "--check-config", "--config", text(&file)];
    let control = [&check[..], &["--control", text(&plain)]].concat();
    refused(&control, 2, &[text(&plain), "a file that is no socket"]);
    // The name of a disk that a file of the folder removes.
    std::fs::create_dir(folder.join("conf.d")).unwrap();
    let part = folder.join("conf.d/20.toml");
    std::fs::write(&part, "# A comment.\nremove = [\n  \"ram:1N\",\n]\n").unwrap();
    let name =
        ["20.toml: line 3: remove: no earlier file has a disk \"ram:1N\"", "mean \"ram:1M\"?"];
    refused(&check, 2, &name);
    std::fs::remove_file(&part).unwrap();
    // The service makes the folder of its sockets, and its state folder.
    let state = folder.join("state");
    let content = format!(
        "state-folder = \"{}\"\n{}",
        text(&state),
        socket("/run/none-such/socket").replace("ram:1M", text(&qcow2))
    );
    std::fs::write(&file, content).unwrap();
    assert_eq!(blockyard(check).good(), "configuration is valid: 1 disk\n");
    assert!(!state.exists(), "a check makes the state folder");
}

#[test]
fn one_image_for_two_disks_is_refused_unless_both_are_read_only() {
    let folder = Folder::new();
    let (file, image) = (folder.join("disks.toml"), folder.image("disk", 1 << 20));
    let link = folder.join("link");
    std::os::unix::fs::symlink(&image, &link).unwrap();
    let disk = |name: &str, image: &Path, more: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = {image:?}\nvhost-user = {:?}\n{more}",
            folder.join(name)
        )
    };
    std::fs::write(&file, disk("a", &image, "") + &disk("b", &link, "")).unwrap();
    let arguments = ["serve", "--check-config", "--config", text(&file)];
    refused(
        &arguments,
        2,
        &["disk \"b\": disk \"a\" has the same image", text(&link), "read-only"],
    );
    let more = "read-only = true\n";
    std::fs::write(&file, disk("a", &image, more) + &disk("b", &link, more)).unwrap();
    assert_eq!(blockyard(arguments).good(), "configuration is valid: 2 disks\n");
}

#[test]
fn one_bad_disk_does_not_stop_the_others() {
    let folder = Folder::new();
    let (file, socket) = (folder.join("disks.toml"), folder.join("s"));
    let good = format!(
        "[[disk]]\nname = \"good\"\nimage = \"ram:1M\"\nvhost-user = \"{}\"\n",
        socket.display()
    );
    let bad = DISK.replace("ram:1M", "/not/there");
    std::fs::write(&file, format!("{good}{bad}")).unwrap();
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).args(["serve", "--config", text(&file)]));
    daemon.wait_ready();
    assert_eq!(Guest::connect(&socket).capacity(), 1 << 20);
    let log = daemon.stop();
    assert!(
        log.contains("image /not/there: there is no such file") && log.contains("1 of 2 disks"),
        "{log}"
    );
    // If no disk can be served, the server exits.
    std::fs::write(&file, bad).unwrap();
    refused(&["serve", "--config", text(&file)], 1, &["image /not/there: there is no such file"]);
}

#[test]
fn help_and_version_succeed() {
    for args in [&["--help"][..], &["serve", "--help"], &["--version"]] {
        let done = blockyard(args);
        assert!(done.err.is_empty(), "{}", done.err);
        assert!(done.good().contains("blockyard"));
    }
    // SIGINT from the terminal ends the server like SIGTERM.
    let folder = Folder::new();
    let mut daemon = Daemon::serve("null:1M", &folder.join("s"), &[]);
    daemon.signal(Signal::INT);
    assert!(daemon.ended(crate::common::SOON).success());
}
