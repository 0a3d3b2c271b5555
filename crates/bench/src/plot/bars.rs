//! Groups of bars, with whiskers where figures vary.

use super::scale::{Scale, ScaleKind, Unit, words};
use super::svg::{self, Svg};
use super::xy::Frame;

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    pub name: String,
    pub value: f64,
    /// The smallest and the largest value of the rounds.
    pub range: Option<(f64, f64)>,
    pub look: usize,
}

/// A picture of one group of bars: the systems of one job.
#[derive(Clone, Debug)]
pub struct Bars {
    pub title: String,
    pub unit: Unit,
    /// The line below the title, which says what the values are.
    pub of: String,
    pub bars: Vec<Bar>,
    pub width: f64,
}

const NAMES: f64 = 190.0;
const VALUES: f64 = 86.0;
const ROW: f64 = 26.0;
const TOP: f64 = 44.0;

impl Bars {
    /// The bars are horizontal, because names of systems are long.
    pub fn draw(&self) -> Svg {
        let height = TOP + ROW * self.bars.len() as f64 + 14.0;
        let mut svg = Svg::new(self.width, height);
        svg.text(12.0, 22.0, "class=\"title\"", &self.title);
        svg.text(12.0, 38.0, "class=\"small\"", &self.of);
        let frame =
            Frame { x: NAMES, y: TOP, width: self.width - NAMES - VALUES, height: height - TOP };
        let all = self.bars.iter().flat_map(|b| [b.value, b.range.map_or(b.value, |r| r.1)]);
        let scale = Scale::of(ScaleKind::Linear, self.unit, all);
        for (row, bar) in self.bars.iter().enumerate() {
            let y = TOP + ROW * row as f64 + 5.0;
            let end = |value: f64| frame.x + scale.place(value) * frame.width;
            svg.text(NAMES - 8.0, y + 13.0, "text-anchor=\"end\"", &bar.name);
            if !bar.value.is_finite() {
                svg.text(NAMES + 4.0, y + 13.0, "class=\"small\"", "not measured");
                continue;
            }
            let wide = (end(bar.value) - frame.x).max(1.0);
            let look = svg::fill(bar.look);
            svg.add(&format!("<rect {look} x=\"{NAMES}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"17\" rx=\"2\"/>"));
            let far = bar.range.map_or(end(bar.value), |(low, high)| {
                let (a, b, m) = (end(low), end(high), y + 8.5);
                svg.add(&format!(
                    "<path class=\"axis\" stroke=\"#888\" fill=\"none\" d=\"M{a:.1} {m:.1}H{b:.1}M{a:.1} {:.1}v6M{b:.1} {:.1}v6\"/>",
                    m - 3.0,
                    m - 3.0
                ));
                b.max(end(bar.value))
            });
            svg.text(far + 6.0, y + 13.0, "", &words(bar.value, self.unit));
        }
        svg
    }
}
