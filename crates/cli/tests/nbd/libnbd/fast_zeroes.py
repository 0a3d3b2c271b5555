"""An export of at least 16 MiB with data everywhere, whose fast zeroes work."""

import nbd

from judge import HEADERS, alive, connect, script


def fast_zeroes_are_made():
    for step, headers in enumerate(HEADERS):
        h = connect(headers)
        assert h.can_fast_zero()
        for length, offset in ((1 << 20, step << 22), (65536, (step << 22) + (2 << 20))):
            assert 0 not in h.pread(length, offset)
            h.zero(length, offset, nbd.CMD_FLAG_FAST_ZERO)
            assert h.pread(length, offset) == bytes(length)
            assert 0 not in h.pread(4096, offset + length)
        alive(h)


def a_longer_one_than_data_may_be():
    h = connect()
    h.zero(40 << 20 if h.get_size() > 40 << 20 else h.get_size(), 0, nbd.CMD_FLAG_FAST_ZERO)
    assert h.pread(16 << 20, 0) == bytes(16 << 20)


script(fast_zeroes_are_made, a_longer_one_than_data_may_be)
