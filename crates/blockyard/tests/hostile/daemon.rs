//! A daemon with three disks, watched closely: its log, its memory, its descriptors, and how it ends.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The disk that is maltreated, one that must not notice, and one whose reads take their time.
pub const VICTIM: &str = "victim";
pub const OTHER: &str = "other";
pub const SLOW: &str = "slow";
pub const QUEUES: u16 = 2;
/// Bytes of each disk.
pub const CAPACITY: u64 = 32 << 20;

pub struct Daemon {
    child: Child,
    folder: PathBuf,
    log: Arc<Mutex<Vec<String>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Daemon {
    /// Disks in memory.
    pub fn start() -> Self {
        Self::with(|_, disk| format!("image = \"ram:{CAPACITY}\"\nname = \"{disk}\"\n"))
    }

    /// `image` gives the configuration's lines for a disk in a folder.
    pub fn with(image: impl Fn(&Path, &str) -> String) -> Self {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("blockyard-hostile-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut config = String::new();
        for disk in [VICTIM, OTHER, SLOW] {
            let socket = folder.join(disk);
            let lines = image(&folder, disk);
            config += &format!("[[disk]]\n{lines}vhost-user = \"{}\"\nqueues = {QUEUES}\n", socket.display());
            config += if disk == SLOW { "filters = [\"delay:read=400ms\"]\n" } else { "" };
        }
        std::fs::write(folder.join("config.toml"), config).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_blockyard"))
            .args(["serve", "--config"])
            .arg(folder.join("config.toml"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (lines, stderr) = (log.clone(), child.stderr.take().unwrap());
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                lines.lock().unwrap().push(line.unwrap());
            }
        });
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n", "{:?}", log.lock().unwrap());
        Daemon { child, folder, log, reader: Some(reader) }
    }

    pub fn socket(&self, disk: &str) -> PathBuf {
        self.folder.join(disk)
    }

    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    /// The lines that say that something is wrong.
    pub fn complaints(&self) -> Vec<String> {
        self.log().into_iter().filter(|l| !l.contains(" INFO ")).collect()
    }

    /// Waits until there are `count` complaints, and a moment longer for one too many.
    pub fn complained(&self, count: usize) -> Vec<String> {
        let start = Instant::now();
        while self.complaints().len() < count && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(10));
        self.complaints()
    }

    fn proc(&self, what: &str) -> PathBuf {
        format!("/proc/{}/{what}", self.child.id()).into()
    }

    /// Memory of its own (not the guests' that it shares), in bytes.
    pub fn own_memory(&self) -> u64 {
        let status = std::fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(self.proc("fd")).unwrap().count()
    }

    /// Waits until it has no more descriptors than these: front ends that went away are let go in their own time.
    pub fn keeps_descriptors(&self, most: usize, what: &str) {
        let start = Instant::now();
        while self.descriptors() > most {
            assert!(start.elapsed() < Duration::from_secs(5), "{what}: {} descriptors, not {most}", self.descriptors());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn mappings(&self) -> usize {
        std::fs::read_to_string(self.proc("maps")).unwrap().lines().count()
    }

    /// Processor time used so far.
    pub fn processor_time(&self) -> Duration {
        let stat = std::fs::read_to_string(self.proc("stat")).unwrap();
        let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(ticks * 10)
    }

    /// Ends it as an administrator does: it must still be there, drain, and have nothing to hide.
    pub fn end(mut self) -> Vec<String> {
        let pid = rustix::process::Pid::from_child(&self.child);
        assert!(self.child.try_wait().unwrap().is_none(), "the daemon died: {:#?}", self.log());
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "the daemon does not end: {:#?}", self.log());
            std::thread::sleep(Duration::from_millis(1));
        };
        self.reader.take().unwrap().join().unwrap();
        let log = self.log();
        assert!(status.success(), "{status}: {log:#?}");
        assert!(!log.iter().any(|l| l.contains("panicked")), "{log:#?}");
        log
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
