//! Parsers for values of options and of configuration keys.
//!
//! In: a word of the command line, or a value of a TOML file. Out: a value in its range, or an
//! error message.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use blockyard_disk::Filter;
use blockyard_export::PollMode;
use blockyard_export::vhost_user::SecondClient;
use blockyard_export::xen::XenData;
use blockyard_image::{CacheMode, Format};
use blockyard_yard::Activation;
use clap::builder::{PossibleValue, TypedValueParser};
use serde::{Deserialize, Deserializer};

/// A parser for an option's value, with values for completion. It accepts what `parser` accepts,
/// which may be more than these values.
#[derive(Clone)]
struct Suggesting<P> {
    values: Vec<PossibleValue>,
    parser: P,
}

impl<P: TypedValueParser> TypedValueParser for Suggesting<P> {
    type Value = P::Value;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Self::Value, clap::Error> {
        self.parser.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.values.iter().cloned()))
    }
}

/// Returns `parser` with values for completion by shells.
pub fn suggest<P: TypedValueParser>(
    values: &'static [&'static str],
    parser: P,
) -> impl TypedValueParser<Value = P::Value> {
    Suggesting { values: values.iter().map(PossibleValue::new).collect(), parser }
}

/// Returns `parser` with values for completion by shells, and with a description of each for help.
pub fn explain<P: TypedValueParser>(
    values: &'static [(&'static str, &'static str)],
    parser: P,
) -> impl TypedValueParser<Value = P::Value> {
    let value = |(name, help): &(&'static str, &'static str)| PossibleValue::new(*name).help(*help);
    Suggesting { values: values.iter().map(value).collect(), parser }
}

/// Returns the path of a socket, if it fits into one line of a message.
pub fn plain(path: &str) -> Result<&str, String> {
    if path.contains(char::is_control) {
        return Err(format!("{path:?}: the path of a socket has no control characters"));
    }
    Ok(path)
}

/// Cache modes, for [`explain`].
pub const CACHE_MODES: &[(&str, &str)] = &[
    ("none", "O_DIRECT; flushes are honoured"),
    ("writeback", "page cache; flushes are honoured"),
    ("writethrough", "page cache; every write is durable"),
    ("directsync", "O_DIRECT; every write is durable"),
    ("unsafe", "page cache; flushes are ignored"),
];

/// Values of `--crash-safety`, for [`explain`].
pub const CRASH_SAFETY: &[(&str, &str)] = &[
    ("journal", "changed metadata are in a journal in memory that outlives the server"),
    ("flush", "changed metadata are durable before each answer; slow"),
    ("off", "answered writes that are not flushed may be lost"),
];

/// What happens to requests without space on the host, for [`explain`].
pub const ON_ENOSPC: &[(&str, &str)] = &[
    ("error", "the request fails"),
    ("pause", "the request waits until `blockyard ctl resume` (docs/operate.md)"),
];

/// Image formats, for [`explain`].
pub const FORMATS: &[(&str, &str)] = &[
    ("raw", "the bytes of the disk"),
    ("qcow2", "the format of QEMU"),
    ("cow", "the format of User Mode Linux"),
];

/// Ways to access the data of a guest of Xen, for [`explain`].
pub const XEN_DATA: &[(&str, &str)] = &[
    ("auto", "map if the guest uses the same pages again, else copy"),
    ("map", "the server maps the guest's pages"),
    ("copy", "the hypervisor copies the data"),
];

/// Treatments of a second front end, for [`explain`].
pub const SECOND_CLIENT: &[(&str, &str)] = &[
    ("wait", "it waits until the first one disconnects"),
    ("refuse", "the server closes its connection"),
];

/// When the image is open, for [`explain`].
pub const ACTIVATION: &[(&str, &str)] = &[
    ("start", "from the start of the server"),
    ("rings", "while rings of the guest run, for live migration"),
];

/// The N of /dev/ublkbN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UblkNumber {
    Any,
    Number(u32),
}

/// A list of processors.
#[derive(Clone, Debug, PartialEq)]
pub struct Cpus(pub Vec<usize>);

/// Parses numbers and ranges, in the format of taskset(1).
pub fn parse_cpus(s: &str) -> Result<Cpus, String> {
    numbers(s)
        .ok_or_else(|| "a list of processors is numbers and ranges, such as 0,2-3".into())
        .map(Cpus)
}

