//! Scripts of the two guests with the thrashing neighbour. They read `/share`, and print lines for
//! the host.

/// Shell function that waits without starting a process. In such a guest, starting a process takes
/// longer than the pause.
pub const PAUSE: &str = r#"
exec 9<> <(:)
pause() { read -r -t "$1" <&9 || :; } # without a process
until_file() { until [[ -e /share/$1 ]]; do pause 0.05; done; }
"#;

/// Uses more memory than the guest has. Several processes touch it at random until the file `end`
/// exists.
pub const THRASHER: &str = r#"
mkswap /dev/vda >/dev/null && swapon /dev/vda
figures() {
    while read -r key value; do
        case $key in pswpin) in=$value ;; pswpout) out=$value ;; esac
    done </proc/vmstat
    echo "swapped $in $out"
}
figures
echo ready
until_file thrash
if [[ $(</share/thrash) == yes ]]; then
    for ((i = 0; i < PROCESSES; i++)); do
        # The first to go if memory ends altogether.
        (echo 1000 >/proc/self/oom_score_adj
        exec gawk -v seed=$i -v n=$((MEMORY * 10000 / PROCESSES)) '
            BEGIN { srand(seed); for (i = 0; i < n; i++) a[i] = i; while (1) a[int(rand() * n)]++ }') &
        jobs+=($!)
    done
fi
until [[ -e /share/end ]]; do pause 1; figures; done
for job in ${jobs[@]+"${jobs[@]}"}; do kill -KILL $job || { echo "a process has ended before"; exit 1; }; done
"#;

/// Waits until the file `work` exists. Then runs fio and after that the steps, each for
/// `$SECONDS_EACH`.
pub const WORKER: &str = r#"
mkfs.ext4 -q -F /dev/vda && mount /dev/vda /mnt && mkdir /mnt/small /mnt/saved && chattr +DS /mnt/saved
for ((i = 0; i < 3000; i++)); do printf '%4096d' $i >/mnt/small/$i; done
dd if=/dev/zero of=/mnt/fio bs=1M count=128 status=none
sync && echo 3 >/proc/sys/vm/drop_caches
echo ready
until_file work
fio --name=x --filename=/mnt/fio --size=128m --ioengine=libaio --direct=1 --iodepth=$DEPTH --rw=randwrite --bs=4k \
    --verify=crc32c --verify_backlog=64 --verify_fatal=1 --time_based --runtime=$SECONDS_EACH --randrepeat=0 \
    --eta=never --lat_percentiles=1 --output-format=json --output=/tmp/fio.json || { cat /tmp/fio.json; exit 1; }
echo "fio $(tr -d '\n' </tmp/fio.json)"
file=0 end=$((SECONDS + SECONDS_EACH))
while ((SECONDS < end)); do
    a=${EPOCHREALTIME/./}
    printf '%4096d' $file >/mnt/saved/$file
    b=${EPOCHREALTIME/./}
    for k in 1 2 3; do
        # Far apart, so that none comes with another's directory or inodes.
        read -r -N 4096 text </mnt/small/$((file * 997 % 3000))
        ((++file))
    done
    c=${EPOCHREALTIME/./}
    echo "step $((b - a)) $((c - b))"
    ((file < 3000)) || { echo "no more files"; exit 1; }
    pause 0.05
done
echo done
umount /mnt
"#;
