//! The columns of a table that measures a guest: the systems that its kernel has, and ratios
//! between them.

use super::{Measured, cell};

pub struct Columns {
    systems: Vec<usize>,
    /// The first system's figure divided by that of the second.
    ratios: Vec<(usize, usize)>,
}

impl Columns {
    /// Returns the columns of the systems, 0 to `count` - 1, that have figures.
    pub fn of(measured: &[Measured], count: usize, ratios: &[(usize, usize)]) -> Self {
        let there = |system: usize| measured.iter().any(|m| !m.figures[system].is_empty());
        Columns {
            systems: (0..count).filter(|system| there(*system)).collect(),
            ratios: ratios.iter().copied().filter(|(a, b)| there(*a) && there(*b)).collect(),
        }
    }

    pub fn head(&self, kernel: &str, name: impl Fn(usize) -> &'static str) -> Vec<String> {
        let mut head = vec![format!("kernel {kernel}")];
        head.extend(self.systems.iter().map(|system| name(*system).to_string()));
        head.extend(self.ratios.iter().map(|(a, b)| format!("{} / {}", name(*a), name(*b))));
        head
    }

    /// Returns a line: medians of a figure, and of its ratios.
    pub fn line(
        &self,
        name: &str,
        measured: &Measured,
        key: &str,
        text: impl Fn(f64) -> String,
    ) -> Vec<String> {
        let figure = |system: &usize| cell(measured.median(*system, key), &text);
        let ratio =
            |(a, b): &(usize, usize)| cell(measured.ratio(*a, *b, key), |x| format!("{x:.2}"));
        let mut line = vec![name.to_string()];
        line.extend(self.systems.iter().map(figure));
        line.extend(self.ratios.iter().map(ratio));
        line
    }
}