/// Numbers of reactors.
#[derive(Clone, Debug, PartialEq)]
pub struct ReactorList(pub Vec<usize>);

/// Parses numbers and ranges, in the same format as a list of processors.
pub fn parse_reactor_list(s: &str) -> Result<ReactorList, String> {
    let bad = || "a list of reactors is numbers from 0 on and ranges, such as 0,2-3".into();
    numbers(s).ok_or_else(bad).map(ReactorList)
}

fn numbers(s: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in s.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?;
        if range.is_empty() || *range.end() > 4095 {
            return None;
        }
        numbers.extend(range);
    }
    Some(numbers)
}

pub fn one() -> u16 {
    1
}

/// Returns a duration of `seconds`, which must be from 0 to 86400.
pub fn of_seconds(seconds: f64) -> Result<Duration, String> {
    if !(0.0..=86400.0).contains(&seconds) {
        return Err("a number of seconds from 0 to 86400".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

pub fn parse_seconds(s: &str) -> Result<Duration, String> {
    of_seconds(s.parse().unwrap_or(-1.0))
}

/// Parses the longest time of a wait, or the time between two samples. 0 would mean no time at all.
pub fn parse_limit(s: &str) -> Result<Duration, String> {
    let limit = parse_seconds(s).ok().filter(|limit| !limit.is_zero());
    limit.ok_or_else(|| "a number of seconds above 0, at most 86400".into())
}

pub fn parse_text<T: FromStr<Err: std::fmt::Display>>(s: &str) -> Result<T, String> {
    s.parse().map_err(|e: T::Err| e.to_string())
}

pub fn parse_cache(s: &str) -> Result<CacheMode, blockyard_image::UnknownCacheMode> {
    s.parse()
}

pub fn parse_xen_data(s: &str) -> Result<XenData, blockyard_export::xen::XenNameError> {
    s.parse()
}

pub fn parse_format(s: &str) -> Result<Format, blockyard_image::UnknownFormat> {
    s.parse()
}

pub fn parse_ublk(s: &str) -> Result<UblkNumber, String> {
    if s == "any" {
        return Ok(UblkNumber::Any);
    }
    // The driver uses 20-bit minor numbers.
    let number = s.parse().ok().filter(|n| *n < 1 << 20).map(UblkNumber::Number);
    number.ok_or_else(|| {
        format!("\"{s}\": the number of a ublk device is the N of /dev/ublkbN, 0 to 1048575")
    })
}

pub fn parse_reactors(s: &str) -> Result<u16, String> {
    let number = s.parse().ok().filter(|n| (1..=256).contains(n));
    number.ok_or_else(|| format!("\"{s}\": a number of reactors is from 1 to 256"))
}

/// Parses an address of the host itself. Other hosts must not reach it, because nothing checks who
/// reads there.
pub fn parse_loopback(s: &str) -> Result<SocketAddr, String> {
    let named = s.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    let address: SocketAddr = named.as_deref().unwrap_or(s).parse().map_err(|_| {
        format!("\"{s}\": it is ADDRESS:PORT, such as 127.0.0.1:9184 or [::1]:9184")
    })?;
    if address.ip().is_loopback() {
        return Ok(address);
    }
    Err(format!(
        "{} is no loopback address, and everyone who reaches it could read there: use \
         127.0.0.1:{port} or [::1]:{port}, and forward it by SSH or by a proxy that checks clients",
        address.ip(),
        port = address.port()
    ))
}

pub fn parse_queues(s: &str) -> Result<u16, String> {
    let number = s.parse().ok().filter(|n| (1..=256).contains(n));
    number.ok_or_else(|| format!("\"{s}\": a number of queues is from 1 to 256"))
}

pub fn parse_size(s: &str) -> Result<u64, String> {
    blockyard_sched::parse_size(s).ok_or_else(|| {
        "a size is a number of bytes without a sign, with an optional suffix k, M, G or T".into()
    })
}

pub fn parse_queue_size(s: &str) -> Result<u16, String> {
    let size = s.parse().ok().filter(|n: &u16| n.is_power_of_two() && (4..=32768).contains(n));
    size.ok_or_else(|| format!("\"{s}\": a queue size is a power of two from 4 to 32768"))
}

pub fn parse_second_client(s: &str) -> Result<SecondClient, String> {
    match s {
        "wait" => Ok(SecondClient::Wait),
        "refuse" => Ok(SecondClient::Refuse),
        _ => Err("it must be wait or refuse".into()),
    }
}

pub fn parse_activation(s: &str) -> Result<Activation, String> {
    match s {
        "start" => Ok(Activation::Start),
        "rings" => Ok(Activation::Rings),
        _ => Err("it must be start or rings".into()),
    }
}

pub fn parse_poll(s: &str) -> Result<PollMode, String> {
    match s {
        "auto" => Ok(PollMode::Auto),
        "off" => Ok(PollMode::Off),
        _ => microseconds(s, "poll").map(PollMode::Fixed),
    }
}

fn microseconds(s: &str, what: &str) -> Result<Duration, String> {
    let time = s.parse().ok().filter(|us| *us <= 100_000).map(Duration::from_micros);
    time.ok_or_else(|| format!("{what} is auto, off, or microseconds from 0 to 100000"))
}

/// Deserializes a number of seconds.
pub fn seconds<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
    of_seconds(f64::deserialize(d)?).map_err(serde::de::Error::custom)
}

pub fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(
    d: D,
) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
}

/// Deserializes an optional key from a text.
pub fn some_from_text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(
    d: D,
) -> Result<Option<T>, D::Error> {
    from_text(d).map(Some)
}

/// Deserializes a number of bytes, or a text with a suffix.
pub fn size<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    parsed(d, parse_size).map(Some)
}

