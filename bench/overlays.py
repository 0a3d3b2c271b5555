#!/usr/bin/env python3
"""Compares copy-on-write images: Blockyard's qcow2 with its own raw and with qemu-storage-daemon's qcow2.

As in compare.py each round measures all systems of a row one after the other, through the same client
(`blockyard bench client`), and the figure is the median of the rounds. Before each measurement of first writes the overlay
is made anew; all overlays of a row lie over the same base, a raw file in which every block was written.
"""

import json
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
# What `blockyard image create -b` chooses, and QEMU's own.
OURS, QEMUS = "extended_l2=on,cluster_size=128k", "cluster_size=64k"


class System:
    """A back end over an image: `made` names how the image is made, `options` its qcow2 options."""

    def __init__(self, name, server, made, options=QEMUS):
        self.name, self.server, self.made, self.options = name, server, made, options


class Row:
    def __init__(self, name, load, systems, targets=(), cached=False):
        self.name, self.load, self.systems, self.targets, self.cached = name, load.split(), systems, targets, cached


def rows(ops):
    raw = System("blockyard raw", "blockyard", "raw")
    table = []
    full = [raw, System("blockyard qcow2", "blockyard", "full"), System("qsd qcow2", "qsd", "full")]
    wide = [System("blockyard qcow2, extended L2", "blockyard", "full", OURS)]
    for rw in ["read", "write"]:
        table.append(Row(f"allocated, 4k random {rw}, depth 32", f"--rw rand{rw} --bs 4k --depth 32", full + wide))
    table.append(Row("allocated, 4k random read, depth 1", "--rw randread --bs 4k --depth 1", full))
    table.append(Row("allocated, 64k random write, depth 32", "--rw randwrite --bs 64k --depth 32", full))
    table.append(Row("allocated, 1M read, depth 8", "--rw read --bs 1m --depth 8", full))
    table.append(Row("allocated, 4k random read, page cache, depth 32", "--rw randread --bs 4k --depth 32 --size 1g",
                     full, cached=True))
    equal = [raw, System("blockyard, 64k", "blockyard", "overlay"), System("qsd, 64k", "qsd", "overlay"),
             System("blockyard, extended L2, 128k", "blockyard", "overlay", OURS),
             System("qsd, extended L2, 128k", "qsd", "overlay", OURS)]
    first = f"--rw randwrite --bs 4k --depth 32 --ops {ops}"
    table.append(Row("first writes, 4k random, depth 32", first, equal))
    table.append(Row("first writes, 4k random, depth 32, flush every 32", first + " --flush-every 32", equal))
    table.append(Row("first writes, 64k random, depth 32", f"--rw randwrite --bs 64k --depth 32 --ops {ops // 4}", equal))
    chains = [System("chain of 1", "blockyard", "full"), System("chain of 8", "blockyard", "chain"),
              System("qsd, chain of 8", "qsd", "chain")]
    table.append(Row("chain, 4k random read, depth 32", "--rw randread --bs 4k --depth 32", chains))
    tera = [System("blockyard", "blockyard", "tera"), System("blockyard, extended L2, 128k", "blockyard", "tera", OURS),
            System("qsd", "qsd", "tera")]
    table.append(Row("image of 1 TiB, 4k random read, depth 32", "--rw randread --bs 4k --depth 32", tera))
    table.append(Row("chain, 4k random read, page cache, depth 32", "--rw randread --bs 4k --depth 32 --size 1g", chains,
                     cached=True))
    return table


