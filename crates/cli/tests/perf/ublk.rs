//! Fair shares of ublk devices, in a guest with Linux 7. The device below is a model, so the
//! emulation does not limit the rates.

use crate::ublk_guest::on_kernel;

/// Four servers of 5 ms: 800 reads a second. The polite disk has 16 reads in flight, and the
/// thrasher 128.
const SHARES: &str = r#"
model=delay:1G,parallel=4,read=5ms,device=d
printf '[[disk]]\nname = "%s"\nimage = "%s"\nublk = %d\n' polite $model 0 thrasher $model 1 >c.toml
rate() { # DEVICE DEPTH SECONDS: prints the reads a second
    fio --name=a --filename=/dev/ublkb$1 --ioengine=libaio --direct=1 --rw=randread --bs=4k --iodepth=$2 \
        --time_based --runtime=$3 --output-format=terse --terse-version=3 | cut -d ';' -f 8
}
for order in thrasher-first polite-first; do
    serve --config c.toml
    [[ $order != polite-first ]] || { rate 0 16 4 >/tmp/polite & polite=$! && sleep 1; }
    rate 1 128 60 >/tmp/thrasher & thrasher=$!
    until read -r -a now </sys/block/ublkb1/stat && ((now[0] > 200)); do sleep 0.02; done
    [[ $order == polite-first ]] || { rate 0 16 4 >/tmp/polite & polite=$!; }
    wait $polite
    # fio writes its figures when it is interrupted, too.
    pkill -INT -x fio && wait $thrasher || :
    stop
    polite=$(</tmp/polite)
    echo "$order: the polite disk had $polite of 800 reads/s, the thrasher $(</tmp/thrasher)"
    ((polite > 300 && polite < 620)) || exit 1
done
"#;

#[test]
fn a_ublk_disk_gets_half_of_a_device_beside_a_thrasher() {
    println!("{}", on_kernel("7", 2, SHARES));
}
