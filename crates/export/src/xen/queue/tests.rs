//! What a queue makes of requests, before it begins them.

use super::*;

/// Returns a request with so many segments, as a front end writes it.
fn request(operation: u8, segments: u8) -> abi::Request {
    let mut bytes = [0; abi::ENTRY_MOST];
    (bytes[0], bytes[1]) = (operation, segments);
    abi::Request::parse(Abi::X86_64, &bytes)
}

const READ: u8 = 0;
const BARRIER: u8 = 2;
const FLUSH: u8 = 3;

/// A flush without data orders nothing: it covers the requests that are complete.
#[test]
fn barriers_and_flushes_with_data_wait_for_earlier_requests() {
    for (operation, segments, waits) in [
        (READ, 1, false),
        (BARRIER, 0, true),
        (BARRIER, 3, true),
        (FLUSH, 0, false),
        (FLUSH, 1, true),
    ] {
        assert_eq!(is_barrier(&request(operation, segments)), waits, "{operation} {segments}");
    }
}

#[test]
fn a_request_counts_as_many_bytes_as_its_pages() {
    assert_eq!([0, 1, 11].map(|count| bytes(&request(READ, count))), [0, 4096, 11 * 4096]);
    // A request with more segments than an entry has room for is refused later.
    assert_eq!(request(READ, 12).ask, Ask::Bad);
}

#[test]
fn only_what_is_not_supported_has_its_own_status() {
    assert_eq!(wire_status(Ok(())), abi::OK);
    assert_eq!(wire_status(Err(Failure::Unsupported)), abi::UNSUPPORTED);
    for failure in [Failure::Io, Failure::NoSpace, Failure::ReadOnly, Failure::OutOfRange] {
        assert_eq!(wire_status(Err(failure)), abi::ERROR, "{failure:?}");
    }
}
