//! Starts threads of a server that has a sandbox.
//!
//! A new thread inherits the restrictions of the thread that starts it. A reactor may make few
//! system calls, but the threads that it needs for calls that block must make others. So one thread
//! that may make all calls of the process starts threads for all others. They open images, so it
//! may not write into the folder of the configuration.
//!
//! In: the name, the stack and the work of a thread. Out: the thread. Without a sandbox the caller
//! starts the thread itself.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

type Work = Box<dyn FnOnce() + Send>;

struct Wanted {
    builder: Builder,
    work: Work,
    started: SyncSender<io::Result<JoinHandle<()>>>,
}

static STARTER: OnceLock<Sender<Wanted>> = OnceLock::new();

/// Starts the thread that starts threads. It has the restrictions of the caller, and those that
/// `restrict` adds.
pub(crate) fn start(restrict: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (sender, wanted) = channel::<Wanted>();
    let body = move || {
        restrict();
        for Wanted { builder, work, started } in wanted {
            let _ = started.send(builder.spawn(work));
        }
    };
    Builder::new().name("starter".into()).stack_size(64 << 10).spawn(body)?;
    let _ = STARTER.set(sender);
    Ok(())
}

/// Starts a thread with the restrictions of that thread, whatever those of the caller are.
pub fn spawn(builder: Builder, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let Some(starter) = STARTER.get() else { return builder.spawn(work) };
    let (started, answer) = sync_channel(1);
    let lost = |_| io::Error::other("the thread that starts threads has ended");
    starter.send(Wanted { builder, work: Box::new(work), started }).map_err(|_| lost(()))?;
    answer.recv().map_err(|_| lost(()))?
}
