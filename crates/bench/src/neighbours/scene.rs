//! A test scene: disks with their settings and loads, with or without the scheduler.

use toml::{Table, Value};

use crate::client::LoadOptions;
use crate::client::workload::Pattern;

#[derive(Clone, Debug)]
pub struct Disk {
    pub name: String,
    /// Keys of the disk's `[[disk]]` table in the configuration file.
    pub knobs: Table,
    /// `None`: the disk is served, but idle.
    pub load: Option<LoadOptions>,
    /// The disk only disturbs the others. Its load begins before theirs, and ends after them.
    pub beside: bool,
    pub export: Export,
}

/// The export by which a client uses a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Export {
    /// A vhost-user-blk socket
    #[default]
    VhostUser,
    /// NBD on a Unix socket, a connection for each queue
    Nbd,
}

#[derive(Clone, Debug)]
pub struct Scene {
    pub name: &'static str,
    /// Whether the scheduler is on.
    pub fair: bool,
    pub disks: Vec<Disk>,
    /// Duration of the warm-up in seconds.
    pub warmup: f64,
    pub seconds: f64,
    /// Number of completions of the measured disks that ends the scene, instead of `seconds`.
    pub ops: Option<u64>,
}

impl Scene {
    pub fn new(name: &'static str, fair: bool, disks: Vec<Disk>, seconds: f64) -> Self {
        Scene { name, fair, disks, warmup: 0.5, seconds, ops: None }
    }
}

impl Disk {
    pub fn new(name: &str, load: LoadOptions) -> Self {
        Disk {
            name: name.into(),
            knobs: Table::new(),
            load: Some(load),
            beside: false,
            export: Export::default(),
        }
    }

    /// Returns this disk without a load.
    pub fn idle(&self) -> Self {
        Disk { load: None, ..self.clone() }
    }

    pub fn knob(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.knobs.insert(key.into(), value.into());
        self
    }

    pub fn beside(mut self) -> Self {
        self.beside = true;
        self
    }

    pub fn by(mut self, export: Export) -> Self {
        self.export = export;
        self
    }
}

/// Returns a load with operations of one size.
pub fn load(rw: Pattern, bs: u64, depth: u16) -> LoadOptions {
    LoadOptions { rw, bs, depth, ..LoadOptions::for_socket("unused".into()) }
}
