//! What the screen shows: the samples, the order of the rows, the selected disk, and the keys.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

use blockyard_control::figures::{DiskFigures, Figures};
use ratatui::crossterm::event::KeyCode;

use super::rates::{DiskRates, Rates};

/// Number of samples that a chart shows at most.
const HISTORY: usize = 240;

/// The column that orders the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Name,
    Requests,
    Bytes,
    Latency,
    Depth,
    Share,
    Cpu,
}

impl Order {
    /// All orders, in the order of the columns, with their keys.
    pub const ALL: [(Order, char); 7] = [
        (Order::Name, 'n'),
        (Order::Requests, 'i'),
        (Order::Bytes, 'b'),
        (Order::Latency, 'l'),
        (Order::Depth, 'd'),
        (Order::Share, 's'),
        (Order::Cpu, 'c'),
    ];
}

/// State of the screen.
pub struct View {
    pub latest: Figures,
    pub rates: Rates,
    /// Rates since the disks were opened.
    pub totals: Rates,
    /// Why there is no newer sample.
    pub error: Option<String>,
    pub order: Order,
    pub is_reversed: bool,
    /// Samples that arrive are dropped.
    pub is_paused: bool,
    /// Whether the table shows each name whole, however wide that is.
    pub has_whole_names: bool,
    /// The disk that is shown in detail.
    pub detail: Option<String>,
    /// Whether the detail shows totals since the disk was opened.
    pub shows_totals: bool,
    /// Name of the selected disk.
    selected: Option<String>,
    history: BTreeMap<String, VecDeque<u64>>,
}

/// A row of the table.
pub struct Row<'a> {
    pub figures: &'a DiskFigures,
    pub rates: DiskRates,
    /// Requests a second, the latest last.
    pub history: Vec<u64>,
}

impl View {
    pub fn new(first: Figures) -> Self {
        let mut view = View {
            latest: Figures::default(),
            rates: Rates::default(),
            totals: Rates::default(),
            error: None,
            order: Order::Requests,
            is_reversed: false,
            is_paused: false,
            has_whole_names: false,
            detail: None,
            shows_totals: false,
            selected: None,
            history: BTreeMap::new(),
        };
        view.replace(first);
        view
    }

    /// Adds a sample, or an error.
    pub fn add(&mut self, sample: Result<Figures, String>) {
        match sample {
            Ok(_) if self.is_paused => {}
            Ok(figures) => {
                self.rates = Rates::between(&self.latest, &figures);
                self.replace(figures);
                for (name, rates) in &self.rates.disks {
                    let history = self.history.entry(name.clone()).or_default();
                    history.push_back(rates.requests as u64);
                    if history.len() > HISTORY {
                        history.pop_front();
                    }
                }
                let disks = &self.rates.disks;
                self.history.retain(|name, _| disks.contains_key(name));
            }
            Err(error) => self.error = Some(error),
        }
    }

    fn replace(&mut self, figures: Figures) {
        let mut start = Figures { process: figures.process.clone(), ..Figures::default() };
        start.reactors.resize(figures.reactors.len(), Default::default());
        self.totals = Rates::between(&start, &figures);
        // Another disk may get the name later.
        let is_there = |name: &String| figures.disks.iter().any(|disk| &disk.name == name);
        self.detail = self.detail.take().filter(is_there);
        self.latest = figures;
        self.error = None;
    }

    /// Returns the rows in their order.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let row = |figures| self.row(figures);
        let mut rows: Vec<_> = self.latest.disks.iter().map(row).collect();
        rows.sort_by(|a, b| {
            let order = self.compare(a, b);
            if self.is_reversed { order.reverse() } else { order }
        });
        rows
    }

    fn row<'a>(&self, figures: &'a DiskFigures) -> Row<'a> {
        let rates = self.rates.disks.get(&figures.name).cloned().unwrap_or_default();
        let history = self.history.get(&figures.name);
        Row { figures, rates, history: history.into_iter().flatten().copied().collect() }
    }

    /// Returns the row of the disk that is shown in detail. None: the table is shown.
    pub fn detail_row(&self) -> Option<Row<'_>> {
        let name = self.detail.as_ref()?;
        let mut row = self.row(self.latest.disks.iter().find(|disk| &disk.name == name)?);
        if self.shows_totals {
            row.rates = self.totals.disks.get(name).cloned().unwrap_or_default();
        }
        Some(row)
    }

    fn compare(&self, a: &Row<'_>, b: &Row<'_>) -> Ordering {
        let bounds = &self.latest.bounds_us;
        let value = |row: &Row<'_>| match self.order {
            Order::Name => 0.0,
            Order::Requests => row.rates.requests,
            Order::Bytes => row.rates.read_bytes + row.rates.write_bytes,
            Order::Latency => row.rates.service.quantile(bounds, 0.99).unwrap_or(-1.0),
            Order::Depth => row.figures.in_flight as f64,
            Order::Share => row.rates.used.unwrap_or(-1.0),
            Order::Cpu => row.rates.cpu,
        };
        value(b).total_cmp(&value(a)).then_with(|| a.figures.name.cmp(&b.figures.name))
    }

    /// Returns the position of the selected disk in the rows.
    pub fn selected(&self, rows: &[Row<'_>]) -> usize {
        let name = self.selected.as_ref();
        let found = name.and_then(|name| rows.iter().position(|row| &row.figures.name == name));
        found.unwrap_or(0)
    }

    fn select(&mut self, to: impl FnOnce(usize, usize) -> usize) {
        let rows = self.rows();
        let at = to(self.selected(&rows), rows.len()).min(rows.len().saturating_sub(1));
        let name = rows.get(at).map(|row| row.figures.name.clone());
        drop(rows);
        // The detail follows, so that arrows show one disk after the other.
        if self.detail.is_some() {
            self.detail.clone_from(&name);
        }
        self.selected = name;
    }

    /// Handles a key. Returns true if it ends the program.
    pub fn key(&mut self, key: KeyCode) -> bool {
        match key {
            KeyCode::Char('q') => return true,
            KeyCode::Esc => return self.detail.take().is_none(),
            KeyCode::Backspace => self.detail = None,
            KeyCode::Enter => {
                let rows = self.rows();
                let name = rows.get(self.selected(&rows)).map(|row| row.figures.name.clone());
                drop(rows);
                self.detail = if self.detail.is_some() { None } else { name };
            }
            KeyCode::Up | KeyCode::Char('k') => self.select(|at, _| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(|at, _| at + 1),
            KeyCode::PageUp => self.select(|at, _| at.saturating_sub(10)),
            KeyCode::PageDown => self.select(|at, _| at + 10),
            KeyCode::Home => self.select(|_, _| 0),
            KeyCode::End => self.select(|_, len| len),
            KeyCode::Left | KeyCode::Right => {
                let len = Order::ALL.len();
                let at = Order::ALL.iter().position(|(order, _)| *order == self.order);
                let step = if key == KeyCode::Right { 1 } else { len - 1 };
                self.order = Order::ALL[(at.unwrap_or(0) + step) % len].0;
            }
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('t') => self.shows_totals = !self.shows_totals,
            KeyCode::Char(c) => {
                let found = Order::ALL.iter().find(|(_, key)| *key == c);
                self.order = found.map_or(self.order, |(order, _)| *order);
            }
            _ => {}
        }
        false
    }
}
