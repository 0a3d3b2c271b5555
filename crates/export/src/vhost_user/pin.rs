//! Guest memory that is registered with io_uring (`--pin-memory`), on the reactors that serve a
//! session.
//!
//! ```text
//!   session's thread: populates the memory ──► inbox ──► table of the session, on each reactor
//!                                                          │
//!                              one task of the session ◄───┘ registers it, part by part
//! ```
//! In: the session's memory, and the reactors that run its queues. Out: registrations on those
//! reactors. What must hold:
//! - Registrations stay while queues stop and start, because pinning gigabytes takes long.
//! - Requests cannot find removed memory, or the memory of a session that has ended, when the
//!   reactor has handled the change. The task then unregisters it.
//! - A reactor registers one part in an iteration, and then only does other work for some time. It
//!   unregisters at most one part in an iteration. A front end may replace its memory as often as
//!   it likes. Requests in memory that is not registered yet use
//!   its addresses.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::{Clock, GuestMemory, Handle, Registration, Remote, Signal};

use super::device::DeviceState;
use crate::budget;

/// After a part, the task sleeps for this multiple of the processor time that the part took.
const PAUSE: u32 = 4;

/// The tables of a reactor, by the session's number.
#[derive(Default)]
struct Tables(RefCell<HashMap<u64, Rc<Table>>>);

/// A session's memory on one reactor, and the work of its task.
struct Table {
    registration: RefCell<Registration>,
    device: Arc<DeviceState>,
    /// The first reactor of a session logs on behalf of all. Another one logs only refusals.
    is_first: bool,
    /// The outcome is not in the log yet.
    is_unreported: Cell<bool>,
    has_ended: Cell<bool>,
    changed: Signal,
}

impl Table {
    /// Creates a table without memory, and starts its task.
    fn start(handle: &Handle, device: Arc<DeviceState>, is_first: bool) -> Rc<Self> {
        let table = Rc::new(Table {
            registration: RefCell::new(Registration::new(handle)),
            device,
            is_first,
            is_unreported: Cell::new(false),
            has_ended: Cell::new(false),
            changed: Signal::new(handle),
        });
        handle.spawn(table.clone().run(handle.clone()));
        table
    }

    /// Replaces the memory.
    fn set(&self, memory: &GuestMemory) {
        self.registration.borrow_mut().set(memory);
        self.is_unreported.set(true);
        self.changed.ring();
    }

    /// Lets the task end when it has unregistered all memory.
    fn end(&self) {
        self.registration.borrow_mut().set(&GuestMemory::default());
        self.is_unreported.set(false);
        self.has_ended.set(true);
        self.changed.ring();
    }

    fn has_work(&self) -> bool {
        self.registration.borrow().has_work()
    }

    async fn run(self: Rc<Self>, handle: Handle) {
        loop {
            self.report();
            if self.has_work() {
                budget::long_turn(&handle).await;
                let before = Clock::Thread.read();
                self.registration.borrow_mut().step();
                let took = Clock::Thread.read().saturating_sub(before);
                // Before the pause, so that also the log of a short session has it.
                self.report();
                handle.sleep(took * PAUSE).await;
            } else if self.has_ended.get() {
                return;
            } else {
                self.changed.wait().await;
            }
        }
    }

    /// Logs the outcome for a table, when nothing of it is left to register.
    fn report(&self) {
        let registration = self.registration.borrow();
        if !registration.is_settled() || !self.is_unreported.replace(false) {
            return;
        }
        let outcome = registration.outcome();
        if self.is_first || outcome.refused.is_some() {
            self.device.log.info(self.device.disk.name(), None, format_args!("{outcome}"));
        }
    }
}

/// A session's registrations on all its reactors. Drop removes them.
pub struct Pins {
    session: u64,
    device: Arc<DeviceState>,
    reactors: Vec<Remote>,
}

impl Pins {
    pub fn new(device: Arc<DeviceState>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Pins { session: NEXT.fetch_add(1, Ordering::Relaxed), device, reactors: Vec::new() }
    }

