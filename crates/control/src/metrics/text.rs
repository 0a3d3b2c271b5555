//! The text format of metrics.
//!
//! In: families of metrics, each with its samples. Out: lines. Names and help texts are constants
//! of this program. Label values may contain anything.

use std::fmt::{self, Write};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// Name, type and help text of the metrics of one name.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub help: &'static str,
}

/// A value of a sample. Integers are exact.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    Integer(u64),
    Float(f64),
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Value::Integer(value)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Value::Float(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Value::Integer(value.into())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Integer(value) => value.fmt(f),
            Value::Float(value) => value.fmt(f),
        }
    }
}

/// The text, which grows by families and samples.
#[derive(Default)]
pub struct Text(String);

impl Text {
    /// Begins a family. Its samples follow.
    pub fn family(&mut self, family: &Family) {
        let Family { name, kind, help } = family;
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// Adds a sample. `suffix` belongs to the name. `labels`: [`label`]s with commas between them.
    pub fn sample(&mut self, family: &Family, suffix: &str, labels: &str, value: Value) {
        let text = &mut self.0;
        text.push_str(family.name);
        text.push_str(suffix);
        if !labels.is_empty() {
            text.push('{');
            text.push_str(labels);
            text.push('}');
        }
        self.write(format_args!(" {value}\n"));
    }

    /// Adds a whole family with one sample and no labels.
    pub fn single(&mut self, family: Family, value: impl Into<Value>) {
        self.family(&family);
        self.sample(&family, "", "", value.into());
    }

    fn write(&mut self, what: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.0.write_fmt(what);
    }

    pub fn into_string(self) -> String {
        self.0
    }
}

/// Returns a label with its value escaped: `disk="root"`.
pub fn label(name: &str, value: &str) -> String {
    let mut text = format!("{name}=\"");
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
    text.push('"');
    text
}
