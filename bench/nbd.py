#!/usr/bin/env python3
"""Compares NBD servers: Blockyard, qemu-nbd and nbdkit's file plugin, over a Unix socket, with fio's nbd engine (libnbd).

Each round measures all systems of a row one after the other, beginning with another one each time; figures are medians of
the rounds. A job of fio is a connection, and its depth is that connection's. CPU is the server's, all of its threads
(/proc/PID/stat), for each I/O.

  direct  a file on the disk, O_DIRECT: qemu-nbd --cache=none --aio=io_uring. nbdkit's file plugin has no O_DIRECT: its
          cache=none drops the pages behind itself. Its writes are answered from the page cache: they are shown, in
          brackets, and not compared
  cached  the same file in the page cache: qemu-nbd --cache=writeback with io_uring or threads (--qemu-aio), nbdkit as it is
  null    no storage at all: what the protocol costs

With --host fio has the file itself, too, by io_uring: what the storage gives at that time.
"""

import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import compare

ROOT = compare.ROOT
TOOL = str(ROOT / "guests" / "tool")
SYSTEMS = ["blockyard", "qemu-nbd", "nbdkit"]
HOST = "host"
TICK = os.sysconf("SC_CLK_TCK")


class Row:
    """One kind of load."""

    def __init__(self, under, rw, bs, depth, connections):
        self.under, self.rw, self.bs, self.depth, self.connections = under, rw, bs, depth, connections
        pattern = "random" if rw.startswith("rand") else "sequential"
        self.name = (f"{under}: {bs} {pattern} {rw.removeprefix('rand')}, depth {depth}, "
                     f"{connections} connection{'s'[:connections > 1]}")
        self.peers = ["qemu-nbd"] if under == "direct" and rw.endswith("write") else SYSTEMS[1:]

    def cell(self, system, text):
        return text if system == SYSTEMS[0] or system in self.peers else f"({text})"


def rows():
    table = []
    for under in ["direct", "cached"]:
        for connections in [1, 4]:
            for rw in ["randread", "randwrite"]:
                table += [Row(under, rw, "4k", depth, connections) for depth in [1, 32, 64]]
            table += [Row(under, rw, "1M", 8, connections) for rw in ["read", "write"]]
    return table + [Row("null", rw, bs, 32, n) for rw, bs in [("randread", "4k"), ("randwrite", "4k"), ("read", "1M")]
                    for n in [1, 4]]


def server(system, row, image, folder, args):
    socket, null = folder / f"{system}.sock", row.under == "null"
    if system == "blockyard":
        cache = "none" if row.under == "direct" else "writeback"
        command = [args.program, "--log", "error", "serve", "null:2G" if null else str(image), "--nbd", f"unix:{socket}",
                   "--name", "disk", "--cache", cache, "--reactors", str(args.reactors)]
        return compare.Server(command, socket, "ready")
    if system == "qemu-nbd":
        what = ["null-co://"] if null else ["-f", "raw", "--discard=unmap", str(image)]
        if row.under == "direct":
            what = ["--cache=none", "--aio=io_uring", *what]
        elif not null:
            what = ["--cache=writeback", f"--aio={args.qemu_aio}", *what]
        return compare.Server([TOOL, "qemu-nbd", "-t", "-e", "8", "-x", "disk", "-k", str(socket), *what], socket, None)
    what = ["null", "2G"] if null else ["file", str(image)] + (["cache=none"] if row.under == "direct" else [])
    return compare.Server([TOOL, "nbdkit", "-f", "-e", "disk", "-U", str(socket), *what], socket, None)


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def fio(row, args, *target):
    """fio's job of such a load; what it prints."""
    size = f"{min(args.size, 1024)}m" if row.under == "null" else f"{args.size // row.connections}m"
    command = [TOOL, "fio", "--output-format=json", "--name=load", *target, f"--rw={row.rw}", f"--bs={row.bs}",
               f"--iodepth={row.depth}", f"--numjobs={row.connections}", "--group_reporting", "--thread", "--norandommap",
               "--randrepeat=0", "--time_based", f"--runtime={args.seconds}", f"--size={size}"]
    if row.under != "null" and row.connections > 1:
        command.append(f"--offset_increment={size}")
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if out.returncode:
        sys.exit(f"{' '.join(command)}: {out.stderr}")
    return json.loads(out.stdout[out.stdout.index("{"):])["jobs"][0]


