//! COW files on real files, compared with the programs of User Mode Linux: `uml_mkcow` creates
//! them, `uml_moo` merges them.
//!
//! Needs `guests/setup tree`. (The tests of whole guests compare with the kernel.)

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use blockyard_image::cow::{self, Backing, Cow, CowOptions, CreateOptions, Header};
use blockyard_image::{CacheMode, CopyDown, Image, ImageFile, Layer, OpenOptions, Raw};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::sim::{Rng, pattern};

use crate::tools;

/// A folder that is removed after its test, on the disk of the build, so that O_DIRECT and holes
/// work.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("cow-peers-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir(&path).unwrap();
        Folder(fs::canonicalize(path).unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Creates a file with these bytes and an old mtime.
    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        let past = SystemTime::UNIX_EPOCH + Duration::from_secs(1_234_567_890);
        File::options().write(true).open(&path).unwrap().set_modified(past).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a program of User Mode Linux; returns success and output.
fn uml(program: &str, arguments: &[&Path]) -> (bool, String) {
    let output = tools::output(tools::tool(program).args(arguments));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn uml_well(program: &str, arguments: &[&Path]) {
    let (good, text) = uml(program, arguments);
    assert!(good, "{program} {arguments:?}: {text}");
}

/// Runs work on files, on its own ring.
struct Host {
    executor: Executor,
    cache: CacheMode,
}

impl Host {
    fn new(cache: CacheMode) -> Self {
        Host { executor: Executor::new().unwrap(), cache }
    }

    fn raw(&self, path: &Path) -> Raw {
        if !path.exists() {
            File::create_new(path).unwrap();
        }
        let options = OpenOptions::new(path, false, self.cache);
        let file = Arc::new(ImageFile::open(&options).unwrap());
        Raw::open(&file, self.executor.handle()).unwrap()
    }

    fn run<T: 'static>(self, work: impl Future<Output = T> + 'static) -> T {
        tools::block_on(&self.executor, work)
    }

    fn info(cache: CacheMode, cow: &Path) -> cow::Report {
        let host = Host::new(cache);
        let file = host.raw(cow);
        host.run(async move { cow::info(&file).await.unwrap() })
    }

    /// Creates a COW file with this crate.
    fn create(cache: CacheMode, cow: &Path, base: &Path, version: u32) -> Header {
        let host = Host::new(cache);
        let (file, name, facts) =
            (host.raw(cow), base.to_str().unwrap().to_string(), fs::metadata(base).unwrap());
        let alignment = if version == 3 { 4096 } else { 512 };
        host.run(async move {
            let backing = Backing { name: &name, size: facts.len(), mtime: facts.mtime() };
            cow::create(&file, &CreateOptions { backing, version, alignment }).await.unwrap()
        })
    }

    /// Writes the planned data.
    fn write(cache: CacheMode, cow: &Path, writes: Vec<(u64, Vec<u8>)>) {
        let host = Host::new(cache);
        let file = host.raw(cow);
        host.run(async move {
            let cow = Cow::open(file, &CowOptions::default()).await.unwrap();
            for (offset, bytes) in writes {
                if bytes.iter().all(|&b| b == 0) {
                    cow.write_zeroes(offset, bytes.len() as u64, true).await.unwrap();
                } else {
                    cow.write(Segments::from_bytes(&bytes), offset).await.1.unwrap();
                }
            }
            cow.close().await.unwrap();
        });
    }

    fn merge(cache: CacheMode, cow: &Path, base: &Path, target: &Path) {
        let host = Host::new(cache);
        let (file, base, target) = (host.raw(cow), host.raw(base), host.raw(target));
        host.run(async move {
            let cow = Cow::open(file, &CowOptions::default()).await.unwrap();
            cow::merge(&cow, &base, &target, |_| ()).await.unwrap();
        });
    }

    fn commit(cache: CacheMode, cow: &Path, base: &Path) {
        let host = Host::new(cache);
        let (file, base) = (host.raw(cow), host.raw(base));
        host.run(async move {
            let cow = Cow::open(file.clone(), &CowOptions::default()).await.unwrap();
            let size = cow.size();
            let (from, into) = (Layer::Cow(cow), Layer::Raw { raw: base, size });
            let (from, into) = (Image::new(vec![from], false), Image::new(vec![into], false));
            let work = CopyDown::new(0..size, 1, Default::default());
            work.run(&from, &into, async |_| Ok(())).await.unwrap();
            into.close().await.unwrap();
            cow::make_empty(&file).await.unwrap();
        });
    }
}

/// Returns writes of whole sectors all over a disk and at its end, some of zeroes.
fn writes(seed: u64, size: u64) -> Vec<(u64, Vec<u8>)> {
    let mut rng = Rng::new(seed);
    let mut writes: Vec<_> = (0..60)
        .map(|_| {
            let first = rng.below(size / 512);
            let longest = if rng.one_in(5) { 300 } else { 12 };
            let count = rng.between(1, longest).min(size / 512 - first);
            let bytes = match rng.one_in(6) {
                true => vec![0; count as usize * 512],
                false => pattern(rng.next_u64(), first * 512, count as usize * 512),
            };
            (first * 512, bytes)
        })
        .collect();
    writes.push((size - 512, pattern(seed, size, 512)));
    writes
}

fn disk_after(base: &[u8], writes: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let mut disk = base.to_vec();
    writes
        .iter()
        .for_each(|(offset, bytes)| disk[*offset as usize..][..bytes.len()].copy_from_slice(bytes));
    disk
}

#[test]
fn created_files_equal_those_of_uml_mkcow() {
    for (cache, size) in
        [(CacheMode::None, 5 << 20), (CacheMode::Writeback, 4096), (CacheMode::None, 1000)]
    {
        let folder = Folder::new();
        let base = folder.file("base.img", &pattern(0, 0, size));
        let (theirs, ours) = (folder.path("theirs.cow"), folder.path("ours.cow"));
        uml_well("uml_mkcow", &[&theirs, &base]);
        let header = Host::create(cache, &ours, &base, 3);
        assert_eq!(fs::read(&theirs).unwrap(), fs::read(&ours).unwrap(), "{size} bytes");
        let report = Host::info(cache, &theirs);
        assert_eq!((report.header, report.own_sectors, report.leaked), (header, 0, 0));
        assert!(fs::metadata(&ours).unwrap().blocks() * 512 < 20_000, "it is sparse");
    }
}

#[test]
fn uml_moo_merges_our_files_as_we_do() {
    for (seed, version) in [(1, 1), (2, 2), (3, 3), (4, 3)] {
        let cache = if seed % 2 == 0 { CacheMode::Writeback } else { CacheMode::None };
        let (folder, size) = (Folder::new(), 3u64 << 20);
        let before = pattern(0, 0, size as usize);
        let base = folder.file("base.img", &before);
        let (cow, theirs, ours) =
            (folder.path("disk.cow"), folder.path("theirs.img"), folder.path("ours.img"));
        Host::create(cache, &cow, &base, version);
        let writes = writes(seed, size);
        Host::write(cache, &cow, writes.clone());
        let expected = disk_after(&before, &writes);
        Host::merge(cache, &cow, &base, &ours);
        assert!(fs::read(&ours).unwrap() == expected, "version {version}, {cache}: our merge");
        uml_well("uml_moo", &[&cow, &theirs]);
        assert!(fs::read(&theirs).unwrap() == expected, "version {version}, {cache}: theirs");
        assert!(fs::read(&base).unwrap() == before, "the backing file is unchanged");
    }
}

#[test]
fn a_commit_equals_that_of_uml_moo() {
    let (folder, size) = (Folder::new(), 3u64 << 20);
    let before = pattern(0, 0, size as usize);
    let writes = writes(5, size);
    let commits: Vec<_> = ["ours", "theirs"]
        .into_iter()
        .map(|who| {
            let base = folder.file(&format!("{who}.img"), &before);
            let cow = folder.path(&format!("{who}.cow"));
            uml_well("uml_mkcow", &[&cow, &base]);
            Host::write(CacheMode::None, &cow, writes.clone());
            if who == "ours" {
                Host::commit(CacheMode::None, &cow, &base);
                assert_eq!(Host::info(CacheMode::None, &cow).own_sectors, 0);
                assert!(
                    fs::metadata(&cow).unwrap().blocks() * 512 < 20_000,
                    "its space is deallocated"
                );
            } else {
                uml_well("uml_moo", &[Path::new("-d"), &cow]);
            }
            fs::read(&base).unwrap()
        })
        .collect();
    assert!(commits[0] == commits[1] && commits[0] == disk_after(&before, &writes));
}

#[test]
fn both_detect_a_changed_backing_file() {
    let folder = Folder::new();
    let base = folder.file("base.img", &pattern(0, 0, 1 << 20));
    let (cow, merged) = (folder.path("disk.cow"), folder.path("merged.img"));
    uml_well("uml_mkcow", &[&cow, &base]);
    let check = |base: &Path| {
        let facts = fs::metadata(base).unwrap();
        Host::info(CacheMode::None, &cow).header.matches(facts.len(), facts.mtime())
    };
    check(&base).unwrap();
    File::options().write(true).open(&base).unwrap().write_all_at(b"changed", 77).unwrap();
    let error = check(&base).unwrap_err().to_string();
    assert!(
        error.contains(base.to_str().unwrap()) && error.contains("and had been at 1234567890"),
        "{error}"
    );
    let (good, text) = uml("uml_moo", &[&cow, &merged]);
    assert!(!good && text.contains("mtime mismatch"), "{text}");
    // Both programs accept the change if an option permits it.
    let facts = fs::metadata(&base).unwrap();
    let host = Host::new(CacheMode::None);
    let (file, name) = (host.raw(&cow), base.to_str().unwrap().to_string());
    host.run(async move {
        cow::set_backing(&file, &Backing { name: &name, size: facts.len(), mtime: facts.mtime() })
            .await
            .unwrap()
    });
    check(&base).unwrap();
    uml_well("uml_moo", &[&cow, &merged]);
    assert!(fs::read(&merged).unwrap() == fs::read(&base).unwrap());
}
