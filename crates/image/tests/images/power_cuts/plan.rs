//! Parameters of a run, derived from its seed.

use std::io;

use blockyard_image::Alignment;
use blockyard_storage::sim::{Fault, OpKind, Rng, SECTOR};

use super::build::Recipe;
use super::chain::{Disks, file_name};
use super::format::Layout;

/// Alignments: page cache, O_DIRECT with 512-byte blocks, and with 4096-byte blocks.
pub const SHAPES: [Alignment; 3] = [
    Alignment { memory_align: 1, offset_align: 1 },
    Alignment { memory_align: 512, offset_align: 512 },
    Alignment { memory_align: 512, offset_align: 4096 },
];

#[derive(Clone, Debug)]
pub enum LayerPlan {
    /// Size in bytes.
    Raw(u64),
    Qcow2(Recipe),
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    /// The images, topmost first. The topmost one is qcow2.
    pub layers: Vec<LayerPlan>,
    pub shape: Alignment,
    /// Largest write that the device makes atomically, in bytes.
    pub atomic: usize,
    pub discard_zeroes: bool,
    pub reactors: usize,
    /// Number of clients, each with one request in flight; and number of requests of each client.
    pub clients: usize,
    pub requests: usize,
    /// Size of the L2 table cache, and of a reservation of clusters, in bytes.
    pub cache: Option<u64>,
    pub reserve: Option<u64>,
    /// Whether the host allocates the space of reserved clusters. Else none becomes partial.
    pub allocates: bool,
    pub copy_on_read: bool,
    /// Longest time that a slow operation takes.
    pub slow: u64,
    /// Whether requests go to the whole disk, discard more often than in other plans, and rarely
    /// flush. Then metadata are written back without a flush.
    pub spread: bool,
    /// Whether some requests write compressed clusters.
    pub packs: bool,
    pub trouble: Option<Trouble>,
    /// Whether the process dies in some boots, instead of a power cut, with a journal.
    pub dies: bool,
    /// Number of records that each half of the journal has memory for. `None`: no limit.
    pub room: Option<[usize; 2]>,
    /// Number of attempts to create a journal that fail in each boot, before one succeeds.
    pub late: u64,
}

