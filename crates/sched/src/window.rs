//! How much may be on the way to a device: the window, in nanoseconds of its cost, and its
//! capacity.
//!
//! In: what was seen since the last look. Out: the window until the next one.
//!
//! Three wishes, the later ones weaker:
//! 1. a disk with a latency target that asks for no more than its share meets it, whatever that
//!    costs its neighbours (a tenth of their share they keep);
//! 2. any other disk that asks for no more than its share has its operations served within
//!    [`SLOWED`] of the time they take without neighbours, as long as those who wait get no less of
//!    what is delivered than their share; and within [`UNTOUCHED`] as long as they get their share
//!    of all that the device can deliver;
//! 3. the device is busy: the window grows until the queue in the device costs [`Class::queue`].

/// A disk inside its share may be slowed to so much of its time alone...
pub(crate) const SLOWED: f64 = 1.5;
/// ...and this is as good as alone.
pub(crate) const UNTOUCHED: f64 = 1.03;

/// Fewer operations than this say nothing; those that are hardly slowed are to be many, or those of
/// so long a time.
const ENOUGH: u64 = 8;
const MANY: u64 = 100;
const LONG: u64 = 400_000_000;
/// So long after a disk inside its share was last seen, it is taken to be gone.
const GONE: u64 = 1_000_000_000;
const LEAST: f64 = 1_000.0;

/// What kind of device it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Class {
    /// Time that operations may spend in the device's own queue while all disks ask for more than
    /// their share, nanoseconds.
    pub queue: u64,
    /// Time between two looks, nanoseconds.
    pub period: u64,
}

impl Class {
    pub const FLASH: Class = Class { queue: 1_000_000, period: 20_000_000 };
    pub const ROTATIONAL: Class = Class { queue: 40_000_000, period: 100_000_000 };
}

/// What was seen since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    pub elapsed: u64,
    /// Disks that did something.
    pub busy: u32,
    /// Somebody waited for the device.
    pub waited: bool,
    /// Cost of what ended: all of it, and that of the disks that waited.
    pub delivered: u64,
    pub pressing: u64,
    /// The part of the device that is due to the disks that waited, 0 to 1.
    pub due: f64,
    /// Operations of disks inside their share, without a latency target of their own: how many,
    /// their time, and what it would have been alone.
    pub inside: u64,
    pub inside_service: u64,
    pub inside_alone: u64,
    /// What disks inside their share hold of the window now.
    pub inside_held: u64,
    /// The worst mean service time over its latency target, of disks inside their share that have
    /// one.
    pub missed: Option<f64>,
    /// All operations: how many, their time, and what it would have been alone.
    pub all: u64,
    pub all_service: u64,
    pub all_alone: u64,
}

#[derive(Debug)]
pub(crate) struct Window {
    class: Class,
    size: f64,
    /// What it began with.
    usual: f64,
    /// Cost a nanosecond that the device has shown it can deliver: 1 when the costs are right.
    capacity: f64,
    /// Cost delivered, and in what time, lately.
    recent: (f64, f64),
    /// Operations of disks inside their share, until there are enough of them.
    inside: Inside,
    /// When one was seen last.
    inside_at: Option<u64>,
    /// What they hold of it at most: were it smaller, they would wait for themselves.
    held: f64,
    /// Where they were slowed the last time: growth is slow from just below it.
    knee: f64,
}

#[derive(Debug, Default)]
struct Inside {
    operations: u64,
    service: u64,
    alone: u64,
    time: u64,
}

impl Window {
    /// `size`: what a calibration has found.
    pub fn new(class: Class, size: Option<u64>) -> Self {
        let size = size.map_or(class.queue as f64 / 2.0, |size| size as f64);
        Window {
            class,
            size,
            usual: size,
            capacity: 1.0,
            recent: (0.0, 0.0),
            inside: Inside::default(),
            inside_at: None,
            knee: f64::MAX,
            held: 0.0,
        }
    }

    pub fn period(&self) -> u64 {
        self.class.period
    }

    pub fn size(&self) -> u64 {
        self.size as u64
    }

