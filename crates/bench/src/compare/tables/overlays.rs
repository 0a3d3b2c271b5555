//! Copy-on-write images: Blockyard's qcow2 beside its own raw and qemu-storage-daemon's qcow2.
//!
//! Each measurement of first writes has a new overlay. All overlays have the same base, a raw file
//! in which every block was written.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::workspace::{Image, Server, Workspace, back_end, load, settle};
use super::{Figures, Measured, Row, Table, cell, grouped, markdown};
use crate::compare::blockdev::ImageFile;

/// The options that `blockyard image create -b` chooses, and QEMU's default.
const OURS: &str = "extended_l2=on,cluster_size=128k";
const QEMUS: &str = "cluster_size=64k";
/// Number of first writes in a measurement.
const OPS: u64 = 8000;

/// The kind of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Made {
    Raw,
    /// All clusters are allocated. They lie in the host's file in the same order as on the guest's
    /// disk.
    Full,
    /// An empty overlay on the raw file.
    Overlay,
    /// Seven overlays, one on another, on an image with all clusters allocated.
    Chain,
    /// A disk of 1 TiB. All clusters are allocated, but are holes in the host's file. So reads of
    /// the data are cheap, and the measurement shows the cost of lookups.
    Tera,
}

/// A back end with an image and its qcow2 options.
#[derive(Clone, Copy)]
struct System {
    name: &'static str,
    server: Server,
    made: Made,
    options: &'static str,
    /// See [`Image::crash_safety`].
    crash_safety: Option<&'static str>,
}

struct Load {
    name: &'static str,
    options: String,
    systems: Vec<System>,
    cached: bool,
}

pub struct Overlays {
    place: Workspace,
    base: PathBuf,
    loads: Vec<Load>,
}

fn loads() -> Vec<Load> {
    use Server::{Blockyard, Qsd};
    let system = |name, server, made| System::new(name, server, made, QEMUS);
    let wide = |name, server, made| System::new(name, server, made, OURS);
    let raw = system("blockyard raw", Blockyard, Made::Raw);
    let full = vec![
        raw,
        system("blockyard qcow2", Blockyard, Made::Full),
        system("qsd qcow2", Qsd, Made::Full),
    ];
    let all =
        [full.clone(), vec![wide("blockyard qcow2, extended L2", Blockyard, Made::Full)]].concat();
    let first = vec![
        raw,
        system("blockyard, 64k", Blockyard, Made::Overlay),
        system("qsd, 64k", Qsd, Made::Overlay),
        wide("blockyard, extended L2, 128k", Blockyard, Made::Overlay),
        wide("qsd, extended L2, 128k", Qsd, Made::Overlay),
    ];
    let chains = vec![
        system("chain of 1", Blockyard, Made::Full),
        system("chain of 8", Blockyard, Made::Chain),
        system("qsd, chain of 8", Qsd, Made::Chain),
    ];
    let tera = vec![
        system("blockyard", Blockyard, Made::Tera),
        wide("blockyard, extended L2, 128k", Blockyard, Made::Tera),
        system("qsd", Qsd, Made::Tera),
    ];
    let read = "--rw randread --bs 4k --depth 32";
    let cached = format!("{read} --size 1g");
    let writes = |bs, ops| writes(bs, 32, ops);
    let load = |name, options: String, systems: &[System], cached| Load {
        name,
        options,
        systems: systems.to_vec(),
        cached,
    };
    vec![
        load("allocated, 4k random read, depth 32", read.into(), &all, false),
        load(
            "allocated, 4k random write, depth 32",
            "--rw randwrite --bs 4k --depth 32".into(),
            &all,
            false,
        ),
        load(
            "allocated, 4k random read, depth 1",
            "--rw randread --bs 4k --depth 1".into(),
            &full,
            false,
        ),
        load(
            "allocated, 64k random write, depth 32",
            "--rw randwrite --bs 64k --depth 32".into(),
            &full,
            false,
        ),
        load("allocated, 1M read, depth 8", "--rw read --bs 1m --depth 8".into(), &full, false),
        load("allocated, 4k random read, page cache, depth 32", cached.clone(), &full, true),
        load("first writes, 4k random, depth 32", writes("4k", OPS), &first, false),
        load(
            "first writes, 4k random, depth 32, flush every 32",
            writes("4k", OPS) + " --flush-every 32",
            &first,
            false,
        ),
        load("first writes, 64k random, depth 32", writes("64k", OPS / 4), &first, false),
        load("chain, 4k random read, depth 32", read.into(), &chains, false),
        load("image of 1 TiB, 4k random read, depth 32", read.into(), &tera, false),
        load("chain, 4k random read, page cache, depth 32", cached, &chains, true),
    ]
}

