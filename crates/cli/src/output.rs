//! Buffered standard output, which distinguishes a closed pipe from other failures.

use std::io::{self, BufWriter, ErrorKind, StdoutLock, Write};

use crate::error::{Failure, Outcome};

/// Standard output. Call [`Output::finish`] at the end; otherwise buffered bytes are lost.
pub struct Output(BufWriter<StdoutLock<'static>>);

impl Output {
    /// Locks standard output.
    pub fn new() -> Self {
        Self(BufWriter::with_capacity(1 << 16, io::stdout().lock()))
    }

    /// Writes bytes as they are.
    ///
    /// # Errors
    /// [`Failure::OutputClosed`] when the reader has gone.
    pub fn bytes(&mut self, bytes: &[u8]) -> Outcome {
        written(self.0.write_all(bytes))
    }

    /// Writes a line.
    ///
    /// # Errors
    /// As [`Output::bytes`].
    pub fn line(&mut self, line: &str) -> Outcome {
        self.bytes(line.as_bytes())?;
        self.bytes(b"\n")
    }

    /// Writes the buffered bytes.
    ///
    /// # Errors
    /// As [`Output::bytes`].
    pub fn finish(mut self) -> Outcome {
        written(self.0.flush())
    }
}

/// The outcome of writing to standard output, or to a file that the user chose.
///
/// # Errors
/// [`Failure::OutputClosed`] when the reader has closed the pipe, otherwise the error of the
/// system.
pub fn written(result: io::Result<()>) -> Outcome {
    result.map_err(|source| match source.kind() {
        ErrorKind::BrokenPipe => Failure::OutputClosed,
        _ => Failure::System { what: "writing the output".into(), source },
    })
}

/// Aligns rows of cells in columns: the first column to the left, the others to the right.
pub fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let lengths =
            rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        lengths.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            match column {
                0 => line.push_str(&format!("{cell:<width$}")),
                _ => line.push_str(&format!("  {cell:>width$}")),
            }
        }
        line.trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

/// A line for each name with its value, all values one below the other.
pub fn fields(fields: &[(&str, String)]) -> Vec<String> {
    let width = fields.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    fields.iter().map(|(name, value)| format!("{name:<width$}  {value}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_below_each_other() {
        let lines = fields(&[("a", "b c".into()), ("name", "1".into())]);
        assert_eq!(lines, ["a     b c", "name  1"]);
        assert!(fields(&[]).is_empty());
    }

    #[test]
    fn columns_are_aligned() {
        let row = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_string()).collect();
        let rows = [row(&["name", "n"]), row(&["a", "1000"]), row(&["bc", "1", "x"])];
        assert_eq!(columns(&rows), ["name     n", "a     1000", "bc       1  x"]);
        assert!(columns(&[]).is_empty());
    }
}
