//! A record as a table for a terminal.

use std::fmt::Write as _;

use super::{Record, Row};

/// The record's rows, aligned, with its notes.
pub fn render(record: &Record) -> String {
    let rows = &record.outcome.rows;
    let width = |length: fn(&Row) -> usize| rows.iter().map(length).max().unwrap_or(0);
    let name_width = width(|row| row.name.chars().count());
    let unit_width = width(|row| row.unit.chars().count());
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(text, "{}: {} ({})", record.experiment, record.shows, record.source);
    for row in rows {
        let value = number(row.value);
        let _ = write!(text, "  {:name_width$}  {value:>12} {:unit_width$}", row.name, row.unit);
        let spread = match row.samples {
            1 => String::new(),
            _ => format!("{} to {}", number(row.low), number(row.high)),
        };
        let _ = write!(text, "  {spread:>24}");
        if let (Some(ratio), Some(against)) = (row.ratio, &row.against) {
            let _ = write!(text, "  {ratio:6.2} x {against}");
        }
        if let Some(target) = row.target {
            let _ = write!(text, "  (target {target:.2})");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    for note in &record.outcome.notes {
        let _ = writeln!(text, "  - {note}");
    }
    text
}

/// A number with about four digits, and with separators for thousands.
pub fn number(value: f64) -> String {
    let magnitude = value.abs();
    if !value.is_finite() {
        return "-".to_owned();
    }
    if magnitude >= 1000.0 {
        return thousands(value);
    }
    let decimals = match magnitude {
        m if m >= 100.0 => 0,
        m if m >= 10.0 => 1,
        m if m >= 1.0 || m == 0.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let (sign, digits) = match digits.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", &digits[..]),
    };
    let mut text = String::from(sign);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_about_four_digits() {
        let cases = [(1234567.4, "1,234,567"), (999.6, "1000"), (123.4, "123"), (12.34, "12.3")];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
        assert_eq!(number(1.234), "1.23");
        assert_eq!(number(0.1234), "0.123");
        assert_eq!(number(-1000.0), "-1,000");
        assert_eq!(number(f64::NAN), "-");
    }
}
