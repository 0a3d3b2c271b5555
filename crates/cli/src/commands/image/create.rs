//! `image create`: creates an empty image or an overlay.

use std::path::PathBuf;

use blockyard_image::Format;
use blockyard_program::ending::Failure;
use clap::Args;

use super::new::{self, Backing};
use super::output::{NewFile, Sources};
use super::settings::{self, Settings};
use super::{FolderArgs, format, format_of, print, size};

#[derive(Args)]
pub struct CreateArgs {
    /// The new image.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Size of the disk, such as 10G [default: the size of the backing file].
    #[arg(value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    /// Format of the image [default: from the file name].
    #[arg(short, long, value_parser = format())]
    format: Option<Format>,
    /// Options of the image, key=value,...; -o help lists them.
    #[arg(short = 'o', long = "options", value_name = "LIST")]
    options: Vec<String>,
    /// Create an overlay of this image, which stays unchanged.
    ///
    /// A relative name is relative to the new image's folder.
    #[arg(short, long, value_name = "NAME")]
    backing: Option<String>,
    /// Format of the backing file [default: from the file name].
    #[arg(short = 'F', long, value_parser = format())]
    backing_format: Option<Format>,
    /// Do not open the backing file. It does not have to exist.
    #[arg(short = 'u', long = "unsafe")]
    backing_unsafe: bool,
    /// Replace the file if it exists.
    #[arg(long)]
    force: bool,
    /// Print nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    folders: FolderArgs,
}

pub fn run(options: &CreateArgs) -> Result<(), Failure> {
    let format = format_of(&options.file, options.format)?;
    if let Some(help) = settings::help(format, &options.options) {
        return print(&help);
    }
    let settings = Settings::parse(format, &options.options).map_err(Failure::usage)?;
    let backing =
        Backing::find(options.backing.as_deref(), options.backing_format, &settings, &options.file);
    let backing = backing.map_err(Failure::usage)?;
    let given = match options.size {
        None => settings.size("size").map_err(Failure::usage)?,
        given => given,
    };
    new::check_folder(&options.file)?;
    let size = match (&backing, given) {
        (Some(backing), given) if !options.backing_unsafe => {
            let size = backing.size(&options.folders)?;
            given.unwrap_or(size)
        }
        (_, Some(size)) => size,
        (_, None) => {
            return Err(Failure::usage(anyhow::anyhow!(
                "{}: SIZE is missing: give the size of the disk, such as 10G",
                options.file.display()
            )));
        }
    };
    let plan =
        new::plan(&settings, size, backing.as_ref(), &options.file).map_err(Failure::usage)?;
    let (mut sources, mut chain) = (Sources::default(), None);
    if let Some(backing) = backing.as_ref().filter(|_| options.force) {
        sources.add_path(&backing.path);
        chain = match backing.chain(&options.folders, &options.file) {
            // With --unsafe the backing file need not exist, and need not be valid.
            Err(_) if options.backing_unsafe => None,
            opened => Some(opened?),
        };
    }
    chain.iter().for_each(|chain| sources.add_chain(chain));
    let mut file = NewFile::create(&options.file, options.force, &sources)?;
    file.make(plan.clone(), &sources)?;
    file.finish()?;
    if let Some(backing) = backing {
        backing.warn_if_far(&options.file);
    }
    if options.quiet { Ok(()) } else { print(&new::describe(&options.file, &plan)) }
}