def qemu_img(*arguments):
    subprocess.run([TOOL, "qemu-img", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def image_for(system, folder, base):
    """The image's path and format, ready for a measurement."""
    if system.made == "raw":
        return base, "raw"
    name = f"{system.made}-{'wide' if system.options == OURS else 'plain'}.qcow2"
    image = folder / name
    if system.made == "overlay":
        image.unlink(missing_ok=True)
        qemu_img("create", "-q", "-f", "qcow2", "-o", system.options, "-F", "raw", "-b", base, image)
    elif not image.exists():
        if system.made == "full":
            # Copied once more, in order: a file system lays out what is written here and there as it comes.
            parts = folder / "parts.qcow2"
            qemu_img("convert", "-f", "raw", "-O", "qcow2", "-o", system.options, base, parts)
            shutil.copyfile(parts, image)
            parts.unlink()
        elif system.made == "tera":
            # All clusters allocated, in holes of the file: what is read costs nothing, what is looked up does.
            qemu_img("create", "-q", "-f", "qcow2", "-o", f"preallocation=metadata,{system.options}", image, "1T")
        else:
            below = image_for(System("", "", "full", system.options), folder, base)[0]
            for number in range(2, 9):
                link = folder / f"link-{number}.qcow2" if number < 8 else image
                link.unlink(missing_ok=True)
                qemu_img("create", "-q", "-f", "qcow2", "-o", system.options, "-F", "qcow2", "-b", below, link)
                below = link
    return image, "qcow2"


def server(system, row, image, form, folder, program):
    socket = folder / f"{system.server}.sock"
    if system.server == "blockyard":
        command = [program, "--log", "error", "serve", str(image), "--format", form, "--vhost-user", str(socket),
                   "--cache", "writeback" if row.cached else "none", "--prime"]
        return compare.Server(command if form != "raw" else command[:-1], socket, "ready")
    block = ["--blockdev", f"driver=file,node-name=f0,filename={image},aio=io_uring,"
             f"cache.direct={'off' if row.cached else 'on'}", "--blockdev", f"driver={form},node-name=r0,file=f0"]
    export = f"type=vhost-user-blk,id=e0,node-name=r0,addr.type=unix,addr.path={socket},writable=on,num-queues=1"
    return compare.Server([TOOL, "qemu-storage-daemon", *block, "--export", export], socket, None)


def measure(system, row, folder, base, args):
    image, form = image_for(system, folder, base)
    compare.settle(base, row.cached)
    compare.settle(image, row.cached)
    client = [args.program, "bench", "client", "--json", *row.load]
    if "--ops" not in row.load:
        client += ["--runtime", str(args.seconds)]
    with server(system, row, image, form, folder, args.program) as back:
        client += ["--backend-pid", str(back.process.pid), str(back.socket)]
        figure = json.loads(subprocess.check_output(client))
        figure["memory_mib"] = memory(back.process.pid)
    if args.check and form == "qcow2":
        qemu_img("check", "-q", "-f", "qcow2", image)
    return figure


def memory(pid):
    """What a process has in memory of its own, in MiB: not the files and the client's memory that it maps."""
    status = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


def run(args):
    folder = pathlib.Path(args.folder or tempfile.mkdtemp(prefix="blockyard-overlays-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    try:
        base = compare.prepare(folder, args.size << 20)
        wanted = re.compile(args.only or "")
        chosen = [row for row in rows(args.ops) if wanted.search(row.name)]
        for row in chosen:
            results[row.name] = {system.name: [] for system in row.systems}
        for turn in range(args.rounds):
            for row in chosen:
                at = turn % len(row.systems)
                for system in row.systems[at:] + row.systems[:at]:
                    figure = measure(system, row, folder, base, args)
                    results[row.name][system.name].append(figure)
                    print(f"round {turn + 1} {row.name}: {system.name} {figure['iops']:.0f}", file=sys.stderr, flush=True)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return chosen, results


def table(chosen, results):
    out = ["| load | system | IOPS | p50 us | p99 us | back end: CPU s per M I/Os | IOPS per core | memory, MiB | to the first |",
           "|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in chosen:
        first = None
        for number, system in enumerate(row.systems):
            figures = results[row.name][system.name]
            iops = statistics.median(f["iops"] for f in figures)
            cpu = compare.median(figures, lambda f: (f.get("backend_cpu") or {}).get("seconds_per_million_ios"))
            first = first or iops
            latency = lambda key: statistics.median(f["latency_us"][key] for f in figures)
            out.append(f"| {row.name if number == 0 else ''} | {system.name} | {iops:,.0f} | {latency('p50'):.0f} | "
                       f"{latency('p99'):.0f} | {f'{cpu:.2f}' if cpu else ''} | {f'{1e6 / cpu:,.0f}' if cpu else ''} | "
                       f"{statistics.median(f['memory_mib'] for f in figures):.0f} | {iops / first:.2f} |")
    return "\n".join(out)


def main():
    parser = compare.options(__doc__, size=4096)
    parser.add_argument("--ops", type=int, default=8000, help="first writes of each measurement")
    parser.add_argument("--check", action="store_true", help="qemu-img check after each measurement")
    compare.report(parser.parse_args(), run, table)


if __name__ == "__main__":
    main()
