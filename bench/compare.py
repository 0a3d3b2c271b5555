#!/usr/bin/env python3
"""Compares the host's file, qemu-storage-daemon and Blockyard, through one load generator.

Each row is one kind of load; each round measures all systems of a row one after the other, so that a slow minute of the
machine hits all of them; the figure is the median of the rounds. All three use the same file, and the same client:
`blockyard bench client` (for the host: its --file mode, io_uring with O_DIRECT). The client sleeps on the call eventfd
like a guest does, unless a row says otherwise.
"""

import argparse
import json
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
SYSTEMS = ["host", "qsd", "blockyard"]


class Row:
    """One kind of load: what the client is told, and what lies under the servers."""

    def __init__(self, name, load, under="direct", targets=None):
        self.name, self.load, self.under = name, load.split(), under
        self.systems = ["qsd", "blockyard"] if under == "null" else SYSTEMS
        self.targets = targets or {}


def rows():
    table = [
        Row("4k random read, depth 32", "--rw randread --bs 4k --depth 32", targets=dict(qsd=1.25, host=0.85)),
        Row("4k random read, depth 1", "--rw randread --bs 4k --depth 1", targets=dict(qsd=1.2, host=0.9)),
        Row("4k random write, depth 32", "--rw randwrite --bs 4k --depth 32", targets=dict(qsd=1.2, host=0.95)),
        Row("4k random write, depth 1", "--rw randwrite --bs 4k --depth 1", targets=dict(host=0.9)),
    ]
    for size in ["64k", "1m"]:
        for rw in ["read", "write"]:
            for depth in [32, 1]:
                pattern = f"rand{rw}" if size == "64k" else rw
                name = f"{size.replace('m', 'M')} {'random' if size == '64k' else 'sequential'} {rw}, depth {depth}"
                table.append(Row(name, f"--rw {pattern} --bs {size} --depth {depth}"))
    table += [
        Row("4k random read, page cache, depth 32", "--rw randread --bs 4k --depth 32 --size 1g", "cached",
            dict(qsd=2.0)),
        Row("4k random read, page cache, depth 1", "--rw randread --bs 4k --depth 1 --size 1g", "cached"),
        Row("4k random write, page cache, depth 32", "--rw randwrite --bs 4k --depth 32 --size 1g", "cached"),
        Row("null, 4k random read, depth 32", "--rw randread --bs 4k --depth 32", "null", dict(qsd=2.5)),
        Row("null, 4k random read, depth 32, client polls", "--rw randread --bs 4k --depth 32 --poll", "null",
            dict(qsd=2.5)),
    ]
    return table


class Server:
    """A back end on a socket; killed at the end of the `with`."""

    def __init__(self, command, socket, ready):
        self.command, self.socket, self.ready = command, socket, ready

    def __enter__(self):
        if self.socket.exists():
            self.socket.unlink()
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(200):
            if self.socket.exists():
                break
            if self.process.poll() is not None:
                sys.exit(f"{self.command[0]} ended at once: {self.process.stderr.read()}")
            time.sleep(0.02)
        time.sleep(0.05)
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def server(system, row, image, folder, program):
    socket = folder / f"{system}.sock"
    if system == "blockyard":
        target = "null:2G" if row.under == "null" else str(image)
        cache = {"cached": "writeback"}.get(row.under, "none")
        return Server([program, "--log", "error", "serve", target, "--vhost-user", str(socket), "--cache", cache],
                      socket, "ready")
    tool = str(ROOT / "guests" / "tool")
    if row.under == "null":
        block = ["--blockdev", "driver=null-co,node-name=r0,size=2147483648,read-zeroes=off"]
    else:
        direct = "off" if row.under == "cached" else "on"
        block = ["--blockdev", f"driver=file,node-name=f0,filename={image},aio=io_uring,cache.direct={direct}",
                 "--blockdev", "driver=raw,node-name=r0,file=f0"]
    export = f"type=vhost-user-blk,id=e0,node-name=r0,addr.type=unix,addr.path={socket},writable=on,num-queues=1"
    return Server([tool, "qemu-storage-daemon", *block, "--export", export], socket, None)


