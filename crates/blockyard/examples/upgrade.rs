//! A disk in a file. Its program can be replaced while guests use it: start the program again with
//! the same folder. The new process takes the disk over from the one that runs, and that one ends.
//!
//! ```text
//! cargo run --example upgrade FOLDER     # serves FOLDER/disk.img on FOLDER/vm.sock and nbd.sock
//! cargo run --example upgrade FOLDER     # in another terminal, after a change of the program
//! ```

use std::io::{self, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::{env, fs};

use blockyard::Access::Write;
use blockyard::{Device, Disk, Lent, OwnFile, Shape, Target, Yard};

struct InFile(OwnFile);

impl Device for InFile {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        self.0.read_into(&data, offset).await
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        self.0.write_from(&data, offset).await
    }

    async fn flush(&self) -> io::Result<()> {
        self.0.sync().await
    }
}

pub fn disk(folder: &Path) -> io::Result<Disk> {
    let file = folder.join("disk.img");
    let shape = Shape { size: fs::metadata(&file)?.len(), granule: 4096 };
    let target = Target::device("file", shape, async |mut files: blockyard::Files, _| {
        Ok(InFile(files.own.remove(0)))
    });
    let disk = Disk::target("disk", target.file(file, Write));
    Ok(disk.vhost_user(folder.join("vm.sock")).nbd_unix(folder.join("nbd.sock")))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&PathBuf::from(env::args_os().nth(1).ok_or("usage: upgrade FOLDER")?), disk)
}

type Make = fn(&Path) -> io::Result<Disk>;

pub fn run(folder: &Path, disk: Make) -> Result<(), Box<dyn std::error::Error>> {
    let control = folder.join("control");
    let yard = match UnixStream::connect(&control) {
        Ok(running) => {
            println!("takes over");
            Yard::take_over(1, running, |_| disk(folder).ok())?
        }
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            let yard = Yard::start(1)?;
            yard.serve(disk(folder)?)?;
            yard
        }
        Err(e) => return Err(e.into()),
    };
    let _ = fs::remove_file(&control);
    let listener = UnixListener::bind(&control)?;
    println!("serves");
    loop {
        let (next, _) = listener.accept()?;
        // The file was there a moment ago, when this process opened it.
        match yard.hand_over(next, |_| disk(folder).expect("the file of the disk is there")) {
            Ok(disks) => {
                for handed in disks {
                    println!("handed {} over: {:?}", handed.name, handed.pause);
                }
                return Ok(());
            }
            Err(e) => println!("goes on: {e}"),
        }
    }
}
