//! Samples as rows of a report.

use vellum_bench::measure::Samples;
use vellum_bench::report::Row;

/// A row each; the ratios are to the plain read, overlapped rows to the overlapped one.
pub fn rows(all: &[Samples]) -> Vec<Row> {
    let overlapped = |samples: &Samples| samples.name.contains(", overlapped");
    let row = |samples: &Samples| {
        let row = Row::of(samples, "ns");
        match all.iter().find(|first| overlapped(first) == overlapped(samples)) {
            Some(reference) if reference.name != samples.name => row.against(samples, reference),
            _ => row,
        }
    };
    all.iter().map(row).collect()
}