impl Plan {
    /// Returns a plan with power cuts but no other errors.
    pub fn quiet(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7163_6f77);
        let cluster_bits = *rng.pick(&[9, 9, 9, 9, 10, 11, 12, 12, 12, 13, 14, 16, 16]);
        let layout = layout(&mut rng, cluster_bits);
        let sectors = capacity(&mut rng, layout);
        let capacity = sectors * SECTOR as u64;
        let layers = layers(&mut rng, layout, capacity);
        let cluster = layout.cluster();
        Plan {
            seed,
            layers,
            shape: *rng.pick(&SHAPES),
            atomic: *rng.pick(&[512, 512, 4096]),
            discard_zeroes: rng.one_in(2),
            reactors: rng.between(1, 2) as usize,
            clients: rng.between(2, 8) as usize,
            requests: rng.between(4, 12) as usize,
            cache: rng.one_in(2).then_some(0),
            reserve: (cluster_bits < 14 || !rng.one_in(3)).then(|| cluster * rng.between(1, 40)),
            allocates: false,
            copy_on_read: rng.one_in(6),
            slow: 40,
            spread: false,
            packs: false,
            trouble: None,
            dies: false,
            room: None,
            late: 0,
        }
    }

    /// Returns a plan in which the process dies in half of the boots.
    pub fn dying(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x6479_696e);
        let plan = match rng.below(8) {
            0 => Plan::growing(seed),
            1 => Plan::reusing(seed),
            2 => Plan::relieving(seed),
            3 => Plan::packing(seed),
            4 | 5 => Plan::deferring(seed),
            _ => Plan::quiet(seed),
        };
        Plan { dies: true, ..plan }
    }

    /// Like [`Plan::dying`], with a journal that is full soon.
    pub fn filling(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x6675_6c6c);
        let most = *rng.pick(&[1, 4, 12, 30]);
        let room = [0; 2].map(|_| if rng.one_in(3) { 0 } else { rng.between(0, most) as usize });
        Plan { room: Some(room), ..Plan::dying(seed) }
    }

    /// Like [`Plan::dying`], with a journal that begins only after some changes.
    pub fn late(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x6c61_7465);
        let most = *rng.pick(&[1, 4, 30]);
        let plan = match rng.below(3) {
            // The mark of the journal and the switch to a new refcount table change the header.
            0 => Plan { clients: 4, requests: 6, slow: 400, ..Plan::recounting(seed) },
            _ => Plan::dying(seed),
        };
        Plan { late: rng.between(1, most), dies: true, ..plan }
    }

    /// Returns a plan with power cuts, deaths, and errors of operations on the files.
    pub fn unlucky(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x756e_6c75);
        Plan { trouble: Some(Trouble::random(&mut rng)), ..Plan::dying(seed) }
    }

    /// Returns a plan with a file that grows all the time, with refcount blocks that cover few
    /// clusters.
    pub fn growing(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x6772_6f77);
        let layout = Layout {
            version: 3,
            cluster_bits: 9,
            refcount_order: *rng.pick(&[5, 6, 6]),
            extended: false,
            data_file: false,
            raw_data_file: false,
        };
        let capacity = rng.between(100, 400) * SECTOR as u64;
        let recipe = Recipe {
            snapshot: false,
            full: *rng.pick(&[0, 30]),
            ..recipe(&mut rng, layout, capacity, None)
        };
        Plan {
            layers: vec![LayerPlan::Qcow2(recipe)],
            clients: rng.between(3, 6) as usize,
            requests: 12,
            reserve: Some(layout.cluster() * rng.between(1, 70)),
            ..Plan::quiet(seed)
        }
    }

    /// Returns a plan with few clusters, freed and reused all the time, while reads and writes take
    /// longer than whole flushes.
    pub fn reusing(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7265_7573);
        let layout = Layout {
            version: 3,
            cluster_bits: 9,
            refcount_order: 4,
            extended: false,
            data_file: false,
            raw_data_file: false,
        };
        let size = rng.between(6, 20) * SECTOR as u64;
        let recipe = recipe(&mut rng, layout, size, None);
        Plan {
            layers: vec![LayerPlan::Qcow2(Recipe { snapshot: false, full: 100, ..recipe })],
            clients: rng.between(6, 10) as usize,
            requests: 16,
            reserve: Some(layout.cluster()),
            slow: 1000,
            ..Plan::quiet(seed)
        }
    }

    /// Returns a plan with tens or hundreds of tables, few of them cached, rare flushes, and few
    /// free clusters: freed clusters must wait for a durable write-back.
    pub fn relieving(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7265_6c69);
        let (version, cluster_bits, refcount_order) = (3, 9, 4);
        let (extended, data_file, raw_data_file) = (false, false, false);
        let layout =
            Layout { version, cluster_bits, refcount_order, extended, data_file, raw_data_file };
        let tables = if rng.one_in(16) { rng.between(100, 300) } else { rng.between(12, 18) };
        let recipe = recipe(&mut rng, layout, tables * layout.l2_reach(), None);
        let full = *rng.pick(&[30, 60, 100]);
        Plan {
            layers: vec![LayerPlan::Qcow2(Recipe { snapshot: false, full, ..recipe })],
            clients: rng.between(4, 8) as usize,
            requests: 40,
            cache: Some(0),
            reserve: Some(layout.cluster() * rng.between(1, 3)),
            copy_on_read: false,
            spread: true,
            ..Plan::quiet(seed)
        }
    }

    /// Returns a plan that writes compressed clusters where others were freed, and reads them again
    /// and again.
    pub fn packing(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7061_636b);
        let layout = Layout {
            version: 3,
            cluster_bits: *rng.pick(&[9, 9, 9, 10, 12]),
            refcount_order: *rng.pick(&[0, 1, 2, 4]),
            extended: false,
            data_file: false,
            raw_data_file: false,
        };
        let size = rng.between(12, 60) * layout.cluster();
        let recipe = recipe(&mut rng, layout, size, None);
        Plan {
            layers: vec![LayerPlan::Qcow2(Recipe {
                snapshot: false,
                full: *rng.pick(&[30, 60]),
                ..recipe
            })],
            clients: rng.between(4, 6) as usize,
            requests: 30,
            reserve: Some(layout.cluster() * rng.between(1, 3)),
            copy_on_read: false,
            packs: true,
            ..Plan::quiet(seed)
        }
    }

    /// Returns a plan with a nearly full refcount table: the first requests make a new table
    /// necessary.
    pub fn recounting(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7265_636e);
        let layout = Layout {
            version: 3,
            cluster_bits: 9,
            refcount_order: 6,
            extended: false,
            data_file: false,
            raw_data_file: false,
        };
        // The image's clusters besides the L1 table: the header, one cluster of the refcount table,
        // and the refcount blocks that this table names.
        let (per_table, left) = (layout.cluster() / 8, rng.between(0, 6));
        let l1_clusters = per_table * layout.per_block() - 2 - per_table - left;
        let recipe = recipe(&mut rng, layout, 64 * SECTOR as u64, None);
        Plan {
            layers: vec![LayerPlan::Qcow2(Recipe {
                snapshot: false,
                full: 0,
                l1_clusters,
                ..recipe
            })],
            clients: 2,
            requests: 2,
            reserve: Some(layout.cluster() * rng.between(4, 8)),
            copy_on_read: false,
            ..Plan::quiet(seed)
        }
    }

    /// Returns a plan with first writes to clusters of which a raw backing image has the rest.
    pub fn deferring(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x6465_6665);
        let layout = Layout {
            version: *rng.pick(&[2, 3, 3]),
            cluster_bits: *rng.pick(&[16, 16, 17]),
            refcount_order: 4,
            extended: false,
            data_file: false,
            raw_data_file: false,
        };
        let size = capacity(&mut rng, layout) * SECTOR as u64;
        let below = match rng.below(4) {
            0 => rng.between(1, size / SECTOR as u64) * SECTOR as u64,
            _ => size,
        };
        let backing = vec![LayerPlan::Raw(below)];
        let recipe = recipe(&mut rng, layout, size, self::below(&backing, 1));
        let recipe = Recipe { full: *rng.pick(&[0, 0, 30]), ..recipe };
        Plan {
            layers: [vec![LayerPlan::Qcow2(recipe)], backing].concat(),
            clients: rng.between(4, 8) as usize,
            requests: 20,
            cache: rng.one_in(3).then_some(0),
            reserve: Some(layout.cluster() * rng.between(1, 20)),
            allocates: true,
            copy_on_read: false,
            ..Plan::quiet(seed)
        }
    }

    pub fn troubled(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7472_6f75);
        let plan = if rng.one_in(4) { Plan::growing(seed) } else { Plan::quiet(seed) };
        Plan { trouble: Some(Trouble::random(&mut rng)), ..plan }
    }

    pub fn top(&self) -> &Recipe {
        match &self.layers[0] {
            LayerPlan::Qcow2(recipe) => recipe,
            LayerPlan::Raw(_) => unreachable!("the topmost image is qcow2"),
        }
    }
}

