//! What a disk owes to the limits of its group.
//!
//! In: the amounts of operations that began before the group's limits admitted them as a whole: a
//! large one, or one that a drain admitted. Out: slices that the group's buckets are charged, one
//! after another. What must hold: the disk itself begins nothing while it owes something. The other
//! disks of the group wait for a few slices, and not until all is paid, because each slice waits
//! for its turn among the disks ([`Flow`](super::Flow)).

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::LIMITS;

/// Amounts that are owed, for each limit.
#[derive(Debug, Default)]
pub struct Owed([AtomicU64; LIMITS]);

impl Owed {
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|owed| owed.load(Relaxed) == 0)
    }

    pub fn add(&self, amounts: &[u64; LIMITS]) {
        for (owed, amount) in self.0.iter().zip(amounts).filter(|(_, amount)| **amount > 0) {
            let _ = owed.fetch_update(Relaxed, Relaxed, |owed| Some(owed.saturating_add(*amount)));
        }
    }

    /// Removes at most these amounts. Returns what was removed.
    pub fn remove(&self, most: &[u64; LIMITS]) -> [u64; LIMITS] {
        std::array::from_fn(|limit| {
            let left = |owed: u64| Some(owed.saturating_sub(most[limit]));
            let before = self.0[limit].fetch_update(Relaxed, Relaxed, left);
            before.unwrap_or_else(|owed| owed).min(most[limit])
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::{Host, Knobs, Limit, Limits, Operation, OperationKind, Share, Time};

    const MS: Time = 1_000_000;
    const BEGIN: Time = 1000 * MS;
    const RATE: u64 = 10_000_000;

    fn write(bytes: u64) -> Operation {
        Operation { kind: OperationKind::Write, bytes, sequential: false, requests: 1 }
    }

    /// Two disks of a group with a limit for bytes.
    fn disks() -> [Arc<Share>; 2] {
        let bps = Some(Limit { rate: RATE, max: None, length: Duration::from_secs(1) });
        let group = Knobs { limits: Limits { bps, ..Limits::default() }, ..Knobs::default() };
        let host = Host::default();
        let disk = || host.share(None, Some(("g", &group)), &Knobs::default());
        let both = [disk(), disk()];
        host.set_group("g", &group, BEGIN);
        both
    }

    /// One disk pays what it owes, while the other sends 100 KB every 100 ms: a tenth of the rate.
    /// Returns when all is paid, and the longest wait of the other.
    fn pay(payer: &Share, other: &Share) -> (Time, Time) {
        let (flow, own) = (other.new_flow(), payer.new_flow());
        let (mut now, mut attempt, mut longest) = (BEGIN, BEGIN, 0);
        let mut arrived = None;
        loop {
            if now >= attempt {
                match payer.pay_group(now) {
                    Some(next) => attempt = next,
                    None => return (now, longest),
                }
                assert!(payer.limit(now, &write(1), &own).is_err() && payer.owes_group());
                assert!(payer.paused_until(now).is_some());
            }
            if (now - BEGIN).is_multiple_of(100 * MS) {
                assert_eq!(arrived.replace(now), None, "the other waits for 100 ms");
            }
            if let Some(at) = arrived
                && other.limit(now, &write(RATE / 100), &flow).is_ok()
            {
                longest = longest.max(now - at);
                arrived = None;
            }
            now += MS;
        }
    }

    #[test]
    fn an_operation_of_many_seconds_delays_the_other_disks_of_the_group_for_a_moment() {
        let [one, other] = disks();
        one.limit(BEGIN, &write(1 << 30), &one.new_flow()).unwrap();
        let (paid, longest) = pay(&one, &other);
        assert!(longest <= 80 * MS, "{} ms", longest / MS);
        // A tenth of the rate goes to the other disk.
        let alone = (1 << 30) * 1000 / RATE * MS;
        let expected = alone * 10 / 9;
        assert!((paid - BEGIN).abs_diff(expected) < expected / 20, "{} ms", (paid - BEGIN) / MS);
        one.limit(paid + 100 * MS, &write(1), &one.new_flow()).unwrap();
    }

    #[test]
    fn operations_that_a_drain_admits_delay_the_other_disks_of_the_group_for_a_moment() {
        let [one, other] = disks();
        for _ in 0..30 {
            let _ = one.force(BEGIN, &write(RATE));
        }
        let (paid, longest) = pay(&one, &other);
        assert!(longest <= 40 * MS, "{} ms", longest / MS);
        let expected = 30_000 * MS * 10 / 9;
        assert!((paid - BEGIN).abs_diff(expected) < expected / 20, "{} ms", (paid - BEGIN) / MS);
    }

    #[test]
    fn what_is_owed_ends_with_the_limit_and_with_an_operation_that_does_not_begin() {
        let [one, _] = disks();
        let large = write(100 * RATE);
        one.limit(BEGIN, &large, &one.new_flow()).unwrap();
        assert!(one.owes_group());
        one.refund(BEGIN, &large, Default::default());
        assert!(!one.owes_group());
        let _ = one.force(BEGIN, &large);
        one.group().unwrap().set(&Knobs::default());
        one.group_changed(BEGIN);
        assert!(!one.owes_group());
        assert_eq!(one.paused_until(BEGIN), None);
    }

    /// The next server does not know which disk owes.
    #[test]
    fn the_next_server_charges_what_is_owed() {
        let ([old, _], [new, _]) = (disks(), disks());
        let _ = old.force(BEGIN, &write(10 * RATE));
        let state = old.hand_over(BEGIN);
        assert!(!old.owes_group());
        new.continue_from(BEGIN, &state);
        let opens = new.limit(BEGIN, &write(1), &new.new_flow()).unwrap_err();
        assert!((9900 * MS..=10_000 * MS).contains(&(opens - BEGIN)), "{} ms", opens / MS);
    }
}
