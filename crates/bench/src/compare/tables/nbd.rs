//! NBD servers: Blockyard, qemu-nbd and nbdkit's file plugin over a Unix socket, under fio's nbd
//! engine (libnbd). A job of fio is a connection, and its depth is that connection's. CPU is the
//! server's, for each I/O.
//!
//! ```text
//!   direct  a file on the disk, O_DIRECT. nbdkit's file plugin has no O_DIRECT, its cache=none
//!           drops pages afterwards. The page cache answers its writes, so they are in brackets
//!           in the table, and are not compared
//!   cached  the same file in the page cache
//!   null    no storage: the cost of the protocol
//! ```
//! The host's row is fio on the file itself, by io_uring: the rate of the storage at that time.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use super::workspace::{Workspace, run, settle};
use super::{Figures, Measured, Row, Table, cell, grouped, markdown};
use crate::compare::cpu::Snapshot;
use crate::process::Process;

const SERVERS: [&str; 3] = ["blockyard", "qemu-nbd", "nbdkit"];
const HOST: &str = "host";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Under {
    Direct,
    Cached,
    Null,
}

struct Load {
    under: Under,
    rw: &'static str,
    bs: &'static str,
    depth: u32,
    connections: u64,
}

pub struct Nbd {
    place: Workspace,
    base: PathBuf,
    loads: Vec<Load>,
}

fn loads() -> Vec<Load> {
    let mut loads = Vec::new();
    let mut add =
        |under, rw, bs, depth, connections| loads.push(Load { under, rw, bs, depth, connections });
    for under in [Under::Direct, Under::Cached] {
        for connections in [1, 4] {
            for rw in ["randread", "randwrite"] {
                for depth in [1, 32, 64] {
                    add(under, rw, "4k", depth, connections);
                }
            }
            for rw in ["read", "write"] {
                add(under, rw, "1M", 8, connections);
            }
        }
    }
    for (rw, bs) in [("randread", "4k"), ("randwrite", "4k"), ("read", "1M")] {
        for connections in [1, 4] {
            add(Under::Null, rw, bs, 32, connections);
        }
    }
    loads
}

impl Load {
    fn name(&self) -> String {
        let Load { under, rw, bs, depth, connections } = self;
        let (order, rw) = rw.strip_prefix("rand").map_or(("sequential", *rw), |rw| ("random", rw));
        let many = if *connections > 1 { "s" } else { "" };
        let under = format!("{under:?}").to_lowercase();
        format!("{under}: {bs} {order} {rw}, depth {depth}, {connections} connection{many}")
    }

    /// Returns whether Blockyard is compared with this server.
    fn compares_with(&self, server: usize) -> bool {
        server == 1 || (server == 2 && !(self.under == Under::Direct && self.rw.ends_with("write")))
    }
}

impl Nbd {
    pub fn new(place: Workspace) -> Result<Self> {
        let base = place.base()?;
        Ok(Nbd { place, base, loads: loads() })
    }

    fn server(&self, name: &str, under: Under) -> Result<(Process, PathBuf)> {
        let socket = self.place.socket();
        let direct = under == Under::Direct;
        let mut command = match name {
            "blockyard" => Command::new(&self.place.program),
            "qemu-nbd" => self.place.tool("qemu-nbd")?,
            _ => self.place.tool("nbdkit")?,
        };
        let null = Path::new(if name == "blockyard" { "null:2G" } else { "null-co://" });
        let target = if under == Under::Null { null } else { &self.base };
        match name {
            "blockyard" => {
                let cache = if direct { "none" } else { "writeback" };
                command.args(["--log", "error", "serve"]).arg(target);
                command.args([
                    "--name",
                    "disk",
                    "--cache",
                    cache,
                    "--nbd",
                    &format!("unix:{}", socket.display()),
                ]);
            }
            "qemu-nbd" => {
                command.args(["-t", "-e", "8", "-x", "disk", "-k"]).arg(&socket);
                match under {
                    Under::Direct => command.args(["--cache=none", "--aio=io_uring"]),
                    Under::Cached => command.args(["--cache=writeback", "--aio=io_uring"]),
                    Under::Null => &mut command,
                };
                if under != Under::Null {
                    command.args(["-f", "raw", "--discard=unmap"]);
                }
                command.arg(target);
            }
            _ => {
                command.args(["-f", "-e", "disk", "-U"]).arg(&socket);
                match under {
                    Under::Direct => command.arg("file").arg(target).arg("cache=none"),
                    Under::Cached => command.arg("file").arg(target),
                    Under::Null => command.args(["null", "2G"]),
                };
            }
        }
        Ok((self.place.start(&command, &socket)?, socket))
    }

