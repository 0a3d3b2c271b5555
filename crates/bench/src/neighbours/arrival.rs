//! The time until a disk that arrives beside a busy thrasher gets its share.
//!
//! In: the completions of the disk in steps, from its first operation on. Out: milliseconds.

use crate::client::load::STEP;
use crate::client::report::Report;

/// Part of its share with which a disk counts as served.
const ENOUGH: f64 = 0.8;
/// Number of operations that the share must give in a window. A shorter window would measure the
/// distance of single operations.
const FEWEST: f64 = 10.0;
/// Number of steps after the window in which the disk must keep its share, on average. A burst of
/// one window is no share.
const KEPT: usize = 10;

/// Returns the time in milliseconds of each arrival until the disk gets its share, in operations a
/// second. A disk with pauses arrives after each pause.
pub fn times(report: &Report, share: f64) -> Vec<f64> {
    let each = match report.options.pauses {
        Some(pauses) => (pauses.work / STEP) as usize,
        None => report.steps.len(),
    };
    report.steps.chunks(each.max(1)).map(|steps| time(steps, share)).collect()
}

/// Returns the end of the first window in which the disk gets enough, in milliseconds since its
/// arrival. The window is one step, or as many as [`FEWEST`] needs. In the [`KEPT`] steps after the
/// window, or as many as it has, the disk must get enough, too. If there is no such window, the
/// result is the whole time: the true one may be longer.
fn time(steps: &[u64], share: f64) -> f64 {
    let in_step = share * STEP as f64 / 1e9;
    let window = (FEWEST / in_step).ceil().max(1.0) as usize;
    let kept = window.max(KEPT);
    let enough =
        |steps: &[u64]| steps.iter().sum::<u64>() as f64 >= ENOUGH * in_step * steps.len() as f64;
    let served = |steps: &[u64]| enough(&steps[..window]) && enough(&steps[window..]);
    let at = steps.windows(window.saturating_add(kept)).position(served);
    let end = at.map_or(steps.len(), |at| at + window);
    end as f64 * STEP as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::LoadOptions;
    use crate::client::cpu::{BackEnd, Meter};
    use crate::client::load::Tally;
    use crate::client::report::Target;
    use crate::client::workload::Pauses;

    #[test]
    fn a_disk_is_served_at_the_end_of_the_window_with_four_fifths_of_its_share() {
        // A share of 10,000 a second gives 100 operations in a step.
        let then = |first: &[u64], each: u64, count: usize| [first, &vec![each; count]].concat();
        assert_eq!(time(&then(&[0, 10, 79, 80], 100, 10), 10_000.0), 40.0);
        assert_eq!(time(&[79; 20], 10_000.0), 200.0, "never: the whole time");
        // A share of 300 a second gives 3 operations in a step, and 12 in four steps.
        assert_eq!(time(&then(&[0, 0, 9, 0, 0], 3, 13), 300.0), 60.0);
        assert_eq!(time(&[3; 14], 300.0), 40.0, "not before the end of a window");
        assert_eq!(time(&[3; 13], 300.0), 130.0, "no window fits");
        assert_eq!((time(&[1; 3], 0.0), time(&[1; 3], f64::NAN)), (30.0, 30.0));
    }

    #[test]
    fn a_burst_is_no_share() {
        let burst = |rest: [u64; 10]| [&[100], &rest[..], &[100; 11]].concat();
        assert_eq!(time(&burst([80; 10]), 10_000.0), 10.0);
        // On average: a slow step among fast ones counts as kept.
        assert_eq!(time(&burst([0, 100, 100, 100, 100, 100, 100, 100, 100, 0]), 10_000.0), 10.0);
        assert_eq!(time(&burst([0; 10]), 10_000.0), 120.0);
        assert_eq!(time(&[0, 0, 100, 100], 10_000.0), 40.0, "too late to see whether it lasts");
    }

    #[test]
    fn each_pause_ends_with_an_arrival() {
        let work = 15 * STEP;
        let options = LoadOptions {
            pauses: Some(Pauses { work, pause: 3 * work }),
            ..LoadOptions::for_socket("s".into())
        };
        let mut tally = Tally::new().unwrap();
        tally.steps = vec![100; 30];
        tally.steps[15..17].fill(0);
        let meter = Meter::new(BackEnd::Unknown).unwrap();
        let report =
            |options: &LoadOptions| Report::new(options, Target::default(), &tally, &meter, 0);
        assert_eq!(times(&report(&options), 10_000.0), [10.0, 30.0]);
        let without = LoadOptions { pauses: None, ..options };
        assert_eq!(times(&report(&without), 10_000.0), [10.0]);
        tally.steps.clear();
        let report = Report::new(&without, Target::default(), &tally, &meter, 0);
        assert!(times(&report, 10_000.0).is_empty());
    }
}
