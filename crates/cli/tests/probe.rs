//! The two formats of the probe's output.

mod support;

use support::{Folder, text};

#[test]
fn facilities_choice_and_costs_are_shown() {
    let folder = Folder::new();
    let probe = text(&["probe", "--pages", "128", "--rounds", "2", "--dir", &folder.name("")]);
    for part in
        ["kernel ", "memory ", "files ", "slots ", "backend ", "morsels  memfd: ", "io_uring can"]
    {
        assert!(probe.contains(part), "{part}: {probe}");
    }
    let rows = probe.lines().skip_while(|line| !line.starts_with("nanoseconds"));
    assert!(rows.count() >= 4, "{probe}");
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 0);
}

#[test]
fn json_has_the_same_content() {
    let json = text(&["probe", "--json", "--pages", "128", "--rounds", "2"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    for name in ["kernel", "memory", "files", "slots", "backend", "morsels", "facilities", "costs"]
    {
        assert!(!json[name].is_null(), "{name}: {json}");
    }
    assert!(json["slots"]["huge_pages"].is_boolean(), "{json}");
    let costs = json["costs"].as_array().unwrap();
    assert!(costs.iter().all(|cost| cost["pages"] == 128 && cost["rounds"] == 2), "{json}");
    assert!(costs[0]["populate_ns"]["median"].as_f64().unwrap() > 0.0, "{json}");
}

#[test]
fn a_missing_directory_is_reported_in_its_line() {
    let folder = Folder::new();
    let name = folder.name("none");
    let probe = text(&["probe", "--pages", "64", "--rounds", "1", "--dir", &name]);
    let line = probe.lines().find(|line| line.starts_with("files ")).unwrap();
    assert!(line.contains("none") && !line.contains("O_DIRECT"), "{line}");
}
