"""What the scripts beside it share: connections of every kind to the server at URI (the first argument), and ways to say
what is wanted of it. A script ends with status 0 when all of that held, and else says by whom it is not so."""

import errno
import sys

import nbd

URI = sys.argv[1]
HEADERS = ("simple", "structured", "extended")


def handle(headers="extended", contexts=(), strict=False):
    """Not connected yet. Not strict: what libnbd itself would refuse reaches the server."""
    h = nbd.NBD()
    if not strict:
        h.set_strict_mode(nbd.STRICT_AUTO_FLAG)
    h.set_request_structured_replies(headers != "simple")
    h.set_request_extended_headers(headers == "extended")
    for context in contexts:
        h.add_meta_context(context)
    return h


def connect(headers="extended", contexts=(), strict=False, uri=URI):
    h = handle(headers, contexts, strict)
    h.connect_uri(uri)
    assert h.get_structured_replies_negotiated() == (headers != "simple"), headers
    assert h.get_extended_headers_negotiated() == (headers == "extended"), headers
    return h


def options(headers="extended", uri=URI):
    """Connected, and still among options."""
    h = handle(headers)
    h.set_opt_mode(True)
    h.connect_uri(uri)
    assert h.aio_is_negotiating()
    return h


def refused(call, *args, names=None, **more):
    """The call must fail, with one of the errors named; what it said."""
    try:
        result = call(*args, **more)
    except nbd.Error as e:
        if names and e.errno not in names:
            raise AssertionError(f"{call.__name__}{args}: {e.errno}, not {names}: {e.string}")
        return e.string
    raise AssertionError(f"{call.__name__}{args}: not refused, but {result!r}")


def alive(h):
    """The connection still does its work."""
    assert h.aio_is_ready(), h.connection_state()
    assert len(h.pread(512, 0)) == 512


def extents(h, count, offset, context="base:allocation", flags=0):
    """(length, flags) of one context."""
    found = []

    def note(name, at, entries, error):
        assert error.value == 0 and at == offset, (name, at, error.value)
        if name == context:
            found.extend(entries)

    h.block_status_64(count, offset, note, flags)
    return found


def script(*tests):
    for test in tests:
        test()
        print("ok", test.__name__)
