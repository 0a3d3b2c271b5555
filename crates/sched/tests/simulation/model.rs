//! A simulated device and its guests, in virtual time.
//!
//! The device has a number of servers and a FIFO queue. A guest keeps a number of operations in
//! flight. When one completes, it waits for its think time and starts the next one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use blockyard_sched::{
    Calibration, Costs, DeviceClass, DeviceProfile, Figures, Flow, Grant, Host, Knobs, Operation,
    OperationKind, ReactorShare, Shortfall, WaitToken,
};

use crate::events::{Event, Events};

pub const MS: u64 = 1_000_000;
pub const S: u64 = 1_000 * MS;
/// Time of an answer without the device.
const ANSWER: u64 = 2_000;

/// The load of a guest.
#[derive(Clone, PartialEq)]
pub struct Guest {
    pub knobs: Knobs,
    pub group: Option<(&'static str, Knobs)>,
    pub depth: usize,
    pub think: u64,
    /// Kinds and sizes in bytes of the guest's operations, which repeat in this order.
    pub work: Vec<(OperationKind, u64)>,
    /// Active from `from` until `until`, in nanoseconds.
    pub from: u64,
    pub until: u64,
    /// From `from` on, works for the first duration, rests for the second one, and so on, in
    /// nanoseconds.
    pub shifts: Option<(u64, u64)>,
    /// Whether the image answers without the device, as for clusters that are not allocated.
    pub is_answered: bool,
    /// Whether it is a process that uses the device and has no share of it.
    pub is_foreign: bool,
    /// Knobs that it gets at these times, in nanoseconds.
    pub changes: Vec<(u64, Knobs)>,
}

impl Guest {
    pub fn reads(depth: usize) -> Self {
        let (knobs, group, think) = Default::default();
        Guest {
            knobs,
            group,
            depth,
            think,
            work: vec![(OperationKind::Read, 4096)],
            from: 0,
            until: u64::MAX,
            shifts: None,
            is_answered: false,
            is_foreign: false,
            changes: Vec::new(),
        }
    }

    /// Returns the next time from `now` on at which the guest works.
    fn works_at(&self, now: u64) -> u64 {
        match self.shifts {
            Some((works, rests)) => {
                let into = now.saturating_sub(self.from) % (works + rests);
                if into < works { now } else { now - into + works + rests }
            }
            None => now,
        }
    }

    pub fn weighing(self, weight: u32) -> Self {
        Guest { knobs: Knobs { weight, ..self.knobs }, ..self }
    }
}

/// The results of a guest.
#[derive(Clone, Debug, Default)]
pub struct Got {
    pub operations: u64,
    pub cost: u64,
    /// Latencies from arrival to completion in nanoseconds, in order of completion.
    pub latencies: Vec<u64>,
    /// Times of the completions in nanoseconds, in order.
    pub completions: Vec<u64>,
    pub figures: Figures,
}

impl Got {
    pub fn quantile(&self, q: f64) -> u64 {
        let at = ((self.latencies.len() - 1) as f64 * q) as usize;
        *self.latencies.clone().select_nth_unstable(at).1
    }

