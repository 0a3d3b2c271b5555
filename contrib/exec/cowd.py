#!/usr/bin/env python3
"""Copy-on-write over a file, as an exec: image of Blockyard: see docs/own-target.md.

BASE, STORE and TABLE in the environment name the files. STORE is as large as BASE. TABLE has eight
bytes for each block of BASE: 0, its number in STORE plus 1, or FREED. It is empty at first."""
import fcntl, os, struct, sys

BLOCK = 64 << 10
FREED = (1 << 64) - 1
base, store, table = (os.path.abspath(os.environ[name]) for name in ("BASE", "STORE", "TABLE"))
size, room = (os.lseek(os.open(name, os.O_RDONLY), 0, os.SEEK_END) for name in (base, store))
blocks, rest = divmod(size, BLOCK)
if rest:
    sys.exit(f"{base} is no multiple of {BLOCK} bytes: make it one, with truncate -s %{BLOCK}")
if room < size:
    sys.exit(f"{store} is smaller than {base}: make it as large, with truncate -s {size}")
file = os.open(table, os.O_RDWR)
fcntl.flock(file, fcntl.LOCK_EX)  # the program of a dead server may still write it
entries = os.pread(file, blocks * 8, 0).ljust(blocks * 8, b"\0")
os.pwrite(file, entries, 0)  # now, not in a flush, the host may be full
os.fdatasync(file)  # what it calls free may be used at once
slots = list(struct.unpack(f"<{blocks}Q", entries))
free = sorted(set(range(1, blocks + 1)) - set(slots), reverse=True)
given = {}  # places that are not in the table yet
freed = {}  # places that are free after the next flush, by the block that had it


def set_slot(block, slot):
    slots[block] = slot
    os.pwrite(file, struct.pack("<Q", slot), block * 8)


def locate(how, numbers):
    for block in numbers:
        slot = slots[block]
        if slot not in (0, FREED):
            yield f"{BLOCK} at 1 {(slot - 1) * BLOCK}"
        elif how == "r":
            yield f"{BLOCK} zero" if slot else f"{BLOCK} at 0 {block * BLOCK}"
        else:
            given[block] = given.get(block) or freed.pop(block, 0) or free.pop()
            fill = "zero" if slot else f"from 0 {block * BLOCK}"
            yield f"{BLOCK} new 1 {(given[block] - 1) * BLOCK} {fill}"


def blocks_of(part):
    offset, length = map(int, part.split())
    return range(offset // BLOCK, (offset + length) // BLOCK)


print(f"blockyard-map 1\nsize {blocks * BLOCK}\ngranule {BLOCK}")
print(f"data r {base}\ndata w {store}\ndiscards\nready", flush=True)
for line in sys.stdin:
    word, number, rest = (line.rstrip("\n") + " ").split(" ", 2)
    answer = ""
    if word == "locate":
        answer = " " + ", ".join(locate(rest[0], blocks_of(rest[2:])))
    elif word == "flush":
        for block in (b for part in rest.split(",") if part.strip() for b in blocks_of(part)):
            set_slot(block, given.pop(block))
        os.fdatasync(file)
        free += freed.values()
        freed.clear()
    elif word in ("discard", "zero"):
        for block in blocks_of(rest):
            if slots[block] not in (0, FREED):
                freed[block] = slots[block]
            set_slot(block, FREED)
        answer = f" {rest.split()[1]} zero"
    else:
        continue
    print(f"ok {number}{answer}", flush=True)
