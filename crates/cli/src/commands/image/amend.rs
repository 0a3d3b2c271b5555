//! `image amend`: changes options of a qcow2 image in place.

use anyhow::anyhow;
use blockyard_image::Format;
use blockyard_image::qcow2::amend::{self, Amend};
use blockyard_image::tools::{apply_journal, on_file};
use blockyard_program::ending::Failure;
use clap::Args;

use super::settings::Settings;
use super::{ImageArgs, failed, format_of, print};

/// The options that can change. The error for other options names the command that changes them.
const KEYS: [(&str, &str); 2] = [
    ("compat", "1.1: version 3 (an older version is made by `image convert`)"),
    ("lazy_refcounts", "on or off; version 3 only"),
];

#[derive(Args)]
pub struct AmendArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Options to change, key=value,...; -o help lists the keys.
    #[arg(short = 'o', long = "options", value_name = "LIST", required = true)]
    options: Vec<String>,
}

pub fn run(options: &AmendArgs) -> Result<(), Failure> {
    if options.options.iter().any(|list| list == "help") {
        let line = |(key, meaning): &(&str, &str)| format!("  {key:<18}{meaning}\n");
        return print(&format!(
            "Options that can change:\n{}",
            KEYS.iter().map(line).collect::<String>()
        ));
    }
    let file = &options.image.file;
    if format_of(file, options.image.format)? != Format::Qcow2 {
        return Err(anyhow!(
            "image {}: only qcow2 images have options that can change",
            file.display()
        )
        .into());
    }
    let settings = Settings::parse(Format::Qcow2, &options.options).map_err(Failure::usage)?;
    if let Some(other) = settings.keys().find(|key| !KEYS.iter().any(|(known, _)| known == key)) {
        let instead = match other {
            "size" => "`image resize` changes it",
            "backing_file" | "backing_fmt" => "`image rebase` changes it",
            _ => "`image convert` makes an image that has it",
        };
        return Err(Failure::usage(anyhow!("option {other} cannot change in place: {instead}")));
    }
    let wanted = Amend {
        version: settings.version().map_err(Failure::usage)?,
        lazy_refcounts: settings.switch("lazy_refcounts").map_err(Failure::usage)?,
    };
    apply_journal(file, Format::Qcow2).map_err(failed)?;
    on_file(file, false, async move |raw| amend::amend(&raw, wanted).await).map_err(failed)
}
