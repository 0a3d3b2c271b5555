//! Block status: what the client asks for, and what it makes of the answers.

use std::sync::{Arc, Mutex};

use blockyard_nbd::wire::{Headers, cmd, state};
use blockyard_storage::{Storage, Store};

use crate::server::{Server, status};
use crate::{LONG, on_image, script};

const GB: u64 = 1 << 30;

/// Runs `work` with a server of 1 TiB that answers each block status with `extents`. Returns the
/// ranges that the client asked for.
fn asked(
    minimum: u32,
    extents: &'static [(u32, u32)],
    work: impl AsyncFnOnce(Store) + 'static,
) -> Vec<(u64, u64)> {
    let ranges = Arc::new(Mutex::new(Vec::new()));
    let seen = ranges.clone();
    let server = Server::start(
        Headers::Structured,
        move |_, disk| (disk.size, disk.minimum) = (1 << 40, minimum),
        script(move |_, request, disk| {
            assert_eq!(request.command, cmd::BLOCK_STATUS);
            seen.lock().unwrap().push((request.offset, request.len));
            Some(status(request, disk, extents))
        }),
    );
    on_image(&server, LONG, work);
    drop(server);
    ranges.lock().unwrap().clone()
}

/// The caller's range ends the search, not the end of the export.
#[test]
fn a_search_for_data_ends_with_its_range() {
    let asked = asked(0, &[(1 << 30, state::ZERO)], async |store| {
        assert_eq!(store.next_data_within(4096..1 << 20).await.unwrap(), None);
        assert_eq!(store.next_data_within(GB..3 * GB).await.unwrap(), None);
    });
    assert_eq!(asked, [(4096, (1 << 20) - 4096), (GB, GB), (2 * GB, GB)]);
}

/// A server that answers with tiny holes costs a bounded number of requests. The rest counts as
/// data, which is true of holes, too.
#[test]
fn a_search_for_data_takes_a_bounded_number_of_requests() {
    for whole in [false, true] {
        let asked = asked(0, &[(512, state::ZERO)], async move |store| {
            let found = match whole {
                true => store.next_data(0).await,
                false => store.next_data_within(0..GB).await,
            };
            let end = if whole { 1 << 40 } else { GB };
            assert_eq!(found.unwrap(), Some(16 * 512..end));
        });
        assert_eq!(asked.len(), 16);
    }
}

/// The server requires requests of whole blocks.
#[test]
fn block_status_is_requested_in_whole_blocks() {
    let holes = asked(4096, &[(4096, state::ZERO)], async |store| {
        assert_eq!(store.next_data_within(512..1024).await.unwrap(), None);
        assert_eq!(store.next_data_within(512..8000).await.unwrap(), None);
    });
    assert_eq!(holes, [(0, 4096), (0, 8192), (4096, 4096)]);
    let data = asked(4096, &[(4096, 0)], async |store| {
        assert_eq!(store.next_data_within(512..1024).await.unwrap(), Some(512..4096));
    });
    assert_eq!(data, [(0, 4096)]);
}
