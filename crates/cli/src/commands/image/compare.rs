//! `image compare`. Exit status: 0 identical, 1 different, 2 failure.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_image::tools::{Comparison, Progress, compare};
use blockyard_image::{Chain, Format};
use blockyard_program::ending::Failure;
use clap::Args;
use serde::Serialize;

use super::progress::ProgressArgs;
use super::{FolderArgs, OutputArgs, format, print, print_json, threads};

#[derive(Args)]
pub struct CompareArgs {
    /// The first image.
    #[arg(value_name = "FILE1")]
    first: PathBuf,
    /// The second image.
    #[arg(value_name = "FILE2")]
    second: PathBuf,
    /// Format of the first image [default: from the file name].
    #[arg(short = 'f', long = "format", visible_alias = "a-format", value_parser = format())]
    first_format: Option<Format>,
    /// Format of the second image [default: from the file name].
    #[arg(short = 'F', long = "second-format", visible_alias = "b-format", value_parser = format())]
    second_format: Option<Format>,
    /// Also compare the sizes, and which ranges are allocated.
    ///
    /// Without it, a shorter disk counts as identical if the rest of the longer one is zeroes.
    #[arg(short, long)]
    strict: bool,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    show: ProgressArgs,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct CompareFields {
    identical: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    size_mismatch: bool,
    status_mismatch: bool,
}

pub fn run(options: &CompareArgs) -> Result<u8, Failure> {
    // Failures return 2, because 1 means that the disks differ.
    let failed = |e| Failure::with_status(2, e);
    let open = |path, format| {
        Chain::open(&options.folders.reading(path, format)).map(Arc::new).map_err(failed)
    };
    let (a, b) = (
        open(&options.first, options.first_format)?,
        open(&options.second, options.second_format)?,
    );
    let progress = Arc::<Progress>::default();
    let result = if options.strict && a.size() != b.size() {
        Comparison { differs_at: None, status_differs_at: None, sizes: (a.size(), b.size()) }
    } else {
        let work = || compare(&a, &b, options.strict, threads(), &progress);
        options.show.during(&progress, work).map_err(failed)?
    };
    let verdict = Verdict::of(&result, options.strict);
    if options.output.is_json() {
        print_json(&verdict.fields)?;
    } else if !options.show.quiet {
        print(&verdict.text)?;
    }
    Ok(u8::from(!verdict.fields.identical))
}

struct Verdict {
    fields: CompareFields,
    text: String,
}

impl Verdict {
    fn of(result: &Comparison, strict: bool) -> Self {
        let size_mismatch = result.sizes.0 != result.sizes.1;
        // qemu-img compares the data first, and warns about sizes only after the common part.
        let in_both = result.differs_at.is_some_and(|at| at < result.sizes.0.min(result.sizes.1));
        let warning =
            if size_mismatch && !in_both { "Warning: Image size mismatch!\n" } else { "" };
        let (identical, text) = match (result.differs_at, result.status_differs_at) {
            _ if strict && size_mismatch => (false, "Strict mode: Image size mismatch!\n".into()),
            (Some(offset), _) => {
                (false, format!("{warning}Content mismatch at offset {offset}!\n"))
            }
            (None, Some(offset)) => {
                (false, format!("Strict mode: Offset {offset} block status mismatch!\n"))
            }
            (None, None) => (true, format!("{warning}Images are identical.\n")),
        };
        let (offset, status_mismatch) =
            (result.differs_at.or(result.status_differs_at), result.status_differs_at.is_some());
        Verdict {
            fields: CompareFields { identical, offset, size_mismatch, status_mismatch },
            text,
        }
    }
}
