//! Runs a scene: images, a server with a configuration, a client for each disk.
//!
//! In: a scene. Out: each client's report. What must hold: the drop removes all; a neighbour that
//! disturbs works until the last measured client has ended.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_nbd::Uri;
use blockyard_nbd::uri::Host;
use blockyard_program::costs::DeviceCosts;
use blockyard_program::peer;
use toml::{Table, Value};

use super::device::{Device, NAME};
use super::rows::Known;
use super::scene::{Disk, Export, Scene, load};
use super::{NeighboursOptions, Order};
use crate::client::quota::Quota;
use crate::client::report::{Latency, Report};
use crate::client::workload::{Pattern, Pauses};
use crate::client::{self, LoadOptions};
use crate::process::{Process, Stop, fill};

/// A server that is not ready after this time has failed.
const READY: Duration = Duration::from_secs(60);
/// Duration in seconds of each measurement of a latency without other load.
const ALONE: f64 = 0.5;
/// Runtime in seconds of a load that a number of operations ends. It is never reached.
const UNLIMITED: f64 = 1e6;
/// Seconds by which the measured time of neighbours begins earlier than that of the other disks.
const AROUND: f64 = 0.2;
/// A neighbour that still runs so many seconds after the planned end of the other disks ends.
const SPARE: f64 = 60.0;
/// Seconds by which the first disk begins earlier, in an order of arrival.
const LEAD: f64 = 1.0;
/// Work and pauses of the polite disk in [`Order::Sleeps`].
const SLEEPS: Pauses = Pauses { work: 500_000_000, pause: 2_000_000_000 };

pub struct Stage {
    /// Sockets, the configuration, the costs.
    folder: PathBuf,
    /// Folder of the images, if a folder's disk is measured.
    images: Option<PathBuf>,
    device: Device,
    size: u64,
    reactors: u16,
    order: Order,
    /// Number of operations of each measurement, instead of seconds.
    ops: Option<u64>,
    /// Whether the server gets the device's costs.
    calibrated: bool,
    program: PathBuf,
    stop: Stop,
}

impl Stage {
    pub fn new(device: &Device, options: &NeighboursOptions, stop: &Stop) -> Result<Self> {
        let base = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let folder = base.join(format!("blockyard-neighbours.{}", std::process::id()));
        let program = peer::find("blockyard")?;
        std::fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let (device, stop) = (device.clone(), stop.clone());
        let mut stage = Stage {
            folder,
            images: None,
            device,
            size: options.size,
            reactors: options.reactors,
            order: options.order,
            ops: options.ops,
            calibrated: !options.uncalibrated,
            program,
            stop,
        };
        if let Device::Folder(target) = &stage.device {
            let images = target.join(format!(".blockyard-neighbours.{}", std::process::id()));
            std::fs::create_dir(&images)
                .with_context(|| format!("creating {}", images.display()))?;
            stage.images = Some(images);
        }
        Ok(stage)
    }

    fn costs(&self) -> PathBuf {
        self.folder.join("costs.toml")
    }

    /// Measures the latencies without other load, and writes the costs for all later servers. For a
    /// simulated device it also raises the base latencies in the costs to the measured ones: the
    /// server's timers add to them, and the scheduler compares with latencies that it observes.
    pub fn reckon_by(&self, mut costs: DeviceCosts) -> Result<Known> {
        let alone = |rw, depth| {
            let disk = Disk::new("alone", load(rw, 4096, depth));
            let scene = Scene { ops: self.ops, ..Scene::new("alone", false, vec![disk], ALONE) };
            let report = self.play(&scene)?.into_iter().flatten().next();
            Ok(report.context("nothing was measured")?.latency_us)
        };
        let nanoseconds = |microseconds: f64| (microseconds * 1e3) as u64;
        let (one, eight): (Latency, Latency) =
            (alone(Pattern::Randread, 1)?, alone(Pattern::Randread, 8)?);
        if matches!(self.device, Device::Model(_)) {
            costs.base_latency_read = costs.base_latency_read.max(nanoseconds(one.p50));
            let write: Result<Latency> = alone(Pattern::Randwrite, 1);
            costs.base_latency_write = costs.base_latency_write.max(nanoseconds(write?.p50));
        }
        costs.save(&self.costs())?;
        Ok(Known { costs, mean_d1: nanoseconds(one.mean), mean_d8: nanoseconds(eight.mean) })
    }

    fn socket(&self, disk: usize) -> PathBuf {
        self.folder.join(format!("{disk}.sock"))
    }

    /// Returns the address of a disk's NBD export.
    fn uri(&self, number: usize, disk: &Disk) -> Uri {
        let host = Host::Unix(self.socket(number));
        let export = disk.name.clone();
        Uri { host, export, tls: false, tls_certificates: None, tls_hostname: None }
    }

