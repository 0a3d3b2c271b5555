//! What `bench rate` prints, read again: one operation a line, its size in bytes and its duration
//! in seconds.
//!
//! In: text. Out: samples, sorted into bins by size. What must hold: a line that is no sample
//! is an error that names the line.

use std::io::BufRead;

use anyhow::{Context, Result};

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub bytes: u64,
    pub seconds: f64,
}

/// Parses samples. Skips empty lines and lines that begin with `#`.
pub fn read(input: impl BufRead) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for (number, line) in input.lines().enumerate() {
        let line = line?;
        let text = line.trim();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let sample = parse(text)
            .with_context(|| format!("line {}: \"{text}\" is no size and duration", number + 1))?;
        samples.push(sample);
    }
    Ok(samples)
}

fn parse(line: &str) -> Option<Sample> {
    let mut columns = line.split_ascii_whitespace();
    let (bytes, seconds) = (columns.next()?.parse().ok()?, columns.next()?.parse::<f64>().ok()?);
    (columns.next().is_none() && seconds >= 0.0 && seconds.is_finite())
        .then_some(Sample { bytes, seconds })
}

/// Operations of about the same size.
#[derive(Clone, Debug, PartialEq)]
pub struct Bin {
    /// Geometric mean of the sizes in this bin, in bytes. It represents all of them.
    pub bytes: u64,
    /// Durations of the operations in seconds, in ascending order.
    pub seconds: Vec<f64>,
}

/// Number of bins from one power of two of the size to the next.
pub const BINS_AN_OCTAVE: u32 = 4;
/// Maximum number of distinct sizes for which each size has its own bin.
const FEW_SIZES: usize = 32;

/// Returns the samples in bins, in ascending order of size. With at most `FEW_SIZES` sizes, each
/// size is a bin. With more, a bin is a quarter of an octave wide: log-uniform sizes fill bins
/// evenly.
pub fn bins(samples: &[Sample]) -> Vec<Bin> {
    let mut samples = samples.to_vec();
    samples.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.seconds.total_cmp(&b.seconds)));
    let few = samples.chunk_by(|a, b| a.bytes == b.bytes).count() <= FEW_SIZES;
    let together = |a: &Sample, b: &Sample| {
        if few { a.bytes == b.bytes } else { step(a.bytes) == step(b.bytes) }
    };
    samples.chunk_by(together).map(bin).collect()
}

fn step(bytes: u64) -> i64 {
    // (A power of two begins a bin, whatever the logarithm of a float makes of it.)
    ((bytes.max(1) as f64).log2() * f64::from(BINS_AN_OCTAVE) + 1e-9).floor() as i64
}

fn bin(samples: &[Sample]) -> Bin {
    let logs: f64 = samples.iter().map(|s| (s.bytes.max(1) as f64).ln()).sum();
    let mut seconds: Vec<f64> = samples.iter().map(|s| s.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    Bin { bytes: (logs / samples.len() as f64).exp().round() as u64, seconds }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_columns_are_read_and_what_is_not_is_named() {
        let text = "# comment\n512 0.001\n\n 4096\t2.5e-4 \n";
        let wanted =
            [Sample { bytes: 512, seconds: 0.001 }, Sample { bytes: 4096, seconds: 0.00025 }];
        assert_eq!(read(text.as_bytes()).unwrap(), wanted);
        for bad in ["512", "x 1", "512 y", "512 -1", "512 inf", "512 1 1"] {
            let error = read(format!("512 1\n{bad}\n").as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("line 2:"), "{bad}: {error}");
        }
    }

    #[test]
    fn few_sizes_stay_and_many_are_put_together() {
        let sample = |bytes, seconds| Sample { bytes, seconds };
        let few = bins(&[sample(4096, 3.0), sample(512, 1.0), sample(4096, 2.0)]);
        assert_eq!(
            few,
            [Bin { bytes: 512, seconds: vec![1.0] }, Bin { bytes: 4096, seconds: vec![2.0, 3.0] }]
        );
        let many: Vec<_> = (1..=2048).map(|i| sample(i * 512, i as f64)).collect();
        let bins = bins(&many);
        assert_eq!(bins.iter().map(|b| b.seconds.len()).sum::<usize>(), 2048);
        // 512 B to 1 MiB are 11 octaves; 1 MiB begins one more, and the first ones hold multiples
        // of 512 only.
        assert!((36..=45).contains(&bins.len()), "{}", bins.len());
        assert_eq!(bins.last().unwrap().bytes, 1 << 20);
        assert!(bins.windows(2).all(|w| w[0].bytes < w[1].bytes));
        for bits in 0..63 {
            assert_eq!(step(1 << bits), i64::from(bits * 4u32), "2^{bits}");
        }
    }
}
