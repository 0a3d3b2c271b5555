//! The daemon without a virtual machine: `blockyard_driver` is the front end.
//!
//! ```text
//!   mistakes     options, configuration files, images, sockets: one clear line and an exit status
//!   hosts        hosts without O_DIRECT, io_uring or a permission
//!   locks        one writer; the lock of a killed daemon
//!   ending       SIGTERM drains; kill -9 loses no acknowledged write
//!   reload       SIGHUP: adds, removes, changes and resizes disks
//!   activation   sockets from systemd, and notifications to systemd
//!   idle         costs of an idle disk; what a thousand connections leave behind
//!   many         costs of hundreds of idle overlays of one base
//!   cache        write cache: what the guest reads, and when writes are durable
//!   requests     the last sector, ranges, serial, status codes, a read-only disk
//!   pin          guest memory registered with io_uring while its front end is connected
//!   probes       static probes of the program
//!   program      exec: images: another program is their map
//!   chains       qcow2 and backing images
//!   exchange     front ends connect, disconnect and die during an exchange of images
//!   full         a host without space, and disks that wait for it
//!   journal      a killed server loses no answered write of an image with metadata
//!   killed       kills during resize, snapshot, commit and stream
//!   abandoned    overlays that a start gives up; overlays of raw images in other folders
//!   kept_snapshot  kills at each step of a snapshot that the configuration keeps
//!   interrupted  kills while disks come and go, during a replay, in the middle of a message
//!   interrupted_handover kills at each message of a hand-over
//!   left_journals  a server that has no journals replays one, or looks at an image of its own
//!   load         queues on reactors, filters, statistics
//!   remote       images on an NBD server that dies and comes back
//!   second       a front end that connects while another one is connected
//!   moved        open images with paths that lead to another file
//!   bench        `blockyard bench` executes another program
//!   signals      front ends that make signals slow
//!   early_signals        SIGHUP and SIGTERM before a server is ready
//!   own_sockets  the sockets of API and hand-overs, and the answers of upgrades
//!   shares       limits, groups, and their change at run time
//!   messages     kills at each message of a front end, between handling and answer
//!   holder       a killed server starts again, and front ends go on
//!   handover     a new server takes the disks of a running one
//!   handover_calls       hand-overs while a call changes the configuration
//!   handover_faults      front ends that cannot be handed over, new servers that lack something
//!   handover_limits      hand-overs of a disk with a limit
//!   handover_migration   hand-overs and deaths during a live migration
//!   handover_nbd a new server continues the NBD connections of a running one
//!   handover_unopened    upgrades while the storage of a disk does not answer
//!   streams      standard output and standard error that fail or are not read
//!   tls          NBD with TLS: access, and the same data
//!   renewal      certificates, revocation and limits of NBD clients, changed at run time
//! ```

#[path = "../common/mod.rs"]
mod common;
mod disks;
mod guest;

mod abandoned;
mod activation;
mod bench;
mod cache;
mod chains;
mod early_signals;
mod ending;
mod exchange;
mod full;
mod handover;
mod handover_calls;
mod handover_faults;
mod handover_limits;
mod handover_migration;
mod handover_nbd;
mod handover_unopened;
mod holder;
mod hosts;
mod idle;
mod interrupted;
mod interrupted_handover;
mod journal;
mod kept_snapshot;
mod killed;
mod left_journals;
mod load;
mod locks;
mod many;
mod messages;
mod mistakes;
mod moved;
mod own_sockets;
mod pin;
mod probes;
mod program;
mod program_handover;
mod reload;
mod remote;
mod renewal;
mod requests;
mod second;
mod shares;
mod signals;
mod streams;
mod tls;