    /// Serves the scene's disks, puts the loads on them, and ends the server. Returns a report for
    /// each disk, or `None` for a disk without a load.
    pub fn play(&self, scene: &Scene) -> Result<Vec<Option<Report>>> {
        let mut server =
            self.serve(scene).with_context(|| format!("the scene \"{}\"", scene.name))?;
        let (over, quota) = (Arc::default(), scene.ops.map(Quota::new).map(Arc::new));
        let load = |(number, disk)| {
            let load = self.load(scene, number, disk, &over)?;
            Some(match &quota {
                Some(quota) => load.until(quota),
                None => load,
            })
        };
        let loads: Vec<_> = scene.disks.iter().enumerate().map(load).collect();
        let results = measure_all(&loads, &over);
        self.stop.check()?;
        let mut reports = Vec::new();
        for (result, disk) in results.into_iter().zip(&scene.disks) {
            let told = || {
                format!(
                    "the scene \"{}\", disk {}: {}",
                    scene.name,
                    disk.name,
                    server.errors().trim()
                )
            };
            let report = result.transpose().with_context(told)?;
            if let Some(first) = report.as_ref().and_then(|r| r.first_error.as_ref()) {
                anyhow::bail!("{}: {first}", told());
            }
            reports.push(report);
        }
        server.end()?;
        self.remove_discarded(scene)?;
        Ok(reports)
    }

    /// Removes the images that the scene has discarded, so that the next scene has full ones.
    fn remove_discarded(&self, scene: &Scene) -> Result<()> {
        let Some(images) = &self.images else { return Ok(()) };
        for (number, disk) in scene.disks.iter().enumerate() {
            if disk.load.as_ref().is_some_and(|load| load.rw == Pattern::Randtrim) {
                std::fs::remove_file(image_path(images, number))?;
            }
        }
        Ok(())
    }

    /// Returns the load of a disk. `over`: ends the loads of disks that only disturb, which have no
    /// planned end.
    fn load(
        &self,
        scene: &Scene,
        number: usize,
        disk: &Disk,
        over: &Arc<AtomicBool>,
    ) -> Option<Load> {
        let mut load = LoadOptions { indirect: true, socket: None, ..disk.load.clone()? };
        match disk.export {
            Export::VhostUser => load.socket = Some(self.socket(number)),
            Export::Nbd => load.nbd = Some(self.uri(number, disk)),
        }
        let seconds = if scene.ops.is_some() { UNLIMITED } else { scene.seconds };
        (load.warmup, load.runtime) = (scene.warmup, seconds);
        // Without a disk that disturbs, there is no order.
        let order = match scene.disks.iter().any(|disk| disk.beside && disk.load.is_some()) {
            true => self.order,
            false => Order::Together,
        };
        let mut load = in_order(order, disk.beside, load);
        let earlier = load.earlier.iter_mut();
        earlier.chain([&mut load.options]).for_each(|part| part.stop = self.stop.clone());
        if disk.beside {
            load.options.over = over.clone();
        }
        Some(load)
    }

    fn serve(&self, scene: &Scene) -> Result<Process> {
        let file = self.folder.join("serve.toml");
        std::fs::write(&file, self.configuration(scene)?)?;
        let mut command = Command::new(&self.program);
        command.args(["--log", "warn", "serve", "--config"]).arg(&file);
        let mut server = Process::start(&command)?;
        let limit = Instant::now() + READY;
        while let Some((_, line)) = server.line(&self.stop, limit)? {
            if line == "ready" {
                return Ok(server);
            }
        }
        server.finish()?;
        anyhow::bail!("the server has ended: {}", server.errors().trim())
    }

    fn configuration(&self, scene: &Scene) -> Result<String> {
        let mut disks = Vec::new();
        for (number, disk) in scene.disks.iter().enumerate() {
            let mut table = disk.knobs.clone();
            let queues = disk.load.as_ref().map_or(1, |l| l.queues);
            let socket = self.socket(number).display().to_string();
            table.insert("name".into(), disk.name.clone().into());
            table.insert("image".into(), self.image(number)?.into());
            match disk.export {
                Export::VhostUser => {
                    table.insert("vhost-user".into(), socket.into());
                    table.insert("queues".into(), i64::from(queues).into());
                }
                Export::Nbd => {
                    table.insert("nbd".into(), format!("unix:{socket}").into());
                }
            }
            if matches!(self.device, Device::Model(_)) {
                table.insert("device".into(), NAME.into());
            }
            disks.push(Value::Table(table));
        }
        let mut all = Table::new();
        all.insert("reactors".into(), i64::from(self.reactors).into());
        all.insert("fair-share".into(), scene.fair.into());
        if scene.fair && self.calibrated {
            all.insert("costs".into(), self.costs().display().to_string().into());
        }
        all.insert("disk".into(), disks.into());
        Ok(toml::to_string(&all)?)
    }

