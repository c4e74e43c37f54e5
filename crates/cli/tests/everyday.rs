//! The everyday commands on a store file: put, get, rm, scan, trees, stat, check.

mod support;

use std::process::Stdio;

use support::{Folder, command, fails, noise, ok, run, run_with_input, succeeded, text};

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
fn scans_go_both_ways_within_prefix_and_limit() {
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
fn long_values_are_cut_unless_full_is_given() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "long", &"x".repeat(100_000)]);
    let cut = text(&["scan", &store]);
    assert!(cut.ends_with("x... (100000 bytes)\n") && cut.len() < 120, "{cut}");
    assert_eq!(text(&["scan", &store, "--full"]).len(), "long\t\n".len() + 100_000);
}

#[test]
fn trees_are_independent() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "one", "--tree", "first"]);
    ok(&["put", &store, "k", "two", "--tree", "second"]);
    assert_eq!(text(&["trees", &store]), "first\nsecond\n");
    assert_eq!(ok(&["get", &store, "k", "--tree", "second"]), b"two");
    let error = fails(&["rename", &store, "second", "first"]);
    assert!(error.contains("has a tree named \"first\" already"), "{error}");
    let error = fails(&["rename", &store, "third", "fourth"]);
    assert!(error.contains("there is no tree 'third'; choose"), "{error}");
    ok(&["rename", &store, "second", "third"]);
    assert_eq!(ok(&["get", &store, "k", "--tree", "third"]), b"two");
    ok(&["rename", &store, "third", "second"]);
    let error = fails(&["get", &store, "k"]);
    assert!(error.contains("first, second"), "{error}");
    ok(&["rm", &store, "--tree", "first", "--all"]);
    assert_eq!(text(&["trees", &store]), "second\n");
    // The only tree of a store needs no name.
    assert_eq!(ok(&["get", &store, "k"]), b"two");
    let error = fails(&["rm", &store, "gone"]);
    assert!(error.contains("there is no 'gone'"), "{error}");
}

#[test]
fn stat_and_check_describe_the_store() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v", "--page-size", "16KiB"]);
    let stat = text(&["stat", &store, "--full"]);
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
fn wrong_usage_has_exit_code_two() {
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
fn every_command_has_help() {
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

#[test]
fn commands_that_change_a_store_take_turns() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "first", "v"]);
    let keys: Vec<String> = (0..20).map(|number| format!("k{number:02}")).collect();
    let put = |key: &String| command(&["put", &store, key, "v", "--wait", "300"]).spawn().unwrap();
    let children: Vec<_> = keys.iter().map(put).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let found = text(&["scan", &store, "--keys"]);
    assert_eq!(found.lines().skip(1).collect::<Vec<_>>(), keys);
}

#[test]
fn a_signal_ends_the_wait() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", &"v".repeat(100_000)]);
    ok(&["put", &store, "l", &"v".repeat(100_000)]);
    let mut scan = command(&["scan", &store, "--full"]).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(scan.stdout.as_mut().unwrap(), &mut [0; 1]).unwrap();
    let mut put = command(&["put", &store, "k", "v", "--wait", "1000000"]).spawn().unwrap();
    let status = format!("/proc/{}/status", put.id());
    let catches_term = || {
        let status = std::fs::read_to_string(&status).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << 14 != 0
    };
    while !catches_term() {
        assert!(put.try_wait().unwrap().is_none(), "it does not wait");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let number = put.id().to_string();
    assert!(std::process::Command::new("kill").arg(number).status().unwrap().success());
    assert_eq!(put.wait().unwrap().code(), Some(130));
    drop(scan.stdout.take());
    scan.wait().unwrap();
}

#[test]
fn a_store_that_was_not_closed_is_recovered_by_the_next_command() {
    let folder = Folder::new();
    let commands = [&["get", "greeting"][..], &["dump"], &["put", "other", "value"]];
    for (number, command) in commands.into_iter().enumerate() {
        let (open, store) =
            (folder.path(&format!("open{number}")), folder.name(&number.to_string()));
        let options = vellum::Options::new().pool_bytes(4 << 20).log(true);
        let handle = vellum::Store::create(&open, &options).unwrap();
        let tree = handle.create_tree("main").unwrap();
        tree.insert(b"greeting", b"hello").unwrap();
        handle.sync().unwrap();
        // As if the process had been killed here.
        let log = format!("{store}.log");
        std::fs::copy(&open, &store).unwrap();
        std::fs::create_dir(&log).unwrap();
        for file in std::fs::read_dir(format!("{}.log", open.display())).unwrap() {
            let file = file.unwrap();
            let name = file.file_name().into_string().unwrap();
            if !name.ends_with(".tmp") {
                std::fs::copy(file.path(), format!("{log}/{name}")).unwrap();
            }
        }
        let moved = format!("{store}.moved");
        std::fs::rename(&log, &moved).unwrap();
        let error = fails(&["get", &store, "greeting"]);
        assert!(error.contains("--log-folder") && error.contains(&log), "{error}");

        let (name, rest) = command.split_first().unwrap();
        let output = run(&[&[*name, &store], rest, &["--log-folder", &moved]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.contains("recovered"), "{said}");
        assert_eq!(ok(&["get", &store, "greeting"]), b"hello");
        assert!(text(&["check", &store]).contains("sound"));
        assert_eq!(std::fs::read_dir(&moved).unwrap().count(), 0, "the log is gone");
        handle.close().unwrap();
    }
}
