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

/// The reactors, their watchdog, and the acceptor of their clients. New queues go to some of the
/// reactors, or to all.
pub struct Reactors {
    all: Arc<All>,
    /// Numbers of the reactors that get new queues. At least one.
    used: Vec<usize>,
    next: AtomicUsize,
}

struct All {
    reactors: Vec<Reactor>,
    watchdog: Option<Watchdog>,
    /// None until the first export needs it.
    acceptor: Mutex<Option<Arc<Acceptor>>>,
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
        let mut all = All { reactors: Vec::new(), watchdog: None, acceptor: Mutex::default() };
        let (mut pulses, used) = (Vec::new(), Vec::from_iter(0..count.max(1)));
        for &number in &used {
            let (reactor, pulse) = Reactor::start(number, cpu(number))?;
            all.reactors.push(reactor);
            pulses.push((name(number), pulse));
        }
        all.watchdog = Some(Watchdog::start(pulses, alive)?);
        Ok(Reactors { all: Arc::new(all), used, next: AtomicUsize::new(0) })
    }

    /// Returns the same reactors, of which only those with these numbers get new queues. Returns
    /// error `InvalidInput` if the list is empty or a reactor does not exist.
    pub fn only(&self, numbers: &[usize]) -> io::Result<Self> {
        let count = self.all.reactors.len();
        let wrong = match numbers.iter().find(|number| **number >= count) {
            Some(number) => {
                format!("there is no reactor {number}: the server has {count}, from 0 on")
            }
            None if numbers.is_empty() => "the list of reactors is empty".into(),
            None => {
                let (all, used) = (self.all.clone(), numbers.to_vec());
                return Ok(Reactors { all, used, next: AtomicUsize::new(0) });
            }
        };
        Err(io::Error::new(io::ErrorKind::InvalidInput, wrong))
    }

    /// Returns the reactor for the next queue, in round-robin order.
    pub fn next(&self) -> Remote {
        let at = self.next.fetch_add(1, Ordering::Relaxed);
        self.all.reactors[self.used[at % self.used.len()]].remote.clone()
    }

    /// Ends all reactors and waits until they have ended. This closes the files of their rings,
    /// which releases the locks on these files. Without this call, the kernel closes the files some
    /// time after the process has ended. Later calls to the reactors get no answer.
    pub fn stop(&self) {
        self.all.stop();
    }

    /// Starts what the first export would start, so that it starts sooner.
    pub fn prepare(&self) -> io::Result<()> {
        self.acceptor().map(drop)
    }

    /// Returns the acceptor, and starts it at the first call.
    pub(crate) fn acceptor(&self) -> io::Result<Arc<Acceptor>> {
        let mut acceptor = self.all.acceptor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(acceptor) = &*acceptor {
            return Ok(acceptor.clone());
        }
        Ok(acceptor.insert(Arc::new(Acceptor::start()?)).clone())
    }

    /// Returns all reactors.
    pub fn all(&self) -> impl Iterator<Item = &Remote> {
        self.all.reactors.iter().map(|r| &r.remote)
    }
}

impl All {
    fn stop(&self) {
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
}

impl Drop for All {
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
            // Dropped before the executor, which waits for its operations.
            let _ends = EndsTheProcess;
            let _ = sender.send(Ok((executor.remote(), executor.handle().pulse().clone())));
            if let Err(e) = executor.run() {
                // The reactor's disks cannot be served any more.
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

/// Ends the process if its thread panics. If only the thread ended, the guests of its disks would
/// wait forever for their answers, and closes of these disks, too. The panic hook has printed the
/// reason.
struct EndsTheProcess;

impl Drop for EndsTheProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
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

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    /// Returns the names of the threads of the next reactors.
    fn next_of(reactors: &Reactors, count: usize) -> Vec<String> {
        let thread = |_| {
            let name = reactors.next().ask(|_, reply| {
                reply.send(std::thread::current().name().unwrap_or_default().to_string());
            });
            name.unwrap()
        };
        (0..count).map(thread).collect()
    }

    #[test]
    fn queues_go_to_the_reactors_of_a_list() {
        let reactors = Reactors::start(3, &[]).unwrap();
        assert_eq!(next_of(&reactors, 4), ["reactor-0", "reactor-1", "reactor-2", "reactor-0"]);
        let some = reactors.only(&[2, 0]).unwrap();
        assert_eq!(next_of(&some, 3), ["reactor-2", "reactor-0", "reactor-2"]);
        assert_eq!(some.all().count(), 3);
        let refused = |list: &[usize]| reactors.only(list).err().unwrap().to_string();
        assert_eq!(refused(&[0, 3]), "there is no reactor 3: the server has 3, from 0 on");
        assert_eq!(refused(&[]), "the list of reactors is empty");
        // The threads live as long as the last of both.
        drop(reactors);
        assert_eq!(next_of(&some, 1), ["reactor-0"]);
    }

    const CHILD: &str = "BLOCKYARD_TEST_REACTOR_PANICS";

    /// Runs this test again in a child process, and panics on a reactor there.
    #[test]
    fn a_panic_on_a_reactor_ends_the_process_of_a_library_too() {
        if std::env::var_os(CHILD).is_some() {
            let reactors = Reactors::start(1, &[]).unwrap();
            reactors.next().run(|_| panic!("on purpose"));
            // The abort ends this wait.
            loop {
                std::thread::park();
            }
        }
        let name = "reactors::tests::a_panic_on_a_reactor_ends_the_process_of_a_library_too";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(output.status.signal(), Some(rustix::process::Signal::ABORT.as_raw()));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("'reactor-0'") && stderr.contains("on purpose"), "{stderr}");
    }
}