    fn image(&self, number: usize) -> Result<String> {
        let folder: &Path = match (&self.device, &self.images) {
            (Device::Folder(_), Some(images)) => images,
            (Device::Model(model), _) => return Ok(model.image(self.size)),
            (Device::Folder(target), None) => target,
        };
        let image = image_path(folder, number);
        if !image.exists() {
            fill(&image, self.size, &self.stop)?;
        }
        Ok(image.display().to_string())
    }
}

/// Returns a load with its place in the order. `load` has the warm-up and the seconds of the scene.
fn in_order(order: Order, beside: bool, mut load: LoadOptions) -> Load {
    // In [`Order::Sleeps`] the seconds of the scene are those of work.
    let works = (load.runtime * 1e9 / SLEEPS.work as f64).ceil().max(1.0);
    let sleeps_for = SLEEPS.end_of(works as u64) as f64 / 1e9;
    let mut earlier = None;
    if beside {
        if order == Order::Together {
            load.warmup = (load.warmup - AROUND).max(0.0);
        }
        // The last measured disk begins twice the lead after the scene at the latest.
        load.runtime = 2.0 * LEAD + load.warmup + load.runtime.max(sleeps_for) + SPARE;
    } else {
        load.steps = order.arrives();
        if order.arrives() {
            // The time after the arrival is measured.
            load.warmup = 0.0;
        }
    }
    let begins = match (order, beside) {
        (Order::Together, _) | (Order::ThrasherFirst | Order::Sleeps, true) => 0.0,
        (Order::PoliteFirst, false) => {
            load.warmup += LEAD;
            0.0
        }
        (Order::Returns, false) => {
            earlier = Some(LoadOptions { runtime: LEAD / 2.0, ..load.clone() });
            2.0 * LEAD
        }
        (Order::Sleeps, false) => {
            load.runtime = sleeps_for;
            load.pauses = Some(SLEEPS);
            LEAD
        }
        (Order::PoliteFirst | Order::Returns, true) | (Order::ThrasherFirst, false) => LEAD,
    };
    Load { earlier, begins: Duration::from_secs_f64(begins), beside, options: load }
}

/// Measures all loads at once. Ends those that only disturb once the last other load has ended.
fn measure_all(loads: &[Option<Load>], over: &AtomicBool) -> Vec<Option<Result<Report>>> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for load in loads {
            threads.push(load.as_ref().map(|load| (load.beside, scope.spawn(|| load.measure()))));
        }
        let mut results: Vec<_> = loads.iter().map(|_| None).collect();
        for beside in [false, true] {
            for (thread, result) in threads.iter_mut().zip(&mut results) {
                if let Some((_, thread)) = thread.take_if(|thread| thread.0 == beside) {
                    let died = |_| Err(anyhow::anyhow!("a client has died"));
                    *result = Some(thread.join().unwrap_or_else(died));
                }
            }
            over.store(true, Ordering::Relaxed);
        }
        results
    })
}

fn image_path(folder: &Path, disk: usize) -> PathBuf {
    folder.join(format!("{disk}.img"))
}

/// The load of one disk.
struct Load {
    /// A load before the measured one. Its report is not used.
    earlier: Option<LoadOptions>,
    /// When the measured load begins, after the scene's beginning.
    begins: Duration,
    /// The load only disturbs the others, and ends after them.
    beside: bool,
    options: LoadOptions,
}

impl Load {
    /// Ends the load with a quota, unless it only disturbs. The earlier load has its seconds.
    fn until(mut self, quota: &Arc<Quota>) -> Self {
        if !self.beside {
            self.options.quota = Some(quota.clone());
        }
        self
    }

