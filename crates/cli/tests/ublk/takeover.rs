//! What a server takes over, and what happens if it is killed during the takeover.

use crate::fixture::{on_kernel, on_one_kernel};

/// strace kills the server at a system call on the character device: after the driver has started
/// the takeover and before any queue fetches (the last open), and when all queues fetch (mmap).
/// Each time the next server continues. Finally it is killed when the first of two queues has
/// fetched and the second has not.
const KILLED: &str = r#"
truncate -s 64M a.img
serve a.img --ublk=0 --queues 2
mkfs.ext4 -q /dev/ublkb0
mount /dev/ublkb0 /mnt
dd if=/dev/urandom of=/tmp/f bs=1M count=1 status=none
cp /tmp/f /mnt/f
kill -9 $pid
wait $pid 2>/dev/null || :
[[ $zero_copy ]] && last=1 || last=2
for call in open:$last mmap:1 open:$last open:1; do
    not taskset 1 strace -qq -f -o /tmp/strace -e trace=${call%:*} -P /dev/ublkc0 -e inject=${call%:*}:signal=KILL:when=${call#*:} \
        /host/blockyard serve a.img --ublk=0 --queues 2 >/tmp/out 2>>/tmp/log
    not grep -q ready /tmp/out
    grep -q 'killed by SIGKILL' /tmp/strace || { cat /tmp/strace /tmp/log && exit 1; }
done
# Kill the server after the first queue has fetched and before the second one has. The first strace
# stops the server when it opens the device. Then one strace holds the thread of the second queue at
# its first mprotect: its heap grows for the tasks that fetch, before they submit anything. Another
# strace shows when the first queue has fetched.
taskset 1 strace -f -o /tmp/first -e trace=open -P /dev/ublkc0 -e inject=open:signal=STOP:when=$last \
    /host/blockyard serve a.img --ublk=0 --queues 2 --reactors 2 >/tmp/out 2>>/tmp/log &
first=$!
until_or_say() { # COMMAND...
    local n=0
    until "$@"; do
        ((++n < 2000)) || { echo "never: $*" && cat /tmp/first /tmp/fetches /tmp/log "$server/status" && exit 1; }
        nap 0.03
    done
}
server=
until_or_say grep -qs 'stopped by SIGSTOP' /tmp/first
for number in 0 1; do
    # Another process may end meanwhile. Then grep fails.
    thread[number]=$(grep -slx reactor-$number /proc/[0-9]*/task/*/comm || :)
    thread[number]=${thread[number]%/comm}
done
server=${thread[0]%/task/*}
kill -9 $first
for number in 0 1; do until_or_say grep -q '^TracerPid:.0$' ${thread[number]}/status; done
strace -qq -o /tmp/held -e trace=mprotect -e inject=mprotect:delay_enter=1000s -p ${thread[1]##*/} &
held=$!
strace -qq -o /tmp/fetches -e trace=io_uring_enter -p ${thread[0]##*/} &
fetches=$!
for number in 0 1; do until_or_say grep -q '^TracerPid:.[1-9]' ${thread[number]}/status; done
kill -CONT ${server#/proc/}
until_or_say grep -q '= 128$' /tmp/fetches
kill -9 ${server#/proc/} $held
wait $first $held $fetches || :
not grep -q ready /tmp/out
serve a.img --ublk=0 --queues 2 --log debug
[[ $zero_copy ]] || until_logged 'vacant=1' || { cat /tmp/held /tmp/fetches && exit 1; }
until_logged 'ublkb0 taken over'
echo 3 >/proc/sys/vm/drop_caches
cmp /mnt/f /tmp/f
umount /mnt
stop
[[ ! -e /dev/ublkb0 ]]
e2fsck -fn a.img >/dev/null
dmesg | not grep -E 'I/O error|BUG|WARNING|Oops'
"#;

#[test]
fn a_killed_takeover_is_repeated() {
    on_one_kernel("6", 2, KILLED);
}

const REFUSED: &str = r#"
truncate -s 64M a.img
serve a.img --ublk=0
mkfs.ext4 -q /dev/ublkb0
mount /dev/ublkb0 /mnt
echo hello >/mnt/f
sync
kill -9 $pid
wait $pid 2>/dev/null || :
refused() { # WORDS OPTIONS...
    local words=$1
    shift
    fails 1 'this disk cannot take it over' "$words" -- blockyard serve a.img --ublk=0 "$@"
}
# A read-only server for a writable device.
refused 'it is writable, and the disk is read-only now' --read-only
# An image that was shrunk.
cp a.img whole.img
truncate -s 32M a.img
refused 'it has 67108864 bytes, and the image has 33554432 now'
cp whole.img a.img
# Another file with the image's path: the mounted file system has cached data of the first one.
mv a.img first.img
cp first.img a.img
fails 1 'is in use, and another file has the path of its image now' -- blockyard serve a.img --ublk=0
mv first.img a.img
serve a.img --ublk=0
echo 3 >/proc/sys/vm/drop_caches
[[ $(</mnt/f) == hello ]]

# An image that shrinks while a server has it open.
truncate -s 32M a.img
kill -HUP $pid
until logged 'ublkb0 keeps its size'; do nap 0.02; done
[[ ! $zero_copy ]] || grep -q 'keeps its size: it is in use, and the image is smaller now' /tmp/log
[[ $(blockdev --getsize64 /dev/ublkb0) == 67108864 ]]
truncate -s 64M a.img
kill -HUP $pid
if [[ $zero_copy ]]; then until logged 'ublkb0 has its size'; do nap 0.02; done; fi
umount /mnt
# The device is not in use now.
truncate -s 48M a.img
kill -HUP $pid
if [[ $zero_copy ]]; then until [[ $(</sys/block/ublkb0/size) == 98304 ]]; do nap 0.02; done; fi
# A device that is not in use is replaced by a new one, for the file that has the path.
kill -9 $pid
wait $pid 2>/dev/null || :
rm a.img
dd if=/dev/urandom of=a.img bs=1M count=1 status=none
serve a.img --ublk=0
cmp /dev/ublkb0 a.img
stop
[[ ! -e /dev/ublkb0 ]]
"#;

#[test]
fn a_smaller_disk_takes_no_device_over() {
    on_one_kernel("7", 1, REFUSED);
}

/// Several processes start for one device. One gets it. The others wait and find its device later.
const RACES: &str = r#"
truncate -s 64M a.img
each() { # COMMAND...: four at once; the successes, and what the others said
    local jobs=() job
    good=0
    for n in 1 2 3 4; do "$@" >/tmp/each.$n 2>&1 & jobs+=($!); done
    for job in "${jobs[@]}"; do wait $job && good=$((good + 1)) || :; done
}
blockyard attach a.img --read-only >/dev/null
pkill -9 -f -- --attached
while is_attached; do nap 0.05; done
# One server takes the device over. The others make new devices.
each blockyard attach a.img --read-only
[[ $good == 4 && $(sort -u /tmp/each.? | wc -l) == 4 ]] || { cat /tmp/each.? && exit 1; }
for device in $(cat /tmp/each.?); do
    each blockyard detach $device
    [[ $good == 1 && $(grep -l "there is no device $device" /tmp/each.? | wc -l) == 3 ]] || { cat /tmp/each.? && exit 1; }
done
# All request the same number.
each blockyard attach a.img --read-only --ublk=5
[[ $good == 1 && $(grep -l '/dev/ublkb5 is served by process' /tmp/each.? | wc -l) == 3 ]] || { cat /tmp/each.? && exit 1; }
blockyard detach /dev/ublkb5

# The number of a removed device that a program still has open: the server waits and names the
# program.
blockyard attach a.img --ublk=5 >/dev/null
sleep infinity 5</dev/ublkb5 &
sleeper=$!
blockyard detach --force /dev/ublkb5
fails 1 '/dev/ublkb5 was removed and is still open' "process $sleeper (sleep)" -- blockyard attach a.img --ublk=5
# The next server waits for its end.
blockyard attach a.img --ublk=5 --log debug >/tmp/attached &
attaching=$!
until grep -qs 'ublkb5 is not free yet' /run/blockyard-attach/*.log; do
    kill -0 $attaching || { cat /run/blockyard-attach/*.log && exit 1; }
    nap 0.02
done
kill $sleeper
wait $attaching
[[ $(</tmp/attached) == /dev/ublkb5 ]]
blockyard detach /dev/ublkb5
"#;

#[test]
fn one_of_several_servers_gets_a_device() {
    on_one_kernel("6", 2, RACES);
}

/// A server of 40 disks. When the space for zero copy runs out, the server makes a new device with
/// the same number. A disk that fails does not stop the others.
const MANY: &str = r#"
disks() { # COUNT: the first is one that cannot be
    local files=()
    printf '[[disk]]\nimage = "/tmp/images/none.img"\nublk = 100\n'
    for ((n = 0; n < $1; n++)); do
        files+=(d$n.img)
        # Each request of a queue takes one of the reactor's 16384 places.
        printf '[[disk]]\nimage = "/tmp/images/d%d.img"\nublk = %d\nqueue-size = 512\n' $n $n
    done
    truncate -s 8M "${files[@]}"
}
disks 40 >c.toml
serve --config c.toml
[[ $(ls /dev/ublkb* | wc -l) == 40 && ! -e /dev/ublkb100 ]]
until_logged 'ERROR.*none.img'
until_logged '1 of 41 disks are not served'
[[ ! $zero_copy ]] || until_logged 'ublkb39 made: data are copied'
cmp /dev/ublkb39 d39.img
# The next reload adds it.
truncate -s 8M none.img
kill -HUP $pid
until [[ -b /dev/ublkb100 ]]; do nap 0.02; done
stop
[[ ! -e /dev/ublkb39 ]]
serve d0.img --ublk=3 --queues 256 --queue-size 32768
cmp /dev/ublkb3 d0.img
stop
fails 1 'none2.img' -- blockyard serve none2.img --ublk
"#;

#[test]
fn devices_without_room_for_zero_copy_still_work() {
    on_kernel("7", 1, MANY);
}

/// A disk without a name has the file name of its image, and a snapshot that is persisted makes
/// that its name. Its device then belongs to the overlay. A disk with another name does not get it.
const SNAPSHOT: &str = r#"
dd if=/dev/urandom of=a.img bs=1M count=1 status=none
serve a.img --ublk=0 --api /tmp/api
# A program has the device open.
exec 5<>/dev/ublkb0
tail -f /dev/null &
user=$!
exec 5<&-
blockyard ctl --api /tmp/api snapshot a.img over.qcow2 >/dev/null
dd if=/dev/urandom of=/tmp/written bs=64k count=1 status=none
dd if=/tmp/written of=/dev/ublkb0 bs=64k oflag=direct status=none
stop
fails 1 'belongs to another disk' -- blockyard serve over.qcow2 --ublk=0
fails 1 'belongs to another disk' -- blockyard serve over.qcow2 --name b.img --ublk=0
serve over.qcow2 --name a.img --ublk=0
grep -q '/dev/ublkb0 taken over' /tmp/log || { cat /tmp/log && exit 1; }
cmp -n 65536 /tmp/written /dev/ublkb0
kill $user
wait $user || :
stop
[[ ! -e /dev/ublkb0 ]]
"#;

#[test]
fn a_device_is_taken_over_after_a_snapshot() {
    on_kernel("6", 1, SNAPSHOT);
}
