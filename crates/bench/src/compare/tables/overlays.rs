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
            false => format!("{options} --runtime {}", self.place.seconds),
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
