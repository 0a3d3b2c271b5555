"""Becomes a program that sees a file system which does not answer.

Usage: dead.py FOLDER PROGRAM ARGUMENT...

Mounts FUSE on FOLDER. Nothing reads the requests of the kernel, so each look at a file waits until
the program ends. Needs a mount namespace of its own (`unshare --user --map-root-user --mount`).
"""

import ctypes
import os
import sys

NOSUID_NODEV = 6

fuse = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(fuse, True)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"dead", sys.argv[1].encode(), b"fuse", NOSUID_NODEV, options.encode()) != 0:
    sys.exit("mounting FUSE: " + os.strerror(ctypes.get_errno()))
os.execv(sys.argv[2], sys.argv[2:])
