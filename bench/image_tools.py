#!/usr/bin/env python3
"""Compares `blockyard image` with `qemu-img`: the same work on the same files, at equal durability.

Each round runs both programs of a row, one right after the other; the program that goes first changes with each round.
Figures are medians of the rounds.

  durability  `blockyard image` syncs what it has written before it ends. `qemu-img` leaves that to the kernel in some
              commands (`convert` with its default cache mode). So each run of it ends with an fsync of what it wrote
              (the file, and its folder), within the measured time. Its cache mode is its default, the fastest one
  start       both programs start directly: the wrapper guests/tool, a shell script, is not in the figures. What the
              dynamic linker takes is; the row "start" shows it (--version)
  sources     are in the page cache (each is read before the row), outputs are new files. The system is synced before
              each run
  memory      is touched before each run, as much as the largest output takes: a virtual machine gives free memory
              back to its host, and the first program that used it again would pay for all
  CPU         user and system time of the process, all of its threads (wait4)

In the first round the results of both programs are compared with `qemu-img compare` (--no-check: they are not). On a
machine with other work, `chrt -r 1 bench/image_tools.py` gives both programs their processors.
"""

import argparse
import json
import mmap
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB = 1 << 20
SYSTEMS = ["qemu-img", "blockyard"]
# Rows whose output may be as large as their source.
WRITING = ("convert", "create", "rebase")


class Row:
    """One work. `ours` and `theirs`: arguments, in which {out} is the file that is written. `begin`: makes {out} anew
    before each run, for work on an image that exists. `reads`: sources, to be in the page cache. `judge`: the result
    has the disk of this source."""

    def __init__(self, name, ours, theirs, reads=(), begin=None, out="out", judge=None):
        self.name, self.ours, self.theirs, self.reads = name, ours.split(), theirs.split(), reads
        self.begin, self.out, self.judge = begin, out, judge


def rows():
    def convert(name, source, form, to, options="", judge=True):
        suffix = "raw" if to == "raw" else "qcow2"
        return Row(f"convert {name}", f"convert -O {to} {options} {{dir}}/{source} {{out}}",
                   f"convert -f {form} -O {to} {options} {{dir}}/{source} {{out}}", [source], out=f"out.{suffix}",
                   judge=(source, form, to) if judge else None)

    empty = "empty.qcow2"
    table = [
        Row("start", "--version", "--version"),
        convert("raw to qcow2, dense", "dense.raw", "raw", "qcow2"),
        convert("raw to qcow2, sparse", "sparse.raw", "raw", "qcow2"),
        convert("qcow2 to raw, dense", "dense.qcow2", "qcow2", "raw"),
        convert("qcow2 to raw, sparse", "sparse.qcow2", "qcow2", "raw"),
        convert("qcow2 to qcow2, dense", "dense.qcow2", "qcow2", "qcow2"),
        convert("raw to raw, sparse", "sparse.raw", "raw", "raw"),
        convert("compressed (zlib) to raw", "zlib.qcow2", "qcow2", "raw"),
        convert("compressed (zstd) to raw", "zstd.qcow2", "qcow2", "raw"),
        convert("raw to compressed (zlib)", "text.raw", "raw", "qcow2", "-c"),
        convert("raw to compressed (zstd)", "text.raw", "raw", "qcow2", "-c -o compression_type=zstd"),
        convert("an empty image of 128 GiB, clusters of 512 bytes", empty, "qcow2", "qcow2", judge=False),
        convert("to an image with clusters of 512 bytes, 64 MiB", "small.raw", "raw", "qcow2", "-o cluster_size=512"),
    ]
    for name, source in [("an empty image of 128 GiB, clusters of 512 bytes", empty), ("sparse", "sparse.qcow2")]:
        table.append(Row(f"map, {name}", f"map --json {{dir}}/{source}",
                         f"map --output=json -f qcow2 {{dir}}/{source}", [source]))
    for name, source in [("an empty image of 128 GiB, clusters of 512 bytes", empty), ("dense", "dense.qcow2")]:
        table.append(Row(f"check, {name}", f"check {{dir}}/{source}", f"check -f qcow2 {{dir}}/{source}", [source]))
    for name, a, b, form in [("raw and qcow2, dense", "dense.raw", "dense.qcow2", "qcow2"),
                             ("raw and qcow2, sparse", "sparse.raw", "sparse.qcow2", "qcow2"),
                             ("raw and compressed (zlib)", "text.raw", "zlib.qcow2", "qcow2")]:
        table.append(Row(f"compare {name}", f"compare {{dir}}/{a} {{dir}}/{b}",
                         f"compare -f raw -F {form} {{dir}}/{a} {{dir}}/{b}", [a, b]))
    for kind, size in [("metadata", "200G"), ("falloc", "1G"), ("full", "1G")]:
        options = f"create -f qcow2 -o preallocation={kind} {{out}} {size}"
        table.append(Row(f"create, {size.replace('G', ' GiB')}, preallocation={kind}", options, options, out="out.qcow2"))
    table += [
        Row("resize by 200 GiB, --preallocation metadata", "resize --preallocation metadata {out} +200G",
            "resize -f qcow2 --preallocation=metadata {out} +200G",
            begin=lambda folder, out: shutil.copy(folder / "tiny.qcow2", out), out="out.qcow2"),
        Row("commit, 256 MiB", "commit {out}", "commit -f qcow2 {out}", begin=overlay, out="over.qcow2"),
        Row("rebase to none, 256 MiB of 1 GiB", "rebase -b {none} {out}", "rebase -f qcow2 -b {none} {out}",
            begin=overlay, out="over.qcow2"),
    ]
    return table


