//! The end of an operation: baselines and counters learn its service time, and the next one begins.
//!
//! In: an admitted operation that has completed. Out: room in the window.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::{Device, Grant};
use crate::Time;
use crate::account::{Account, Counters};

impl Device {
    /// Records that an operation has completed, which makes room in the window.
    #[inline]
    pub(crate) fn done(&self, (account, counters): (&Account, &Counters), now: Time, grant: Grant) {
        if now >= self.stall_at.load(Relaxed) {
            self.end_stall(now, self.baseline.at_least(grant.class));
        }
        self.activate(account);
        // What the image answers is no work of the device. Its short time says nothing about the
        // device, and would hide how long other operations take.
        if !grant.is_idle {
            self.count((account, counters), now, &grant);
        }
        self.release_grant(account, now, &grant);
    }

    /// Learns and counts the service time of an operation.
    #[inline]
    fn count(&self, (account, counters): (&Account, &Counters), now: Time, grant: &Grant) {
        let service = now.saturating_sub(grant.began);
        let others = self.in_flight.0.load(Relaxed) > account.in_flight.get().1
            || self.forced.load(Relaxed) > 0;
        let in_probe = grant.probe != 0 && grant.probe == self.quiet_probe.load(Relaxed);
        let has_stalled = grant.began < self.stalled_until.load(Relaxed);
        match () {
            () if has_stalled => {}
            () if in_probe => {
                self.quiet_samples.fetch_add(1, Relaxed);
                self.baseline.learn_in_probe(grant.class, service);
            }
            () => self.baseline.learn(grant.class, service, grant.was_alone && !others),
        }
        // A disk in the queue causes its own depth.
        let expected = match account.waiting.load(Relaxed) {
            0 => self.baseline.expected(grant.class),
            _ => self.baseline.at_least(grant.class),
        };
        if has_stalled {
            counters.stalled(service.saturating_sub(expected));
        }
        counters.served(grant.cost_ns, service, now.saturating_sub(grant.arrived), expected);
    }

    /// Charges a disk for cost in addition to that of its requests.
    pub(crate) fn charge_more(&self, account: &Account, cost: u64) {
        self.activate(account);
        account.start_tag.fetch_add(account.virtual_cost(cost), Relaxed);
        account.costs_more(cost);
    }

    /// Frees the part of the window that an operation took.
    #[inline]
    pub(crate) fn release_grant(&self, account: &Account, now: Time, grant: &Grant) {
        self.end_turn(account, now, grant);
        if grant.is_forced {
            account.in_flight.remove(0);
            self.forced.fetch_sub(1, SeqCst);
        } else {
            let held = self.held(grant.cost_ns);
            account.in_flight.remove(held);
            self.in_flight.0.fetch_sub(held, SeqCst);
            if grant.is_queued {
                self.queued_in_flight.fetch_sub(held, SeqCst);
            }
        }
        if self.waiting.load(SeqCst) > 0 {
            let mut state = self.state();
            self.step_probe(&mut state, now);
            self.admit_waiters(&mut state, now);
        }
    }
}
