//! The screen: a table of disks, or one disk in detail. It fits 80 columns and 24 lines.

use blockyard_control::figures::DiskFigures;
use blockyard_ring::text::clean;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table, TableState};
use unicode_width::UnicodeWidthStr;

use super::view::{Order, Row, View};
use super::words::{count, megabytes, percent, size, time};

/// Heights of bars, in eighths.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Width of the screen from which the table has all columns.
const WIDE: u16 = 110;

/// Width of a column of numbers.
const NUMBER: u16 = 6;

/// Width of the column of states.
const STATE: u16 = 8;

/// A column: title, the order that it shows, whether only a wide screen has it, text of a row.
type Column = (&'static str, Option<Order>, bool, fn(&View, &Row<'_>) -> String);

const COLUMNS: [Column; 12] = [
    ("IOPS", Some(Order::Requests), false, |_, row| count(row.rates.requests)),
    ("R MB/s", Some(Order::Bytes), false, |_, row| megabytes(row.rates.read_bytes)),
    ("W MB/s", Some(Order::Bytes), false, |_, row| megabytes(row.rates.write_bytes)),
    ("p50", None, false, |view, row| quantile(view, row, 0.5)),
    ("p99", Some(Order::Latency), false, |view, row| quantile(view, row, 0.99)),
    ("depth", Some(Order::Depth), false, |_, row| row.figures.in_flight.to_string()),
    ("share", Some(Order::Share), false, |_, row| percent(row.rates.used)),
    ("~CPU", Some(Order::Cpu), false, |_, row| percent(Some(row.rates.cpu))),
    ("limit", None, true, |_, row| count(row.rates.limited)),
    ("wait", None, true, |_, row| count(row.rates.waited)),
    ("err/s", None, true, |_, row| count(row.rates.errors)),
    ("oldest", None, true, |_, row| time(row.figures.oldest)),
];

fn quantile(view: &View, row: &Row<'_>, quantile: f64) -> String {
    time(row.rates.service.quantile(&view.latest.bounds_us, quantile))
}

/// Returns why requests of a disk fail or wait until an operator acts, and its colour. None: they
/// go on.
fn state(disk: &DiskFigures) -> Option<(&'static str, Color)> {
    match () {
        () if disk.poisoned => Some(("poisoned", Color::Red)),
        () if disk.paused > 0 => Some(("paused", Color::Red)),
        () if disk.drained => Some(("drained", Color::Yellow)),
        () => None,
    }
}

/// Draws the screen.
pub fn screen(frame: &mut Frame<'_>, view: &View) {
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(3), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    header(frame, head, view);
    match view.detail_row() {
        Some(row) => detail(frame, body, view, &row),
        None => table(frame, body, view),
    }
    footer(frame, foot, view);
}

fn header(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let latest = &view.latest;
    let mut first = vec![
        Span::from(format!("blockyard {}", latest.version)).bold(),
        Span::from(format!("  pid {}  up {}", latest.process.pid, duration(latest.uptime))),
    ];
    if view.is_paused {
        first.push("  PAUSED".fg(Color::Yellow));
    }
    let all = view.rates.disks.values();
    let sum = |value: fn(&super::rates::DiskRates) -> f64| all.clone().map(value).sum::<f64>();
    let second = format!(
        "{}  {} IOPS  read {} MB/s  write {} MB/s  memory {}",
        match latest.disks.len() {
            1 => "1 disk".into(),
            disks => format!("{disks} disks"),
        },
        count(sum(|disk| disk.requests)),
        megabytes(sum(|disk| disk.read_bytes)),
        megabytes(sum(|disk| disk.write_bytes)),
        size(latest.process.resident_bytes)
    );
    let mut third = vec![Span::from("reactors ")];
    for (at, busy) in view.rates.reactors.iter().enumerate() {
        third.push(Span::from(format!(" {at}:")));
        third.push(Span::styled(format!("{:>3.0}%", busy * 100.0), load_style(*busy)));
    }
    frame.render_widget(Text::from(vec![first.into(), second.into(), Line::from(third)]), area);
}

fn load_style(busy: f64) -> Style {
    match busy {
        busy if busy > 0.95 => Style::new().fg(Color::Red),
        busy if busy > 0.75 => Style::new().fg(Color::Yellow),
        _ => Style::new().fg(Color::Green),
    }
}

/// Returns the width of the longest name of a disk.
pub fn longest_name(view: &View) -> u16 {
    let widths = view.latest.disks.iter().map(|disk| disk.name.width());
    widths.max().unwrap_or(0).min(u16::MAX.into()) as u16
}