    fn measure(&self) -> Result<Report> {
        let scene_began = Instant::now();
        if let Some(earlier) = &self.earlier {
            client::measure(earlier)?;
        }
        std::thread::sleep(self.begins.saturating_sub(scene_began.elapsed()));
        let report = client::measure(&self.options)?;
        anyhow::ensure!(
            !self.beside || self.options.over.load(Ordering::Relaxed),
            "this disk has ended before the disks that it was to disturb"
        );
        Ok(report)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
        if let Some(images) = &self.images {
            let _ = std::fs::remove_dir_all(images);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::LoadSetup;

    const ORDERS: [Order; 5] =
        [Order::Together, Order::PoliteFirst, Order::ThrasherFirst, Order::Returns, Order::Sleeps];

    fn planned(order: Order, beside: bool) -> Load {
        let load = LoadOptions { warmup: 0.5, runtime: 2.0, ..load(Pattern::Randread, 4096, 1) };
        in_order(order, beside, load)
    }

    #[test]
    fn the_time_after_an_arrival_is_measured() {
        for order in ORDERS {
            let polite = planned(order, false).options;
            let warmup = match order {
                Order::Together => 0.5,
                Order::PoliteFirst => 0.5 + LEAD,
                _ => 0.0,
            };
            assert_eq!((polite.warmup, polite.steps), (warmup, order.arrives()), "{order:?}");
        }
    }

    #[test]
    fn a_neighbour_that_disturbs_may_outlast_the_others() {
        for order in ORDERS {
            let end = |load: &Load| {
                load.begins.as_secs_f64() + load.options.warmup + load.options.runtime
            };
            let (polite, thrasher) = (planned(order, false), planned(order, true));
            let spare = end(&thrasher) - end(&polite);
            assert!((SPARE..2.0 * SPARE).contains(&spare), "{order:?}: {spare} s");
            let first = order == Order::PoliteFirst || thrasher.begins <= polite.begins;
            assert!(first, "{order:?}");
        }
    }

    #[test]
    fn operations_of_the_measured_disks_end_their_loads() {
        let quota = Arc::new(Quota::new(400));
        for order in ORDERS {
            let polite = planned(order, false).until(&quota);
            assert!(polite.options.quota.is_some_and(|own| Arc::ptr_eq(&own, &quota)));
            assert!(polite.earlier.is_none_or(|earlier| earlier.quota.is_none()));
            assert!(planned(order, true).until(&quota).options.quota.is_none(), "{order:?}");
        }
    }

    #[test]
    fn disks_of_one_quota_end_together() {
        let path = std::env::temp_dir().join(format!("blockyard-quota-{}", std::process::id()));
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let quota = Arc::new(Quota::new(300));
        let load = || {
            let defaults = LoadOptions::for_file(path.clone());
            let options =
                LoadOptions { buffered: true, warmup: 0.0, runtime: UNLIMITED, ..defaults };
            let load = Load { earlier: None, begins: Duration::ZERO, beside: false, options };
            Some(load.until(&quota))
        };
        let reports = measure_all(&[load(), load()], &AtomicBool::new(false));
        std::fs::remove_file(&path).unwrap();
        let reports: Vec<_> = reports.into_iter().flatten().map(Result::unwrap).collect();
        let operations: Vec<_> = reports.iter().map(|report| report.operations).collect();
        assert!(operations.len() == 2 && operations.iter().sum::<u64>() >= 300, "{operations:?}");
        assert!(reports.iter().all(|report| report.seconds < UNLIMITED));
    }

    #[test]
    fn the_works_of_a_disk_that_sleeps_have_their_slices_and_its_pauses_have_none() {
        let load = LoadOptions { warmup: 0.5, runtime: 1.0, ..load(Pattern::Randread, 4096, 1) };
        let options = in_order(Order::Sleeps, false, load).options;
        let mut load = LoadSetup::new(&options, 1 << 30).unwrap().load(0).unwrap();
        // On a simulated clock, without a single completion: two works of 0.5 s.
        for ms in [0, 500, 2_500, 3_000] {
            load.tick(ms * 1_000_000);
        }
        let (slices, steps) = (load.tally.slices.len(), load.tally.steps.len());
        assert_eq!((slices, steps, load.tally.elapsed_ns), (10, 100, 1_000_000_000));
    }

    #[test]
    fn a_neighbour_ends_when_the_last_measured_disk_has_ended() {
        let path = std::env::temp_dir().join(format!("blockyard-stage-{}", std::process::id()));
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let on_file = |runtime, beside, over: &Arc<AtomicBool>| {
            let defaults = LoadOptions::for_file(path.clone());
            let options = LoadOptions {
                buffered: true,
                warmup: 0.0,
                runtime,
                over: over.clone(),
                ..defaults
            };
            Some(Load { earlier: None, begins: Duration::ZERO, beside, options })
        };
        let (over, own) = (Arc::default(), Arc::default());
        let loads = [on_file(1e6, true, &over), None, on_file(0.05, false, &own)];
        let reports: Vec<_> =
            measure_all(&loads, &over).into_iter().map(|r| r.map(Result::unwrap)).collect();
        let seconds = |at: usize| reports[at].as_ref().map(|report| report.seconds);
        // The neighbour ended although its time had not passed, and it did not end the other one.
        assert!(seconds(0).is_some() && seconds(1).is_none());
        assert!(seconds(2) >= Some(0.05), "{:?}", seconds(2));
        // A neighbour that ends by itself did not disturb all the time.
        let over: Arc<AtomicBool> = Arc::default();
        let early = on_file(0.0, true, &over).unwrap().measure().unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(early.contains("has ended before"), "{early}");
    }
}
