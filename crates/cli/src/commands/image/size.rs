//! Sizes with units, such as `10G`. Units are powers of 1024, as in qemu-img.

/// Parses a size, such as `10G`, `1.5T` or `512` (bytes). Returns bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    let bad = || {
        format!("\"{text}\" is no size: write a number, with k, M, G, T, P or E for powers of 1024")
    };
    let (number, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let shift = match unit {
        "" | "b" | "B" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return Err(bad()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return Err(bad());
    }
    let whole: u64 = whole.parse().map_err(|_| bad())?;
    // Round down to whole bytes.
    let fraction: f64 = format!("0.{fraction}").parse().map_err(|_| bad())?;
    let part = (fraction * (1u64 << shift) as f64) as u64;
    let size = whole.checked_mul(1 << shift).and_then(|bytes| bytes.checked_add(part));
    size.filter(|bytes| *bytes <= i64::MAX as u64)
        .ok_or_else(|| format!("\"{text}\" is larger than a file can be (8 EiB)"))
}

/// Returns a size with three digits and a unit, such as `1.25 MiB`.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1000.0 {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let decimals = match value {
        v if v < 1.0 => 3,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("1b", 1),
            ("64k", 65536),
            ("1.5G", 3 << 29),
            ("2T", 2 << 40),
            ("0.5k", 512),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "k",
            "-1",
            "+1",
            "1x",
            "1 k",
            "1kk",
            ".5k",
            "1.",
            "1e3",
            "8E",
            "99999999999999999999",
            "1.5.5k",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_in_the_format_of_qemu_img() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (196 << 10, "196 KiB"),
            (1311232, "1.25 MiB"),
            (10 << 20, "10 MiB"),
            (1023 << 20, "0.999 GiB"),
            ((10 << 30) + (200 << 20), "10.2 GiB"),
            (i64::MAX as u64, "8 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
