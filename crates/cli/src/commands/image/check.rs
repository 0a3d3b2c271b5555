//! `image check`. Exit status: 0 consistent, 1 the check failed, 3 corruptions, 4 only leaks or
//! metadata that opening the image repairs.

use blockyard_image::qcow2::Header;
use blockyard_image::qcow2::check::{self, Repair, Report};
use blockyard_image::tools::{Pending, apply_journal, discard_journal, on_file, pending_journal};
use blockyard_image::{Format, ImageError, SECTOR, cow, scheme_of};
use blockyard_program::ending::Failure;
use blockyard_program::output;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{ImageArgs, OutputArgs, failed, format_of, new, print, print_json, printable};

#[derive(Args)]
pub struct CheckArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Repair the image: leaks frees clusters that nothing refers to; all also corrects refcounts
    /// and flags.
    #[arg(short, long, value_name = "WHAT")]
    repair: Option<RepairWhat>,
    /// Give up the changes that a server which died has left in a journal, and clear the mark.
    #[arg(long)]
    discard_journal: bool,
    /// Print nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum RepairWhat {
    Leaks,
    All,
}

/// The fields are those of `qemu-img check --output json`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct CheckFields {
    #[serde(skip_serializing_if = "is_zero")]
    image_end_offset: u64,
    #[serde(skip_serializing_if = "is_zero")]
    corruptions: u64,
    #[serde(skip_serializing_if = "is_zero")]
    leaks: u64,
    #[serde(skip_serializing_if = "is_zero")]
    corruptions_fixed: u64,
    #[serde(skip_serializing_if = "is_zero")]
    leaks_fixed: u64,
    #[serde(skip_serializing_if = "is_zero")]
    compressed_clusters: u64,
    #[serde(skip_serializing_if = "is_zero")]
    total_clusters: u64,
    check_errors: u64,
    #[serde(skip_serializing_if = "is_zero")]
    allocated_clusters: u64,
    filename: String,
    format: String,
    #[serde(skip_serializing_if = "is_zero")]
    fragmented_clusters: u64,
    /// Refcounts and flags that opening the image for writing corrects. (qemu-img counts them as
    /// corruptions.)
    #[serde(skip_serializing_if = "is_zero")]
    mended_by_opening: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The findings, one line each, and the fields of the report.
type Found = (Vec<String>, CheckFields);

pub fn run(options: &CheckArgs) -> Result<u8, Failure> {
    let format = format_of(&options.image.file, options.image.format)?;
    let file = &options.image.file;
    if options.discard_journal {
        discard_journal(file, format).map_err(failed)?;
    } else if options.repair.is_some() {
        apply_journal(file, format).map_err(failed)?;
    }
    let journal = pending_journal(file, format).ok().flatten();
    let (mut lines, fields) = match format {
        Format::Qcow2 => of_qcow2(options)?,
        Format::Cow => of_cow(options)?,
        Format::Raw => {
            return Err(anyhow::anyhow!(
                "image {}: raw images have no metadata to check",
                options.image.file.display()
            )
            .into());
        }
    };
    lines.extend(journal.map(|journal| match journal {
        Pending::Changes(changes) => format!(
            "a server that died has left a journal with {changes} changes: the next open for \
             writing applies them (--discard-journal gives them up)"
        ),
        Pending::Elsewhere(place) => format!(
            "a server has a journal for the image that is not in {place}: set \
             BLOCKYARD_STATE_FOLDER to the folder of the server, /run/blockyard/journals if systemd \
             started it (--discard-journal gives its changes up)"
        ),
    }));
    let fields = CheckFields {
        filename: options.image.file.display().to_string(),
        format: format.to_string(),
        ..fields
    };
    if !options.quiet {
        lines.iter().for_each(output::note);
    }
    if options.output.is_json() {
        print_json(&fields)?;
    } else if !options.quiet {
        print(&fields.text())?;
    }
    match &fields {
        CheckFields { corruptions: 1.., .. } => Ok(3),
        CheckFields { check_errors: 1.., .. } => Err(anyhow::anyhow!(
            "image {}: not all of it could be checked",
            options.image.file.display()
        )
        .into()),
        CheckFields { leaks: 1.., .. } | CheckFields { mended_by_opening: 1.., .. } => Ok(4),
        _ => Ok(0),
    }
}

