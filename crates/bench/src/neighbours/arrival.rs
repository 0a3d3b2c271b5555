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
/// arrival. The window is one step, or as many as [`FEWEST`] needs. If there is no such window, the
/// result is the whole time: the true one is longer.
fn time(steps: &[u64], share: f64) -> f64 {
    let in_step = share * STEP as f64 / 1e9;
    let window = (FEWEST / in_step).ceil().max(1.0) as usize;
    let enough = ENOUGH * in_step * window as f64;
    let served = |steps: &[u64]| steps.iter().sum::<u64>() as f64 >= enough;
    let end = steps.windows(window).position(served).map_or(steps.len(), |at| at + window);
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
        assert_eq!(time(&[0, 10, 79, 80, 100], 10_000.0), 40.0);
        assert_eq!(time(&[100, 0, 0], 10_000.0), 10.0);
        assert_eq!(time(&[79; 5], 10_000.0), 50.0, "never: the whole time");
        // A share of 300 a second gives 3 operations in a step, and 12 in four steps.
        assert_eq!(time(&[0, 0, 9, 0, 0, 3, 3, 3], 300.0), 60.0);
        assert_eq!(time(&[3; 4], 300.0), 40.0, "not before the end of a window");
        assert_eq!(time(&[3; 3], 300.0), 30.0, "no window fits");
        assert_eq!((time(&[1; 3], 0.0), time(&[1; 3], f64::NAN)), (30.0, 30.0));
    }

    #[test]
    fn each_pause_ends_with_an_arrival() {
        let work = 5 * STEP;
        let options = LoadOptions {
            pauses: Some(Pauses { work, pause: 3 * work }),
            ..LoadOptions::for_socket("s".into())
        };
        let mut tally = Tally::new().unwrap();
        tally.steps = vec![100, 100, 100, 100, 100, 0, 0, 100, 100, 100];
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
