//! The text of a picture.

use std::fmt::Write;

/// Colours that colour-blind people can distinguish (Okabe and Ito, 2008): one for a light
/// background, and one for a dark background. Series also differ in dashes and markers.
pub const COLOURS: [(&str, &str); 8] = [
    ("#3a3a3a", "#d8d8d8"),
    ("#d55e00", "#ff8a3c"),
    ("#e69f00", "#f2b632"),
    ("#0072b2", "#4fb0e8"),
    ("#009e73", "#2fd3a5"),
    ("#cc79a7", "#e79cc4"),
    ("#7a5195", "#b48bd6"),
    ("#56b4e9", "#8fd0f5"),
];
const DASHES: [&str; 4] = ["", "7 3", "2 3", "9 3 2 3"];

/// The style sheet of all pictures.
pub const STYLE: &str = "\
.by text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#333}\
.by .title{font-size:16px;font-weight:600;fill:#111}.by .small{font-size:11px}.by .grid{stroke:#ddd;stroke-width:1}\
.by .axis{stroke:#888;stroke-width:1}.by .ground{fill:#fff}";

/// Returns the style rules for dark mode.
pub fn dark() -> String {
    let mut rules = String::from(
        ".by text{fill:#ccc}.by .title{fill:#eee}.by .grid{stroke:#333}.by .axis{stroke:#777}.by .ground{fill:#16181c}",
    );
    for (number, (_, dark)) in COLOURS.iter().enumerate() {
        let _ = write!(rules, ".by .l{number}{{stroke:{dark}}}.by .f{number}{{fill:{dark}}}");
    }
    rules
}

/// Returns colour and dash of the series of this number, as attributes of a line.
pub fn line(series: usize) -> String {
    let number = series % COLOURS.len();
    let dash = DASHES[series / 2 % DASHES.len()];
    let dash =
        if dash.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dash}\"") };
    format!(
        "class=\"l{number}\" stroke=\"{}\" fill=\"none\" stroke-width=\"2\"{dash}",
        COLOURS[number].0
    )
}

pub fn fill(series: usize) -> String {
    let number = series % COLOURS.len();
    format!("class=\"f{number}\" fill=\"{}\"", COLOURS[number].0)
}

/// A picture under construction.
pub struct Svg {
    body: String,
    width: f64,
    height: f64,
}

impl Svg {
    pub fn new(width: f64, height: f64) -> Self {
        Svg { body: String::new(), width, height }
    }

    /// Stacks pictures vertically.
    pub fn stack(parts: &[Svg]) -> Self {
        let mut all = Svg::new(parts.iter().map(|p| p.width).fold(0.0, f64::max), 0.0);
        for part in parts {
            all.add(&format!("<g transform=\"translate(0 {})\">\n{}</g>", all.height, part.body));
            all.height += part.height;
        }
        all
    }

    pub fn add(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    pub fn text(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        self.add(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{}</text>", escape(text)));
    }

    /// Adds a marker. Each series has its own shape.
    pub fn marker(&mut self, series: usize, x: f64, y: f64) {
        let look = fill(series);
        let r = 3.2;
        self.add(&match series % 4 {
            0 => format!("<circle {look} cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r}\"/>"),
            1 => format!(
                "<rect {look} x=\"{:.1}\" y=\"{:.1}\" width=\"6\" height=\"6\"/>",
                x - 3.0,
                y - 3.0
            ),
            2 => polygon(&look, &[(x, y - 4.0), (x + 4.0, y + 3.2), (x - 4.0, y + 3.2)]),
            _ => polygon(&look, &[(x, y - 4.4), (x + 4.4, y), (x, y + 4.4), (x - 4.4, y)]),
        });
    }

    /// Returns the picture as a part of a page, which has the style. `about`: the text for screen
    /// readers.
    pub fn inline(&self, about: &str) -> String {
        format!(
            "<svg class=\"by\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n{}</svg>\n",
            self.width,
            self.height,
            escape(about),
            self.body
        )
    }

    /// Returns the picture as the text of a complete SVG file.
    pub fn file(&self, about: &str) -> String {
        format!(
            "<svg class=\"by\" xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" role=\"img\">\n\
             <title>{}</title>\n<style>{STYLE}@media(prefers-color-scheme:dark){{{}}}</style>\n\
             <rect class=\"ground\" fill=\"#fff\" width=\"{w}\" height=\"{h}\"/>\n{}</svg>\n",
            escape(about),
            dark(),
            self.body,
            w = self.width,
            h = self.height,
        )
    }
}

pub fn polygon(attributes: &str, points: &[(f64, f64)]) -> String {
    let points: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    format!("<polygon {attributes} points=\"{}\"/>", points.join(" "))
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
