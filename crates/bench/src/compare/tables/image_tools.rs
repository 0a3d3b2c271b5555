//! `blockyard image` beside `qemu-img`: the same work on the same files, at equal durability.
//!
//! ```text
//!   durability  `blockyard image` syncs what it has written before it ends. Some commands of
//!               `qemu-img` do not. So each run of it ends with an fsync of its output and of the
//!               folder, within the measured time. Its cache mode is its default
//!   start       both programs start directly, without the wrapper guests/tool. The row "start"
//!               shows the time of the dynamic linker
//!   sources     are in the page cache, outputs are new files. The system is synced before each run
//!   memory      is touched before each run, as much as the largest output takes. A virtual
//!               machine gives free memory back to its host, and the next program pays for it
//!   CPU         user and system time of the process with all of its threads, as bash reports it
//! ```
//! In: the tasks of `image_tasks`. Out: seconds of the wall and of the processor. What must hold:
//! `qemu-img compare` and `qemu-img check` accept the first result of each program.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::image_tasks::{Begin, ImageTask, tasks};
use super::workspace::{Workspace, run, settle};
use super::{Figures, Measured, Row, Table, cell, markdown};
use crate::client::workload::Random;
use crate::process::{Process, Stop, fill};

const QEMU: usize = 0;
const SYSTEMS: [&str; 2] = ["qemu-img", "blockyard"];
const MIB: u64 = 1 << 20;
/// Prints wall, user and system seconds of a command. Starts no process of its own.
const TIMED: &str = r#"TIMEFORMAT='took %3R %3U %3S'; { time "$@" >/dev/null 2>&3; } 3>&2 2>&1"#;

pub struct ImageTools {
    place: Workspace,
    tasks: Vec<ImageTask>,
    /// Returns the command that the wrapper guests/tool runs.
    qemu_img: Vec<String>,
    modules: String,
    /// Rows, systems and builds, of which the first result was checked.
    judged: BTreeSet<(usize, usize, PathBuf)>,
}

impl ImageTools {
    pub fn new(place: Workspace, only: &str) -> Result<Self> {
        let find =
            r#". "$1/lib.sh" && printf '%s\n' "$libs" "$tree/usr/bin/qemu-img" "${loader[@]}""#;
        let found = run(Command::new("bash").args(["-c", find, "find"]).arg(place.guests()?))?;
        let mut lines = found.lines().map(String::from);
        let libs = lines.next().context("guests/lib.sh names no libraries")?;
        let program = lines.next().context("guests/lib.sh names no program")?;
        let qemu_img = lines.chain(["--argv0".into(), "qemu-img".into(), program]).collect();
        let tasks = tasks();
        let tools = ImageTools {
            place,
            tasks,
            qemu_img,
            modules: format!("{libs}/qemu"),
            judged: BTreeSet::new(),
        };
        let wanted = tools.tasks.iter().filter(|task| task.name.contains(only));
        let sources: BTreeSet<&str> = wanted.flat_map(|task| task.sources()).collect();
        sources.into_iter().try_for_each(|source| tools.source(source))?;
        Ok(tools)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.place.folder.join(name)
    }

    /// Makes a source of the tasks if it is missing.
    fn source(&self, name: &str) -> Result<()> {
        let (path, size, stop) = (self.file(name), self.place.size, &self.place.stop);
        if path.exists() {
            return Ok(());
        }
        let convert = |from: &str, options: &str| {
            self.source(from)?;
            let from = self.file(from);
            self.place.qemu_img(&format!("convert -f raw -O qcow2 {options}"), &[&from, &path])
        };
        match name {
            "dense.raw" => fill(&path, size, stop)?,
            "small.raw" => fill(&path, size / 16, stop)?,
            "sparse.raw" => sparse(&path, size * 8, stop)?,
            "text.raw" => text(&path, size / 4, stop)?,
            "dense.qcow2" => convert("dense.raw", "")?,
            "sparse.qcow2" => convert("sparse.raw", "")?,
            "zlib.qcow2" => convert("text.raw", "-c -o compression_type=zlib")?,
            "zstd.qcow2" => convert("text.raw", "-c -o compression_type=zstd")?,
            "empty.qcow2" => {
                self.place.qemu_img(
                    "create -q -f qcow2 -o cluster_size=512",
                    &[&path, Path::new("128G")],
                )?;
            }
            "tiny.qcow2" => self.place.qemu_img("create -q -f qcow2", &[&path, Path::new("1G")])?,
            _ => self.overlay(&path)?,
        }
        settle(&path, true)
    }

