//! Dependencies between the files of a crate form no circles.
//!
//! An arrow leads from a file to each file whose names it uses. Files that arrows join in a circle
//! cannot be read, tested or replaced one without the other.

use std::collections::{BTreeMap, BTreeSet};

use super::finding::Finding;
use super::rust_text::find_words;
use super::tree::{File, Tree};

/// No circles.
pub fn circles(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (folder, sources) in crates(tree) {
        let arrows = Arrows::of(&folder, &sources);
        for circle in arrows.circles() {
            let path = format!("{folder}/{}", circle[0]);
            let message = format!("arrows in a circle: {}", arrows.inside(&circle));
            findings.push(Finding::new(&path, 0, message));
        }
    }
    findings
}

/// The sources of each crate, by the folder `crates/NAME/src`.
fn crates(tree: &Tree) -> BTreeMap<String, Vec<&File>> {
    let mut crates: BTreeMap<String, Vec<&File>> = BTreeMap::new();
    for file in tree.rust_files() {
        let parts: Vec<&str> = file.path.split('/').take(4).collect();
        if let ["crates", name, "src", _] = parts[..] {
            crates.entry(format!("crates/{name}/src")).or_default().push(file);
        }
    }
    crates
}

/// The path of a module inside its crate; the crate itself is empty.
type Module = Vec<String>;

/// A path in the text: its words, and the name that it gets.
#[derive(Debug, PartialEq, Eq)]
struct Written {
    words: Vec<String>,
    name: String,
    /// Whether it is a re-export.
    is_public: bool,
}

/// The facts about one file.
struct Source {
    file: String,
    written: Vec<Written>,
}

/// The modules of a crate, and the modules that they name.
struct Arrows(BTreeMap<Module, Source>);

impl Arrows {
    fn of(folder: &str, sources: &[&File]) -> Self {
        let mut modules = BTreeMap::new();
        for source in sources {
            let file = source.path[folder.len() + 1..].to_owned();
            // Names in tests do not count.
            if file.starts_with("bin/") || file.ends_with("tests.rs") || file.contains("/tests/") {
                continue;
            }
            let code = source.rust().code;
            let code = code.split("\nmod tests {").next().unwrap_or(&code);
            modules.insert(module(&file), Source { written: written(code), file });
        }
        Self(modules)
    }

    /// The circles of arrows: files in their order, for each circle.
    fn circles(&self) -> Vec<Vec<String>> {
        let arrows: BTreeMap<&Module, BTreeSet<&Module>> =
            self.0.keys().map(|module| (module, self.from(module))).collect();
        let reached: BTreeMap<&Module, BTreeSet<&Module>> =
            arrows.keys().map(|module| (*module, reached_from(module, &arrows))).collect();
        let mut circles = BTreeSet::new();
        for (module, others) in &reached {
            let back = others.iter().filter(|other| reached[*other].contains(module));
            let circle: BTreeSet<String> = back.map(|other| self.0[*other].file.clone()).collect();
            if circle.len() > 1 {
                circles.insert(circle.into_iter().collect());
            }
        }
        circles.into_iter().collect()
    }

    /// The modules whose names one uses.
    fn from(&self, module: &Module) -> BTreeSet<&Module> {
        // A module does not use the names that it re-exports.
        let written = self.0[module].written.iter().filter(|path| !path.is_public);
        let mut modules: BTreeSet<&Module> =
            written.filter_map(|path| self.resolve(module, &path.words, 0)).collect();
        modules.remove(module);
        modules
    }

    /// The arrows between some files, each with the names that make it.
    fn inside(&self, files: &[String]) -> String {
        let mut arrows: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
        for (module, source) in self.0.iter().filter(|(_, source)| files.contains(&source.file)) {
            for path in source.written.iter().filter(|path| !path.is_public) {
                let Some(target) = self.resolve(module, &path.words, 0) else { continue };
                let target = &self.0[target].file;
                if *target != source.file && files.contains(target) {
                    let name = path.words.last().map_or("", String::as_str);
                    arrows.entry((&source.file, target)).or_default().insert(name);
                }
            }
        }
        let arrow = |((from, to), names): (&(&str, &str), &BTreeSet<&str>)| {
            let names: Vec<&str> = names.iter().copied().collect();
            format!("\n    {from} -> {to}: {}", names.join(", "))
        };
        arrows.iter().map(arrow).collect()
    }

    /// The module to which a path in another module refers.
    fn resolve(&self, from: &Module, words: &[String], depth: usize) -> Option<&Module> {
        let mut module = from.clone();
        let mut rest = words;
        match words.first()?.as_str() {
            "crate" => module.clear(),
            "self" => {}
            "super" => drop(module.pop()),
            _ => {
                module.push(words[0].clone());
                self.0.contains_key(&module).then_some(())?;
            }
        }
        rest = &rest[1..];
        while let Some((word, further)) = rest.split_first() {
            match word.as_str() {
                "super" => drop(module.pop()),
                _ => {
                    module.push(word.clone());
                    if !self.0.contains_key(&module) {
                        module.pop();
                        break;
                    }
                }
            }
            rest = further;
        }
        let (found, source) = self.0.get_key_value(&module)?;
        let Some(name) = rest.first() else { return Some(found) };
        // A name that the module re-exports, as `lib.rs` does.
        let hands_on = |path: &&Written| path.is_public && path.name == *name;
        match source.written.iter().find(hands_on) {
            Some(path) if depth < 8 => self.resolve(found, &path.words, depth + 1).or(Some(found)),
            _ => Some(found),
        }
    }
}

