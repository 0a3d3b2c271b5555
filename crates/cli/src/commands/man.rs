//! `blockyard man`: one man page for each command.
//!
//! In: the command line with all subcommands. Out: `blockyard.1`, `blockyard-serve.1`, ... in a
//! folder. What must hold: each page has the sections EXAMPLES, FILES, SIGNALS, EXIT STATUS and
//! SEE ALSO.

use std::io::{self, Write};
use std::path::Path;

use blockyard_program::examples;
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::ctl::USUAL;

/// Terms with their explanations, for a section of a page.
type Terms = &'static [(&'static str, &'static str)];

const DOCUMENTATION: (&str, &str) =
    ("/usr/local/share/doc/blockyard/docs", "The manual. The prefix is that of the installation.");

/// Writes the pages of `command` and of all its subcommands into `folder`, which exists.
pub fn write_pages(command: Command, folder: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_below(&command, "", folder)
}

fn write_below(command: &Command, path: &str, folder: &Path) -> io::Result<()> {
    let file = folder.join(format!("{}.1", page_name(path)));
    std::fs::write(file, page(command, path)?)?;
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_below(below, format!("{path} {}", below.get_name()).trim_start(), folder)?;
    }
    Ok(())
}

/// Returns the name of a page without its section, such as `blockyard-image-create`.
fn page_name(path: &str) -> String {
    format!("blockyard {path}").trim_end().replace(' ', "-")
}

/// Returns the page of one command as roff.
fn page(command: &Command, path: &str) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone()).manual("Blockyard").title(page_name(path));
    let mut out = Vec::new();
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    man.render_synopsis_section(&mut out)?;
    man.render_description_section(&mut out)?;
    man.render_options_section(&mut out)?;
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(&mut out)?;
    }
    examples_section(path, &mut out)?;
    terms_section("FILES", files(path), &[DOCUMENTATION], &mut out)?;
    terms_section("SIGNALS", signals(path), &[], &mut out)?;
    terms_section("EXIT STATUS", statuses(path), COMMON_STATUSES, &mut out)?;
    see_also_section(command, path, &mut out)?;
    man.render_version_section(&mut out)?;
    Ok(out)
}

fn examples_section(path: &str, out: &mut impl Write) -> io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", ["EXAMPLES"]);
    for example in examples::of(path) {
        roff.control("PP", []).text([roman(format!("{}:", example.does))]);
        roff.control("PP", []).control("RS", ["4"]).control("nf", []);
        roff.text([bold(example.line)]);
        roff.control("fi", []).control("RE", []);
    }
    roff.to_writer(out)
}

/// Writes a section with the terms of the page, and with those that all pages have.
fn terms_section(
    heading: &str,
    own: Terms,
    common: &[(&'static str, &'static str)],
    out: &mut impl Write,
) -> io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", [heading]);
    let mut all: Vec<_> =
        common.iter().filter(|(term, _)| own.iter().all(|o| o.0 != *term)).collect();
    all.extend(own);
    if heading == "EXIT STATUS" {
        all.sort_by_key(|(status, _)| status.parse::<u8>().unwrap_or(u8::MAX));
    }
    for (term, meaning) in all {
        roff.control("TP", []).text([bold(*term)]).text([roman(*meaning)]);
    }
    roff.to_writer(out)
}

/// Writes the pages of the command above, the commands below, and others that belong to it.
fn see_also_section(command: &Command, path: &str, out: &mut impl Write) -> io::Result<()> {
    let mut pages = Vec::new();
    if !path.is_empty() {
        let above = path.rsplit_once(' ').map_or("", |(above, _)| above);
        pages.push(format!("{}(1)", page_name(above)));
    }
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    pages.extend(below.map(|below| {
        let path = format!("{path} {}", below.get_name());
        format!("{}(1)", page_name(path.trim_start()))
    }));
    pages.extend(related(path).iter().map(|page| page.to_string()));
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]).text([roman(pages.join(", "))]);
    roff.to_writer(out)
}

