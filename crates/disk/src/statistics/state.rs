//! Statistics as data for the next server.

use std::collections::BTreeMap;

use blockyard_ring::WriteFigures;
use blockyard_storage::LookupFigures;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::latencies::{Latencies, LatenciesState};
use super::{Counts, KindStatistics, OpKind, Statistics};
use crate::carried::MAX_COUNT;

/// [`Statistics`] as data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct StatisticsState {
    /// By the names of the kinds.
    kinds: BTreeMap<String, KindState>,
    // See `WriteFigures`.
    inline: u64,
    blocked: u64,
    left: u64,
    noted: u64,
    refused: u64,
    off: u64,
    paced: u64,
    // See `LookupFigures`.
    hits: u64,
    misses: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
struct KindState {
    requests: u64,
    merged: u64,
    errors: u64,
    bytes: u64,
    queue: LatenciesState,
    service: LatenciesState,
    /// Values of the histograms in nanoseconds, and how often each occurred.
    queue_values: Vec<(u64, u64)>,
    service_values: Vec<(u64, u64)>,
}

impl From<&Statistics> for StatisticsState {
    fn from(from: &Statistics) -> Self {
        let WriteFigures { inline, blocked, left, noted, refused, off, paced, .. } = from.writes;
        let LookupFigures { hits, misses } = from.lookups;
        let kind = |kind: OpKind| {
            let state = KindState::from(&**from.kinds[kind as usize].as_ref()?);
            Some((kind.name().to_string(), state))
        };
        let kinds = OpKind::ALL.into_iter().filter_map(kind).collect();
        StatisticsState { kinds, inline, blocked, left, noted, refused, off, paced, hits, misses }
    }
}

impl From<&StatisticsState> for Statistics {
    fn from(from: &StatisticsState) -> Self {
        let most = |count: u64| count.min(MAX_COUNT);
        let kind =
            |kind: OpKind| Some(Box::new(KindStatistics::from(from.kinds.get(kind.name())?)));
        Statistics {
            kinds: OpKind::ALL.map(kind),
            writes: WriteFigures {
                inline: most(from.inline),
                blocked: most(from.blocked),
                left: most(from.left),
                noted: most(from.noted),
                refused: most(from.refused),
                off: most(from.off),
                paced: most(from.paced),
                // Times of this machine's clock that another process has seen are not carried.
                last_blocked: None,
                last_paced: None,
            },
            lookups: LookupFigures { hits: most(from.hits), misses: most(from.misses) },
        }
    }
}

impl From<&KindStatistics> for KindState {
    fn from(from: &KindStatistics) -> Self {
        let Counts { requests, merged, errors, bytes, queue, service } = &from.counts;
        let values = |histogram: &Histogram<u64>| {
            let recorded = histogram.iter_recorded();
            recorded.map(|v| (v.value_iterated_to(), v.count_at_value())).collect()
        };
        KindState {
            requests: *requests,
            merged: *merged,
            errors: *errors,
            bytes: *bytes,
            queue: queue.into(),
            service: service.into(),
            queue_values: values(&from.queue),
            service_values: values(&from.service),
        }
    }
}

impl From<&KindState> for KindStatistics {
    fn from(from: &KindState) -> Self {
        let mut new = KindStatistics::new();
        let most = |count: u64| count.min(MAX_COUNT);
        new.counts = Counts {
            requests: most(from.requests),
            merged: most(from.merged),
            errors: most(from.errors),
            bytes: most(from.bytes),
            queue: Latencies::from(&from.queue),
            service: Latencies::from(&from.service),
        };
        from.queue_values.iter().for_each(|(v, n)| new.queue.saturating_record_n(*v, most(*n)));
        from.service_values.iter().for_each(|(v, n)| new.service.saturating_record_n(*v, most(*n)));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Op;
    use std::time::Duration;

    fn some() -> Statistics {
        let mut statistics = Statistics::default();
        for us in 1..300 {
            let (queue, service) = (Duration::from_micros(us), Duration::from_micros(us * us));
            statistics.record(Op::Read, 4096, queue, service, us % 7 > 0);
            statistics.record(Op::Flush, 0, queue, service, true);
        }
        statistics.record_merged(Op::Read, 5);
        statistics.record_refused(Op::Discard);
        statistics.writes.paced = 7;
        statistics.lookups.misses = 8;
        statistics
    }

    fn parsed(text: &str) -> Statistics {
        (&serde_json::from_str::<StatisticsState>(text).unwrap()).into()
    }

    #[test]
    fn statistics_are_the_same_after_a_hand_over() {
        let before = some();
        let text = serde_json::to_string(&StatisticsState::from(&before)).unwrap();
        let mut after = parsed(&text);
        assert_eq!(after.counts(), before.counts());
        for kind in OpKind::ALL {
            assert_eq!(after.summary(kind), before.summary(kind), "{kind:?}");
        }
        after.merge(&before);
        let reads = after.summary(OpKind::Read).unwrap();
        assert_eq!((reads.requests, reads.merged), (598, 10));
        // Again and again, nothing grows or is lost.
        assert_eq!(StatisticsState::from(&parsed(&text)), serde_json::from_str(&text).unwrap());
    }

    #[test]
    fn fields_that_are_missing_or_unknown_do_no_harm() {
        assert_eq!(parsed("{}").counts(), Statistics::default().counts());
        let text = r#"{"new": [1], "hits": 2, "kinds": {"read": {"requests": 3}, "copy": {}}}"#;
        let statistics = parsed(text);
        assert_eq!(statistics.lookups.hits, 2);
        assert_eq!(statistics.summary(OpKind::Read).unwrap().requests, 3);
        for text in [r#"{"hits": -1}"#, r#"{"kinds": {"read": {"queue_values": [[1]]}}}"#, "7"] {
            assert!(serde_json::from_str::<StatisticsState>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_that_no_server_sends_are_bounded() {
        let most = u64::MAX;
        let times = format!(r#"{{"sum_ns": {most}, "buckets": {:?}}}"#, [most; 60]);
        let text = format!(
            r#"{{"hits": {most}, "paced": {most}, "kinds": {{"write": {{
                "requests": {most}, "bytes": {most}, "queue": {times}, "service": {times},
                "queue_values": [[{most}, {most}], [{most}, 4294967296], [0, 1]]}}}}}}"#
        );
        let mut statistics = parsed(&text);
        let again = statistics.clone();
        statistics.merge(&again);
        let write = Op::Write { fua: false };
        statistics.record(write, 4096, Duration::ZERO, Duration::ZERO, true);
        let summary = statistics.summary(OpKind::Write).unwrap();
        assert_eq!((summary.requests, summary.bytes), (2 * MAX_COUNT + 1, 2 * MAX_COUNT + 4096));
        assert!(summary.queue_us[2] < 70e6, "{summary:?}");
    }
}