fn layout(rng: &mut Rng, cluster_bits: u32) -> Layout {
    let extended = cluster_bits >= 14 && rng.one_in(2);
    let version = if !extended && rng.one_in(4) { 2 } else { 3 };
    let data_file = version > 2 && rng.one_in(8);
    Layout {
        version,
        cluster_bits,
        refcount_order: if version == 2 { 4 } else { *rng.pick(&[0, 1, 2, 3, 4, 4, 5, 6, 6]) },
        extended,
        data_file,
        raw_data_file: data_file && rng.one_in(2),
    }
}

/// Returns the size of a disk in sectors: some clusters, several L2 tables if these are small, and
/// often a partial cluster.
fn capacity(rng: &mut Rng, layout: Layout) -> u64 {
    let clusters = match layout.cluster_bits {
        9 if rng.one_in(4) => rng.between(700, 1400),
        9..=11 => rng.between(24, 200),
        12..=13 => rng.between(6, 40),
        _ => rng.between(2, 12),
    };
    let sectors = clusters * layout.cluster() / SECTOR as u64;
    if rng.one_in(2) { sectors } else { sectors - rng.below(layout.cluster() / SECTOR as u64) }
}

fn layers(rng: &mut Rng, layout: Layout, capacity: u64) -> Vec<LayerPlan> {
    let depth = if layout.raw_data_file { 0 } else { *rng.pick(&[0, 0, 1, 1, 1, 2]) };
    // Plan the images from the bottom up.
    let mut layers: Vec<LayerPlan> = Vec::new();
    for number in (1..=depth).rev() {
        // Images may be shorter or longer than their overlays.
        let size = match rng.below(4) {
            0 => rng.between(1, capacity / SECTOR as u64) * SECTOR as u64,
            1 => capacity + rng.below(20) * SECTOR as u64,
            _ => capacity,
        };
        if number == depth && rng.one_in(2) {
            layers.push(LayerPlan::Raw(size));
            continue;
        }
        let bits = *rng.pick(&[9, 10, 12, 14, 16]);
        let layout = Layout { data_file: false, raw_data_file: false, ..self::layout(rng, bits) };
        let recipe = recipe(rng, layout, size, below(&layers, number + 1));
        layers.push(LayerPlan::Qcow2(Recipe { snapshot: false, ..recipe }));
    }
    layers.push(LayerPlan::Qcow2(recipe(rng, layout, capacity, below(&layers, 1))));
    layers.reverse();
    layers
}

