//! Examples of every command, for `--help` and the man pages.
//!
//! Each program has a test that parses the command lines of its own examples, and a test that
//! every command has one.

/// A command line, and what it does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Example {
    pub does: &'static str,
    pub line: &'static str,
}

const fn example(does: &'static str, line: &'static str) -> Example {
    Example { does, line }
}

/// Examples of `blockyard ctl`.
const CTL: &[Example] = &[
    example("Show the server and its disks", "blockyard ctl status"),
    example("Limit a disk to 5000 requests a second", "blockyard ctl set web iops=5000"),
    example("Use another server's API", "blockyard ctl list --api /run/other.sock"),
];

/// Examples by command. The key is the path of the command without `blockyard`.
const ALL: &[(&str, &[Example])] = &[
    (
        "",
        &[
            example("Create a disk image of 10 GiB", "blockyard image create disk.qcow2 10G"),
            example(
                "Serve it to a virtual machine",
                "blockyard serve disk.qcow2 --vhost-user /run/disk.sock",
            ),
        ],
    ),
    (
        "serve",
        &[
            example(
                "Serve an image to QEMU or User Mode Linux",
                "blockyard serve disk.qcow2 --vhost-user /run/disk.sock --queues 4 --reactors 2",
            ),
            example(
                "Serve an image to NBD clients, at most 5000 requests a second",
                "blockyard serve disk.raw --nbd unix:/run/disk.nbd --name disk --iops 5000",
            ),
            example(
                "Serve all disks of a configuration file; SIGHUP reads the file again",
                "blockyard serve --config /etc/blockyard/blockyard.toml",
            ),
            example(
                "Check a configuration file and the images that it names",
                "blockyard serve --config /etc/blockyard/blockyard.toml --check-config",
            ),
        ],
    ),
    (
        "attach",
        &[
            example("Attach an image; prints /dev/ublkb0", "blockyard attach disk.qcow2"),
            example(
                "Attach it read-only as /dev/ublkb5",
                "blockyard attach disk.qcow2 --read-only --ublk=5",
            ),
        ],
    ),
    ("detach", &[example("Flush the image and remove its device", "blockyard detach /dev/ublkb0")]),
    (
        "xen",
        &[
            example("Attach an image to domain 3", "blockyard xen attach 3 disk.qcow2 xvdb"),
            example("Detach it", "blockyard xen detach 3 xvdb"),
        ],
    ),
    (
        "xen attach",
        &[
            example("Attach an image as xvda", "blockyard xen attach 3 disk.qcow2"),
            example(
                "Attach an image as xvdb with four queues",
                "blockyard xen attach 3 disk.qcow2 xvdb --queues 4",
            ),
        ],
    ),
    ("xen detach", &[example("Detach device xvdb from domain 3", "blockyard xen detach 3 xvdb")]),
    ("xen list", &[example("List devices for a program", "blockyard xen list --json")]),
    (
        "top",
        &[
            example("Show the disks, a sample every 2 s", "blockyard top --interval 2"),
            example("Print the disks once, the slowest first", "blockyard top --once"),
        ],
    ),
    ("ctl", CTL),
    ("ctl status", &[example("Show the server and its disks", "blockyard ctl status")]),
    (
        "ctl events",
        &[
            example("Print events as they happen", "blockyard ctl events"),
            example(
                "Print all that the server still has, for a program",
                "blockyard ctl events --since 0 --json",
            ),
        ],
    ),
    ("ctl list", &[example("List the disks for a program", "blockyard ctl list --json")]),
    ("ctl show", &[example("Show clients, settings and statistics", "blockyard ctl show web")]),
    (
        "ctl add",
        &[example(
            "Add a disk with two queues",
            "blockyard ctl add name=web image=/srv/web.qcow2 vhost-user=/run/web.sock queues=2",
        )],
    ),
    (
        "ctl remove",
        &[
            example("Remove a disk that no client uses", "blockyard ctl remove web"),
            example("Remove it and disconnect clients", "blockyard ctl remove web --force"),
        ],
    ),
    (
        "ctl set",
        &[
            example("Limit a disk to 5000 requests a second", "blockyard ctl set web iops=5000"),
            example("Remove the limit", "blockyard ctl set web iops="),
            example("Let writes wait for space", "blockyard ctl set web on-enospc=pause"),
            example(
                "Use the page cache, although a guest is connected",
                "blockyard ctl set web cache=writeback --force",
            ),
        ],
    ),
    (
        "ctl snapshot",
        &[
            example("Take a snapshot", "blockyard ctl snapshot web /srv/web-2.qcow2"),
            example(
                "Take a snapshot that a restart knows",
                "blockyard ctl snapshot --persist web /srv/web-2.qcow2",
            ),
        ],
    ),
    (
        "ctl backup",
        &[
            example("Copy a disk in use", "blockyard ctl backup web /backup/web.qcow2"),
            example(
                "Begin to copy a disk into a raw image",
                "blockyard ctl backup web /dev/shm/web.img --format raw --no-wait",
            ),
        ],
    ),
    (
        "ctl fork",
        &[
            example(
                "Add a disk web-test that begins as the disk web is now",
                "blockyard ctl fork web /srv/web-2.qcow2 name=web-test \
                 image=/srv/web-test.qcow2 vhost-user=/run/web-test.sock",
            ),
            example(
                "Make it so that a restart knows both disks",
                "blockyard ctl fork --persist web /srv/web-2.qcow2 name=web-test \
                 image=/srv/web-test.qcow2 vhost-user=/run/web-test.sock",
            ),
        ],
    ),
    ("ctl commit", &[example("Commit, and wait for the end", "blockyard ctl commit web")]),
    ("ctl stream", &[example("Begin to stream", "blockyard ctl stream web --no-wait")]),
    ("ctl jobs", &[example("List the jobs and their progress", "blockyard ctl jobs")]),
    ("ctl wait", &[example("Wait for the end of job 3", "blockyard ctl wait 3")]),
    ("ctl cancel", &[example("Cancel job 3", "blockyard ctl cancel 3")]),
    (
        "ctl reload",
        &[
            example("Print what a reload would change", "blockyard ctl reload --dry-run"),
            example("Apply the configuration file", "blockyard ctl reload"),
        ],
    ),
    ("ctl refresh", &[example("Adopt the image's new size", "blockyard ctl refresh web")]),
    ("ctl upgrade", &[example("Start the installed program anew", "blockyard ctl upgrade")]),
    ("ctl resize", &[example("Grow a disk to 20 GiB", "blockyard ctl resize web 20G")]),
    ("ctl flush", &[example("Make all answered writes durable", "blockyard ctl flush web")]),
    ("ctl drain", &[example("Hold requests for a minute", "blockyard ctl drain web")]),
    (
        "ctl disconnect",
        &[
            example("Disconnect all clients", "blockyard ctl disconnect web"),
            example("Disconnect one client", "blockyard ctl disconnect web 192.0.2.7:40312"),
        ],
    ),
    ("ctl resume", &[example("Let requests go on", "blockyard ctl resume web")]),
    (
        "image",
        &[
            example("Create a qcow2 image of 10 GiB", "blockyard image create disk.qcow2 10G"),
            example("Print its size and features", "blockyard image info disk.qcow2"),
        ],
    ),
    (
        "image create",
        &[
            example("Create a qcow2 image of 10 GiB", "blockyard image create disk.qcow2 10G"),
            example(
                "Create an overlay; the base stays unchanged",
                "blockyard image create -b base.raw -F raw overlay.qcow2",
            ),
            example(
                "Create an image with clusters of 1 MiB",
                "blockyard image create -o cluster_size=1M disk.qcow2 10G",
            ),
        ],
    ),
    (
        "image info",
        &[
            example("Print size, format and features", "blockyard image info disk.qcow2"),
            example(
                "Print a whole chain as JSON, also while a server has it open",
                "blockyard image info -U --backing-chain --json overlay.qcow2",
            ),
        ],
    ),
    (
        "image check",
        &[
            example("Check an image", "blockyard image check disk.qcow2"),
            example(
                "Repair leaks, refcounts and flags",
                "blockyard image check --repair all disk.qcow2",
            ),
        ],
    ),
    ("image map", &[example("List the extents as JSON", "blockyard image map --json disk.qcow2")]),
    (
        "image measure",
        &[
            example(
                "Print the size of a conversion to qcow2",
                "blockyard image measure -O qcow2 disk.raw",
            ),
            example(
                "Print the size of an empty image of 10 GiB",
                "blockyard image measure --size 10G -O qcow2",
            ),
        ],
    ),
    (
        "image compare",
        &[example("Compare two disks", "blockyard image compare disk.raw disk.qcow2")],
    ),
    (
        "image convert",
        &[
            example(
                "Convert a raw image to compressed qcow2",
                "blockyard image convert -c disk.raw disk.qcow2",
            ),
            example(
                "Export a disk to a raw image, with progress",
                "blockyard image convert -p -O raw overlay.qcow2 disk.img",
            ),
        ],
    ),
    (
        "image dd",
        &[example(
            "Copy the second MiB of a disk into a raw file",
            "blockyard image dd if=disk.qcow2 of=part.raw bs=1M skip=1 count=1",
        )],
    ),
    (
        "image resize",
        &[
            example("Grow a disk by 5 GiB", "blockyard image resize disk.qcow2 +5G"),
            example(
                "Shrink a disk to 8 GiB; the data after that is lost",
                "blockyard image resize --shrink disk.qcow2 8G",
            ),
        ],
    ),
    (
        "image commit",
        &[example(
            "Write an overlay into its backing file, at most 50 MiB a second",
            "blockyard image commit --rate-limit 50M overlay.qcow2",
        )],
    ),
    (
        "image rebase",
        &[
            example(
                "Give an overlay another backing file",
                "blockyard image rebase -b new.raw -F raw overlay.qcow2",
            ),
            example("Make an overlay independent", "blockyard image rebase -b '' overlay.qcow2"),
        ],
    ),
    (
        "image bitmap",
        &[
            example(
                "Begin to record writes in a new bitmap",
                "blockyard image bitmap --add disk.qcow2 monday",
            ),
            example(
                "Merge the bits of one bitmap into another",
                "blockyard image bitmap --merge monday disk.qcow2 week",
            ),
        ],
    ),
    (
        "image amend",
        &[example(
            "Enable lazy refcounts",
            "blockyard image amend -o lazy_refcounts=on disk.qcow2",
        )],
    ),
    (
        "image snapshot",
        &[
            example(
                "Take a snapshot",
                "blockyard image snapshot --create before-upgrade disk.qcow2",
            ),
            example("Go back to it", "blockyard image snapshot --apply before-upgrade disk.qcow2"),
        ],
    ),
    (
        "bench",
        &[example(
            "Measure 10 s of random reads on a server, 32 in flight",
            "blockyard bench client /run/disk.sock --runtime 10",
        )],
    ),
    (
        "bench client",
        &[
            example(
                "Random reads of 4 KiB for 10 s, four queues with 32 in flight each",
                "blockyard bench client /run/disk.sock --runtime 10 --queues 4 --depth 32",
            ),
            example(
                "Random reads and writes; the contents are verified",
                "blockyard bench client /run/disk.sock --rw randrw --verify",
            ),
        ],
    ),
    (
        "bench rate",
        &[
            example(
                "Time 1000 reads of random sizes",
                "blockyard bench rate read disk.raw --ops 1000",
            ),
            example(
                "Time durable writes on an NBD export for 10 s",
                "blockyard bench rate writesync nbd://localhost/disk --seconds 10",
            ),
        ],
    ),
    (
        "bench median",
        &[example("Print the median for each size", "blockyard bench median rate.txt")],
    ),
    (
        "bench percentile",
        &[example(
            "Print the 99th percentile for each size",
            "blockyard bench percentile 99 rate.txt",
        )],
    ),
    (
        "bench job",
        &[
            example(
                "Run the file server mix on a device for 30 s",
                "blockyard bench job fileserver /dev/vdb --seconds 30",
            ),
            example("Print a fio job file", "blockyard bench job stream-read --print"),
        ],
    ),
    (
        "bench compare",
        &[
            example(
                "Compare the host with QEMU guests; write a page with pictures",
                "blockyard bench compare --systems host,qemu-virtio,qemu-blockyard --report report",
            ),
            example(
                "Compare one job, five rounds",
                "blockyard bench compare job:fileserver --rounds 5",
            ),
        ],
    ),
    (
        "bench calibrate",
        &[example(
            "Measure the device of a folder for `serve --costs`",
            "blockyard bench calibrate /var/lib/images --output costs.toml",
        )],
    ),
    (
        "bench neighbours",
        &[example(
            "Measure two rows on the disk of a folder",
            "blockyard bench neighbours --target /var/lib/images --rows thrash-d1,weights",
        )],
    ),
    (
        "bench xen",
        &[example(
            "Compare the blkif and vhost-user back ends on a disk in memory",
            "blockyard bench xen ram:1G --rounds 1",
        )],
    ),
    (
        "bench plot",
        &[example(
            "Draw the read curve of a report",
            "blockyard bench plot report --output curve.png --work rate:read",
        )],
    ),
    (
        "bench diff",
        &[example(
            "Compare two reports; a slow-down of 5% is tolerated",
            "blockyard bench diff old-report report --tolerate 5",
        )],
    ),
    ("completions", &[example("Print the completions of bash", "blockyard completions bash")]),
    ("man", &[example("Write the man pages", "blockyard man /usr/local/share/man/man1")]),
];

/// Returns the examples of a command, such as `image create`. The path of the program itself is
/// empty.
pub fn of(path: &str) -> &'static [Example] {
    ALL.iter().find(|(command, _)| *command == path).map_or(&[], |(_, examples)| examples)
}

/// Returns all examples, each with the path of its command.
pub fn all() -> impl Iterator<Item = (&'static str, Example)> {
    ALL.iter().flat_map(|(path, examples)| examples.iter().map(|example| (*path, *example)))
}

impl Example {
    /// Returns the words of the command line, as a shell splits them. Quotes are single quotes
    /// around a whole word.
    pub fn words(&self) -> Vec<&'static str> {
        self.line.split(' ').map(|word| word.trim_matches('\'')).collect()
    }
}
