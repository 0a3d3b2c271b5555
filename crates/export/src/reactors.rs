//! The reactors of the program: threads that each run one executor, and serve the queues assigned
//! to them.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use blockyard_ring::sandbox::{self, Kind};
use blockyard_ring::{Executor, Pulse, Remote};

use crate::acceptor::Acceptor;
use crate::watchdog::{Alive, Watchdog};

/// The reactors, their watchdog, and the acceptor of their clients.
pub struct Reactors {
    reactors: Vec<Reactor>,
    watchdog: Option<Watchdog>,
    /// None until the first export needs it.
    acceptor: Mutex<Option<Arc<Acceptor>>>,
    next: AtomicUsize,
}

struct Reactor {
    remote: Remote,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reactors {
    /// Starts `count` reactors, named `reactor-N`. They are bound to the processors of `cpus` in
    /// round-robin order. If `cpus` is empty, they are not bound.
    pub fn start(count: usize, cpus: &[usize]) -> io::Result<Self> {
        Self::start_supervised(count, cpus, None)
    }

    /// Like [`Reactors::start`]. The watchdog also reports that all reactors make progress.
    pub fn start_supervised(
        count: usize,
        cpus: &[usize],
        alive: Option<Alive>,
    ) -> io::Result<Self> {
        let cpu = |number: usize| cpus.get(number % cpus.len().max(1)).copied();
        let mut reactors = Reactors {
            reactors: Vec::new(),
            watchdog: None,
            acceptor: Mutex::default(),
            next: AtomicUsize::new(0),
        };
        let mut pulses = Vec::new();
        for number in 0..count.max(1) {
            let (reactor, pulse) = Reactor::start(number, cpu(number))?;
            reactors.reactors.push(reactor);
            pulses.push((name(number), pulse));
        }
        reactors.watchdog = Some(Watchdog::start(pulses, alive)?);
        Ok(reactors)
    }

    /// Returns the reactor for the next queue, in round-robin order.
    pub fn next(&self) -> Remote {
        let at = self.next.fetch_add(1, Ordering::Relaxed);
        self.reactors[at % self.reactors.len()].remote.clone()
    }

    /// Ends all reactors and waits until they have ended. This closes the files of their rings,
    /// which releases the locks on these files. Without this call, the kernel closes the files some
    /// time after the process has ended. Later calls to the reactors get no answer.
    pub fn stop(&self) {
        for reactor in &self.reactors {
            reactor.remote.run(|handle| handle.stop());
        }
        for reactor in &self.reactors {
            let thread = reactor.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(thread) = thread {
                let _ = thread.join();
            }
        }
    }

    /// Starts what the first export would start, so that it starts sooner.
    pub fn prepare(&self) -> io::Result<()> {
        self.acceptor().map(drop)
    }

    /// Returns the acceptor, and starts it at the first call.
    pub(crate) fn acceptor(&self) -> io::Result<Arc<Acceptor>> {
        let mut acceptor = self.acceptor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(acceptor) = &*acceptor {
            return Ok(acceptor.clone());
        }
        Ok(acceptor.insert(Arc::new(Acceptor::start()?)).clone())
    }

    /// Returns all reactors.
    pub fn all(&self) -> impl Iterator<Item = &Remote> {
        self.reactors.iter().map(|r| &r.remote)
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.watchdog = None;
        self.stop();
    }
}

impl Reactor {
    fn start(number: usize, cpu: Option<usize>) -> io::Result<(Self, Arc<Pulse>)> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let body = move || {
            if let Some(cpu) = cpu
                && let Err(e) = keep_to(cpu)
            {
                return drop(sender.send(Err(e)));
            }
            // The ring belongs to the thread that creates it (SINGLE_ISSUER).
            let executor = match Executor::new() {
                Ok(executor) => executor,
                Err(e) => return drop(sender.send(Err(e))),
            };
            sandbox::confine(Kind::Reactor);
            let _ = sender.send(Ok((executor.remote(), executor.handle().pulse().clone())));
            if let Err(e) = executor.run() {
                // The reactor's disks cannot be served any more. In a server, a panic ends the
                // process.
                panic!("io_uring_enter failed: {e}");
            }
        };
        let thread =
            std::thread::Builder::new().name(name(number)).stack_size(512 << 10).spawn(body)?;
        let started = receiver
            .recv()
            .map_err(|_| io::Error::other("the reactor's thread ended at its start"))?;
        let (remote, pulse) = started?;
        Ok((Reactor { remote, thread: Mutex::new(Some(thread)) }, pulse))
    }
}

fn name(number: usize) -> String {
    format!("reactor-{number}")
}

/// Binds the calling thread to processor `cpu`.
fn keep_to(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("there is no processor {cpu}"),
        ));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("processor {cpu} cannot be used: {e}"))
    })
}