/// Returns name and format of the image that was planned last, if any.
fn below(layers: &[LayerPlan], number: usize) -> Option<(String, &'static str)> {
    let format = match layers.last()? {
        LayerPlan::Raw(_) => "raw",
        LayerPlan::Qcow2(_) => "qcow2",
    };
    Some((file_name(number), format))
}

fn recipe(
    rng: &mut Rng,
    layout: Layout,
    size: u64,
    below: Option<(String, &'static str)>,
) -> Recipe {
    Recipe {
        layout,
        size,
        full: *rng.pick(&[0, 0, 30, 60, 100]),
        snapshot: !layout.data_file && layout.largest_count() > 1 && rng.one_in(5),
        zstd: layout.version > 2 && rng.one_in(2),
        l1_clusters: 0,
        below,
        seed: rng.next_u64(),
    }
}

/// Operations that fail, and how.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub kind: OpKind,
    pub fault: Fault,
    /// Whether operations on the external data file fail, if there is one.
    pub data_file: bool,
}

impl Trouble {
    /// Lets operations on the files of the topmost image fail from now on.
    pub fn strike(&self, disks: &Disks) {
        let (main, data) = &disks.layers[0];
        data.as_ref().filter(|_| self.data_file).unwrap_or(main).fail(self.fault.clone());
    }

    fn random(rng: &mut Rng) -> Self {
        use io::ErrorKind::{Other, StorageFull};
        let kinds = [
            (OpKind::Read, Other),
            (OpKind::Write, Other),
            (OpKind::Write, StorageFull),
            (OpKind::SetLen, StorageFull),
            (OpKind::SetLen, Other),
            (OpKind::Sync, Other),
            (OpKind::Sync, StorageFull),
            (OpKind::Discard, Other),
        ];
        let (kind, error) = *rng.pick(&kinds);
        let most = if matches!(kind, OpKind::Sync | OpKind::SetLen) { 6 } else { 40 };
        let fault = Fault::new(kind, error).after(rng.below(most)).times(rng.between(1, 3));
        Trouble { kind, fault, data_file: rng.one_in(2) }
    }
}
