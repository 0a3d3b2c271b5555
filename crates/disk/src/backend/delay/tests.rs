//! The model's arithmetic, with made-up times.

use super::*;

fn model(text: &str) -> Arc<Model> {
    Model::open(text).unwrap_or_else(|e| panic!("{text}: {e}")).1
}

/// Keeps `depth` requests in flight until `total` are done. Returns the seconds that this takes.
fn closed_loop(model: &Model, depth: usize, total: usize, kind: OpKind, bytes: u64) -> f64 {
    let start = Instant::now();
    let mut in_flight: BinaryHeap<_> =
        (0..depth).map(|_| Reverse(model.book(start, kind, bytes))).collect();
    let mut end = start;
    for _ in depth..total {
        let Reverse(done) = in_flight.pop().unwrap();
        in_flight.push(Reverse(model.book(done, kind, bytes)));
    }
    while let Some(Reverse(done)) = in_flight.pop() {
        end = done;
    }
    (end - start).as_secs_f64()
}

#[track_caller]
fn near(found: f64, truth: f64, tolerance: f64) {
    assert!((found / truth - 1.0).abs() < tolerance, "{found}, and the truth is {truth}");
}

#[test]
fn a_saturated_device_does_n_requests_in_the_time_of_one() {
    let text = "1G,parallel=8,read=100us,write=400us,bandwidth=1G";
    // A read takes 100 us, and the time for 4 KiB x 8 at 1 GiB a second.
    let read = 100e-6 + 4096.0 * 8.0 / (1u64 << 30) as f64;
    near(closed_loop(&model(text), 64, 80_000, OpKind::Read, 4096), 10_000.0 * read, 1e-3);
    // The bandwidth determines the time of large requests.
    near(closed_loop(&model(text), 64, 8_000, OpKind::Write, 16 << 20), 125.0 + 0.4, 1e-3);
}

#[test]
fn a_request_on_an_idle_device_takes_the_configured_time() {
    let model = model("1G,parallel=4,read=100us,write=400us,flush=2ms,discard=50us,bandwidth=400M");
    let mut now = Instant::now();
    let us = Duration::from_micros;
    for (kind, bytes, time) in [
        (OpKind::Read, 0, us(100)),
        (OpKind::Write, 100 << 20, us(1_000_400)),
        (OpKind::Flush, 0, us(2000)),
        (OpKind::Discard, 0, us(50)),
        (OpKind::WriteZeroes, 0, us(0)),
    ] {
        assert_eq!(model.book(now, kind, bytes) - now, time, "{kind:?}");
        now += Duration::from_secs(10);
    }
    // Requests run concurrently while a server is free, and wait in the queue while none is.
    let ends: Vec<_> =
        (0..6).map(|_| (model.book(now, OpKind::Read, 0) - now).as_micros()).collect();
    assert_eq!(ends, [100, 100, 100, 100, 200, 200]);
}

#[test]
fn exponential_times_have_the_right_mean_and_variance() {
    let text = "1G,parallel=1,read=100us,spread=exponential";
    let times = |text| {
        let (model, mut now) = (model(text), Instant::now());
        let mut times = Vec::new();
        for _ in 0..100_000 {
            let done = model.book(now, OpKind::Read, 4096);
            times.push((done - now).as_secs_f64());
            now = done;
        }
        times
    };
    let found = times(text);
    let mean = found.iter().sum::<f64>() / found.len() as f64;
    near(mean, 100e-6, 0.02);
    near(found.iter().map(|t| (t - mean).powi(2)).sum::<f64>() / found.len() as f64, 1e-8, 0.05);
    assert!(found == times(text), "the same each time");
    assert!(found != times(&format!("{text},seed=3")), "another seed, other times");
}

#[test]
fn disks_of_one_device_share_its_servers() {
    let text = "parallel=2,read=1ms";
    let (one, two) =
        (model(&format!("1G,{text},device=shared")), model(&format!("2G,{text},device=shared")));
    assert!(Arc::ptr_eq(&one, &two) && one.name() == Some("shared"));
    let other = model(&format!("1G,{text},device=other"));
    assert!(!Arc::ptr_eq(&one, &other) && !Arc::ptr_eq(&model("1G"), &model("1G")));
    assert!(
        Model::open("1G,parallel=3,read=1ms,device=shared")
            .unwrap_err()
            .to_string()
            .contains("\"shared\"")
    );
    // A device without disks is dropped, and its name may be used for another.
    drop((one, two));
    model("1G,parallel=3,read=1ms,device=shared");
}

#[test]
fn malformed_models_are_refused() {
    for (bad, part) in [
        ("", "a size is"),
        ("511", "at least 512"),
        ("1x", "a size is"),
        ("1G,fast", "\"fast\" has no value"),
        ("1G,read", "\"read\" has no value"),
        ("1G,reed=1ms", "\"reed=1ms\" is not known"),
        ("1G,read=5", "read \"5\": a time is"),
        ("1G,flush=1m", "flush \"1m\": a time is"),
        ("1G,parallel=0", "parallel is a number from 1"),
        ("1G,parallel=70000", "to 65536, not \"70000\""),
        ("1G,bandwidth=0", "bandwidth \"0\""),
        ("1G,spread=even", "spread is exponential"),
        ("1G,seed=1", "without spread"),
        ("1G,spread=exponential,seed=x", "seed \"x\""),
        ("1G,device=", "is not known"),
        ("1G,read=1e19s", "a time is"),
        ("file=a.qcow2", "a.qcow2 means qcow2"),
    ] {
        let error = Model::open(bad).unwrap_err();
        assert!(error.to_string().contains(part), "{bad}: {error}");
    }
    assert_eq!(Model::open("1000").unwrap().0, Below::Nothing { size: 512 }, "whole sectors");
    assert_eq!(Model::open("file=a.img,read=1ms").unwrap().0, Below::File("a.img".into()));
}
