//! `image snapshot`: snapshots inside a qcow2 image.

use std::time::SystemTime;

use anyhow::anyhow;
use blockyard_image::Format;
use blockyard_image::qcow2::snapshot;
use blockyard_image::qcow2::snapshot_table::Snapshot;
use blockyard_image::tools::{apply_journal, on_file};
use blockyard_program::ending::Failure;
use clap::Args;

use super::snapshots::{SnapshotFields, lines};
use super::{ImageArgs, OutputArgs, failed, format_of, print, print_json};

#[derive(Args)]
pub struct SnapshotArgs {
    #[command(flatten)]
    image: ImageArgs,
    #[command(flatten)]
    what: SnapshotAction,
    /// Print nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
#[group(multiple = false)]
struct SnapshotAction {
    /// List the snapshots. This is the default.
    #[arg(short, long)]
    list: bool,
    /// Create a snapshot of the current disk.
    #[arg(short, long, value_name = "NAME")]
    create: Option<String>,
    /// Restore the disk, including its size, from this snapshot.
    #[arg(short, long, value_name = "NAME or ID")]
    apply: Option<String>,
    /// Delete a snapshot, and free the space that only it uses.
    #[arg(short, long, value_name = "NAME or ID")]
    delete: Option<String>,
}

impl SnapshotAction {
    fn only_lists(&self) -> bool {
        self.create.is_none() && self.apply.is_none() && self.delete.is_none()
    }
}

pub fn run(options: &SnapshotArgs) -> Result<(), Failure> {
    if format_of(&options.image.file, options.image.format)? != Format::Qcow2 {
        return Err(anyhow!(
            "image {}: only qcow2 images have snapshots",
            options.image.file.display()
        )
        .into());
    }
    let file = &options.image.file;
    if !options.what.only_lists() {
        apply_journal(file, Format::Qcow2).map_err(failed)?;
    }
    let done = match &options.what {
        SnapshotAction { create: Some(name), .. } => {
            let (name, now) = (name.clone(), SystemTime::UNIX_EPOCH.elapsed()?);
            on_file(file, false, async move |raw| {
                snapshot::create(&raw, &name, now).await.map(|_| ())
            })
        }
        SnapshotAction { apply: Some(name), .. } => {
            let name = name.clone();
            on_file(file, false, async move |raw| snapshot::apply(&raw, &name).await)
        }
        SnapshotAction { delete: Some(name), .. } => {
            let name = name.clone();
            on_file(file, false, async move |raw| snapshot::delete(&raw, &name).await)
        }
        SnapshotAction { .. } => {
            let list =
                on_file(file, true, async move |raw| snapshot::list(&raw).await).map_err(failed)?;
            return show(options, &list);
        }
    };
    done.map_err(failed)
}

fn show(options: &SnapshotArgs, list: &[Snapshot]) -> Result<(), Failure> {
    let fields: Vec<SnapshotFields> = list.iter().map(SnapshotFields::of).collect();
    match lines(&fields).as_slice() {
        _ if options.output.is_json() => print_json(&fields),
        [] => Ok(()),
        _ if options.quiet => Ok(()),
        lines => print(&(lines.join("\n") + "\n")),
    }
}
