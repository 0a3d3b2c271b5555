//! The report of `make perf`: each figure with its expected range. Each line goes to standard
//! output, and to the file that `PERF_REPORT` names: a row of a table in Markdown.

use std::io::Write;
use std::ops::Range;
use std::panic::Location;

/// The first lines of a report.
const HEAD: &str = "| figure | value | known range | verdict |\n|---|--:|--:|---|\n";

pub struct Figures {
    /// The place of the test in its file, for a test that ends before it has all its figures.
    test: &'static Location<'static>,
    outside: Vec<String>,
    is_judged: bool,
}

impl Default for Figures {
    #[track_caller]
    fn default() -> Self {
        Figures { test: Location::caller(), outside: Vec::new(), is_judged: false }
    }
}

impl Figures {
    /// Prints a figure, and records whether it is in its range.
    pub fn row(&mut self, what: &str, found: f64, expected: Range<f64>) {
        let good = expected.contains(&found);
        let range = format!("{:.3} to {:.3}", expected.start, expected.end);
        let row = format!("{what:<60} {found:>10.3}   {range}");
        println!("{} {row}", if good { "  " } else { "!!" });
        report(what, &format!("{found:.3}"), &range, if good { "good" } else { "OUTSIDE" });
        if !good {
            self.outside.push(row);
        }
    }

    /// Like `row`, with an expected value and a relative tolerance.
    pub fn near(&mut self, what: &str, found: f64, value: f64, tolerance: f64) {
        self.row(what, found, value * (1.0 - tolerance)..value * (1.0 + tolerance));
    }

    /// Prints a figure that has no known range.
    pub fn show(&mut self, what: &str, found: f64) {
        println!("   {what:<60} {found:>10.3}");
        report(what, &format!("{found:.3}"), "", "");
    }

    /// Fails if a figure is outside its range.
    #[track_caller]
    pub fn judge(mut self) {
        self.is_judged = true;
        assert!(self.outside.is_empty(), "outside their ranges:\n{}", self.outside.join("\n"));
    }
}

impl Drop for Figures {
    fn drop(&mut self) {
        if !self.is_judged {
            let what = format!("the test at {} ended before its last figure", self.test);
            report(&what, "", "", "FAILED");
        }
    }
}

/// Appends a row to the report, if the caller wants one. An error is a line of standard output: the
/// figure stands there already, and a drop must not panic.
fn report(what: &str, value: &str, range: &str, verdict: &str) {
    let Some(path) = std::env::var_os("PERF_REPORT") else { return };
    let append = || {
        let mut file = std::fs::File::options().create(true).append(true).open(&path)?;
        let head = if file.metadata()?.len() == 0 { HEAD } else { "" };
        let what = what.replace('|', "\\|");
        file.write_all(format!("{head}| {what} | {value} | {range} | {verdict} |\n").as_bytes())
    };
    if let Err(error) = append() {
        println!("!! {} cannot be written: {error}", path.display());
    }
}
