//! The everyday commands on a store file: put, get, rm, scan, trees, stat, check.

mod support;

use support::{Folder, fails, noise, ok, run, run_with_input, succeeded, text};

#[test]
fn a_value_comes_back_byte_for_byte() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "greeting", "hello"]);
    assert_eq!(ok(&["get", &store, "greeting"]), b"hello");
    ok(&["put", &store, "greeting", ""]);
    assert_eq!(ok(&["get", &store, "greeting"]), b"");
    let error = fails(&["get", &store, "nobody"]);
    assert!(error.contains("there is no 'nobody'"), "{error}");
}

#[test]
fn values_come_from_files_and_standard_input() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    for size in [1, 4095, 4096, 70_000, 3_000_000] {
        let bytes = noise(size, size as u64);
        std::fs::write(folder.path("value"), &bytes).unwrap();
        ok(&["put", &store, "file", "--file", &folder.name("value")]);
        assert!(ok(&["get", &store, "file"]) == bytes, "{size} bytes from a file");
        succeeded(run_with_input(&["put", &store, "input"], &bytes));
        assert!(ok(&["get", &store, "input"]) == bytes, "{size} bytes from standard input");
    }
}

#[test]
fn binary_keys_are_given_in_hexadecimal() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "--hex", "00ff0a", "binary"]);
    assert_eq!(ok(&["get", &store, "--hex", "00FF0A"]), b"binary");
    assert_eq!(text(&["scan", &store]), "\\00\\ff\\0a\tbinary\n");
    assert_eq!(text(&["scan", &store, "--hex", "--keys", "00ff"]), "00ff0a\n");
    ok(&["rm", &store, "--hex", "00ff0a"]);
    assert_eq!(text(&["scan", &store]), "");
    let error = fails(&["get", &store, "--hex", "0"]);
    assert!(error.contains("not hexadecimal"), "{error}");
}

#[test]
fn scans_go_both_ways_and_keep_to_prefix_and_limit() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    for key in ["a", "b", "b1", "b2", "b3", "c"] {
        ok(&["put", &store, key, &format!("value of {key}")]);
    }
    let keys = |arguments: &[&str]| {
        let mut all = vec!["scan", &store, "--keys"];
        all.extend(arguments);
        text(&all).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(keys(&[]), ["a", "b", "b1", "b2", "b3", "c"]);
    assert_eq!(keys(&["--reverse"]), ["c", "b3", "b2", "b1", "b", "a"]);
    assert_eq!(keys(&["b"]), ["b", "b1", "b2", "b3"]);
    assert_eq!(keys(&["b", "--reverse", "--limit", "2"]), ["b3", "b2"]);
    assert_eq!(keys(&["c", "--reverse"]), ["c"]);
    assert!(keys(&["d", "--reverse"]).is_empty());
    assert!(keys(&["B"]).is_empty());
    assert!(keys(&["", "--reverse", "--limit", "0"]).is_empty());
    assert_eq!(text(&["scan", &store, "b1"]), "b1\tvalue of b1\n");
}

#[test]
fn long_values_are_cut_unless_all_is_wanted() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "long", &"x".repeat(100_000)]);
    let cut = text(&["scan", &store]);
    assert!(cut.ends_with("x... (100000 bytes)\n") && cut.len() < 120, "{cut}");
    assert_eq!(text(&["scan", &store, "--full"]).len(), "long\t\n".len() + 100_000);
}

#[test]
fn trees_are_kept_apart() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "one", "--tree", "first"]);
    ok(&["put", &store, "k", "two", "--tree", "second"]);
    assert_eq!(text(&["trees", &store]), "first\nsecond\n");
    assert_eq!(ok(&["get", &store, "k", "--tree", "second"]), b"two");
    let error = fails(&["get", &store, "k"]);
    assert!(error.contains("first, second"), "{error}");
    ok(&["rm", &store, "--tree", "first", "--all"]);
    assert_eq!(text(&["trees", &store]), "second\n");
    // The only tree need not be named.
    assert_eq!(ok(&["get", &store, "k"]), b"two");
    let error = fails(&["rm", &store, "gone"]);
    assert!(error.contains("there is no 'gone'"), "{error}");
}

#[test]
fn stat_and_check_describe_the_store() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v", "--page-size", "16KiB"]);
    let stat = text(&["stat", &store]);
    assert!(stat.contains("page size of trees") && stat.contains("16.0 KiB"), "{stat}");
    assert!(stat.lines().any(|line| line.starts_with("main  ")), "{stat}");
    let check = text(&["check", &store]);
    assert!(check.contains("sound"), "{check}");
}

#[test]
fn a_pool_and_a_backend_can_be_chosen() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v", "--pool", "1MiB", "--backend", "madvise"]);
    assert_eq!(ok(&["get", &store, "k", "--pool", "512KiB"]), b"v");
    let error = fails(&["get", &store, "k", "--pool", "4KiB"]);
    assert!(error.contains("pool"), "{error}");
}

#[test]
fn wrong_usage_is_exit_code_two() {
    for arguments in [
        &["get"][..],
        &["put", "s", "k", "v", "--pool", "many"],
        &["put", "s", "k", "v", "--page-size", "5000"],
        &["rm", "s"],
        &["rm", "s", "--all"],
        &["no-such-command"],
        &["demo", "--threads", "0"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn every_command_explains_itself() {
    let help = text(&["--help"]);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = commands
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(commands.len() >= 12, "{help}");
    for command in commands.iter().filter(|command| **command != "help") {
        let help = text(&[*command, "--help"]);
        assert!(help.contains("Example"), "{command}: {help}");
        assert!(help.contains(&format!("vellum {command}")), "{command}: {help}");
    }
}
