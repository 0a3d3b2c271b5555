//! The figures of a run, for people and for programs.

use std::fmt::{Display, Formatter, Result};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::LoadOptions;
use super::cpu::{Meter, Usage};
use super::load::{Slice, Tally};

/// The target of the load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Target {
    /// `vhost-user`, `xen`, `nbd` or `file`.
    pub kind: &'static str,
    pub capacity_bytes: u64,
    /// `split`, `packed` or `blkif`. None: a file.
    pub ring: Option<&'static str>,
    pub queue_size: Option<u16>,
    /// Negotiated feature bits.
    pub features: u64,
    pub protocol_features: u64,
    pub seed: u64,
}

/// Latencies in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latency {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Latency {
    fn new(histogram: &Histogram<u64>) -> Self {
        let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1e3;
        Latency {
            mean: histogram.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max() as f64 / 1e3,
        }
    }
}

/// Grant operations of a Xen back end for each operation of the load: mapped pages, copied
/// segments, and calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Grants {
    pub maps_per_io: f64,
    pub copies_per_io: f64,
    /// Number of calls that map, unmap or copy.
    pub calls_per_io: f64,
    /// Grants that were still mapped when their request was answered.
    pub still_mapped: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub options: LoadOptions,
    pub target: Target,
    pub seconds: f64,
    pub operations: u64,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    pub discards: u64,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub latency_us: Latency,
    /// Notifications to the back end and from it.
    pub kicks: u64,
    pub signals: u64,
    pub kicks_per_io: f64,
    pub signals_per_io: f64,
    /// Grant operations, if the target is a Xen back end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grants: Option<Grants>,
    pub client_cpu: Option<Usage>,
    pub backend_cpu: Option<Usage>,
    /// Number of requests with an error, warm-up included.
    pub errors: u64,
    pub first_error: Option<String>,
    /// Number of blocks that were read and compared.
    pub verified_blocks: u64,
    pub reconnects: u64,
    /// The longest time without a completion around a reconnection.
    pub longest_stall_ms: f64,
    /// Figures of each slice of the measured time, to merge several reports.
    #[serde(skip)]
    pub slices: Vec<Slice>,
    /// See [`Tally::steps`].
    #[serde(skip)]
    pub steps: Vec<u64>,
}

impl Report {
    pub fn new(
        options: &LoadOptions,
        target: Target,
        tally: &Tally,
        meter: &Meter,
        reconnects: u64,
    ) -> Self {
        let seconds = tally.elapsed_ns as f64 / 1e9;
        let operations = tally.reads + tally.writes + tally.flushes + tally.discards;
        let per = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let bytes = tally.bytes as f64;
        let (client_cpu, backend_cpu) = meter.usage(seconds, operations, tally.cpu_ns as f64 / 1e9);
        Report {
            options: options.clone(),
            target,
            seconds,
            operations,
            reads: tally.reads,
            writes: tally.writes,
            flushes: tally.flushes,
            discards: tally.discards,
            iops: per(operations as f64, seconds),
            bytes_per_second: per(bytes, seconds),
            latency_us: Latency::new(&tally.latency),
            kicks: tally.kicks,
            signals: tally.signals,
            kicks_per_io: per(tally.kicks as f64, operations as f64),
            signals_per_io: per(tally.signals as f64, operations as f64),
            grants: None,
            client_cpu,
            backend_cpu,
            errors: tally.errors,
            first_error: tally.first_error.clone(),
            verified_blocks: tally.verified,
            reconnects,
            longest_stall_ms: tally.longest_stall_ns as f64 / 1e6,
            slices: tally.slices.clone(),
            steps: tally.steps.clone(),
        }
    }
}

