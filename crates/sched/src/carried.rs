//! What a share carries over to the next server in a hand-over, so that a hand-over is no way past
//! a limit.
//!
//! In: a disk of which no operation is in flight. Out: token buckets and debts. Their times are
//! relative to the present, because each process has its own origin of time.
//!
//! What must hold
//! - The tokens of a group move with its first disk. The old server continues with full buckets,
//!   and the states of the other disks add what they have charged since. So each charge counts
//!   once.
//! - Another process has written the state. Each number is bounded before it is used.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Longest debt, and longest sum of times, that is carried over, in nanoseconds: 13 days, and 36
/// years.
pub(crate) const MAX_DEBT_NS: u64 = 1 << 50;
pub(crate) const MAX_SUM_NS: u64 = 1 << 60;

/// State of a disk's share. A field that is missing is that of a new disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct ShareState {
    pub limits: LimiterState,
    /// Name of the disk's group, and the state of its limits.
    pub group: Option<String>,
    pub group_limits: LimiterState,
    /// What the disk owes to the limits of its group, by their names: operations or bytes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub group_owed: BTreeMap<String, u64>,
    /// The part of `group_owed` that drains have admitted. `None`: all, or nothing is owed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_forced: Option<BTreeMap<String, u64>>,
    /// What disks owed that are gone. The first disk of the group carries it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub group_orphans: BTreeMap<String, u64>,
    /// Time until the debt to the limits is paid, and the debt to the device.
    pub limits_debt_ns: u64,
    pub device_debt_ns: u64,
    /// Cost of the debt to the device. `None`: there is none, or an older server has written the
    /// state, which knew only the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_debt_cost_ns: Option<u64>,
    /// The part of the cost that the device's virtual time has not passed. `None`: as above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_debt_order_ns: Option<u64>,
    // See `Figures`.
    pub owed_ns: u64,
    pub used_ns: u64,
    pub donated_ns: u64,
    pub limited_ns: u64,
    pub waited_ns: u64,
    pub service_ns: u64,
    pub baseline_ns: u64,
}

/// State of the limits that are set, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct LimiterState(pub(crate) BTreeMap<String, MeterState>);

/// State of one limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct MeterState {
    /// The bucket of 10 ms, and the bucket of the burst.
    pub short: BucketState,
    pub burst: BucketState,
}