fn table(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let rows = view.rows();
    let is_wide = area.width >= WIDE;
    let columns: Vec<_> = COLUMNS.iter().filter(|column| is_wide || !column.2).collect();
    let most = match () {
        () if view.has_whole_names => u16::MAX,
        () if is_wide => 32,
        () => 14,
    };
    let name = longest_name(view).clamp(8, most);
    // The column takes space from the trend, so it is there only if a disk needs it.
    let has_states = rows.iter().any(|row| state(row.figures).is_some());
    let states = if has_states { STATE + 1 } else { 0 };
    let used = name + states + columns.len() as u16 * (NUMBER + 1) + 1;
    let trend = area.width.saturating_sub(used);
    let title = |text: &'static str, order: Option<Order>| {
        let is_order = order == Some(view.order);
        let style = if is_order { Style::new().reversed() } else { Style::new() };
        Span::styled(text, style)
    };
    let mut head = vec![Cell::from(title("disk", Some(Order::Name)))];
    head.extend(has_states.then(|| Cell::from("state")));
    head.extend(columns.iter().map(|(text, order, ..)| right(title(text, *order))));
    head.push(Cell::from("trend"));
    let lines = rows.iter().map(|row| {
        let figures = row.figures;
        let mut cells = vec![Cell::from(clean(&figures.name))];
        let state = state(figures);
        cells.extend(has_states.then(|| Cell::from(state.map_or("", |(name, _)| name))));
        cells.extend(columns.iter().map(|(.., text)| right(Span::from(text(view, row)))));
        cells.push(Cell::from(trend_of(&row.history, trend.into()).fg(Color::Cyan)));
        let style = match state {
            Some((_, color)) => Style::new().fg(color),
            None if row.rates.errors > 0.0 => Style::new().fg(Color::Yellow),
            None => Style::new(),
        };
        TableRow::new(cells).style(style)
    });
    let mut widths = vec![Constraint::Length(name)];
    widths.extend(has_states.then_some(Constraint::Length(STATE)));
    widths.extend(columns.iter().map(|_| Constraint::Length(NUMBER)));
    widths.push(Constraint::Length(trend));
    let table = Table::new(lines, widths)
        .header(TableRow::new(head).style(Style::new().bold().underlined()))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let at = view.selected(&rows);
    let mut state = TableState::new().with_selected((!rows.is_empty()).then_some(at));
    frame.render_stateful_widget(table, area, &mut state);
}

