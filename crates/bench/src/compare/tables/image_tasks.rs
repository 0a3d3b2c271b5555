//! The tasks of the table `image-tools`: arguments for `blockyard image` and for `qemu-img`.

/// The output file before the task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Begin {
    /// There is no output file.
    Nothing,
    /// A copy of an empty image of 1 GiB.
    Tiny,
    /// A copy of an overlay, with a copy of the image below it.
    Overlay,
}

/// One task. In the arguments `{dir}` is the folder of the sources, `{out}` the written file,
/// `{none}` an empty word.
pub struct ImageTask {
    pub name: String,
    pub ours: String,
    pub theirs: String,
    /// Sources that must be in the page cache.
    pub reads: Vec<&'static str>,
    pub begin: Begin,
    pub out: &'static str,
    /// For the check of the result: a source, its format, and the format of the result. Source and
    /// result must hold the same disk.
    pub judge: Option<(&'static str, &'static str, &'static str)>,
}

impl ImageTask {
    fn new(name: impl Into<String>, ours: impl Into<String>, theirs: impl Into<String>) -> Self {
        let (name, ours, theirs) = (name.into(), ours.into(), theirs.into());
        ImageTask {
            name,
            ours,
            theirs,
            reads: Vec::new(),
            begin: Begin::Nothing,
            out: "out",
            judge: None,
        }
    }

    fn begins(self, begin: Begin, out: &'static str) -> Self {
        ImageTask { begin, out, ..self }
    }

    fn reads(self, reads: &[&'static str]) -> Self {
        ImageTask { reads: reads.to_vec(), ..self }
    }

    /// Returns the names of all files that the task needs.
    pub fn sources(&self) -> Vec<&'static str> {
        let begin: &[&'static str] = match self.begin {
            Begin::Nothing => &[],
            Begin::Tiny => &["tiny.qcow2"],
            Begin::Overlay => &["dense.qcow2", "overlay.qcow2"],
        };
        let judged = self.judge.map(|(source, ..)| source);
        self.reads.iter().chain(begin).copied().chain(judged).collect()
    }

