use super::*;

/// A machine that writes `rate` pages a second back while more than `background` are dirty.
struct Machine {
    pages: DirtyPages,
    rate: f64,
    now: u64,
    owed: f64,
}

impl Machine {
    fn new(rate: f64) -> Self {
        let pages = DirtyPages { limit: 1_000_000, background: 500_000, ..DirtyPages::default() };
        Machine { pages, rate, now: 0, owed: 0.0 }
    }

    fn pass(&mut self, ns: u64) {
        self.now += ns;
        self.owed += self.rate * ns as f64 / 1e9;
        if self.pages.dirty > self.pages.background {
            let done = (self.owed as u64).min(self.pages.dirty);
            self.pages.dirty -= done;
            self.pages.written += done;
            self.owed -= done as f64;
        } else {
            self.owed = 0.0;
        }
    }

    fn dirty(&mut self, pages: u64) {
        self.pages.dirty += pages;
        self.pages.dirtied += pages;
    }
}

/// A program that writes pages to one file.
struct Writer {
    pace: Pace,
    /// Writes at a time.
    depth: usize,
    /// Time between the end of a write and the next one.
    pause: u64,
    /// Whether the pages are dirty already.
    dirties: bool,
}

impl Writer {
    fn new(depth: usize) -> Self {
        Writer { pace: Pace::default(), depth, pause: 0, dirties: true }
    }
}

/// Lets the writers write for `seconds`. Each page takes a microsecond to copy. `other`: called
/// before each write, with the machine. Returns each writer's waits in the last quarter.
fn run(
    pacing: &DirtyPacing,
    machine: &mut Machine,
    seconds: u64,
    writers: &[Writer],
    mut other: impl FnMut(&mut Machine),
) -> Vec<Vec<u64>> {
    let from = machine.now;
    let end = from + seconds * 1000 * MS;
    let slots = |n: usize| vec![(machine.now, n); writers[n].depth];
    let mut ready: Vec<_> = (0..writers.len()).flat_map(slots).collect();
    let mut waits = vec![Vec::new(); writers.len()];
    while machine.now < end {
        let slot = (0..ready.len()).min_by_key(|slot| ready[*slot].0).unwrap();
        let (time, n) = ready[slot];
        machine.pass(time.saturating_sub(machine.now) + 1000);
        other(machine);
        if writers[n].dirties {
            machine.dirty(1);
        }
        if let Some(own) = pacing.is_due(machine.now, 1) {
            pacing.sample(machine.now, Some(machine.pages), own);
        }
        let wait = pacing.wait(&writers[n].pace, machine.now, 1);
        ready[slot].0 = machine.now + wait + writers[n].pause;
        if machine.now > end - (end - from) / 4 {
            waits[n].push(wait);
        }
    }
    waits
}

/// Writes pages for `seconds`, 32 at a time. Returns the waits of the last quarter.
fn write(pacing: &DirtyPacing, machine: &mut Machine, seconds: u64) -> Vec<u64> {
    run(pacing, machine, seconds, &[Writer::new(32)], |_| {}).remove(0)
}

fn p99(waits: &mut [u64]) -> u64 {
    waits.sort_unstable();
    waits[waits.len() / 100 * 99]
}

#[test]
fn writes_stay_below_the_level_at_which_the_kernel_delays_them() {
    for rate in [2e3, 25e3, 200e3] {
        let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(rate));
        // The slower the device, the longer until the policy has reached its aim.
        let seconds = (400e3 / rate).max(8.0) as u64;
        let mut waits = write(&pacing, &mut machine, seconds);
        let dirty = machine.pages.dirty;
        assert!((637_500..740_000).contains(&dirty), "{rate}: {dirty} dirty pages");
        // The machine is used: writes have the rate of write-back.
        let share = waits.len() as f64 / (seconds as f64 / 4.0) / rate;
        assert!((0.9..1.1).contains(&share), "{rate}: {share}");
        let seen = pacing.written_rate() as f64 / rate;
        assert!((0.8..1.2).contains(&seen), "{rate}: {seen}");
        let (p99, fair) = (p99(&mut waits), 32e9 / rate);
        assert!((p99 as f64) < 1.5 * fair + 1e6, "{rate}: {p99} ns of {fair}");
    }
}

#[test]
fn writes_do_not_wait_below_the_level() {
    let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(2e6));
    let waits = write(&pacing, &mut machine, 2);
    assert!(!pacing.is_active() && waits.iter().all(|wait| *wait == 0));
}