def measure(system, row, image, folder, args):
    client = [args.program, "bench", "client", "--json", "--runtime", str(args.seconds), *row.load]
    if system == "host":
        client += ["--file", str(image)] + (["--buffered"] if row.under == "cached" else [])
        return json.loads(subprocess.check_output(client))
    with server(system, row, image, folder, args.program) as back:
        client += ["--backend-pid", str(back.process.pid), str(back.socket)]
        return json.loads(subprocess.check_output(client))


def prepare(folder, size):
    """A file with every block written, so that no row measures allocation."""
    image = folder / "disk.img"
    if not image.exists() or image.stat().st_size != size:
        with open(image, "wb") as f:
            for _ in range(size >> 20):
                f.write(os.urandom(1 << 20))
            f.flush()
            os.fsync(f.fileno())
    return image


def settle(image, cached):
    """Nothing dirty, and the file in the page cache or out of it: a direct write of a cached page costs both systems more."""
    with open(image, "rb") as f:
        os.fsync(f.fileno())
        if not cached:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while cached and f.read(1 << 20):
            pass


def run(args):
    folder = pathlib.Path(args.folder or tempfile.mkdtemp(prefix="blockyard-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    try:
        image = prepare(folder, args.size << 20)
        wanted = re.compile(args.only or "")
        chosen = [row for row in rows() if wanted.search(row.name)]
        for row in chosen:
            results[row.name] = {system: [] for system in row.systems}
        for turn in range(args.rounds):
            for row in chosen:
                # Each round begins with another system: nobody always runs after the same neighbour.
                order = row.systems[turn % len(row.systems):] + row.systems[:turn % len(row.systems)]
                for system in order:
                    settle(image, row.under == "cached")
                    figure = measure(system, row, image, folder, args)
                    results[row.name][system].append(figure)
                    print(f"round {turn + 1} {row.name}: {system} {figure['iops']:.0f}", file=sys.stderr, flush=True)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return chosen, results


def median(figures, key):
    values = [key(f) for f in figures]
    return statistics.median(values) if all(v is not None for v in values) else None


def table(chosen, results):
    """Markdown: one line a row and system."""
    out = ["| load | system | IOPS | MB/s | p50 us | p99 us | back end: CPU s per M I/Os | IOPS per core | "
           "to host | to qsd | per core to qsd |", "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for row in chosen:
        by = results[row.name]
        iops = {s: median(by[s], lambda f: f["iops"]) for s in row.systems}
        cpu = {s: median(by[s], lambda f: (f.get("backend_cpu") or {}).get("seconds_per_million_ios"))
               for s in row.systems}
        for system in row.systems:
            f = by[system]
            cells = [row.name if system == row.systems[0] else "", system, f"{iops[system]:,.0f}",
                     f"{median(f, lambda x: x['bytes_per_second']) / 1e6:,.0f}",
                     f"{median(f, lambda x: x['latency_us']['p50']):.0f}",
                     f"{median(f, lambda x: x['latency_us']['p99']):.0f}",
                     f"{cpu[system]:.2f}" if cpu[system] else "",
                     f"{1e6 / cpu[system]:,.0f}" if cpu[system] else ""]
            ratio = lambda other: f"{iops[system] / iops[other]:.2f}" if other in iops and system == "blockyard" else ""
            per_core = cpu["qsd"] / cpu["blockyard"] if cpu.get("qsd") and cpu.get("blockyard") else None
            cells += [ratio("host"), ratio("qsd"), f"{per_core:.2f}" if per_core and system == "blockyard" else ""]
            out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def options(doc, size=2048):
    """The options of a comparison."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target" / "release" / "blockyard"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of time")
    parser.add_argument("--size", type=int, default=size, help="of the file, in MiB")
    parser.add_argument("--folder", help="keeps the file here for the next time")
    parser.add_argument("--only", help="rows whose name matches this regular expression")
    parser.add_argument("--json", help="writes all figures of all rounds here")
    return parser


def report(args, run, table):
    """Runs the comparison, and prints its table."""
    chosen, results = run(args)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))
    print(table(chosen, results))


def main():
    report(options(__doc__).parse_args(), run, table)


if __name__ == "__main__":
    main()
