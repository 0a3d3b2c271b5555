//! Images that QEMU creates with many options: data, zeroes, holes and compressed clusters, alone
//! and in chains.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde_json::Value;

use crate::common::{Finished, Folder, blockyard, tool};

pub const MIB: u64 = 1 << 20;
pub const SIZE: u64 = 24 * MIB;

/// Options of `qemu-img create -f qcow2 -o`.
pub const QCOW2: [&str; 13] = [
    "compat=1.1",
    "compat=0.10",
    "cluster_size=512",
    "cluster_size=4k",
    "cluster_size=2M",
    "refcount_bits=1",
    "refcount_bits=64,cluster_size=4k",
    "extended_l2=on",
    "extended_l2=on,cluster_size=128k,compression_type=zstd",
    "compression_type=zstd",
    "preallocation=metadata",
    "lazy_refcounts=on",
    "data_file=data.bin",
];

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs `qemu-img`, which must succeed. Returns its output.
#[track_caller]
pub fn qemu_img(args: &[&str]) -> String {
    tool("qemu-img", args).good()
}

/// Runs `blockyard image`, which must succeed without output on standard error. Returns its output.
#[track_caller]
pub fn image(args: &[&str]) -> String {
    let done = image_any(args);
    assert_eq!(done.err, "", "blockyard image {args:?}");
    done.good()
}

/// Runs `blockyard image`.
#[track_caller]
pub fn image_any(args: &[&str]) -> Finished {
    blockyard([&["image"], args].concat())
}

#[track_caller]
pub fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Runs a command of both programs with JSON output, and checks that the results are equal. The
/// arguments of a map end with the image.
#[track_caller]
pub fn same_answer(args: &[&str]) -> Value {
    // A map shows the holes of the files, and a write-back between the two commands changes them.
    if let ["map", .., image] = args {
        for file in std::fs::read_dir(Path::new(image).parent().unwrap()).unwrap() {
            std::fs::File::open(file.unwrap().path()).unwrap().sync_all().unwrap();
        }
    }
    let args = [args, &["--output", "json"]].concat();
    let (ours, theirs) = (json(&image(&args)), json(&qemu_img(&args)));
    assert_eq!(ours, theirs, "blockyard (left) and qemu-img (right) {args:?}");
    ours
}

#[track_caller]
pub fn qemu_io(image: &Path, format: &str, commands: &[&str]) {
    let mut args = vec!["-f", format, text(image)];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    let done = tool("qemu-io", args);
    let out = done.good();
    assert!(!out.contains("failed"), "{out}");
}

/// Checks with QEMU that an image is consistent and has the same disk as `expected`.
#[track_caller]
pub fn sound_and_same(image: (&Path, &str), expected: (&Path, &str)) {
    if image.1 == "qcow2" {
        qemu_img(&["check", "-q", "-f", "qcow2", text(image.0)]);
    }
    qemu_img(&["compare", "-q", "-f", image.1, "-F", expected.1, text(image.0), text(expected.0)]);
}

/// A folder with images.
pub struct Images(pub Folder);

