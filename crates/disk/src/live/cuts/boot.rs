//! One boot: jobs one after the other, and the load of the guest meanwhile.
//!
//! The jobs and the first reactor are on one simulated executor. A second reactor is another
//! executor, of which a task of the first one runs some iterations now and then. The clock stands
//! still, because that task is always ready.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_image::qcow2::{self, CreateOptions, Header, Qcow2, Qcow2Options};
use blockyard_image::tools::BackupCopy;
use blockyard_image::{Alignment, ChainError, Format, Image, Layer, Raw, Storage};
use blockyard_ring::{Executor, Handle};
use blockyard_storage::sim::SimImage;

use super::Job;
use super::lane::Lane;
use super::stage::{Stage, Target};
use crate::copy_map::{CopyMap, LIMIT};
use crate::live::{SnapshotOptions, Why, Work, Worker};
use crate::local_disk::LocalDisk;
use crate::tracker::Tracker;

/// Most iterations of a boot. One that needs more hangs.
const MOST: u64 = 500_000;

impl Stage {
    /// Runs the jobs, and closes the disk. Ends at a power cut.
    pub async fn run(self: Rc<Self>, handle: Handle, jobs: Vec<Job>) -> Result<(), String> {
        let second = (self.plan.reactors > 1).then(|| Executor::simulated().unwrap());
        let handles: Vec<_> =
            [Some(&handle), second.as_ref().map(Executor::handle)].into_iter().flatten().collect();
        let lanes = self.plan.lanes * handles.len() as u64;
        for number in 0..lanes {
            let on = handles[(number / self.plan.lanes) as usize];
            self.running.set(self.running.get() + 1);
            let (stage, lane) = (self.clone(), self.lane(on, number, lanes));
            on.spawn(async move {
                lane.run().await;
                stage.running.set(stage.running.get() - 1);
            });
        }
        let ended = Rc::new(Cell::new(false));
        handle.spawn(self.clone().pump(handle.clone(), second, ended.clone()));
        for job in jobs {
            let pause = self.rng.borrow_mut().below(300);
            for _ in 0..pause {
                handle.yield_now().await;
            }
            if !self.goes_on() {
                break;
            }
            self.begin_and_end(&handle, job).await;
        }
        self.is_stopped.set(true);
        while self.running.get() > 0 {
            handle.yield_now().await;
        }
        if !self.is_off() && self.failed.borrow().is_none() {
            self.close(&handle).await;
        }
        ended.set(true);
        self.failed.take().map_or(Ok(()), Err)
    }

    fn lane(self: &Rc<Self>, handle: &Handle, number: u64, lanes: u64) -> Lane {
        let served = LocalDisk::local(handle, &self.disk).unwrap();
        let (stage, handle, rng) = (self.clone(), handle.clone(), self.rng.borrow_mut().fork());
        Lane { stage, handle, served, number, lanes, rng }
    }

    /// Runs the second reactor. Notes the moment of a backup. Ends the boot after a power cut.
    async fn pump(self: Rc<Self>, handle: Handle, second: Option<Executor>, ended: Rc<Cell<bool>>) {
        while !ended.get() {
            self.note_moment();
            if self.is_off() {
                // A request must not be dropped, so that each one gets an answer.
                self.files.give_up();
            }
            if let Some(second) = &second {
                let of_second = second.handle().clone();
                second.block_on(async move { of_second.yield_now().await }).unwrap();
            }
            self.iterations.set(self.iterations.get() + 1);
            assert!(self.iterations.get() < MOST, "the boot hangs: {:?}", self.plan);
            handle.yield_now().await;
        }
    }

    /// While the disk is quiesced, and has the map of a backup, no request is in flight. So the
    /// model is what the backup must hold.
    fn note_moment(&self) {
        let has_map = matches!(self.disk.serving_state().tracker, Some(Tracker::Copy(_)));
        if has_map && let Some(target) = &mut *self.target.borrow_mut() {
            target.moment.get_or_insert_with(|| self.model.borrow().clone());
        }
    }