fn reached_from<'a>(
    start: &'a Module,
    arrows: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(module) = open.pop() {
        for other in &arrows[module] {
            if reached.insert(*other) {
                open.push(other);
            }
        }
    }
    reached
}

/// The module that a file below `src/` is.
fn module(file: &str) -> Module {
    let path = file.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    match path {
        "lib" | "main" => Vec::new(),
        _ => path.split('/').map(str::to_owned).collect(),
    }
}

/// All paths of more than one word in a file's code: those of `use`, and those in between.
fn written(code: &str) -> Vec<Written> {
    let mut paths = Vec::new();
    let mut between = String::new();
    let mut at = 0;
    for start in find_words(code, "use") {
        if start < at {
            continue;
        }
        between.push_str(&code[at..start]);
        let end = code[start..].find(';').map_or(code.len(), |length| start + length);
        let is_public = code[..start].trim_end().ends_with("pub")
            || code[..start].trim_end().ends_with("pub(crate)")
            || code[..start].trim_end().ends_with("pub(super)");
        let tree: String =
            code[start + "use".len()..end].split_whitespace().collect::<Vec<_>>().join(" ");
        branches(&[], &tree, is_public, &mut paths);
        at = end;
    }
    between.push_str(&code[at..]);
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    for text in between.split(|letter| !is_part(letter)).filter(|text| text.contains("::")) {
        let words: Vec<String> = text.split("::").map(str::to_owned).collect();
        paths.push(Written { name: String::new(), words, is_public: false });
    }
    paths
}

/// The paths of a `use` tree such as `a::{b, c::{d as e, self}}`.
fn branches(above: &[String], tree: &str, is_public: bool, paths: &mut Vec<Written>) {
    let mut words = above.to_vec();
    let tree = tree.trim();
    if let Some(open) = tree.find('{') {
        let head = tree[..open].split("::").map(str::trim).filter(|word| !word.is_empty());
        words.extend(head.map(str::to_owned));
        let inside = tree[open + 1..].strip_suffix('}').unwrap_or(&tree[open + 1..]);
        let (mut depth, mut begin) = (0, 0);
        for (at, letter) in inside.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    branches(&words, &inside[begin..at], is_public, paths);
                    begin = at + 1;
                }
                _ => {}
            }
        }
        branches(&words, &inside[begin..], is_public, paths);
        return;
    }
    let (path, name) =
        tree.split_once(" as ").map_or((tree, None), |(path, name)| (path, Some(name)));
    let own = path.split("::").map(str::trim).filter(|word| !word.is_empty() && *word != "self");
    let before = words.len();
    words.extend(own.map(str::to_owned));
    if path.trim() == "self" || words.len() > before {
        let last = words.last().cloned().unwrap_or_default();
        let name = name.map_or(last, |name| name.trim().to_owned());
        paths.push(Written { words, name, is_public });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let paths: Vec<String> = files.iter().map(|(f, _)| format!("crates/x/src/{f}")).collect();
        let entries: Vec<(&str, &str)> =
            paths.iter().zip(files).map(|(path, (_, text))| (path.as_str(), *text)).collect();
        let tree = Tree::of(&entries);
        let sources: Vec<&File> = tree.rust_files().collect();
        Arrows::of("crates/x/src", &sources).circles()
    }

    #[test]
    fn files_that_use_each_other_are_found() {
        let circles = circles_of(&[
            ("lib.rs", "mod a;\nmod b;\npub use b::B;\n"),
            ("a.rs", "use crate::B;\n"),
            ("b.rs", "pub struct B;\nfn f() { crate::a::g() }\n"),
            ("c.rs", "use crate::{a::x, b::{self, y as z}};\n"),
        ]);
        assert_eq!(circles, [["a.rs", "b.rs"]]);
    }

    #[test]
    fn a_parent_and_its_child_are_found() {
        let parent = "mod child;\nuse child::One;\npub struct Two;\n";
        let circles = circles_of(&[("p/mod.rs", parent), ("p/child.rs", "use super::Two;\n")]);
        assert_eq!(circles, [["p/child.rs", "p/mod.rs"]]);
        let circles = circles_of(&[("p/mod.rs", parent), ("p/child.rs", "use std::fmt;\n")]);
        assert!(circles.is_empty());
    }

    #[test]
    fn names_in_tests_do_not_count() {
        let text = "pub struct A;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\n";
        let circles = circles_of(&[("a.rs", text), ("b.rs", "use crate::a::A;\npub struct B;\n")]);
        assert!(circles.is_empty());
    }

    #[test]
    fn a_circle_is_a_finding() {
        let tree = Tree::of(&[
            ("crates/x/src/a.rs", "use crate::b::B;\n"),
            ("crates/x/src/b.rs", "use crate::a::A;\n"),
        ]);
        let found = circles(&tree);
        assert_eq!(found.len(), 1);
        assert!(found[0].message.starts_with("arrows in a circle: "), "{found:?}");
    }
}
