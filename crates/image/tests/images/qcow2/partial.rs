//! Partial clusters: the rest of a new cluster is copied by a flush, not by the first write.

use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_image::journal::{
    CrashSafety, ImageKey, JournalStore, MemoryStore, SafetyMode, StateFolder,
};
use blockyard_image::tools::discard_journal;
use blockyard_image::{ChainOptions, Extent, Format, Image, IncompleteCluster, Place};
use blockyard_nbd::wire::{Headers, cmd, errno};
use blockyard_ring::Segments;

use crate::nbd_server::{Server, good, simple};

use super::peer::{Scratch, qemu_img};
use super::{Model, check, judged_by_qemu, on_image, on_image_with, write};

const CLUSTER: u64 = 64 << 10;
const PART: u64 = 4 << 10;
const SIZE: u64 = 16 * CLUSTER;

/// Returns the length of the overlay's data, or of absent bytes, at `offset`.
async fn found(image: &Image, offset: u64) -> (bool, u64) {
    let Extent { len, place } = image.find_above(1, offset, CLUSTER).await.unwrap();
    (matches!(place, Place::Data(_)), len)
}

fn overlay(name: &str) -> (Scratch, Model) {
    let scratch = Scratch::new(name);
    let base: Vec<u8> = (0..SIZE).map(|at| (at / 512 % 251) as u8 + 1).collect();
    std::fs::write(scratch.path("base.raw"), &base).unwrap();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "base.raw",
        scratch.name("a.qcow2"),
    ]);
    (scratch, Model(base))
}

#[test]
fn a_flush_copies_the_rest_of_a_cluster() {
    let (scratch, mut model) = overlay("rest");
    let model = on_image(&scratch, async move |image| {
        // Whole parts, and a write that begins and ends inside parts.
        write(&image, &mut model, 2 * PART, &[200; PART as usize]).await;
        write(&image, &mut model, CLUSTER + PART + 512, &[201; 2 * PART as usize]).await;
        assert_eq!(found(&image, 0).await, (false, 2 * PART));
        assert_eq!(found(&image, 2 * PART).await, (true, PART));
        assert_eq!(found(&image, CLUSTER + PART).await, (true, 3 * PART));
        assert_eq!(found(&image, CLUSTER + 4 * PART).await, (false, CLUSTER));
        check(&image, &model, 0, SIZE as usize).await;
        image.flush().await.unwrap();
        assert_eq!(found(&image, 0).await, (true, CLUSTER));
        assert_eq!(found(&image, CLUSTER).await, (true, CLUSTER));
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
        model
    });
    judged_by_qemu(&scratch, "a.qcow2", &model);
}

/// The rest of a cluster begins with zeroes, and so does the cluster.
#[test]
fn a_rest_that_is_not_all_zeroes_is_copied() {
    let (scratch, mut model) = overlay("sparse");
    let last = 16 * PART - 512;
    model.0.fill(0);
    model.0[last as usize..][..512].fill(7);
    let base = std::fs::File::create(scratch.path("base.raw")).unwrap();
    base.set_len(SIZE).unwrap();
    base.write_all_at(&[7; 512], last).unwrap();
    let model = on_image(&scratch, async move |image| {
        write(&image, &mut model, 0, &[9; PART as usize]).await;
        image.flush().await.unwrap();
        assert_eq!(found(&image, 0).await, (true, CLUSTER));
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
        model
    });
    judged_by_qemu(&scratch, "a.qcow2", &model);
}

#[test]
fn small_writes_that_follow_each_other_copy_nothing() {
    let (scratch, mut model) = overlay("follow");
    let model = on_image(&scratch, async move |image| {
        for at in (3 * CLUSTER..5 * CLUSTER).step_by(PART as usize) {
            assert!(!found(&image, at).await.0, "copied before it is written");
            write(&image, &mut model, at, &[(at >> 12) as u8; PART as usize]).await;
        }
        assert_eq!(found(&image, 3 * CLUSTER).await, (true, CLUSTER), "complete");
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
        model
    });
    judged_by_qemu(&scratch, "a.qcow2", &model);
}

