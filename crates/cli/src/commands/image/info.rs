//! `image info`: properties of an image, with the names of `qemu-img info`.

mod report;

use blockyard_image::ChainOptions;
use blockyard_image::tools::{Pending, details, pending_journal};
use blockyard_program::ending::Failure;
use clap::Args;
use serde_json::Value;

use report::Info;

use super::{
    FolderArgs, ImageArgs, OutputArgs, SharingArgs, failed, open, print, print_json, printable,
    size, snapshots,
};

#[derive(Args)]
pub struct InfoArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Also print its backing files.
    #[arg(short, long)]
    backing_chain: bool,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    sharing: SharingArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(options: &InfoArgs) -> Result<(), Failure> {
    let chain = open(&ChainOptions {
        no_backing: !options.backing_chain,
        force_share: options.sharing.force_share,
        ..options.folders.reading(&options.image.file, options.image.format)
    })?;
    let details = details(&chain).map_err(failed)?;
    let all = chain.layers().iter().zip(&details).map(|(layer, details)| Info::of(layer, details));
    let mut all: Vec<Info> = all.collect::<anyhow::Result<_>>()?;
    for (info, layer) in all.iter_mut().zip(chain.layers()) {
        info.journal = match pending_journal(layer.file.path(), layer.format) {
            Ok(Some(Pending::Changes(changes))) => Some(changes),
            Ok(Some(Pending::Elsewhere(_)) | None) | Err(_) => None,
        };
    }
    match (options.output.is_json(), all.as_slice()) {
        (true, [one]) if !options.backing_chain => print_json(one),
        (true, all) => print_json(&all),
        (false, all) => print(&all.iter().map(text).collect::<Vec<_>>().join("\n")),
    }
}

fn text(info: &Info) -> String {
    let mut lines = vec![
        format!("image: {}", info.filename),
        format!("file format: {}", info.format),
        format!("virtual size: {} ({} bytes)", size::human(info.virtual_size), info.virtual_size),
        format!("disk size: {}", size::human(info.actual_size)),
    ];
    if info.dirty_flag {
        lines.push("cleanly shut down: no".into());
    }
    lines.extend(info.cluster_size.map(|size| format!("cluster_size: {size}")));
    lines.extend(info.journal.map(|changes| {
        format!("journal of a server that died: {changes} changes, not yet in the image")
    }));
    if let Some(name) = &info.backing_filename {
        let full = info.full_backing_filename.as_ref().filter(|full| *full != name);
        let full = full.map_or(String::new(), |full| format!(" (actual path: {full})"));
        lines.push(format!("backing file: {name}{full}"));
    }
    lines.extend(
        info.backing_filename_format
            .as_ref()
            .map(|format| format!("backing file format: {format}")),
    );
    lines.extend(snapshots::lines(&info.snapshots));
    if let Some(specific) = &info.format_specific {
        let data = serde_json::to_value(specific).unwrap_or_default();
        lines.push("Format specific information:".into());
        lines.extend(fields(&data["data"]));
    }
    for child in &info.children {
        lines.push(format!("Child node '/{}':", child.name));
        lines.push(format!("    filename: {}", child.info.filename));
        lines.push(format!("    protocol type: {}", child.info.format));
        let length = child.info.virtual_size;
        lines.push(format!("    file length: {} ({length} bytes)", size::human(length)));
        lines.push(format!("    disk size: {}", size::human(child.info.actual_size)));
    }
    lines.iter().map(|line| printable(line) + "\n").collect()
}

/// Returns the fields as lines `name: value`.
fn fields(data: &Value) -> Vec<String> {
    let field = |(name, value): (&String, &Value)| {
        let name = name.replace('-', " ");
        match value {
            Value::String(text) => vec![format!("    {name}: {text}")],
            Value::Array(list) => bitmaps(&name, list),
            other => vec![format!("    {name}: {other}")],
        }
    };
    data.as_object().map(|fields| fields.iter().flat_map(field).collect()).unwrap_or_default()
}

fn bitmaps(name: &str, list: &[Value]) -> Vec<String> {
    let mut lines = vec![format!("    {name}:")];
    for (number, bitmap) in list.iter().enumerate() {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        lines.push(format!("        [{number}]:"));
        lines.push("            flags:".into());
        let flags = bitmap["flags"].as_array().into_iter().flatten().enumerate();
        lines.extend(
            flags.map(|(number, flag)| format!("                [{number}]: {}", text(flag))),
        );
        lines.push(format!("            name: {}", text(&bitmap["name"])));
        lines.push(format!("            granularity: {}", bitmap["granularity"]));
    }
    lines
}