    /// Lets `reactor` register `memory`. Must be called before a queue starts on that reactor.
    pub fn join(&mut self, reactor: &Remote, memory: &GuestMemory) {
        if !self.reactors.iter().any(|r| r.is(reactor)) {
            self.reactors.push(reactor.clone());
            self.register(self.reactors.len() - 1, memory);
        }
    }

    /// Replaces `old` by `memory` on all reactors.
    pub fn replace(&self, old: &GuestMemory, memory: &GuestMemory) {
        for region in
            memory.regions().iter().filter(|r| !old.regions().iter().any(|o| Arc::ptr_eq(o, r)))
        {
            // Populate the memory on this thread, because reactors must serve other disks. If that
            // fails, the registration logs the reason.
            let _ = region.populate();
        }
        (0..self.reactors.len()).for_each(|number| self.register(number, memory));
    }

    fn register(&self, number: usize, memory: &GuestMemory) {
        let (session, memory, device) = (self.session, memory.clone(), self.device.clone());
        self.reactors[number].run(move |handle| {
            let known = handle.local::<Tables>().0.borrow().get(&session).cloned();
            let table = known.unwrap_or_else(|| {
                let table = Table::start(handle, device, number == 0);
                handle.local::<Tables>().0.borrow_mut().insert(session, table.clone());
                table
            });
            table.set(&memory);
        });
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let session = self.session;
        for reactor in &self.reactors {
            reactor.run(move |handle| {
                let gone = handle.local::<Tables>().0.borrow_mut().remove(&session);
                if let Some(table) = gone {
                    table.end();
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use blockyard_disk::{Disk, DiskOptions, Source};
    use blockyard_image::{CacheMode, ChainOptions};
    use blockyard_ring::{Executor, Region};

    use super::*;

    const REGIONS: u64 = 8;
    const SOON: Duration = Duration::from_secs(60);

    fn device() -> Arc<DeviceState> {
        let options = DiskOptions {
            name: "disk".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk = Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap());
        Arc::new(DeviceState::new(Arc::new(disk), true))
    }

    fn memory(regions: u64) -> GuestMemory {
        let region = |at: u64| Region::memfd("test", at, at, 4096).unwrap().0;
        let more = |memory: GuestMemory, number: u64| memory.with(region(number << 20)).unwrap();
        (0..regions).fold(GuestMemory::default(), more)
    }

    /// Waits until the task has done its work. Returns how often this task has run meanwhile, and
    /// the number of regions that are registered or were refused.
    async fn settled(table: &Table, handle: &Handle) -> (u64, u64) {
        let (began, mut turns) = (Instant::now(), 0);
        while table.has_work() {
            assert!(began.elapsed() < SOON, "the task does not end");
            handle.yield_now().await;
            turns += 1;
        }
        let outcome = table.registration.borrow().outcome();
        (turns, (outcome.regions + outcome.plain) as u64)
    }

    #[test]
    fn other_tasks_run_between_the_parts_of_a_registration() {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let test = async move {
            let table = Table::start(&handle, device(), true);
            table.set(&memory(REGIONS));
            let (turns, regions) = settled(&table, &handle).await;
            assert_eq!(regions, REGIONS);
            assert!(turns >= REGIONS, "{turns} turns");
        };
        executor.block_on(test).unwrap();
    }

    #[test]
    fn later_memory_replaces_earlier_memory_and_the_end_leaves_none() {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let test = async move {
            let table = Table::start(&handle, device(), true);
            table.set(&memory(REGIONS));
            handle.yield_now().await;
            table.set(&memory(2));
            assert_eq!(settled(&table, &handle).await.1, 2);
            table.end();
            assert_eq!(settled(&table, &handle).await.1, 0);
            let began = Instant::now();
            while Rc::strong_count(&table) > 1 {
                assert!(began.elapsed() < SOON, "the task does not end");
                handle.yield_now().await;
            }
        };
        executor.block_on(test).unwrap();
    }
}