fn right(span: Span<'static>) -> Cell<'static> {
    Cell::from(Line::from(span).alignment(Alignment::Right))
}

/// Returns the last values as bars, relative to the largest one.
fn trend_of(history: &[u64], width: usize) -> String {
    let shown = &history[history.len().saturating_sub(width)..];
    let most = shown.iter().copied().max().unwrap_or(0).max(1);
    shown.iter().map(|value| BARS[(value * 7).div_ceil(most) as usize]).collect()
}

fn detail(frame: &mut Frame<'_>, area: Rect, view: &View, row: &Row<'_>) {
    let operations = row.rates.operations.len() as u16;
    let [about, table, _, title, bars] = Layout::vertical([
        Constraint::Length(4),
        Constraint::Length(operations + 1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(facts(row)), about);
    frame.render_widget(operations_table(view, row), table);
    let what = if view.shows_totals { "since the disk was opened" } else { "in the last interval" };
    let line = format!("service time of all operations, {what}");
    frame.render_widget(Line::from(line).bold(), title);
    frame.render_widget(Text::from(histogram(view, row, bars)), bars);
}

/// Returns lines about a disk: image, sizes, limits, flushes.
fn facts(row: &Row<'_>) -> Vec<Line<'static>> {
    let disk = row.figures;
    let mut first = vec![Span::from(clean(&disk.name)).bold()];
    first.push(format!("  {}  {}", disk.image, size(disk.size)).into());
    if disk.read_only {
        first.push("  read-only".into());
    }
    if disk.poisoned {
        first.push("  POISONED: writes fail".fg(Color::Red));
    }
    if disk.paused > 0 {
        first.push(format!("  PAUSED: {} requests wait for space", disk.paused).fg(Color::Red));
    }
    if disk.drained {
        first.push("  DRAINED: requests wait for ctl resume".fg(Color::Yellow));
    }
    let device = disk.device.as_deref().unwrap_or("none");
    let share = &disk.share;
    let shares = format!(
        "device {device}  weight {:.0}  share {}  waiting {}  for limits {}  for others {}",
        share.weight,
        percent(row.rates.used),
        share.queued,
        count(row.rates.limited),
        count(row.rates.waited)
    );
    let flushes = format!(
        "in flight {}  oldest {}  flushes {}  syncs {}  L2 hits {}  misses {}",
        disk.in_flight,
        time(disk.oldest),
        count(disk.flushes.requested as f64),
        count(disk.flushes.syncs as f64),
        count(disk.metadata.hits as f64),
        count(disk.metadata.misses as f64)
    );
    vec![first.into(), shares.into(), flushes.into(), limits(row).into()]
}

fn limits(row: &Row<'_>) -> String {
    let limits = &row.figures.limits;
    let all = [
        ("iops", &limits.iops),
        ("iops-read", &limits.iops_read),
        ("iops-write", &limits.iops_write),
        ("bps", &limits.bps),
        ("bps-read", &limits.bps_read),
        ("bps-write", &limits.bps_write),
    ];
    let set = all.iter().filter_map(|(name, limit)| Some((name, limit.as_ref()?)));
    let text: Vec<_> = set.map(|(name, limit)| format!("{name} {}", limit.rate)).collect();
    if text.is_empty() { "no limits".into() } else { format!("limits  {}", text.join("  ")) }
}

fn operations_table(view: &View, row: &Row<'_>) -> Table<'static> {
    let bounds = &view.latest.bounds_us;
    let head = ["operation", "IOPS", "MB/s", "merged", "err/s", "queue", "p99", "service", "p99"];
    let lines = row.rates.operations.iter().map(|(name, rates)| {
        let [queue, service] = [&rates.queue, &rates.service]
            .map(|latency| [0.5, 0.99].map(|part| time(latency.quantile(bounds, part))));
        let mut cells = vec![Cell::from(name.clone())];
        let numbers = [
            count(rates.requests),
            megabytes(rates.bytes),
            count(rates.merged),
            count(rates.errors),
        ];
        let all = numbers.into_iter().chain(queue).chain(service);
        cells.extend(all.map(|text| right(Span::from(text))));
        TableRow::new(cells)
    });
    let mut widths = vec![Constraint::Length(12)];
    widths.extend([Constraint::Length(7); 8]);
    let titles = head.iter().enumerate().map(|(at, title)| match at {
        0 => Cell::from(*title),
        _ => right(Span::from(*title)),
    });
    Table::new(lines, widths).header(TableRow::new(titles).style(Style::new().bold().underlined()))
}

/// Returns one line for each bucket that has values, or for several buckets if there is no space.
fn histogram(view: &View, row: &Row<'_>, area: Rect) -> Vec<Line<'static>> {
    let bounds = &view.latest.bounds_us;
    let buckets = &row.rates.service.buckets;
    let used = |count: &u64| *count > 0;
    let (Some(first), Some(last)) = (buckets.iter().position(used), buckets.iter().rposition(used))
    else {
        return vec!["no request has ended".into()];
    };
    let each = (last - first + 1).div_ceil(usize::from(area.height).max(1));
    let groups: Vec<_> =
        buckets[first..=last].chunks(each).map(|g| g.iter().sum::<u64>()).collect();
    let (all, most) = (groups.iter().sum::<u64>(), groups.iter().copied().max().unwrap_or(1));
    let width = f64::from(area.width.saturating_sub(32));
    let line = |(at, count_of): (usize, &u64)| {
        let end = (first + (at + 1) * each - 1).min(last);
        let bound = match bounds.get(end) {
            Some(us) => format!("<= {}", time(Some(*us as f64 / 1e6))),
            None => "more".into(),
        };
        let part = *count_of as f64 / all as f64;
        let bar = "█".repeat((width * *count_of as f64 / most as f64).ceil() as usize);
        Line::from(vec![
            Span::from(format!(
                "{bound:>10} {:>7} {:>5.1}% ",
                count(*count_of as f64),
                part * 100.0
            )),
            bar.fg(Color::Cyan),
        ])
    };
    groups.iter().enumerate().map(line).collect()
}

fn footer(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let line = match (&view.error, &view.detail) {
        (Some(error), _) => Line::from(error.clone()).fg(Color::Red),
        (None, Some(_)) => Line::from("q quit  esc table  ↑↓ other disk  t totals  p pause").dim(),
        (None, None) => Line::from(
            "q quit  enter disk  sort: n name i iops b bytes l p99 d depth s share c cpu  r p",
        )
        .dim(),
    };
    frame.render_widget(line, area);
}

/// Returns a time: `42s`, `3m05s`, `5h02m`, `12d03h`.
fn duration(seconds: f64) -> String {
    let all = seconds as u64;
    match all {
        s if s < 60 => format!("{s}s"),
        s if s < 3600 => format!("{}m{:02}s", s / 60, s % 60),
        s if s < 86_400 => format!("{}h{:02}m", s / 3600, s / 60 % 60),
        s => format!("{}d{:02}h", s / 86_400, s / 3600 % 24),
    }
}