    /// Creates an overlay on a copy of the dense image. The overlay holds a quarter of the disk.
    fn overlay(&self, path: &Path) -> Result<()> {
        self.source("dense.qcow2")?;
        std::fs::copy(self.file("dense.qcow2"), self.file("below.qcow2"))?;
        self.place.qemu_img("create -q -f qcow2 -b below.qcow2 -F qcow2", &[path])?;
        let mut command = self.place.tool("qemu-io")?;
        command.args(["-f", "qcow2"]);
        for piece in (0..self.place.size / MIB).step_by(4) {
            command.args(["-c", &format!("write -q -P {} {}M 1M", piece % 255 + 1, piece)]);
        }
        run(command.arg(path)).map(drop)
    }

    /// Prepares the file that a task writes.
    fn begin(&self, task: &ImageTask) -> Result<PathBuf> {
        let out = self.file(task.out);
        let copies: &[(&str, &str)] = match task.begin {
            Begin::Nothing => &[],
            Begin::Tiny => &[("tiny.qcow2", task.out)],
            Begin::Overlay => &[("overlay.qcow2", task.out), ("dense.qcow2", "below.qcow2")],
        };
        let _ = std::fs::remove_file(&out);
        for (from, to) in copies {
            std::fs::copy(self.file(from), self.file(to))?;
            std::fs::File::open(self.file(to))?.sync_all()?;
        }
        Ok(out)
    }

    /// Returns the program of a system with the arguments of a task.
    fn command(&self, task: &ImageTask, system: usize, out: &Path) -> Vec<String> {
        let ours = [self.place.program.display().to_string(), "image".into()];
        let (program, words) = match system {
            QEMU => (&self.qemu_img[..], &task.theirs),
            _ if task.name == "start" => (&ours[..1], &task.ours),
            _ => (&ours[..], &task.ours),
        };
        let (folder, out) = (self.place.folder.display().to_string(), out.display().to_string());
        let place = |word: &str| match word {
            "{none}" => String::new(),
            word => word.replace("{dir}", &folder).replace("{out}", &out),
        };
        program.iter().cloned().chain(words.split_whitespace().map(place)).collect()
    }

    /// Runs a program to its end. Returns wall and processor seconds.
    fn timed(&self, words: &[String]) -> Result<(f64, f64)> {
        let mut command = Command::new("bash");
        command.args(["-c", TIMED, "timed"]).args(words).env("QEMU_MODULE_DIR", &self.modules);
        let mut process = Process::start(&command)?;
        let mut took = None;
        // The measured program prints nothing until it ends. The limit holds for each line.
        while let Some((_, line)) =
            process.line(&self.place.stop, Instant::now() + super::SILENCE)?
        {
            took = line.strip_prefix("took ").map(String::from).or(took);
        }
        process.finish().with_context(|| words.join(" "))?;
        let numbers = took.context("bash does not say how long a program took")?;
        let numbers: Vec<f64> = numbers.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [wall, user, system] = numbers[..] else {
            anyhow::bail!("bash did not print three times, but: {numbers:?}")
        };
        Ok((wall, user + system))
    }

    /// Checks with qemu-img that the output holds the same disk as its source.
    fn judge(&self, task: &ImageTask, out: &Path) -> Result<()> {
        let Some((source, form, to)) = task.judge else { return Ok(()) };
        self.place
            .qemu_img(&format!("compare -q -f {form} -F {to}"), &[&self.file(source), out])?;
        if to == "qcow2" {
            self.place.qemu_img("check -q -f qcow2", &[out])?;
        }
        Ok(())
    }
}

