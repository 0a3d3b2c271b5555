#!/usr/bin/env python3
"""service_manager.py NOTIFY-SOCKET COMMAND...: runs COMMAND as systemd runs a service with
FileDescriptorStoreMax= and Restart=on-failure: sd_notify(3), sd_listen_fds(3).

A service that a signal ends is started again at once, with the stored descriptors. Descriptors that
the store (FDSTORE, 64 unless set) has no room for are dropped. The last line of standard output
says how many are stored when the service exits by itself, and how many were dropped.
"""

import array
import ctypes
import os
import select
import signal
import socket
import sys

MOST = int(os.environ.get("FDSTORE", 64))
FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
PR_SET_CHILD_SUBREAPER = 36
FORWARDED = [signal.SIGTERM, signal.SIGUSR1]


class Service:
    def __init__(self, path, command):
        self.command = command
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notified.bind(path)
        # Pairs of a name and a descriptor.
        self.store = []
        self.dropped = 0
        self.main = self.start()

    def start(self):
        child = os.fork()
        if child:
            return child
        # Descriptors that are above all that dup2 replaces.
        copies = [os.dup2(fd, 200 + at) for at, (_, fd) in enumerate(self.store)]
        for at, fd in enumerate(copies):
            os.dup2(fd, 3 + at)
            os.close(fd)
        os.environ["LISTEN_PID"] = str(os.getpid())
        os.environ["LISTEN_FDS"] = str(len(copies))
        os.environ["LISTEN_FDNAMES"] = ":".join(name for name, _ in self.store)
        os.execv(self.command[0], self.command)

    def message(self):
        size = socket.CMSG_SPACE(4 * 253)
        text, control, _, _ = self.notified.recvmsg(4096, size, FLAGS)
        fds = array.array("i")
        for _, _, data in control:
            fds.frombytes(data[: len(data) - len(data) % 4])
        fields = dict(line.split("=", 1) for line in text.decode().split("\n") if line)
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTORE") == "1":
            room = MOST - len(self.store)
            self.store += [(name, fd) for fd in fds[:room]]
            self.dropped += len(fds[room:])
            for fd in fds[room:]:
                os.close(fd)
        if fields.get("FDSTOREREMOVE") == "1":
            for _, fd in [entry for entry in self.store if entry[0] == name]:
                os.close(fd)
            self.store = [entry for entry in self.store if entry[0] != name]
        if "MAINPID" in fields:
            self.main = int(fields["MAINPID"])

    def messages(self):
        try:
            while True:
                self.message()
        except BlockingIOError:
            pass

    def run(self):
        """Returns the service's exit status."""
        signals = [*FORWARDED, signal.SIGCHLD]
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write)
        for number in signals:
            signal.signal(number, lambda *_: None)
        while True:
            select.select([self.notified, read], [], [])
            self.messages()
            try:
                got = os.read(read, 64)
            except BlockingIOError:
                continue
            for number in FORWARDED:
                if number in got:
                    os.kill(self.main, number)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                # Messages of a process that has ended come before the news of its end.
                self.messages()
                if pid != self.main:
                    continue
                if os.WIFEXITED(status):
                    return os.WEXITSTATUS(status)
                self.main = self.start()


def main():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    path, command = sys.argv[1], sys.argv[2:]
    os.environ["NOTIFY_SOCKET"] = path
    os.environ["FDSTORE"] = str(MOST)
    service = Service(path, command)
    status = service.run()
    print(f"stored: {len(service.store)}, dropped: {service.dropped}", flush=True)
    sys.exit(status)


main()
