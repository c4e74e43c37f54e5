//! The rules for the crates' manifests: dependencies go one way, and each crate has the workspace's
//! lints.

use super::finding::Finding;
use super::tree::{File, Tree};

/// The crates that each crate must not know: arrows go `cli -> engine -> pool -> vm`. Morsels and
/// the store do not know each other; the libraries for C and for Python have both. The harness of
/// the benchmarks knows all of these; experiments and peers know the harness, and the command alone
/// knows the three. The crate `testing` knows no other crate.
const MUST_NOT_KNOW: &[(&str, &[&str])] = &[
    (
        "crates/vm/Cargo.toml",
        &["vellum-pool", "vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS],
    ),
    ("crates/pool/Cargo.toml", &["vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS]),
    (
        "crates/log/Cargo.toml",
        &["vellum-vm", "vellum-pool", "vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS],
    ),
    ("crates/engine/Cargo.toml", &["vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS]),
    (
        "crates/morsel/Cargo.toml",
        &["vellum-pool", "vellum", "vellum-cli", BENCH, EXPERIMENTS, PEERS],
    ),
    (
        "crates/dax/Cargo.toml",
        &["vellum-vm", "vellum-pool", "vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS],
    ),
    ("crates/aquila-core/Cargo.toml", NOT_FOR_BASES),
    (
        "crates/aquila/Cargo.toml",
        &["vellum-vm", "vellum-pool", "vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS],
    ),
    ("crates/interpose/Cargo.toml", NOT_FOR_BASES),
    ("crates/aquila-ring0/Cargo.toml", NOT_FOR_BASES),
    ("crates/capi/Cargo.toml", &["vellum-pool", "vellum-cli", BENCH, EXPERIMENTS, PEERS]),
    (
        "crates/preload/Cargo.toml",
        &["vellum-pool", "vellum", "vellum-cli", BENCH, EXPERIMENTS, PEERS],
    ),
    ("crates/python/Cargo.toml", &["vellum-cli", BENCH, EXPERIMENTS, PEERS]),
    (
        "crates/tensors/Cargo.toml",
        &["vellum-vm", "vellum-pool", "vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS],
    ),
    ("crates/bench/Cargo.toml", &["vellum-cli", EXPERIMENTS, PEERS]),
    ("crates/experiments/Cargo.toml", &["vellum-cli", PEERS]),
    ("crates/bench-peers/Cargo.toml", &["vellum-cli", EXPERIMENTS]),
    (
        "crates/uapi/Cargo.toml",
        &["vellum-vm", "vellum-pool", "vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS],
    ),
    (
        "crates/testing/Cargo.toml",
        &["vellum-vm", "vellum-pool", "vellum", "vellum-cli", MORSEL, BENCH, EXPERIMENTS, PEERS],
    ),
];

/// What the crates beneath a cache of mapped files must not know.
const NOT_FOR_BASES: &[&str] = &[
    "vellum-vm",
    "vellum-pool",
    "vellum",
    "vellum-cli",
    AQUILA,
    MORSEL,
    BENCH,
    EXPERIMENTS,
    PEERS,
];

const AQUILA: &str = "vellum-aquila";
const MORSEL: &str = "vellum-morsel";

const BENCH: &str = "vellum-bench";
const EXPERIMENTS: &str = "vellum-experiments";
const PEERS: &str = "vellum-bench-peers";

/// The crate that only tests may know.
const TESTING: &str = "vellum-testing";
/// The feature that only tests may ask for.
const TESTING_FEATURE: &str = "\"testing\"";
/// The simulator: it is a test, and has planted bugs. Only the command may know it, if a feature
/// asks for it.
const SIMULATOR: &str = "vellum-sim";
const SIMULATOR_MANIFEST: &str = "crates/sim/Cargo.toml";

/// Dependencies go one way.
pub fn arrows(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, forbidden) in MUST_NOT_KNOW {
        let Some(file) = tree.files.iter().find(|file| file.path == *path) else {
            continue;
        };
        for (number, _, name) in dependencies(file) {
            if forbidden.contains(&name) {
                let message = format!("must not depend on {name}: arrows go cli, engine, pool, vm");
                findings.push(Finding::new(path, number, message));
            }
        }
    }
    findings
}

/// Only tests may depend on the crate `testing`, and only tests may enable a feature of that name.
/// The simulator is a test, and nothing that is built without being asked for may have it.
pub fn testing_in_tests(tree: &Tree) -> Vec<Finding> {
    let mut findings = simulator_in_builds(tree);
    for file in tree.files.iter().filter(|file| is_manifest(file)) {
        if file.path == SIMULATOR_MANIFEST {
            continue;
        }
        for (number, kind, name) in dependencies(file) {
            let line = file.lines().nth(number - 1).map_or("", |(_, line)| line);
            let is_for_tests = name == TESTING || line.contains(TESTING_FEATURE);
            if is_for_tests && kind != "dev-dependencies" {
                let message = "this is for tests only: move it to [dev-dependencies]";
                findings.push(Finding::new(&file.path, number, message));
            }
        }
    }
    findings
}

/// Where a build has the simulator without being asked for it.
fn simulator_in_builds(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| is_manifest(file)) {
        for (number, kind, name) in dependencies(file) {
            let line = file.lines().nth(number - 1).map_or("", |(_, line)| line);
            let is_asked_for =
                line.contains("optional = true") && file.path.ends_with("cli/Cargo.toml");
            if name == SIMULATOR && kind == "dependencies" && !is_asked_for {
                let message = "the simulator has planted bugs: only the command may have it, as an \
                               optional dependency";
                findings.push(Finding::new(&file.path, number, message));
            }
        }
        let default = file
            .lines()
            .find(|(_, line)| line.starts_with("default = [") && line.contains("\"sim\""));
        if let Some((number, _)) = default {
            let message = "the simulator has planted bugs: no build has it by default";
            findings.push(Finding::new(&file.path, number, message));
        }
    }
    let workspace = tree.files.iter().find(|file| file.path == "Cargo.toml");
    for (number, line) in workspace.into_iter().flat_map(File::lines) {
        let is_member = line.contains("\"crates/sim\"") && !line.contains("path =");
        if is_member {
            let message = "the simulator is no default member: programs that are built with it \
                           would have planted bugs";
            findings.push(Finding::new("Cargo.toml", number, message));
        }
    }
    findings
}

fn is_manifest(file: &File) -> bool {
    file.path.starts_with("crates/") && file.path.ends_with("/Cargo.toml")
}

/// The dependencies of every kind: line, kind and name.
fn dependencies(file: &File) -> Vec<(usize, &str, &str)> {
    let mut names = Vec::new();
    let mut inside = None;
    for (number, line) in file.lines() {
        let line = line.trim();
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            inside = Some(section).filter(|section| section.ends_with("dependencies"));
            // `[dependencies.name]` is a table of its own.
            if let Some((kind, name)) = section.rsplit_once('.')
                && kind.ends_with("dependencies")
            {
                names.push((number, kind, name));
            }
        } else if let Some(kind) = inside
            && !line.starts_with('#')
        {
            let end = line.find(['.', '=', ' ']).unwrap_or(line.len());
            names.push((number, kind, line[..end].trim_matches('"')));
        }
    }
    names
}

/// Every crate takes the lints of the workspace.
pub fn lints(tree: &Tree) -> Vec<Finding> {
    tree.files
        .iter()
        .filter(|file| is_manifest(file))
        .filter(|file| !file.text.contains("[lints]\nworkspace = true\n"))
        .map(|file| Finding::new(&file.path, 0, "no '[lints] workspace = true'"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_the_wrong_way_are_found() {
        let lines = |text: &str| -> Vec<usize> {
            let tree = Tree::of(&[("crates/pool/Cargo.toml", text)]);
            arrows(&tree).iter().map(|finding| finding.line).collect()
        };
        assert!(lines("[dependencies]\nvellum-vm.workspace = true\nlibc = \"1\"\n").is_empty());
        assert_eq!(lines("[dependencies]\nvellum.workspace = true\n"), [2]);
        assert_eq!(lines("[dev-dependencies]\nvellum = { path = \"../engine\" }\n"), [2]);
        assert_eq!(lines("[dependencies.vellum]\nworkspace = true\n"), [1]);
        assert!(lines("[package]\nvellum = 1\n").is_empty());
    }

    #[test]
    fn test_helpers_outside_of_tests_are_found() {
        let lines = |text: &str| -> Vec<usize> {
            let tree = Tree::of(&[("crates/x/Cargo.toml", text)]);
            testing_in_tests(&tree).iter().map(|finding| finding.line).collect()
        };
        assert!(lines("[dev-dependencies]\nvellum-testing.workspace = true\n").is_empty());
        assert!(lines("[dev-dependencies.vellum-testing]\nworkspace = true\n").is_empty());
        assert_eq!(lines("[dependencies]\nlibc = \"1\"\nvellum-testing.workspace = true\n"), [3]);
        assert_eq!(lines("[dependencies.vellum-testing]\nworkspace = true\n"), [1]);
        let feature = "vellum-pool = { workspace = true, features = [\"testing\"] }";
        assert!(lines(&format!("[dev-dependencies]\n{feature}\n")).is_empty());
        assert_eq!(lines(&format!("[dependencies]\n{feature}\n")), [2]);
    }

    #[test]
    fn a_simulator_in_builds_is_found() {
        let lines = |path: &str, text: &str| -> Vec<usize> {
            let tree = Tree::of(&[(path, text)]);
            testing_in_tests(&tree).iter().map(|finding| finding.line).collect()
        };
        let (cli, other) = ("crates/cli/Cargo.toml", "crates/x/Cargo.toml");
        let optional = "[dependencies]\nvellum-sim = { workspace = true, optional = true }\n";
        assert!(lines(cli, optional).is_empty());
        assert_eq!(lines(other, optional), [2]);
        assert_eq!(lines(cli, "[dependencies]\nvellum-sim.workspace = true\n"), [2]);
        assert_eq!(lines(cli, "[features]\ndefault = [\"sim\"]\n"), [2]);
        let testing = "[dependencies]\nvellum-testing.workspace = true\n";
        assert!(lines(SIMULATOR_MANIFEST, testing).is_empty());
        assert_eq!(lines("Cargo.toml", "default-members = [\n\"crates/sim\",\n]\n"), [2]);
        let path = "vellum-sim = { path = \"crates/sim\" }\n";
        assert!(lines("Cargo.toml", path).is_empty());
    }

    #[test]
    fn missing_lints_are_found() {
        let found = |text: &str| lints(&Tree::of(&[("crates/x/Cargo.toml", text)])).len();
        assert_eq!(found("[package]\nname = \"x\"\n"), 1);
        assert_eq!(found("[lints]\nworkspace = true\n"), 0);
    }
}
