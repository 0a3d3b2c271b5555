//! Disks of maps in another program. With zero copy, data of requests do not pass through the
//! server's memory.

use crate::fixture::on_kernel;

/// Copy-on-write in blocks of 64 KiB, in bash. `table` has a line for each block that has moved:
/// its offset in the disk, its offset in the store.
const MAP: &str = r#"
cat >/tmp/map <<'END'
#!/bin/bash
block=65536
declare -A at given
next=0
while read -r offset place; do
    at[$offset]=$place
    ((place < next)) || next=$((place + block))
done </tmp/images/table
printf '%s\n' 'blockyard-map 1' "size 8388608" "granule $block" \
    'data r /tmp/images/base.img' 'data w /tmp/images/store.img' ready
while IFS=' ,' read -r word number rest; do
    answer=
    case $word in
    locate)
        read -r how from bytes <<<"$rest"
        for ((offset = from; offset < from + bytes; offset += block)); do
            if [[ ${at[$offset]-} ]]; then
                answer+=", $block at 1 ${at[$offset]}"
            elif [[ $how == r ]]; then
                answer+=", $block at 0 $offset"
            else
                [[ ${given[$offset]-} ]] || { given[$offset]=$next && ((next += block)); }
                answer+=", $block new 1 ${given[$offset]} from 0 $offset"
            fi
        done
        answer=" ${answer#, }"
        ;;
    flush)
        read -ra parts <<<"${rest//,/}"
        for ((part = 0; part < ${#parts[@]}; part += 2)); do
            for ((offset = parts[part]; offset < parts[part] + parts[part + 1]; offset += block)); do
                at[$offset]=${given[$offset]}
                echo "$offset ${given[$offset]}" >>/tmp/images/table
            done
        done
        sync /tmp/images/table
        ;;
    esac
    echo "ok $number$answer"
done
END
chmod +x /tmp/map
"#;

const WORK: &str = r#"
# The base is a file system with a file. Writes go to the store.
mkdir folder && dd if=/dev/urandom of=folder/file bs=64K count=10 status=none
mke2fs -q -t ext4 -d folder base.img 8M
cp base.img before.img
truncate -s 8M store.img
: >table
serve exec:/tmp/map --name map --ublk=0
cmp /dev/ublkb0 base.img
mount -o nodiscard /dev/ublkb0 /mnt
cmp folder/file /mnt/file
dd if=/dev/urandom of=/mnt/more bs=1000 count=1000 status=none
load --name=a --filename=/mnt/load --rw=randwrite --bsrange=512-20k --blockalign=512 --size=1M
cp /mnt/more more
umount /mnt
stop
cmp base.img before.img
grep -q 'zero copy' /tmp/log
(($(figure bytes) > 5000000 && $(figure copied) == 0)) || { cat /tmp/log && exit 1; }
# The same on block devices.
modprobe loop
base=$(losetup -f --show -r base.img)
store=$(losetup -f --show store.img)
sed -i "s|/tmp/images/base.img|$base|; s|/tmp/images/store.img|$store|" /tmp/map
serve exec:/tmp/map --name map --ublk=0
mount -o nodiscard /dev/ublkb0 /mnt
cmp more /mnt/more
cp more /mnt/again
umount /mnt
# Flushed data survive a kill.
kill -9 $pid
wait $pid 2>/dev/null || :
serve exec:/tmp/map --name map --ublk=0
mount -o ro /dev/ublkb0 /mnt
cmp folder/file /mnt/file
cmp more /mnt/again
umount /mnt
stop
"#;

#[test]
fn the_data_of_a_map_stay_in_the_kernel() {
    on_kernel("7", 1, &format!("{MAP}{WORK}"));
}
