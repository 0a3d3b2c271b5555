//! Curves, with bands where figures vary.

use super::scale::{Scale, ScaleKind, Unit};
use super::svg::{self, Svg};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    /// The band around the point. Most of the values lie in the band.
    pub band: Option<(f64, f64)>,
}

#[derive(Clone, Debug, Default)]
pub struct Series {
    pub name: String,
    pub points: Vec<Point>,
    /// Index of the series' colour, dash and marker. A system has the same index in all pictures.
    pub look: usize,
}

/// A picture of curves.
#[derive(Clone, Debug)]
pub struct Chart {
    pub title: String,
    pub x: (ScaleKind, Unit, String),
    pub y: (ScaleKind, Unit, String),
    pub series: Vec<Series>,
    pub markers: bool,
    pub size: (f64, f64),
}

const LEFT: f64 = 78.0;
const RIGHT: f64 = 18.0;
const BELOW: f64 = 46.0;
const LEGEND_LINE: f64 = 20.0;

impl Chart {
    pub fn draw(&self) -> Svg {
        let (width, height) = self.size;
        let mut svg = Svg::new(width, height);
        svg.text(LEFT, 24.0, "class=\"title\"", &self.title);
        let top = self.legend(&mut svg, width) + 12.0;
        let frame =
            Frame { x: LEFT, y: top, width: width - LEFT - RIGHT, height: height - top - BELOW };
        let points = || self.series.iter().flat_map(|s| &s.points);
        let ys =
            points().flat_map(|p| [Some(p.y), p.band.map(|b| b.0), p.band.map(|b| b.1)]).flatten();
        let x = Scale::of(self.x.0, self.x.1, points().map(|p| p.x));
        let y = Scale::of(self.y.0, self.y.1, ys);
        frame.axes(&mut svg, (&x, &self.x.2), (&y, &self.y.2));
        for series in &self.series {
            self.curve(&mut svg, &frame, series, &x, &y);
        }
        svg
    }

    /// Draws the names of the series in lines. Returns the end of the last line.
    fn legend(&self, svg: &mut Svg, width: f64) -> f64 {
        let (mut x, mut y) = (LEFT, 44.0);
        for series in &self.series {
            let wide = 34.0 + 7.4 * series.name.chars().count() as f64 + 14.0;
            if x + wide > width && x > LEFT {
                (x, y) = (LEFT, y + LEGEND_LINE);
            }
            let line = svg::line(series.look);
            svg.add(&format!("<path {line} d=\"M{x:.1} {:.1}h24\"/>", y - 4.0));
            if self.markers {
                svg.marker(series.look, x + 12.0, y - 4.0);
            }
            svg.text(x + 30.0, y, "", &series.name);
            x += wide;
        }
        y
    }

    fn curve(&self, svg: &mut Svg, frame: &Frame, series: &Series, x: &Scale, y: &Scale) {
        let place = |at: f64, value: f64| {
            (frame.x + x.place(at) * frame.width, frame.bottom() - y.place(value) * frame.height)
        };
        let points: Vec<_> = series.points.iter().filter(|p| p.y.is_finite()).collect();
        let upper = points.iter().filter_map(|p| Some(place(p.x, p.band?.1)));
        let lower = points.iter().rev().filter_map(|p| Some(place(p.x, p.band?.0)));
        let band: Vec<_> = upper.chain(lower).collect();
        if band.len() > 2 {
            svg.add(&svg::polygon(&format!("{} opacity=\".15\"", svg::fill(series.look)), &band));
        }
        // A point without a value interrupts the line.
        let runs = series.points.split(|p| !p.y.is_finite()).filter(|run| !run.is_empty());
        let run = |run: &[Point]| {
            let places = run.iter().map(|p| place(p.x, p.y));
            places.map(|(x, y)| format!("{x:.1} {y:.1}")).collect::<Vec<_>>().join("L")
        };
        let line: Vec<String> = runs.map(run).collect();
        if !line.is_empty() {
            svg.add(&format!(
                "<path {} stroke-linejoin=\"round\" d=\"M{}\"/>",
                svg::line(series.look),
                line.join("M")
            ));
        }
        if self.markers {
            for point in points {
                let (x, y) = place(point.x, point.y);
                svg.marker(series.look, x, y);
            }
        }
    }
}

/// The area of the curves.
pub struct Frame {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

impl Frame {
    pub fn bottom(&self) -> f64 {
        self.y + self.height
    }

    fn axes(&self, svg: &mut Svg, (x, x_name): (&Scale, &str), (y, y_name): (&Scale, &str)) {
        let bottom = self.bottom();
        for (value, words) in x.ticks() {
            let at = self.x + x.place(value) * self.width;
            svg.add(&format!(
                "<path class=\"grid\" stroke=\"#ddd\" d=\"M{at:.1} {:.1}V{bottom:.1}\"/>",
                self.y
            ));
            svg.text(at, bottom + 18.0, "text-anchor=\"middle\"", &words);
        }
        self.rows(svg, y, y_name);
        svg.text(self.x + self.width / 2.0, bottom + 38.0, "text-anchor=\"middle\"", x_name);
    }

    /// Draws the values at the side, and two lines of the frame.
    pub fn rows(&self, svg: &mut Svg, y: &Scale, name: &str) {
        let (bottom, right) = (self.bottom(), self.x + self.width);
        for (value, words) in y.ticks() {
            let at = bottom - y.place(value) * self.height;
            svg.add(&format!(
                "<path class=\"grid\" stroke=\"#ddd\" d=\"M{:.1} {at:.1}H{right:.1}\"/>",
                self.x
            ));
            svg.text(self.x - 8.0, at + 4.0, "text-anchor=\"end\"", &words);
        }
        svg.add(&format!(
            "<path class=\"axis\" stroke=\"#888\" fill=\"none\" d=\"M{:.1} {:.1}V{bottom:.1}H{right:.1}\"/>",
            self.x, self.y
        ));
        let (x, y) = (16.0, self.y + self.height / 2.0);
        svg.text(
            x,
            y,
            &format!("text-anchor=\"middle\" transform=\"rotate(-90 {x:.1} {y:.1})\""),
            name,
        );
    }
}