#[test]
fn zeroes_and_discards_end_a_partial_cluster() {
    let (scratch, mut model) = overlay("zeroes");
    let model = on_image(&scratch, async move |image| {
        for (number, unmap) in [(0, true), (1, false)] {
            write(&image, &mut model, number * CLUSTER + PART, &[9; 512]).await;
            image.write_zeroes(number * CLUSTER, CLUSTER, unmap).await.unwrap();
            model.0[(number * CLUSTER) as usize..][..CLUSTER as usize].fill(0);
        }
        // A part of a partial cluster is zeroed by a write of zeroes.
        write(&image, &mut model, 2 * CLUSTER + PART, &[9; PART as usize]).await;
        image.write_zeroes(2 * CLUSTER + PART, 3 * PART, true).await.unwrap();
        model.0[(2 * CLUSTER + PART) as usize..][..3 * PART as usize].fill(0);
        write(&image, &mut model, 3 * CLUSTER, &[9; 512]).await;
        image.discard(3 * CLUSTER, CLUSTER).await.unwrap();
        let read = image.read(Segments::buffer(CLUSTER as usize), 3 * CLUSTER).await;
        read.1.unwrap();
        read.0.copy_out(0, &mut model.0[3 * CLUSTER as usize..][..CLUSTER as usize]);
        check(&image, &model, 0, SIZE as usize).await;
        // New data in a cluster that was partial once.
        write(&image, &mut model, CLUSTER + 5 * PART, &[8; PART as usize]).await;
        image.flush().await.unwrap();
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
        model
    });
    judged_by_qemu(&scratch, "a.qcow2", &model);
}

/// Copy-up (a stream) completes partial clusters too.
#[test]
fn copy_up_completes_partial_clusters() {
    let (scratch, mut model) = overlay("copy-up");
    let model = on_image(&scratch, async move |image| {
        write(&image, &mut model, 6 * CLUSTER + PART, &[9; PART as usize]).await;
        image.populate(0, SIZE).await.unwrap();
        assert_eq!(found(&image, 6 * CLUSTER).await, (true, CLUSTER));
        image.close().await.unwrap();
        model
    });
    judged_by_qemu(&scratch, "a.qcow2", &model);
}

/// Offset of a part of cluster 1 that the backing image cannot return for a while.
const BAD: u64 = CLUSTER + 8 * PART;

/// Makes an overlay of a backing image that fails reads of [`BAD`] while `is_bad` is true.
fn failing(name: &str, is_bad: &Arc<AtomicBool>) -> (Server, Scratch, Model, ChainOptions) {
    failing_at(name, is_bad, &[BAD])
}

/// Like [`failing`], for reads of several offsets.
fn failing_at(
    name: &str,
    is_bad: &Arc<AtomicBool>,
    bad: &'static [u64],
) -> (Server, Scratch, Model, ChainOptions) {
    let fails = is_bad.clone();
    let answer = move |_, request: &_, disk: &mut _| {
        let blockyard_nbd::wire::Request { command, offset, len, cookie, .. } = *request;
        let is_read = |at: &u64| (offset..offset + len).contains(at);
        let is_hit = command == cmd::READ && bad.iter().any(is_read);
        let fails = is_hit && fails.load(Ordering::SeqCst);
        Some(if fails { simple(errno::EIO, cookie) } else { good(request, disk) })
    };
    let server = Server::start(Headers::Simple, |_, _| (), Box::new(answer));
    let scratch = Scratch::new(name);
    let name = scratch.name("a.qcow2");
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &server.uri(), name, "1M"]);
    let model = Model((0..SIZE).map(|at| (at / 512 % 251) as u8).collect());
    let options = ChainOptions {
        folders: vec![server.uri().into()],
        ..ChainOptions::new(scratch.path("a.qcow2"))
    };
    (server, scratch, model, options)
}

/// The server dies after a flush that could not complete a cluster. The flush has written all other
/// metadata, so the journal must keep what the file does not have.
#[test]
fn a_cluster_that_cannot_be_completed_outlives_the_server() {
    outlives(MemoryStore::default());
    // The journal has no space for a second record of the cluster.
    outlives(MemoryStore::with_room([64, 0]));
}

