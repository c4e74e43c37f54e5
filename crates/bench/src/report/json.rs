//! Records as JSON: one per experiment, readable by other programs and by the report.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::Record;

/// Writes records to a file, replacing it.
///
/// # Errors
/// If the file cannot be written.
pub fn write(path: &Path, records: &[Record]) -> Result<()> {
    let text = serde_json::to_string_pretty(records)?;
    super::write(path, &(text + "\n"))
}

/// Reads records from a file; none if there is no such file.
///
/// # Errors
/// If the file cannot be read or holds something else.
pub fn read(path: &Path) -> Result<Vec<Record>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} holds no records of experiments", path.display()))
}

/// Replaces an older record of the same experiment by `record`.
pub fn replace(records: &mut Vec<Record>, record: Record) {
    match records.iter_mut().find(|old| old.experiment == record.experiment) {
        Some(old) => *old = record,
        None => records.push(record),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Axis, Chart, Line, Outcome, Row};

    fn record(experiment: &str, value: f64) -> Record {
        let chart = Chart {
            title: "t".into(),
            x: Axis::linear("x"),
            y: Axis::logarithmic("y"),
            lines: vec![Line { name: "l".into(), points: vec![(1.0, 2.0)] }],
        };
        Record {
            experiment: experiment.into(),
            shows: "something".into(),
            source: "a paper".into(),
            quick: true,
            machine: "m".into(),
            command: "vellum bench x".into(),
            seconds: 1.5,
            outcome: Outcome {
                rows: vec![Row::count("a", value, "ns").with_ratio(2.0, "b")],
                charts: vec![chart],
                notes: vec!["n".into()],
            },
        }
    }

    #[test]
    fn records_survive_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("not/there/r.json");
        assert!(read(&path).unwrap().is_empty());
        let records = vec![record("a", 1.0), record("b", 2.0)];
        write(&path, &records).unwrap();
        assert_eq!(read(&path).unwrap(), records);
    }

    #[test]
    fn a_new_record_replaces_the_old_one() {
        let mut records = vec![record("a", 1.0), record("b", 2.0)];
        replace(&mut records, record("a", 3.0));
        replace(&mut records, record("c", 4.0));
        let names: Vec<_> = records.iter().map(|record| record.experiment.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(records[0].outcome.rows[0].value, 3.0);
    }

    #[test]
    fn another_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.json");
        fs::write(&path, "hello").unwrap();
        assert!(format!("{:#}", read(&path).unwrap_err()).contains("r.json"));
    }
}