    /// Returns the mean latency in nanoseconds.
    pub fn mean(&self) -> f64 {
        self.latencies.iter().sum::<u64>() as f64 / self.operations as f64
    }
}

/// How a device changes.
#[derive(Clone, Copy, PartialEq)]
pub enum Mood {
    Even,
    /// Once in this many nanoseconds nothing completes for the second number of nanoseconds.
    Stalls(u64, u64),
    /// From this time on nothing completes for the second number of nanoseconds.
    Stops(u64, u64),
    /// Once in this many nanoseconds it takes three times as long for the second number of
    /// nanoseconds.
    Slows(u64, u64),
    /// From this time on it takes this many percent of the time.
    Changes(u64, u64),
    /// A network disk: at most this many operations a second, one after another.
    Bucket(u64),
}

#[derive(Clone, Copy)]
pub struct Model {
    pub servers: usize,
    /// Service time of a 4 KiB read, and of each MiB, in nanoseconds.
    pub time: u64,
    pub per_mib: u64,
    /// Service times are uniformly distributed over this many percent.
    pub spread: u64,
    /// Factor by which an operation takes longer than its cost says.
    pub factor: fn(&Operation) -> u64,
    /// Time in nanoseconds after the service, in which the operation occupies no server.
    pub after: u64,
    /// What becomes of the device while it works.
    pub mood: Mood,
    /// Service time of a sync, which the flushes of a guest share that came before it. 0: a flush
    /// is an operation like others.
    pub sync: u64,
    /// Whether the scheduler is used.
    pub scheduled: bool,
    /// Number of operations that all guests but the first may have in flight, instead of the
    /// scheduler.
    pub window: Option<usize>,
    /// Whether the service times without neighbours are known in advance.
    pub calibrated: bool,
    pub class: DeviceClass,
    pub span: u64,
}

impl Model {
    pub const PLAIN: Model = Model {
        servers: 16,
        time: MS,
        per_mib: 0,
        spread: 0,
        factor: |_| 1,
        after: 0,
        mood: Mood::Even,
        sync: 0,
        scheduled: true,
        window: None,
        calibrated: false,
        class: DeviceClass::FLASH,
        span: 5 * S,
    };

    /// Returns the cost model: service times divided by the number of servers.
    pub fn costs(&self) -> Costs {
        let (base, per_mib) = (self.time / self.servers as u64, self.per_mib / self.servers as u64);
        Costs {
            read: base,
            read_sequential: base,
            read_per_mib: per_mib,
            write: base,
            write_sequential: base,
            write_per_mib: per_mib,
            flush: base,
            discard: base,
            write_zeroes: base,
        }
    }

    fn service(&self, now: u64, operation: &Operation, random: &mut Random) -> u64 {
        let bytes = u128::from(operation.bytes);
        let time = self.time + ((bytes * u128::from(self.per_mib)) >> 20) as u64;
        let time = time * (self.factor)(operation);
        let spread = time * self.spread / 100;
        let time = time - spread / 2 + random.below(spread + 1);
        match self.mood {
            Mood::Stalls(every, stall) if now % every + time > every - stall => {
                every - now % every + time
            }
            Mood::Stops(at, lasts) if now < at + lasts && now + time > at => {
                at + lasts - now + time
            }
            Mood::Slows(every, slow) if now % every < slow => 3 * time,
            Mood::Changes(at, percent) if now >= at => time * percent / 100,
            _ => time,
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0) * u128::from(bound)) >> 64) as u64
    }
}

/// Returns the seed of the service times: `BLOCKYARD_SEED`, or 7. With other seeds some rows miss
/// their bounds (docs/design/fair-shares.md).
fn seed() -> u64 {
    let seed = std::env::var("BLOCKYARD_SEED").ok();
    seed.map_or(7, |seed| seed.parse().expect("BLOCKYARD_SEED is a number"))
}

/// The operations that were woken, and whether there are some. A simulation has one thread.
#[derive(Default)]
struct Woken {
    any: AtomicBool,
    all: Mutex<Vec<usize>>,
}

/// Records that an operation was woken.
struct Wakes(usize, Arc<Woken>);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.1.all.lock().unwrap().push(self.0);
        self.1.any.store(true, Relaxed);
    }
}

/// An operation. The next one in the same place uses its token and its waker again.
struct Under {
    guest: usize,
    operation: Operation,
    asked: u64,
    grant: Grant,
    token: Arc<WaitToken>,
    waker: Waker,
    /// Number of the operation while it waits.
    waits: Option<u64>,
    /// The flushes that share this sync.
    flushes: Option<Vec<usize>>,
}

thread_local! {
    static REPORTS: RefCell<Vec<Shortfall>> = const { RefCell::new(Vec::new()) };
}

/// Returns the reports of too large reservations in the last simulation of this thread, once.
pub fn reports() -> Vec<Shortfall> {
    REPORTS.take()
}