fn outlives(store: MemoryStore) {
    let is_bad = Arc::new(AtomicBool::new(true));
    let (_server, _scratch, mut model, options) = failing("outlives", &is_bad);
    let store = Some(store.into());
    let crash_safety = CrashSafety { mode: SafetyMode::Journal, store };
    let options = ChainOptions { crash_safety, ..options };
    let model = on_image_with(&options, async move |image| {
        for cluster in 0..3 {
            write(&image, &mut model, cluster * CLUSTER, &[9; PART as usize]).await;
        }
        assert!(IncompleteCluster::is_in(&image.flush().await.unwrap_err()));
        model
    });
    is_bad.store(false, Ordering::SeqCst);
    on_image_with(&options, async move |image| {
        check(&image, &model, 0, SIZE as usize).await;
        assert_eq!(found(&image, CLUSTER).await, (true, PART), "still partial");
        image.close().await.unwrap();
        check(&image, &model, 0, SIZE as usize).await;
    });
}

/// A server that dies between the removal of the mark and that of the journal leaves a journal that
/// belongs to no mark. The next server must not take this for another program's work.
#[test]
fn the_journal_of_a_closed_image_says_that_it_is_finished() {
    let (scratch, mut model) = overlay("finished");
    let path = scratch.path("a.qcow2");
    let key = ImageKey::of(std::fs::File::open(&path).unwrap()).unwrap();
    let memory = MemoryStore::default();
    let store = JournalStore::from(memory.clone());
    let crash_safety = CrashSafety { mode: SafetyMode::Journal, store: Some(store.clone()) };
    let options = ChainOptions { crash_safety, ..ChainOptions::new(path) };
    on_image_with(&options, async move |image| {
        write(&image, &mut model, 0, &[9; PART as usize]).await;
        let journal = store.find(&key).unwrap().unwrap();
        assert!(journal.has_changes());
        image.close().await.unwrap();
        assert!(journal.is_finished());
    });
    assert!(memory.is_empty());
}

#[test]
fn a_cluster_that_cannot_be_completed_loses_nothing() {
    let is_bad = Arc::new(AtomicBool::new(true));
    let (_server, _scratch, mut model, options) = failing("incomplete", &is_bad);
    on_image_with(&options, async move |image| {
        for cluster in 0..3 {
            write(&image, &mut model, cluster * CLUSTER, &[9; PART as usize]).await;
        }
        let error = image.flush().await.unwrap_err();
        assert!(IncompleteCluster::is_in(&error) && error.to_string().contains("cluster 1 from"));
        let complete = [found(&image, 0).await, found(&image, 2 * CLUSTER).await];
        assert_eq!(complete, [(true, CLUSTER); 2], "the others are complete");
        assert_eq!(found(&image, CLUSTER).await, (true, PART));
        // The guest overwrites what cannot be read.
        write(&image, &mut model, BAD, &[10; PART as usize]).await;
        image.flush().await.unwrap();
        assert_eq!(found(&image, CLUSTER).await, (true, CLUSTER));
        is_bad.store(false, Ordering::SeqCst);
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
    });
}

async fn fails(image: &Image, offset: u64, bytes: &[u8]) -> std::io::Error {
    image.write(Segments::from_bytes(bytes), offset).await.1.unwrap_err()
}

