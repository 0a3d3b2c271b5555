#!/usr/bin/env python3
"""Two User Mode Linux guests served by one Blockyard; one of them runs out of memory and swaps.

The other one works: first fio with checksums (random 4k writes, each read back and compared), then a script as a person at a
terminal feels it. One step of it: save a new file of 4 KiB (synchronous, with its folder), read three small files that are in
no cache; then a pause of 50 ms. It starts no process, which would take longer in such a guest. Measured in three ways, in turn:

  alone    the neighbour has booted, has its swap, and is idle
  free     the neighbour thrashes; fair-share = false
  fair     the neighbour thrashes; fair-share = true

and on two devices: the disk that this machine has, and a slower one (Blockyard's model of a device before the same files). An
emulated guest needs much of a processor for each page that it swaps, and a fast disk is then the lesser of what two guests
fight over; the guests have a processor each (--cpus), and the table says how busy the neighbour's was.

The costs of operations are measured (`blockyard bench calibrate`) on the disk, and reckoned for the model.

All times are the guest's that works; rates of swapping are what the other kernel counts (/proc/vmstat), in pages of 4 KiB.
"""

import argparse
import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK")
WAYS = ["alone", "free", "fair"]

# 4 requests of 1 ms at a time: 4000 a second, and 128 MiB. Such disks are rented out.
MODEL = "parallel=4,read=1ms,write=1ms,flush=2ms,bandwidth=128M,device=slow"
COSTS = """[[device]]
device = "slow"
description = "the model of a device: a quarter of what each operation takes one of its four"
read = 250000
read-sequential = 250000
read-per-mib = 7812500
write = 250000
write-sequential = 250000
write-per-mib = 7812500
flush = 500000
discard = 250000
write-zeroes = 250000
window = 1000000
base-latency-read = 1000000
base-latency-write = 1000000
"""
DEVICES = {"disk": "the machine's disk", "slow": "4,000 IOPS, 128 MiB/s"}

PAUSE = """
exec 9<> <(:)
pause() { read -r -t "$1" <&9 || :; } # without a process
until_file() { until [[ -e /share/$1 ]]; do pause 0.05; done; }
"""

# More memory in use than there is, touched at random by several processes, as long as it is told to.
THRASHER = PAUSE + """
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
"""

WORKER = PAUSE + """
mkfs.ext4 -q -F /dev/vda && mount /dev/vda /mnt && mkdir /mnt/small /mnt/saved && chattr +DS /mnt/saved
for ((i = 0; i < 3000; i++)); do printf '%4096d' $i >/mnt/small/$i; done
dd if=/dev/zero of=/mnt/fio bs=1M count=128 status=none
sync && echo 3 >/proc/sys/vm/drop_caches
echo ready
until_file work
fio --name=x --filename=/mnt/fio --size=128m --ioengine=libaio --direct=1 --iodepth=$DEPTH --rw=randwrite --bs=4k \
    --verify=crc32c --verify_backlog=64 --verify_fatal=1 --time_based --runtime=$SECONDS_EACH --randrepeat=0 \
    --lat_percentiles=1 --output-format=json --output=/tmp/fio.json || { cat /tmp/fio.json; exit 1; }
echo "fio $(tr -d '\\n' </tmp/fio.json)"
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
"""


