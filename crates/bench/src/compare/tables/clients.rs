//! The host's file, qemu-storage-daemon and Blockyard, through one load generator: the same file,
//! the same client. The client sleeps on the call eventfd like a guest does, unless a row says
//! otherwise. For the host it does the same load by io_uring.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;

use super::workspace::{Image, Server, Workspace, back_end, load, settle};
use super::{Figures, Measured, Row, Table, cell, grouped, markdown};

/// The storage below the servers.
#[derive(Clone, Copy, PartialEq)]
enum Under {
    Direct,
    Cached,
    Null,
}

struct Load {
    name: String,
    options: String,
    under: Under,
}

pub struct Clients {
    place: Workspace,
    base: PathBuf,
    loads: Vec<Load>,
}

/// Systems in the order of a row. Rows without storage have no `host`.
const SYSTEMS: [&str; 3] = ["host", "qsd", "blockyard"];

fn loads() -> Vec<Load> {
    let load = |name: &str, options: &str, under| Load {
        name: name.into(),
        options: options.into(),
        under,
    };
    let mut loads = Vec::new();
    for (size, order, pattern) in
        [("4k", "random", "rand"), ("64k", "random", "rand"), ("1m", "sequential", "")]
    {
        for rw in ["read", "write"] {
            for depth in [32, 1] {
                let name = format!("{} {order} {rw}, depth {depth}", size.replace('m', "M"));
                let options = format!("--rw {pattern}{rw} --bs {size} --depth {depth}");
                loads.push(load(&name, &options, Under::Direct));
            }
        }
    }
    for (rw, depth) in [("read", 32), ("read", 1), ("write", 32)] {
        let options = format!("--rw rand{rw} --bs 4k --depth {depth} --size 1g");
        loads.push(load(
            &format!("4k random {rw}, page cache, depth {depth}"),
            &options,
            Under::Cached,
        ));
    }
    let null = "--rw randread --bs 4k --depth 32";
    loads.push(load("null, 4k random read, depth 32", null, Under::Null));
    loads.push(load(
        "null, 4k random read, depth 32, client polls",
        &format!("{null} --poll"),
        Under::Null,
    ));
    loads
}

impl Clients {
    pub fn new(place: Workspace) -> Result<Self> {
        let base = place.base()?;
        Ok(Clients { place, base, loads: loads() })
    }

    fn systems(&self, row: usize) -> &'static [&'static str] {
        if self.loads[row].under == Under::Null { &SYSTEMS[1..] } else { &SYSTEMS }
    }
}

impl Table for Clients {
    fn rows(&self) -> Vec<Row> {
        let systems = |row| self.systems(row).iter().map(ToString::to_string).collect();
        self.loads
            .iter()
            .enumerate()
            .map(|(n, load)| Row { name: load.name.clone(), systems: systems(n) })
            .collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        let Load { options, under, .. } = &self.loads[row];
        let cached = *under == Under::Cached;
        settle(&self.base, cached)?;
        let options = format!("{options} {}", self.place.limit());
        let server = match self.systems(row)[system] {
            "host" => {
                let buffered = cached.then(|| OsString::from("--buffered"));
                return load(
                    &options,
                    ["--file".into(), self.base.clone().into()].into_iter().chain(buffered),
                    &self.place.stop,
                );
            }
            "qsd" => Server::Qsd,
            _ => Server::Blockyard,
        };
        let format = if *under == Under::Null { "null" } else { "raw" };
        let image = Image::new(&self.base, format, cached);
        let (mut server, socket) = self.place.vhost_user(server, &image)?;
        let figures = load(&options, back_end(&server, &socket), &self.place.stop)?;
        server.end()?;
        Ok(figures)
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let head = [
            "load",
            "system",
            "IOPS",
            "MB/s",
            "p50 us",
            "p99 us",
            "back end: CPU s per M I/Os",
            "IOPS per core",
            "to host",
            "to qsd",
            "per core to qsd",
        ];
        let mut lines = Vec::new();
        for m in measured {
            let number = |name: &str| m.row.systems.iter().position(|s| s == name);
            for (n, system) in m.row.systems.iter().enumerate() {
                let figure = |key: &str| m.median(n, key);
                let to = |other: &str, key: &str| {
                    let other = number(other).filter(|_| system == "blockyard")?;
                    Some(m.median(n, key)? / m.median(other, key)?)
                };
                let ratio = |value: Option<f64>| cell(value, |x| format!("{x:.2}"));
                lines.push(vec![
                    if n == 0 { m.row.name.clone() } else { String::new() },
                    system.clone(),
                    cell(figure("iops"), grouped),
                    cell(figure("bytes_per_second"), |x| grouped(x / 1e6)),
                    cell(figure("p50_us"), |x| format!("{x:.0}")),
                    cell(figure("p99_us"), |x| format!("{x:.0}")),
                    ratio(figure("cpu_us")),
                    cell(figure("cpu_us").filter(|cpu| *cpu > 0.0), |x| grouped(1e6 / x)),
                    ratio(to("host", "iops")),
                    ratio(to("qsd", "iops")),
                    // A short run may take less processor time than the kernel counts.
                    ratio(to("qsd", "cpu_us").map(|x| 1.0 / x).filter(|x| x.is_finite())),
                ]);
            }
        }
        markdown(&head.map(String::from), &lines)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, measured, rounds};
    use super::*;
    use crate::scratch::Scratch;