    /// What it would be if nobody had to be protected, or more.
    pub fn usual(&self) -> f64 {
        self.usual.max(self.size)
    }

    pub fn capacity(&self) -> f64 {
        self.capacity
    }

    pub fn look(&mut self, now: u64, seen: &Seen) {
        if seen.elapsed == 0 {
            return;
        }
        let rate = self.rate(seen);
        if !seen.waited {
            return;
        }
        if seen.inside > 0 || seen.missed.is_some() {
            self.inside_at = Some(now);
        }
        let slowed = self.slowed(seen);
        let for_target = seen.missed.map(|missed| for_target(seen, missed));
        let step = match (for_target, slowed.map(|slowed| self.for_those_inside(seen, slowed))) {
            (Some(one), Some(other)) => one.min(other),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) if self.inside_at.is_some_and(|at| now < at.saturating_add(GONE)) => {
                // They come so rarely that nothing is known yet.
                if seen.gets(self.capacity * seen.elapsed as f64) {
                    1.0
                } else {
                    self.grown(seen, 1.02)
                }
            }
            (None, None) => {
                self.inside = Inside::default();
                self.knee = f64::MAX;
                self.for_all(seen, rate)
            }
        };
        self.held = (self.held * 0.98).max(seen.inside_held as f64);
        let most = 8.0 * self.class.queue as f64;
        self.size = (self.size * step).clamp((self.held + LEAST).min(most), most);
    }

    /// What the device delivers, a nanosecond: over a time, for operations end in flocks.
    fn rate(&mut self, seen: &Seen) -> f64 {
        let (delivered, elapsed) =
            (self.recent.0 + seen.delivered as f64, self.recent.1 + seen.elapsed as f64);
        let keep = if elapsed > 10.0 * self.class.period as f64 { 0.8 } else { 1.0 };
        self.recent = (delivered * keep, elapsed * keep);
        let rate = delivered / elapsed;
        if elapsed > 7.0 * self.class.period as f64 {
            self.capacity = self.capacity.max(rate);
        }
        rate
    }

    /// By how much disks inside their share are slowed, when enough is known of it.
    fn slowed(&mut self, seen: &Seen) -> Option<f64> {
        let Inside { operations, service, alone, time } = &mut self.inside;
        *operations += seen.inside;
        *service += seen.inside_service;
        *alone += seen.inside_alone;
        *time += seen.elapsed;
        let slowed = *service as f64 / (*alone).max(1) as f64;
        let enough = if slowed > SLOWED || *time >= LONG { ENOUGH } else { MANY };
        (*operations >= enough).then(|| {
            self.inside = Inside::default();
            slowed
        })
    }

    fn for_those_inside(&mut self, seen: &Seen, slowed: f64) -> f64 {
        let full = seen.gets(self.capacity * seen.elapsed as f64);
        let fair = seen.gets(seen.delivered as f64);
        if slowed > UNTOUCHED && full {
            self.knee = self.size;
        }
        // The device may have become faster.
        self.knee *= 1.001;
        let by = if self.size * 1.08 > self.knee { 1.002 } else { 1.05 };
        match () {
            () if slowed > SLOWED && fair => 1.0 / (slowed / SLOWED).clamp(1.03, 1.2),
            () if slowed > UNTOUCHED && full => 1.0 / (slowed / UNTOUCHED).clamp(1.01, 1.1),
            () if slowed < UNTOUCHED => self.grown(seen, by),
            () if !fair || (slowed < SLOWED * 0.95 && !full) => self.grown(seen, 1.03),
            () => 1.0,
        }
    }

    /// Everybody asks for more than the share: as much as the device's own queue may hold.
    fn for_all(&mut self, seen: &Seen, rate: f64) -> f64 {
        // Saturated, and nobody is being protected: this is what it can do today.
        self.capacity += (rate - self.capacity) * 0.02;
        self.grown(seen, 1.1)
    }

    fn grown(&self, seen: &Seen, by: f64) -> f64 {
        let most = seen.all_alone + seen.all * self.class.queue;
        match seen.all {
            0 => 1.0,
            _ if seen.all_service > most + most / 10 => 0.93,
            _ if seen.all_service > most => 1.0,
            _ => by,
        }
    }
}

