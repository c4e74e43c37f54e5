//! The probe's two outputs.

mod support;

use support::{Folder, text};

#[test]
fn facilities_choice_and_costs_are_shown() {
    let folder = Folder::new();
    let probe = text(&["probe", "--pages", "128", "--rounds", "2", "--dir", &folder.name("")]);
    for part in
        ["kernel ", "memory ", "files ", "backend ", "morsels  memfd: ", "io_uring", "madvise"]
    {
        assert!(probe.contains(part), "{part}: {probe}");
    }
    let rows = probe.lines().skip_while(|line| !line.starts_with("nanoseconds"));
    assert!(rows.count() >= 4, "{probe}");
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 0);
}

#[test]
fn json_has_matching_brackets_and_the_same_content() {
    let json = text(&["probe", "--json", "--pages", "128", "--rounds", "2"]);
    for name in ["kernel", "memory", "files", "backend", "morsels", "facilities", "costs"] {
        assert!(json.contains(&format!("\n  \"{name}\": ")), "{name}: {json}");
    }
    for (open, close) in [('{', '}'), ('[', ']')] {
        let count = |bracket| json.matches(bracket).count();
        assert_eq!(count(open), count(close), "{json}");
    }
}

#[test]
fn a_directory_that_is_not_there_is_said_in_its_line() {
    let folder = Folder::new();
    let name = folder.name("none");
    let probe = text(&["probe", "--pages", "64", "--rounds", "1", "--dir", &name]);
    let line = probe.lines().find(|line| line.starts_with("files ")).unwrap();
    assert!(line.contains("none") && !line.contains("O_DIRECT"), "{line}");
}
