//! Ends the service of a disk: syncs what guests have written, and closes the image.

use std::sync::Arc;

use blockyard_disk::{Disk, LocalDisk, Status};
use blockyard_ring::Remote;
use blockyard_storage::ImageFile;

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

/// Like [`sync`], also in a cache mode that ignores flushes, because an operator asks for it. If no
/// reactor has the disk open, one opens it: writes of an earlier server may be in the page cache
/// only.
pub fn sync_always(disk: &Arc<Disk>, reactors: &Reactors) -> bool {
    if disk.is_inactive() {
        return true;
    }
    if !open(&serving(disk, reactors), disk) {
        return false;
    }
    let failed = reactors.all().filter(|reactor| !sync_always_on(reactor, disk)).count();
    failed == 0
}

/// Opens the disk on a reactor, if the reactor does not have it open.
fn open(reactor: &Remote, disk: &Arc<Disk>) -> bool {
    let disk = disk.clone();
    let opened = reactor.ask(move |handle, reply| {
        let local_disk = LocalDisk::local(handle, &disk);
        reply.send(match local_disk {
            Ok(_) => true,
            Err(e) => {
                tracing::error!(disk = disk.name(), "cannot open its image to sync it: {e}");
                false
            }
        });
    });
    opened.unwrap_or(false)
}

fn sync_always_on(reactor: &Remote, disk: &Arc<Disk>) -> bool {
    flush_on(reactor, disk, async |served| served.flush_always().await)
}

fn sync_on(reactor: &Remote, disk: &Arc<Disk>) -> bool {
    flush_on(reactor, disk, async |served| served.flush_unsynced().await)
}

fn flush_on(
    reactor: &Remote,
    disk: &Arc<Disk>,
    flush: impl AsyncFnOnce(&LocalDisk) -> Status + Send + 'static,
) -> bool {
    let disk = disk.clone();
    let flushed = reactor.ask(move |handle, reply| match LocalDisk::known(handle, &disk) {
        Some(served) => {
            handle.spawn(async move { reply.send(flush(&served).await.is_ok()) });
        }
        None => reply.send(true),
    });
    flushed.unwrap_or(false)
}

/// Returns whether the image has changes in memory: opening it may have made some.
fn has_changes(disk: &Disk) -> bool {
    disk.source().chain().is_some_and(|chain| chain.top().has_changes())
}

/// Like [`close`], for a disk that another server of this host serves next. What was written to
/// files of this host is not synced: each flush of the guest syncs the whole file, whatever process
/// has written it. Metadata of an image are written to its file, because to open it after a death
/// takes a repair of the whole image. Returns false if a step failed.
pub fn leave(disk: &Arc<Disk>, reactors: &Reactors) -> bool {
    if disk.poisoned().is_some() || !is_on_this_host(disk) {
        return close(disk, reactors);
    }
    disk.end_work();
    if !has_changes(disk) {
        forget(disk, reactors);
        return true;
    }
    let leaving = serving(disk, reactors);
    reactors.all().filter(|reactor| !reactor.is(&leaving)).for_each(|other| forget_on(other, disk));
    end_on(&leaving, disk, async |served| served.leave().await)
}

/// Returns whether all that is written to the disk is in files of this host.
fn is_on_this_host(disk: &Disk) -> bool {
    let source = disk.source();
    let is_file = |file: &Arc<ImageFile>| file.id().is_some();
    match source.chain().map(|chain| chain.top()) {
        Some(top) => is_file(&top.file) && top.data.iter().all(is_file),
        None => source.file().is_none_or(is_file),
    }
}

/// Returns a reactor that has served the disk if there is one, or else any.
fn serving(disk: &Arc<Disk>, reactors: &Reactors) -> Remote {
    let serves = |reactor: &&Remote| {
        let disk = disk.clone();
        let known = reactor.ask(move |handle, reply| {
            reply.send(LocalDisk::known(handle, &disk).is_some());
        });
        known.unwrap_or(false)
    };
    reactors.all().find(serves).cloned().unwrap_or_else(|| reactors.next())
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
        let source = disk.source();
        let opened = source.file().and_then(|file| file.opened());
        let is_target = opened.is_some_and(|opened| opened.is_target());
        let flush = |reactor: &&Remote| match is_target {
            // The places of some data may be in memory only.
            true => sync_always_on(reactor, disk),
            false => sync_on(reactor, disk),
        };
        let good = disk.is_inactive() || reactors.all().filter(|r| !flush(r)).count() == 0;
        forget(disk, reactors);
        return good;
    }
    // To close the image syncs it, on a reactor that has written to it if there is one. The others
    // sync what they have written.
    let closing = serving(disk, reactors);
    let mut good = true;
    for reactor in reactors.all().filter(|reactor| !reactor.is(&closing)) {
        good &= disk.is_inactive() || sync_on(reactor, disk);
        forget_on(reactor, disk);
    }
    end_on(&closing, disk, async |served| served.close().await) && good
}

/// Ends the disk on its last reactor by `end`.
fn end_on(
    reactor: &Remote,
    disk: &Arc<Disk>,
    end: impl AsyncFnOnce(&LocalDisk) -> Status + Send + 'static,
) -> bool {
    let disk = disk.clone();
    let ended = reactor.ask(move |handle, reply| match LocalDisk::local(handle, &disk) {
        Ok(served) => {
            LocalDisk::forget(handle, &disk);
            handle.spawn(async move { reply.send(end(&served).await.is_ok()) });
        }
        Err(e) => {
            tracing::error!(disk = disk.name(), "cannot close its image: {e}");
            reply.send(false);
        }
    });
    ended.unwrap_or(false)
}
