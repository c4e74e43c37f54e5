//! The project's own rules, checked over the files of the repository.
//!
//! A rule is one function from the tree of files to findings. It reads nothing but that tree, so
//! each has a unit test in which it fails (a rule that cannot fail protects nothing). The rules
//! lie in files by subject; [`RULES`] is the whole list.

mod circles;
mod documents;
mod finding;
mod functions;
mod layout;
mod manifests;
mod modules;
mod rust_text;
mod tree;
mod unsafety;
mod words;

use std::path::Path;

use crate::workspace::Outcome;
use finding::Finding;
use tree::Tree;

type Rule = fn(&Tree) -> Vec<Finding>;

/// Every rule of the project.
const RULES: &[Rule] = &[
    layout::line_length,
    layout::file_length,
    layout::white_space,
    layout::header,
    functions::function_length,
    words::leftovers,
    words::machine_paths,
    words::banned_words,
    unsafety::safety_comments,
    unsafety::containment,
    modules::dead_files,
    circles::circles,
    manifests::arrows,
    manifests::testing_in_tests,
    manifests::lints,
    documents::folder_readme_length,
    documents::links,
];

/// Checks every rule over the files that git tracks or would track.
///
/// # Errors
/// One line per finding: `path:line: what is wrong`.
pub fn run(root: &Path) -> Outcome {
    let findings = check(&Tree::of_repository(root)?);
    if findings.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = findings
        .iter()
        .map(|finding| format!("{}:{}: {}", finding.path, finding.line, finding.message))
        .collect();
    Err(format!("{} findings of tidy\n{}", lines.len(), lines.join("\n")))
}

fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings: Vec<Finding> = RULES.iter().flat_map(|rule| rule(tree)).collect();
    findings.sort();
    findings
}
