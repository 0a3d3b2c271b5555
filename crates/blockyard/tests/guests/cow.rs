//! COW files and User Mode Linux's own driver, `ubd`: each reads what the other wrote, and what `ubd` reads wrong.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_image::cow::{self, Backing, Cow, CowOptions, CreateOptions};
use blockyard_image::{CacheMode, ImageFile, OpenOptions, Raw};
use blockyard_ring::sim::{Rng, pattern};
use blockyard_ring::{Executor, Segments, UringFile};

use crate::common::guest::run_guest;
use crate::common::{Folder, Kind, md5};

const SIZE: u64 = 8 << 20;

/// A backing file, and a place for a COW file.
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

    /// Runs a script in a guest that has the COW file over the backing file as /dev/ubda, and the folder as /share.
    fn boot(&self, script: &str) -> String {
        let disk = format!("ubdcow={}:{}", self.cow.display(), self.base.display());
        let share = self.folder.to_str().unwrap();
        run_guest(Kind::Uml, ["--disk", &disk, "--share", share], script)
    }

    /// Makes the COW file.
    fn create(&self, version: u32) {
        fs::File::create_new(&self.cow).unwrap();
        let (name, facts) = (self.base.to_str().unwrap().to_string(), fs::metadata(&self.base).unwrap());
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

    /// All of the disk, as this program reads it, into a file.
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

    /// Work on the COW file; it can open other files.
    fn on_cow<F: Future<Output = ()> + 'static>(
        &self,
        work: impl FnOnce(Raw<UringFile>, &dyn Fn(&Path) -> Raw<UringFile>) -> F,
    ) {
        let executor = Executor::new().unwrap();
        let open = |path: &Path| {
            let options = OpenOptions { path: path.into(), read_only: false, cache: CacheMode::None };
            let file = Arc::new(ImageFile::open(&options).unwrap());
            Raw::new(UringFile::new(executor.handle(), file.fd().clone()).unwrap(), &file)
        };
        executor.block_on(work(open(&self.cow), &open)).unwrap();
    }
}

/// 4 KiB blocks: what `ubd` reads right, as it reads a page from one file.
fn blocks(seed: u64) -> Vec<(u64, Vec<u8>)> {
    let mut rng = Rng::new(seed);
    let mut block = || {
        let offset = rng.below(SIZE / 4096) * 4096;
        (offset, pattern(rng.next_u64(), offset, 4096))
    };
    (0..200).map(|_| block()).collect()
}

#[test]
fn stock_ubd_reads_wrong_data_where_a_page_is_of_two_files_and_we_read_what_was_written() {
    let files = Files::new();
    files.boot(
        "head -c 512 /dev/zero | tr '\\0' x >/tmp/x
        dd if=/tmp/x of=/dev/ubda bs=512 seek=1 oflag=direct conv=notrunc status=none
        dd if=/dev/ubda of=/share/read bs=16k count=1 iflag=direct status=none",
    );
    let mut disk = fs::read(&files.base).unwrap();
    assert!(disk == pattern(0, 0, SIZE as usize), "the backing file is as it was");
    disk[512..1024].fill(b'x');
    let read = fs::read(files.folder.join("read")).unwrap();
    let wrong = read.chunks(512).zip(disk.chunks(512)).filter(|(read, disk)| read != disk).count();
    assert_eq!((read.len(), wrong), (16384, 24), "wrong sectors of ubd's 32");
    assert!(fs::read(files.merged("merged.img")).unwrap() == disk, "what we read of the same file");
}

#[test]
fn what_the_kernel_wrote_is_read_here() {
    let files = Files::new();
    // The kernel makes the file; the disk as the guest sees it is the judge.
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
fn what_we_wrote_is_read_by_the_kernel_which_goes_on_with_it() {
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
        assert_eq!(sums[1], md5(&files.merged("theirs.img")), "version {version}: what it wrote then");
        assert_ne!(sums[0], sums[1]);
        // And back: what is here after a kernel's hands goes on being ours.
        files.write(blocks(77));
        assert_eq!(
            files.boot("md5sum </dev/ubda").split_whitespace().next(),
            Some(md5(&files.merged("again.img")).as_str())
        );
    }
}
