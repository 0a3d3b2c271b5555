//! The experiments of earlier reports that are not load generators: everyday commands, each timed.
//!
//! In: a name. Out: a script that prints a mark (a name, a clock in microseconds) before the first
//! command and after each; in a guest on its disk, on the host in a folder. What must hold: all
//! systems begin in the same state; the script waits for writes that a command has delayed.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;

use blockyard_program::output;

use crate::process::{Process, Stop};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
    /// Write a file of 32 MiB by dd, sync, remove it, sync (User Mode Linux, 2005)
    DdRm,
    /// Mount, copy a file of 20 MB, unmount (dm-userspace, 2006)
    Copy,
    /// Boot a guest and its programs from the disk (dm-userspace, 2006); by `bench compare` only
    Boot,
}

/// Contents of the disk before the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    Random,
    /// The root file system of a whole guest.
    Linux,
}

impl Experiment {
    pub fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default()
    }

    pub fn contents(self) -> Contents {
        if self == Experiment::Boot { Contents::Linux } else { Contents::Random }
    }

    /// Returns whether the experiment mounts a disk, so that it needs a guest or root.
    pub fn mounts(self) -> bool {
        self != Experiment::DdRm
    }

    pub fn about(self) -> &'static str {
        match self {
            Experiment::DdRm => "dd of 32 MiB into a file on ext4, sync, rm, sync",
            Experiment::Copy => "mount ext4, copy a file of 20 MB from memory, unmount",
            Experiment::Boot => {
                "from the start of the guest's kernel until programs of a root file system on the disk have run: they read 60 MB \
                 of it and write a log"
            }
        }
    }

    /// Returns the script. It uses `$DISK`, a block device of the guest; or `$FOLDER`, a folder on
    /// the host, if the experiment mounts nothing. All that it makes is in a new folder, which it
    /// removes, also after an error or a signal.
    pub fn script(self) -> String {
        const MAKE: &str =
            "mke2fs -q -F -t ext4 -E lazy_itable_init=0,lazy_journal_init=0 \"$DISK\"";
        const FOLDER: &str = "base=${TMPDIR:-/tmp}; [ -b \"$DISK\" ] || base=$FOLDER\n\
             work=$(TMPDIR=$base mktemp -d)\n\
             mkdir \"$work/disk\"\n\
             leave() { cd /; umount \"$work/disk\" 2>/dev/null || :; rm -rf --one-file-system \"$work\"; }\n\
             trap leave EXIT\n";
        match self {
            Experiment::DdRm => format!(
                "{FOLDER}if [ -b \"$DISK\" ]; then {MAKE}; mount \"$DISK\" \"$work/disk\"; fi\ncd \"$work/disk\"\n\
                 settle() {{ sync -f .; }}\nsettle\nmark begin\n\
                 dd if=/dev/zero of=testfile bs=1M count=32 status=none; mark dd\nsettle; mark dd-sync\n\
                 rm testfile; mark rm\nsettle; mark rm-sync\nmark end"
            ),
            Experiment::Copy => format!(
                "{FOLDER}{MAKE}\nhead -c 20000000 /dev/urandom >\"$work/source\"; sync\n\
                 mark begin\nmount \"$DISK\" \"$work/disk\"; mark mount\ncp \"$work/source\" \"$work/disk/copy\"; mark copy\n\
                 umount \"$work/disk\"; mark unmount\nmark end\n\
                 mount \"$DISK\" \"$work/disk\"; cmp \"$work/source\" \"$work/disk/copy\""
            ),
            Experiment::Boot => "mark up\nmount \"$DISK\" /mnt\nchroot /mnt /bin/bash -c '\n    set -e\n    mount -t proc proc /proc\n    \
                for program in bash ls find grep sed date stat; do /usr/bin/$program --version >/dev/null; done\n    \
                find /etc /usr/bin /usr/lib -type f | head -n 2000 | xargs cat | head -c 60000000 | sha256sum >/var/boot.log\n    \
                date >>/var/boot.log\n    umount /proc'\numount /mnt\nmark end"
                .into(),
        }
    }
}

/// Longest wait for the next mark of an experiment. Its disk may be slow.
const SILENCE: Duration = Duration::from_secs(600);

/// Runs an experiment on this machine: in a folder, or (as root) on a block device.
pub fn run(experiment: Experiment, target: &Path) -> Result<()> {
    anyhow::ensure!(
        experiment != Experiment::Boot,
        "`bench compare job:boot` boots guests; there is nothing to be booted here"
    );
    let name = target.display();
    let kind = std::fs::metadata(target).with_context(|| format!("looking at {name}"))?.file_type();
    let device = kind.is_block_device();
    anyhow::ensure!(
        device || (kind.is_dir() && !experiment.mounts()),
        "{name}: {} needs {}",
        experiment.name(),
        if experiment.mounts() { "a block device" } else { "a folder or a block device" }
    );
    let stop = Stop::on_signals()?;
    let script = format!(
        "set -euo pipefail\nmark() {{ echo \"mark $1 ${{EPOCHREALTIME/./}}\"; }}\n{}",
        experiment.script()
    );
    let mut command = Command::new("bash");
    command.args(["-c", &script]);
    let target = std::path::absolute(target)?;
    command.env(if device { "DISK" } else { "FOLDER" }, target);
    command.env(if device { "FOLDER" } else { "DISK" }, "");
    let mut process = Process::start(&command)?;
    let mut text = String::new();
    while let Some((_, line)) = process.line(&stop, Instant::now() + SILENCE)? {
        text += &line;
        text.push('\n');
    }
    process.finish().with_context(|| experiment.name())?;
    let marks = text.lines().filter_map(|l| l.strip_prefix("mark ")?.split_once(' '));
    let marks: Vec<(&str, f64)> =
        marks.filter_map(|(name, clock)| Some((name, clock.parse().ok()?))).collect();
    for (before, after) in
        marks.iter().zip(marks.iter().skip(1)).filter(|(_, after)| after.0 != "end")
    {
        output::print(format_args!("{:<10} {:>9.3} s\n", after.0, (after.1 - before.1) / 1e6))?;
    }
    Ok(())
}