pub struct Simulation {
    model: Model,
    costs: Costs,
    now: u64,
    events: Events,
    guests: Vec<Guest>,
    turns: Vec<usize>,
    shares: Vec<ReactorShare>,
    /// Of each guest: its operations that wait for its limits, and its flow in them.
    limited: Vec<(VecDeque<usize>, Arc<Flow>)>,
    got: Vec<Got>,
    under: Vec<Under>,
    free: Vec<usize>,
    busy: usize,
    queue: VecDeque<usize>,
    /// Number of operations that waited.
    waited: u64,
    /// With a fixed window: the other guests' operations in flight, and those that wait.
    others: usize,
    others_wait: VecDeque<usize>,
    /// Of each guest: the flushes that wait for the end of its sync. None: no sync runs.
    syncs: Vec<Option<Vec<usize>>>,
    /// When a network disk's bucket has its next token.
    token_at: u64,
    woken: Arc<Woken>,
    /// An empty list, which takes the place of the list of woken operations.
    spare: Vec<usize>,
    random: Random,
}

impl Simulation {
    pub fn new(model: Model, guests: &[Guest]) -> Self {
        let host = Host::reporting(|it| REPORTS.with_borrow_mut(|all| all.push(it.clone())));
        reports();
        let baseline = if model.calibrated { model.time } else { 0 };
        let calibration = Calibration {
            baseline_read_ns: baseline,
            baseline_write_ns: baseline,
            window_ns: model.calibrated.then_some(model.time),
            ..Calibration::of(model.costs())
        };
        let profile = DeviceProfile { class: model.class, calibration };
        let device = (model.scheduled && model.window.is_none()).then_some(("model", &profile));
        let share = |g: &Guest| {
            let group = g.group.as_ref().map(|(name, knobs)| (*name, knobs));
            host.share(device.filter(|_| !g.is_foreign), group, &g.knobs)
        };
        let shares: Vec<_> = guests.iter().map(|guest| share(guest).on_reactor()).collect();
        shares.iter().enumerate().for_each(|(at, share)| share.set_name(&at.to_string()));
        let mut simulation = Simulation {
            model,
            costs: model.costs(),
            now: 0,
            events: Events::default(),
            turns: vec![0; guests.len()],
            got: vec![Got::default(); guests.len()],
            limited: shares.iter().map(|share| (VecDeque::new(), share.new_flow())).collect(),
            shares,
            guests: guests.to_vec(),
            under: Vec::new(),
            free: Vec::new(),
            busy: 0,
            queue: VecDeque::new(),
            waited: 0,
            others: 0,
            others_wait: VecDeque::new(),
            syncs: vec![None; guests.len()],
            token_at: 0,
            woken: Arc::default(),
            spare: Vec::new(),
            random: Random(seed()),
        };
        for (at, guest) in guests.iter().enumerate() {
            // Guests start at slightly different times.
            (0..guest.depth).for_each(|n| {
                simulation.at(guest.from + (n as u64) * 1_000 + at as u64, Event::Ask(at));
            });
            for (number, (time, _)) in guest.changes.iter().enumerate() {
                simulation.at(*time, Event::Change(at, number));
            }
        }
        simulation
    }

    fn at(&mut self, time: u64, event: Event) {
        self.events.add(self.now, time, event);
    }

    pub fn share(&self, guest: usize) -> &ReactorShare {
        &self.shares[guest]
    }

    pub fn now(&self) -> u64 {
        self.now
    }

    /// Runs until `until`. Returns the results from `from` on.
    pub fn run(&mut self, from: u64, until: u64) -> Vec<Got> {
        self.got = vec![Got::default(); self.guests.len()];
        while let Some((time, event)) = self.events.next(until) {
            self.now = time;
            match event {
                Event::Ask(guest) if time < self.guests[guest].until => self.ask(guest),
                Event::Ask(_) => {}
                Event::Change(guest, number) => {
                    self.shares[guest].set(&self.guests[guest].changes[number].1, time);
                }
                Event::Opens(guest) => self.opens(guest),
                Event::Served(which) => self.served(which),
                Event::Ended(which) => self.ended(which, from),
                Event::Claim(which, number) if self.under[which].waits == Some(number) => {
                    self.claim(which)
                }
                Event::Claim(..) => {}
            }
            self.start_admitted();
        }
        self.now = until;
        for (got, share) in self.got.iter_mut().zip(&self.shares) {
            got.figures = share.figures();
        }
        std::mem::take(&mut self.got)
    }

