//! Interleaved rounds: the one loop of all measurements that compare systems.
//!
//! ```text
//!   rounds x rows x systems -> turns -> measure -> keep
//! ```
//! In: the number of rounds, and the number of systems of each row. Out: the figures of each turn,
//! or of each finished row. What must hold: a round measures the systems of a row one right after
//! the other, and each round begins with another system, so that a slow minute of the machine
//! affects all; an interruption ends the loop, and the figures of an interrupted turn are lost.

use anyhow::Result;

use crate::process::Stop;

/// The measurement of one system of one row in one round. All numbers begin with 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub round: u32,
    pub row: usize,
    pub system: usize,
}

pub struct Rounds {
    rounds: u32,
    /// Number of systems of each row.
    rows: Vec<usize>,
    stop: Stop,
}

impl Rounds {
    pub fn new(rounds: u32, rows: impl IntoIterator<Item = usize>, stop: &Stop) -> Self {
        Rounds { rounds, rows: rows.into_iter().collect(), stop: stop.clone() }
    }

    /// Returns all turns in their order.
    pub fn turns(&self) -> impl Iterator<Item = Turn> {
        let of_row = |round: u32, row: usize, systems: usize| {
            (0..systems).map(move |n| Turn { round, row, system: (n + round as usize) % systems })
        };
        (0..self.rounds).flat_map(move |round| {
            let rows = self.rows.iter().enumerate();
            rows.flat_map(move |(row, systems)| of_row(round, row, *systems))
        })
    }

    /// Measures all turns. `keep` gets the figures of a turn before the next one begins.
    pub fn run<T>(
        &self,
        mut measure: impl FnMut(Turn) -> Result<T>,
        mut keep: impl FnMut(Turn, T) -> Result<()>,
    ) -> Result<()> {
        for turn in self.turns() {
            self.stop.check()?;
            let figures = measure(turn);
            // The signal ends the processes of a turn, too. Their errors are no news then, and
            // their figures mean nothing.
            self.stop.check()?;
            keep(turn, figures?)?;
        }
        Ok(())
    }

    /// Measures all turns. `keep` gets the round, the row, and the figures of all systems of the
    /// row in the order of their turns, as soon as the last of them is measured. So an interrupted
    /// or failed run leaves only finished rounds of a row.
    pub fn run_whole<T>(
        &self,
        measure: impl FnMut(Turn) -> Result<T>,
        mut keep: impl FnMut(u32, usize, Vec<(usize, T)>) -> Result<()>,
    ) -> Result<()> {
        let mut row = Vec::new();
        self.run(measure, |turn, figures| {
            row.push((turn.system, figures));
            if row.len() == self.rows[turn.row] {
                keep(turn.round, turn.row, std::mem::take(&mut row))?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Interrupted;

    fn turn(round: u32, row: usize, system: usize) -> Turn {
        Turn { round, row, system }
    }

    #[test]
    fn a_round_measures_each_system_of_each_row_and_begins_with_another_one() {
        let turns: Vec<_> = Rounds::new(3, [3, 1], &Stop::default()).turns().collect();
        let all = [(0, [0, 1, 2]), (1, [1, 2, 0]), (2, [2, 0, 1])];
        let of_round = |(round, order): (u32, [usize; 3])| {
            order.map(|system| turn(round, 0, system)).into_iter().chain([turn(round, 1, 0)])
        };
        assert_eq!(turns, all.into_iter().flat_map(of_round).collect::<Vec<_>>());
        assert_eq!(Rounds::new(2, [0, 1], &Stop::default()).turns().count(), 2, "an empty row");
    }

    #[test]
    fn each_turn_is_kept_before_the_next_one_begins() {
        let log = std::cell::RefCell::new(Vec::new());
        let measure = |turn: Turn| {
            log.borrow_mut().push(format!("measure {}", turn.system));
            Ok(10 * turn.system)
        };
        let keep = |turn: Turn, figure| {
            log.borrow_mut().push(format!("keep {} {figure}", turn.system));
            Ok(())
        };
        Rounds::new(1, [2], &Stop::default()).run(measure, keep).unwrap();
        assert_eq!(log.into_inner(), ["measure 0", "keep 0 0", "measure 1", "keep 1 10"]);
    }

    /// A kept row: its round, and each system with its turn.
    type Kept = (u32, Vec<(usize, u32)>);

    /// Runs rounds of two systems. `measure` gets the number of the turn, from 1 on. Returns the
    /// result, and the kept rows.
    fn kept(stop: &Stop, measure: impl Fn(u32) -> Result<u32>) -> (Result<()>, Vec<Kept>) {
        let (mut turns, mut kept) = (0, Vec::new());
        let next = |_| {
            turns += 1;
            measure(turns)
        };
        let end = Rounds::new(3, [2], stop).run_whole(next, |round, row, figures| {
            assert_eq!(row, 0);
            kept.push((round, figures));
            Ok(())
        });
        (end, kept)
    }

    #[test]
    fn a_failure_leaves_the_finished_rounds() {
        let stop = Stop::default();
        let (end, rounds) = kept(&stop, Ok);
        end.unwrap();
        let all = [(0, vec![(0, 1), (1, 2)]), (1, vec![(1, 3), (0, 4)]), (2, vec![(0, 5), (1, 6)])];
        assert_eq!(rounds, all);
        let (end, rounds) = kept(&stop, |turn| {
            anyhow::ensure!(turn != 4, "no space");
            Ok(turn)
        });
        assert_eq!((end.unwrap_err().to_string().as_str(), &rounds[..]), ("no space", &all[..1]));
    }

    #[test]
    fn an_interruption_loses_the_turn_and_hides_its_error() {
        for fails in [false, true] {
            let stop = Stop::default();
            let (end, rounds) = kept(&stop, |turn| {
                if turn == 3 {
                    stop.request();
                    anyhow::ensure!(!fails, "the server has ended");
                }
                Ok(turn)
            });
            assert!(end.unwrap_err().is::<Interrupted>(), "fails: {fails}");
            assert_eq!(rounds, [(0, vec![(0, 1), (1, 2)])]);
            let (end, rounds) = kept(&stop, |turn| panic!("turn {turn} after the interruption"));
            assert!(end.unwrap_err().is::<Interrupted>() && rounds.is_empty());
        }
    }

    #[test]
    fn figures_that_cannot_be_kept_end_the_loop() {
        let rounds = Rounds::new(2, [1], &Stop::default());
        let mut turns = 0;
        let measure = |_| {
            turns += 1;
            Ok(())
        };
        let end = rounds.run(measure, |_, ()| anyhow::bail!("the disk is full"));
        assert_eq!((end.unwrap_err().to_string().as_str(), turns), ("the disk is full", 1));
    }
}
