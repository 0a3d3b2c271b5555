"""reconnects.py URI SIZE STOP SEED: verified reads and writes of a disk of zeroes with SIZE bytes.

Keeps 8 requests of 4 KiB in flight, each block in one request at a time. If the connection is lost,
connects again and repeats the requests without an answer. A server that is not back within 60 s is
an error. Any other error ends the program, too. Prints `served` on each connection after 1 to 200
answers; SEED chooses their number. If the file STOP exists, reads all blocks and ends.
"""

import os
import random
import sys
import time

import nbd

uri, size, stop, seed = sys.argv[1:]
random.seed(int(seed))
blocks = int(size) // 4096
version = [0] * blocks
lost = 0
# Largest number of answers before `served`.
MOST = 200
# Seconds for an answer, and for a server to come back.
BACK = 60
BASE = bytes(4096)


def text(block):
    if version[block] == 0:
        return BASE
    return b"%07d %07d;" % (version[block], block) * 256


def connect():
    """Connects. Chooses the number of answers until `served`."""
    global until_served
    start = time.monotonic()
    while True:
        h = nbd.NBD()
        try:
            h.connect_uri(uri)
            until_served = random.randint(1, MOST)
            return h
        except nbd.Error as e:
            if time.monotonic() - start > BACK:
                sys.exit(f"the server is not back after {BACK} s: {e}")
            time.sleep(0.02)


def answered():
    global until_served
    until_served -= 1
    if until_served == 0:
        print("served", flush=True)


def run(h, jobs):
    """Runs jobs, and again over new connections what was not answered."""
    global lost
    while jobs:
        sent = []
        try:
            for kind, block in jobs:
                if kind == "write":
                    buffer = nbd.Buffer.from_bytearray(bytearray(text(block)))
                    sent.append((h.aio_pwrite(buffer, block * 4096), kind, block, buffer))
                else:
                    buffer = nbd.Buffer(4096)
                    sent.append((h.aio_pread(buffer, block * 4096), kind, block, buffer))
            while sent:
                left = []
                for command in sent:
                    cookie, kind, block, buffer = command
                    if not h.aio_command_completed(cookie):
                        left.append(command)
                        continue
                    jobs.remove((kind, block))
                    answered()
                    if kind == "read" and bytes(buffer.to_bytearray()) != text(block):
                        sys.exit(f"block {block} is not that of version {version[block]}")
                sent = left
                if sent and h.poll(BACK * 1000) == 0:
                    sys.exit(f"no answer within {BACK} s")
        except nbd.Error as e:
            if not h.aio_is_dead() and not h.aio_is_closed():
                sys.exit(f"an error while connected: {e}")
            lost += 1
            h = connect()
    return h


h, rounds = connect(), 0
while not os.path.exists(stop):
    rounds += 1
    chosen = random.sample(range(blocks), 8)
    jobs = [(random.choice(["write", "read"]), block) for block in chosen]
    for kind, block in jobs:
        version[block] += kind == "write"
    h = run(h, jobs)
    if rounds % 50 == 0:
        try:
            h.flush()
        except nbd.Error:
            h, lost = connect(), lost + 1
for start in range(0, blocks, 8):
    h = run(h, [("read", block) for block in range(start, start + 8)])
print(f"{rounds} rounds, {lost} lost connections", flush=True)
