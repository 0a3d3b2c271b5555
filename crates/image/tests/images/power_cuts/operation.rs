//! Commands on a closed chain between two boots: snapshots, resizes, commits. After a cut each has
//! been done completely or not at all.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockyard_image::qcow2::empty::make_empty;
use blockyard_image::qcow2::resize::{Resize, resize};
use blockyard_image::qcow2::{Header, snapshot};
use blockyard_image::{CopyDown, ErrorKind, ImageError, Raw, Storage};
use blockyard_storage::sim::{Power, Rng, SECTOR, Sim, SimDisk};

use super::chain::{Disks, View};
use super::load;
use super::plan::Plan;

/// Maximum number of snapshots in an image.
const SNAPSHOTS: usize = 3;

#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    Create(String),
    Apply(String),
    Delete(String),
    /// New size in bytes.
    Resize(u64),
    /// Commits into the backing image, which then shows the disk; the topmost image is empty
    /// afterwards.
    Commit,
}

/// Kinds of commands, with their names in statistics.
pub const KINDS: [&str; 5] = ["create", "apply", "delete", "resize", "commit"];

/// Result of a command.
pub struct Outcome {
    pub disks: Rc<Disks>,
    pub events: u64,
    /// None: the power was cut, or the storage failed.
    pub done: Option<Done>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Done {
    Well,
    /// The command was refused, and changed nothing.
    Refused,
}

impl Operation {
    /// Returns a random command that this chain allows, with rare exceptions.
    pub fn random(rng: &mut Rng, plan: &Plan, view: &View) -> Self {
        let taken = |rng: &mut Rng| rng.pick(&view.snapshots).0.clone();
        // Snapshots read absent data from the backing image, so a commit would change what they
        // show.
        if plan.layers.len() > 1 && view.snapshots.is_empty() && rng.one_in(3) {
            return Operation::Commit;
        }
        let room = view.snapshots.len() < SNAPSHOTS;
        match rng.below(8) {
            2..4 if !view.snapshots.is_empty() => Operation::Apply(taken(rng)),
            4 | 5 if !view.snapshots.is_empty() => Operation::Delete(taken(rng)),
            0..4 if room => Operation::Create(format!("taken-{}", rng.next_u64())),
            _ => {
                let now = view.disk.len() as u64 / SECTOR as u64;
                // Bound the growth of disks.
                let most = plan.top().size / SECTOR as u64 * 3 / 2 + 8;
                let sectors = if rng.one_in(3) {
                    now.saturating_sub(rng.below(12))
                } else {
                    rng.between(1, most)
                };
                Operation::Resize(sectors.max(1) * SECTOR as u64)
            }
        }
    }

    pub fn kind(&self) -> usize {
        match self {
            Operation::Create(_) => 0,
            Operation::Apply(_) => 1,
            Operation::Delete(_) => 2,
            Operation::Resize(_) => 3,
            Operation::Commit => 4,
        }
    }

    /// Returns the number of images, from the top, that the command may write to.
    pub fn changes(&self) -> usize {
        if *self == Operation::Commit { 2 } else { 1 }
    }

    /// Returns the disk's contents after the command.
    pub fn after(&self, before: &View) -> View {
        let mut view = before.clone();
        match self {
            Operation::Create(name) => view.snapshots.push((name.clone(), view.disk.clone())),
            Operation::Apply(name) => {
                let (_, shown) =
                    view.snapshots.iter().find(|(known, _)| known == name).expect("a snapshot");
                view.disk = shown.clone();
            }
            Operation::Delete(name) => view.snapshots.retain(|(known, _)| known != name),
            Operation::Resize(size) => view.disk.resize(*size as usize, 0),
            Operation::Commit => {}
        }
        view
    }

    /// Runs the command on `disks`. A power cut may happen meanwhile. `view`: contents of the
    /// topmost image before the command.
    pub fn run(
        &self,
        plan: &Plan,
        view: &View,
        disks: Disks,
        power: &Power,
        seed: u64,
    ) -> Result<Outcome, String> {
        let disks = Rc::new(disks);
        let trouble = plan.trouble.is_some();
        if let Some(trouble) = &plan.trouble {
            trouble.strike(&disks);
        }
        let work = Work { plan: plan.clone(), disks: disks.clone(), size: view.disk.len() as u64 };
        let (operation, sim) = (self.clone(), Sim::new(seed).step_limit(3_000_000));
        let result = load::wait(&sim, power, &disks, async move { work.run(operation).await })?;
        let events = power.events();
        let done = match result {
            _ if power.is_off() => None,
            Ok(()) => Some(Done::Well),
            Err(e) if e.kind == ErrorKind::Refused || e.kind == ErrorKind::Unsupported => {
                Some(Done::Refused)
            }
            Err(_) if trouble => None,
            Err(e) => return Err(format!("it failed: {e}")),
        };
        Ok(Outcome { disks, events, done })
    }
}

struct Work {
    plan: Plan,
    disks: Rc<Disks>,
    /// Returns the size of the topmost image's disk, in bytes.
    size: u64,
}

impl Work {
    async fn run(self, operation: Operation) -> Result<(), ImageError> {
        let (main, data) = self.files(0);
        match operation {
            Operation::Create(name) => {
                snapshot::create(&main, &name, Duration::from_secs(1_700_000_000)).await.map(|_| ())
            }
            Operation::Apply(name) => snapshot::apply(&main, &name).await,
            Operation::Delete(name) => snapshot::delete(&main, &name).await,
            Operation::Resize(size) => {
                let below = self.size_of(1).await?;
                resize(&main, data.as_ref(), Resize { size, shrink: true, below }).await
            }
            Operation::Commit => self.commit(main).await,
        }
    }

    /// Returns the files of the n-th image from the top.
    fn files(&self, n: usize) -> (Raw, Option<Raw>) {
        let raw = |disk: &SimDisk| Raw::on(disk.clone(), self.plan.shape);
        let (main, data) = &self.disks.layers[n];
        (raw(main), data.as_ref().map(raw))
    }

    /// Returns the size of the n-th image's disk, in bytes. 0: no such image.
    async fn size_of(&self, n: usize) -> Result<u64, ImageError> {
        match self.disks.qcow2.get(n) {
            None => Ok(0),
            Some(true) => Ok(Header::read(&self.files(n).0).await?.size),
            Some(false) => self.disks.layers[n].0.len().await.map_err(failed),
        }
    }

    async fn commit(&self, main: Raw) -> Result<(), ImageError> {
        if self.size_of(1).await? < self.size {
            match self.disks.qcow2[1] {
                true => {
                    let wanted =
                        Resize { size: self.size, shrink: false, below: self.size_of(2).await? };
                    resize(&self.files(1).0, None, wanted).await?;
                }
                false => self.disks.layers[1].0.set_len(self.size).await.map_err(failed)?,
            }
        }
        let open = async |top| {
            Ok(self
                .disks
                .open(&self.plan, top, SimDisk::into)
                .await
                .map_err(failed)?
                .swap_remove(0))
        };
        let (from, into) = (open(0).await?, open(1).await?);
        let copy = CopyDown::new(0..self.size, 1, Arc::default());
        copy.run(&from, &into, async |_| Ok(())).await?;
        into.close().await.map_err(failed)?;
        make_empty(&main).await
    }
}

fn failed(error: io::Error) -> ImageError {
    ImageError::io("chain", None, "working on it", error)
}
