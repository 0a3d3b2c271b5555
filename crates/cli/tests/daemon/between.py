"""Stands between the two servers of a hand-over, and kills them when a message passes.

Usage: between.py MESSAGE VICTIM PROGRAM ARGUMENT...
    MESSAGE   hello, welcome, take, given, took, ready, commit or serves
    VICTIM    old, new or both; the message still arrives at a server that lives. hung: the new one
              stops, and the old one is killed. format: none, and the parcels of the message have a
              newer format. A path: the process that the file names; the message arrives when it has
              ended. wait:PATH: none; the message waits until the FIFO at PATH is written, and
              PATH.held exists then
    PROGRAM   the new server, which this process becomes. A child relays for the old server.
Standard input is the connection to the old server, which is the parent of this process.
"""

import json
import os
import select
import signal
import socket
import struct
import sys

MESSAGE, VICTIM = sys.argv[1:3]
OLD = os.getppid()
# Fields of messages that say how many parcels follow.
FOLLOWED = {"welcome": "sockets", "given": "exports"}


class Gone(Exception):
    """The other end of a connection is closed."""


def read(stream, count):
    data = b""
    while len(data) < count:
        try:
            part = stream.recv(count - len(data))
        except ConnectionResetError:
            part = b""
        if not part:
            raise Gone
        data += part
    return data


def receive(stream):
    """Returns the bytes and the descriptors of a parcel."""
    length, count = struct.unpack("<II", read(stream, 8))
    fds = []
    while len(fds) < count:
        fds += socket.recv_fds(stream, 1, 253)[1]
    return read(stream, length), fds


def send(stream, body, fds):
    try:
        stream.sendall(struct.pack("<II", len(body), len(fds)))
        for at in range(0, len(fds), 128):
            socket.send_fds(stream, [b"."], fds[at : at + 128])
        stream.sendall(body)
    except (BrokenPipeError, ConnectionResetError):
        pass
    for fd in fds:
        os.close(fd)


def wait_for(process):
    select.select([process], [], [])


def kill():
    if VICTIM in ("new", "both"):
        signal.pidfd_send_signal(new, signal.SIGKILL)
        wait_for(new)
    if VICTIM == "hung":
        signal.pidfd_send_signal(new, signal.SIGSTOP)
    if VICTIM in ("old", "both", "hung"):
        os.kill(OLD, signal.SIGKILL)
    if VICTIM.startswith("wait:"):
        path = VICTIM.removeprefix("wait:")
        open(path + ".held", "w").close()
        with open(path) as fifo:
            fifo.read()
    elif "/" in VICTIM:
        with open(VICTIM) as file:
            process = os.pidfd_open(int(file.read()))
        signal.pidfd_send_signal(process, signal.SIGKILL)
        wait_for(process)


def relay(source, target):
    """Passes a message on, and the parcels that follow it."""
    body, fds = receive(source)
    message = json.loads(body)
    name, rest = next(iter(message.items())) if isinstance(message, dict) else (message, {})
    parcels = [(body, fds)]
    parcels += [receive(source) for _ in rest.get(FOLLOWED.get(name), [])]
    if name == MESSAGE and VICTIM == "format":
        parcels = [(body.replace(b'"format":1', b'"format":2'), fds) for body, fds in parcels]
    elif name == MESSAGE:
        kill()
    for parcel in parcels:
        send(target, *parcel)


old = socket.socket(fileno=os.dup(0))
above, below = socket.socketpair()
new = os.pidfd_open(os.getpid())
if os.fork():
    below.close()
    fd = socket.recv_fds(above, 1, 1)[1][0]
    os.dup2(fd, 0)
    os.close(fd)
    os.execv(sys.argv[3], sys.argv[3:])
os.close(0)
# The new server asks whether its peer lives. The peer is the process that makes the pair.
ours, theirs = socket.socketpair()
socket.send_fds(below, [b"."], [theirs.fileno()])
theirs.close()
try:
    while True:
        for source in select.select([old, ours], [], [])[0]:
            relay(source, ours if source is old else old)
except Gone:
    pass
ours.close()
if VICTIM in ("new", "format"):
    wait_for(new)
