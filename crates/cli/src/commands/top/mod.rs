//! `blockyard top`: a live table of the disks of a running server.
//!
//! ```text
//!   rates    two samples of figures, and the rates and percentiles between them
//!   view     what the screen shows: rows, order, selection, keys
//!   draw     the screen
//!   words    numbers as short text
//! ```
//!
//! In: figures from the API's socket, once an interval; keys. Out: the terminal. What must hold: a
//! server that does not answer does not block the keys.

mod draw;
mod rates;
#[cfg(test)]
mod tests;
mod view;
mod words;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use anyhow::Context;
use blockyard_control::client::call;
use blockyard_control::figures::Figures;
use blockyard_program::ending::Failure;
use blockyard_program::output;
use clap::{Args, ValueHint};
use http::Method;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};
use unicode_width::UnicodeWidthStr;

use crate::commands::ctl::{USUAL, VARIABLE};
use crate::options::values;
use view::{Order, View};

/// How long the server may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Longest time between the arrival of figures and the screen that shows them.
const TICK: Duration = Duration::from_millis(100);

#[derive(Args)]
pub struct TopOptions {
    /// Socket of the server's API.
    #[arg(long, value_name = "SOCKET", env = VARIABLE, default_value = USUAL,
        value_hint = ValueHint::FilePath)]
    pub api: PathBuf,
    /// Seconds between two samples.
    #[arg(long, short, value_name = "SECONDS", default_value = "1",
        value_parser = values::parse_limit)]
    pub interval: Duration,
    /// Print the table once, the slowest disk first, and end. Needs no terminal.
    #[arg(long)]
    pub once: bool,
}

/// Width of the screen of `--once`: all columns without a trend, and names of up to [`SHORT_NAME`]
/// columns. Longer names make it wider, because programs read them.
const COLUMNS: u16 = 120;
const SHORT_NAME: u16 = 26;
/// Lines of that screen besides those of disks.
const OTHER_LINES: u16 = 5;

pub fn run(options: &TopOptions) -> Result<(), Failure> {
    if options.once {
        return Ok(output::print(once(options)?)?);
    }
    if !std::io::stdout().is_terminal() {
        let what = "standard output is no terminal; use --once, GET /metrics or GET /v1/figures";
        return Err(anyhow::anyhow!("top: {what}").into());
    }
    // An error at the start ends the program. A later one is on the screen.
    let first = sample(&options.api)?;
    let samples = collect(options.api.clone(), options.interval);
    let mut terminal = ratatui::try_init().context("preparing the terminal")?;
    let shown = show(&mut terminal, first, &samples);
    ratatui::try_restore().context("restoring the terminal")?;
    Ok(shown?)
}

/// Returns the table of one interval, with the slowest disk first.
fn once(options: &TopOptions) -> anyhow::Result<String> {
    let mut view = View::new(sample(&options.api)?);
    std::thread::sleep(options.interval);
    view.add(Ok(sample(&options.api)?));
    text_once(view)
}

fn text_once(mut view: View) -> anyhow::Result<String> {
    view.order = Order::Latency;
    view.has_whole_names = true;
    let disks = view.latest.disks.len() as u16;
    let more = draw::longest_name(&view).saturating_sub(SHORT_NAME);
    let width = COLUMNS.saturating_add(more);
    let lines = lines(&view, width, disks.saturating_add(OTHER_LINES))?;
    // The last line has the keys.
    Ok(lines[..lines.len() - 1].iter().map(|line| format!("{line}\n")).collect())
}

/// Draws the screen in memory. Returns its lines.
fn lines(view: &View, width: u16, height: u16) -> anyhow::Result<Vec<String>> {
    let mut terminal = Terminal::new(TestBackend::new(width, height))?;
    terminal.draw(|frame| draw::screen(frame, view))?;
    let buffer = terminal.backend().buffer();
    let line = |y| {
        let (mut text, mut x) = (String::new(), 0);
        while x < width {
            let symbol = buffer[(x, y)].symbol();
            text += symbol;
            // A wide character covers the next cell.
            x += (symbol.width() as u16).max(1);
        }
        text
    };
    Ok((0..height).map(|y| line(y).trim_end().to_string()).collect())
}

fn sample(api: &Path) -> anyhow::Result<Figures> {
    let answer = call(api, Method::GET, "/v1/figures", None, ANSWER)?;
    serde_json::from_value(answer).context("the server's figures have another form: same version?")
}

/// Starts the thread that asks the server. It ends when its receiver is gone.
fn collect(api: PathBuf, interval: Duration) -> Receiver<anyhow::Result<Figures>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(interval);
            if sender.send(sample(&api)).is_err() {
                return;
            }
        }
    });
    receiver
}

fn show(
    terminal: &mut DefaultTerminal,
    first: Figures,
    samples: &Receiver<anyhow::Result<Figures>>,
) -> anyhow::Result<()> {
    let mut view = View::new(first);
    loop {
        terminal.draw(|frame| draw::screen(frame, &view))?;
        // Draws again only if something has changed.
        let mut changed = false;
        while !changed {
            if event::poll(TICK)? {
                changed = true;
                match event::read()? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => {
                        let is_interrupt = key.modifiers.contains(KeyModifiers::CONTROL)
                            && key.code == KeyCode::Char('c');
                        if is_interrupt || view.key(key.code) {
                            return Ok(());
                        }
                    }
                    _ => {}
                }
            }
            for sample in samples.try_iter() {
                changed = true;
                view.add(sample.map_err(|e| format!("{e:#}")));
            }
        }
    }
}
