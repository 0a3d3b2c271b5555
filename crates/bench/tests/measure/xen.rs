//! Verified loads with several requests in flight on a Xen block device, without a hypervisor. The
//! tests check the data, and the number of grant operations and notifications.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use blockyard_bench::client::LoadOptions;
use blockyard_bench::client::report::Report;
use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::xen::{FrontEnd, measure};
use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_export::xen::{Xen, XenData, XenOptions};
use blockyard_export::{Export, Reactors, STOP_TIME};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::xen::{Host, Machine};

use crate::BENCH;
use crate::common::{SOON, run as run_program};

const FRONT_END: FrontEnd = FrontEnd { domain: 7, device: 51712, persistent: false };

fn options(bs: u64, ops: u64) -> LoadOptions {
    LoadOptions {
        rw: Pattern::Randrw,
        bs,
        ops: Some(ops),
        depth: 32,
        seed: Some(1),
        verify: true,
        ..LoadOptions::for_socket("unused".into())
    }
}

fn run(load: &LoadOptions, data: XenData, persistent: bool) -> Report {
    let options = DiskOptions {
        name: "disk".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:16M")).unwrap()));
    let (machine, reactors) = (Machine::new(), Arc::new(Reactors::start(1, &[]).unwrap()));
    let options =
        XenOptions { domain: 7, device: "xvda".parse().unwrap(), queues: 4, data, records: None };
    let _domain = machine.store(7).unwrap();
    let mut export =
        Xen::start(disk, &options, &Host::Machine(machine.clone()), reactors, || ()).unwrap();
    let report = measure(load, &machine, FrontEnd { persistent, ..FRONT_END }).unwrap();
    export.stop(Instant::now() + STOP_TIME);
    assert_eq!((report.errors, &report.first_error), (0, &None));
    assert!(report.verified_blocks > 0);
    report
}

#[test]
fn loads_are_verified_at_a_depth_and_no_grant_is_in_use_after_its_answer() {
    for (bs, ops) in [(512, 1000), (4096, 2000), (64 << 10, 300)] {
        for (data, persistent) in
            [(XenData::Auto, true), (XenData::Auto, false), (XenData::Map, false)]
        {
            let report = run(&options(bs, ops), data, persistent);
            let grants = report.grants.unwrap();
            assert_eq!(grants.still_mapped, 0, "{bs}, {data:?}, persistent: {persistent}");
            let pages = bs.div_ceil(4096) as f64;
            // An indirect request has one page more, which holds its segments. Reads of the final
            // verification are not counted.
            let table = if pages > 11.0 { 1.0 } else { 0.0 };
            match (data, persistent) {
                (XenData::Map, _) => {
                    assert_eq!((grants.maps_per_io, grants.copies_per_io), (pages + table, 0.0))
                }
                (_, true) => {
                    assert!(grants.maps_per_io * ops as f64 <= 32.0 * (pages + table), "{grants:?}")
                }
                (_, false) => {
                    assert_eq!((grants.maps_per_io, grants.copies_per_io), (0.0, pages + table))
                }
            }
        }
    }
}

#[test]
fn queues_and_flushes() {
    let options = LoadOptions { queues: 4, flush_every: 8, depth: 100, ..options(4096, 4000) };
    let report = run(&options, XenData::Auto, true);
    assert!(report.flushes > 0);
    assert_eq!((report.target.ring, report.target.queue_size), (Some("blkif"), Some(128)));
}

#[test]
fn a_benchmark_prints_its_table_and_no_news_of_its_devices() {
    let mut bench = Command::new(BENCH);
    bench.args(["xen", "ram:1M", "--ops", "20", "--rounds", "1"]);
    let done = run_program(&mut bench, SOON);
    assert_eq!(done.err, "");
    assert_eq!(done.good().lines().count(), 6);
    // The option overrides the default.
    let done = run_program(bench.args(["--log", "info"]), SOON);
    assert!(done.err.contains("INFO"), "{}", done.err);
}
