//! The layout of a Rust file: line length, file length, white space, header.

use super::finding::Finding;
use super::tree::{File, Tree};

/// Columns of a line.
const COLUMNS: usize = 100;

/// Lines of a file. So many have room for one subject, in the order in which data flows through it;
/// a longer file has two subjects.
const LINES: usize = 1200;

/// No line is longer than 100 columns, except for one with a URL or a row of a table in a comment.
pub fn line_length(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        for (number, line) in file.lines() {
            let columns = line.chars().count();
            if columns > COLUMNS && !line.contains("://") && !is_table_row(line) {
                let message = format!("{columns} columns; at most {COLUMNS}");
                findings.push(Finding::new(&file.path, number, message));
            }
        }
    }
    findings
}

fn is_table_row(line: &str) -> bool {
    let line = line.trim_start();
    ["//! |", "/// |", "// |"].iter().any(|start| line.starts_with(start))
}

/// No file has more than 1,200 lines.
pub fn file_length(tree: &Tree) -> Vec<Finding> {
    tree.rust_files().filter_map(overlong).collect()
}

fn overlong(file: &File) -> Option<Finding> {
    let lines = file.text.lines().count();
    let message = format!("{lines} lines; at most {LINES}: split the file");
    (lines > LINES).then(|| Finding::new(&file.path, 0, message))
}

/// No tabs, no blanks at the end of a line, a line break at the end of the file.
pub fn white_space(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        for (number, line) in file.lines() {
            if line.contains('\t') {
                findings.push(Finding::new(&file.path, number, "a tab"));
            }
            if line.ends_with([' ', '\r']) {
                findings.push(Finding::new(&file.path, number, "white space at the end"));
            }
        }
        if !file.text.is_empty() && !file.text.ends_with('\n') {
            findings.push(Finding::new(&file.path, 0, "no line break at the end"));
        }
    }
    findings
}

/// Every Rust file of a crate starts with `//!`: what is here, what holds.
pub fn header(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files().filter(|file| file.path.starts_with("crates/")) {
        let first = file.text.lines().find(|line| {
            let line = line.trim();
            !line.is_empty() && !line.starts_with("#![")
        });
        if !first.is_some_and(|line| line.starts_with("//!")) {
            findings.push(Finding::new(&file.path, 1, "no '//!' header: what is here, what holds"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/x/src/lib.rs";

    fn lines_found(rule: super::super::Rule, text: &str) -> Vec<usize> {
        rule(&Tree::of(&[(PATH, text)])).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn long_lines_are_found() {
        let long = "x".repeat(101);
        assert_eq!(lines_found(line_length, &format!("a\n{long}\n")), [2]);
        assert!(lines_found(line_length, &"é".repeat(100)).is_empty());
        assert!(lines_found(line_length, &format!("// https://{long}")).is_empty());
        assert!(lines_found(line_length, &format!("//! | {long} |")).is_empty());
    }

    #[test]
    fn long_files_are_found() {
        assert!(lines_found(file_length, &"a\n".repeat(1200)).is_empty());
        assert_eq!(lines_found(file_length, &"a\n".repeat(1201)), [0]);
    }

    #[test]
    fn stray_white_space_is_found() {
        assert_eq!(lines_found(white_space, "a\n\tb\nc \nd\r\n"), [2, 3, 4]);
        assert_eq!(lines_found(white_space, "a"), [0]);
        assert!(lines_found(white_space, "a\n    b\n").is_empty());
    }

    #[test]
    fn missing_headers_are_found() {
        assert_eq!(lines_found(header, "mod a;\n//! Late.\n"), [1]);
        assert!(lines_found(header, "#![allow(x)]\n\n//! Header.\nmod a;\n").is_empty());
    }
}