    /// Returns whether the output may be as large as the source.
    pub fn writes(&self) -> bool {
        ["convert", "create", "rebase"].iter().any(|verb| self.name.starts_with(verb))
    }
}

const EMPTY: (&str, &str) = ("an empty image of 128 GiB, clusters of 512 bytes", "empty.qcow2");

pub fn tasks() -> Vec<ImageTask> {
    let mut tasks = vec![ImageTask::new("start", "--version", "--version")];
    tasks.extend(conversions());
    for (name, source) in [EMPTY, ("sparse", "sparse.qcow2")] {
        let (ours, theirs) = (
            format!("map --json {{dir}}/{source}"),
            format!("map --output=json -f qcow2 {{dir}}/{source}"),
        );
        tasks.push(ImageTask::new(format!("map, {name}"), ours, theirs).reads(&[source]));
    }
    for (name, source) in [EMPTY, ("dense", "dense.qcow2")] {
        let (ours, theirs) =
            (format!("check {{dir}}/{source}"), format!("check -f qcow2 {{dir}}/{source}"));
        tasks.push(ImageTask::new(format!("check, {name}"), ours, theirs).reads(&[source]));
    }
    for (name, a, b) in [
        ("raw and qcow2, dense", "dense.raw", "dense.qcow2"),
        ("raw and qcow2, sparse", "sparse.raw", "sparse.qcow2"),
        ("raw and compressed (zlib)", "text.raw", "zlib.qcow2"),
    ] {
        let files = format!("{{dir}}/{a} {{dir}}/{b}");
        let (ours, theirs) =
            (format!("compare {files}"), format!("compare -f raw -F qcow2 {files}"));
        tasks.push(ImageTask::new(format!("compare {name}"), ours, theirs).reads(&[a, b]));
    }
    for (kind, size) in [("metadata", "200"), ("falloc", "1"), ("full", "1")] {
        let words = format!("create -f qcow2 -o preallocation={kind} {{out}} {size}G");
        let task = ImageTask::new(
            format!("create, {size} GiB, preallocation={kind}"),
            words.clone(),
            words,
        );
        tasks.push(task.begins(Begin::Nothing, "out.qcow2"));
    }
    let resize = ImageTask::new(
        "resize by 200 GiB, --preallocation metadata",
        "resize --preallocation metadata {out} +200G",
        "resize -f qcow2 --preallocation=metadata {out} +200G",
    );
    let commit = ImageTask::new("commit, 256 MiB", "commit {out}", "commit -f qcow2 {out}");
    let rebase = ImageTask::new(
        "rebase to none, 256 MiB of 1 GiB",
        "rebase -b {none} {out}",
        "rebase -f qcow2 -b {none} {out}",
    );
    tasks.push(resize.begins(Begin::Tiny, "out.qcow2"));
    tasks.push(commit.begins(Begin::Overlay, "over.qcow2"));
    tasks.push(rebase.begins(Begin::Overlay, "over.qcow2"));
    tasks
}

fn conversions() -> Vec<ImageTask> {
    let convert =
        |name: &str, source: &'static str, form: &'static str, to: &'static str, options: &str| {
            let ours = format!("convert -O {to} {options} {{dir}}/{source} {{out}}");
            let theirs = format!("convert -f {form} -O {to} {options} {{dir}}/{source} {{out}}");
            let task = ImageTask::new(format!("convert {name}"), ours, theirs).reads(&[source]);
            let out = if to == "raw" { "out.raw" } else { "out.qcow2" };
            ImageTask {
                judge: (source != EMPTY.1).then_some((source, form, to)),
                ..task.begins(Begin::Nothing, out)
            }
        };
    vec![
        convert("raw to qcow2, dense", "dense.raw", "raw", "qcow2", ""),
        convert("raw to qcow2, sparse", "sparse.raw", "raw", "qcow2", ""),
        convert("qcow2 to raw, dense", "dense.qcow2", "qcow2", "raw", ""),
        convert("qcow2 to raw, sparse", "sparse.qcow2", "qcow2", "raw", ""),
        convert("qcow2 to qcow2, dense", "dense.qcow2", "qcow2", "qcow2", ""),
        convert("raw to raw, sparse", "sparse.raw", "raw", "raw", ""),
        convert("compressed (zlib) to raw", "zlib.qcow2", "qcow2", "raw", ""),
        convert("compressed (zstd) to raw", "zstd.qcow2", "qcow2", "raw", ""),
        convert("raw to compressed (zlib)", "text.raw", "raw", "qcow2", "-c"),
        convert(
            "raw to compressed (zstd)",
            "text.raw",
            "raw",
            "qcow2",
            "-c -o compression_type=zstd",
        ),
        convert(EMPTY.0, EMPTY.1, "qcow2", "qcow2", ""),
        convert(
            "to an image with clusters of 512 bytes, 64 MiB",
            "small.raw",
            "raw",
            "qcow2",
            "-o cluster_size=512",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn tasks_have_different_names_and_say_what_they_need() {
        let tasks = tasks();
        let names: BTreeSet<_> = tasks.iter().map(|task| &task.name).collect();
        assert_eq!(names.len(), tasks.len());
        for task in &tasks {
            let words = format!("{} {}", task.ours, task.theirs);
            // A file that is named in the arguments is in the page cache before the run.
            for name in words.split_whitespace().filter_map(|word| word.strip_prefix("{dir}/")) {
                assert!(
                    task.reads.contains(&name) && task.sources().contains(&name),
                    "{}",
                    task.name
                );
            }
            if let Some((source, _, form)) = task.judge {
                assert!(task.sources().contains(&source), "{}", task.name);
                assert_eq!(task.out, format!("out.{form}"), "{}", task.name);
            }
        }
        let commit = tasks.iter().find(|task| task.name.starts_with("commit")).unwrap();
        assert_eq!(commit.sources(), ["dense.qcow2", "overlay.qcow2"]);
        assert!(!commit.writes() && tasks.iter().any(ImageTask::writes));
    }
}
