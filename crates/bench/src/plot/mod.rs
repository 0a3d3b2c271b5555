//! Pictures of figures, as SVG that needs nothing else: for the report's page, for files, for
//! paper.
//!
//! ```text
//!   scale   from a value to a place, and which values are written on the axis
//!   xy      curves with bands          bars    groups of bars with whiskers        svg    the text of a picture
//!   png     the same in pixels
//! ```
//! In: series of points. Out: SVG text. What must hold: the same figures give the same text; a
//! series differs from others by its colour, its dash and its marker, so that it is also without
//! colours; light and dark are the reader's choice.

pub mod bars;
pub mod png;
pub mod scale;
pub mod svg;
pub mod xy;

pub use bars::{Bar, Bars};
pub use scale::{Kind, Unit};
pub use xy::{Chart, Point, Series};