/// State of a token bucket. Rate 0: there is no such bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct BucketState {
    pub rate: u64,
    /// Size in nanoseconds of the rate.
    pub holds_ns: u64,
    /// Time until the bucket is full.
    pub missing_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Host, Knobs, Limit, Limits, Operation, OperationKind, Share, Time};
    use std::sync::Arc;
    use std::time::Duration;

    const SECOND: u64 = 1_000_000_000;
    /// Two processes have different origins of time.
    const OLD: Time = 500 * SECOND;
    const NEW: Time = SECOND;
    const READ: Operation =
        Operation { kind: OperationKind::Read, bytes: 4096, sequential: false, requests: 1 };

    fn iops(rate: u64, max: Option<u64>) -> Knobs {
        let iops = Some(Limit { rate, max, length: Duration::from_secs(1) });
        Knobs { limits: Limits { iops, ..Limits::default() }, ..Knobs::default() }
    }

    fn admitted(share: &Share, now: Time) -> u64 {
        let flow = share.new_flow();
        (0..1000).take_while(|_| share.limit(now, &READ, &flow).is_ok()).count() as u64
    }

    fn force(share: &Share, operations: u32) {
        for _ in 0..operations {
            let _ = share.force(OLD, &READ);
        }
    }

    /// Hands a share over, as text.
    fn hand_over(old: &Share, new: &Share) {
        let text = serde_json::to_string(&old.hand_over(OLD)).unwrap();
        new.continue_from(NEW, &serde_json::from_str(&text).unwrap());
    }

    fn disk(knobs: &Knobs) -> Arc<Share> {
        Host::default().share(None, None, knobs)
    }

    #[test]
    fn the_next_server_admits_what_this_one_would_have_admitted() {
        for knobs in [iops(100, None), iops(100, Some(200))] {
            let (old, new, alone) = (disk(&knobs), disk(&knobs), disk(&knobs));
            let before = admitted(&old, OLD);
            assert_eq!(admitted(&alone, OLD), before);
            hand_over(&old, &new);
            assert_eq!(admitted(&new, NEW), 0, "the tokens are gone");
            for later in [1, 10, 300, 5000] {
                let later = later * SECOND / 1000;
                let expected = admitted(&alone, OLD + later);
                assert_eq!(admitted(&new, NEW + later), expected, "{knobs:?} after {later} ns");
            }
        }
    }

    #[test]
    fn a_debt_is_paid_at_the_next_server() {
        let knobs = iops(100, None);
        let (old, new) = (disk(&knobs), disk(&knobs));
        force(&old, 50);
        let owed = old.paused_until(OLD).unwrap() - OLD;
        assert!(owed >= 4 * SECOND / 10, "{owed}");
        hand_over(&old, &new);
        assert_eq!(new.paused_until(NEW), Some(NEW + owed));
        assert_eq!((admitted(&new, NEW + owed - 1), admitted(&new, NEW + owed)), (0, 1));
        // The limit is gone at the next server.
        let free = disk(&Knobs::default());
        force(&old, 50);
        hand_over(&old, &free);
        assert_eq!(free.paused_until(NEW), None);
    }

    /// Returns two disks that have just used a device.
    fn neighbours(now: Time) -> [crate::ReactorShare; 2] {
        let host = Host::default();
        let device = Some(("d", &crate::DeviceProfile::FLASH));
        let disks = [(); 2].map(|()| host.share(device, None, &Knobs::default()).on_reactor());
        for disk in &disks {
            disk.done(now, disk.ask(now, &READ).unwrap());
        }
        disks
    }

    #[test]
    fn a_debt_to_the_device_is_paid_at_the_next_server() {
        let ([old, _beside_old], [new, _beside_new]) = (neighbours(OLD), neighbours(NEW));
        force(&old, 1000);
        let owed = old.paused_until(OLD).unwrap() - OLD;
        hand_over(&old, &new);
        assert_eq!(new.paused_until(NEW), Some(NEW + owed));
        // The disk's share of the time has covered the debt, and the virtual time has not.
        let [new, beside] = neighbours(NEW);
        let state = ShareState {
            device_debt_cost_ns: Some(0),
            device_debt_order_ns: Some(SECOND),
            ..ShareState::default()
        };
        new.continue_from(NEW, &state);
        assert_eq!(new.hand_over(NEW).device_debt_order_ns, Some(SECOND));
        let _granted: Vec<_> = std::iter::from_fn(|| beside.ask(NEW, &READ)).collect();
        assert_eq!(new.paused_until(NEW), None, "no other disk waits");
        beside.wait(NEW, &READ, &Default::default(), std::task::Waker::noop());
        assert!(new.paused_until(NEW).is_some());
        // An older server knows only the time.
        let [new, _beside] = neighbours(NEW);
        let state = ShareState { device_debt_ns: SECOND, ..ShareState::default() };
        new.continue_from(NEW, &state);
        let owed = new.paused_until(NEW).unwrap() - NEW;
        assert!((SECOND / 20..=SECOND).contains(&owed), "{owed}");
    }

    /// What an NBD client owes holds no queue.
    #[test]
    fn the_next_server_knows_what_drains_have_admitted() {
        let group = iops(100, None);
        let disks =
            [(); 3].map(|()| Host::default().share(None, Some(("g", &group)), &Knobs::default()));
        let [drained, other, unknown] = &disks;
        let large = Operation { requests: 50, ..READ };
        let states = [true, false].map(|is_drained| {
            let old = Host::default().share(None, Some(("g", &group)), &Knobs::default());
            match is_drained {
                true => force(&old, 50),
                false => old.limit(OLD, &large, &old.new_flow()).unwrap(),
            }
            let state = old.hand_over(OLD);
            assert!(!state.group_owed.is_empty());
            state
        });
        drained.continue_from(NEW, &states[0]);
        other.continue_from(NEW, &states[1]);
        // An older server does not say it.
        unknown.continue_from(NEW, &ShareState { group_forced: None, ..states[1].clone() });
        let paused = disks.each_ref().map(|disk| disk.paused_until(NEW).is_some());
        assert_eq!(paused, [true, false, true]);
        assert!(disks.iter().all(|disk| disk.owes_group()));
    }

    #[test]
    fn the_charges_of_a_group_count_once() {
        let group = iops(100, None);
        let host = Host::default();
        let share = |host: &Host| host.share(None, Some(("g", &group)), &Knobs::default());
        let next = Host::default();
        let (old, new) = ([share(&host), share(&host)], [share(&next), share(&next)]);
        assert_eq!(admitted(&old[0], OLD), 1);
        force(&old[0], 10);
        hand_over(&old[0], &new[0]);
        force(&old[1], 5);
        hand_over(&old[1], &new[1]);
        let group = new[1].group().unwrap();
        // An operation is 10 ms. The bucket admits one when it lacks at most 5 ms.
        assert_eq!(group.limiter.opens(), NEW + 5 * SECOND / 1000);
        // Another group has nothing to do with it.
        let other = next.share(None, Some(("h", &iops(100, None))), &Knobs::default());
        force(&old[0], 10);
        hand_over(&old[0], &other);
        assert!(other.group().unwrap().limiter.opens() <= NEW && !other.owes_group());
        // What is forced is owed by the disk itself.
        let owed = new.map(|share| share.hand_over(NEW).group_owed);
        assert_eq!(owed, [10, 5].map(|n| BTreeMap::from([("iops".to_string(), n)])));
    }

    #[test]
    fn figures_go_on() {
        let (old, new) = (disk(&Knobs::default()), disk(&Knobs::default()));
        old.note_waits(3, 4);
        new.note_waits(10, 20);
        hand_over(&old, &new);
        assert_eq!((new.figures().limited_ns, new.figures().waited_ns), (13, 24));
    }

    #[test]
    fn numbers_that_no_server_sends_are_bounded() {
        let most = u64::MAX;
        let bucket = || BucketState { rate: most, holds_ns: most, missing_ns: most };
        let one = BucketState { rate: 1, holds_ns: 0, ..bucket() };
        for bucket in [bucket(), one] {
            let meter = MeterState { short: bucket.clone(), burst: bucket };
            let limits = LimiterState([("iops".into(), meter)].into());
            let state = ShareState {
                group: Some("g".into()),
                group_limits: limits.clone(),
                limits,
                limits_debt_ns: most,
                device_debt_ns: most,
                limited_ns: most,
                ..ShareState::default()
            };
            for knobs in [iops(100, None), iops(1, Some(most)), iops(most, None)] {
                let flash = Some(("d", &crate::DeviceProfile::FLASH));
                let share = Host::default().share(flash, Some(("g", &knobs)), &knobs);
                share.continue_from(NEW, &state);
                share.note_waits(1, 1);
                let _ = share.force(NEW, &READ);
                assert!(share.figures().limited_ns <= 2 * MAX_SUM_NS + 1);
                let paid = share.paused_until(NEW).unwrap();
                assert!(paid <= NEW + 3 * MAX_DEBT_NS, "{paid}");
            }
        }
    }
}
