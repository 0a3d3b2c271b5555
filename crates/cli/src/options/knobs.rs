//! The knobs: weight, reservations, limits and latency target of a disk or of a group of disks.
//!
//! In: options, or keys of a `[[disk]]` or `[group.NAME]` table. Out: [`Knobs`]. They are separate
//! from other options because they change without closing the disk. What must hold: disks and
//! groups have the same knobs, on the command line and in the file.

use std::time::Duration;

use blockyard_disk::parse_time;
use blockyard_sched::{Knobs, Limit, parse_rate};
use serde::{Deserialize, Deserializer};

use super::values::parsed;

/// Defines a struct of options with the knobs as additional fields. (With an inner struct and
/// serde's `flatten`, errors in a file would lose their line number.)
macro_rules! with_knobs {
    ($(#[$meta:meta])* pub struct $name:ident { $($fields:tt)* }) => {
        $(#[$meta])*
        pub struct $name {
            $($fields)*

            /// Share of the device relative to other disks: 1 to 10000.
            #[arg(long, default_value_t = 100, value_name = "N", help_heading = "Share and limits",
                value_parser = crate::options::knobs::parse_weight)]
            #[serde(default = "crate::options::knobs::default_weight",
                deserialize_with = "crate::options::knobs::weight")]
            pub weight: u32,

            /// Requests per second that the disk gets regardless of its share.
            #[arg(long, value_name = "RATE", value_parser = crate::options::knobs::parse_reserve,
                help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::reserve")]
            pub reserve_iops: Option<u64>,

            /// Bytes per second that the disk gets regardless of its share (suffixes k, M, G, T).
            #[arg(long, value_name = "RATE", value_parser = crate::options::knobs::parse_reserve,
                help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::reserve")]
            pub reserve_bps: Option<u64>,

            /// Maximum requests per second: RATE, or RATE,max=RATE,length=SECONDS.
            ///
            /// max allows a burst at this rate for length seconds, after the disk was below RATE.
            /// Suffixes k, M, G, T are powers of 1024.
            #[arg(long, value_name = "LIMIT", help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::limit")]
            pub iops: Option<blockyard_sched::Limit>,

            /// Maximum reads per second.
            #[arg(long, value_name = "LIMIT", help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::limit")]
            pub iops_read: Option<blockyard_sched::Limit>,

            /// Maximum writes per second.
            #[arg(long, value_name = "LIMIT", help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::limit")]
            pub iops_write: Option<blockyard_sched::Limit>,

            /// Maximum bytes per second (suffixes k, M, G, T).
            #[arg(long, value_name = "LIMIT", help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::limit")]
            pub bps: Option<blockyard_sched::Limit>,

            /// Maximum bytes read per second.
            #[arg(long, value_name = "LIMIT", help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::limit")]
            pub bps_read: Option<blockyard_sched::Limit>,

            /// Maximum bytes written per second.
            #[arg(long, value_name = "LIMIT", help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::limit")]
            pub bps_write: Option<blockyard_sched::Limit>,

            /// Target for the mean service time, such as 2ms (units us, ms, s).
            ///
            /// If a disk uses no more than its own share and misses the target, the server reduces
            /// the shares of the other disks.
            #[arg(long, value_name = "TIME", value_parser = crate::options::knobs::parse_target,
                help_heading = "Share and limits")]
            #[serde(default, deserialize_with = "crate::options::knobs::target")]
            pub latency_target: Option<std::time::Duration>,
        }

        impl $name {
            pub fn knobs(&self) -> blockyard_sched::Knobs {
                blockyard_sched::Knobs {
                    weight: self.weight,
                    reserve_iops: self.reserve_iops,
                    reserve_bps: self.reserve_bps,
                    limits: blockyard_sched::Limits {
                        iops: self.iops,
                        iops_read: self.iops_read,
                        iops_write: self.iops_write,
                        bps: self.bps,
                        bps_read: self.bps_read,
                        bps_write: self.bps_write,
                    },
                    latency_target: self.latency_target,
                }
            }
        }
    };
}
pub(crate) use with_knobs;

pub fn default_weight() -> u32 {
    Knobs::WEIGHT
}

pub fn parse_weight(text: &str) -> Result<u32, String> {
    let weight = text.parse().ok().filter(|weight| (1..=Knobs::MAX_WEIGHT).contains(weight));
    weight.ok_or_else(|| format!("a weight is a number from 1 to {}", Knobs::MAX_WEIGHT))
}

pub fn parse_reserve(text: &str) -> Result<u64, String> {
    let rate = parse_rate(text).filter(|rate| *rate > 0);
    rate.ok_or_else(|| {
        format!("\"{text}\": a rate is a number from 1, with an optional suffix k, M, G or T")
    })
}

pub fn parse_target(text: &str) -> Result<Duration, String> {
    let time = parse_time(text).filter(|time| !time.is_zero() && *time <= Duration::from_secs(60));
    time.ok_or_else(|| {
        format!("\"{text}\": a latency target is a number and a unit (us, ms or s), up to 60s")
    })
}

fn parse_limit(text: &str) -> Result<Limit, String> {
    text.parse().map_err(|e: blockyard_sched::KnobError| e.to_string())
}

pub fn weight<'de, D: Deserializer<'de>>(d: D) -> Result<u32, D::Error> {
    parsed(d, parse_weight)
}

pub fn reserve<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    parsed(d, parse_reserve).map(Some)
}

pub fn target<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    parsed(d, parse_target).map(Some)
}

pub fn limit<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Limit>, D::Error> {
    parsed(d, parse_limit).map(Some)
}

/// Returns an error if a reservation is larger than the limit of the same kind.
pub fn check(knobs: &Knobs) -> Result<(), String> {
    let limits = &knobs.limits;
    for (key, reserve, limit) in
        [("iops", knobs.reserve_iops, limits.iops), ("bps", knobs.reserve_bps, limits.bps)]
    {
        if let (Some(reserve), Some(limit)) = (reserve, limit)
            && reserve > limit.rate
        {
            return Err(format!(
                "reserve-{key} is {reserve}, more than the limit {key} of {} allows",
                limit.rate
            ));
        }
    }
    Ok(())
}

with_knobs! {
/// A group of disks: the `[group.NAME]` table of the configuration file. There are no options for
/// groups.
#[derive(clap::Args, Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct GroupArgs {}
}
