//! The page: HTML with style and pictures inside, without scripts or external files.

use std::fmt::Write;

use super::{charts, explain, figures, rows};
use crate::plot::svg::{self, Svg, escape};
use crate::results::Results;

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#222;--dim:#666;--line:#ddd;--ground:#fff;--card:#fafafa}\
body{margin:0 auto;max-width:60rem;padding:1.5rem 1rem 4rem;font:16px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;color:var(--text);background:var(--ground)}\
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.25rem;margin:2.5rem 0 .5rem;border-top:1px solid var(--line);padding-top:1.5rem}\
.dim{color:var(--dim);font-size:.9rem}svg{width:100%;min-width:34rem;height:auto;display:block}.picture{overflow-x:auto;margin:1rem 0}\
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;width:100%}\
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th:first-child,td:first-child{text-align:left}ul{padding-left:1.2rem}code{font-size:.85rem;overflow-wrap:anywhere}\
@media print{body{max-width:none;font-size:11pt}h2,svg,table{break-inside:avoid}}";

const DARK: &str = ":root{--text:#ddd;--dim:#999;--line:#333;--ground:#16181c;--card:#1d2025}";

pub fn page(results: &Results) -> String {
    let mut body = String::new();
    let rounds = results.runs.iter().map(|r| r.round).max().unwrap_or(0);
    let _ = write!(
        body,
        "<h1>Host against guest</h1>\n<p class=\"dim\">{} rounds, interleaved; figures are medians over the rounds.</p>\n",
        rounds
    );
    for work in results.works() {
        section(&mut body, results, work);
    }
    about(&mut body, results);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Host against guest</title>\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><link rel=\"icon\" href=\"data:,\">\n\
         <style>{STYLE}{}@media(prefers-color-scheme:dark){{{DARK}{}}}</style></head>\n<body>\n{body}</body></html>\n",
        svg::STYLE,
        svg::dark()
    )
}

fn section(body: &mut String, results: &Results, work: &str) {
    let _ = writeln!(body, "<h2>{}</h2>", escape(work));
    if let Some(about) = results.meaning(work) {
        let _ = writeln!(body, "<p class=\"dim\">{}</p>", escape(about));
    }
    if let Some(chart) = charts::by_size(results, work) {
        picture(body, &chart.draw(), &chart.title);
    }
    let _ = writeln!(body, "<ul>");
    for sentence in explain::sentences(results, work) {
        let _ = writeln!(body, "<li>{}</li>", escape(&sentence));
    }
    let _ = writeln!(body, "</ul>");
    let _ = writeln!(body, "<div class=\"wide\"><table>");
    for (number, row) in rows(results, work).iter().enumerate() {
        let tag = if number == 0 { "th" } else { "td" };
        let cells: String = row.iter().map(|c| format!("<{tag}>{}</{tag}>", escape(c))).collect();
        let _ = writeln!(body, "<tr>{cells}</tr>");
    }
    let _ = writeln!(body, "</table></div>");
    let commands = figures::of(results, work).iter().any(|f| !f.steps.is_empty());
    let bars = match commands {
        true => vec![charts::seconds(results, work)],
        false => vec![charts::rates(results, work), charts::cpu(results, work)],
    };
    for bars in bars {
        picture(body, &bars.draw(), &bars.title);
    }
    for chart in
        [charts::latencies(results, work), charts::over_time(results, work)].into_iter().flatten()
    {
        picture(body, &chart.draw(), &chart.title);
    }
    let variations =
        figures::of(results, work).into_iter().filter_map(|f| Some((f.burstiness?, f.system)));
    let variations: Vec<_> = variations.map(|(v, system)| format!("{system} {v:.2}")).collect();
    if !variations.is_empty() {
        let list = escape(&variations.join(", "));
        let _ = writeln!(
            body,
            "<p class=\"dim\">Burstiness (coefficient of variation of the throughput of each tenth of a second): {list}.</p>"
        );
    }
}

/// On a small screen the picture scrolls, so that its text stays readable.
fn picture(body: &mut String, svg: &Svg, about: &str) {
    let _ = writeln!(body, "<div class=\"picture\">{}</div>", svg.inline(about));
}

/// Returns the method of the measurement.
fn about(body: &mut String, results: &Results) {
    let _ = writeln!(body, "<h2>How it was measured</h2>\n<div class=\"wide\"><table>");
    for (name, value) in &results.environment {
        let _ = writeln!(
            body,
            "<tr><td>{}</td><td style=\"text-align:left;white-space:normal\">{}</td></tr>",
            escape(name),
            escape(value)
        );
    }
    let _ = writeln!(
        body,
        "</table></div>\n<p><code>{}</code></p>",
        escape(&results.command.join(" "))
    );
    let _ = writeln!(body, "<ul>");
    for system in results.systems() {
        let about = results.meaning(system).unwrap_or_default();
        let _ = writeln!(body, "<li><b>{}</b>: {}</li>", escape(system), escape(about));
    }
    let _ = writeln!(body, "</ul>");
    for (system, why) in &results.absent {
        let _ =
            writeln!(body, "<p class=\"dim\">{} was left out: {}</p>", escape(system), escape(why));
    }
    let clocks = results.runs.iter().filter(|r| r.seconds > 1.0);
    let clocks = clocks.filter_map(|r| Some((r.seconds / r.guest_seconds? - 1.0).abs()));
    let off = clocks.fold(0.0, f64::max) * 100.0;
    let _ = writeln!(
        body,
        "<p class=\"dim\">Times are the host's, taken when the guest says that it begins and ends; single operations are timed by the \
         guest's clock, set right by the host's in runs of a second or more (they differed by {off:.1}% at most). CPU time is from /proc, to 10 ms. All \
         figures are in results.json and results.csv beside this page.</p>"
    );
}