    /// Returns fio's job for the load.
    fn fio(&self, load: &Load, target: &[String]) -> Result<Value> {
        let Load { under, rw, bs, depth, connections } = load;
        let mib = self.place.size >> 20;
        let size = if *under == Under::Null { mib.min(1024) } else { mib / connections };
        let mut command = self.place.tool("fio")?;
        command.args(["--output-format=json", "--name=load"]).args(target);
        command.args([
            format!("--rw={rw}"),
            format!("--bs={bs}"),
            format!("--iodepth={depth}"),
            format!("--numjobs={connections}"),
            format!("--runtime={}", self.place.seconds),
            format!("--size={size}m"),
        ]);
        command.args([
            "--group_reporting",
            "--thread",
            "--norandommap",
            "--randrepeat=0",
            "--time_based",
        ]);
        if *under != Under::Null && *connections > 1 {
            command.arg(format!("--offset_increment={size}m"));
        }
        let out = run(&mut command)?;
        // fio may print notes before the JSON.
        let json = &out[out.find('{').context("fio prints no JSON")?..];
        Ok(serde_json::from_str::<Value>(json)?["jobs"][0].take())
    }
}

impl Table for Nbd {
    fn rows(&self) -> Vec<Row> {
        let row = |load: &Load| {
            let host = (load.under != Under::Null).then_some(HOST);
            Row {
                name: load.name(),
                systems: SERVERS.into_iter().chain(host).map(String::from).collect(),
            }
        };
        self.loads.iter().map(row).collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        let load = &self.loads[row];
        if load.under != Under::Null {
            settle(&self.base, load.under == Under::Cached)?;
        }
        let (job, used) = match SERVERS.get(system) {
            Some(name) => {
                let (mut server, socket) = self.server(name, load.under)?;
                let before = Snapshot::take();
                let uri = format!("--uri=nbd+unix:///disk?socket={}", socket.display());
                let job = self.fio(load, &["--ioengine=nbd".into(), uri])?;
                let used = Snapshot::take().tree(server.pid()) - before.tree(server.pid());
                server.end()?;
                (job, Some(used))
            }
            None => {
                let direct = format!("--direct={}", u8::from(load.under == Under::Direct));
                let file = format!("--filename={}", self.base.display());
                (self.fio(load, &["--ioengine=io_uring".into(), file, direct])?, None)
            }
        };
        let side = &job[if load.rw.contains("read") { "read" } else { "write" }];
        let figure = |value: &Value| value.as_f64().context("fio's JSON lacks a figure");
        let percentile = |name: &str| {
            Ok::<_, anyhow::Error>(figure(&side["clat_ns"]["percentile"][name])? / 1e3)
        };
        let mut figures = Figures::from([
            ("iops", figure(&side["iops"])?),
            ("bytes_per_second", figure(&side["bw_bytes"])?),
            ("p50_us", percentile("50.000000")?),
            ("p99_us", percentile("99.000000")?),
        ]);
        if let Some(used) = used {
            figures.insert("cpu_us", used * 1e6 / figure(&side["total_ios"])?.max(1.0));
        }
        Ok(figures)
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let head = [
            "load",
            "blockyard, IOPS",
            "qemu-nbd, IOPS",
            "nbdkit, IOPS",
            "to the better peer",
            "p99 us",
            "CPU us/I/O: blockyard",
            "qemu-nbd",
            "nbdkit",
            "to the better peer",
            "host, IOPS",
            "of the host",
        ];
        let line = |m: &Measured| {
            let load = &self.loads[m.number];
            let peers: Vec<_> =
                (0..SERVERS.len()).filter(|server| load.compares_with(*server)).collect();
            let text = |server: usize, key: &str, text: &dyn Fn(f64) -> String| {
                let text = cell(m.median(server, key), text);
                if server == 0 || peers.contains(&server) { text } else { format!("({text})") }
            };
            let all = |key: &str, as_text: &dyn Fn(f64) -> String| {
                [0, 1, 2].map(|server| text(server, key, as_text))
            };
            let of_peers = |key: &str, better: fn(f64, f64) -> f64| {
                peers.iter().filter_map(|server| m.median(*server, key)).reduce(better)
            };
            let ratio = |key: &str, other: Option<f64>| {
                cell(m.median(0, key).zip(other).map(|(own, other)| own / other), |x| {
                    format!("{x:.2}")
                })
            };
            let host = (m.row.systems.len() > SERVERS.len())
                .then(|| m.median(SERVERS.len(), "iops"))
                .flatten();
            let mut cells = vec![m.row.name.clone()];
            cells.extend(all("iops", &grouped));
            cells.push(ratio("iops", of_peers("iops", f64::max)));
            cells.push(all("p99_us", &grouped).join(" / "));
            cells.extend(all("cpu_us", &|x| format!("{x:.1}")));
            cells.push(ratio("cpu_us", of_peers("cpu_us", f64::min)));
            cells.push(cell(host, grouped));
            cells.push(ratio("iops", host));
            cells
        };
        markdown(&head.map(String::from), &measured.iter().map(line).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_is_done() {
        let all = loads();
        assert_eq!(all[0].name(), "direct: 4k random read, depth 1, 1 connection");
        assert_eq!(all[all.len() - 1].name(), "null: 1M sequential read, depth 32, 4 connections");
        // nbdkit's direct writes are answered from the page cache.
        let write =
            all.iter().find(|load| load.under == Under::Direct && load.rw == "randwrite").unwrap();
        assert_eq!([0, 1, 2].map(|server| write.compares_with(server)), [false, true, false]);
    }
}
