//! COW files, served by this program and by User Mode Linux's driver `ubd`. Each reads what the
//! other wrote. Where `ubd` reads wrong data, this program reads the right data.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_image::cow::{self, Backing, Cow, CowOptions, CreateOptions};
use blockyard_image::{CacheMode, ImageFile, OpenOptions, Raw};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::sim::{Rng, pattern};

use crate::common::guest::run_guest;
use crate::common::{Daemon, Folder, Guest, GuestKind, md5};

const SIZE: u64 = 8 << 20;

/// A backing file, and a path for a COW file.
struct Files {
    folder: Folder,
    base: PathBuf,
    cow: PathBuf,
}

impl Files {
    fn new() -> Self {
        let folder = Folder::new();
        let (base, cow) = (folder.join("base.img"), folder.join("disk.cow"));
        fs::write(&base, pattern(0, 0, SIZE as usize)).unwrap();
        Files { folder, base, cow }
    }

    /// Runs a script in a guest with the COW file and its backing file as /dev/ubda, and the folder
    /// as /share.
    fn boot(&self, script: &str) -> String {
        let disk = format!("ubdcow={}:{}", self.cow.display(), self.base.display());
        let share = self.folder.to_str().unwrap();
        run_guest(GuestKind::Uml, ["--disk", &disk, "--share", share], script)
    }

    /// Like `boot`, but Blockyard serves the COW file to the guest as /dev/vda.
    fn serve_and_boot(&self, script: &str) -> String {
        let socket = self.folder.join("disk.sock");
        let daemon = Daemon::serve(&self.cow, &socket, &["--format", "cow"]);
        let share: [OsString; 2] = ["--share".into(), self.folder.as_os_str().into()];
        let seen =
            run_guest(GuestKind::Uml, Guest::vhost(&socket, "").into_iter().chain(share), script);
        daemon.stop();
        seen
    }

    /// Creates the COW file.
    fn create(&self, version: u32) {
        fs::File::create_new(&self.cow).unwrap();
        let (name, facts) =
            (self.base.to_str().unwrap().to_string(), fs::metadata(&self.base).unwrap());
        self.on_cow(move |file, _| async move {
            let backing = Backing { name: &name, size: facts.len(), mtime: facts.mtime() };
            let alignment = if version == 3 { 4096 } else { 512 };
            cow::create(&file, &CreateOptions { backing, version, alignment }).await.unwrap();
        });
    }

    fn write(&self, writes: Vec<(u64, Vec<u8>)>) {
        self.on_cow(|file, _| async move {
            let cow = Cow::open(file, &CowOptions::default()).await.unwrap();
            for (offset, bytes) in writes {
                cow.write(Segments::from_bytes(&bytes), offset).await.1.unwrap();
            }
            cow.close().await.unwrap();
        });
    }

    /// Writes the whole disk into a raw file by this program. Returns the path of that file.
    fn merged(&self, name: &str) -> PathBuf {
        let path = self.folder.join(name);
        fs::File::create_new(&path).unwrap();
        let target = path.clone();
        let facts = fs::metadata(&self.base).unwrap();
        self.on_cow(move |file, open| {
            let (base, target) = (open(&self.base), open(&target));
            async move {
                let cow = Cow::open(file, &CowOptions::default()).await.unwrap();
                cow.check_backing(facts.len(), facts.mtime()).unwrap();
                cow::merge(&cow, &base, &target, |_| ()).await.unwrap();
            }
        });
        path
    }

    /// Runs an operation on the COW file, which can open other files.
    fn on_cow<F: Future<Output = ()> + 'static>(
        &self,
        work: impl FnOnce(Raw, &dyn Fn(&Path) -> Raw) -> F,
    ) {
        let executor = Executor::new().unwrap();
        let open = |path: &Path| {
            let options = OpenOptions::new(path, false, CacheMode::None);
            let file = Arc::new(ImageFile::open(&options).unwrap());
            Raw::open(&file, executor.handle()).unwrap()
        };
        executor.block_on(work(open(&self.cow), &open)).unwrap();
    }
}

/// Returns writes of 4 KiB blocks. `ubd` reads these correctly, because it reads a page from one
/// file.
fn blocks(seed: u64) -> Vec<(u64, Vec<u8>)> {
    let mut rng = Rng::new(seed);
    let mut block = || {
        let offset = rng.below(SIZE / 4096) * 4096;
        (offset, pattern(rng.next_u64(), offset, 4096))
    };
    (0..200).map(|_| block()).collect()
}