impl Images {
    pub fn new() -> Self {
        Images(Folder::new())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Creates a raw file with data and holes. `seed` selects the patterns.
    pub fn raw(&self, name: &str, size: u64, seed: u8) -> PathBuf {
        let path = self.0.image(name, size);
        let p = |n: u8| seed.wrapping_add(n) | 1;
        let file = File::options().write(true).open(&path).unwrap();
        for (byte, at, len) in [
            (p(0), 0, 100 << 10),
            (p(1), MIB, MIB),
            (0, 3 * MIB, 128 << 10),
            (p(2), size - 65536, 64 << 10),
        ] {
            file.write_all_at(&vec![byte; len as usize], at).unwrap();
        }
        // A write-back between two commands would change the space that they report.
        file.sync_all().unwrap();
        path
    }

    /// Creates a qcow2 image with `options`, and does writes of all kinds. `backing`: name and
    /// format of the backing file.
    pub fn qcow2(
        &self,
        name: &str,
        options: &str,
        backing: Option<(&str, &str)>,
        size: u64,
        seed: u8,
    ) -> PathBuf {
        // QEMU copies data of a backing file into the image, and another test has other data.
        let key = backing.is_none().then(|| format!("{options} {size} {seed}"));
        self.once(key, options, name, || self.made(name, options, backing, size, seed))
    }

    /// Calls `make` for an image of `name`, or copies what an earlier call with the same `key` has
    /// made: QEMU's programs take long to start, and many tests use the same image.
    fn once(
        &self,
        key: Option<String>,
        options: &str,
        name: &str,
        make: impl FnOnce() -> PathBuf,
    ) -> PathBuf {
        /// Copies without a name, so that nothing is left of them when the process ends.
        static MADE: Mutex<BTreeMap<String, File>> = Mutex::new(BTreeMap::new());
        // An image with a data file has the path of that file.
        let Some(key) = key.filter(|_| !options.contains("data_file")) else { return make() };
        let known = MADE.lock().unwrap().get(&key).map(|copy| copy.try_clone().unwrap());
        if let Some(copy) = known {
            let path = self.path(name);
            copy_data(&copy, &path);
            return path;
        }
        let path = make();
        let copy = self.path("copy");
        copy_data(&File::open(&path).unwrap(), &copy);
        MADE.lock().unwrap().insert(key, File::open(&copy).unwrap());
        std::fs::remove_file(copy).unwrap();
        path
    }

    fn made(
        &self,
        name: &str,
        options: &str,
        backing: Option<(&str, &str)>,
        size: u64,
        seed: u8,
    ) -> PathBuf {
        let path = self.path(name);
        let options = options.replace("data.bin", text(&self.path(&format!("{name}.data"))));
        // Overlays have no metadata preallocation.
        let options =
            if backing.is_some() { options.replace("preallocation=metadata", "") } else { options };
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        if !options.is_empty() {
            args.extend(["-o", &options]);
        }
        if let Some((name, format)) = backing {
            args.extend(["-b", name, "-F", format]);
        }
        let size = size.to_string();
        args.extend([text(&path), &size]);
        qemu_img(&args);
        self.fill(&path, &options, seed);
        path
    }

    fn fill(&self, path: &Path, options: &str, seed: u8) {
        let p = |n: u8| seed.wrapping_add(n) | 1;
        let shift = u64::from(seed) * 8192;
        let mut commands = vec![
            format!("write -P {} {} 200k", p(0), 512 * 1024 + shift),
            format!("write -P {} {} 1k", p(1), 1537 * 1024 + shift),
            format!("write -P {} 2M 2M", p(2)),
            format!("write -z {} 64k", 2304 * 1024 + shift),
            format!("write -z -u {} 256k", 4 * MIB + shift),
            format!("write -z -u {} 256k", 3 * MIB + shift),
            format!("write -P {} {} 70k", p(3), 5 * MIB + 512),
            format!("discard {} 128k", 2560 * 1024 + shift),
        ];
        // Clusters that are allocated already cannot be compressed.
        if !options.contains("data_file") && !options.contains("preallocation") {
            let cluster = ["512", "4k", "128k", "2M"]
                .into_iter()
                .find(|c| options.contains(&format!("cluster_size={c}")));
            for (number, at) in [6, 8].into_iter().enumerate() {
                commands.push(format!(
                    "write -c -P {} {at}M {}",
                    p(4 + number as u8),
                    cluster.unwrap_or("64k")
                ));
            }
        }
        qemu_io(path, "qcow2", &commands.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// Creates three images: raw (smaller), qcow2, and one with `options` on top.
    pub fn chain(&self, options: &str) -> PathBuf {
        self.raw("base.raw", 7 * MIB + 512, 1);
        let (middle, top) = ("middle.qcow2", "top.qcow2");
        self.once(Some(middle.into()), "", middle, || {
            self.made(middle, "", Some(("base.raw", "raw")), 16 * MIB, 3)
        });
        self.once(Some(format!("{top} {options}")), options, top, || {
            self.made(top, options, Some((middle, "qcow2")), SIZE, 5)
        })
    }
}

/// Creates a copy of a file, with its holes.
fn copy_data(from: &File, path: &Path) {
    let to = File::create(path).unwrap();
    to.set_len(from.metadata().unwrap().len()).unwrap();
    let mut end = 0;
    loop {
        let at = match seek(from, SeekFrom::Data(end)) {
            Err(Errno::NXIO) => return to.sync_all().unwrap(),
            at => at.unwrap(),
        };
        end = seek(from, SeekFrom::Hole(at)).unwrap();
        let mut bytes = vec![0; (end - at) as usize];
        from.read_exact_at(&mut bytes, at).unwrap();
        to.write_all_at(&bytes, at).unwrap();
    }
}
