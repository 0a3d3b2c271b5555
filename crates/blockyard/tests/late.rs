//! Changes that a target does not answer in time end their disk.

use std::future::pending;
use std::io;
use std::ops::Range;
use std::time::Duration;

use blockyard::{
    Access, Device, Discard, Disk, Extent, Lent, Limits, Map, Place, Question, Shape, Target, Yard,
};

mod common;

use common::{Guest, Scratch};

const SIZE: usize = 1 << 20;
const SHAPE: Shape = Shape { size: SIZE as u64, granule: 4096 };
/// virtio-blk's status of a failed request.
const IOERR: u8 = 1;
/// The other requests are answered in this time also if the host stops for some seconds.
const LIMITS: Limits = Limits { start: Duration::from_secs(60), answer: Duration::from_secs(8) };

/// Has no answer at offset 0.
struct Silent;

impl Silent {
    async fn answer(&self, offset: u64) -> io::Result<()> {
        if offset == 0 { pending().await } else { Ok(()) }
    }
}

impl Device for Silent {
    async fn read(&self, offset: u64, _data: Lent) -> io::Result<()> {
        self.answer(offset).await
    }

    async fn write(&self, offset: u64, _data: Lent) -> io::Result<()> {
        self.answer(offset).await
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, offset: u64, _len: u64) -> io::Result<()> {
        self.answer(offset).await
    }

    async fn write_zeroes(&self, offset: u64, _len: u64) -> io::Result<()> {
        self.answer(offset).await
    }
}

impl Map for Silent {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        Ok(vec![Extent { len: asked.len, place: Place::At { file: 0, offset: asked.offset } }])
    }

    async fn flush(&self, _moved: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, asked: Discard) -> io::Result<Vec<Extent>> {
        self.answer(asked.offset).await?;
        Ok(vec![Extent { len: asked.len, place: Place::Zero }])
    }
}

/// Sends one request without an answer. Returns the status of the next write, which is answered.
fn write_after(target: Target, name: &str, late: impl FnOnce(&mut Guest) -> u8) -> u8 {
    let scratch = Scratch::new(name);
    let yard = Yard::start(1).unwrap();
    let disk = Disk::target("a", target.limits(LIMITS));
    yard.serve(disk.vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    assert_eq!(guest.try_write(4096, &[1; 4096]), 0);
    assert_eq!(late(&mut guest), IOERR);
    let written = guest.try_write(4096, &[2; 4096]);
    drop(guest);
    yard.remove("a").unwrap();
    written
}

#[test]
fn a_change_that_a_device_may_still_make_ends_the_disk() {
    type Late = fn(&mut Guest) -> u8;
    let cases: [(&str, Late, u8); 4] = [
        ("write", |guest| guest.try_write(0, &[1; 4096]), IOERR),
        ("discard", |guest| guest.try_discard(0, 4096), IOERR),
        ("zeroes", |guest| guest.try_write_zeroes(0, 4096), IOERR),
        // A read changes nothing.
        ("read", |guest| guest.try_read(0, 4096).unwrap_err(), 0),
    ];
    std::thread::scope(|scope| {
        for (what, late, expected) in cases {
            scope.spawn(move || {
                let device = Target::device("silent", SHAPE, async |_, _| Ok(Silent));
                let written = write_after(device, &format!("late-{what}"), late);
                assert_eq!(written, expected, "after a late {what}");
            });
        }
    });
}

#[test]
fn a_discard_that_a_map_may_still_make_ends_the_disk() {
    let scratch = Scratch::new("late-map-file");
    let file = scratch.file("file", &vec![0; SIZE]);
    let target = Target::map("silent", SHAPE, async |_, _| Ok(Silent)).data(file, Access::Write);
    assert_eq!(write_after(target, "late-map", |guest| guest.try_discard(0, 4096)), IOERR);
}