def overlay(folder, out):
    """A copy of an overlay, and of the image below it."""
    shutil.copy(folder / "overlay.qcow2", out)
    shutil.copy(folder / "dense.qcow2", folder / "below.qcow2")
    sync(folder / "below.qcow2")


def qemu_img():
    """The command that the wrapper guests/tool ends with, and its environment: without the wrapper's own time."""
    script = f'. {ROOT}/guests/lib.sh && printf "%s\\n" "$libs" "$tree/usr/bin/qemu-img" "${{loader[@]}}"'
    libs, program, *loader = subprocess.check_output(["bash", "-c", script], text=True).splitlines()
    return [*loader, "--argv0", "qemu-img", program], {**os.environ, "QEMU_MODULE_DIR": f"{libs}/qemu"}


class Programs:
    def __init__(self, program):
        self.theirs, self.environment = qemu_img()
        self.ours = [program, "image"]

    def qemu_img(self, *arguments):
        subprocess.run([*self.theirs, *map(str, arguments)], check=True, env=self.environment, stdout=subprocess.DEVNULL)

    def command(self, system, row, folder, out):
        words = row.ours if system == "blockyard" else row.theirs
        program = self.ours if system == "blockyard" else self.theirs
        if row.name == "start":
            program = program[:1] if system == "blockyard" else program
        places = {"dir": folder, "out": out, "none": ""}
        return [*program, *(word.format(**places) for word in words)]


