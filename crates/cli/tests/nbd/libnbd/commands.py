"""Every command with every flag, with its data compared to a local copy, and every wrong request
that a client can make: each gets its error, and the connection stays usable. The export has at
least 16 MiB, is all zeroes, and is writable."""

import errno
import random

import nbd
from judge import HEADERS, alive, connect, refused, script

SIZE = 16 << 20
RANGE = ["EINVAL", "ENOSPC"]


def random_work_against_a_copy():
    """Reads return the data written, with each kind of headers in turn, also unaligned."""
    chance = random.Random(6)
    copy = bytearray(SIZE)
    connections = [connect(headers) for headers in HEADERS]
    smallest = max(1, connections[0].get_block_size(nbd.SIZE_MINIMUM))
    connections[0].zero(SIZE, 0)
    for step in range(900):
        h = connections[step % 3]
        align = chance.choice([smallest, 512, 4096, 65536])
        length = max(align, chance.randrange(1, 300_000) // align * align)
        offset = chance.randrange(0, SIZE - length) // align * align
        fua = chance.choice([0, nbd.CMD_FLAG_FUA])
        what = chance.choice(
            ["read", "read", "write", "write", "zero", "hole", "trim", "cache", "flush"])
        if what == "read":
            flags = chance.choice([0, nbd.CMD_FLAG_DF]) if step % 3 else 0
            data = h.pread(length, offset, flags)
            assert data == copy[offset:offset + length], (step, offset, length)
        elif what == "write":
            data = chance.randbytes(length)
            h.pwrite(data, offset, fua)
            copy[offset:offset + length] = data
        elif what in ("zero", "hole"):
            h.zero(length, offset, fua | (nbd.CMD_FLAG_NO_HOLE if what == "zero" else 0))
            copy[offset:offset + length] = bytes(length)
        elif what == "trim":
            # The server chooses what a trimmed range reads as. Later reads must return the same.
            h.trim(length, offset, fua)
            copy[offset:offset + length] = h.pread(length, offset)
        elif what == "cache":
            h.cache(length, offset)
        else:
            h.flush()
    for h in connections:
        assert h.pread(SIZE, 0) == copy


def many_at_once():
    """Requests of one connection run concurrently, and their replies come in any order."""
    for headers in HEADERS:
        h = connect(headers)
        cookies = {}
        for i in range(64):
            data = bytes([i + 1]) * 65536
            cookies[h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), i * 65536)] = None
        while cookies:
            h.poll(-1)
            for cookie in [c for c in cookies if h.aio_command_completed(c)]:
                del cookies[cookie]
        reads = {}
        for i in range(64):
            buffer = nbd.Buffer(65536)
            reads[h.aio_pread(buffer, i * 65536)] = (i, buffer)
        while reads:
            h.poll(-1)
            for cookie in [c for c in reads if h.aio_command_completed(c)]:
                i, buffer = reads.pop(cookie)
                assert buffer.to_bytearray() == bytes([i + 1]) * 65536, i


def reads_that_may_not_be_fragmented():
    for headers in ("structured", "extended"):
        h = connect(headers)
        h.zero(4 << 20, 0)
        h.pwrite(b"x" * 65536, 1 << 20)
        for flags, most in ((nbd.CMD_FLAG_DF, 1), (0, 1000)):
            chunks = []

            def chunk(data, offset, status, error):
                assert error.value == 0
                chunks.append((offset, len(data), status))

            data = h.pread_structured(4 << 20, 0, chunk, flags)
            assert data.count(b"x") == 65536 and len(data) == 4 << 20
            assert len(chunks) <= most and sum(c[1] for c in chunks) == 4 << 20, chunks
            assert not flags or chunks[0][2] == nbd.READ_DATA, chunks


def fast_zeroes_are_fast_or_refused():
    h = connect()
    if not h.can_fast_zero():
        return
    h.pwrite(b"y" * 65536, 0)
    try:
        h.zero(65536, 0, nbd.CMD_FLAG_FAST_ZERO)
        expected = bytes(65536)
    except nbd.Error as e:
        assert e.errno == "ENOTSUP", e
        expected = b"y" * 65536
    assert h.pread(65536, 0) == expected


def requests_outside_of_the_disk():
    for headers in HEADERS:
        h = connect(headers)
        size = h.get_size()
        for offset, length in ((size, 512), (size - 512, 1024), (size + (1 << 40), 512),
                               ((1 << 63) - 1024, 512), ((1 << 64) - 512, 1024)):
            # Offsets of libnbd are unsigned, of 64 bits, and the Python call accepts all of them.
            refused(h.pread, length, offset, names=RANGE)
            refused(h.pwrite, bytes(length), offset, names=RANGE)
            refused(h.zero, length, offset, names=RANGE)
            refused(h.trim, length, offset, names=RANGE)
            refused(h.cache, length, offset, names=RANGE)
            alive(h)
        if headers == "extended":
            refused(h.zero, 1 << 62, 0, names=RANGE)
            refused(h.trim, (1 << 64) - 512, 0, names=RANGE)
            refused(h.trim, (1 << 64) - 512, 4096, names=RANGE)
            alive(h)


def unknown_flags_are_refused():
    for headers in HEADERS:
        h = connect(headers)
        before = h.pread(512, 0)
        for flag in (1 << 9, 1 << 15):
            refused(h.pread, 512, 0, flag, names=["EINVAL"])
            refused(h.pwrite, b"z" * 512, 0, flag, names=["EINVAL"])
            refused(h.zero, 512, 0, flag, names=["EINVAL"])
            refused(h.trim, 512, 0, flag, names=["EINVAL"])
            refused(h.flush, flag, names=["EINVAL"])
        # Known flags, with commands that do not have them.
        refused(h.pwrite, b"z" * 512, 0, nbd.CMD_FLAG_DF, names=["EINVAL"])
        refused(h.trim, 512, 0, nbd.CMD_FLAG_NO_HOLE, names=["EINVAL"])
        refused(h.pwrite, b"z" * 512, 0, nbd.CMD_FLAG_FAST_ZERO, names=["EINVAL"])
        assert h.pread(512, 0) == before, "a refused request has written"


def nothing_long():
    """Requests of length 0 do nothing or are refused."""
    h = connect()
    for call in (lambda: h.pwrite(b"", 0), lambda: h.zero(0, 0),
                 lambda: h.trim(0, 0), lambda: h.cache(0, 0)):
        try:
            call()
        except nbd.Error as e:
            assert e.errno == "EINVAL", e
        alive(h)


def payloads_longer_than_allowed():
    """The server refuses the request or closes the connection. It never stores the data."""
    for headers in HEADERS:
        h = connect(headers)
        most = h.get_block_size(nbd.SIZE_PAYLOAD) or 32 << 20
        if h.get_size() > most:
            refused(h.pread, most + (1 << 20), 0)
        other = connect(headers)
        alive(other)


def durable_writes():
    for headers in HEADERS:
        h = connect(headers)
        assert h.can_fua() and h.can_flush()
        h.pwrite(b"f" * 4096, 8192, nbd.CMD_FLAG_FUA)
        h.zero(4096, 8192, nbd.CMD_FLAG_FUA)
        h.trim(4096, 8192, nbd.CMD_FLAG_FUA)
        h.flush()


script(random_work_against_a_copy, many_at_once, reads_that_may_not_be_fragmented,
       fast_zeroes_are_fast_or_refused, requests_outside_of_the_disk, unknown_flags_are_refused,
       nothing_long, payloads_longer_than_allowed, durable_writes)
