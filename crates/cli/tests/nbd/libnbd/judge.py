"""Shared by the scripts in this folder: connections of every kind to the server at URI (the first
argument), and assertions. A script ends with status 0 if all assertions hold. Otherwise it ends
with the traceback of the one that failed."""

import errno
import sys

import nbd

URI = sys.argv[1]
HEADERS = ("simple", "structured", "extended")


def handle(headers="extended", contexts=(), strict=False):
    """Returns an unconnected handle. Unless `strict`, libnbd also sends wrong requests."""
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
    """Returns a handle that is connected and still negotiates options."""
    h = handle(headers)
    h.set_opt_mode(True)
    h.connect_uri(uri)
    assert h.aio_is_negotiating()
    return h


def refused(call, *args, names=None, **more):
    """Fails unless the call fails with one of the errors `names`. Returns the error's text."""
    try:
        result = call(*args, **more)
    except nbd.Error as e:
        if names and e.errno not in names:
            raise AssertionError(f"{call.__name__}{args}: {e.errno}, not {names}: {e.string}")
        return e.string
    raise AssertionError(f"{call.__name__}{args}: not refused, but {result!r}")


def alive(h):
    """Fails unless the connection still serves requests."""
    assert h.aio_is_ready(), h.connection_state()
    assert len(h.pread(512, 0)) == 512


def extents(h, count, offset, context="base:allocation", flags=0):
    """Returns the extents of one context as a list of (length in bytes, flags)."""
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