impl Table for ImageTools {
    fn rows(&self) -> Vec<Row> {
        let systems = || SYSTEMS.map(String::from).to_vec();
        self.tasks.iter().map(|task| Row { name: task.name.clone(), systems: systems() }).collect()
    }

    fn measure(&mut self, row: usize, system: usize) -> Result<Figures> {
        let task = &self.tasks[row];
        for source in &task.reads {
            settle(&self.file(source), true)?;
        }
        let out = self.begin(task)?;
        if task.writes() {
            std::hint::black_box(vec![1_u8; (self.place.size * 9 / 8) as usize]);
        }
        rustix::fs::sync();
        let (mut wall, cpu) = self.timed(&self.command(task, system, &out))?;
        if system == QEMU && out.exists() {
            let begin = Instant::now();
            let below = task.name.starts_with("commit").then(|| self.file("below.qcow2"));
            for path in below.iter().chain([&out, &self.place.folder]) {
                std::fs::File::open(path)?.sync_all()?;
            }
            wall += begin.elapsed().as_secs_f64();
        }
        let judged = (row, system, self.place.program.clone());
        if self.judged.insert(judged) && out.exists() {
            self.judge(task, &out)
                .with_context(|| format!("{}: the result of {}", task.name, SYSTEMS[system]))?;
        }
        let _ = std::fs::remove_file(&out);
        Ok(Figures::from([("wall", wall), ("cpu", cpu)]))
    }

    fn place(&mut self) -> Option<&mut Workspace> {
        Some(&mut self.place)
    }

    fn markdown(&self, measured: &[Measured]) -> String {
        let head = [
            "work",
            "qemu-img, s",
            "blockyard, s",
            "blockyard / qemu-img",
            "CPU s, qemu-img",
            "CPU s, blockyard",
        ];
        let line = |m: &Measured| {
            let seconds = |system, key| cell(m.median(system, key), |x| format!("{x:.3}"));
            vec![
                m.row.name.clone(),
                seconds(0, "wall"),
                seconds(1, "wall"),
                // Ratios within a round, because other load of the machine affects both.
                cell(m.ratio(1, 0, "wall"), |x| format!("{x:.2}")),
                seconds(0, "cpu"),
                seconds(1, "cpu"),
            ]
        };
        markdown(&head.map(String::from), &measured.iter().map(line).collect::<Vec<_>>())
    }
}

/// Creates a file in which one MiB of 32 has data, and the others are holes.
fn sparse(path: &Path, size: u64, stop: &Stop) -> Result<()> {
    pieces(path, size, 32, stop, &mut |random, piece| {
        piece
            .chunks_exact_mut(8)
            .for_each(|word| word.copy_from_slice(&random.word().to_ne_bytes()));
    })
}

/// Creates a file that compresses to about a third of its size, as text does.
fn text(path: &Path, size: u64, stop: &Stop) -> Result<()> {
    let mut random = Random::new(2, 0);
    let mut word = || {
        let len = 2 + random.below(8);
        let letters: Vec<u8> = (0..len).map(|_| b'a' + random.below(26) as u8).collect();
        [letters, b" ".to_vec()].concat()
    };
    let words: Vec<Vec<u8>> = (0..4000).map(|_| word()).collect();
    pieces(path, size, 1, stop, &mut |random, piece| {
        let mut rest = piece;
        while !rest.is_empty() {
            let word = &words[random.below(words.len() as u64) as usize];
            let len = word.len().min(rest.len());
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(len);
            head.copy_from_slice(&word[..len]);
            rest = tail;
        }
    })
}