#[test]
fn a_device_that_stops_costs_each_write_a_bounded_time() {
    let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
    write(&pacing, &mut machine, 4);
    machine.rate = 0.0;
    let waits = write(&pacing, &mut machine, 4);
    assert!(waits.iter().all(|wait| *wait <= LONGEST));
    // It works again.
    machine.rate = 25e3;
    machine.pages.dirty = machine.pages.background;
    let waits = write(&pacing, &mut machine, 8);
    assert!(waits.len() > 40_000, "{}", waits.len());
}

/// Slower writes of this process do not make the other program's pages fewer.
#[test]
fn writes_do_not_wait_for_pages_of_others() {
    for others in [0.5, 1.0, 10.0] {
        let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
        // One write at a time, and another program that keeps the dirty pages above the level.
        let writer = Writer { pause: MS, ..Writer::new(1) };
        let mut owed = 0.0_f64;
        let waits = run(&pacing, &mut machine, 4, &[writer], |machine| {
            owed += others;
            machine.dirty(owed as u64);
            owed = owed.fract();
            machine.pages.dirty = 749_000;
        });
        assert!(waits[0].iter().all(|wait| *wait == 0), "{others}");
    }
}

/// The other program dirties pages, and this process writes to pages that are dirty already, so
/// the counters do not tell whose pages they are.
#[test]
fn writes_that_wait_in_vain_stop_waiting() {
    let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
    let writer = Writer { dirties: false, ..Writer::new(4) };
    let waits = run(&pacing, &mut machine, 12, &[writer], |machine| {
        machine.pages.dirtied += 1;
        machine.pages.dirty = 751_000;
    });
    // Writes that do not wait take a microsecond each.
    let free = waits[0].iter().filter(|wait| **wait == 0).count() as f64 / 3e6;
    assert!(free > 0.4, "writes did not wait in {free} of the time");
}

#[test]
fn a_file_with_few_writes_does_not_wait_for_one_with_many() {
    let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
    let writers = [Writer::new(128), Writer { pause: MS, ..Writer::new(1) }];
    let mut waits = run(&pacing, &mut machine, 16, &writers, |_| {});
    assert!(pacing.is_active());
    let (few, many) = (p99(&mut waits[1]), p99(&mut waits[0]));
    assert!(few == 0 && many > MS, "{few} and {many}");
    // What the one does not need is used by the other.
    let total = waits.iter().map(Vec::len).sum::<usize>() as f64 / 4.0;
    assert!((0.9..1.1).contains(&(total / 25e3)), "{total}");
}

#[test]
fn a_write_that_costs_more_than_the_longest_wait_delays_later_ones() {
    let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
    write(&pacing, &mut machine, 4);
    let pages = 250 * MS / pacing.spacing.load(Relaxed);
    // The file that was written does not share the rate any more.
    let (pace, from) = (Pace::default(), machine.now + 3 * PERIOD);
    let wait = |(n, pages)| pacing.wait(&pace, from + n * LONGEST, pages);
    let waits = [(0, pages), (1, 0), (2, 0), (3, 0)].map(wait);
    assert!(waits[0] == 0 && waits[1] == LONGEST && waits[3] == 0, "{waits:?}");
    assert!((1..LONGEST).contains(&waits[2]), "{waits:?}");
}

#[test]
fn without_counters_no_write_waits() {
    let (pacing, mut machine) = (DirtyPacing::new(), Machine::new(25e3));
    write(&pacing, &mut machine, 4);
    assert!(pacing.is_active());
    pacing.sample(machine.now, None, 0);
    let wait = pacing.wait(&Pace::default(), machine.now, 1);
    assert_eq!((pacing.is_active(), wait, pacing.written_rate()), (false, 0, 0));
}

#[test]
fn one_caller_samples() {
    let pacing = DirtyPacing::new();
    assert_eq!(pacing.is_due(5, 3), Some(3));
    assert_eq!((pacing.is_due(5, 1), pacing.is_due(INTERVAL, 1)), (None, None));
    assert_eq!(pacing.is_due(5 + INTERVAL, 1), Some(3));
    let soon = 5 + INTERVAL + SHORTEST_INTERVAL;
    assert_eq!(pacing.is_due(soon - 1, PAGES), None, "many pages, but too soon");
    assert_eq!(pacing.is_due(soon, 1), Some(PAGES + 1), "many pages");
}

/// All limits give levels in order, also those that an administrator mixes up.
#[test]
fn levels_are_in_order() {
    for (limit, background) in [(1000, 500), (1000, 999), (1000, 0), (0, 0), (3, 1)] {
        let pages = DirtyPages { limit, background, ..DirtyPages::default() };
        let (begin, aim, end) = pages.levels();
        assert!(begin <= aim && aim <= end && end <= limit.max(background), "{pages:?}");
        assert!(begin >= background.min(limit), "{pages:?}");
    }
}
