//! Draws what protection costs on the models of devices: the part of its share that a polite guest
//! keeps beside a thrasher, against what is lost of the total of both, for several settings
//! ([`DeviceClass::ignored_slowdown`], [`DeviceClass::max_slowdown`]).
//!
//! `cargo run --release -p blockyard-bench --example frontier -- docs/design/fair-shares.svg`
//! prints the table as Markdown, and writes the picture. The simulation has a clock of its own, so
//! each run gives the same figures.

#[path = "../../sched/tests/simulation/events.rs"]
mod events;
#[allow(dead_code)]
#[path = "../../sched/tests/simulation/model.rs"]
mod model;

use std::io::Write;

use anyhow::{Context, Result};
use blockyard_bench::plot::svg::Svg;
use blockyard_bench::plot::{Chart, Point, ScaleKind, Series, Unit, png};
use blockyard_sched::{DeviceClass, OperationKind};
use model::{Got, Guest, Model, Mood, S, Simulation};

/// Slowdowns: ignored ones, and largest ones. The scheduler's own are among them.
const SETTINGS: [(f64, f64); 8] = [
    (1.01, 1.1),
    (1.03, 1.5),
    (1.1, 1.5),
    (1.25, 1.5),
    (1.5, 2.0),
    (2.0, 3.0),
    (4.0, 6.0),
    (10.0, 15.0),
];
/// The thrasher works alone until then.
const BOTH: u64 = 3 * S;
const END: u64 = BOTH + 5 * S;

const PLAIN: Model = Model { spread: 30, ..Model::PLAIN };
const MODELS: [(&str, Model); 5] = [
    ("16 at a time", PLAIN),
    ("pipeline", Model { servers: 1, time: 88_000, after: 300_000, ..PLAIN }),
    ("one at a time", Model { servers: 1, time: 90_000, ..PLAIN }),
    ("fast", Model { servers: 1, time: 11_000, after: 40_000, ..PLAIN }),
    ("token bucket", Model { mood: Mood::Bucket(5_000), ..PLAIN }),
];

/// A setting on a model: the polite guest's rate as a part of its share of its rate alone, and the
/// total as a part of that without the scheduler.
struct Outcome {
    kept: f64,
    total: f64,
}

fn guests(depth: usize) -> [Guest; 2] {
    let polite = Guest { from: BOTH, ..Guest::reads(depth) };
    let mix = vec![(OperationKind::Read, 4096), (OperationKind::Write, 4096)];
    [polite, Guest { work: mix, ..Guest::reads(256) }]
}

/// Runs both guests with each setting. Returns the outcomes, and the one without the scheduler.
fn outcomes(model: Model, depth: usize) -> (Vec<Outcome>, Outcome) {
    let guests = guests(depth);
    let run = |model: Model, guests: &[Guest]| Simulation::new(model, guests).run(BOTH, END);
    let cost = |got: &[Got]| got.iter().map(|g| g.cost).sum::<u64>() as f64;
    let alone = run(model, &guests[..1])[0].operations as f64;
    let free = run(Model { scheduled: false, ..model }, &guests);
    let outcome = |got: &[Got]| Outcome {
        kept: got[0].operations as f64 / alone * 2.0,
        total: cost(got) / cost(&free),
    };
    let with = |&(ignored_slowdown, max_slowdown): &(f64, f64)| {
        let class = DeviceClass { ignored_slowdown, max_slowdown, ..DeviceClass::FLASH };
        outcome(&run(Model { class, ..model }, &guests))
    };
    (SETTINGS.iter().map(with).collect(), outcome(&free))
}

fn point(outcome: &Outcome) -> Point {
    Point { x: (100.0 - outcome.total * 100.0).max(0.0), y: outcome.kept * 100.0, band: None }
}

fn chart(depth: usize, out: &mut impl Write) -> Result<Chart> {
    let mut series = Vec::new();
    let mut chosen = Series { name: "chosen".into(), points: Vec::new(), look: 5 };
    for (look, (name, model)) in MODELS.iter().enumerate() {
        let (with, free) = outcomes(*model, depth);
        write!(out, "| {name} | {depth} |")?;
        for outcome in with.iter().chain([&free]) {
            write!(out, " {:.0}, {:.0} |", outcome.kept * 100.0, outcome.total * 100.0)?;
        }
        writeln!(out)?;
        let points: Vec<Point> = with.iter().map(point).collect();
        let own = (DeviceClass::FLASH.ignored_slowdown, DeviceClass::FLASH.max_slowdown);
        let own = SETTINGS.iter().position(|setting| *setting == own);
        chosen.points.push(points[own.context("the scheduler's setting is not among these")?]);
        // Interrupts the line between the models.
        chosen.points.push(Point { x: f64::NAN, y: f64::NAN, band: None });
        series.push(Series { name: name.to_string(), points, look });
    }
    series.push(chosen);
    Ok(Chart {
        title: format!("A polite guest of depth {depth} beside a thrasher"),
        x: (
            ScaleKind::Linear,
            Unit::Plain,
            "lost of the total, % of that without the scheduler".into(),
        ),
        y: (ScaleKind::Linear, Unit::Plain, "kept by the polite guest, % of half".into()),
        series,
        markers: true,
        size: (720.0, 380.0),
    })
}

fn main() -> Result<()> {
    let file = std::env::args().nth(1).context("usage: frontier FILE.svg|FILE.png")?;
    let mut out = std::io::stdout().lock();
    write!(out, "| model | depth |")?;
    SETTINGS.iter().try_for_each(|(ignored, most)| write!(out, " {ignored}, {most} |"))?;
    writeln!(out, " no scheduler |\n|---|--:|{}", "--:|".repeat(SETTINGS.len() + 1))?;
    let charts = [1, 8].map(|depth| chart(depth, &mut out));
    let [one, eight] = charts;
    let svg = Svg::stack(&[one?.draw(), eight?.draw()])
        .file("What a polite guest keeps, against what is lost of the total");
    let bytes = if file.ends_with(".png") { png::render(&svg)? } else { svg.into_bytes() };
    std::fs::write(&file, bytes).context(file)
}
