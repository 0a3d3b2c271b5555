//! `GET /metrics` and `GET /v1/figures` of a server with load.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};
use serde_json::json;

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, blockyard, until};
use crate::exposition::{Family, parse};
use crate::server::Server;

/// Labels that distinguish values of one thing. The others distinguish things that must all move.
const VALUES: [&str; 5] = ["disk", "reactor", "le", "policy", "decision"];

pub fn scrape(server: &Server) -> Vec<Family> {
    let mut stream = server.connect();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    parse(text)
}

/// Returns the sums of all counters and histograms, by name and labels.
fn moving(families: &[Family]) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for family in families.iter().filter(|family| family.kind != "gauge") {
        for sample in &family.samples {
            let kept = sample.labels.iter().filter(|(name, _)| !VALUES.contains(&name.as_str()));
            let key = format!("{} {:?}", sample.name, kept.collect::<Vec<_>>());
            *sums.entry(key).or_insert(0.0) += sample.value;
        }
    }
    sums
}

/// Gauges that other tests move: of a full host, of a flush and of an image that fails.
const MOVED_ELSEWHERE: [&str; 3] =
    ["blockyard_disk_paused", "blockyard_disk_poisoned", "blockyard_disks_failed"];

/// Removes the gauges that have another value than 0.
fn moved(idle: &mut BTreeSet<String>, families: &[Family]) {
    for family in families.iter().filter(|family| family.kind == "gauge") {
        if family.samples.iter().any(|sample| sample.value != 0.0) {
            idle.remove(&family.name);
        }
    }
}

/// Returns the value of a disk's metric.
pub fn value(families: &[Family], name: &str, disk: &str) -> f64 {
    let samples = families.iter().flat_map(|family| &family.samples);
    let mut found = samples.filter(|sample| {
        sample.name == name && sample.labels.get("disk").is_some_and(|name| name == disk)
    });
    found.next().unwrap_or_else(|| panic!("no {name} of {disk}")).value
}

/// Two reactors, and a group with all limits.
const CONFIG: &str = "reactors = 2\n[group.web]\nweight = 300\niops = \"9000,max=20000,length=2\"\n\
    bps = \"1G\"\nreserve-iops = 10\nreserve-bps = 4096\n";

struct Disks {
    server: Server,
}

impl Disks {
    fn start() -> Self {
        Disks { server: Server::configured(CONFIG) }
    }

    /// Adds a disk with an image and further keys.
    fn add(&self, name: &str, image: &str, more: serde_json::Value) {
        let mut keys = json!({ "name": name, "image": image, "vhost-user": self.socket(name) });
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.server.good("POST", "/v1/disks", keys);
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.server.folder.join(format!("{name}.s"))
    }

    fn load(&self, name: &str) -> LoadOptions {
        LoadOptions::for_socket(self.socket(name))
    }

    fn guest(&self, name: &str) -> Session<SplitRing> {
        let plan = Plan { data_len: 64 << 10, ..Plan::default() };
        Session::start(&self.socket(name), &plan).unwrap_or_else(|e| panic!("{name}: {e:#}"))
    }
}

/// Makes `count` requests of each kind to a disk. Those of one kind reach the disk together.
fn some_of_each(guest: &mut Session<SplitRing>, count: u16, expected: u8) {
    let queue = &mut guest.queues[0];
    let range = || [0u64.to_le_bytes().as_slice(), &8u32.to_le_bytes(), &[0; 4]].concat();
    for (kind, data, bytes) in [
        (request::IN, Data::FromDevice(4096), vec![0; 4096]),
        (request::OUT, Data::ToDevice(4096), vec![1; 4096]),
        (request::FLUSH, Data::None, vec![]),
        (request::DISCARD, Data::ToDevice(16), range()),
        (request::WRITE_ZEROES, Data::ToDevice(16), range()),
    ] {
        for slot in 0..count {
            queue.write_data(slot, &bytes);
            queue.submit(slot, kind, 0, data);
        }
        queue.publish().unwrap();
        let mut answers = 0;
        until("the requests are answered", SOON, || {
            while let Some((_, answer)) = queue.reap().unwrap() {
                assert_eq!(answer, expected, "request {kind}");
                answers += 1;
            }
            answers == count
        });
    }
}