    fn ask(&mut self, guest: usize) {
        let work = &self.guests[guest].work;
        let (kind, bytes) = work[self.turns[guest] % work.len()];
        self.turns[guest] += 1;
        let operation = Operation { kind, bytes, sequential: false, requests: 1 };
        let which = self.put(guest, operation, None);
        if self.guests[guest].is_foreign {
            return self.occupy(which);
        }
        self.limited[guest].0.push_back(which);
        if self.limited[guest].0.len() == 1 {
            self.opens(guest);
        }
    }

    /// Begins the operations of a guest that its limits admit, in order of arrival.
    fn opens(&mut self, guest: usize) {
        while let Some(which) = self.limited[guest].0.front().copied() {
            let operation = self.under[which].operation;
            if let Err(at) = self.shares[guest].limit(self.now, &operation, &self.limited[guest].1)
            {
                // As in the server: the limits may change meanwhile.
                let at = at.clamp(self.now + 1_000, self.now + 20 * MS);
                return self.at(at, Event::Opens(guest));
            }
            self.limited[guest].0.pop_front();
            self.begin(guest, which);
        }
    }

    fn begin(&mut self, guest: usize, which: usize) {
        let operation = self.under[which].operation;
        if let Some(most) = self.model.window
            && guest > 0
        {
            match self.others < most {
                true => self.others += 1,
                false => return self.others_wait.push_back(which),
            }
        }
        match self.shares[guest].ask(self.now, &operation) {
            Some(grant) => {
                self.under[which].grant = grant;
                self.submit(which);
            }
            None => {
                self.waited += 1;
                let under = &mut self.under[which];
                under.waits = Some(self.waited);
                let (share, Under { token, waker, .. }) = (&self.shares[guest], under);
                if let Some(at) = share.wait(self.now, &operation, token, waker) {
                    self.at(at, Event::Claim(which, self.waited));
                }
            }
        }
    }

    fn put(&mut self, guest: usize, operation: Operation, flushes: Option<Vec<usize>>) -> usize {
        let (asked, grant, waits) = (self.now, Grant::default(), None);
        let Some(which) = self.free.pop() else {
            let (which, token) = (self.under.len(), Arc::default());
            let waker = Waker::from(Arc::new(Wakes(which, self.woken.clone())));
            self.under.push(Under { guest, operation, asked, grant, token, waker, waits, flushes });
            return which;
        };
        let under = &mut self.under[which];
        (under.guest, under.operation, under.asked) = (guest, operation, asked);
        (under.grant, under.waits, under.flushes) = (grant, waits, flushes);
        which
    }

    /// Adds a flush to those that share the guest's next sync, as the server does.
    fn flush(&mut self, which: usize) {
        let Under { guest, ref mut grant, .. } = self.under[which];
        let mut grant = std::mem::take(grant);
        grant.set_idle();
        self.shares[guest].done(self.now, grant);
        match &mut self.syncs[guest] {
            Some(waiting) => waiting.push(which),
            None => self.sync(guest, vec![which]),
        }
    }

    fn sync(&mut self, guest: usize, flushes: Vec<usize>) {
        self.syncs[guest] = Some(Vec::new());
        let operation = self.under[flushes[0]].operation;
        let which = self.put(guest, operation, Some(flushes));
        self.under[which].grant = self.shares[guest].sync(self.now);
        self.occupy(which);
    }

