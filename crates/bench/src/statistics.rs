//! Figures of samples: quantiles, and how far to trust them.
//!
//! In: numbers in order. Out: numbers. What must hold: quantiles are those of Hyndman and Fan's
//! definition 7 (linear between the two nearest samples; the default of numpy and R), so that
//! others can compute them again.

/// Returns the quantile `q` (0 to 1) of samples in ascending order, or NaN if there are none.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = q.clamp(0.0, 1.0) * last as f64;
    let (below, part) = (place.floor() as usize, place.fract());
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * part
}

/// Returns the values in ascending order, without NaN.
pub fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.into_iter().filter(|v| !v.is_nan()).collect();
    values.sort_by(f64::total_cmp);
    values
}

pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    quantile(&sorted(values), 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are those of `numpy.quantile([1, 2, 4, 8, 16], q)`.
    #[test]
    fn quantiles_are_those_of_numpy() {
        let samples = [1.0, 2.0, 4.0, 8.0, 16.0];
        let wanted = [
            (0.0, 1.0),
            (0.1, 1.4),
            (0.25, 2.0),
            (0.5, 4.0),
            (0.6, 5.6),
            (0.95, 14.4),
            (1.0, 16.0),
        ];
        for (q, value) in wanted {
            assert!(
                (quantile(&samples, q) - value).abs() < 1e-12,
                "{q}: {}",
                quantile(&samples, q)
            );
        }
        assert_eq!(quantile(&[3.0], 0.99), 3.0);
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn the_median_does_not_mind_the_order() {
        assert_eq!(median([9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median([9.0, f64::NAN, 1.0]), 5.0);
    }
}