fn for_target(seen: &Seen, missed: f64) -> f64 {
    match missed {
        _ if missed > 1.0 && seen.gets(0.1 * seen.delivered as f64) => {
            1.0 / missed.clamp(1.05, 1.2)
        }
        _ if missed > 1.0 => 1.03,
        _ if missed > 0.9 => 1.0,
        _ => 1.05,
    }
}

impl Seen {
    /// Whether those who waited got more than what is due to them of `all`.
    fn gets(&self, all: f64) -> bool {
        self.pressing as f64 > self.due * all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Seen {
        let (elapsed, waited, due) = (20_000_000, true, 0.5);
        Seen { elapsed, waited, due, ..Seen::default() }
    }

    fn after(window: &mut Window, seen: &Seen, looks: u64) -> u64 {
        (0..looks).for_each(|n| window.look(n * 20_000_000, seen));
        window.size()
    }

    #[test]
    fn it_grows_until_the_queue_is_long_enough_and_shrinks_when_it_is_too_long() {
        let mut window = Window::new(Class::FLASH, None);
        let busy = Seen {
            delivered: 20_000_000,
            pressing: 20_000_000,
            due: 1.0,
            all: 100,
            all_alone: 5_000_000,
            ..seen()
        };
        assert!(after(&mut window, &Seen { all_service: 50_000_000, ..busy }, 20) > 2_000_000);
        assert!(after(&mut window, &Seen { all_service: 500_000_000, ..busy }, 60) < 200_000);
    }

    #[test]
    fn those_inside_their_share_are_protected_but_not_below_the_others_share() {
        let polite = Seen {
            inside: 100,
            inside_alone: 4_000_000,
            inside_service: 20_000_000,
            all: 200,
            ..seen()
        };
        let mut window = Window::new(Class::FLASH, None);
        let more = Seen { delivered: 10_000_000, pressing: 8_000_000, ..polite };
        assert!(
            after(&mut window, &more, 20) < 100_000,
            "they get more than their half of what is delivered"
        );
        let less = Seen { delivered: 10_000_000, pressing: 4_000_000, ..polite };
        let before = window.size();
        assert!(after(&mut window, &less, 20) > before, "they get less than their half of it");
        // Hardly slowed, and they have their half of all the device can do: nearer to nothing at
        // all.
        let slightly = Seen {
            inside_service: 4_300_000,
            delivered: 14_000_000,
            pressing: 12_000_000,
            ..polite
        };
        let before = window.size();
        assert!(after(&mut window, &slightly, 20) < before);
    }

    #[test]
    fn a_latency_target_goes_before_shares_but_starves_nobody() {
        let polite =
            Seen { missed: Some(2.0), delivered: 10_000_000, pressing: 2_000_000, ..seen() };
        let mut window = Window::new(Class::FLASH, None);
        assert!(after(&mut window, &polite, 30) < 50_000);
        let before = window.size();
        assert!(after(&mut window, &Seen { pressing: 100_000, ..polite }, 30) >= before);
        assert!(after(&mut window, &Seen { missed: Some(0.5), ..polite }, 30) > before);
    }

    #[test]
    fn it_waits_for_those_inside_their_share_to_come_back_for_a_second() {
        let mut window = Window::new(Class::FLASH, None);
        let polite = Seen {
            inside: 100,
            inside_alone: 4_000_000,
            inside_service: 8_000_000,
            pressing: 30_000_000,
            ..seen()
        };
        window.look(0, &polite);
        let size = window.size();
        let busy =
            Seen { delivered: 30_000_000, pressing: 30_000_000, due: 0.9, all: 100, ..seen() };
        window.look(500_000_000, &busy);
        assert_eq!(window.size(), size);
        window.look(600_000_000, &Seen { pressing: 15_000_000, ..busy });
        assert!(
            window.size() > size && window.size() < size * 21 / 20,
            "unless others get less than they might"
        );
        let size = window.size();
        window.look(1_500_000_000, &busy);
        assert!(window.size() > size);
    }
}
