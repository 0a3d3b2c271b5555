//! A device in use is not removed, whatever uses it.

use crate::fixture::on_one_kernel;

const OPEN: &str = r#"
truncate -s 64M a.img
serve a.img --ublk=0
# A program reads the device.
sleep infinity </dev/ublkb0 &
reader=$!
until [[ /proc/$reader/fd/0 -ef /dev/ublkb0 ]]; do nap 0.02; done
fails 1 "is in use by process $reader (sleep): unmount it first" -- blockyard detach /dev/ublkb0
kill $reader
# A program uses another device node, and a program has a partition open.
mknod /tmp/node b $(stat -c '0x%t 0x%T' /dev/ublkb0)
sleep infinity <>/tmp/node &
reader=$!
until [[ /proc/$reader/fd/0 -ef /tmp/node ]]; do nap 0.02; done
fails 1 'is in use by process' -- blockyard detach /dev/ublkb0
kill $reader
wait $reader 2>/dev/null || :
# A partition table of one entry, at sector 2048, 32768 sectors long.
entry='\0\0\0\0\x83\0\0\0\0\x08\0\0\0\x80\0\0'
printf "$entry" | dd of=/dev/ublkb0 bs=1 seek=446 conv=notrunc status=none
printf "\x55\xaa" | dd of=/dev/ublkb0 bs=1 seek=510 conv=notrunc status=none
blockdev --rereadpt /dev/ublkb0
until [[ -b /dev/ublkb0p1 ]]; do nap 0.02; done
sleep infinity </dev/ublkb0p1 &
reader=$!
until [[ /proc/$reader/fd/0 -ef /dev/ublkb0p1 ]]; do nap 0.02; done
fails 1 'is in use by process' -- blockyard detach /dev/ublkb0
kill $reader
wait $reader 2>/dev/null || :
# A loop device: the kernel itself has the file open.
modprobe loop
loop=$(losetup -f --show /dev/ublkb0)
fails 1 "is in use" -- blockyard detach /dev/ublkb0
losetup -d $loop
# Swap, and a mount in another mount namespace.
mkswap -q /dev/ublkb0p1
swapon /dev/ublkb0p1
fails 1 'is in use: unmount it first' -- blockyard detach /dev/ublkb0
swapoff /dev/ublkb0p1
mkfs.ext4 -q /dev/ublkb0p1
unshare --mount --propagation private bash -c 'mount /dev/ublkb0p1 /mnt && echo >/tmp/mounted && exec sleep infinity' &
other=$!
until [[ -s /tmp/mounted ]]; do nap 0.02; done
fails 1 'is in use' -- blockyard detach /dev/ublkb0
kill $other
wait $other 2>/dev/null || :

# SIGTERM under load: the device stays, and the load continues with the next server.
begin_load --name=a --filename=/dev/ublkb0 --rw=randrw --bs=4k --size=16M
answered ublkb0
stop
grep -q '/dev/ublkb0 is in use by process .* (fio): it is kept, and waits for --ublk=0' /tmp/log || { cat /tmp/log && exit 1; }
[[ -b /dev/ublkb0 ]]
serve a.img --ublk=0
answered ublkb0
end_load
blockyard detach /dev/ublkb0
[[ ! -e /dev/ublkb0 ]]
stop

# Another disk of the server gets the number of a device that was detached. The end of the first
# disk leaves it alone, and an upgrade is refused before it changes anything.
truncate -s 32M b.img
serve a.img --ublk --api /tmp/api --control /tmp/control
blockyard detach /dev/ublkb0
fails 1 'another program has removed /dev/ublkb0' -- \
    blockyard serve a.img --ublk --api /tmp/api --control /tmp/control --takeover /tmp/control
blockyard ctl --api /tmp/api add name=b image="$PWD/b.img" ublk=true >/dev/null
blockyard ctl --api /tmp/api remove a.img >/dev/null
dd if=/dev/urandom of=/dev/ublkb0 bs=64k count=1 oflag=direct status=none
cmp -n 65536 /dev/ublkb0 b.img
stop
[[ ! -e /dev/ublkb0 ]]
"#;

#[test]
fn a_device_in_use_is_not_removed() {
    on_one_kernel("7", 1, OPEN);
}
