//! The events of a simulation, in the order of their times. Events of the same time keep the order
//! in which they were added.
//!
//! Most events come in order: a guest's next operation follows at once, and each operation ends as
//! long after its service. Queues hold these events, because a heap costs more.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    Ask(usize),
    /// A guest's knobs change: the guest, and the number of the change.
    Change(usize, usize),
    /// The limits of a guest admit its next operation.
    Opens(usize),
    /// A server becomes free.
    Served(usize),
    Ended(usize),
    /// The time for which a waiting operation asked: its place, and its number.
    Claim(usize, u64),
}

/// Time and number of an event, which order the events, and the event.
type Numbered = (u64, u64, Event);

#[derive(Default)]
pub struct Events {
    /// Number of events so far.
    count: u64,
    /// Each queue is in order.
    asks: VecDeque<Numbered>,
    ends: VecDeque<Numbered>,
    others: BinaryHeap<Reverse<Numbered>>,
}

impl Events {
    pub fn add(&mut self, now: u64, time: u64, event: Event) {
        self.count += 1;
        let numbered = (time, self.count, event);
        let queue = match event {
            Event::Ask(_) if time == now => Some(&mut self.asks),
            Event::Ended(_) => Some(&mut self.ends),
            _ => None,
        };
        match queue.filter(|queue| queue.back().is_none_or(|last| last.0 <= time)) {
            Some(queue) => queue.push_back(numbered),
            None => self.others.push(Reverse(numbered)),
        }
    }

    /// Removes and returns the next event, if it comes at `until` or earlier.
    pub fn next(&mut self, until: u64) -> Option<(u64, Event)> {
        let key = |event: &Numbered| (event.0, event.1);
        let never = (u64::MAX, u64::MAX);
        let [ask, end] = [&self.asks, &self.ends].map(|queue| queue.front().map_or(never, key));
        let other = self.others.peek().map_or(never, |Reverse(event)| key(event));
        let first = ask.min(end).min(other);
        if first.0 > until {
            return None;
        }
        let event = match first {
            _ if first == ask => self.asks.pop_front(),
            _ if first == end => self.ends.pop_front(),
            _ => self.others.pop().map(|Reverse(event)| event),
        };
        event.map(|(time, _, event)| (time, event))
    }
}