/// Returns a load of first writes. It ends with a flush, because Blockyard copies the rest of a
/// cluster at the next flush.
fn writes(bs: &str, depth: u32, ops: u64) -> String {
    format!("--rw randwrite --bs {bs} --depth {depth} --ops {ops} --end-flush")
}

/// Returns the loads that show what the journal costs: each first write enters a change into it.
fn loads_of_journal() -> Vec<Load> {
    let load = |name, depth, made, options| Load {
        name,
        options: writes("4k", depth, OPS),
        systems: ["off", "journal"]
            .map(|kind| System {
                crash_safety: Some(kind),
                ..System::new(kind, Server::Blockyard, made, options)
            })
            .into(),
        cached: false,
    };
    vec![
        load("crash safety, first writes, 4k random, depth 1", 1, Made::Overlay, OURS),
        load("crash safety, first writes, 4k random, depth 32", 32, Made::Overlay, OURS),
        load("crash safety, first writes, 64k clusters, depth 32", 32, Made::Overlay, QEMUS),
        load("crash safety, allocated, 4k random write, depth 1", 1, Made::Full, OURS),
    ]
}

impl System {
    fn new(name: &'static str, server: Server, made: Made, options: &'static str) -> Self {
        System { name, server, made, options, crash_safety: None }
    }
}

impl Overlays {
    pub fn new(place: Workspace) -> Result<Self> {
        let base = place.base()?;
        let loads = [loads(), loads_of_journal()].into_iter().flatten().collect();
        Ok(Overlays { place, base, loads })
    }

    /// Prepares an image. Returns it and the images that back it.
    fn chain(&self, made: Made, options: &str) -> Result<Vec<ImageFile>> {
        let base = ImageFile::new(&*self.base, "raw");
        if made == Made::Raw {
            return Ok(vec![base]);
        }
        let mut backing = Vec::new();
        let kind = if options == OURS { "wide" } else { "plain" };
        let image = self.place.folder.join(format!("{made:?}-{kind}.qcow2").to_lowercase());
        let overlay = |below: &Path, format: &str, image: &Path| {
            let _ = std::fs::remove_file(image);
            let words = format!("create -q -f qcow2 -o {options} -F {format} -b");
            self.place.qemu_img(&words, &[below, image])
        };
        match made {
            Made::Overlay => {
                overlay(&self.base, "raw", &image)?;
                backing.push(base);
            }
            Made::Chain => {
                backing = self.chain(Made::Full, options)?;
                for number in 2..8 {
                    let link = self.place.folder.join(format!("link-{number}.qcow2"));
                    backing.insert(0, ImageFile::new(link, "qcow2"));
                }
                if !image.exists() {
                    for links in backing.windows(2).rev() {
                        overlay(&links[1].path, "qcow2", &links[0].path)?;
                    }
                    overlay(&backing[0].path, "qcow2", &image)?;
                }
            }
            _ if image.exists() => {}
            Made::Full => {
                // The image is copied once more in sequential order, because a file system
                // allocates random writes in the order of their arrival.
                let parts = self.place.folder.join("parts.qcow2");
                self.place.qemu_img(
                    &format!("convert -f raw -O qcow2 -o {options}"),
                    &[&self.base, &parts],
                )?;
                std::fs::copy(&parts, &image)?;
                std::fs::remove_file(&parts)?;
            }
            _ => {
                let words = format!("create -q -f qcow2 -o preallocation=metadata,{options}");
                self.place.qemu_img(&words, &[&image, Path::new("1T")])?;
            }
        }
        Ok([vec![ImageFile::new(image, "qcow2")], backing].concat())
    }
}

