//! Progress of long commands: a bar on a terminal, or qemu-img's line with `-p`.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use blockyard_image::tools::Progress;
use blockyard_program::output;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

/// Time between two updates of the display.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Args)]
pub struct ProgressArgs {
    /// Show the progress even if standard error is not a terminal.
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

/// How progress is displayed.
#[derive(Clone, Copy, PartialEq)]
enum Display {
    None,
    Bar,
    /// Percentages on standard output, in qemu-img's format, which programs parse.
    Line,
}

impl ProgressArgs {
    fn display(&self) -> Display {
        match (self.quiet, std::io::stderr().is_terminal(), self.progress) {
            (true, _, _) => Display::None,
            (false, true, _) => Display::Bar,
            (false, false, true) => Display::Line,
            (false, false, false) => Display::None,
        }
    }

    /// Runs `work`, and displays `progress` meanwhile.
    pub fn during<T>(&self, progress: &Progress, work: impl FnOnce() -> T) -> T {
        let display = self.display();
        if display == Display::None {
            return work();
        }
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let bar = bar(display);
                while ended.recv_timeout(UPDATE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    draw(&bar, display, progress);
                }
                draw(&bar, display, progress);
                bar.finish_and_clear();
                if display == Display::Line {
                    let _ = output::print("\n");
                }
            });
            // `_end` is dropped even if `work` panics. Its drop ends the other thread.
            let _end = end;
            work()
        })
    }
}

fn bar(display: Display) -> ProgressBar {
    let bar = if display == Display::Bar { ProgressBar::new(0) } else { ProgressBar::hidden() };
    let shape = "{wide_bar} {percent:>3}% {decimal_bytes_per_sec:>11} {eta:>4}";
    bar.set_style(
        ProgressStyle::with_template(shape).unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar
}

fn draw(bar: &ProgressBar, display: Display, progress: &Progress) {
    let (done, total) = (progress.done(), progress.total());
    if display == Display::Bar {
        bar.set_length(total);
        bar.set_position(done);
        return;
    }
    let percent = if total == 0 { 0.0 } else { done as f64 * 100.0 / total as f64 };
    // Ignore errors: the work continues if the reader of standard output is gone.
    let _ = output::print(format_args!("    ({percent:.2}/100%)\r"));
}