/// The list of metrics is that of the text, so a metric that nothing counts fails this test.
#[test]
fn each_metric_moves_under_load() {
    let disks = Disks::start();
    let image = disks.server.folder.image("file", 64 << 20);
    let qcow2 = disks.server.folder.join("chain.qcow2");
    blockyard(["image", "create", qcow2.to_str().unwrap(), "64M"]).good();
    disks.add("file", image.to_str().unwrap(), json!({ "cache": "writeback" }));
    disks.add("chain", qcow2.to_str().unwrap(), json!({}));
    let limits = json!({ "iops": "2000", "bps": "1G", "reserve-iops": 1000, "reserve-bps": 1000,
        "latency-target": "1s" });
    disks.add("limited", "null:1G", limits);
    let fails = "error:read=1,write=1,flush=1,discard=1,write-zeroes=1";
    disks.add("bad", "ram:1M", json!({ "filters": [fails] }));
    let slow = "delay:1G,parallel=4,read=1ms,device=d";
    disks.add("thrasher", slow, json!({}));
    disks.add("polite", slow, json!({}));
    disks.add("quick", "null:1G", json!({}));
    // The second request of each kind waits for the limit, and each one takes a time.
    let delay = "delay:read=1ms,write=1ms,flush=1ms,discard=1ms,write-zeroes=1ms";
    disks.add("slow", "ram:1M", json!({ "iops": "100", "filters": [delay] }));
    disks.add("fixed", "ram:1M", json!({ "read-only": true }));
    disks.add("held", "ram:1M", json!({}));
    for call in ["drain", "resume", "drain"] {
        disks.server.good("POST", &format!("/v1/disks/held/{call}"), json!({}));
    }
    let mut slow_guest = disks.guest("slow");
    some_of_each(&mut disks.guest("chain"), 1, status::OK);
    some_of_each(&mut disks.guest("bad"), 1, status::IOERR);
    let read = LoadOptions { rw: Pattern::Read, depth: 32, runtime: 600.0, ..disks.load("file") };
    let write = LoadOptions { rw: Pattern::Write, flush_every: 64, ..read.clone() };
    let loads = [
        LoadOptions { ops: Some(20_000), ..read },
        LoadOptions { ops: Some(20_000), ..write },
        LoadOptions { depth: 64, runtime: 600.0, ..disks.load("limited") },
        // Its flushes wait for their share, too.
        LoadOptions {
            rw: Pattern::Write,
            flush_every: 64,
            depth: 256,
            runtime: 600.0,
            ..disks.load("thrasher")
        },
        LoadOptions { depth: 2, runtime: 600.0, ..disks.load("polite") },
        LoadOptions { depth: 4, runtime: 600.0, ..disks.load("quick") },
    ];
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            loads[2..].iter().map(|load| scope.spawn(|| measure(load).unwrap())).collect();
        for load in &loads[..2] {
            assert_eq!(measure(load).unwrap().errors, 0);
        }
        let mut still = Vec::new();
        let gauges = scrape(&disks.server).into_iter().filter(|family| family.kind == "gauge");
        let mut idle: BTreeSet<_> = gauges.map(|family| family.name).collect();
        MOVED_ELSEWHERE.iter().for_each(|name| assert!(idle.remove(*name), "{name}"));
        let ends = std::time::Instant::now() + SOON;
        while std::time::Instant::now() < ends {
            // If the machine stops between two requests, the second one passes the limit.
            some_of_each(&mut slow_guest, 2, status::OK);
            let families = scrape(&disks.server);
            moved(&mut idle, &families);
            let sums = moving(&families);
            assert!(sums.len() > 40, "{sums:?}");
            // Buckets of short times may stay empty: their sum over all bounds must not.
            let zero = sums.into_iter().filter(|(_, sum)| *sum == 0.0);
            still = zero.map(|(key, _)| key).chain(idle.iter().cloned()).collect::<Vec<_>>();
            if still.is_empty() {
                break;
            }
        }
        loads[2..].iter().for_each(|load| load.over.store(true, Ordering::Relaxed));
        clients.into_iter().for_each(|client| drop(client.join().unwrap()));
        assert!(still.is_empty(), "nothing moves {still:#?}");
    });
    let families = scrape(&disks.server);
    check_names(&families);
    check_groups(&families);
    // The daemon is killed, because the disk that fails each flush would fail its end.
}

