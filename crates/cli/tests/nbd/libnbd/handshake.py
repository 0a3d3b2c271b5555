"""Options and their errors. The server has one export: it has the name of the URI and is the
default one."""

import nbd
from judge import HEADERS, URI, alive, connect, handle, options, refused, script


def every_kind_of_headers():
    for headers in HEADERS:
        h = connect(headers)
        assert h.get_protocol() == "newstyle-fixed"
        alive(h)
        h.shutdown()


def clients_without_fixed_newstyle():
    """NBD_OPT_EXPORT_NAME, with and without the 124 zero bytes."""
    for flags in (0, nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE, nbd.HANDSHAKE_FLAG_NO_ZEROES):
        h = handle("simple")
        h.set_handshake_flags(flags)
        h.connect_uri(URI)
        assert h.get_size() == connect().get_size()
        alive(h)
        h.shutdown()


def a_list_and_what_is_in_it():
    h = options()
    seen = []
    h.opt_list(lambda name, description: seen.append(name))
    assert len(seen) == 1, seen
    h.set_export_name(seen[0])
    h.opt_info()
    assert h.get_size() > 0
    h.opt_go()
    alive(h)


def information_before_the_start():
    h = options()
    h.set_full_info(True)
    h.opt_info()
    size = h.get_size()
    minimum, preferred = h.get_block_size(nbd.SIZE_MINIMUM), h.get_block_size(nbd.SIZE_PREFERRED)
    maximum, payload = h.get_block_size(nbd.SIZE_MAXIMUM), h.get_block_size(nbd.SIZE_PAYLOAD)
    assert minimum in (1, 512, 4096), minimum
    assert preferred >= minimum and preferred & (preferred - 1) == 0, (minimum, preferred)
    assert payload >= 1 << 20 and maximum >= payload, (maximum, payload)
    assert h.can_multi_conn() and h.can_flush() and h.can_fua()
    assert h.can_trim() and h.can_zero() and h.can_df()
    assert h.can_cache() and not h.is_read_only()
    assert h.get_canonical_export_name() is not None
    h.opt_go()
    assert h.get_size() == size
    alive(h)


def unknown_exports_are_refused_and_forgiven():
    h = options()
    right = h.get_export_name()
    for name in ("no-such-export", "x" * 4096, "..", "a\tb"):
        h.set_export_name(name)
        refused(h.opt_info)
        refused(h.opt_go)
        assert h.aio_is_negotiating()
    h.set_export_name(right)
    h.opt_go()
    alive(h)


def an_abort():
    h = options()
    h.opt_abort()
    assert h.aio_is_closed()


def options_late_and_twice():
    h = handle("simple")
    h.set_opt_mode(True)
    h.connect_uri(URI)
    assert not h.get_structured_replies_negotiated()
    # Contexts need structured replies.
    refused(h.opt_set_meta_context_queries, ["base:allocation"], lambda name: None)
    assert h.opt_structured_reply()
    assert h.get_structured_replies_negotiated()
    h.opt_structured_reply()
    assert h.opt_extended_headers() and h.get_extended_headers_negotiated()
    h.opt_extended_headers()
    h.opt_go()
    alive(h)
    assert h.get_extended_headers_negotiated()


def no_tls_where_there_is_none():
    h = options()
    assert h.opt_starttls() is False
    h.opt_go()
    alive(h)


def contexts_listed():
    h = options()

    def listed(*queries):
        names = []
        h.opt_list_meta_context_queries(list(queries), names.append)
        return names

    everything = listed()
    assert "base:allocation" in everything and "qemu:allocation-depth" in everything, everything
    assert listed("base:") == ["base:allocation"]
    assert listed("base:allocation") == ["base:allocation"]
    assert "qemu:allocation-depth" in listed("qemu:")
    assert listed("qemu:dirty-bitmap:none") == [] and listed("base:nothing") == []
    assert listed("nobody:") == []
    known = sorted(n for n in everything if n.split(":")[0] in ("base", "qemu"))
    assert sorted(listed("base:", "qemu:", "nobody:")) == known
    assert all(listed(name) == [name] for name in everything)
    # Listing contexts selects none.
    h.opt_go()
    assert not h.can_meta_context("base:allocation")


def contexts_chosen():
    h = options()
    names = []
    chosen = h.opt_set_meta_context_queries(
        ["base:allocation", "nobody:here", "qemu:allocation-depth"],
        lambda name: names.append(name))
    assert chosen == 2 and sorted(names) == ["base:allocation", "qemu:allocation-depth"], names
    # A second selection replaces the first. A namespace alone selects nothing.
    names.clear()
    assert h.opt_set_meta_context_queries(
        ["qemu:allocation-depth", "base:"], lambda name: names.append(name)) == 1, names
    h.set_request_meta_context(False)
    h.opt_go()
    assert h.can_meta_context("qemu:allocation-depth") and not h.can_meta_context("base:allocation")


def contexts_of_an_unknown_export():
    h = options()
    right = h.get_export_name()
    h.set_export_name("no-such-export")
    refused(h.opt_set_meta_context_queries, ["base:allocation"], lambda name: None)
    refused(h.opt_list_meta_context_queries, [], lambda name: None)
    h.set_export_name(right)
    h.opt_go()
    alive(h)


def contexts_requested_at_the_start():
    h = connect(contexts=["base:allocation", "nobody:here"])
    assert h.can_meta_context("base:allocation") and not h.can_meta_context("nobody:here")
    # Without structured replies there are no contexts, even if the client requests them. A block
    # status is then an error, and the connection stays usable.
    for headers in ("simple", "structured"):
        h = connect(headers)
        refused(h.block_status, 4096, 0, lambda *extents: 0)
        alive(h)


script(every_kind_of_headers, clients_without_fixed_newstyle, a_list_and_what_is_in_it,
       information_before_the_start, unknown_exports_are_refused_and_forgiven, an_abort,
       options_late_and_twice, no_tls_where_there_is_none, contexts_listed, contexts_chosen,
       contexts_of_an_unknown_export, contexts_requested_at_the_start)
