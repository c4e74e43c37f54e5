//! Every Rust file of a crate is a part of it.

use std::collections::BTreeSet;

use super::finding::Finding;
use super::rust_text::find_words;
use super::tree::{File, Tree};

/// No file lies under `crates/*/src` without a `mod` declaration that leads to it.
pub fn dead_files(tree: &Tree) -> Vec<Finding> {
    let sources: Vec<&File> = tree.rust_files().filter(|file| is_source(&file.path)).collect();
    let mut reached = BTreeSet::new();
    let mut open: Vec<&File> = sources.iter().copied().filter(|file| is_root(&file.path)).collect();
    while let Some(file) = open.pop() {
        if !reached.insert(file.path.as_str()) {
            continue;
        }
        for path in declared(file) {
            open.extend(sources.iter().copied().filter(|source| source.path == path));
        }
    }
    sources
        .iter()
        .filter(|file| !reached.contains(file.path.as_str()))
        .map(|file| Finding::new(&file.path, 0, "no 'mod' declaration leads to this file"))
        .collect()
}

fn is_source(path: &str) -> bool {
    path.starts_with("crates/") && path.split('/').nth(2) == Some("src")
}

/// The roots that cargo compiles: `src/lib.rs`, `src/main.rs`, `src/bin/*.rs`.
fn is_root(path: &str) -> bool {
    let inside: Vec<&str> = path.split('/').skip(3).collect();
    matches!(inside[..], ["lib.rs" | "main.rs"] | ["bin", _] | ["bin", _, "main.rs"])
}

/// The paths to which the file's `mod name;` declarations may refer.
fn declared(file: &File) -> Vec<String> {
    let (folder, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
    let inner = if matches!(name, "mod.rs" | "lib.rs" | "main.rs") {
        folder.to_string()
    } else {
        file.path.trim_end_matches(".rs").to_string()
    };
    let code = file.rust().code;
    let mut paths = Vec::new();
    for start in find_words(&code, "mod") {
        let rest = code[start + "mod".len()..].trim_start();
        let Some((module, _)) = rest.split_once(';') else {
            continue;
        };
        if module.chars().all(|letter| letter.is_alphanumeric() || letter == '_') {
            paths.push(format!("{inner}/{module}.rs"));
            paths.push(format!("{inner}/{module}/mod.rs"));
        }
    }
    paths.extend(attributed(&file.text).map(|path| format!("{folder}/{path}")));
    paths
}

/// The values of `#[path = "..."]` attributes.
fn attributed(text: &str) -> impl Iterator<Item = &str> {
    text.split("#[path = \"").skip(1).filter_map(|rest| rest.split_once('"').map(|parts| parts.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_files_are_found() {
        let tree = Tree::of(&[
            ("crates/x/src/lib.rs", "pub mod a;\n// mod dead;\nmod inline { fn f() {} }\n"),
            ("crates/x/src/a.rs", "pub(crate) mod b;\n#[path = \"odd.rs\"]\nmod c;\n"),
            ("crates/x/src/a/b/mod.rs", "mod d;\n"),
            ("crates/x/src/a/b/d.rs", ""),
            ("crates/x/src/odd.rs", ""),
            ("crates/x/src/bin/tool.rs", ""),
            ("crates/x/src/dead.rs", ""),
            ("crates/x/tests/free.rs", ""),
        ]);
        let found: Vec<String> = dead_files(&tree).into_iter().map(|found| found.path).collect();
        assert_eq!(found, ["crates/x/src/dead.rs"]);
    }
}
