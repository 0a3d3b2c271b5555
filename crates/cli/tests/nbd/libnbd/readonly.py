"""A read-only export: its flags say so, and it refuses writes."""

from judge import HEADERS, alive, connect, refused, script


def writes_are_refused():
    for headers in HEADERS:
        h = connect(headers)
        assert h.is_read_only()
        before = h.pread(4096, 0)
        for call in (lambda: h.pwrite(b"w" * 4096, 0), lambda: h.zero(4096, 0),
                     lambda: h.trim(4096, 0)):
            refused(call, names=["EPERM"])
        h.flush()
        assert h.pread(4096, 0) == before
        alive(h)


script(writes_are_refused)
