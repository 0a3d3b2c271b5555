//! ublk devices, in a guest with Linux 7: fair shares, and which thread makes the writes.

use crate::figures::Figures;
use crate::ublk_guest::on_kernel;

/// Four servers of 5 ms: 800 reads a second. The device below is a model, so the emulation does not
/// limit the rates. The polite disk has 16 reads in flight, and the thrasher 128.
const SHARES: &str = r#"
model=delay:1G,parallel=4,read=5ms,device=d
printf '[[disk]]\nname = "%s"\nimage = "%s"\nublk = %d\n' polite $model 0 thrasher $model 1 >c.toml
rate() { # DEVICE DEPTH SECONDS: prints the reads a second
    fio --name=a --filename=/dev/ublkb$1 --ioengine=libaio --direct=1 --rw=randread --bs=4k --iodepth=$2 \
        --time_based --runtime=$3 --output-format=terse --terse-version=3 | cut -d ';' -f 8
}
for order in thrasher polite; do
    serve --config c.toml
    [[ $order != polite ]] || { rate 0 16 4 >/tmp/polite & polite=$! && sleep 1; }
    rate 1 128 60 >/dev/null & thrasher=$!
    until read -r -a now </sys/block/ublkb1/stat && ((now[0] > 200)); do sleep 0.02; done
    from=${now[0]}
    [[ $order == polite ]] || { rate 0 16 4 >/tmp/polite & polite=$!; }
    wait $polite
    read -r -a now </sys/block/ublkb1/stat
    pkill -INT -x fio && wait $thrasher || :
    stop
    echo "$order first: $(</tmp/polite) $((now[0] - from))"
done
"#;

/// Returns the numbers of the last line of the output that begins with `name`.
#[track_caller]
fn numbers<const N: usize>(output: &str, name: &str) -> [f64; N] {
    let line = output.lines().rev().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("no {name:?}: {output}"));
    let numbers: Result<Vec<_>, _> = line.split_whitespace().map(str::parse).collect();
    numbers.ok().and_then(|all| all.try_into().ok()).unwrap_or_else(|| panic!("{name}{line}"))
}

#[test]
fn a_ublk_disk_gets_half_of_a_device_beside_a_thrasher() {
    let mut figures = Figures::default();
    let output = on_kernel("7", 2, SHARES);
    for order in ["thrasher", "polite"] {
        let [polite, thrasher] = numbers(&output, &format!("{order} first: "));
        let what =
            format!("reads/s of 800 of a ublk disk beside a thrasher; the {order} was first");
        figures.row(&what, polite, 301.0..620.0);
        figures.show("reads of that thrasher meanwhile, in about 4 s", thrasher);
    }
    figures.judge();
}

/// Each write comes in its own timer tick, so each one would need a worker without the server's own
/// updates of the modification time (`ublk/workers.rs`).
const WORKERS: &str = r#"
mount -t tracefs none /sys/kernel/tracing 2>/dev/null || :
handed=/sys/kernel/tracing/events/io_uring/io_uring_queue_async_work
# The file is allocated, because writes that allocate space always go to the workers.
dd if=/dev/zero of=a.img bs=1M count=32 oflag=direct status=none
serve a.img --ublk=0
echo hist:keys=opcode >$handed/trigger
fio --eta=never --output=/tmp/fio.log --name=a --filename=/dev/ublkb0 --ioengine=libaio --direct=1 --iodepth=1 \
    --rw=randwrite --bs=4k --size=32M --number_ios=300 --rate_iops=100
echo "by workers: $(sed -n 's/^ *Hits: //p' $handed/hist)"
echo '!hist:keys=opcode' >$handed/trigger
stop
"#;

#[test]
fn workers_make_few_writes_of_a_ublk_disk() {
    let mut figures = Figures::default();
    let [by_workers] = numbers(&on_kernel("7", 2, WORKERS), "by workers: ");
    // Workers make a write if the tick ends between the update and the write.
    let what = "part of 300 writes of a ublk disk by io_uring's workers";
    figures.row(what, by_workers / 300.0, 0.0..0.3);
    figures.judge();
}
