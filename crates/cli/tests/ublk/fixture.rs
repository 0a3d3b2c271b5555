//! Guests with the program under test, a disk for images and the ublk driver. An emulated boot
//! takes seconds, so a guest runs the scripts of several tests, one after another. A test waits for
//! a busy guest and boots no second one of the same kind. An idle guest is paused, because its
//! timers take 18% of a processor of the host.
//!
//! A guest has one processor. It has two for scripts that need several queues, or programs that
//! really run at the same time. Two emulated processors wait for each other in loops, and a script
//! takes half as much time of the host again.
//!
//! What must hold: each script finds the guest as after a boot: idle, with the ublk driver, and
//! without devices, processes, modules and files of an earlier script. A guest runs no other script
//! if one failed or if cleaning failed. A guest ends with this process.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;

use crate::common::qmp::Qmp;
use crate::common::{Folder, Guest, NAP, stripped_program};

/// The guest runs each script that it reads from its FIFO. It prints how the script ended and
/// whether the guest is clean. It starts few programs for that, because an emulated processor takes
/// 50 ms for each.
const SERVE_SCRIPTS: &str = r#"
shopt -s dotglob extglob nullglob
# Sets `left` to the processes of a script that are left.
find_left() {
    local file word
    left=()
    for file in /proc/[0-9]*/cmdline; do
        IFS= read -rd '' word <"$file" || continue
        [[ $word != @(/host/blockyard|sleep|fio|strace)* ]] || left+=("${file//[^0-9]/}")
    done
}
# Returns whether a file system other than the tmpfs of the boot is mounted there.
is_mounted() { # FOLDER
    local device folder kind rest
    while read -r device folder kind rest; do
        [[ $folder != "$1" || $kind == tmpfs ]] || return 0
    done </proc/mounts
    return 1
}
clean() {
    local try control module users nodes
    for ((try = 0; try < 600; try++)); do
        find_left
        ((${#left[@]})) || break
        kill -KILL "${left[@]}" || :
        sleep 0.05
    done
    ((${#left[@]} == 0)) || { echo "processes ${left[*]} are left" && return 1; }
    cd /
    while is_mounted /mnt; do umount /mnt || return; done
    for control in /dev/ublkc*; do
        /host/blockyard detach --force "/dev/ublkb${control#/dev/ublkc}" || return
    done
    find_left
    ((${#left[@]} == 0)) || { echo "processes ${left[*]} are left" && return 1; }
    [[ ! -e /sys/module/loop ]] || losetup -D
    rm -rf /tmp/!(images) /tmp/images/* /mnt/* /run/blockyard* || return
    [[ -k /tmp ]] || chmod 1777 /tmp
    for module in loop nbd; do
        for ((try = 0; try < 600; try++)); do
            [[ -e /sys/module/$module ]] || break
            modprobe -r $module || sleep 0.05
        done
        [[ ! -e /sys/module/$module ]] || return
    done
    # The driver has users as long as a program has a device open. A script may have removed it.
    for ((try = 0; try < 600; try++)); do
        nodes=(/dev/ublk[bc]*) users=0
        [[ ! -e /sys/module/ublk_drv ]] || users=$(</sys/module/ublk_drv/refcnt)
        ((users + ${#nodes[@]})) || break
        sleep 0.05
    done
    ((users + ${#nodes[@]} == 0)) || { echo "$users users of ublk_drv, ${nodes[*]}" && return 1; }
    dmesg -C
}
modprobe ublk_drv
mkfs.ext4 -q /dev/vda
mkdir /tmp/images
mount /dev/vda /tmp/images
exec 4<"$GUEST_INPUT"
echo "guest: ready"
while read -r bytes <&4; do
    head -c "$bytes" <&4 >/run/script
    status=0
    (cd /tmp && exec setsid bash -euo pipefail /run/script </dev/null 4<&-) || status=$?
    ((status == 0)) || { echo "script: ended with status $status" && break; }
    clean >/run/cleaned 2>&1 || { echo "script: passed, guest not clean: $(tr '\n' ' ' </run/cleaned)" && break; }
    echo 'script: passed'
done
"#;

/// Shell functions for the scripts.
const PRELUDE: &str = r#"
blockyard() { /host/blockyard "$@"; }
pid=

not() { ! "$@"; } # COMMAND...: fails if it succeeds. (Bash goes on after `! COMMAND` in any case.)

logged() { [[ $(</tmp/log) == *"$1"* ]]; } # TEXT

# Waits until the log has a line that matches. (A thread writes the log: a line that precedes `ready`
# may come after it.)
until_logged() { # PATTERN [COUNT]
    local try line lines
    for ((try = 0; try < 3000; try++)); do
        lines=0
        while IFS= read -r line; do [[ ! $line =~ $1 ]] || lines=$((lines + 1)); done </tmp/log
        ((lines < ${2:-1})) || return 0
        nap 0.02
    done
    echo "not in the log: $1" && cat /tmp/log && return 1
}

# Returns whether a server of `attach` runs. (An emulated pgrep takes a tenth of a second.)
is_attached() {
    local file words
    for file in /proc/[0-9]*/cmdline; do
        mapfile -d '' words <"$file" || continue
        [[ " ${words[*]} " != *' --attached '* ]] || return 0
    done 2>/dev/null
    return 1
}

# Serves an image by ublk in the background: $pid, the log in /tmp/log. Retries while a killed server
# still holds the lock of its image.
serve() { # IMAGE OPTIONS...
    for ((try = 0; try < 600; try++)); do
        : >/tmp/out
        /host/blockyard serve "$@" >/tmp/out 2>>/tmp/log &
        pid=$!
        while kill -0 $pid 2>/dev/null; do
            [[ $(</tmp/out) != *ready* ]] || return 0
            nap 0.02
        done
        tail -n 1 /tmp/log | grep -q 'is in use by' || break
    done
    cat /tmp/log
    return 1
}

# Sends SIGTERM and expects status 0.
stop() {
    kill -TERM $pid
    wait $pid || { cat /tmp/log && return 1; }
}

# Prints a figure of the last log line about the end of a device: requests, bytes, copied.
figure() { # NAME
    sed -n "s/.*not served any more.* $1=\([0-9]*\).*/\1/p" /tmp/log | tail -n 1
}

# Runs fio: random data with checksums, output only if it fails.
load() { # ARGUMENTS...
    fio --eta=never --output=/tmp/fio.log --ioengine=libaio --direct=1 --iodepth=16 --verify=crc32c --verify_fatal=1 \
        --group_reporting "$@" || { cat /tmp/fio.log && return 1; }
}

# The same in the background, until it receives a signal. (The limit is for a load that nothing ends.)
begin_load() { # ARGUMENTS...
    load --time_based --runtime=1000 --verify_backlog=64 "$@" >/dev/null &
    load=$!
}

# Ends the load, which must have run until now without an error. fio has a special status after
# SIGTERM.
end_load() {
    local ended=0
    pkill -TERM -x fio || { cat /tmp/fio.log && return 1; }
    wait $load || ended=$?
    [[ $ended == 1 ]] && grep -q 'terminating on signal 15' /tmp/fio.log && grep -qE 'err= *0' /tmp/fio.log || {
        cat /tmp/fio.log && return 1
    }
}

# Waits until a device has completed more reads and writes of the load.
answered() { # NAME
    local from now
    read -r -a from </sys/block/$1/stat
    until read -r -a now </sys/block/$1/stat && ((now[0] > from[0] + 16 && now[4] > from[4] + 16)); do
        kill -0 $load || { cat /tmp/fio.log /tmp/log && return 1; }
        nap 0.02
    done
}

fails() { # STATUS WORD... -- COMMAND...: the command fails so, and its message has the words
    local status=$1 got=0 words=() word said
    shift
    while [[ $1 != -- ]]; do words+=("$1") && shift; done
    shift
    said=$("$@" 2>&1) || got=$?
    [[ $got == "$status" ]] || { echo "status $got, not $status: $*: $said" && return 1; }
    for word in "${words[@]}"; do
        [[ $said == *"$word"* ]] || { echo "no '$word': $*: $said" && return 1; }
    done
}

[[ -e /sys/module/ublk_drv ]] || modprobe ublk_drv
cd /tmp/images
case $(</proc/sys/kernel/osrelease) in
6.*) zero_copy= ;;
*) zero_copy=1 ;;
esac
"#;

/// Timeout for a script.
const LIMIT: Duration = Duration::from_secs(900);
/// Timeout for all scripts of a guest, from its boot. After it the runner ends the guest. It is
/// longer than `scripts/test` lets a test program run.
const ALL: Duration = Duration::from_secs(3600);

/// What a script needs.
#[derive(Clone, Copy, PartialEq)]
struct Machine {
    /// 6 or 7.
    kernel: &'static str,
    /// ublk gives a device at most one queue for each processor.
    processors: u8,
}

/// A guest that waits for a script, or runs one.
struct ScriptGuest {
    guest: Guest,
    monitor: Qmp,
    scripts: File,
    /// Must be the last field: another test boots a guest after this one has ended.
    mark: Mark,
}

/// Says that a guest of the machine boots or exists.
struct Mark(Machine);

impl Drop for Mark {
    fn drop(&mut self) {
        GUESTS.lock().unwrap().booted.retain(|machine| *machine != self.0);
        CHANGED.notify_all();
    }
}

/// Guests of this process, at most one of each machine.
struct Guests {
    /// Machines that have a [`Mark`].
    booted: Vec<Machine>,
    /// Clean guests that no test uses. They stay for later tests, and end with the process.
    idle: Vec<ScriptGuest>,
}

/// State of a machine's guest, in the order in which a test prefers them.
#[derive(PartialEq, PartialOrd)]
enum GuestState {
    Idle,
    Absent,
    Busy,
}

/// Nothing panics while it holds this lock.
static GUESTS: Mutex<Guests> = Mutex::new(Guests { booted: Vec::new(), idle: Vec::new() });
/// Notified when a guest becomes idle or ends.
static CHANGED: Condvar = Condvar::new();

impl Guests {
    fn state(&self, machine: Machine) -> GuestState {
        if self.idle.iter().any(|idle| idle.mark.0 == machine) {
            GuestState::Idle
        } else if self.booted.contains(&machine) {
            GuestState::Busy
        } else {
            GuestState::Absent
        }
    }
}

/// Returns the idle guest of the machine. Waits while that guest is busy: its script has a limit
/// ([`LIMIT`]). Without a guest, returns the mark for a new one.
fn reserve(machine: Machine) -> Result<ScriptGuest, Mark> {
    let busy = |guests: &mut Guests| guests.state(machine) == GuestState::Busy;
    let mut guests = CHANGED.wait_while(GUESTS.lock().unwrap(), busy).unwrap();
    match guests.idle.iter().position(|idle| idle.mark.0 == machine) {
        Some(at) => Ok(guests.idle.swap_remove(at)),
        None => {
            guests.booted.push(machine);
            Err(Mark(machine))
        }
    }
}

impl ScriptGuest {
    #[track_caller]
    fn boot(mark: Mark) -> Self {
        let machine = mark.0;
        let folder = Folder::new();
        let disk = folder.image("disk.img", 400 << 20);
        let fifo = folder.join("scripts");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let program = stripped_program(&folder);
        // The FIFO is also opened for reading, because opening a FIFO without a reader blocks.
        let scripts = OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
        let mut options: Vec<OsString> =
            vec!["--kernel".into(), machine.kernel.into(), "--file".into(), program.into()];
        let monitor = folder.join("qmp");
        options.extend([
            "--smp".into(),
            machine.processors.to_string().into(),
            "--qmp".into(),
            monitor.clone().into(),
            "--input".into(),
            fifo.into(),
            "--disk".into(),
            format!("file={}", disk.display()).into(),
        ]);
        let guest = Guest::start_to_stay(options, SERVE_SCRIPTS, ALL, "guest: ready");
        ScriptGuest { guest, monitor: Qmp::connect(&monitor), scripts, mark }
    }

    /// Returns what the guest has printed so far.
    #[track_caller]
    fn run(mut self, script: &str) -> String {
        self.monitor.execute("cont", json!({}));
        self.guest.begin_part(LIMIT);
        let script = format!("{NAP}{PRELUDE}{script}");
        self.scripts.write_all(format!("{}\n{script}", script.len()).as_bytes()).unwrap();
        let end = self.guest.expect("script: ");
        let kernel = self.mark.0.kernel;
        assert_eq!(end, "passed", "on kernel {kernel}:\n{}", self.guest.seen());
        let seen = self.guest.seen();
        self.monitor.execute("stop", json!({}));
        GUESTS.lock().unwrap().idle.push(self);
        CHANGED.notify_all();
        seen
    }
}

/// Runs the script on a kernel (6 or 7), in a guest with this number of processors. No other test
/// uses the guest meanwhile. Returns what the guest has printed so far.
#[track_caller]
pub fn on_kernel(kernel: &'static str, processors: u8, script: &str) -> String {
    reserve(Machine { kernel, processors }).unwrap_or_else(ScriptGuest::boot).run(script)
}

/// Runs the script on both kernels. The first one is that with an idle guest, and never one with a
/// busy guest if the other one's is not busy.
#[track_caller]
pub fn on_both_kernels(processors: u8, script: &str) {
    let newer_first = {
        let guests = GUESTS.lock().unwrap();
        let state = |kernel| guests.state(Machine { kernel, processors });
        state("7") < state("6")
    };
    let kernels = if newer_first { ["7", "6"] } else { ["6", "7"] };
    kernels.into_iter().for_each(|kernel| drop(on_kernel(kernel, processors, script)));
}

/// Runs a script on this kernel, and on both if `BLOCKYARD_ALL_KERNELS` is set (`scripts/soak
/// ublk-kernels`). The server does the same on both, but for what other tests show.
#[track_caller]
pub fn on_one_kernel(kernel: &'static str, processors: u8, script: &str) {
    if std::env::var_os("BLOCKYARD_ALL_KERNELS").is_some() {
        on_both_kernels(processors, script);
    } else {
        on_kernel(kernel, processors, script);
    }
}