/// Returns a script that writes sector 1 and reads the first 32 sectors.
fn write_and_read(device: &str) -> String {
    format!(
        "head -c 512 /dev/zero | tr '\\0' x >/tmp/x
        dd if=/tmp/x of={device} bs=512 seek=1 oflag=direct conv=notrunc status=none
        dd if={device} of=/share/read bs=16k count=1 iflag=direct status=none"
    )
}

#[test]
fn ubd_reads_wrong_data_from_pages_in_two_files_and_a_served_disk_does_not() {
    let files = Files::new();
    let mut disk = fs::read(&files.base).unwrap();
    disk[512..1024].fill(b'x');
    let wrong = || {
        let read = fs::read(files.folder.join("read")).unwrap();
        assert_eq!(read.len(), 16384);
        read.chunks(512).zip(disk.chunks(512)).filter(|(read, disk)| read != disk).count()
    };
    files.boot(&write_and_read("/dev/ubda"));
    assert_eq!(wrong(), 24, "wrong sectors of ubd's 32");
    assert!(fs::read(files.merged("theirs.img")).unwrap() == disk, "what we read of the same file");

    fs::remove_file(&files.cow).unwrap();
    files.create(3);
    files.serve_and_boot(&write_and_read("/dev/vda"));
    assert_eq!(wrong(), 0, "wrong sectors of the 32 of a disk that is served");
    assert!(fs::read(files.merged("ours.img")).unwrap() == disk, "what was written");
    assert!(
        fs::read(&files.base).unwrap() == pattern(0, 0, SIZE as usize),
        "the backing file is as it was"
    );
}

#[test]
fn the_kernel_reads_a_file_system_that_was_written_to_a_served_disk() {
    let files = Files::new();
    files.create(3);
    let fill = "mkfs.ext4 -q -b 4096 /dev/vda && mount /dev/vda /mnt
        cp /usr/sbin/mke2fs /usr/bin/bash /mnt && sync
        rm /mnt/bash && fstrim /mnt && umount /mnt && md5sum </dev/vda";
    let seen = files.serve_and_boot(fill);
    let sum = md5(&files.merged("served.img"));
    assert_eq!(seen.split_whitespace().next(), Some(sum.as_str()));
    let look = "mount -o ro /dev/ubda /mnt && cmp /mnt/mke2fs /usr/sbin/mke2fs && ls /mnt";
    let found = files.boot(look);
    assert_eq!(found.split_whitespace().collect::<Vec<_>>(), ["lost+found", "mke2fs"]);
}

#[test]
fn cow_files_of_the_kernel_are_readable() {
    let files = Files::new();
    // The kernel creates the file. The disk in the guest is the reference.
    let seen = files.boot(
        "for seek in 0 5 700 2040; do
            dd if=/dev/urandom of=/dev/ubda bs=4k count=8 seek=$seek oflag=direct conv=notrunc,fsync status=none
        done
        md5sum </dev/ubda",
    );
    let merged = files.merged("merged.img");
    assert_eq!(seen.split_whitespace().next(), Some(md5(&merged).as_str()));
    let changed = fs::read(&merged)
        .unwrap()
        .chunks(512)
        .zip(pattern(0, 0, SIZE as usize).chunks(512))
        .filter(|(a, b)| a != b)
        .count();
    assert_eq!(changed, (13 + 8 + 8) * 8, "sectors that the guest wrote");
}

#[test]
fn the_kernel_continues_a_cow_file_of_this_program() {
    for version in [1, 2, 3] {
        let files = Files::new();
        files.create(version);
        files.write(blocks(version.into()));
        let ours = files.merged("ours.img");
        let seen = files.boot(
            "md5sum </dev/ubda
            dd if=/dev/urandom of=/dev/ubda bs=4k count=16 seek=1000 oflag=direct conv=notrunc,fsync status=none
            md5sum </dev/ubda",
        );
        let sums: Vec<_> = seen.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(sums[0], md5(&ours), "version {version}: what the kernel reads");
        assert_eq!(
            sums[1],
            md5(&files.merged("theirs.img")),
            "version {version}: what it wrote then"
        );
        assert_ne!(sums[0], sums[1]);
        // In the other direction: this program continues with a file that the kernel has changed.
        files.write(blocks(77));
        assert_eq!(
            files.boot("md5sum </dev/ubda").split_whitespace().next(),
            Some(md5(&files.merged("again.img")).as_str())
        );
    }
}