    fn table(scratch: &Scratch) -> Clients {
        let place = fixture::place(scratch);
        let base = scratch.file("work/base.img", vec![7; 1 << 20]);
        Clients { place, base, loads: loads() }
    }

    #[test]
    fn the_table_compares_blockyard_with_the_host_and_with_qsd() {
        let figures = |iops: f64, cpu: f64| {
            rounds(&[
                ("iops", [iops, iops * 3.0, iops / 2.0]),
                ("bytes_per_second", [iops * 4096.0; 3]),
                ("p50_us", [80.4; 3]),
                ("p99_us", [250.6; 3]),
                ("cpu_us", [cpu; 3]),
            ])
        };
        let host = rounds(&[("iops", [200_000.0; 3]), ("p50_us", [60.0; 3])]);
        let rows = [
            measured(
                "reads",
                &[
                    ("host", host),
                    ("qsd", figures(100_000.0, 8.0)),
                    ("blockyard", figures(150_000.0, 4.0)),
                ],
            ),
            measured("null", &[("qsd", vec![]), ("blockyard", figures(1_000_000.0, 1.0))]),
        ];
        let cells = fixture::cells(&table(&Scratch::new()).markdown(&rows));
        assert_eq!(cells[1], ["reads", "host", "200,000", "", "60", "", "", "", "", "", ""]);
        let qsd = ["", "qsd", "100,000", "410", "80", "251", "8.00", "125,000", "", "", ""];
        assert_eq!(cells[2], qsd);
        let own = [
            "",
            "blockyard",
            "150,000",
            "614",
            "80",
            "251",
            "4.00",
            "250,000",
            "0.75",
            "1.50",
            "2.00",
        ];
        assert_eq!(cells[3], own);
        // Without a measurement of qemu-storage-daemon, there is no ratio.
        assert_eq!(cells[4][..2], ["null", "qsd"]);
        assert_eq!(cells[5][..3], ["", "blockyard", "1,000,000"]);
        assert_eq!(cells[5][8..], ["", "", ""]);
    }

    #[test]
    fn rows_without_storage_have_no_host() {
        let table = table(&Scratch::new());
        for row in table.rows() {
            let wanted = if row.name.starts_with("null") { &SYSTEMS[1..] } else { &SYSTEMS };
            assert_eq!(row.systems, wanted, "{}", row.name);
        }
        let has = |name: &str| table.loads.iter().find(|load| load.name == name).unwrap();
        assert_eq!(has("1M sequential write, depth 1").options, "--rw write --bs 1m --depth 1");
        assert_eq!(has("64k random read, depth 32").options, "--rw randread --bs 64k --depth 32");
    }

    #[test]
    fn the_host_has_the_same_load_and_a_server_that_fails_is_an_error() {
        let scratch = Scratch::new();
        scratch.script("blockyard", "echo 'no io_uring' >&2; exit 1");
        let mut table = table(&scratch);
        let row =
            table.loads.iter().position(|load| load.name.starts_with("4k random read")).unwrap();
        let figures = table.measure(row, 0).unwrap();
        assert!(figures.contains_key("iops") && !figures.contains_key("cpu_us"), "{figures:?}");
        let error = format!("{:#}", table.measure(row, 2).unwrap_err());
        assert!(error.contains("no io_uring"), "{error}");
    }
}
