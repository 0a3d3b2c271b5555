//! The command line: the commands of the program.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::options::serve::{AttachOptions, DetachOptions, ServeOptions};

#[derive(Parser)]
#[command(
    name = "blockyard",
    version,
    about = "Serves virtual disks to virtual machines from user space.",
    propagate_version = true
)]
pub struct Cli {
    /// How much to tell on standard error: error, warn, info, debug, trace.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL", value_parser = blockyard_program::log::parse_level)]
    pub log: tracing::Level,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Serve a disk image (or many, by --config) to guests.
    Serve(Box<ServeOptions>),
    /// Make a disk image a block device of this host: prints the device, and serves it in the
    /// background until `detach`.
    Attach(Box<AttachOptions>),
    /// Remove a block device that `attach` or `serve --ublk` has made.
    Detach(DetachOptions),
    /// Give disks to guests of Xen, and take them away.
    #[command(subcommand)]
    Xen(crate::xen::Command),
    /// Make, look at, check and change disk images: the commands of qemu-img, with its options and
    /// its JSON.
    #[command(subcommand)]
    Image(Box<crate::image::Command>),
    /// Measure (`blockyard bench --help` lists the commands; the program blockyard-bench has them).
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        arguments: Vec<OsString>,
    },
    /// Print a shell's completions.
    Completions { shell: clap_complete::Shell },
    /// Write the man pages into a folder.
    Man { folder: PathBuf },
}
