//! Numbers as text of at most six characters.

/// Returns a rate or a count: `0`, `7`, `12.3`, `999`, `1.2k`, `45.6M`.
pub fn count(value: f64) -> String {
    match value {
        v if v < 0.05 => "0".into(),
        v if v < 99.5 && v.fract() == 0.0 => format!("{v:.0}"),
        v if v < 99.95 => format!("{v:.1}"),
        v if v < 999.5 => format!("{v:.0}"),
        v if v < 99_950.0 => format!("{:.1}k", v / 1e3),
        v if v < 999_500.0 => format!("{:.0}k", v / 1e3),
        v => format!("{:.1}M", v / 1e6),
    }
}

/// Returns bytes a second in MB: `0`, `3.4`, `1204`.
pub fn megabytes(bytes: f64) -> String {
    match bytes / 1e6 {
        mb if mb < 0.005 => "0".into(),
        mb if mb < 9.995 => format!("{mb:.2}"),
        mb if mb < 99.95 => format!("{mb:.1}"),
        mb => format!("{mb:.0}"),
    }
}

/// Returns a time: `87us`, `1.2ms`, `45ms`, `2.3s`, `2.8h`, `12d`. None: `-`.
pub fn time(seconds: Option<f64>) -> String {
    let Some(seconds) = seconds else { return "-".into() };
    match seconds * 1e6 {
        us if us < 999.5 => format!("{us:.0}us"),
        us if us < 9_995.0 => format!("{:.1}ms", us / 1e3),
        us if us < 999_500.0 => format!("{:.0}ms", us / 1e3),
        us if us < 99.5e6 => format!("{:.1}s", us / 1e6),
        us if us < 9_999e6 => format!("{:.0}s", us / 1e6),
        us if us < 359_900e6 => format!("{:.1}h", us / 3.6e9),
        us => format!("{:.0}d", us / 86.4e9),
    }
}

/// Returns a part of one: `37%`. None: `-`.
pub fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "-".into(), |part| format!("{:.0}%", part * 100.0))
}

/// Returns a size: `512`, `64K`, `1.5G`.
pub fn size(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "");
    for next in ["K", "M", "G", "T", "P"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if value.fract() == 0.0 { format!("{value:.0}{unit}") } else { format!("{value:.1}{unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_at_most_six_characters() {
        for (value, text) in [
            (0.0, "0"),
            (7.0, "7"),
            (9.96, "10.0"),
            (123.4, "123"),
            (1234.0, "1.2k"),
            (654_321.0, "654k"),
        ] {
            assert_eq!(count(value), text);
        }
        for (seconds, text) in
            [(87e-6, "87us"), (1.24e-3, "1.2ms"), (45e-3, "45ms"), (2.34, "2.3s"), (345.0, "345s")]
        {
            assert_eq!(time(Some(seconds)), text);
        }
        for (bytes, text) in [(3.4e6, "3.40"), (34.56e6, "34.6"), (1204.4e6, "1204")] {
            assert_eq!(megabytes(bytes), text);
        }
        for exponent in -9..9 {
            let value = 9.995 * 10f64.powi(exponent);
            for text in [count(value), time(Some(value)), megabytes(value)] {
                assert!(text.chars().count() <= 6, "{value}: {text}");
            }
        }
        assert_eq!((size(512).as_str(), size(3 << 29).as_str()), ("512", "1.5G"));
    }
}
