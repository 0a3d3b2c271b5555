#!/usr/bin/env python3
"""Block devices of a host, in a QEMU guest (TCG): an image by ublk, raw and as a qcow2 overlay, against the kernel's loop device.

The guest has two processors; the images lie on ext4 of a virtio disk, which the host has in a file opened with O_DIRECT. All systems are
there at once in one guest, and take turns for each load; each round begins with another one. Each writes all of its device first (an
overlay: its first writes), so that all is allocated then. Figures are medians of the rounds; a ratio is the median of the rounds' ratios. `copy` is
the experiment of 2006: mount ext4, copy a file of 20 MB, unmount.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Name: how it reaches the image, which cache, which image.
SYSTEMS = {
    "loop": "loop off raw",
    "ublk, writeback": "ublk writeback raw",
    "ublk, writeback, overlay": "ublk writeback overlay",
    "loop, direct": "loop on raw",
    "ublk": "ublk none raw",
    "ublk, overlay": "ublk none overlay",
}
RATIOS = [
    ("ublk", "loop, direct"),
    ("ublk, overlay", "ublk"),
    ("ublk, writeback", "loop"),
    ("ublk, writeback, overlay", "ublk, writeback"),
]
ROWS = {
    "write": ("1 MiB write, depth 4", "MB/s"),
    "read": ("1 MiB read, depth 4", "MB/s"),
    "randread": ("4k random read, depth 32", "IOPS"),
    "randwrite": ("4k random write, depth 32", "IOPS"),
    "copy": ("mount, copy 20 MB, unmount", "s"),
}

SCRIPT = r"""
modprobe ublk_drv
modprobe loop
# (What was discarded would have to be taken and written by the host once more.)
mkfs.ext4 -q -E nodiscard -O ^has_journal /dev/vda
mkdir /tmp/i
mount /dev/vda /tmp/i
cd /tmp/i
head -c 20000000 /dev/urandom >/tmp/source
declare -A devices=()
begin() { # SYSTEM KIND CACHE IMAGE
    local raw=${#devices[@]}.raw image
    image=$raw
    dd if=/dev/zero of=$raw bs=1M count=$SIZE oflag=direct status=none
    [[ $4 == raw ]] || { image=${#devices[@]}.qcow2; /host/blockyard image create -f qcow2 -b $raw -F raw $image >/dev/null; }
    if [[ $2 == loop ]]; then
        device=$(losetup -f --show --direct-io=$3 $image)
    else
        device=$(/host/blockyard attach $image --cache $3)
    fi
    dd if=/dev/zero of=$device bs=1M count=$SIZE oflag=direct status=none
    devices[$1]=$device
}
measure() { # SYSTEM JOB FIO_ARGUMENTS...
    local system=$1 job=$2
    shift 2
    sync
    echo 3 >/proc/sys/vm/drop_caches
    fio --name=a --filename=${devices[$system]} --rw=$job --direct=1 --ioengine=libaio --output-format=terse --terse-version=3 \
        --time_based --runtime=$SECONDS_EACH "$@" |
        { IFS=';' read -ra f; echo "result $system;$job;$((f[6] + f[47]));$((f[7] + f[48]))"; }
}
copy() { # SYSTEM
    local device=${devices[$1]}
    mkfs.ext4 -q $device
    sync
    echo 3 >/proc/sys/vm/drop_caches
    cat /tmp/source >/dev/null
    local begin=$EPOCHREALTIME
    mount $device /mnt
    cp /tmp/source /mnt/copy
    umount /mnt
    local end=$EPOCHREALTIME
    echo "result $1;copy;0;$((${end/./} - ${begin/./}))"
    mount -o ro $device /mnt
    cmp /tmp/source /mnt/copy
    umount /mnt
}
mapfile -t systems <<<"$SYSTEMS"
names=()
for system in "${systems[@]}"; do
    IFS=';' read -r name how <<<"$system"
    begin "$name" $how
    names+=("$name")
done
each() { # ROUND COMMAND ARGUMENTS...: with the name of each system as the first argument
    local i
    for ((i = 0; i < ${#names[@]}; i++)); do "$2" "${names[(i + $1) % ${#names[@]}]}" "${@:3}"; done
}
for ((round = 0; round < ROUNDS; round++)); do
    each $round measure write --bs=1M --iodepth=4
    each $round measure read --bs=1M --iodepth=4
    each $round measure randread --bs=4k --iodepth=32
    each $round measure randwrite --bs=4k --iodepth=32
done
# The last, for it discards.
for ((round = 0; round < ROUNDS; round++)); do each $round copy; done
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=["6", "7"], default="7")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each load")
    parser.add_argument("--only", default="", help="systems whose name matches this expression, whole")
    parser.add_argument("--size", type=int, default=128, help="of the image, in MiB")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/blockyard")
    options = parser.parse_args()
    chosen = {name: how for name, how in SYSTEMS.items() if re.fullmatch(options.only or ".*", name)}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        folder = pathlib.Path(folder)
        disk, program, script = folder / "disk", folder / "blockyard", folder / "script"
        with open(disk, "wb") as file:
            # Written, not only allocated: else whoever comes to a place first pays for the host's own first writes.
            for _ in range(options.size * 2 * len(chosen) + 128):
                file.write(bytes(1 << 20))
            os.fsync(file.fileno())
        subprocess.run(["strip", "-o", program, options.program], check=True)
        script.write_text("set -euo pipefail\n" + SCRIPT)
        systems = "\n".join(f"{name};{how}" for name, how in chosen.items())
        environment = {"ROUNDS": options.rounds, "SECONDS_EACH": options.seconds, "SIZE": options.size, "SYSTEMS": systems}
        command = [ROOT / "guests/qemu", "--kernel", options.kernel, "--mem", "1G", "--timeout", "3000"]
        command += ["--file", program, "--disk", f"file={disk}"]
        command += [word for pair in environment.items() for word in ("--env", "%s=%s" % pair)]
        results = {}
        with subprocess.Popen([*command, script], stdout=subprocess.PIPE, text=True) as guest:
            for line in guest.stdout:
                if not line.startswith("result "):
                    sys.stderr.write(line)
                    continue
                sys.stderr.write(line)
                system, job, kilobytes, count = line.removeprefix("result ").strip().split(";")
                value = {"copy": int(count) / 1e6, "read": int(kilobytes) / 1e3, "write": int(kilobytes) / 1e3}.get(job, int(count))
                results.setdefault((system, job), []).append(value)
        if guest.returncode:
            sys.exit(f"the guest failed: {guest.returncode}")
    ratios = [(a, b) for a, b in RATIOS if a in chosen and b in chosen]
    print(f"| kernel {options.kernel} | " + " | ".join([*chosen, *(f"{a} / {b}" for a, b in ratios)]) + " |")
    print("|---" * (len(chosen) + len(ratios) + 1) + "|")
    for job, (title, unit) in ROWS.items():
        digits = 2 if job == "copy" else 0
        cells = [f"{statistics.median(results[name, job]):.{digits}f}" for name in chosen]
        for a, b in ratios:
            cells.append(f"{statistics.median(x / y for x, y in zip(results[a, job], results[b, job])):.2f}")
        print(f"| {title}, {unit} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
