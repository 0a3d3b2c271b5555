"""A new server of a hand-over that ends after one of its steps.

Usage: half_server.py DISK LAST. Standard input is the connection to the old server.
"""

import json
import socket
import struct
import sys

DISK, LAST = sys.argv[1:3]
old = socket.socket(fileno=0)


def send(message):
    body = json.dumps(message).encode()
    old.sendall(struct.pack("<II", len(body), 0) + body)


def receive():
    """Returns the bytes of a parcel. Its descriptors are closed."""
    length, count = struct.unpack("<II", old.recv(8, socket.MSG_WAITALL))
    while count > 0:
        _, fds, _, _ = socket.recv_fds(old, 1, 253)
        count -= len(fds)
    return old.recv(length, socket.MSG_WAITALL) if length else b""


def step(name):
    if name == LAST:
        sys.exit(1)


step("start")
if LAST == "nonsense":
    send(["nonsense"])
    step("nonsense")
send({"hello": {"format": 1, "version": "0.0.0"}})
step("hello")
for _ in json.loads(receive())["welcome"]["sockets"]:
    receive()
send({"take": {"disk": DISK, "programs": True}})
step("take")
for _ in json.loads(receive())["given"]["exports"]:
    receive()
step("given")
send({"took": {"disk": DISK}})
step("took")
send("ready")
step("ready")