/// systemd removes the journals of a user at the end of the last session. From then on the file
/// must have the entry of each answered write. It cannot have the entry of a partial cluster.
#[test]
fn without_its_journal_an_image_takes_writes_beside_a_cluster_that_cannot_be_completed() {
    let is_bad = Arc::new(AtomicBool::new(true));
    let (_server, scratch, mut model, options) = failing("removed", &is_bad);
    let folder = PathBuf::from(format!("/dev/shm/blockyard-removed-{}", std::process::id()));
    let store = Some(StateFolder::open(&folder).unwrap().into());
    let crash_safety = CrashSafety { mode: SafetyMode::Journal, store };
    let safe = ChainOptions { crash_safety, ..options.clone() };
    let model = on_image_with(&safe, async move |image| {
        let part = [9; PART as usize];
        write(&image, &mut model, 4 * CLUSTER, &[7; CLUSTER as usize]).await;
        image.write(Segments::from_bytes(&part), CLUSTER).await.1.unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        // This flush notes that the journal is gone.
        assert!(IncompleteCluster::is_in(&image.flush().await.unwrap_err()));
        // A new cluster, a cluster that the file has, and zeroes in part of a cluster and in a
        // whole one.
        write(&image, &mut model, 6 * CLUSTER + 512, &part).await;
        write(&image, &mut model, 4 * CLUSTER + PART, &part).await;
        for (offset, len) in [(7 * CLUSTER + 512, PART), (8 * CLUSTER, CLUSTER)] {
            image.write_zeroes(offset, len, true).await.unwrap();
            model.0[offset as usize..][..len as usize].fill(0);
        }
        // A part with data, another part, and bytes of a part.
        for (offset, len) in [(0, PART), (PART, PART), (3 * PART + 512, 512)] {
            let error = fails(&image, CLUSTER + offset, &vec![8; len as usize]).await;
            assert!(IncompleteCluster::is_in(&error), "{error}");
        }
        assert!(IncompleteCluster::is_in(&image.flush().await.unwrap_err()));
        model
    });
    is_bad.store(false, Ordering::SeqCst);
    // The server died. What it had answered before the journal was removed is lost.
    assert!(discard_journal(&scratch.path("a.qcow2"), Format::Qcow2).unwrap());
    on_image_with(&options, async move |image| {
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
    });
}

/// The journal keeps the record of the partial cluster, and so also older records. A replay would
/// put them over a change that has no record.
#[test]
fn a_full_journal_answers_no_write_that_a_replay_would_undo() {
    let is_bad = Arc::new(AtomicBool::new(true));
    let (_server, _scratch, mut model, options) = failing("unprotected", &is_bad);
    // Room for the L2 table and for one cluster.
    let store = Some(MemoryStore::with_room([2, 0]).into());
    let crash_safety = CrashSafety { mode: SafetyMode::Journal, store };
    let options = ChainOptions { crash_safety, ..options };
    let (heals, part) = (is_bad.clone(), [9; PART as usize]);
    let model = on_image_with(&options, async move |image| {
        write(&image, &mut model, CLUSTER, &part).await;
        let error = fails(&image, 3 * CLUSTER, &part).await;
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
        heals.store(false, Ordering::SeqCst);
        write(&image, &mut model, 3 * CLUSTER, &part).await;
        model
    });
    on_image_with(&options, async move |image| {
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
    });
}

/// The journal's new half has space for the record of one partial cluster, and two cannot be
/// completed. As soon as one is left, all writes go on.
#[test]
fn a_full_journal_recovers_beside_a_cluster_that_cannot_be_completed() {
    const OTHER_BAD: u64 = BAD + 4 * CLUSTER;
    let is_bad = Arc::new(AtomicBool::new(true));
    let (_server, _scratch, mut model, options) =
        failing_at("recovers", &is_bad, &[BAD, OTHER_BAD]);
    // Room for the L2 table and for two clusters.
    let store = Some(MemoryStore::with_room([3, 1]).into());
    let crash_safety = CrashSafety { mode: SafetyMode::Journal, store };
    let options = ChainOptions { crash_safety, ..options };
    let part = [9; PART as usize];
    let model = on_image_with(&options, async move |image| {
        for cluster in [1, 5] {
            write(&image, &mut model, cluster * CLUSTER, &part).await;
        }
        for _ in 0..2 {
            let error = fails(&image, 3 * CLUSTER, &part).await;
            assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
        }
        // The guest overwrites what cannot be read of cluster 5.
        write(&image, &mut model, OTHER_BAD, &part).await;
        for cluster in [3, 7, 8] {
            write(&image, &mut model, cluster * CLUSTER + PART, &part).await;
        }
        assert!(IncompleteCluster::is_in(&image.flush().await.unwrap_err()));
        assert_eq!(found(&image, CLUSTER).await, (true, PART), "still partial");
        // The failed writes have changed these bytes, and the flush has made them durable.
        model.0[3 * CLUSTER as usize..][..PART as usize].copy_from_slice(&part);
        model
    });
    is_bad.store(false, Ordering::SeqCst);
    // The server died.
    on_image_with(&options, async move |image| {
        check(&image, &model, 0, SIZE as usize).await;
        image.close().await.unwrap();
    });
}