impl Table for Overlays {
    fn rows(&self) -> Vec<Row> {
        let systems = |load: &Load| load.systems.iter().map(|s| s.name.to_string()).collect();
        self.loads
            .iter()
            .map(|load| Row { name: load.name.into(), systems: systems(load) })
            .collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        let Load { options, systems, cached, .. } = &self.loads[row];
        let System { server, made, options: qcow2, crash_safety, .. } = systems[system];
        let chain = self.chain(made, qcow2)?;
        chain.iter().try_for_each(|file| settle(&file.path, *cached))?;
        let (ImageFile { path, format }, backing) = (&chain[0], &chain[1..]);
        let options = match options.contains("--ops") {
            true => options.clone(),
            false => format!("{options} {}", self.place.limit()),
        };
        let image = Image { crash_safety, backing, ..Image::new(path, format, *cached) };
        let (mut server, socket) = self.place.vhost_user(server, &image)?;
        let mut figures = load(&options, back_end(&server, &socket), &self.place.stop)?;
        figures.insert("memory_mib", memory(server.pid())?);
        server.end()?;
        Ok(figures)
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    fn is_ours(&self, row: usize, system: usize) -> bool {
        let System { server, crash_safety, .. } = self.loads[row].systems[system];
        // An earlier build may not have the option.
        server == Server::Blockyard && crash_safety.is_none()
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let head = [
            "load",
            "system",
            "IOPS",
            "p50 us",
            "p99 us",
            "back end: CPU s per M I/Os",
            "IOPS per core",
            "memory, MiB",
            "to the first",
        ];
        let mut lines = Vec::new();
        for m in measured {
            for (n, system) in m.row.systems.iter().enumerate() {
                let figure = |key: &str| m.median(n, key);
                let whole = |key: &str| cell(figure(key), |x| format!("{x:.0}"));
                let to_first =
                    figure("iops").zip(m.median(0, "iops")).map(|(own, first)| own / first);
                lines.push(vec![
                    if n == 0 { m.row.name.clone() } else { String::new() },
                    system.clone(),
                    cell(figure("iops"), grouped),
                    whole("p50_us"),
                    whole("p99_us"),
                    cell(figure("cpu_us"), |x| format!("{x:.2}")),
                    cell(figure("cpu_us").filter(|cpu| *cpu > 0.0), |x| grouped(1e6 / x)),
                    whole("memory_mib"),
                    cell(to_first, |x| format!("{x:.2}")),
                ]);
            }
        }
        markdown(&head.map(String::from), &lines)
    }
}

/// Returns the private memory of a process in MiB, without mapped files and client memory.
fn memory(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kilobytes
        .map(|k| k / 1024.0)
        .ok_or_else(|| anyhow::anyhow!("process {pid} says nothing of its memory"))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, RECORD, measured, rounds};
    use super::*;
    use crate::scratch::Scratch;

    fn table(scratch: &Scratch) -> Overlays {
        let place = fixture::place(scratch);
        let base = scratch.file("work/base.img", [7; 4096]);
        let loads = [loads(), loads_of_journal()].into_iter().flatten().collect();
        Overlays { place, base, loads }
    }

    #[test]
    fn the_table_has_medians_and_their_ratio_to_the_first_system() {
        let raw = rounds(&[
            ("iops", [100_000.0, 120_000.0, 110_000.0]),
            ("p50_us", [9.6, 10.4, 99.0]),
            ("p99_us", [30.0; 3]),
            ("cpu_us", [2.0, 2.5, 1.5]),
            ("memory_mib", [50.4, 50.4, 60.0]),
        ]);
        // The processor time of this back end was too short to be counted.
        let quick = rounds(&[("iops", [55_000.0]), ("cpu_us", [0.0])]);
        let row = measured("first writes", &[("raw", raw), ("quick", quick), ("none", vec![])]);
        let text = table(&Scratch::new()).markdown(&[row]);
        let cells = fixture::cells(&text);
        assert_eq!(cells[0].last().unwrap(), "to the first");
        let raw = ["first writes", "raw", "110,000", "10", "30", "2.00", "500,000", "50", "1.00"];
        assert_eq!(cells[1], raw);
        assert_eq!(cells[2], ["", "quick", "55,000", "", "", "0.00", "", "", "0.50"]);
        assert_eq!(cells[3], ["", "none", "", "", "", "", "", "", ""]);
    }

