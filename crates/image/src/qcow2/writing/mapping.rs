//! Changes of the guest's mapping in memory: L2 entries, and the L2 tables themselves.
//!
//! In: guest clusters that the caller holds, and their new entries. Out: the old entries. The
//! changes reach the file with the next write-back (flush.rs).
//!
//! Invariants: an entry is changed only in a table that belongs to the active state alone. A host
//! cluster is freed only after the entry that named it was changed.

use std::io;

use crate::error::ImageError;
use crate::journal::{Key, Record};

use crate::qcow2::encoding::bytes;
use crate::qcow2::encoding::entry::{COPIED, Cluster, L1Entry, L2Entry, OFFSET_MASK, is_partial};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::alloc::{Freed, Run};
use crate::qcow2::state::shared::lock;
use crate::qcow2::state::tables::Entry;

impl Qcow2 {
    /// Changes the L2 entry of a guest cluster in memory, and returns the old entry. The caller
    /// must hold the lock of the guest cluster (`Shared::held`). The L2 table must have refcount 1
    /// ([`Qcow2::own_table`]).
    pub(in crate::qcow2) async fn change(
        &self,
        cluster: u64,
        change: impl Fn(Entry) -> Entry,
    ) -> io::Result<Entry> {
        let (number, index) = self.shape().slice(cluster);
        let is_partial = |entry: Entry| self.is_partial(entry);
        // Another request that sees a partial entry may be answered and flushed at once. So the
        // flush must find the cluster before that, and this runs before the entry is visible. A
        // flush that finds the cluster too early waits for the caller's lock of it.
        let noting = |old: Entry| {
            let new = change(old);
            match (is_partial(old), is_partial(new)) {
                (false, true) => self.shared.partial.set(cluster, true),
                (true, true) => self.shared.partial.added(),
                (_, false) => {}
            }
            new
        };
        loop {
            if let Some((old, new)) = self.shared.tables.update(number, index, noting) {
                // After the entry is visible, because a flush must find the cluster until then.
                if is_partial(old) && !is_partial(new) {
                    self.shared.partial.set(cluster, false);
                }
                return Ok(old);
            }
            self.load(cluster << self.shape().layout.cluster_bits).await?;
        }
    }

    fn is_partial(&self, entry: Entry) -> bool {
        !self.shape().layout.extended_l2 && is_partial(entry.word)
    }

    /// Like [`Qcow2::change`], for `count` entries from cluster `first` on; `change` gets the index
    /// from 0.
    pub(super) async fn change_run(
        &self,
        first: u64,
        count: u64,
        change: impl Fn(u64, Entry) -> Entry,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < count {
            let (number, index) = self.shape().slice(first + done);
            let here = (count - done).min(self.shape().slice_entries - index as u64) as usize;
            if self
                .shared
                .tables
                .update_run(number, index..index + here, |at, old| change(done + at, old))
            {
                done += here as u64;
            } else {
                self.load((first + done) << self.shape().layout.cluster_bits).await?;
            }
        }
        Ok(())
    }

    /// Frees the host clusters that an entry no longer names.
    pub(in crate::qcow2) fn let_go(&self, old: Entry) {
        let shape = self.shape();
        if shape.layout.data_file {
            return;
        }
        let bits = shape.layout.cluster_bits;
        match L2Entry::cached(old.word, old.bitmap, shape.layout).map(|entry| entry.cluster) {
            Ok(Cluster::Compressed { host, len }) => {
                let (start, end) = (host >> bits, (host + len - 1) >> bits);
                self.shared.alloc.let_go(Freed { start, count: end - start + 1, compressed: true });
            }
            Ok(cluster) => {
                if let Some(host) = cluster.host() {
                    self.shared.alloc.let_go(Freed {
                        start: host >> bits,
                        count: 1,
                        compressed: false,
                    });
                }
            }
            Err(_) => {}
        }
    }

    /// Makes sure that the L2 table exists, and belongs only to the active state.
    pub(super) async fn own_table(&self, index: u64) -> io::Result<()> {
        self.begin_journal().await;
        let owned = |word: u64| word & COPIED != 0 && word & OFFSET_MASK != 0;
        if owned(self.shared.l1_entry(index)) {
            return Ok(());
        }
        let _permit = self.shared.new_tables.acquire().await;
        let (word, bits) = (self.shared.l1_entry(index), self.shape().layout.cluster_bits);
        if owned(word) {
            return Ok(());
        }
        let old = L1Entry::decode(word, self.shape().layout).map_err(|what| {
            ImageError::invalid(format!("qcow2 L1 table entry {index}"), None, what)
        })?;
        let run = self.allocate(1).await?;
        let (at, cluster) = (run.start << bits, self.shape().cluster_size() as usize);
        let written = match old.table {
            Some(table) => match bytes::read(&self.file, table, cluster).await {
                Ok(content) => bytes::write(&self.file, at, &content).await,
                Err(e) => Err(e),
            },
            None if run.fresh => Ok(()),
            None => bytes::write(&self.file, at, &vec![0; cluster]).await,
        };
        if let Err(e) = written {
            self.abandon_cluster(run);
            return Err(ImageError::io(
                format!("qcow2 L2 table {index}"),
                at,
                "writing a new one",
                e,
            )
            .into());
        }
        let mut l1 = lock(&self.shared.l1);
        let record = Record { key: Key::Table(index), value: [at | COPIED, 0] };
        self.shared.journal.record(record);
        l1.entries[index as usize] = at | COPIED;
        l1.dirty.insert(index as usize);
        drop(l1);
        if let Some(table) = old.table {
            self.shared.alloc.let_go(Freed { start: table >> bits, count: 1, compressed: false });
        }
        Ok(())
    }

    fn abandon_cluster(&self, run: Run) {
        self.shared.alloc.put_back(Run { fresh: false, ..run });
    }
}
