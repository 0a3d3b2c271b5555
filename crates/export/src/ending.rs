//! Ends the service of a disk: syncs what guests have written, and closes the image.

use std::sync::Arc;

use blockyard_disk::{Disk, LocalDisk};
use blockyard_ring::Remote;

use crate::Reactors;

/// Syncs `disk` on every reactor that serves it. Returns false if one of the syncs failed.
pub fn sync(disk: &Arc<Disk>, reactors: &Reactors) -> bool {
    // An inactive disk was synced when it was deactivated.
    if disk.is_inactive() {
        return true;
    }
    let failed = reactors.all().filter(|reactor| !sync_on(reactor, disk)).count();
    failed == 0
}

fn sync_on(reactor: &Remote, disk: &Arc<Disk>) -> bool {
    let disk = disk.clone();
    let synced = reactor.ask(move |handle, reply| match LocalDisk::known(handle, &disk) {
        Some(served) => {
            handle.spawn(async move { reply.send(served.flush_unsynced().await.is_ok()) });
        }
        None => reply.send(true),
    });
    synced.unwrap_or(false)
}

/// Returns whether the image has changes in memory: opening it may have made some.
fn has_changes(disk: &Disk) -> bool {
    disk.source().chain().is_some_and(|chain| chain.top().has_changes())
}

/// Like [`close`], for a disk that another server serves next. A raw image is not synced: each
/// flush of the guest syncs the whole file, whatever process has written it. An image with metadata
/// is closed, because to open it after a death takes a repair of the whole image. Returns false if
/// a step failed.
pub fn leave(disk: &Arc<Disk>, reactors: &Reactors) -> bool {
    if disk.source().chain().is_some() || disk.poisoned().is_some() {
        return close(disk, reactors);
    }
    disk.end_work();
    forget(disk, reactors);
    true
}

/// Removes `disk` from every reactor.
fn forget(disk: &Arc<Disk>, reactors: &Reactors) {
    reactors.all().for_each(|reactor| forget_on(reactor, disk));
}

fn forget_on(reactor: &Remote, disk: &Arc<Disk>) {
    let disk = disk.clone();
    reactor.ask(move |handle, reply| {
        LocalDisk::forget(handle, &disk);
        reply.send(());
    });
}

/// Ends `disk`, which has no export any more. Syncs the disk, removes it from every reactor, and
/// closes its image. Returns false if a step failed.
pub fn close(disk: &Arc<Disk>, reactors: &Reactors) -> bool {
    disk.end_work();
    if !disk.was_used() && !has_changes(disk) {
        return true;
    }
    if disk.source().chain().is_none() {
        let good = sync(disk, reactors);
        forget(disk, reactors);
        return good;
    }
    // To close the image syncs it, on a reactor that has written to it if there is one. The others
    // sync what they have written.
    let serves = |reactor: &&Remote| {
        let disk = disk.clone();
        let known = reactor.ask(move |handle, reply| {
            reply.send(LocalDisk::known(handle, &disk).is_some());
        });
        known.unwrap_or(false)
    };
    let closing = reactors.all().find(serves).cloned().unwrap_or_else(|| reactors.next());
    let mut good = true;
    for reactor in reactors.all().filter(|reactor| !reactor.is(&closing)) {
        good &= disk.is_inactive() || sync_on(reactor, disk);
        forget_on(reactor, disk);
    }
    close_on(&closing, disk) && good
}

fn close_on(reactor: &Remote, disk: &Arc<Disk>) -> bool {
    let disk = disk.clone();
    let closed = reactor.ask(move |handle, reply| match LocalDisk::local(handle, &disk) {
        Ok(served) => {
            LocalDisk::forget(handle, &disk);
            handle.spawn(async move { reply.send(served.close().await.is_ok()) });
        }
        Err(e) => {
            tracing::error!(disk = disk.name(), "cannot close its image: {e}");
            reply.send(false);
        }
    });
    closed.unwrap_or(false)
}
