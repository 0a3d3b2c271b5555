// The program of docs/own-target.md: two files, one after the other, as one disk.

use std::ops::Range;
use std::{env, fs, io};

use blockyard::Access::Write;
use blockyard::{Disk, Extent, Map, Place, Question, Shape, Target, Yard};

const GRANULE: u64 = 1 << 20;

/// Two files, one after the other.
struct Joined {
    first: u64,
}

impl Map for Joined {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let (file, offset, len) = if asked.offset < self.first {
            (0, asked.offset, asked.len.min(self.first - asked.offset))
        } else {
            (1, asked.offset - self.first, asked.len)
        };
        Ok(vec![Extent { len, place: Place::At { file, offset } }])
    }

    async fn flush(&self, _moved: &[Range<u64>]) -> io::Result<()> {
        Ok(()) // Nothing ever moves.
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let first = fs::metadata("first.img")?.len();
    let size = first + fs::metadata("second.img")?.len();
    let shape = Shape { size, granule: GRANULE };
    let target = Target::map("joined", shape, async move |_, _| Ok(Joined { first }));
    let target = target.data("first.img", Write).data("second.img", Write);
    let disk = Disk::target("joined", target).vhost_user("vm.sock").nbd_unix("nbd.sock");
    let is_device = env::args().any(|word| word == "ublk");
    let yard = Yard::start(1)?;
    yard.serve(if is_device { disk.ublk(None) } else { disk })?;
    println!("{:?}", yard.device("joined")?);
    io::stdin().read_line(&mut String::new())?; // Enter ends it.
    Ok(())
}
