//! Tests of the cache of refcount blocks.

use super::*;

/// A file that grows to 1040 GiB and is flushed now and then.
#[test]
fn refcount_blocks_of_a_growing_file_are_evicted() {
    const BITS: u32 = 16;
    let width = RefcountWidth::new(4);
    let alloc = Allocator::new(BITS, width, Vec::new(), 0, None);
    let per_block = alloc.per_block();
    let mut crowded = 0;
    for block in 0..520 {
        let (start, mut table) = (alloc.end(), alloc.table());
        table.push((block + 1) << BITS);
        let end = start + per_block;
        let grown = Grown {
            end,
            table,
            blocks: vec![block],
            used: std::iter::once(start..start + 1).collect(),
            fresh: true,
            has_space: true,
        };
        alloc.extended(&grown).unwrap();
        if alloc.is_crowded() {
            let changed = alloc.take_changed_counts();
            assert!(alloc.is_crowded(), "blocks in flight stay cached");
            alloc.counts_written(&changed, true);
            assert!(!alloc.is_crowded());
            crowded += 1;
        }
        assert!(
            alloc.block_bytes() <= 2 * BLOCKS_KEPT + (1 << BITS),
            "{} bytes",
            alloc.block_bytes()
        );
        // Every refcount is unchanged, whether cached or not.
        assert!(alloc.count(start + 5).is_none_or(|count| count == 1));
    }
    assert!(crowded > 1, "blocks were evicted {crowded} times");
}

/// Two readers load the same block. Before the slower one inserts it, the other changes, writes and
/// evicts it.
#[test]
fn a_stale_copy_of_a_refcount_block_is_not_inserted() {
    const BITS: u32 = 16;
    let (width, blocks) = (RefcountWidth::new(4), 2 * (BLOCKS_KEPT >> BITS) as u64);
    let table = (0..blocks).map(|block| (block + 1) << BITS).collect();
    let alloc = Allocator::new(BITS, width, table, blocks * width.per_block(1 << BITS), None);
    let empty = || vec![0; 1 << BITS];
    let slow = alloc.to_load(0).unwrap();
    let fast = alloc.to_load(0).unwrap();
    alloc.loaded(0, empty(), fast.1);
    assert_eq!(alloc.retain(7), Some(true));
    let changed = alloc.take_changed_counts();
    let written = changed[0].bytes.clone();
    alloc.counts_written(&changed, true);
    for block in 1..blocks {
        let (_, seen) = alloc.to_load(block).unwrap();
        alloc.loaded(block, empty(), seen);
    }
    assert_eq!(alloc.count(7), None, "it was evicted");
    alloc.loaded(0, empty(), slow.1);
    while let Some((_, seen)) = alloc.to_load(0) {
        let mut bytes = empty();
        bytes[..written.len()].copy_from_slice(&written);
        alloc.loaded(0, bytes, seen);
    }
    assert_eq!(alloc.count(7), Some(1));
}

#[test]
fn no_run_without_clusters_is_put_back() {
    let alloc = Allocator::new(16, RefcountWidth::new(4), Vec::new(), 0, None);
    let run = |count| Run { start: 7, count, fresh: false, has_space: false };
    alloc.put_back(run(0));
    assert!(!alloc.has_some() && alloc.take(1).is_none());
    alloc.put_back(run(2));
    assert_eq!(alloc.take(5).map(|run| (run.start, run.count)), Some((7, 2)));
    assert!(alloc.take(1).is_none());
}

/// A crafted image can be a sparse file of any length.
#[test]
fn the_search_for_free_clusters_ends_with_the_last_refcount_block() {
    let table = vec![1 << 16, 0, 2 << 16, 0, 0];
    let alloc = Allocator::new(16, RefcountWidth::new(4), table, u64::MAX >> 16, None);
    let mut found = Vec::new();
    while let Some((block, offset)) = alloc.block_to_search() {
        found.push((block, offset));
        // All clusters of the block are in use.
        alloc.loaded(block, vec![1; 1 << 16], 0);
        assert!(!alloc.reserve_in(block, 1));
    }
    assert_eq!(found, [(0, 1 << 16), (2, 2 << 16)]);
    let hint = alloc.state().hint;
    assert_eq!(hint, alloc.end(), "it looks at no range behind the table");
}
