//! The screen, drawn from samples of a server with four disks under load.

use blockyard_control::figures::{DiskFigures, Figures};
use ratatui::crossterm::event::KeyCode;

use super::rates::{Latency, Rates};
use super::view::View;

fn samples() -> Vec<Figures> {
    serde_json::from_str(include_str!("samples.json")).unwrap()
}

fn view() -> View {
    let mut samples = samples().into_iter();
    let mut view = View::new(samples.next().unwrap());
    samples.for_each(|sample| view.add(Ok(sample)));
    view
}

fn screen(view: &View, width: u16, height: u16) -> Vec<String> {
    super::lines(view, width, height).unwrap()
}

/// Returns the first column of the table.
fn names(lines: &[String]) -> Vec<&str> {
    let rows = lines[4..].iter().map_while(|line| line.split_whitespace().next());
    rows.take(4).collect()
}

#[test]
fn the_table_fits_80_columns_and_shows_more_on_a_wide_screen() {
    let view = view();
    let lines = screen(&view, 80, 24);
    let head: Vec<_> = lines[3].split_whitespace().collect();
    let expected =
        ["disk", "IOPS", "R", "MB/s", "W", "MB/s", "p50", "p99", "depth", "share", "~CPU", "trend"];
    assert_eq!(head, expected, "{lines:#?}");
    assert!(lines[0].starts_with("blockyard 0.2.0") && lines[1].starts_with("4 disks"));
    assert!(lines[2].starts_with("reactors  0:") && lines[2].contains(" 1:"), "{}", lines[2]);
    assert!(lines[23].contains("q quit"), "{lines:#?}");
    let wide = screen(&view, 140, 40);
    for title in ["limit", "wait", "err/s", "oldest"] {
        assert!(wide[3].contains(title), "{}", wide[3]);
    }
    // A screen of any size is drawn.
    for (width, height) in [(1, 1), (10, 3), (20, 6), (79, 23), (300, 5)] {
        screen(&view, width, height);
    }
}

#[test]
fn a_row_has_the_rates_between_the_last_two_samples() {
    let view = view();
    let samples = samples();
    let (old, new) = (&samples[samples.len() - 2], &samples[samples.len() - 1]);
    let requests = |figures: &Figures| -> u64 {
        let disk = figures.disks.iter().find(|disk| disk.name == "backup").unwrap();
        disk.operations.values().map(|operation| operation.requests).sum()
    };
    let rate = (requests(new) - requests(old)) as f64 / (new.uptime - old.uptime);
    assert!((view.rates.disks["backup"].requests - rate).abs() < 1e-6 && rate > 10.0);
    let lines = screen(&view, 80, 24);
    let row = lines.iter().find(|line| line.starts_with("backup")).unwrap();
    assert_eq!(row.split_whitespace().nth(1), Some(super::words::count(rate).as_str()), "{row}");
    assert!(row.ends_with('█') || row.ends_with('▇'), "two rates as a trend: {row}");
}

#[test]
fn keys_order_the_rows() {
    let mut view = view();
    assert!(!view.key(KeyCode::Char('n')));
    assert_eq!(names(&screen(&view, 80, 24)), ["backup", "db", "mail", "web"]);
    view.key(KeyCode::Char('r'));
    assert_eq!(names(&screen(&view, 80, 24)), ["web", "mail", "db", "backup"]);
    view.key(KeyCode::Char('r'));
    view.key(KeyCode::Char('i'));
    let lines = screen(&view, 80, 24);
    let rates: Vec<_> = view.rows().iter().map(|row| row.rates.requests).collect();
    assert!(rates.windows(2).all(|pair| pair[0] >= pair[1]), "{rates:?}");
    assert_eq!(names(&lines).len(), 4);
    view.key(KeyCode::Right);
    view.key(KeyCode::Left);
    assert_eq!(screen(&view, 80, 24), lines);
    assert!(view.key(KeyCode::Char('q')));
}

#[test]
fn a_disk_is_shown_in_detail_with_its_histogram() {
    let mut view = view();
    view.key(KeyCode::Char('n'));
    view.key(KeyCode::Down);
    view.key(KeyCode::Enter);
    let lines = screen(&view, 80, 24);
    assert!(lines[3].starts_with("db  /srv/db.img  64M"), "{lines:#?}");
    assert!(lines[6].contains("iops 20000"), "{}", lines[6]);
    let kinds: Vec<_> = lines[8..11].iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(kinds, ["flush", "read", "write"], "{lines:#?}");
    let bars: Vec<_> = lines.iter().filter(|line| line.contains("% █")).collect();
    assert!(bars.len() > 3 && bars[0].trim_start().starts_with("<= "), "{lines:#?}");
    // The next disk, and back to the table.
    view.key(KeyCode::Down);
    assert!(screen(&view, 80, 24)[3].starts_with("mail"));
    view.key(KeyCode::Esc);
    assert!(screen(&view, 80, 24)[3].starts_with("disk"));
    assert!(view.key(KeyCode::Esc));
}