fn check_groups(families: &[Family]) {
    let of = |name: &str| {
        let family = families.iter().find(|family| family.name == name).unwrap();
        let [sample] = &family.samples[..] else { panic!("{name}: not one sample") };
        assert_eq!(sample.labels["group"], "web");
        sample.value
    };
    assert_eq!(of("blockyard_group_weight"), 300.0);
    assert_eq!(of("blockyard_group_limit_requests_per_second"), 9000.0);
    assert_eq!(of("blockyard_group_limit_burst_requests_per_second"), 20000.0);
    assert_eq!(of("blockyard_group_limit_bytes_per_second"), f64::from(1 << 30));
    assert_eq!(of("blockyard_group_reserved_requests_per_second"), 10.0);
    assert_eq!(of("blockyard_group_reserved_bytes_per_second"), 4096.0);
}

#[test]
fn clients_are_counted_for_each_export() {
    let disks = Disks::start();
    let nbd = format!("unix:{}", disks.server.folder.join("nbd").display());
    disks.add("a", "ram:1M", json!({ "nbd": nbd }));
    let clients = || {
        let families = scrape(&disks.server);
        let family = families.iter().find(|family| family.name == "blockyard_disk_clients");
        let of = |export: &str| {
            let mut samples = family.unwrap().samples.iter();
            samples.find(|sample| sample.labels["export"] == export).unwrap().value
        };
        (of("vhost-user"), of("nbd"))
    };
    assert_eq!(clients(), (0.0, 0.0));
    let guest = disks.guest("a");
    let socket = disks.server.folder.join("nbd");
    let uri = format!("nbd+unix:///a?socket={}", socket.display());
    let uri = Some(blockyard_nbd::Uri::parse(&uri).unwrap());
    let load = LoadOptions { socket: None, nbd: uri, runtime: 600.0, ..disks.load("a") };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load).unwrap());
        until("both are counted", SOON, || clients() == (1.0, 1.0));
        load.over.store(true, Ordering::Relaxed);
        client.join().unwrap();
    });
    drop(guest);
    until("both are gone", SOON, || clients() == (0.0, 0.0));
    disks.server.daemon.stop();
}

/// Returns the words of a text that look like names of metrics.
fn names(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    let words = text.split(|c: char| !is_part(c));
    words.filter(|word| word.starts_with("blockyard_") || word.starts_with("process_")).collect()
}

/// Checks the page and the dashboard against the metrics of a server that shows all of them.
fn check_names(families: &[Family]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let page = read("docs/metrics.md");
    let shown: BTreeSet<_> = families.iter().map(|family| family.name.as_str()).collect();
    assert_eq!(names(&page), shown, "names of docs/metrics.md and of the server");
    let dashboard: serde_json::Value =
        serde_json::from_str(&read("contrib/grafana-dashboard.json")).unwrap();
    let mut expressions = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let used = names(expression);
            assert!(!used.is_empty(), "{expression}");
            for name in used {
                let known = shown.contains(name.strip_suffix("_bucket").unwrap_or(name));
                assert!(known, "the dashboard has {name}, which does not exist");
            }
            expressions += 1;
        }
    }
    assert!(expressions > 20, "{expressions}");
}

