//! Several samples of one figure: median and spread, and the ratio to another figure's samples.

use serde::{Deserialize, Serialize};

/// Samples of one figure, in the order of their rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// The name of the measurement.
    pub name: String,
    /// A value per round.
    pub values: Vec<f64>,
}

impl Samples {
    /// No samples yet.
    pub fn new(name: impl Into<String>) -> Samples {
        Samples { name: name.into(), values: Vec::new() }
    }

    /// The median. For an even number of samples it is the mean of the middle two, without samples
    /// NaN.
    pub fn median(&self) -> f64 {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        match (sorted.len(), sorted.len() / 2) {
            (0, _) => f64::NAN,
            (len, middle) if len % 2 == 1 => sorted[middle],
            (_, middle) => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    /// The lowest sample.
    pub fn lowest(&self) -> f64 {
        self.values.iter().copied().fold(f64::NAN, f64::min)
    }

    /// The highest sample.
    pub fn highest(&self) -> f64 {
        self.values.iter().copied().fold(f64::NAN, f64::max)
    }

    /// The ratios to another figure, round by round: a disturbance of a whole round affects both.
    pub fn ratio_to(&self, reference: &Samples) -> Samples {
        let pairs = self.values.iter().zip(&reference.values);
        Samples {
            name: format!("{} / {}", self.name, reference.name),
            values: pairs.map(|(value, reference)| value / reference).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(values: &[f64]) -> Samples {
        Samples { name: "x".to_owned(), values: values.to_vec() }
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(samples(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(samples(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert!(samples(&[]).median().is_nan());
    }

    #[test]
    fn the_spread_is_from_lowest_to_highest() {
        let some = samples(&[3.0, 1.0, 2.0]);
        assert_eq!((some.lowest(), some.highest()), (1.0, 3.0));
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The second round was ten times slower for both.
        let ratios = samples(&[2.0, 20.0, 2.0]).ratio_to(&samples(&[1.0, 10.0, 1.0]));
        assert_eq!(ratios.values, [2.0, 2.0, 2.0]);
    }
}
