#!/usr/bin/env python3
"""Two experiments of 2006 in a User Mode Linux guest, on a raw disk and on a copy-on-write overlay of the same contents.

  copy   mount, copy a file of 20 MB, unmount: seconds by the guest's clock
  boot   from the start of the kernel until a guest whose root file system lies on the disk has started: it mounts it for
         writing, runs programs from it that read 60 MB of it, writes a log, syncs. Seconds by the host's clock.

Each round makes the overlays anew, measures all systems one after the other, and begins with another one. The base is
mounted by the guest once before, so that nobody has to replay a journal. Afterwards the base must be what it was.
"""

import argparse
import hashlib
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import compare
import overlays

ROOT = compare.ROOT
SYSTEMS = {
    "blockyard, raw": ("blockyard", "raw"),
    "blockyard, overlay": ("blockyard", "overlay"),
    "qsd, raw": ("qsd", "raw"),
    "qsd, overlay (its defaults)": ("qsd", "overlay"),
}

COPY = """set -e
head -c 20000000 /dev/urandom >/tmp/source; sync
begin=$(date +%s.%N)
mount /dev/vda /mnt; cp /tmp/source /mnt/copy; umount /mnt
end=$(date +%s.%N)
mount -o ro /dev/vda /mnt; cmp /tmp/source /mnt/copy
echo "took $begin $end"
"""

BOOT = """set -e
mount /dev/vda /mnt
chroot /mnt /bin/bash -c '
    set -e
    mount -t proc proc /proc
    for program in bash ls find grep sed date stat; do /usr/bin/$program --version >/dev/null; done
    find /etc /usr/bin /usr/lib -type f | head -n 2000 | xargs cat | head -c 60000000 | sha256sum >/var/boot.log
    date >>/var/boot.log
    umount /proc'
umount /mnt
echo "took 0 0"
"""


class Disk:
    """What a system serves: a copy of the base, or an overlay on it; made anew."""

    def __init__(self, kind, server, base, folder, program):
        self.image = folder / f"{server}-{kind}.{'img' if kind == 'raw' else 'qcow2'}"
        self.image.unlink(missing_ok=True)
        if kind == "raw":
            subprocess.run(["cp", "--sparse=never", base, self.image], check=True)
        elif server == "blockyard":
            subprocess.run([program, "image", "create", self.image, "-f", "qcow2", "-b", base, "-F", "raw"], check=True,
                           stdout=subprocess.DEVNULL)
        else:
            overlays.qemu_img("create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, self.image)
        compare.settle(self.image, False)
        self.format = "raw" if kind == "raw" else "qcow2"


def guest(script, socket, folder, cpu):
    path = folder / "script"
    path.write_text(script)
    begin = time.monotonic()
    out = subprocess.run([str(ROOT / "guests" / "uml"), "--timeout", "300", "--mem", "512M", "--cpu", cpu, "--disk",
                          f"vhost={socket}", str(path)], stdout=subprocess.PIPE, check=True, text=True).stdout
    wall = time.monotonic() - begin
    first, last = next(line.split()[1:] for line in out.splitlines() if line.startswith("took"))
    return float(last) - float(first) or wall


def measure(name, script, base, folder, args):
    server, kind = SYSTEMS[name]
    disk = Disk(kind, server, base, folder, args.program)
    compare.settle(base, False)
    row = overlays.Row("", "", [])
    system = overlays.System(name, server, kind)
    with overlays.server(system, row, disk.image, disk.format, folder, args.program) as back:
        return guest(script, back.socket, folder, args.cpu)


def prepare(folder):
    """Bases for both: an ext4 of 512 MiB, and one with a whole Linux in it."""
    copy, boot = folder / "copy-base.img", folder / "boot-base.img"
    tool = str(ROOT / "guests" / "tool")
    if not copy.exists():
        subprocess.run([tool, "mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0", copy, "512M"],
                       check=True)
    if not boot.exists():
        cache = subprocess.check_output(["bash", "-c", f". {ROOT}/guests/lib.sh && echo $cache"], text=True).strip()
        shutil.copyfile(f"{cache}/root.img", boot)
    return {"copy": copy, "boot": boot}


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target" / "release" / "blockyard"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="keeps the files here for the next time")
    parser.add_argument("--cpu", default="0", help="processors of the guest; the back end runs anywhere")
    args = parser.parse_args()
    folder = pathlib.Path(args.folder or tempfile.mkdtemp(prefix="blockyard-guests-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    try:
        bases = prepare(folder)
        before = {key: digest(base) for key, base in bases.items()}
        names = list(SYSTEMS)
        for turn in range(args.rounds):
            for key, script in [("copy", COPY), ("boot", BOOT)]:
                at = turn % len(names)
                for name in names[at:] + names[:at]:
                    seconds = measure(name, script, bases[key], folder, args)
                    results.setdefault((key, name), []).append(seconds)
                    print(f"round {turn + 1} {key}: {name} {seconds:.3f}", file=sys.stderr, flush=True)
        if before != {key: digest(base) for key, base in bases.items()}:
            sys.exit("a base has changed")
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    print("| experiment | " + " | ".join(names) + " | overlay to raw |\n|---|" + "--:|" * (len(names) + 1))
    for key, title in [("copy", "mount, copy 20 MB, unmount"), ("boot", "boot")]:
        median = {name: statistics.median(results[key, name]) for name in names}
        cells = " | ".join(f"{median[name]:.3f} s" for name in names)
        print(f"| {title} | {cells} | {median['blockyard, overlay'] / median['blockyard, raw']:.3f} |")


if __name__ == "__main__":
    main()