    /// Does what a waiting operation does when it is woken. Only the operation itself keeps the
    /// time that the scheduler returns, as in the server.
    fn claim(&mut self, which: usize) {
        let Some(number) = self.under[which].waits else { return };
        let at = self.shares[self.under[which].guest].claim(self.now);
        if let Some(at) = at {
            self.at(at.max(self.now + 10_000), Event::Claim(which, number));
        }
    }

    fn start_admitted(&mut self) {
        while self.woken.any.load(Relaxed) {
            self.woken.any.store(false, Relaxed);
            let mut woken = std::mem::take(&mut self.spare);
            std::mem::swap(&mut woken, &mut *self.woken.all.lock().unwrap());
            woken.drain(..).for_each(|which| self.wake(which));
            self.spare = woken;
        }
    }

    fn wake(&mut self, which: usize) {
        if !self.under[which].token.take_grant() {
            return self.claim(which);
        }
        let under = &mut self.under[which];
        under.waits = None;
        let share = &self.shares[under.guest];
        under.grant = share.granted(under.asked, self.now, &under.operation, &under.token);
        self.submit(which);
    }

    fn submit(&mut self, which: usize) {
        if self.guests[self.under[which].guest].is_answered {
            self.under[which].grant.set_idle();
            return self.at(self.now + ANSWER, Event::Ended(which));
        }
        let under = &self.under[which];
        match self.model.sync > 0 && under.operation.kind == OperationKind::Flush {
            true => self.flush(which),
            false => self.occupy(which),
        }
    }

    fn occupy(&mut self, which: usize) {
        if self.busy < self.model.servers { self.serve(which) } else { self.queue.push_back(which) }
    }

    fn serve(&mut self, which: usize) {
        self.busy += 1;
        let operation = self.under[which].operation;
        let time = match self.under[which].flushes {
            Some(_) => self.model.sync,
            None => self.model.service(self.now, &operation, &mut self.random),
        };
        let begins = match self.model.mood {
            Mood::Bucket(rate) => {
                let begins = self.token_at.max(self.now);
                self.token_at = begins + S / rate;
                begins
            }
            _ => self.now,
        };
        self.at(begins + time, Event::Served(which));
    }

    fn served(&mut self, which: usize) {
        self.busy -= 1;
        if let Some(next) = self.queue.pop_front() {
            self.serve(next);
        }
        self.at(self.now + self.model.after, Event::Ended(which));
    }

    fn ended(&mut self, which: usize, from: u64) {
        let grant = std::mem::take(&mut self.under[which].grant);
        let guest = self.under[which].guest;
        if let Some(flushes) = self.under[which].flushes.take() {
            self.shares[guest].done(self.now, grant);
            self.free.push(which);
            flushes.into_iter().for_each(|flush| self.answered(flush, from));
            let next = self.syncs[guest].take().filter(|waiting| !waiting.is_empty());
            return next.into_iter().for_each(|flushes| self.sync(guest, flushes));
        }
        self.shares[guest].done(self.now, grant);
        self.answered(which, from);
    }

    fn answered(&mut self, which: usize, from: u64) {
        let Under { guest, operation, asked, .. } = self.under[which];
        self.free.push(which);
        if guest > 0 && self.model.window.is_some() {
            match self.others_wait.pop_front() {
                Some(next) => self.submit(next),
                None => self.others -= 1,
            }
        }
        if self.now >= from {
            let got = &mut self.got[guest];
            got.operations += 1;
            got.cost += match self.guests[guest].is_answered {
                true => 0,
                false => self.costs.of(&operation) * (self.model.factor)(&operation),
            };
            if got.latencies.len() < 1 << 20 {
                got.latencies.push(self.now - asked);
                got.completions.push(self.now);
            }
        }
        let next = self.guests[guest].works_at(self.now + self.guests[guest].think);
        self.at(next, Event::Ask(guest));
    }
}

/// Runs guests on a device. Returns their results after a start-up time.
pub fn run(model: Model, guests: &[Guest]) -> Vec<Got> {
    Simulation::new(model, guests).run(3 * S, 3 * S + model.span)
}
