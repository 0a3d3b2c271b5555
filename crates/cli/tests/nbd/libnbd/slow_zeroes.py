"""An export of at least 16 MiB that has data everywhere and can zero only by writing zeroes: the
server refuses fast zeroes."""

import nbd

from judge import HEADERS, alive, connect, refused, script


def fast_zeroes_are_refused_and_change_nothing():
    for headers in HEADERS:
        h = connect(headers)
        assert h.can_fast_zero()
        before = h.pread(8 << 20, 0)
        assert 0 not in before
        for length, offset in ((1 << 20, 0), (65536, 1 << 20), (4096, 4096), (512, 3 << 20),
                               ((4 << 20) + 512, (2 << 20) + 512)):
            for more in (0, nbd.CMD_FLAG_NO_HOLE, nbd.CMD_FLAG_FUA):
                refused(h.zero, length, offset, nbd.CMD_FLAG_FAST_ZERO | more, names=["ENOTSUP"])
        assert h.pread(8 << 20, 0) == before
        alive(h)


def slow_ones_are_made():
    h = connect()
    h.zero(1 << 20, 9 << 20)
    assert h.pread(1 << 20, 9 << 20) == bytes(1 << 20)


script(fast_zeroes_are_refused_and_change_nothing, slow_ones_are_made)
