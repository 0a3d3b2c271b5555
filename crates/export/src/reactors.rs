//! The reactors of the program: threads that each run one executor, and serve the queues given to them.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use blockyard_ring::{Executor, Remote};

pub struct Reactors {
    reactors: Vec<Reactor>,
    next: AtomicUsize,
}

struct Reactor {
    remote: Remote,
    thread: Option<JoinHandle<()>>,
}

impl Reactors {
    /// Starts `count` of them, named `reactor-N`. Each keeps to one of `cpus`, in turn; with none named, to no one.
    pub fn start(count: usize, cpus: &[usize]) -> io::Result<Self> {
        let cpu = |number: usize| cpus.get(number % cpus.len().max(1)).copied();
        let reactors = (0..count.max(1)).map(|n| Reactor::start(n, cpu(n))).collect::<io::Result<_>>()?;
        Ok(Reactors { reactors, next: AtomicUsize::new(0) })
    }

    /// The reactor for the next queue: they take turns.
    pub fn next(&self) -> Remote {
        let at = self.next.fetch_add(1, Ordering::Relaxed);
        self.reactors[at % self.reactors.len()].remote.clone()
    }

    /// All of them, to ask each for its part of something.
    pub fn all(&self) -> impl Iterator<Item = &Remote> {
        self.reactors.iter().map(|r| &r.remote)
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        for reactor in &self.reactors {
            reactor.remote.run(|handle| handle.stop());
        }
        for reactor in &mut self.reactors {
            if let Some(thread) = reactor.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl Reactor {
    fn start(number: usize, cpu: Option<usize>) -> io::Result<Self> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let body = move || {
            if let Some(cpu) = cpu
                && let Err(e) = keep_to(cpu)
            {
                return drop(sender.send(Err(e)));
            }
            // The ring belongs to the thread that makes it (SINGLE_ISSUER).
            let executor = match Executor::new() {
                Ok(executor) => executor,
                Err(e) => return drop(sender.send(Err(e))),
            };
            let _ = sender.send(Ok(executor.remote()));
            if let Err(e) = executor.run() {
                tracing::error!("reactor {number} stops: io_uring_enter failed: {e}");
            }
            blockyard_disk::forget_local();
        };
        let thread = std::thread::Builder::new().name(format!("reactor-{number}")).stack_size(512 << 10).spawn(body)?;
        let remote = receiver.recv().map_err(|_| io::Error::other("the reactor's thread died at once"))??;
        Ok(Reactor { remote, thread: Some(thread) })
    }
}

/// Binds this thread to one processor.
fn keep_to(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no processor {cpu}")));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, format!("processor {cpu} cannot be used: {e}")))
}
