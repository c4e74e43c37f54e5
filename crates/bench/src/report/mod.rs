//! The result of an experiment, [`Outcome`], and its forms: a table, JSON, HTML.

mod chart;
pub mod draw;
pub mod html;
pub mod json;
pub mod text;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

pub use chart::{Axis, Chart, Line};

use crate::measure::Samples;

/// Writes a file. Creates its folder if it does not exist.
fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    folder
        .and_then(|()| fs::write(path, text))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The name of the measurement, such as `version check, 8 GiB`.
    pub name: String,
    /// The median.
    pub value: f64,
    /// Of the value, such as `ns` or `lookups/s`.
    pub unit: String,
    /// The lowest sample.
    pub low: f64,
    /// The highest sample.
    pub high: f64,
    /// The samples of the median.
    pub samples: usize,
    /// The median of the ratios to `against`, each within one round.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio: Option<f64>,
    /// The row that the ratio refers to.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub against: Option<String>,
    /// The least value that the project aims at.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub target: Option<f64>,
}

impl Row {
    /// A row of several samples.
    pub fn of(samples: &Samples, unit: &str) -> Row {
        Row {
            name: samples.name.clone(),
            value: samples.median(),
            unit: unit.to_owned(),
            low: samples.lowest(),
            high: samples.highest(),
            samples: samples.values.len(),
            ratio: None,
            against: None,
            target: None,
        }
    }

    /// A row of one figure that has no spread, such as a count.
    pub fn count(name: impl Into<String>, value: f64, unit: &str) -> Row {
        Row {
            name: name.into(),
            value,
            unit: unit.to_owned(),
            low: value,
            high: value,
            samples: 1,
            ratio: None,
            against: None,
            target: None,
        }
    }

    /// Adds the ratio of `samples` to `reference`. Both were measured in the same rounds.
    pub fn against(mut self, samples: &Samples, reference: &Samples) -> Row {
        self.ratio = Some(samples.ratio_to(reference).median());
        self.against = Some(reference.name.clone());
        self
    }

    /// Adds the least value that the project aims at.
    pub fn with_target(mut self, target: f64) -> Row {
        self.target = Some(target);
        self
    }

    /// Adds a ratio that the caller computed.
    pub fn with_ratio(mut self, ratio: f64, against: impl Into<String>) -> Row {
        self.ratio = Some(ratio);
        self.against = Some(against.into());
        self
    }
}

/// The result of an experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The figures.
    pub rows: Vec<Row>,
    /// The pictures.
    pub charts: Vec<Chart>,
    /// Notes for the reader: the storage, sizes, limits, contestants that were left out and why.
    pub notes: Vec<String>,
}

/// An experiment's outcome, with a description of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The experiment's name.
    pub experiment: String,
    /// One line that says what it shows.
    pub shows: String,
    /// The paper's table or figure, or another question that it answers.
    pub source: String,
    /// Whether it was the short form.
    pub quick: bool,
    /// The machine, in words.
    pub machine: String,
    /// The command that repeats it.
    pub command: String,
    /// How long it took.
    pub seconds: f64,
    /// Its result.
    #[serde(flatten)]
    pub outcome: Outcome,
}
