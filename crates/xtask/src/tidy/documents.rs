//! Documents: the length of a folder's README, and links.

use super::finding::Finding;
use super::tree::{File, Tree};

/// Lines of a folder's README.
const README_LINES: usize = 120;

/// A folder's README says what the part is for, what it promises and what it must not know, in 120
/// lines.
pub fn folder_readme_length(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| file.path.ends_with("/README.md")) {
        let lines = file.text.lines().count();
        if lines > README_LINES {
            let message = format!("{lines} lines; a folder's README has at most {README_LINES}");
            findings.push(Finding::new(&file.path, 0, message));
        }
    }
    findings
}

/// Every relative link in a document leads to a file or folder of the repository.
pub fn links(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| file.is_markdown()) {
        for (number, target) in targets(file) {
            let place = target.split('#').next().unwrap_or_default();
            match resolve(&file.path, place) {
                Some(path) if tree.exists(&path) => {}
                _ => {
                    let message = format!("the link to '{target}' leads nowhere");
                    findings.push(Finding::new(&file.path, number, message));
                }
            }
        }
    }
    findings
}

/// Targets of inline links outside code, web addresses left out, with their lines.
fn targets(file: &File) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (number, line) in file.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        // Text between back quotes is code.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
        for rest in prose.split("](").skip(1) {
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            let outside = target.contains("://") || target.starts_with("mailto:");
            if !outside && !target.starts_with('#') {
                found.push((number, target.to_string()));
            }
        }
    }
    found
}

/// The path in the repository of `target`, relative to the document `from`; `None` if it leaves the
/// repository.
fn resolve(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_readmes_are_found() {
        let found = |lines| {
            let text = "a\n".repeat(lines);
            folder_readme_length(&Tree::of(&[("crates/x/README.md", &text)])).len()
        };
        assert_eq!((found(120), found(121)), (0, 1));
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let text = "[a](testing.md) [b](../README.md#top) [c](https://x/y) [d](#here)\n\
                    [e](missing.md)\n`[f](code.md)`\n```\n[g](code.md)\n```\n\
                    [h](../../outside.md) [i](../docs) [j](../docs/)\n";
        let tree = Tree::of(&[("README.md", ""), ("docs/testing.md", ""), ("docs/a.md", text)]);
        let lines: Vec<usize> = links(&tree).iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [2, 7]);
    }
}
