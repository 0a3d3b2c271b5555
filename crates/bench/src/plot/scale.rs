//! Maps values to positions on an axis.

/// The layout of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleKind {
    Linear,
    Log,
    /// Percentiles from 0 to 1. Each further nine has the same width.
    Nines,
}

/// How values are formatted as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Seconds,
    Plain,
    BytesPerSecond,
    Percentile,
}

/// One axis: its range, its layout, and the unit of its values.
#[derive(Clone, Debug)]
pub struct Scale {
    kind: ScaleKind,
    unit: Unit,
    low: f64,
    high: f64,
}

impl Scale {
    /// Creates an axis that includes all values: a little more on a linear scale, whole octaves or
    /// decades on a logarithmic one.
    pub fn of(kind: ScaleKind, unit: Unit, values: impl IntoIterator<Item = f64>) -> Self {
        let usable = |v: &f64| {
            v.is_finite() && (kind == ScaleKind::Linear || *v > 0.0 || kind == ScaleKind::Nines)
        };
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.into_iter().filter(usable) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (1.0, 10.0);
        }
        let (low, high) = match kind {
            ScaleKind::Linear => (0.0, if high > 0.0 { high * 1.05 } else { 1.0 }),
            ScaleKind::Log if unit == Unit::Bytes => {
                ((low.log2() + 1e-9).floor().exp2(), (high.log2() - 1e-9).ceil().exp2())
            }
            // The range is at least a decade, so that the axis has a label.
            ScaleKind::Log => {
                let more = (10.0 / (high / low)).max(1.7).sqrt();
                (low / more, high * more)
            }
            ScaleKind::Nines => (0.0, 0.999),
        };
        let high = if high > low { high } else { low * 2.0 };
        Scale { kind, unit, low, high }
    }

    fn linear(&self, value: f64) -> f64 {
        match self.kind {
            ScaleKind::Linear => value,
            ScaleKind::Log => value.max(f64::MIN_POSITIVE).log10(),
            ScaleKind::Nines => -(1.0 - value.clamp(0.0, 0.99999)).log10(),
        }
    }

    /// Returns the position of a value: 0 at the start of the axis, 1 at its end.
    pub fn place(&self, value: f64) -> f64 {
        let (low, high) = (self.linear(self.low), self.linear(self.high));
        ((self.linear(value) - low) / (high - low)).clamp(0.0, 1.0)
    }

    /// Returns the labelled values with their labels.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let values: Vec<f64> = match (self.kind, self.unit) {
            (ScaleKind::Nines, _) => vec![0.0, 0.5, 0.9, 0.99, 0.999],
            (ScaleKind::Log, Unit::Bytes) => steps(self.low, self.high, 4.0),
            (ScaleKind::Log, _) => decades(self.low, self.high),
            (ScaleKind::Linear, _) => even(self.high),
        };
        values.into_iter().map(|v| (v, words(v, self.unit))).collect()
    }
}

fn steps(low: f64, high: f64, factor: f64) -> Vec<f64> {
    let next = |v: &f64| Some(v * factor);
    std::iter::successors(Some(low), next).take_while(|v| *v <= high * 1.0001).collect()
}

/// Returns powers of ten, and 2 and 5 times them if there are few.
fn decades(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let few = last - first <= 3;
    let powers = (first..=last).map(|p| 10f64.powi(p));
    let parts = powers.flat_map(|p| if few { vec![p, 2.0 * p, 5.0 * p] } else { vec![p] });
    parts.filter(|v| (low..=high).contains(v)).collect()
}

/// Returns about five evenly spaced values from 0 to at most `high`.
fn even(high: f64) -> Vec<f64> {
    let rough = high / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|s| *s >= rough * 0.999)
        .unwrap_or(rough);
    (0..).map(|i| f64::from(i) * step).take_while(|v| *v <= high).collect()
}

/// Formats a value with three digits and the unit's prefixes.
pub fn words(value: f64, unit: Unit) -> String {
    let scaled = |steps: &[(f64, &str)]| {
        let (by, name) = steps
            .iter()
            .find(|(by, _)| value.abs() >= *by)
            .or(steps.last())
            .copied()
            .unwrap_or((1.0, ""));
        format!("{}{name}", short(value / by))
    };
    match unit {
        Unit::Bytes => {
            scaled(&[(1024f64.powi(3), " GiB"), (1048576.0, " MiB"), (1024.0, " KiB"), (1.0, " B")])
        }
        Unit::Seconds if value == 0.0 => "0".into(),
        Unit::Seconds => scaled(&[(1.0, " s"), (1e-3, " ms"), (1e-6, " µs"), (1e-9, " ns")]),
        Unit::Plain => scaled(&[(1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, "")]),
        Unit::BytesPerSecond => {
            scaled(&[(1e9, " GB/s"), (1e6, " MB/s"), (1e3, " kB/s"), (1.0, " B/s")])
        }
        Unit::Percentile if value == 0.0 => "min".into(),
        Unit::Percentile => format!("p{}", short(value * 100.0)),
    }
}

/// Formats a value with three significant digits, without trailing zeroes.
pub fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 99.95 && v.fract() != 0.0 && v < 100.0 => 1,
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(scale: &Scale) -> Vec<String> {
        scale.ticks().into_iter().map(|t| t.1).collect()
    }

    #[test]
    fn axes_have_round_values() {
        let bytes = Scale::of(ScaleKind::Log, Unit::Bytes, [512.0, 1048576.0]);
        assert_eq!(names(&bytes), ["512 B", "2 KiB", "8 KiB", "32 KiB", "128 KiB", "512 KiB"]);
        let seconds = Scale::of(ScaleKind::Log, Unit::Seconds, [1.1e-5, 0.9]);
        assert_eq!(names(&seconds), ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"]);
        assert_eq!(
            names(&Scale::of(ScaleKind::Linear, Unit::Plain, [47_000.0])),
            ["0", "10 k", "20 k", "30 k", "40 k"]
        );
        assert_eq!(
            names(&Scale::of(ScaleKind::Nines, Unit::Percentile, [])),
            ["min", "p50", "p90", "p99", "p99.9"]
        );
    }

    #[test]
    fn places_go_from_0_to_1() {
        let scale = Scale::of(ScaleKind::Log, Unit::Bytes, [512.0, 131072.0]);
        assert_eq!((scale.place(512.0), scale.place(131072.0)), (0.0, 1.0));
        assert!((scale.place(8192.0) - 0.5).abs() < 1e-9);
        let nines = Scale::of(ScaleKind::Nines, Unit::Percentile, []);
        assert!((nines.place(0.9) - 1.0 / 3.0).abs() < 1e-9 && nines.place(0.0) == 0.0);
        // Nothing at all, one value, and values that have no logarithm.
        for values in [vec![], vec![3.0], vec![0.0, f64::NAN]] {
            let scale = Scale::of(ScaleKind::Log, Unit::Seconds, values);
            assert!((0.0..=1.0).contains(&scale.place(3.0)) && !scale.ticks().is_empty());
        }
    }

    #[test]
    fn three_digits() {
        let all = [0.0, 1.0, 1.234, 12.34, 123.4, 99.96, 99.9, 1e3].map(short);
        assert_eq!(all, ["0", "1", "1.23", "12.3", "123", "100", "99.9", "1000"]);
    }
}