def measure(system, row, image, folder, args):
    if system == HOST:
        job, used = fio(row, args, "--ioengine=io_uring", f"--filename={image}", f"--direct={int(row.under == 'direct')}"), 0
    else:
        with server(system, row, image, folder, args) as back:
            before = cpu_seconds(back.process.pid)
            job = fio(row, args, "--ioengine=nbd", f"--uri=nbd+unix:///disk?socket={back.socket}")
            used = cpu_seconds(back.process.pid) - before
    side = job["read" if "read" in row.rw else "write"]
    percentile = side["clat_ns"]["percentile"]
    return dict(iops=side["iops"], bytes_per_second=side["bw_bytes"], p50=percentile["50.000000"] / 1000,
                p99=percentile["99.000000"] / 1000, cpu_us=used * 1e6 / max(side["total_ios"], 1))


def run(args):
    folder = pathlib.Path(args.folder or tempfile.mkdtemp(prefix="blockyard-nbd-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    wanted = re.compile(args.only or "")
    chosen = [row for row in rows() if wanted.search(row.name)]
    systems = SYSTEMS + [HOST] * args.host
    results = {row.name: {system: [] for system in systems} for row in chosen}
    try:
        image = compare.prepare(folder, args.size << 20)
        for turn in range(args.rounds):
            for row in chosen:
                at = turn % len(systems)
                for system in systems[at:] + systems[:at]:
                    if row.under == "null" and system == HOST:
                        continue
                    if row.under != "null":
                        compare.settle(image, row.under == "cached")
                    figure = measure(system, row, image, folder, args)
                    results[row.name][system].append(figure)
                    print(f"round {turn + 1} {row.name}: {system} {figure['iops']:.0f}, {figure['cpu_us']:.1f} us",
                          file=sys.stderr, flush=True)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return chosen, results


def table(chosen, results):
    out = ["| load | " + " | ".join(f"{s}, IOPS" for s in SYSTEMS) + " | to the better peer | p99 us | CPU us/I/O: " +
           " | ".join(SYSTEMS) + " | to the better peer |", "|---" + "|--:" * 9 + "|"]
    host = any(HOST in by for by in results.values())
    if host:
        out = [out[0] + " host, IOPS | of the host |", out[1] + "--:|--:|"]
    for row in chosen:
        by = results[row.name]
        iops, cpu, p99 = ({s: statistics.median(f[key] for f in by[s]) for s in SYSTEMS} for key in ["iops", "cpu_us", "p99"])
        out.append("| " + " | ".join([
            row.name, *(row.cell(s, f"{iops[s]:,.0f}") for s in SYSTEMS),
            f"{iops['blockyard'] / max(iops[s] for s in row.peers):.2f}",
            " / ".join(row.cell(s, f"{p99[s]:,.0f}") for s in SYSTEMS), *(row.cell(s, f"{cpu[s]:.1f}") for s in SYSTEMS),
            f"{cpu['blockyard'] / min(cpu[s] for s in row.peers):.2f}"]) + " |")
        if host:
            there = [f["iops"] for f in by[HOST]]
            of = statistics.median(there) if there else None
            out[-1] += f" {of:,.0f} | {iops['blockyard'] / of:.2f} |" if of else "  |  |"
    return "\n".join(out)


def main():
    parser = compare.options(__doc__)
    parser.add_argument("--reactors", type=int, default=1, help="of Blockyard; qemu-nbd has one thread, nbdkit 16")
    parser.add_argument("--host", action="store_true", help="the file itself as one more system")
    parser.add_argument("--qemu-aio", default="threads", help="of qemu-nbd through the page cache")
    compare.report(parser.parse_args(), run, table)


if __name__ == "__main__":
    main()
