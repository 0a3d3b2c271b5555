//! Pictures as PNG, for readers without SVG. The font comes with the program, because a server may
//! have none.

use anyhow::{Context, Result};
use resvg::{tiny_skia, usvg};

/// Pixels for each unit of the picture.
const SCALE: f32 = 2.0;

pub fn render(svg: &str) -> Result<Vec<u8>> {
    let mut options =
        usvg::Options { font_family: "DejaVu Sans".into(), ..usvg::Options::default() };
    options.fontdb_mut().load_font_data(dejavu::sans::regular().to_vec());
    let tree = usvg::Tree::from_str(svg, &options).context("reading the picture")?;
    let size = tree.size().to_int_size().scale_by(SCALE).context("a picture without size")?;
    let mut pixels =
        tiny_skia::Pixmap::new(size.width(), size.height()).context("a picture without size")?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().context("encoding the picture")
}
