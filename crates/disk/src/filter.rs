//! Filters: delays and errors that a user can inject into any disk, to test guests and their
//! software.

use std::cell::Cell;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use crate::statistics::OpKind;

/// A filter. Text forms, as `--filter` takes them: `delay:read=500us,write=2ms,flush=10ms` and
/// `error:read=0.01,write=1,range=1048576-2097152`. Times have a unit (us, ms, s). Ranges are in
/// bytes, with the end excluded.
#[derive(Clone, Debug, PartialEq)]
pub enum Filter {
    /// Delays each request by the time of the request's kind.
    Delay { times: [Duration; 5] },
    /// Fails requests that touch the range with an I/O error, with the probability (0 to 1) of the
    /// request's kind.
    Error { odds: [f64; 5], range: Range<u64> },
}

/// Error in the text form of a filter.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum FilterError {
    #[error(
        "filter \"{0}\" is not known: use delay:KIND=TIME,... or error:KIND=PROBABILITY,...\
         [,range=START-END]"
    )]
    Unknown(String),
    #[error("filter value \"{0}\": {1}")]
    Value(String, &'static str),
}

impl Filter {
    /// Returns the delay of requests of this kind, if the filter delays them.
    pub fn delay(&self, kind: OpKind) -> Option<Duration> {
        match self {
            Filter::Delay { times } => Some(times[kind as usize]).filter(|t| !t.is_zero()),
            Filter::Error { .. } => None,
        }
    }

    /// Returns whether this request must fail. `dice`: source of random numbers.
    pub fn fails(&self, kind: OpKind, offset: u64, len: u64, dice: &Dice) -> bool {
        let Filter::Error { odds, range } = self else { return false };
        let odds = odds[kind as usize];
        let touches = kind == OpKind::Flush
            || (offset < range.end && range.start < offset.saturating_add(len));
        odds > 0.0 && touches && dice.roll() < odds
    }
}

impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(s: &str) -> Result<Self, FilterError> {
        let unknown = || FilterError::Unknown(s.to_string());
        let (name, rest) = s.split_once(':').ok_or_else(unknown)?;
        let pairs = rest.split(',').map(|pair| pair.split_once('=').ok_or_else(unknown));
        let (mut times, mut odds, mut range) = ([Duration::ZERO; 5], [0.0; 5], 0..u64::MAX);
        for pair in pairs {
            let (key, value) = pair?;
            let kind = OpKind::ALL.into_iter().find(|k| k.name() == key);
            match (name, kind, key) {
                ("delay", Some(kind), _) => times[kind as usize] = time(value)?,
                ("error", Some(kind), _) => odds[kind as usize] = parse_odds(value)?,
                ("error", None, "range") => range = parse_range(value)?,
                _ => return Err(unknown()),
            }
        }
        match name {
            "delay" => Ok(Filter::Delay { times }),
            "error" => Ok(Filter::Error { odds, range }),
            _ => Err(unknown()),
        }
    }
}

pub(crate) const TIME_FORM: &str = "a time is a number and a unit: us, ms or s; at most a day";
pub(crate) const MOST_TIME: Duration = Duration::from_secs(24 * 3600);

/// Parses a time: a number and a unit. Returns None if it is malformed or more than a day.
pub fn parse_time(s: &str) -> Option<Duration> {
    let unit = s.find(|c: char| c.is_ascii_alphabetic())?;
    let number: f64 = s[..unit].parse().ok()?;
    let scale = match &s[unit..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number * scale).ok().filter(|time| *time <= MOST_TIME)
}

fn time(s: &str) -> Result<Duration, FilterError> {
    parse_time(s).ok_or_else(|| FilterError::Value(s.to_string(), TIME_FORM))
}

fn parse_odds(s: &str) -> Result<f64, FilterError> {
    let bad = || FilterError::Value(s.to_string(), "a probability is a number from 0 to 1");
    s.parse::<f64>().ok().filter(|p| (0.0..=1.0).contains(p)).ok_or_else(bad)
}

fn parse_range(s: &str) -> Result<Range<u64>, FilterError> {
    let bad =
        || FilterError::Value(s.to_string(), "a range is START-END in bytes, the end excluded");
    let (start, end) = s.split_once('-').ok_or_else(bad)?;
    let range = start.parse().map_err(|_| bad())?..end.parse().map_err(|_| bad())?;
    if range.is_empty() { Err(bad()) } else { Ok(range) }
}

/// A cheap, repeatable random number generator (xorshift64*, Vigna 2016).
#[derive(Debug)]
pub struct Dice(Cell<u64>);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(Cell::new(seed | 1))
    }

    /// Returns a random number in 0..1.
    pub(crate) fn roll(&self) -> f64 {
        let mut x = self.0.get();
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.0.set(x);
        (x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms() {
        let delay: Filter = "delay:read=500us,flush=1.5ms".parse().unwrap();
        assert_eq!(delay.delay(OpKind::Read), Some(Duration::from_micros(500)));
        assert_eq!(delay.delay(OpKind::Flush), Some(Duration::from_micros(1500)));
        assert_eq!(delay.delay(OpKind::Write), None);
        for bad in [
            "",
            "delay",
            "slow:read=1ms",
            "delay:read=5",
            "delay:read=1e19s",
            "delay:raed=1ms",
            "error:read=2",
            "error:range=5-5",
        ] {
            assert!(bad.parse::<Filter>().is_err(), "{bad}");
        }
    }

    #[test]
    fn errors_occur_in_their_range_at_their_rate() {
        let filter: Filter = "error:read=0.25,range=1000-2000".parse().unwrap();
        let dice = Dice::new(7);
        let fails =
            |offset| (0..10_000).filter(|_| filter.fails(OpKind::Read, offset, 100, &dice)).count();
        assert_eq!((fails(900), fails(2000)), (0, 0));
        assert!((2300..2700).contains(&fails(1999)));
        assert!(!filter.fails(OpKind::Write, 1000, 100, &dice));
    }
}
