//! generated: the content of this disk is a function of the sector. It takes no space.
//!
//! `generated SOCKET SIZE` serves SIZE bytes on a vhost-user socket. Each eight bytes are their own
//! offset, mixed, so that any copy of the disk can be checked. It refuses writes.

use std::io;

use blockyard::{Device, Disk, Lent, Shape, Target, Yard};

pub struct Generated;

/// Returns the eight bytes at an offset.
pub fn word(offset: u64) -> [u8; 8] {
    let mixed = (offset ^ offset >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).to_le_bytes()
}

impl Device for Generated {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        let offsets = (offset..offset + data.len() as u64).step_by(8);
        data.copy_from(0, &offsets.flat_map(word).collect::<Vec<u8>>())
    }

    async fn write(&self, _offset: u64, _data: Lent) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

pub fn disk(size: u64) -> Disk {
    let shape = Shape { size, granule: 4096 };
    let target = Target::device("generated", shape, async |_, _| Ok(Generated));
    Disk::target("generated", target).read_only()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, size] = &words[..] else { return Err("generated SOCKET SIZE".into()) };
    let yard = Yard::start(1)?;
    yard.serve(disk(size.parse()?).vhost_user(socket))?;
    io::stdin().read_line(&mut String::new())?; // Enter, or the end of the input, ends it.
    Ok(())
}
