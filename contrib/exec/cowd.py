#!/usr/bin/env python3
"""Copy-on-write over a file, as an exec: image of Blockyard: see docs/own-target.md.

BASE, STORE and TABLE in the environment name the files. STORE is as large as BASE. TABLE has eight
bytes for each block of BASE: 0, or the block's number in STORE plus 1. It is made if missing.
"""
import os
import socket
import struct

BLOCK = 64 << 10
base, store, table = (os.path.abspath(os.environ[name]) for name in ("BASE", "STORE", "TABLE"))
blocks = os.path.getsize(base) // BLOCK
file = os.open(table, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, blocks * 8)
slots = list(struct.unpack(f"<{blocks}Q", os.pread(file, blocks * 8, 0)))
free = sorted(set(range(1, blocks + 1)) - set(slots), reverse=True)
given = {}  # places that are not in the table yet


def locate(how, offset, length):
    for block in range(offset // BLOCK, (offset + length) // BLOCK):
        if slots[block]:
            yield f"{BLOCK} at 1 {(slots[block] - 1) * BLOCK}"
        elif how == "r":
            yield f"{BLOCK} at 0 {block * BLOCK}"
        else:
            if block not in given:
                given[block] = free.pop()
            yield f"{BLOCK} new 1 {(given[block] - 1) * BLOCK} from 0 {block * BLOCK}"


def flush(parts):
    for part in parts.split(", "):
        offset, length = map(int, part.split())
        for block in range(offset // BLOCK, (offset + length) // BLOCK):
            slots[block] = given.pop(block)
            os.pwrite(file, struct.pack("<Q", slots[block]), block * 8)
    os.fdatasync(file)


lines = socket.socket(fileno=0).makefile("rw", newline="\n")
lines.write(f"blockyard-map 1\nsize {blocks * BLOCK}\ngranule {BLOCK}\n")
lines.write(f"data r {base}\ndata w {store}\nready\n")
lines.flush()
for line in lines:
    word, number, rest = line.rstrip("\n").split(" ", 2)
    if word == "locate":
        how, offset, length = rest.split()
        lines.write(f"ok {number} {', '.join(locate(how, int(offset), int(length)))}\n")
    elif word == "flush":
        flush(rest)
        lines.write(f"ok {number}\n")
    lines.flush()
