//! stripe: one disk over several files or devices, 64 KiB in turn.
//!
//! `stripe SOCKET FILE...` serves the files on a vhost-user socket. Each answer of the map is for
//! all time, so Blockyard asks once for each stripe.

use std::ops::Range;
use std::{fs, io, io::Seek};

use blockyard::{Access, Disk, Extent, Map, Place, Question, Shape, Target, Yard};

pub const CHUNK: u64 = 64 << 10;

pub struct Stripe {
    files: u64,
}

impl Map for Stripe {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let extent = |chunk: u64| {
            let file = (chunk % self.files) as usize;
            let place = Place::At { file, offset: chunk / self.files * CHUNK };
            Extent { len: CHUNK, place }
        };
        Ok((asked.offset / CHUNK..(asked.offset + asked.len) / CHUNK).map(extent).collect())
    }

    /// Nothing ever moves.
    async fn flush(&self, _moved: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

pub fn target(paths: &[String]) -> io::Result<Target> {
    let files = paths.len() as u64;
    // A block device has its length at its end only.
    let len = |path: &String| fs::File::open(path)?.seek(io::SeekFrom::End(0));
    let lens: io::Result<Vec<u64>> = paths.iter().map(len).collect();
    let shortest = lens?.into_iter().min().unwrap_or(0) / CHUNK * CHUNK;
    let shape = Shape { size: shortest * files, granule: CHUNK };
    let target = Target::map("stripe", shape, async move |_, _| Ok(Stripe { files }));
    Ok(paths.iter().fold(target, |target, path| target.data(path, Access::Write)))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [socket, files @ ..] = &names[..] else { return Err("stripe SOCKET FILE...".into()) };
    let yard = Yard::start(1)?;
    yard.serve(Disk::target("stripe", target(files)?).vhost_user(socket))?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
