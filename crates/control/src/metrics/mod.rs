//! Figures as metrics in Prometheus' text format, version 0.0.4.
//!
//! ```text
//!   page      what the metrics' address offers: a web page, metrics and figures
//!   scrape    collects figures, and sends their text within bounds
//!   text      the format: names, labels, values
//!   server    metrics of the process, its reactors and devices
//!   disks     metrics of each disk
//! ```
//!
//! In: [`Figures`]. Out: the text. What must hold: each metric has a name with its unit, a help
//! text and a type; a name from outside is escaped; the text of 1,000 disks takes milliseconds.
//! (Libraries of metrics keep values that programs change. These figures are counted elsewhere, and
//! only have to be written. Such a library would also write the labels of each line again.)

mod disks;
pub(crate) mod page;
pub(crate) mod scrape;
mod server;
mod text;

use crate::figures::Figures;
use text::Text;

/// The content type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns the metrics of a server.
pub fn render(figures: &Figures) -> String {
    let mut text = Text::default();
    server::write(&mut text, figures);
    disks::write(&mut text, figures);
    text.into_string()
}

#[cfg(test)]
mod tests;