def sync(path):
    """The file is durable."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def touch(size):
    """So much free memory is backed by the host."""
    mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def fill(path, size, block, holes=0):
    """A file of `size` bytes: a MiB that `block` gives, and `holes` MiB that are not written, in turn."""
    with open(path, "wb") as file:
        for at in range(0, size, MIB * (1 + holes)):
            file.seek(at)
            file.write(block(MIB))
        file.truncate(size)
    sync(path)


def text(size):
    """Bytes that compress to about a third, as text does."""
    words = [bytes(random.choices(b"abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 9))) for _ in range(4000)]
    return b" ".join(random.choices(words, k=size // 5))[:size].ljust(size)


def prepare(programs, folder, size):
    """All sources, unless they are there from an earlier run."""
    if (folder / "ready").exists():
        return
    random.seed(1)
    fill(folder / "dense.raw", size, random.randbytes)
    fill(folder / "sparse.raw", size * 8, random.randbytes, holes=31)
    fill(folder / "text.raw", size // 4, text)
    fill(folder / "small.raw", size // 16, random.randbytes)
    for name in ["dense", "sparse"]:
        programs.qemu_img("convert", "-f", "raw", "-O", "qcow2", folder / f"{name}.raw", folder / f"{name}.qcow2")
    for kind in ["zlib", "zstd"]:
        programs.qemu_img("convert", "-c", "-f", "raw", "-O", "qcow2", "-o", f"compression_type={kind}",
                          folder / "text.raw", folder / f"{kind}.qcow2")
    programs.qemu_img("create", "-q", "-f", "qcow2", "-o", "cluster_size=512", folder / "empty.qcow2", "128G")
    programs.qemu_img("create", "-q", "-f", "qcow2", folder / "tiny.qcow2", "1G")
    # A quarter of the disk is in the overlay.
    shutil.copy(folder / "dense.qcow2", folder / "below.qcow2")
    overlay = folder / "overlay.qcow2"
    programs.qemu_img("create", "-q", "-f", "qcow2", "-b", "below.qcow2", "-F", "qcow2", overlay)
    writes = [word for at in range(0, size, 4 * MIB) for word in ["-c", f"write -q -P {at // MIB % 255 + 1} {at} 1M"]]
    subprocess.run([ROOT / "guests" / "tool", "qemu-io", "-f", "qcow2", *writes, overlay], check=True)
    sync(overlay)
    (folder / "ready").touch()


def run_once(programs, system, row, folder, out, args):
    """Seconds of the wall, and of the processor."""
    if row.begin:
        row.begin(folder, out)
        sync(out)
    else:
        out.unlink(missing_ok=True)
    if row.name.startswith(WRITING):
        touch(args.size * MIB * 9 // 8)
    os.sync()
    command = programs.command(system, row, folder, out)
    start = time.monotonic()
    process = subprocess.Popen(command, env=programs.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{row.name}: {system} ends with {process.returncode}: {errors.decode()}")
    if system == "qemu-img":
        written = [folder / "below.qcow2"] if row.name.startswith("commit") else []
        for path in [*written, out, folder]:
            if out.exists():
                sync(path)
    wall = time.monotonic() - start
    return {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "memory_mib": usage.ru_maxrss / 1024}


def judge(programs, row, folder, out):
    if row.judge and out.exists():
        source, form, to = row.judge
        programs.qemu_img("compare", "-q", "-f", form, "-F", to, folder / source, out)
        if to == "qcow2":
            programs.qemu_img("check", "-q", "-f", to, out)


def run(args):
    folder = pathlib.Path(args.folder or tempfile.mkdtemp(prefix="blockyard-image-tools-"))
    folder.mkdir(parents=True, exist_ok=True)
    programs = Programs(args.program)
    wanted = re.compile(args.only or "")
    chosen = [row for row in rows() if wanted.search(row.name)]
    results = {row.name: {system: [] for system in SYSTEMS} for row in chosen}
    try:
        prepare(programs, folder, args.size * MIB)
        for row in chosen:
            out = folder / row.out
            for source in row.reads:
                subprocess.run(["cat", folder / source], check=True, stdout=subprocess.DEVNULL)
            for turn in range(args.rounds):
                for system in SYSTEMS[turn % 2:] + SYSTEMS[:turn % 2]:
                    results[row.name][system].append(run_once(programs, system, row, folder, out, args))
                    if turn == 0 and not args.no_check:
                        judge(programs, row, folder, out)
            out.unlink(missing_ok=True)
            print(line(row, results), file=sys.stderr, flush=True)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return chosen, results


def line(row, results):
    by = results[row.name]
    middle = {key: {s: statistics.median(f[key] for f in by[s]) for s in SYSTEMS} for key in ["wall", "cpu"]}
    cells = [row.name]
    for key in ["wall", "cpu"]:
        theirs, ours = (middle[key][s] for s in SYSTEMS)
        cells += [f"{theirs:.3f}", f"{ours:.3f}"]
        if key == "wall":
            # The ratio of each round: what else the machine did falls on both.
            pairs = zip(by["blockyard"], by["qemu-img"])
            cells.append(f"{statistics.median(a['wall'] / b['wall'] for a, b in pairs):.2f}")
    return "| " + " | ".join(cells) + " |"


def table(chosen, results):
    """Markdown: one line a row."""
    out = ["| work | qemu-img, s | blockyard, s | blockyard / qemu-img | CPU s, qemu-img | CPU s, blockyard |",
           "|---|--:|--:|--:|--:|--:|"]
    return "\n".join(out + [line(row, results) for row in chosen])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target" / "release" / "blockyard"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1024, help="of the dense image, in MiB; other sizes follow")
    parser.add_argument("--folder", help="keeps the sources here for the next time")
    parser.add_argument("--only", help="rows whose name matches this regular expression")
    parser.add_argument("--json", help="writes all figures of all rounds here")
    parser.add_argument("--no-check", action="store_true", help="does not compare the results")
    args = parser.parse_args()
    chosen, results = run(args)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))
    print(table(chosen, results))


if __name__ == "__main__":
    main()
