//! `vellum salvage`: what is sound of a damaged store becomes a new store.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use support::{Folder, fails, ok, run, run_with_input, succeeded, text};

/// A store with two trees. One has a value of 300,000 bytes, and all of this in many leaves.
fn filled(folder: &Folder) -> String {
    let store = folder.name("a.vellum");
    let entries = (0..2000).map(|n| format!(" key {n:04}\n value {n}\n"));
    let long = format!(" long\n {}\n", "l".repeat(300_000));
    let section = |tree: &str, entries: String| {
        format!("VERSION=3\nformat=print\ndatabase={tree}\nHEADER=END\n{entries}DATA=END\n")
    };
    let dump = section("main", entries.chain([long]).collect())
        + &section("other", " k\n v\n".into())
        + &section("empty", String::new());
    let page_size = ["--page-size", "8KiB"];
    let load = [&["load", &store][..], &page_size].concat();
    succeeded(run_with_input(&load, dump.as_bytes()));
    store
}

#[test]
fn a_sound_store_is_copied_whole() {
    let folder = Folder::new();
    let (store, new) = (filled(&folder), folder.name("new.vellum"));
    let before = fs::read(&store).unwrap();
    assert_eq!(text(&["salvage", &store, &new]), format!("{new}: 2002 entries of 3 trees\n"));
    assert!(fs::read(&store).unwrap() == before, "salvage has changed its source");
    assert!(ok(&["dump", &new]) == ok(&["dump", &store]), "salvage lost entries");
    assert!(text(&["check", &new]).contains("sound"));
    // The pages have the same size, so every key has its place.
    assert!(text(&["stat", &new]).contains("8.0 KiB"), "{}", text(&["stat", &new]));
    // It refuses to overwrite, and leaves nothing but the two stores.
    assert!(fails(&["salvage", &store, &new]).contains("exists"));
    assert_eq!(fs::read_dir(folder.path("")).unwrap().count(), 2);
}

/// A damaged page in the place of each leaf and each value, one after the other.
#[test]
fn damage_is_skipped_and_named() {
    let folder = Folder::new();
    let store = filled(&folder);
    let whole = fs::read(&store).unwrap();
    let (mut with_loss, mut at_page) = (0, 4 * 4096);
    while at_page < whole.len() {
        let mut damaged = whole.clone();
        damaged[at_page + 100..at_page + 200].fill(0xa5);
        fs::write(&store, damaged).unwrap();
        let new = folder.name(&format!("new {at_page}"));
        let output = run(&["salvage", &store, &new, "--json"]);
        let said = String::from_utf8(output.stderr).unwrap();
        if fs::exists(&new).unwrap() {
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let saved = report["entries_saved"].as_u64().unwrap();
            let places = report["damaged_places"].as_u64().unwrap();
            assert_eq!(output.status.success(), places == 0, "{said}");
            // An inner node has no entries itself.
            assert!(saved == 2002 || places > 0, "{said}");
            assert!(saved < 2002 || places == 0 || report["entries_without_parent"] != 0, "{said}");
            assert_eq!(said.contains("is damaged"), places > 0, "{said}");
            assert!(places == 0 || said.contains("is complete, without what was in"), "{said}");
            with_loss += u32::from(places > 0);
            ok(&["check", &new]);
            assert_eq!(ok(&["get", &new, "k", "--tree", "other"]).len(), 1);
            fs::remove_file(new).unwrap();
        } else {
            // The catalog is gone, and with it the names of the trees.
            assert_eq!(output.status.code(), Some(1));
            assert!(said.contains("damaged"), "{said}");
        }
        at_page += 8192 * 5;
    }
    assert!(with_loss > 5, "{with_loss}");
    assert_eq!(fs::read_dir(folder.path("")).unwrap().count(), 1, "something was left over");
}

#[test]
fn what_is_no_store_makes_none() {
    let folder = Folder::new();
    let (none, new) = (folder.name("none"), folder.name("new"));
    fails(&["salvage", &none, &new]);
    fs::write(&none, b"no store").unwrap();
    fails(&["salvage", &none, &new]);
    assert_eq!(fs::read_dir(folder.path("")).unwrap().count(), 1);
}

/// A leaf whose checksum is right and whose keys are not in order costs the entries that are not.
#[test]
fn entries_in_disorder_are_skipped_and_named() {
    let folder = Folder::new();
    let (store, new) = (filled(&folder), folder.name("new.vellum"));
    let mut bytes = fs::read(&store).unwrap();
    let first = [b"key 0000".as_slice(), b"value 0"];
    let is_first = |page: &&mut [u8]| {
        page[136 + 12 * 2..].windows(8).any(|part| part == first[0])
            && page[136..].windows(7).any(|part| part == first[1])
    };
    let page = bytes.chunks_mut(8192).skip(2).find(is_first).unwrap();
    // The first two slots, of 12 bytes each, change places.
    page[136..160].rotate_left(12);
    vellum::page::seal(page, &[]);
    fs::write(&store, bytes).unwrap();
    let output = run(&["salvage", &store, &new, "--json"]);
    let said = String::from_utf8(output.stderr).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect(&said);
    assert_eq!(report["entries_saved"], 2001, "{said}");
    assert_eq!(report["damaged_places"], 1, "{said}");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&["check", &new]).contains("sound"));
}

