//! Pictures of figures, as self-contained SVG: for the report's page, for files, for paper.
//!
//! ```text
//!   scale  maps values to positions, chooses the values on an axis
//!   xy     curves with bands      bars   groups of bars with whiskers
//!   svg    the text of a picture  png    the same in pixels
//! ```
//! In: series of points. Out: SVG text. What must hold: the same figures give the same text; a
//! series differs from others by its colour, its dash and its marker, so that it is readable
//! without colours; readers choose light or dark.

pub mod bars;
pub mod png;
pub mod scale;
pub mod svg;
pub mod xy;

pub use bars::{Bar, Bars};
pub use scale::{ScaleKind, Unit};
pub use xy::{Chart, Point, Series};
