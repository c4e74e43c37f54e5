//! The report: one self-contained HTML file, with the charts as SVG inside.

use std::path::Path;

use anyhow::{Context as _, Result};
use askama::Template;

use super::{Record, Row, draw, text};

/// Writes the report of all records to a file, replacing it.
///
/// # Errors
/// If a chart cannot be drawn or the file cannot be written.
pub fn write(path: &Path, records: &[Record]) -> Result<()> {
    let page = render(records)?;
    super::write(path, &page)
}

fn render(records: &[Record]) -> Result<String> {
    let sections = records.iter().map(Section::new).collect::<Result<Vec<Section<'_>>>>()?;
    Page { sections }.render().context("rendering the report")
}

#[derive(Template)]
#[template(path = "report.html")]
struct Page<'a> {
    sections: Vec<Section<'a>>,
}

/// An experiment.
struct Section<'a> {
    record: &'a Record,
    rows: Vec<Cells<'a>>,
    /// SVG.
    charts: Vec<String>,
    seconds: String,
}

/// A row, as text.
struct Cells<'a> {
    name: &'a str,
    value: String,
    unit: &'a str,
    spread: String,
    ratio: String,
    against: &'a str,
    target: String,
}

impl<'a> Section<'a> {
    fn new(record: &'a Record) -> Result<Section<'a>> {
        let drawn =
            record.outcome.charts.iter().map(|chart| {
                draw::svg(chart).with_context(|| format!("drawing '{}'", chart.title))
            });
        Ok(Section {
            record,
            rows: record.outcome.rows.iter().map(Cells::new).collect(),
            charts: drawn.collect::<Result<Vec<String>>>()?,
            seconds: text::number(record.seconds),
        })
    }
}

impl<'a> Cells<'a> {
    fn new(row: &'a Row) -> Cells<'a> {
        let spread = match row.samples {
            1 => String::new(),
            _ => format!("{} to {}", text::number(row.low), text::number(row.high)),
        };
        Cells {
            name: &row.name,
            value: text::number(row.value),
            unit: &row.unit,
            spread,
            ratio: row.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
            against: row.against.as_deref().unwrap_or_default(),
            target: row.target.map(|target| format!("{target:.2}")).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Axis, Chart, Line, Outcome};

    #[test]
    fn the_report_holds_everything_and_needs_nothing() {
        let lines = vec![
            Line { name: "vellum".into(), points: vec![(0.5, 10.0), (1.0, 20.0), (8.0, 5.0)] },
            Line { name: "other <&>".into(), points: vec![(0.5, 1.0)] },
            Line { name: "nothing".into(), points: vec![] },
        ];
        let (x, y) = (Axis::logarithmic("data / memory"), Axis::linear("lookups/s"));
        let chart = Chart { title: "The chart".into(), x, y, lines };
        let record = Record {
            experiment: "data-sizes".into(),
            shows: "a comparison".into(),
            source: "a <paper>".into(),
            quick: false,
            machine: "two cores".into(),
            command: "vellum bench data-sizes".into(),
            seconds: 12.0,
            outcome: Outcome {
                rows: vec![Row::count("vellum, 2 threads", 1234.0, "lookups/s").with_target(987.0)],
                charts: vec![chart],
                notes: vec!["storage: zram".into()],
            },
        };
        let page = render(&[record]).unwrap();
        for part in
            ["1,234", "987.00", "storage: zram", "The chart", "data / memory", "two cores", "<svg"]
        {
            assert!(page.contains(part), "no '{part}' in {page}");
        }
        assert!(page.contains("a &#60;paper&#62;") || page.contains("a &lt;paper&gt;"));
        for outside in ["<script", "<link", "src=", "@import"] {
            assert!(!page.contains(outside), "'{outside}' in the report");
        }
    }

    #[test]
    fn a_report_without_records_is_a_page() {
        assert!(render(&[]).unwrap().contains("</html>"));
    }
}
