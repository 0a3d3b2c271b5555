//! The report: each figure with its expected range.

use std::ops::Range;

#[derive(Default)]
pub struct Figures {
    outside: Vec<String>,
}

impl Figures {
    /// Prints a figure, and records whether it is in its range.
    pub fn row(&mut self, what: &str, found: f64, expected: Range<f64>) {
        let good = expected.contains(&found);
        let row =
            format!("{what:<60} {found:>10.3}   {:.3} to {:.3}", expected.start, expected.end);
        println!("{} {row}", if good { "  " } else { "!!" });
        if !good {
            self.outside.push(row);
        }
    }

    /// Like `row`, with an expected value and a relative tolerance.
    pub fn near(&mut self, what: &str, found: f64, value: f64, tolerance: f64) {
        self.row(what, found, value * (1.0 - tolerance)..value * (1.0 + tolerance));
    }

    /// Fails if a figure is outside its range.
    #[track_caller]
    pub fn judge(self) {
        assert!(self.outside.is_empty(), "outside their ranges:\n{}", self.outside.join("\n"));
    }
}