/// The file alone may lack what its log has.
#[test]
fn a_store_with_its_log_is_refused_unless_it_is_asked_for() {
    let folder = Folder::new();
    let (store, new) = (filled(&folder), folder.name("new.vellum"));
    let mut bytes = fs::read(&store).unwrap();
    let sequence =
        |page: usize| u64::from_le_bytes(*bytes[page * 4096 + 72..].first_chunk().unwrap());
    let newest = usize::from(sequence(1) > sequence(0)) * 4096;
    let header = &mut bytes[newest..newest + 4096];
    // It is in use and names a log.
    header[48..52].copy_from_slice(&6_u32.to_le_bytes());
    header[80..88].fill(0);
    assert_ne!(header[128..136], [0; 8]);
    vellum::page::seal(header, &[]);
    fs::write(&store, bytes).unwrap();
    assert!(fails(&["salvage", &store, &new]).contains("--without-log"));
    assert!(!fs::exists(&new).unwrap());
    assert!(text(&["salvage", &store, &new, "--without-log"]).contains("2002 entries of 3 trees"));
}

/// The list of the trees is damaged, and perhaps the root of a tree.
#[test]
fn trees_whose_names_are_lost_are_copied() {
    let folder = Folder::new();
    let store = filled(&folder);
    let main = ok(&["dump", &store, "--tree", "main"]);
    let entries = |dump: Vec<u8>| String::from_utf8(dump).unwrap().replace("=lost-2\n", "=main\n");
    let mut bytes = fs::read(&store).unwrap();
    // The catalog is one leaf, and the first tree has an inner node: kinds 3 and 2.
    for (round, (tree, kind)) in [(1_u32, 3), (2, 2)].into_iter().enumerate() {
        let is_root = |page: &usize| {
            bytes[page + 28..page + 32] == tree.to_le_bytes() && bytes[page + 36] == kind
        };
        let page = (2 * 4096..bytes.len()).step_by(8192).find(is_root).unwrap();
        bytes[page + 100..page + 200].fill(0xa5);
        fs::write(&store, &bytes).unwrap();
        let new = folder.name(&format!("new {round}"));
        let output = run(&["salvage", &store, &new, "--json"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("list of trees: ") && said.contains("is damaged"), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect(&said);
        assert_eq!(
            (&report["entries_saved"], &report["damaged_places"]),
            (&2002.into(), &1.into())
        );
        assert_eq!(report["damaged_places_in_list_of_trees"], 1);
        for (tree, name) in ["lost-2", "lost-3", "lost-4"].into_iter().enumerate() {
            assert!(said.contains(&format!("tree '{name}': its name is lost")), "{said}");
            let tree = &report["trees"][tree];
            assert_eq!((&tree["name"], &tree["name_is_lost"]), (&name.into(), &true.into()));
        }
        assert_eq!(entries(ok(&["dump", &new, "--tree", "lost-2"])), entries(main.clone()));
        assert!(text(&["check", &new]).contains("sound"));
        let dump = ["dump", &store, "--salvage", "--tree", "lost-2"];
        assert_eq!(entries(ok(&dump)), entries(main.clone()));
        assert!(fails(&["dump", &store, "--salvage", "--tree", "main"]).contains("main"));
    }
}

/// The entries below a damaged inner node come back, and the report says how many these are.
#[test]
fn what_is_below_a_damaged_inner_node_is_copied() {
    let folder = Folder::new();
    let (store, new) = (filled(&folder), folder.name("new.vellum"));
    let whole = ok(&["dump", &store]);
    let mut bytes = fs::read(&store).unwrap();
    let is_root =
        |page: &usize| bytes[page + 28..page + 32] == 2_u32.to_le_bytes() && bytes[page + 36] == 2;
    let root = (2 * 4096..bytes.len()).step_by(8192).find(is_root).unwrap();
    bytes[root + 100] ^= 1;
    fs::write(&store, &bytes).unwrap();
    let output = run(&["salvage", &store, &new, "--json"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let counts = "2001 entries saved (2001 of them from nodes without a parent), 1 damaged";
    assert!(said.contains(&format!("tree 'main': {counts}")), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect(&said);
    assert_eq!(report["entries_without_parent"], 2001);
    assert_eq!((&report["entries_saved"], &report["damaged_places"]), (&2002.into(), &1.into()));
    assert!(ok(&["dump", &new]) == whole, "entries are missing");
    assert!(ok(&["dump", &store, "--salvage"]) == whole, "entries are missing in a dump");
}