#[test]
fn a_disk_whose_requests_wait_or_fail_has_a_state() {
    let mut figures = samples().remove(0);
    let set = |figures: &mut Figures, name: &str, change: fn(&mut DiskFigures)| {
        change(figures.disks.iter_mut().find(|disk| disk.name == name).unwrap());
    };
    let healthy = screen(&View::new(figures.clone()), 80, 24);
    assert!(!healthy[3].contains("state"), "no space for it: {}", healthy[3]);
    set(&mut figures, "backup", |disk| disk.drained = true);
    set(&mut figures, "db", |disk| (disk.paused, disk.drained) = (3, true));
    set(&mut figures, "mail", |disk| (disk.poisoned, disk.paused) = (true, 1));
    let mut view = View::new(figures);
    view.key(KeyCode::Char('n'));
    let lines = screen(&view, 80, 24);
    let words = |line: &str| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
    assert_eq!(words(&lines[3]), "disk state");
    let rows: Vec<_> = lines[4..7].iter().map(|line| words(line)).collect();
    assert_eq!(rows, ["backup drained", "db paused", "mail poisoned"], "{lines:#?}");
    assert!(!words(&lines[7]).contains("ed"), "web needs nothing: {}", lines[7]);
    view.key(KeyCode::Enter);
    assert!(screen(&view, 80, 24)[3].contains("DRAINED"), "{lines:#?}");
}

#[test]
fn an_error_and_a_pause_are_shown_and_the_last_figures_stay() {
    let mut view = view();
    view.add(Err("the server did not answer".into()));
    let lines = screen(&view, 80, 24);
    assert_eq!(lines[23], "the server did not answer");
    assert_eq!(names(&lines).len(), 4);
    view.key(KeyCode::Char('p'));
    assert!(screen(&view, 80, 24)[0].contains("PAUSED"));
}

/// Another server may take the socket, and a disk may be removed and added again.
#[test]
fn counts_that_begin_again_make_no_rates() {
    let all = samples();
    let mut other = all[0].clone();
    other.process.pid += 1;
    assert_eq!(Rates::between(&all[1], &other), Rates::default());
    let mut again = all[1].clone();
    again.disks[0].operations.values_mut().for_each(|operation| operation.requests = 0);
    let rates = Rates::between(&all[0], &again);
    assert!(rates.disks.values().all(|disk| disk.requests >= 0.0 && disk.requests.is_finite()));
}

#[test]
fn a_name_with_control_characters_does_not_reach_the_terminal() {
    let mut figures = samples().remove(0);
    figures.disks[0].name = "a\x1b[31m\n\u{202e}b".into();
    let lines = screen(&View::new(figures), 80, 24);
    let is_clean = |line: &String| !line.contains(blockyard_ring::text::is_deceptive);
    assert!(lines.iter().all(is_clean), "{lines:#?}");
}

/// `top --once` is read by programs.
#[test]
fn a_name_with_wide_characters_is_printed_as_it_is() {
    let mut figures = samples().remove(0);
    figures.disks[0].name = "日本".into();
    let lines = screen(&View::new(figures), 80, 24);
    assert!(lines.iter().any(|line| line.starts_with("日本 ")), "{lines:#?}");
}

#[test]
fn a_long_name_is_printed_whole_and_cut_on_a_screen() {
    let mut figures = samples().remove(0);
    let name = "x".repeat(255);
    figures.disks[0].name = name.clone();
    figures.disks[0].drained = true;
    let screen = screen(&View::new(figures.clone()), 140, 24);
    assert!(screen.iter().any(|line| line.starts_with(&format!("{} ", "x".repeat(32)))));
    let text = super::text_once(View::new(figures)).unwrap();
    let row = text.lines().find(|line| line.starts_with('x')).unwrap();
    let words: Vec<_> = row.split_whitespace().collect();
    assert_eq!(words[..2], [&name[..], "drained"], "{row}");
    let head = text.lines().find(|line| line.starts_with("disk ")).unwrap();
    assert!(head.contains(" IOPS ") && head.contains("oldest"), "{head}");
}

#[test]
fn the_detail_of_a_removed_disk_is_left() {
    let mut view = View::new(samples().remove(0));
    view.detail = Some(view.latest.disks[0].name.clone());
    let mut next = view.latest.clone();
    view.add(Ok(next.clone()));
    assert!(view.detail.is_some());
    next.disks.remove(0);
    view.add(Ok(next));
    assert_eq!(view.detail, None);
}

#[test]
fn a_quantile_is_interpolated_in_its_bucket() {
    let latency = Latency { buckets: vec![0, 0, 10, 0, 90] };
    let bounds = [1, 2, 4, 8, 16];
    let of = |part| latency.quantile(&bounds, part).map(|time| (time * 1e9).round());
    assert_eq!(of(0.05), Some(3000.0));
    assert_eq!(of(0.1), Some(4000.0));
    assert_eq!(of(1.0), Some(16000.0));
    assert_eq!(Latency::default().quantile(&bounds, 0.5), None);
    // Above the last bound nothing is known but the bound.
    assert_eq!(Latency { buckets: vec![0, 1] }.quantile(&[7], 0.5), Some(7e-6));
}
