//! Words that do not belong in the repository.
//!
//! The lists consist of halves of words, so that this file passes its own rules.

use super::finding::Finding;
use super::rust_text::{find_words, line_of};
use super::tree::{File, Tree};

/// Marks of unfinished work.
const LEFTOVERS: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

/// Macros for unfinished work.
const LEFTOVER_MACROS: &[&str] = &[concat!("db", "g"), "todo", "unimplemented"];

/// Folders that exist on one machine only.
const MACHINE_PATHS: &[&str] =
    &[concat!("/wo", "rk"), concat!("/tmp/tar", "get"), concat!("/ro", "ot")];

/// Words of advertising, and words for which the project has better ones.
const BANNED: &[&str] = &[
    concat!("bla", "zing"),
    concat!("blaz", "ingly"),
    concat!("seam", "less"),
    concat!("seam", "lessly"),
    concat!("lever", "age"),
    concat!("util", "ize"),
    concat!("revolu", "tionary"),
    concat!("cutting", "-edge"),
    concat!("world", "-class"),
    concat!("state-of", "-the-art"),
    concat!("best-in", "-class"),
    concat!("enterprise", "-grade"),
    concat!("battle", "-tested"),
    concat!("super", "charge"),
    concat!("del", "ve"),
];

/// No unfinished work without an issue.
pub fn leftovers(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| is_written(file)) {
        find(file, &file.text, LEFTOVERS, "is left over", &mut findings);
        if file.is_rust() {
            let code = file.rust().code;
            for name in LEFTOVER_MACROS {
                for at in
                    find_words(&code, name).filter(|at| code[at + name.len()..].starts_with('!'))
                {
                    let message = format!("'{name}!' is left over");
                    findings.push(Finding::new(&file.path, line_of(&code, at), message));
                }
            }
        }
    }
    findings
}

/// No paths that exist on one machine only.
pub fn machine_paths(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| is_written(file)) {
        for path in MACHINE_PATHS {
            // `x/workspace` and `crates/work` are other paths.
            let starts_a_path = |at: &usize| {
                let before = file.text[..*at].chars().next_back();
                !before.is_some_and(|letter| letter.is_alphanumeric() || "_-.}".contains(letter))
            };
            for at in find_words(&file.text, path).filter(starts_a_path) {
                let message = format!("'{path}' is a path of one machine");
                findings.push(Finding::new(&file.path, line_of(&file.text, at), message));
            }
        }
    }
    findings
}

/// Plain words only.
pub fn banned_words(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| is_written(file)) {
        find(
            file,
            &file.text.to_lowercase(),
            BANNED,
            "is on the list of banned words",
            &mut findings,
        );
    }
    findings
}

/// Whether people write the file by hand.
fn is_written(file: &File) -> bool {
    file.path != "Cargo.lock"
}

fn find(file: &File, text: &str, words: &[&str], complaint: &str, findings: &mut Vec<Finding>) {
    for word in words {
        for at in find_words(text, word) {
            let message = format!("'{word}' {complaint}");
            findings.push(Finding::new(&file.path, line_of(text, at), message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(rule: super::super::Rule, path: &str, text: &str) -> Vec<usize> {
        rule(&Tree::of(&[(path, text)])).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn leftovers_are_found() {
        for word in LEFTOVERS {
            assert_eq!(found(leftovers, "README.md", &format!("a\nb {word}: c\n")), [2]);
            assert!(found(leftovers, "README.md", &format!("not{word}")).is_empty());
            assert!(found(leftovers, "Cargo.lock", word).is_empty());
        }
        for name in LEFTOVER_MACROS {
            assert_eq!(found(leftovers, "a.rs", &format!("fn f() {{\n{name}!(1) }}")), [2]);
            assert!(
                found(leftovers, "a.rs", &format!("// {name}!(1)\nlet {name} = 1;")).is_empty()
            );
        }
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        for path in MACHINE_PATHS {
            assert_eq!(found(machine_paths, "a.md", &format!("see\n`{path}/x`")).len(), 1);
        }
        let own = concat!("/wo", "rk");
        assert!(
            found(machine_paths, "a.md", &format!("{own}space x{own}/y frame{own}")).is_empty()
        );
    }

    #[test]
    fn banned_words_are_found() {
        for word in BANNED {
            assert_eq!(found(banned_words, "a.md", &format!("a\n{}", word.to_uppercase())), [2]);
        }
        assert!(found(banned_words, "a.md", "plain words").is_empty());
    }
}