/// Writes one MiB in each `every` MiB of a durable file.
fn pieces(
    path: &Path,
    size: u64,
    every: u64,
    stop: &Stop,
    fill: &mut dyn FnMut(&mut Random, &mut [u8]),
) -> Result<()> {
    let file =
        std::fs::File::create(path).with_context(|| format!("creating {}", path.display()))?;
    file.set_len(size)?;
    let (mut random, mut piece) = (Random::new(1, 0), vec![0; MIB as usize]);
    for at in (0..size).step_by((MIB * every) as usize) {
        stop.check()?;
        let len = (size - at).min(MIB) as usize;
        fill(&mut random, &mut piece[..len]);
        file.write_all_at(&piece[..len], at)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(file.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, measured, rounds};
    use super::*;
    use crate::scratch::Scratch;

    fn tools(scratch: &Scratch) -> ImageTools {
        let loader = ["/tree/ld.so", "--argv0", "qemu-img", "/tree/qemu-img"];
        ImageTools {
            place: fixture::place(scratch),
            tasks: tasks(),
            qemu_img: loader.map(String::from).into(),
            modules: String::new(),
            judged: BTreeSet::new(),
        }
    }

    fn task(tools: &ImageTools, name: &str) -> usize {
        tools.tasks.iter().position(|task| task.name == name).unwrap()
    }

    #[test]
    fn the_table_has_ratios_of_rounds_and_seconds_of_medians() {
        let theirs = rounds(&[("wall", [1.0, 2.0, 4.0]), ("cpu", [0.5, 0.6, 0.7])]);
        let ours = rounds(&[("wall", [0.5, 1.8, 1.0]), ("cpu", [0.1, 0.2, 0.3])]);
        let alone = rounds(&[("wall", [3.0]), ("cpu", [1.0])]);
        let rows = [
            measured("convert", &[("qemu-img", theirs), ("blockyard", ours)]),
            measured("map", &[("qemu-img", vec![]), ("blockyard", alone)]),
        ];
        let cells = fixture::cells(&tools(&Scratch::new()).markdown(&rows));
        // The ratios are 0.5, 0.9 and 0.25. That of the medians would be 0.5 too, but of 1 / 2.
        assert_eq!(cells[1], ["convert", "2.000", "1.000", "0.50", "0.600", "0.200"]);
        assert_eq!(cells[2], ["map", "", "3.000", "", "", "1.000"]);
    }

    #[test]
    fn both_programs_get_the_files_of_the_task() {
        let scratch = Scratch::new();
        let tools = tools(&scratch);
        let (folder, own) = (tools.place.folder.display(), tools.place.program.display());
        let words = |name: &str, system: usize| {
            let task = &tools.tasks[task(&tools, name)];
            tools.command(task, system, &tools.file(task.out))
        };
        assert_eq!(
            words("convert raw to raw, sparse", 1).join(" "),
            format!("{own} image convert -O raw {folder}/sparse.raw {folder}/out.raw")
        );
        assert_eq!(
            words("convert raw to raw, sparse", QEMU).join(" "),
            format!(
                "/tree/ld.so --argv0 qemu-img /tree/qemu-img convert -f raw -O raw \
                 {folder}/sparse.raw {folder}/out.raw"
            )
        );
        // The row of the start has no image.
        assert_eq!(words("start", 1).join(" "), format!("{own} --version"));
        // A rebase to no backing image needs an empty word.
        let rebase = words("rebase to none, 256 MiB of 1 GiB", 1);
        assert_eq!(rebase[2..5], ["rebase", "-b", ""]);
    }

    #[test]
    fn the_time_of_a_program_is_that_of_bash() {
        let tools = tools(&Scratch::new());
        let timed =
            |words: &[&str]| tools.timed(&words.iter().map(|w| w.to_string()).collect::<Vec<_>>());
        // What the program prints is none of the times.
        let (wall, cpu) = timed(&["echo", "took 9999999 9999999 9999999"]).unwrap();
        assert!((0.0..9e6).contains(&wall) && (0.0..9e6).contains(&cpu), "{wall} s, {cpu} s");
        let error = format!("{:#}", timed(&["sh", "-c", "echo wrong >&2; exit 3"]).unwrap_err());
        assert!(error.contains("sh -c echo wrong") && error.contains("exit status: 3"), "{error}");
        assert!(error.ends_with(": wrong") || error.contains("wrong\n"), "{error}");
    }

    #[test]
    fn a_task_begins_without_an_output_or_with_a_copy_of_its_images() {
        let scratch = Scratch::new();
        let tools = tools(&scratch);
        scratch.file("work/out.raw", "old");
        for (name, contents) in [("overlay", "upper"), ("dense", "lower"), ("below", "changed")] {
            scratch.file(&format!("work/{name}.qcow2"), contents);
        }
        let out = tools.begin(&tools.tasks[task(&tools, "convert raw to raw, sparse")]).unwrap();
        assert!(out.ends_with("out.raw") && !out.exists());
        let out = tools.begin(&tools.tasks[task(&tools, "commit, 256 MiB")]).unwrap();
        assert_eq!(std::fs::read(out).unwrap(), b"upper");
        // The image below is another copy than the one that the previous commit has changed.
        assert_eq!(std::fs::read(tools.file("below.qcow2")).unwrap(), b"lower");
    }

    #[test]
    fn a_result_that_qemu_img_refuses_is_an_error_that_says_why() {
        let scratch = Scratch::new();
        let tools = tools(&scratch);
        let (convert, raw) = ("convert raw to qcow2, dense", "convert qcow2 to raw, dense");
        let judge = |name: &str, script: &str| {
            scratch.script("tool", &format!("echo \"$@\" >>\"${{0%/*}}/calls\"; {script}"));
            let task = &tools.tasks[task(&tools, name)];
            tools.judge(task, &tools.file(task.out)).map_err(|e| format!("{e:#}"))
        };
        let error = judge(convert, "echo 'Content mismatch at offset 0!' >&2; exit 1").unwrap_err();
        assert!(error.contains("compare") && error.contains("Content mismatch"), "{error}");
        let error = judge(convert, "[[ $2 != check ]] || { echo 'leaked cluster'; exit 3; }");
        assert!(error.unwrap_err().contains("check"));
        assert_eq!(judge(convert, ":"), Ok(()));
        assert_eq!(judge(raw, ":"), Ok(()));
        // Only a qcow2 image is checked.
        let verbs: Vec<_> = scratch
            .lines("calls")
            .iter()
            .map(|call| call.split(' ').nth(1).unwrap().to_string())
            .collect();
        assert_eq!(verbs, ["compare", "compare", "check", "compare", "check", "compare"]);
        // A result without a source to compare with is not judged.
        assert_eq!(judge("start", "exit 1"), Ok(()));
    }

    #[test]
    fn sources_are_sparse_or_like_text_and_the_same_each_time() {
        let (scratch, stop) = (Scratch::new(), Stop::default());
        let (a, b) = (scratch.join("a"), scratch.join("b"));
        sparse(&a, 33 * MIB + 512, &stop).unwrap();
        sparse(&b, 33 * MIB + 512, &stop).unwrap();
        let bytes = std::fs::read(&a).unwrap();
        assert!(bytes == std::fs::read(&b).unwrap(), "the contents differ");
        assert_eq!(bytes.len() as u64, 33 * MIB + 512);
        let has_data =
            |mib: u64| bytes[(mib * MIB) as usize..][..512].iter().any(|byte| *byte != 0);
        let data: Vec<u64> = (0..34).filter(|mib| has_data(*mib)).collect();
        assert_eq!(data, [0, 32]);
        text(&a, 2 * MIB + 100, &stop).unwrap();
        let words = String::from_utf8(std::fs::read(&a).unwrap()).unwrap();
        assert_eq!(words.len() as u64, 2 * MIB + 100);
        assert!(words.bytes().all(|byte| byte == b' ' || byte.is_ascii_lowercase()));
        assert!(words.split(' ').all(|word| word.len() <= 9), "words of 2 to 9 letters");
        // An interrupted run makes no further piece.
        stop.request();
        assert!(sparse(&b, MIB, &stop).unwrap_err().is::<crate::process::Interrupted>());
    }
}