    #[test]
    fn rows_and_their_systems_have_different_names() {
        let table = table(&Scratch::new());
        let rows = table.rows();
        let different = |names: Vec<&str>| {
            let set: std::collections::BTreeSet<_> = names.iter().collect();
            set.len() == names.len()
        };
        assert!(different(rows.iter().map(|row| &*row.name).collect()));
        for (number, row) in rows.iter().enumerate() {
            assert!(different(row.systems.iter().map(|s| &**s).collect()), "{}", row.name);
            for (n, system) in row.systems.iter().enumerate() {
                // An earlier build measures Blockyard's systems, if it has their options.
                let ours = !system.starts_with("qsd") && !row.name.starts_with("crash safety");
                assert_eq!(table.is_ours(number, n), ours, "{}: {system}", row.name);
            }
        }
    }

    #[test]
    fn first_writes_end_with_a_flush_and_all_other_loads_have_a_time() {
        for load in &table(&Scratch::new()).loads {
            let first = load.systems.iter().any(|s| s.made == Made::Overlay);
            if first {
                assert!(load.options.contains("--end-flush"), "{}", load.name);
            }
            let by_number = load.options.contains("--ops");
            assert_eq!(by_number, first || load.name.starts_with("crash safety"), "{}", load.name);
        }
    }

    #[test]
    fn each_image_of_a_chain_is_made_after_the_image_below_it() {
        let scratch = Scratch::new();
        scratch.script("tool", RECORD);
        let table = table(&scratch);
        let chain = table.chain(Made::Chain, QEMUS).unwrap();
        let names: Vec<_> =
            chain.iter().map(|file| file.path.file_name().unwrap().to_str().unwrap()).collect();
        let links = ["link-2.qcow2", "link-3.qcow2", "link-4.qcow2", "link-5.qcow2"];
        assert_eq!(names[0], "chain-plain.qcow2");
        assert_eq!((names.len(), names[7]), (8, "full-plain.qcow2"));
        assert!(links.iter().all(|link| names.contains(link)), "{names:?}");
        // A call says the new image last, and the image below it just before.
        let calls = scratch.lines("calls");
        assert!(calls[0].contains("convert -f raw -O qcow2 -o cluster_size=64k"), "{calls:?}");
        let made: Vec<(&str, &str)> = calls[1..]
            .iter()
            .map(|call| {
                let words: Vec<_> = call.split(' ').collect();
                (words[words.len() - 2], words[words.len() - 1])
            })
            .collect();
        assert_eq!(made.len(), 7);
        for (below, next) in made.iter().zip(&made[1..]) {
            assert_eq!(below.1, next.0, "{made:?}");
        }
        assert!(
            made[0].0.ends_with("full-plain.qcow2") && made[6].1.ends_with("chain-plain.qcow2")
        );
        // The second measurement uses the same images. An overlay for first writes is always new.
        table.chain(Made::Chain, QEMUS).unwrap();
        assert_eq!(scratch.lines("calls").len(), calls.len());
        for round in 1..3 {
            let chain = table.chain(Made::Overlay, OURS).unwrap();
            assert_eq!(chain[1], ImageFile::new(&*table.base, "raw"));
            let calls = &scratch.lines("calls")[calls.len()..];
            assert_eq!(calls.len(), round, "{calls:?}");
            let options = "create -q -f qcow2 -o extended_l2=on,cluster_size=128k -F raw -b";
            assert!(calls[round - 1].contains(options), "{calls:?}");
        }
    }

    #[test]
    fn the_memory_of_a_process_that_is_gone_is_an_error() {
        assert!(memory(std::process::id()).unwrap() > 0.0);
        assert!(memory(u32::MAX).is_err());
    }
}