    async fn begin_and_end(&self, handle: &Handle, job: Job) {
        let depth = self.disk.source().chain().map_or(1, |chain| chain.layers().len());
        let job = match job {
            Job::Commit | Job::Stream if depth == 1 => Job::Snapshot,
            Job::Snapshot if depth > 3 => Job::Stream,
            // A boot has one target.
            Job::Backup if self.target.borrow().is_some() => Job::Snapshot,
            job => job,
        };
        self.job.set(Some(job));
        let worker = Worker { disk: self.disk.clone(), handle: handle.clone() };
        let done = match job {
            Job::Snapshot => worker.snapshot(self.overlay()).await,
            Job::Commit => worker.commit(Work::default(), || Some(Vec::new())).await,
            Job::Stream => worker.stream(Work::default()).await,
            Job::Backup => self.backup(worker).await,
        };
        if self.is_off() {
            return;
        }
        match done {
            Ok(()) => self.tally.borrow_mut().done[job as usize] += 1,
            Err(why) => self.fail(format!("{job:?}: {}", crate::live::why::with_causes(&why))),
        }
        self.job.set(None);
    }

    fn new_name(&self, extension: &str) -> String {
        self.made.set(self.made.get() + 1);
        format!("{}.{extension}", self.made.get())
    }

    fn overlay(&self) -> SnapshotOptions {
        let cluster_size = *self.rng.borrow_mut().pick(&[512, 4096, 16384]);
        let shape = Some(CreateOptions { cluster_size, ..CreateOptions::new(0) });
        let overlay = self.scratch.path(&self.new_name("qcow2"));
        SnapshotOptions { shape, ..SnapshotOptions::new(overlay) }
    }

    /// Makes a backup. The name of the target is a flag, which is set when the server would give
    /// the target its name: then the target must be complete and durable.
    async fn backup(&self, worker: Worker) -> Result<(), Why> {
        let format = *self.rng.borrow_mut().pick(&[Format::Raw, Format::Qcow2]);
        let name = self.new_name(&format.to_string());
        let path = self.scratch.path(&name);
        let wrong = |error| Why::Image(ChainError::Image { path: path.clone(), error });
        let raw = Raw::on(
            self.files.add(&path, SimImage::zeroed(0), None),
            Alignment { memory_align: 1, offset_align: 1 },
        );
        let target = Target { name, format, moment: None, is_named: false };
        self.target.replace(Some(target));
        let layer = match format {
            Format::Raw => {
                let sized = raw.storage().set_len(self.size).await;
                sized.map_err(Why::Call)?;
                Layer::Raw { raw, size: self.size }
            }
            _ => {
                let create = CreateOptions { cluster_size: 4096, ..CreateOptions::new(self.size) };
                qcow2::create(&raw, None, &create).await.map_err(wrong)?;
                let header = Header::read(&raw).await.map_err(wrong)?;
                let options = Qcow2Options { unfinished: true, ..Qcow2Options::default() };
                Layer::Qcow2(Qcow2::open(header, raw, None, &options).await.map_err(wrong)?)
            }
        };
        let source = worker.chain()?;
        let (top, work) = (source.path().to_path_buf(), Work::default());
        let image = source.image(&worker.handle).map_err(Why::Call)?;
        let source = (image, top);
        let target = (Image::new(vec![layer], false), path.clone());
        let copy = BackupCopy::new(source, target, work.progress.clone());
        let map = Arc::new(CopyMap::new(self.size, &path, LIMIT));
        worker.copy_whole(&copy, &map, &work).await?;
        if let Some(target) = self.target.borrow_mut().as_mut().filter(|_| !self.is_off()) {
            target.is_named = true;
        }
        Ok(())
    }

    /// Ends the disk as the server does.
    async fn close(self: &Rc<Self>, handle: &Handle) {
        let lane = self.lane(handle, 0, 1);
        if let Err(error) = lane.flush().await {
            self.fail(error);
        }
        let closed = lane.served.close().await;
        if closed.is_err() && !self.is_off() {
            self.fail("the disk could not be closed".into());
        }
    }
}