class Guest:
    """A script in a guest; its lines with the time when they came. Ended with the `with`."""

    def __init__(self, name, script, socket, folder, cpu, mem, env):
        self.name, self.said, self.lines = name, [], queue.Queue()
        self.share = folder / name
        self.share.mkdir()
        path = folder / f"{name}.sh"
        path.write_text("set -eu\n" + script)
        command = [ROOT / "guests" / "uml", "--disk", f"vhost={socket}", "--mem", mem, "--cpu", cpu, "--seccomp", "on",
                   "--share", self.share, "--timeout", "300"]
        for pair in env.items():
            command += ["--env", "{}={}".format(*pair)]
        self.process = subprocess.Popen([*map(str, command), str(path)], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.process.stdout:
            self.said.append((time.monotonic(), line.rstrip("\n")))
            self.lines.put(self.said[-1])
        self.lines.put(None)

    def expect(self, word, limit=120):
        """The time and the rest of the next line that begins with the word."""
        end = time.monotonic() + limit
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                sys.exit(f"{self.name} did not say \"{word}\" within {limit} s; it said {self.said[-5:]}")
            if line is None:
                sys.exit(f"{self.name} ended, and said {self.said[-5:]}")
            if line[1].split(" ")[0] == word:
                return line[0], line[1][len(word) + 1:]

    def tell(self, word, text=""):
        (self.share / f"{word}.new").write_text(text)
        (self.share / f"{word}.new").rename(self.share / word)

    def cpu(self):
        """CPU seconds of the guest so far: its kernel leads a session of its own, with a process an address space."""
        total = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                leader = pathlib.Path(f"/proc/{fields[3]}/stat").read_text().rpartition(")")[2].split()
                if int(leader[1]) == self.process.pid:
                    total += sum(map(int, fields[11:15]))
        return total / TICK

    def finish(self):
        if self.process.wait(60) != 0:
            sys.exit(f"{self.name} failed; it said {self.said[-5:]}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


@contextlib.contextmanager
def server(way, device, images, folder, costs, program):
    """`blockyard serve` with a disk for each guest."""
    text = f"reactors = 2\nfair-share = {'false' if way == 'free' else 'true'}\ncosts = \"{costs}\"\n"
    for name, image in images.items():
        under = f"delay:file={image},{MODEL}" if device == "slow" else image
        text += f"[[disk]]\nname = \"{name}\"\nimage = \"{under}\"\nvhost-user = \"{folder}/{name}.sock\"\n"
        text += "device = \"slow\"\n" if device == "slow" else ""
    config = folder / "config.toml"
    config.write_text(text)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([program, "serve", "--config", str(config)], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        if process.stdout.readline() != "ready\n":
            sys.exit(f"the server does not start: {(folder / 'log').read_text()}")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def server_cpu(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def swapping(said, begin, end):
    """Pages in and out a second, between the first and the last figures in that time."""
    figures = [(at, *map(int, line.split()[1:])) for at, line in said if line.startswith("swapped") and begin <= at <= end]
    if len(figures) < 2:
        sys.exit("the thrashing guest tells no figures")
    (t0, in0, out0), (t1, in1, out1) = figures[0], figures[-1]
    return (in1 - in0) / (t1 - t0), (out1 - out0) / (t1 - t0)


def measure(way, device, images, folder, args):
    costs, folder = folder / "costs.toml", pathlib.Path(tempfile.mkdtemp(dir=folder))
    guests = dict(worker=(WORKER, args.cpus.split(",")[0], "256M", dict(DEPTH=args.depth, SECONDS_EACH=args.seconds)),
                  thrasher=(THRASHER, args.cpus.split(",")[-1], "128M", dict(MEMORY=args.memory, PROCESSES=args.processes)))
    with contextlib.ExitStack() as stack:
        back = stack.enter_context(server(way, device, images, folder, costs, args.program))
        worker, thrasher = [
            stack.enter_context(Guest(name, script, folder / f"{name}.sock", folder, cpu, mem, env))
            for name, (script, cpu, mem, env) in guests.items()]
        thrasher.expect("ready")
        worker.expect("ready")
        thrasher.tell("thrash", "no" if way == "alone" else "yes")
        while way != "alone":
            _, figures = thrasher.expect("swapped")
            if int(figures.split()[0]) > 5000:
                break
        worker.tell("work")
        begin, cpu, back_cpu = time.monotonic(), thrasher.cpu(), server_cpu(back)
        _, fio = worker.expect("fio", args.seconds + 120)
        worker.expect("done", args.seconds + 120)
        end = time.monotonic()
        back.send_signal(signal.SIGUSR1)  # its own figures into its log
        cpu, back_cpu = (thrasher.cpu() - cpu) / (end - begin), (server_cpu(back) - back_cpu) / (end - begin)
        worker.finish()
        thrasher.tell("end")
        thrasher.finish()
    job = json.loads(fio)["jobs"][0]
    if job["error"]:
        sys.exit(f"fio found an error: {job['error']}")
    steps = [tuple(int(us) / 1000 for us in line.split()[1:]) for _, line in worker.said if line.startswith("step")]
    pages_in, pages_out = swapping(thrasher.said, begin, end)
    return dict(
        way=way, device=device, seconds=end - begin, steps=steps, fio_reads=job["read"]["iops"], fio_writes=job["write"]["iops"],
        fio_p99_ms={kind: job[kind]["lat_ns"]["percentile"]["99.000000"] / 1e6 for kind in ["read", "write"]},
        pages_in=pages_in, pages_out=pages_out, thrasher_cpu=cpu, server_cpu=back_cpu,
        server=(folder / "log").read_text().splitlines())


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))]


def summary(runs):
    """One row: medians of the rounds; steps of all rounds together."""
    median = {key: statistics.median(run[key] for run in runs)
              for key in ["fio_reads", "fio_writes", "pages_in", "pages_out", "thrasher_cpu", "server_cpu"]}
    steps = [sum(step) for run in runs for step in run["steps"]]
    return median | dict(
        fio_p99_ms=statistics.median(max(run["fio_p99_ms"].values()) for run in runs), steps=len(steps),
        step_median=statistics.median(steps), step_p99=percentile(steps, 0.99), step_worst=max(steps))


def table(results):
    names = dict(alone="idle", free="thrashes, `fair-share = false`", fair="thrashes, `fair-share = true`")
    out = ["| device | the neighbour | fio IOPS | fio p99 | a step: median | p99 | worst | swaps, pages/s | its CPU | server's CPU |",
           "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for device, name in DEVICES.items():
        for way in WAYS:
            runs = [run for run in results if (run["device"], run["way"]) == (device, way)]
            if not runs:
                continue
            row = summary(runs)
            out.append(
                f"| {name} | {names[way]} | {row['fio_reads'] + row['fio_writes']:,.0f} | {row['fio_p99_ms']:.1f} ms "
                f"| {row['step_median']:.0f} ms | {row['step_p99']:.0f} ms | {row['step_worst']:.0f} ms "
                f"| {row['pages_in']:,.0f} in, {row['pages_out']:,.0f} out | {row['thrasher_cpu']:.0%} | {row['server_cpu']:.0%} |")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target" / "release" / "blockyard"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=15, help="of fio, and as many of the script, in each run")
    parser.add_argument("--depth", type=int, default=4, help="of fio")
    parser.add_argument("--memory", type=int, default=256, help="MiB that the thrashing guest uses; it has 128")
    parser.add_argument("--processes", type=int, default=32, help="that use it")
    parser.add_argument("--cpus", default="0,1", help="processor of the guest that works, and of the one that thrashes")
    parser.add_argument("--devices", default=",".join(DEVICES), help="disk, slow, or both")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of alone, free, fair")
    parser.add_argument("--folder", default="/var/tmp", help="where the images are made, 3 GiB, for the time of the run")
    parser.add_argument("--json", help="write all figures of all runs into this file")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="blockyard-thrash-", dir=args.folder))
    results = []
    try:
        costs, images = folder / "costs.toml", {}
        costs.write_text(COSTS)
        if "disk" in args.devices.split(","):
            subprocess.run([args.program, "bench", "calibrate", str(folder), "-o", str(costs), "--size", "1g"], check=True,
                           stdout=subprocess.DEVNULL)
        for name, size in [("worker", 1 << 30), ("thrasher", 1 << 30)]:
            images[name] = folder / f"{name}.img"
            with open(images[name], "wb") as file:
                for _ in range(size >> 20):
                    file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        ways = args.ways.split(",")
        for turn in range(args.rounds):
            for device in args.devices.split(","):
                for way in ways[turn % len(ways):] + ways[:turn % len(ways)]:
                    results.append(measure(way, device, images, folder, args))
                    row = summary(results[-1:])
                    print(f"round {turn + 1}, {device}, {way}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()),
                          file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(dict(options=vars(args), model=MODEL, runs=results), indent=1) + "\n")
    print(f"{args.rounds} rounds of {args.seconds} s; fio at depth {args.depth}, {args.processes} processes with {args.memory} MiB in a "
          f"guest of 128 MiB; {os.cpu_count()} processors\n")
    print(table(results))


if __name__ == "__main__":
    main()
