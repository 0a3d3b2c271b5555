"""Block status. The export is all zeroes and not allocated. It has at least 16 MiB, and its block
size is at most 64 KiB."""

import nbd
from judge import alive, connect, extents, refused, script

CONTEXTS = ["base:allocation", "qemu:allocation-depth"]
HOLE = nbd.STATE_HOLE | nbd.STATE_ZERO
MB = 1 << 20


def covered(found, length):
    assert found and all(n > 0 for n, _ in found) and sum(n for n, _ in found) >= length, found
    assert all(a[1] != b[1] for a, b in zip(found, found[1:])), f"neighbours alike: {found}"


def written_and_not():
    for headers in ("structured", "extended"):
        h = connect(headers, CONTEXTS)
        h.trim(16 * MB, 0)
        h.zero(16 * MB, 0)
        h.pwrite(b"a" * MB, 2 * MB)
        h.pwrite(b"b" * MB, 8 * MB)
        h.flush()
        found = extents(h, 16 * MB, 0)
        covered(found, 10 * MB)
        at, data = 0, []
        for length, flags in found:
            if flags == 0:
                data.append((at, length))
            else:
                assert flags == HOLE, found
            at += length
        assert data == [(2 * MB, MB), (8 * MB, MB)], found
        # Starts in the middle of an extent.
        assert extents(h, MB, 2 * MB + 4096)[0] == (MB - 4096, 0)
        # A raw image has no backing file, so even its holes are its own.
        assert {flags for _, flags in extents(h, 16 * MB, 0, "qemu:allocation-depth")} == {1}


def only_one():
    h = connect("extended", CONTEXTS)
    for offset in (0, 2 * MB, 2 * MB + 65536, 15 * MB):
        for length in (65536, 4 * MB):
            length = min(length, 16 * MB - offset)
            found = extents(h, length, offset, flags=nbd.CMD_FLAG_REQ_ONE)
            assert len(found) == 1 and 0 < found[0][0] <= length, (offset, length, found)


def the_whole_disk_in_steps():
    h = connect("extended", CONTEXTS)
    at, steps = 0, 0
    while at < h.get_size():
        found = extents(h, h.get_size() - at, at)
        covered(found, 1)
        at += sum(n for n, _ in found)
        steps += 1
    assert at == h.get_size() and steps < 100, (at, steps)


def chosen_contexts_only():
    h = connect("extended", ["qemu:allocation-depth"])
    seen = []
    h.block_status_64(MB, 0, lambda name, *rest: seen.append(name))
    assert seen == ["qemu:allocation-depth"], seen
    h = connect("extended")
    refused(h.block_status_64, MB, 0, lambda *all: 0, names=["EINVAL", "ENOTSUP"])
    alive(h)


def filtered_by_a_payload():
    h = connect("extended", CONTEXTS)
    if not h.can_block_status_payload():
        return
    seen = []
    h.block_status_filter(MB, 0, ["base:allocation"], lambda name, *rest: seen.append(name))
    assert seen == ["base:allocation"], seen


def wrong_requests():
    h = connect("extended", CONTEXTS)
    size = h.get_size()
    nothing = lambda *all: 0
    for length, offset in ((512, size), (1024, size - 512), (1 << 60, 0)):
        refused(h.block_status_64, length, offset, nothing, names=["EINVAL"])
    refused(h.block_status_64, 512, 0, nothing, nbd.CMD_FLAG_FUA | 1 << 9, names=["EINVAL"])
    # Both the request and the reply must be whole blocks.
    block = h.get_block_size(nbd.SIZE_MINIMUM)
    if block > 1:
        refused(h.block_status_64, block, block // 2, nothing, names=["EINVAL"])
        refused(h.block_status_64, block // 2, 0, nothing, nbd.CMD_FLAG_REQ_ONE, names=["EINVAL"])
    alive(h)


script(written_and_not, only_one, the_whole_disk_in_steps, chosen_contexts_only,
       filtered_by_a_payload, wrong_requests)
