//! The experiments of earlier reports that are not load generators: everyday commands, each timed.
//!
//! In: a name. Out: a script that prints a mark (a name, a clock in microseconds) before the first
//! command and after each; in a guest on its disk, on the host in a folder. What must hold: all
//! systems begin in the same state; the script waits for writes that a command has delayed.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;

use blockyard_program::output;

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
    /// the host, if the experiment mounts nothing.
    pub fn script(self) -> String {
        const MAKE: &str =
            "mke2fs -q -F -t ext4 -E lazy_itable_init=0,lazy_journal_init=0 \"$DISK\"";
        match self {
            Experiment::DdRm => format!(
                "if [ -b \"$DISK\" ]; then {MAKE}; mount \"$DISK\" /mnt; cd /mnt; else cd \"$FOLDER\"; fi\n\
                 settle() {{ sync -f .; }}\nsettle\nmark begin\n\
                 dd if=/dev/zero of=testfile bs=1M count=32 status=none; mark dd\nsettle; mark dd-sync\n\
                 rm testfile; mark rm\nsettle; mark rm-sync\nmark end\n\
                 cd /; if [ -b \"$DISK\" ]; then umount /mnt; fi"
            ),
            Experiment::Copy => format!(
                "{MAKE}\nsource=$(mktemp); head -c 20000000 /dev/urandom >\"$source\"; sync\n\
                 mark begin\nmount \"$DISK\" /mnt; mark mount\ncp \"$source\" /mnt/copy; mark copy\numount /mnt; mark unmount\nmark end\n\
                 mount \"$DISK\" /mnt; cmp \"$source\" /mnt/copy; umount /mnt"
            ),
            Experiment::Boot => "mark up\nmount \"$DISK\" /mnt\nchroot /mnt /bin/bash -c '\n    set -e\n    mount -t proc proc /proc\n    \
                for program in bash ls find grep sed date stat; do /usr/bin/$program --version >/dev/null; done\n    \
                find /etc /usr/bin /usr/lib -type f | head -n 2000 | xargs cat | head -c 60000000 | sha256sum >/var/boot.log\n    \
                date >>/var/boot.log\n    umount /proc'\numount /mnt\nmark end"
                .into(),
        }
    }
}

/// Runs an experiment on this machine: in a folder, or (as root) on a block device.
pub fn run(experiment: Experiment, target: &Path) -> Result<()> {
    anyhow::ensure!(
        experiment != Experiment::Boot,
        "`bench compare job:boot` boots guests; there is nothing to be booted here"
    );
    let device = !target.is_dir();
    anyhow::ensure!(
        device || !experiment.mounts(),
        "{}: a block device of its own is needed, not a folder",
        target.display()
    );
    let mut script = String::from("set -euo pipefail\n");
    let (disk, folder) = if device { (target, Path::new("")) } else { (Path::new(""), target) };
    let _ = writeln!(
        script,
        "mark() {{ echo \"mark $1 ${{EPOCHREALTIME/./}}\"; }}\n{}",
        experiment.script()
    );
    let mut command = Command::new("bash");
    let out = command
        .args(["-c", &script])
        .env("DISK", disk)
        .env("FOLDER", folder)
        .output()
        .context("starting bash")?;
    anyhow::ensure!(
        out.status.success(),
        "{}: {}",
        experiment.name(),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    let text = String::from_utf8_lossy(&out.stdout);
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