fn related(path: &str) -> &'static [&'static str] {
    match path {
        "serve" => &["blockyard-attach(1)", "blockyard-bench-calibrate(1)", "systemd.socket(5)"],
        "attach" => &["blockyard-detach(1)", "blockyard-serve(1)"],
        "detach" => &["blockyard-attach(1)"],
        "xen attach" => &["blockyard-xen-detach(1)", "xl(1)"],
        "xen detach" => &["blockyard-xen-attach(1)", "xl(1)"],
        "bench rate" => &["blockyard-bench-median(1)", "blockyard-bench-percentile(1)"],
        "bench median" | "bench percentile" => &["blockyard-bench-rate(1)"],
        "bench calibrate" => &["blockyard-serve(1)"],
        "bench job" => &["fio(1)"],
        _ if path.starts_with("image") => &["qemu-img(1)"],
        _ => &[],
    }
}

fn files(path: &str) -> Terms {
    const SERVE: Terms = &[
        (
            "/etc/blockyard/blockyard.toml",
            "Configuration file of the systemd unit blockyard.service.",
        ),
        (
            "/etc/blockyard/conf.d",
            "Further configuration files, in the order of their names. \
             blockyard-ctl(1) --persist writes disks into it.",
        ),
        (USUAL, "Socket of the API, which blockyard-ctl(1) uses (--api)."),
        (
            "/run/blockyard-journals",
            "Journals of changed metadata (--state-folder). \
             A new server replays them if the old one was killed.",
        ),
        (
            "/var/lib/blockyard/costs.toml",
            "Costs of the devices' operations, from blockyard-bench-calibrate(1). \
             Read at start if --costs is absent.",
        ),
        (
            "/run/blockyard-xen",
            "Requests of Xen guests that are in flight, and locks of their devices. \
             A new server answers them if the old one was killed.",
        ),
    ];
    const ATTACH: Terms = &[
        ("/run/blockyard-attach/DEVICE.log", "Log of the server that runs in the background."),
        (
            "/run/blockyard-attach/killed-DISK.log",
            "Log of the last server of a disk that a signal ended before its device was ready.",
        ),
        ("$XDG_RUNTIME_DIR/blockyard", "Folder of the log for users other than root."),
    ];
    const JOURNALS: (&str, &str) = (
        "/run/blockyard-journals",
        "Journals of a server that was killed. Commands that write to an image replay its journal \
         first. The environment variable BLOCKYARD_STATE_FOLDER names another folder.",
    );
    const IMAGE: Terms = &[JOURNALS];
    const NEW_IMAGE: Terms = &[
        JOURNALS,
        (".NAME.PID.part", "Temporary name of a new image, on file systems without O_TMPFILE."),
    ];
    match path {
        "" | "serve" => SERVE,
        _ if path == "ctl" || path.starts_with("ctl ") => {
            &[(USUAL, "Socket of the server's API (--api).")]
        }
        "attach" | "detach" | "xen" | "xen attach" | "xen detach" => ATTACH,
        "image create" | "image convert" | "image dd" => NEW_IMAGE,
        _ if path == "image" || path.starts_with("image ") => IMAGE,
        "bench calibrate" => {
            &[("/var/lib/blockyard/costs.toml", "Costs of the devices' operations (--output).")]
        }
        _ => &[],
    }
}

fn signals(path: &str) -> Terms {
    const SERVER: Terms = &[
        (
            "SIGTERM, SIGINT",
            "Drains requests in flight, flushes all images and exits. \
             The status is 1 if an image cannot be flushed.",
        ),
        (
            "SIGHUP",
            "Reads the configuration file and the certificates again, and updates the sizes of \
             images.",
        ),
        ("SIGUSR1", "Logs the statistics of every disk."),
    ];
    match path {
        "" | "serve" | "attach" | "xen attach" => SERVER,
        "image create" | "image convert" | "image dd" => {
            &[("SIGTERM, SIGINT, SIGHUP", "Removes the unfinished image and ends.")]
        }
        "bench compare" | "bench neighbours" | "bench calibrate" => &[(
            "SIGTERM, SIGINT",
            "Stops the run, removes temporary files and exits with status 130.",
        )],
        _ => &[("SIGTERM, SIGINT, SIGHUP", "End the command.")],
    }
}

