//! What an operator sets for a disk or for a group of disks.

use std::str::FromStr;
use std::time::Duration;

/// All knobs. The defaults set no limit and no reservation, and give all disks the same weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    /// Weight of the disk's share of the device, 1 to 10000. Shares are in proportion to weights.
    pub weight: u32,
    /// Operations a second that the disk is guaranteed, before shares apply.
    pub reserve_iops: Option<u64>,
    /// Bytes a second that the disk is guaranteed, before shares apply.
    pub reserve_bps: Option<u64>,
    pub limits: Limits,
    /// Mean service time that the disk must get while it stays within its share, even at the cost
    /// of its neighbours' shares.
    pub latency_target: Option<Duration>,
}

impl Knobs {
    /// Default weight.
    pub const WEIGHT: u32 = 100;
    /// Largest weight.
    pub const MAX_WEIGHT: u32 = 10_000;
}

impl Default for Knobs {
    fn default() -> Self {
        let (reserve_iops, reserve_bps, limits, latency_target) = Default::default();
        Knobs { weight: Knobs::WEIGHT, reserve_iops, reserve_bps, limits, latency_target }
    }
}

/// Limits in operations or bytes a second. None: no limit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    pub iops: Option<Limit>,
    pub iops_read: Option<Limit>,
    pub iops_write: Option<Limit>,
    pub bps: Option<Limit>,
    pub bps_read: Option<Limit>,
    pub bps_write: Option<Limit>,
}

/// A sustained rate, and optionally a burst of `max` for `length` after a time of lower use. Text
/// form: `1000`, `1000,max=5000,length=10` (seconds), with suffixes k, M, G, T (powers of 1024; see
/// [`parse_rate`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    pub rate: u64,
    pub max: Option<u64>,
    pub length: Duration,
}

/// Error in the text form of a limit.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum KnobError {
    #[error(
        "limit \"{0}\": it is RATE[,max=RATE[,length=SECONDS]], such as 1000 or \
         1000,max=5000,length=10; a RATE is a whole number up to 2^50, with an optional suffix k, M, \
         G or T"
    )]
    Form(String),
    #[error("limit \"{0}\": {1}")]
    Value(String, &'static str),
}

impl Limit {
    /// Returns a limit without a burst.
    pub fn of(rate: u64) -> Self {
        Limit { rate, max: None, length: Duration::from_secs(1) }
    }
}

impl FromStr for Limit {
    type Err = KnobError;

    fn from_str(text: &str) -> Result<Self, KnobError> {
        let form = || KnobError::Form(text.to_string());
        let bad = |why| KnobError::Value(text.to_string(), why);
        let mut parts = text.split(',');
        let mut limit = Limit::of(parts.next().and_then(parse_rate).ok_or_else(form)?);
        let mut length = None;
        for part in parts {
            match part.split_once('=').ok_or_else(form)? {
                ("max", value) => limit.max = Some(parse_rate(value).ok_or_else(form)?),
                ("length", value) => length = Some(value.parse::<f64>().map_err(|_| form())?),
                _ => return Err(form()),
            }
        }
        if limit.rate == 0 {
            return Err(bad("a rate is at least 1"));
        }
        if limit.max.is_some_and(|max| max < limit.rate) {
            return Err(bad("max is less than the rate"));
        }
        if let Some(seconds) = length {
            if limit.max.is_none() {
                return Err(bad("length says for how long max may last, and there is no max"));
            }
            if !(0.001..=86_400.0).contains(&seconds) {
                return Err(bad("length is from 0.001 to 86400 seconds"));
            }
            limit.length = Duration::from_secs_f64(seconds);
        }
        Ok(limit)
    }
}

/// Parses a rate: [`parse_size`], at most 2^50.
pub fn parse_rate(text: &str) -> Option<u64> {
    parse_size(text).filter(|rate| *rate <= 1 << 50)
}

/// Parses a number with an optional suffix (powers of 1024). Returns None if it is no such number.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    // A sign would look like a difference.
    let number = digits.parse::<u64>().ok().filter(|_| digits.starts_with(|c: char| c != '+'))?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms() {
        assert_eq!("1000".parse(), Ok(Limit::of(1000)));
        let burst =
            Limit { rate: 50 << 20, max: Some(200 << 20), length: Duration::from_millis(2500) };
        assert_eq!("50M,max=200M,length=2.5".parse(), Ok(burst));
        for (text, bytes) in [
            ("5T", 5 << 40),
            ("1024T", 1 << 50),
            ("5t", 5 << 40),
            ("7KiB", 7 << 10),
            ("7MiB", 7 << 20),
            ("7GiB", 7 << 30),
            ("9B", 9),
        ] {
            assert_eq!(text.parse(), Ok(Limit::of(bytes)), "{text}");
        }
        for bad in [
            "1.5",
            "1.5M",
            "-5",
            "+5",
            "5P",
            "1125899906842625",
            "",
            "x",
            "0",
            "10,max=5",
            "10,length=5",
            "10,max=20,length=0",
            "10,max=20,length=x",
            "10,most=20",
        ] {
            assert!(bad.parse::<Limit>().is_err(), "{bad}");
        }
    }
}
