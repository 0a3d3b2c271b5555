#!/usr/bin/env python3
"""Compares UML's stock driver and Blockyard inside a User Mode Linux guest.

Each round boots one guest a system, in turn, and runs every load in it; the figure is the median of the rounds. Operations
are counted by fio in the guest; the time is the host's (the guest's clock may lag), and so is the CPU: of the back end
(for ubd, which has none, it is inside the guest) and of the guest, from /proc, between marks that the guest prints.
"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK")

# name: (guest disk, how the back end is told to cache, what it promises)
SYSTEMS = {
    "ubd": ("ubd", None, "page cache, FLUSH dropped"),
    "blockyard unsafe": ("vhost", "unsafe", "page cache, FLUSH dropped"),
    "blockyard writeback": ("vhost", "writeback", "page cache, FLUSH is fdatasync"),
    "blockyard none": ("vhost", "none", "O_DIRECT, FLUSH is fdatasync"),
    "ubd O_SYNC": ("ubds", None, "every write durable"),
    "blockyard writethrough": ("vhost", "writethrough", "every write durable"),
}
# Who must not be behind whom: equal promises. (writeback and none promise more than ubd, which drops flushes, and less than
# ubd with O_SYNC; they are shown for what a flush that means it costs.)
PEER = {"blockyard unsafe": "ubd", "blockyard writethrough": "ubd O_SYNC"}

LOADS = {
    "4k random read, depth 32": "--rw=randread --bs=4k --iodepth=32",
    "4k random read, depth 1": "--rw=randread --bs=4k --iodepth=1",
    "4k random write, depth 32": "--rw=randwrite --bs=4k --iodepth=32",
    "4k random write, depth 1": "--rw=randwrite --bs=4k --iodepth=1",
    "64k random read, depth 32": "--rw=randread --bs=64k --iodepth=32",
    "64k random write, depth 32": "--rw=randwrite --bs=64k --iodepth=32",
    "64k random write, depth 1": "--rw=randwrite --bs=64k --iodepth=1",
    "1M read, depth 8": "--rw=read --bs=1M --iodepth=8",
    "1M write, depth 8": "--rw=write --bs=1M --iodepth=8",
}

GUEST = """
disk=$(ls /dev/vda /dev/ubda 2>/dev/null | head -1)
stat=/sys/block/${disk#/dev/}/stat
mark() { read -r r _ _ _ w _ < $stat; echo "MARK $1 $((r + w))"; }
run() { # name, fio options
    mark "begin"
    fio --name=x --filename=$disk --ioengine=libaio --direct=1 --time_based --runtime=@SECONDS@ --size=@SIZE@ \
        --invalidate=0 --minimal $2 > /tmp/out || { echo "FAILED $1"; cat /tmp/out; exit 1; }
    mark "end"
    IFS=';' read -ra f < /tmp/out # terse version 3: reads' IOPS is field 8, writes' 49
    echo "ROW $1;${f[7]};${f[48]}"
}
@RUNS@
mkfs.ext4 -q -F $disk && mount $disk /mnt && sync
mark "begin"; dd if=/dev/zero of=/mnt/f bs=1M count=32 2>/dev/null && sync; mark "end"; echo "ROW dd 32 MiB + sync;0;0"
mark "begin"; rm /mnt/f && sync; mark "end"; echo "ROW rm + sync;0;0"
umount /mnt
"""


def cpu(pid):
    """CPU seconds of a process and all that it waits for, so far."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def boot(name, image, folder, args):
    kind, cache, _ = SYSTEMS[name]
    script = folder / "guest.sh"
    runs = "\n".join(f'run "{load}" "{options}"' for load, options in LOADS.items())
    text = GUEST.replace("@RUNS@", runs).replace("@SECONDS@", str(args.seconds)).replace("@SIZE@", f"{args.size}m")
    script.write_text(text)
    back = None
    target = image
    if kind == "vhost":
        target = folder / "vhost.sock"
        # Where the guest has a processor of its own the back end keeps to it, unless it is told otherwise.
        cpus = args.back_cpu or args.cpu
        place = [] if cpus == "any" else ["--cpus", cpus]
        back = subprocess.Popen([args.program, "--log", "error", "serve", str(image), "--vhost-user", str(target),
                                 "--cache", cache, *place], stdout=subprocess.PIPE, text=True)
        assert back.stdout.readline() == "ready\n"
    with open(image, "rb") as f:
        while f.read(1 << 20):
            pass
    rows = {}
    try:
        guest = subprocess.Popen([str(ROOT / "guests" / "uml"), "--disk", f"{kind}={target}", "--seccomp", args.seccomp,
                                  "--cpu", args.cpu, "--timeout", "300", str(script)], stdout=subprocess.PIPE, text=True)
        marks = []
        for line in guest.stdout:
            if line.startswith("MARK"):
                marks.append((time.monotonic(), cpu(back.pid) if back else 0.0, int(line.split()[2])))
            elif line.startswith("ROW"):
                (t0, c0, n0), (t1, c1, n1) = marks[-2:]
                load, reads, writes = line[4:].rstrip("\n").split(";")
                seconds = t1 - t0
                rows[load] = dict(
                    seconds=seconds, iops=max(float(reads), float(writes)),
                    cpu=(c1 - c0) * 1e6 / (n1 - n0) if back and n1 > n0 else None)
            elif line.startswith("FAILED"):
                sys.exit(f"{name}: {line}")
        if guest.wait() != 0:
            sys.exit(f"{name}: the guest failed")
    finally:
        if back:
            back.send_signal(signal.SIGTERM)
            back.wait()
    return rows


def table(results):
    loads = list(LOADS) + ["dd 32 MiB + sync", "rm + sync"]
    pairs = [(s, p) for s, p in PEER.items() if s in SYSTEMS and p in SYSTEMS]
    ratios = [f"{s.split()[1]} to {p}" for s, p in pairs]
    out = ["| load in the guest | " + " | ".join([*SYSTEMS, *ratios]) + " |",
           "|---|" + "--:|" * (len(SYSTEMS) + len(ratios))]
    for load in loads:
        timed = load not in LOADS
        key = "seconds" if timed else "iops"
        value = {s: statistics.median(r[load][key] for r in results[s]) for s in SYSTEMS}
        cells = []
        for s in SYSTEMS:
            costs = [r[load]["cpu"] for r in results[s] if r[load]["cpu"] is not None]
            cost = f" ({statistics.median(costs):.0f})" if costs and not timed else ""
            cells.append((f"{value[s]:.3f} s" if timed else f"{value[s]:,.0f}{cost}"))
        cells += [f"{value[p] / value[s] if timed else value[s] / value[p]:.2f}" for s, p in pairs]
        out.append(f"| {load} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target" / "release" / "blockyard"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=1, help="of each load")
    parser.add_argument("--size", type=int, default=512, help="of the disk, in MiB")
    parser.add_argument("--seccomp", default="on", help="on or off: how UML takes its processes' system calls")
    parser.add_argument("--cpu", default="any", help="processors that guest and back end may use: any, or a list")
    parser.add_argument("--back-cpu", help="the same for the back end alone")
    parser.add_argument("--only", default="", help="systems whose name matches this regular expression")
    args = parser.parse_args()
    for name in [s for s in SYSTEMS if not re.search(args.only, s)]:
        del SYSTEMS[name]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="blockyard-uml-"))
    results = {s: [] for s in SYSTEMS}
    try:
        image = folder / "disk.img"
        with open(image, "wb") as f:
            for _ in range(args.size):
                f.write(os.urandom(1 << 20))
            f.flush()
            os.fsync(f.fileno())
        names = list(SYSTEMS)
        for turn in range(args.rounds):
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                results[name].append(boot(name, image, folder, args))
                print(f"round {turn + 1}: {name} done", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"guest: UML, seccomp={args.seccomp}, processors: {args.cpu}; IOPS (back end's CPU us per I/O)\n")
    print(table(results))


if __name__ == "__main__":
    main()
