//! Output for programs, and the manual pages and completions.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Folder, fails, make_files, ok, text};

fn parsed(arguments: &[&str]) -> Value {
    serde_json::from_slice(&ok(arguments)).unwrap()
}

#[test]
fn the_sizes_of_a_store_are_json() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "value", "--tree", "a"]);
    ok(&["put", &store, "--hex", "00ff", "\u{fc}", "--tree", "a"]);
    ok(&["put", &store, "x", "y", "--tree", "b"]);
    assert_eq!(parsed(&["trees", &store, "--json"]), json!(["a", "b"]));
    let quick = parsed(&["stat", &store, "--json"]);
    assert_eq!((&quick["trees"], &quick["tree_page_bytes"]), (&json!(["a", "b"]), &json!(4096)));
    let full = parsed(&["stat", &store, "--json", "--full"]);
    assert_eq!((&full["trees"][0]["tree"], &full["trees"][0]["entries"]), (&json!("a"), &json!(2)));
    assert_eq!(full["used_bytes"], quick["used_bytes"]);
    let check = parsed(&["check", &store, "--json"]);
    assert_eq!((&check["sound"], &check["damage"]), (&json!(true), &json!([])));
    let scan = text(&["scan", &store, "--json", "--tree", "a"]);
    let lines: Vec<Value> = scan.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let entries =
        [json!({"key_hex": "00ff", "value": "\u{fc}"}), json!({"key": "k", "value": "value"})];
    assert_eq!(lines, entries);
    let scan = parsed(&["scan", &store, "--json", "--hex", "--keys", "--tree", "b"]);
    assert_eq!(scan, json!({"key_hex": "78"}));
}

#[test]
fn imported_files_are_json() {
    let folder = Folder::new();
    let (store, files) = (folder.name("a.vellum"), folder.name("files"));
    make_files(files.as_ref());
    ok(&["import", &store, &files]);
    let link = parsed(&["scan", &store, "folder1/link", "--json"]);
    assert_eq!(link["file"]["target"], json!("inner/file1"));
    let file = parsed(&["scan", &store, "large", "--json"]);
    assert_eq!((&file["key"], &file["file"]["bytes"]), (&json!("large"), &json!(2_500_000)));
}

#[test]
fn damage_is_json_with_exit_code_one() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", &"v".repeat(100_000)]);
    let mut bytes = std::fs::read(&store).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&store, bytes).unwrap();
    let error = fails(&["check", &store, "--json"]);
    assert!(error.contains("damaged"), "{error}");
    let output = support::run(&["check", &store, "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["sound"], json!(false));
}

#[test]
fn without_a_daemon_the_output_is_json_too() {
    let folder = Folder::new();
    let stat = parsed(&["morsel", "--socket", &folder.name("none"), "stat", "--json"]);
    assert_eq!(stat["daemon"], Value::Null);
    assert_eq!(stat["backends"].as_array().unwrap().len(), 2);
}

#[test]
fn stat_reads_the_trees_only_with_full() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v", "--tree", "sometree"]);
    assert!(!text(&["stat", &store]).contains("sometree"));
    assert!(text(&["stat", &store, "--full"]).contains("\nsometree  "));
    let output = support::run(&["stat", &store, "--full"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("stat: ") && said.contains(" of "), "{said}");
}

#[test]
fn manual_pages_and_completions_come_from_the_same_definitions() {
    let folder = Folder::new();
    ok(&["write-manuals", &folder.name("share")]);
    let read = |name: &str| std::fs::read_to_string(folder.path("share").join(name)).unwrap();
    let page = read("man/man1/vellum-put.1");
    assert!(page.contains("Store a value under a key") && page.contains("wait"), "{page}");
    assert!(read("man/man1/vellum.1").contains("export"));
    assert!(!folder.path("share/man/man1/vellum-write-manuals.1").exists());
    for name in [
        "bash-completion/completions/vellum",
        "zsh/site-functions/_vellum",
        "fish/vendor_completions.d/vellum.fish",
    ] {
        assert!(read(name).contains("export"), "{name}");
    }
}