impl Report {
    /// Returns this report, or an error if the load was to be verified and no block was compared.
    pub fn compared(self) -> anyhow::Result<Self> {
        let compared = !self.options.verify || self.verified_blocks > 0 || self.errors > 0;
        anyhow::ensure!(compared, "--verify: the run has ended and has compared no block");
        Ok(self)
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let o = &self.options;
        let pattern = serde_json::to_value(o.rw)
            .ok()
            .and_then(|v| v.as_str().map(String::from))
            .unwrap_or_default();
        let ring = self.target.ring.map(|r| format!(", {r} ring")).unwrap_or_default();
        writeln!(
            f,
            "{pattern}, {} bytes, depth {} x {} queue(s){ring}, {:.2} s, seed {}",
            o.bs, o.depth, o.queues, self.seconds, self.target.seed
        )?;
        writeln!(f, "IOPS       {:>12.0}    {:.1} MB/s", self.iops, self.bytes_per_second / 1e6)?;
        let discards = match self.discards {
            0 => String::new(),
            n => format!(", {n} discards"),
        };
        writeln!(
            f,
            "operations {:>12}    {} reads, {} writes, {} flushes{discards}",
            self.operations, self.reads, self.writes, self.flushes
        )?;
        let l = &self.latency_us;
        writeln!(f, "latency us {:>12.1}    mean", l.mean)?;
        for (name, value) in
            [("p50", l.p50), ("p90", l.p90), ("p99", l.p99), ("p99.9", l.p999), ("max", l.max)]
        {
            writeln!(f, "           {value:>12.1}    {name}")?;
        }
        if self.target.ring.is_some() {
            writeln!(
                f,
                "kicks      {:>12.3}    per I/O, {} in all",
                self.kicks_per_io, self.kicks
            )?;
            writeln!(
                f,
                "signals    {:>12.3}    per I/O, {} in all",
                self.signals_per_io, self.signals
            )?;
        }
        if let Some(g) = &self.grants {
            writeln!(
                f,
                "grants     {:>12.3}    calls per I/O; {:.3} pages mapped, {:.3} pieces copied per I/O",
                g.calls_per_io, g.maps_per_io, g.copies_per_io
            )?;
        }
        for (name, usage) in [("client", &self.client_cpu), ("back end", &self.backend_cpu)] {
            let Some(u) = usage else { continue };
            writeln!(
                f,
                "{name:<10} {:>12.2}    cores, {:.2} CPU s, {:.0} IOPS per core, {:.2} CPU s per million I/Os",
                u.cores, u.seconds, u.iops_per_core, u.seconds_per_million_ios
            )?;
        }
        if o.verify {
            writeln!(f, "verified   {:>12}    blocks read and compared", self.verified_blocks)?;
        }
        if o.reconnect {
            writeln!(
                f,
                "reconnects {:>12}    longest stall {:.1} ms",
                self.reconnects, self.longest_stall_ms
            )?;
        }
        if let Some(error) = &self.first_error {
            writeln!(f, "errors     {:>12}    the first: {error}", self.errors)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::cpu::BackEnd;
    use super::*;

    fn report() -> Report {
        let options = LoadOptions {
            verify: true,
            reconnect: true,
            ..LoadOptions::for_socket("/run/disk.sock".into())
        };
        let mut tally = Tally::new().unwrap();
        for latency in 1..=1000 {
            tally.latency.saturating_record(latency * 1000);
        }
        (tally.reads, tally.writes, tally.kicks, tally.signals) = (750, 250, 100, 500);
        tally.elapsed_ns = 500_000_000;
        let mut meter = Meter::new(BackEnd::Process(std::process::id())).unwrap();
        meter.begin().unwrap();
        meter.end();
        Report::new(
            &options,
            Target { kind: "vhost-user", ring: Some("split"), ..Target::default() },
            &tally,
            &meter,
            2,
        )
    }

    #[test]
    fn a_verified_run_has_compared_blocks() {
        let error = report().compared().unwrap_err().to_string();
        assert!(error.contains("--verify") && error.contains("no block"), "{error}");
        Report { verified_blocks: 1, ..report() }.compared().unwrap();
        // The failed operations are the error of such a run.
        Report { errors: 1, ..report() }.compared().unwrap();
    }

    #[test]
    fn json_has_the_fields_that_scripts_read() {
        let json = serde_json::to_value(report()).unwrap();
        for field in [
            "/options/bs",
            "/options/rw",
            "/options/socket",
            "/target/kind",
            "/target/features",
            "/target/seed",
            "/seconds",
            "/operations",
            "/reads",
            "/writes",
            "/flushes",
            "/iops",
            "/bytes_per_second",
            "/latency_us/p50",
            "/latency_us/p90",
            "/latency_us/p99",
            "/latency_us/p999",
            "/latency_us/max",
            "/kicks",
            "/signals",
            "/kicks_per_io",
            "/signals_per_io",
            "/client_cpu/cores",
            "/backend_cpu/seconds",
            "/backend_cpu/cores",
            "/backend_cpu/iops_per_core",
            "/backend_cpu/seconds_per_million_ios",
            "/errors",
            "/verified_blocks",
            "/reconnects",
            "/longest_stall_ms",
        ] {
            assert!(json.pointer(field).is_some_and(|v| !v.is_null()), "{field} in {json:#}");
        }
        assert_eq!(json["iops"], 2000.0);
        assert_eq!(json["options"]["rw"], "randread");
        assert_eq!(json["signals_per_io"], 0.5);
    }

    #[test]
    fn the_table_names_its_units() {
        let text = report().to_string();
        for part in
            ["IOPS", "MB/s", "latency us", "p99.9", "kicks", "signals", "CPU s", "reconnects"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