#[test]
fn counts_are_exact_and_those_of_all_reactors_together() {
    let disks = Disks::start();
    disks.add("a \"b\"\\", "ram:16M", json!({ "queues": 4, "vhost-user": disks.socket("a") }));
    let load = LoadOptions { queues: 4, ops: Some(1000), bs: 8192, ..disks.load("a") };
    assert_eq!(measure(&load).unwrap().errors, 0);
    let families = scrape(&disks.server);
    let of = |name: &str| value(&families, name, "a \"b\"\\");
    // The client reads the first sectors once, when it connects.
    assert_eq!(of("blockyard_disk_requests_total"), 1000.0);
    assert_eq!(of("blockyard_disk_request_bytes_total"), 1000.0 * 8192.0);
    assert_eq!(of("blockyard_disk_request_service_seconds_count"), 1000.0);
    assert_eq!(of("blockyard_disk_in_flight_requests"), 0.0);
    disks.server.daemon.stop();
}

#[test]
fn a_request_that_gets_no_answer_shows_its_age() {
    let disks = Disks::start();
    disks.add("a", "ram:1M", json!({ "filters": ["delay:read=3600s"], "iops": "7" }));
    let mut guest = disks.guest("a");
    guest.queues[0].submit(0, request::IN, 0, Data::FromDevice(512));
    guest.queues[0].publish().unwrap();
    let shown = || {
        let families = scrape(&disks.server);
        let of = |name: &str| value(&families, name, "a");
        let limit = of("blockyard_disk_limit_requests_per_second");
        assert_eq!(limit, 7.0);
        (of("blockyard_disk_in_flight_requests"), of("blockyard_disk_oldest_request_seconds"))
    };
    until("a request is in flight", SOON, || shown().0 == 1.0);
    let (_, before) = shown();
    until("its age grows", SOON, || shown().1 > before);
}

/// Returns the answer to a request at an address.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_are_at_a_loopback_address() {
    let folder = Folder::new();
    let mut command = Command::new(BLOCKYARD);
    command.args(["serve", "ram:1M", "--name", "a", "--metrics", "127.0.0.1:0", "--vhost-user"]);
    let mut daemon = Daemon::start(command.arg(folder.join("s")));
    daemon.wait_ready();
    // The log is another stream than that of the ready line.
    daemon.wait_log("/metrics\n");
    let log = daemon.log();
    let rest = log.split_once("metrics are at http://").unwrap_or_else(|| panic!("{log}")).1;
    let address = rest.split_once("/metrics").unwrap().0;
    let answer = get(address, "/metrics");
    let families = parse(answer.split_once("\r\n\r\n").unwrap().1);
    assert_eq!(value(&families, "blockyard_disk_size_bytes", "a"), f64::from(1 << 20));
    let figures = get(address, "/v1/figures");
    assert!(figures.contains("\"name\":\"a\""), "{figures}");
    // Only the API's socket has calls.
    assert!(get(address, "/v1/disks").starts_with("HTTP/1.1 404"));
    daemon.stop();
}

#[test]
fn an_address_that_other_hosts_reach_is_refused() {
    for address in ["0.0.0.0:9184", "[::]:9184", "192.0.2.1:9184", "9184", "localhost"] {
        let refused = blockyard(["serve", "ram:1M", "--nbd", "unix:/s", "--metrics", address]);
        assert_eq!(refused.status.code(), Some(2), "{address}: {}", refused.err);
        assert!(refused.err.contains("127.0.0.1:"), "{}", refused.err);
    }
    let folder = Folder::new();
    let text = "metrics = \"10.0.0.1:80\"\n[[disk]]\nimage = \"ram:1M\"\nvhost-user = \"/s\"\n";
    std::fs::write(folder.join("toml"), text).unwrap();
    let config = folder.join("toml");
    let refused = blockyard(["serve", "--check-config", "--config", config.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(2), "{}", refused.err);
    assert!(refused.err.contains("10.0.0.1 is no loopback address"), "{}", refused.err);
}