/// Checks a qcow2 image.
fn of_qcow2(options: &CheckArgs) -> Result<Found, Failure> {
    let repair = match options.repair {
        None => Repair::No,
        Some(RepairWhat::Leaks) => Repair::Leaks,
        Some(RepairWhat::All) => Repair::All,
    };
    let folder = new::folder(&options.image.file).to_path_buf();
    let report = on_file(&options.image.file, repair == Repair::No, async move |file| {
        let header = Header::read_for_check(&file).await?;
        let has_data_file = header.has_data_file();
        // A file on a server has no length here.
        let name =
            header.data_file.filter(|name| has_data_file && scheme_of(name.as_ref()).is_none());
        let data_file = name.map(|name| {
            let path = folder.join(name);
            std::fs::metadata(&path).map_err(|e| {
                let name = printable(&path.display().to_string());
                ImageError::io("image", None, &format!("finding the size of data file {name}"), e)
            })
        });
        let data_file = data_file.transpose()?;
        check::check(&file, data_file.map(|data| data.len()), repair).await
    })?;
    let mut lines: Vec<_> = report.findings.iter().map(ToString::to_string).collect();
    if report.findings_left_off > 0 {
        lines.push(format!("and {} more", report.findings_left_off));
    }
    let Report { corruptions, leaks, corruptions_fixed, leaks_fixed, check_errors, .. } = report;
    let Report { image_end_offset, total_clusters, allocated_clusters, .. } = report;
    let Report { fragmented_clusters, compressed_clusters, mended_by_opening, .. } = report;
    let fields = CheckFields {
        image_end_offset,
        mended_by_opening,
        corruptions: corruptions - mended_by_opening,
        leaks,
        corruptions_fixed,
        leaks_fixed,
        compressed_clusters,
        total_clusters,
        check_errors,
        allocated_clusters,
        fragmented_clusters,
        ..CheckFields::default()
    };
    Ok((lines, fields))
}

/// Checks a COW file. Its clusters are sectors.
fn of_cow(options: &CheckArgs) -> Result<Found, Failure> {
    let repair = cow::Repair {
        leaks: options.repair.is_some(),
        corruptions: options.repair == Some(RepairWhat::All),
    };
    let (found, left) =
        on_file(&options.image.file, options.repair.is_none(), async move |file| {
            let found = cow::info(&file).await?;
            Ok((found, cow::check(&file, repair).await?))
        })?;
    let leaks = |report: &cow::Report| report.leaked.div_ceil(SECTOR);
    let fields = CheckFields {
        image_end_offset: left.file_len,
        corruptions: left.corruptions.len() as u64,
        leaks: leaks(&left),
        corruptions_fixed: (found.corruptions.len() - left.corruptions.len()) as u64,
        leaks_fixed: leaks(&found) - leaks(&left),
        total_clusters: left.header.sectors(),
        allocated_clusters: left.own_sectors,
        ..CheckFields::default()
    };
    Ok((found.corruptions.iter().map(ToString::to_string).collect(), fields))
}

impl CheckFields {
    fn text(&self) -> String {
        let mut text = String::new();
        if self.corruptions_fixed + self.leaks_fixed > 0 {
            text += &format!(
                "The following inconsistencies were found and repaired:\n\n    \
                 {} leaked clusters\n    {} corruptions\n\n",
                self.leaks_fixed, self.corruptions_fixed
            );
        }
        if self.corruptions + self.leaks + self.check_errors + self.mended_by_opening == 0 {
            text += "No errors were found on the image.\n";
        }
        if self.corruptions > 0 {
            text += &format!("\n{} errors were found on the image.\n", self.corruptions);
            text += "Data may be corrupted, or further writes to the image may corrupt it.\n";
        }
        if self.leaks > 0 {
            text += &format!("\n{} leaked clusters were found on the image.\n", self.leaks);
            text += "This means waste of disk space, but no harm to data.\n";
        }
        if self.mended_by_opening > 0 {
            text += &format!(
                "\n{} refcounts and flags are out of date: the last program did not close the \
                 image.\n\
                 No data is in danger. Opening the image for writing, or --repair all, corrects \
                 them.\n",
                self.mended_by_opening
            );
        }
        if self.check_errors > 0 {
            text += &format!(
                "\n{} internal errors have occurred during the check.\n",
                self.check_errors
            );
        }
        if self.total_clusters > 0 && self.allocated_clusters > 0 {
            let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
            let (allocated, total) = (self.allocated_clusters, self.total_clusters);
            text += &format!(
                "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed \
                 clusters\n",
                percent(allocated, total),
                percent(self.fragmented_clusters, allocated),
                percent(self.compressed_clusters, allocated)
            );
        }
        if self.image_end_offset > 0 {
            text += &format!("Image end offset: {}\n", self.image_end_offset);
        }
        text
    }
}