const COMMON_STATUSES: Terms = &[
    ("0", "Success."),
    ("1", "Failure."),
    ("2", "Usage error: wrong options, or a wrong configuration file."),
    ("141", "The reader of standard output closed it, as with `| head`."),
];

fn statuses(path: &str) -> Terms {
    match path {
        "" | "serve" => &[("159", "The sandbox refused a system call of the server.")],
        "image check" => &[
            ("0", "The image is consistent."),
            ("1", "The check failed."),
            ("3", "The image is corrupt."),
            ("4", "No data is in danger: leaks, or metadata that opening the image repairs."),
        ],
        "image compare" => &[
            ("0", "The disks are identical."),
            ("1", "The disks differ."),
            ("2", "Failure, or usage error."),
        ],
        "bench diff" => &[
            ("0", "Nothing is slower."),
            ("1", "A row is slower beyond the noise and the tolerance."),
            ("2", "Failure, or usage error."),
        ],
        "bench compare" | "bench neighbours" | "bench calibrate" => {
            &[("130", "A signal stopped the run.")]
        }
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Returns the pages of all commands, with their names.
    fn pages() -> Vec<(String, String)> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockyard-man-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        write_pages(crate::commands::command(), &folder).unwrap();
        let pages = std::fs::read_dir(&folder).unwrap().map(|entry| {
            let entry = entry.unwrap();
            let text = std::fs::read_to_string(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), text)
        });
        let pages = pages.collect();
        std::fs::remove_dir_all(&folder).unwrap();
        pages
    }

    #[test]
    fn every_page_has_all_sections_with_text() {
        let pages = pages();
        assert!(pages.len() > 20, "{} pages", pages.len());
        for (name, page) in &pages {
            let mut from = 0;
            for section in [
                "NAME",
                "SYNOPSIS",
                "DESCRIPTION",
                "EXAMPLES",
                "FILES",
                "SIGNALS",
                r#""EXIT STATUS""#,
                r#""SEE ALSO""#,
                "VERSION",
            ] {
                let heading = format!("\n.SH {section}\n");
                let at = page[from..].find(&heading).unwrap_or_else(|| panic!("{name}: {section}"));
                from += at + heading.len();
                let text = page[from..].split("\n.SH ").next().unwrap();
                assert!(text.lines().any(|line| !line.starts_with('.')), "{name}: {section}");
            }
        }
    }

    #[test]
    fn pages_of_image_commands_name_the_journals() {
        let pages = pages();
        let of_image = pages.iter().filter(|(name, _)| name.starts_with("blockyard-image"));
        let lacking = of_image.clone().filter(|(_, page)| {
            !page.contains("blockyard\\-journals") || !page.contains("BLOCKYARD_STATE_FOLDER")
        });
        assert!(of_image.count() > 10);
        assert_eq!(lacking.map(|(name, _)| name).collect::<Vec<_>>(), [""; 0]);
    }

    #[test]
    fn pages_of_see_also_exist() {
        let pages = pages();
        for (name, page) in &pages {
            let list = page.split(".SH \"SEE ALSO\"\n").nth(1).unwrap().lines().next().unwrap();
            let list = list.replace("\\-", "-");
            let own = list.split(", ").filter(|page| {
                page.starts_with("blockyard") && !page.starts_with("blockyard-bench-")
            });
            for other in own {
                let file = format!("{}.1", other.trim_end_matches("(1)"));
                assert!(pages.iter().any(|(name, _)| *name == file), "{name}: {other}");
            }
        }
    }

    #[test]
    fn the_page_of_check_has_its_own_exit_statuses() {
        let pages = pages();
        let (_, page) = pages.iter().find(|(name, _)| name == "blockyard-image-check.1").unwrap();
        let (_, statuses) = page.split_once("EXIT STATUS").unwrap();
        let found: Vec<_> = statuses.lines().filter_map(|line| line.strip_prefix("\\fB")).collect();
        let found: Vec<_> = found.iter().map(|line| line.split('\\').next().unwrap()).collect();
        assert_eq!(found[..6], ["0", "1", "2", "3", "4", "141"]);
    }
}