pub fn filters<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Filter>, D::Error> {
    let texts = Vec::<String>::deserialize(d)?;
    texts.iter().map(|t| t.parse().map_err(serde::de::Error::custom)).collect()
}

/// Deserializes a text or a number with the parser of the command line option.
pub fn parsed<'de, D: Deserializer<'de>, T>(
    d: D,
    parse: fn(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "it must be a number or a text")]
    enum Value {
        Word(String),
        Number(i64),
        // No key accepts a fraction. It is parsed here so that the option's parser returns its own
        // message.
        Fraction(f64),
    }
    let text = match Value::deserialize(d)? {
        Value::Word(word) => word,
        Value::Number(number) => number.to_string(),
        Value::Fraction(number) => number.to_string(),
    };
    parse(&text).map_err(serde::de::Error::custom)
}

/// Deserializes `true` (any number), `false` (no device) or the number of a device.
pub fn ublk<'de, D: Deserializer<'de>>(d: D) -> Result<Option<UblkNumber>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "it must be true, false, or the N of /dev/ublkbN")]
    enum Value {
        Wanted(bool),
        Number(u32),
    }
    match Value::deserialize(d)? {
        Value::Wanted(wanted) => Ok(wanted.then_some(UblkNumber::Any)),
        Value::Number(number) => {
            parse_ublk(&number.to_string()).map(Some).map_err(serde::de::Error::custom)
        }
    }
}

pub fn queues<'de, D: Deserializer<'de>>(d: D) -> Result<u16, D::Error> {
    parsed(d, parse_queues)
}

pub fn queue_size<'de, D: Deserializer<'de>>(d: D) -> Result<u16, D::Error> {
    parsed(d, parse_queue_size)
}

pub fn reactors<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u16>, D::Error> {
    parsed(d, parse_reactors).map(Some)
}

pub fn reactor_list<'de, D: Deserializer<'de>>(d: D) -> Result<Option<ReactorList>, D::Error> {
    parsed(d, parse_reactor_list).map(Some)
}

pub fn loopback<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
    parsed(d, parse_loopback).map(Some)
}

pub fn second_client<'de, D: Deserializer<'de>>(d: D) -> Result<SecondClient, D::Error> {
    parsed(d, parse_second_client)
}

pub fn activation<'de, D: Deserializer<'de>>(d: D) -> Result<Activation, D::Error> {
    parsed(d, parse_activation)
}

pub fn poll<'de, D: Deserializer<'de>>(d: D) -> Result<PollMode, D::Error> {
    parsed(d, parse_poll)
}
