//! Dump and load: round trips, other programs' dumps, refused input.

mod support;

use std::process::{Command, Stdio};

use support::{Folder, fails, noise, ok, run_with_input, succeeded, text};

/// A store with keys and values of all bytes, in two trees.
fn fill(store: &str) {
    let mut dump = Vec::new();
    for tree in ["binary", "plain"] {
        dump.extend(format!("VERSION=3\nformat=bytevalue\ndatabase={tree}\n").into_bytes());
        dump.extend(b"type=btree\nHEADER=END\n");
        for number in 0..300_usize {
            let key = [&noise(number % 9, number as u64)[..], &number.to_be_bytes()].concat();
            // Values of up to some 90 KB, so that some are blobs.
            for bytes in [key, noise(number * number, number as u64)] {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                dump.extend(format!(" {hex}\n").into_bytes());
            }
        }
        dump.extend(b"DATA=END\n");
    }
    succeeded(run_with_input(&["load", store, "--pool", "4MiB"], &dump));
}

#[test]
fn everything_survives_in_both_formats() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    fill(&store);
    let dump = ok(&["dump", &store]);
    for format in ["bytevalue", "print"] {
        let copy = folder.name(&format!("{format}.vellum"));
        let arguments =
            if format == "print" { vec!["dump", &store, "-p"] } else { vec!["dump", &store] };
        succeeded(run_with_input(&["load", &copy], &ok(&arguments)));
        assert!(ok(&["dump", &copy]) == dump, "{format}");
        ok(&["check", &copy]);
    }
}

#[test]
fn one_tree_can_be_dumped_and_loaded_under_another_name() {
    let folder = Folder::new();
    let (store, file) = (folder.name("a.vellum"), folder.name("dump"));
    ok(&["put", &store, "k", "v", "--tree", "x"]);
    ok(&["put", &store, "k", "w", "--tree", "y"]);
    ok(&["dump", &store, "--tree", "y", "-o", &file]);
    ok(&["load", &store, &file, "--tree", "z"]);
    assert_eq!(ok(&["get", &store, "k", "--tree", "z"]), b"w");
    assert_eq!(text(&["trees", &store]), "x\ny\nz\n");
    let error = fails(&["dump", &store, "-o", &file]);
    assert!(error.contains("creating"), "{error}");
    let error = fails(&["dump", &store, "--tree", "none"]);
    assert!(error.contains("none"), "{error}");
}

#[test]
fn unsorted_entries_and_nonempty_trees_are_loaded_one_by_one() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let head = "VERSION=3\nformat=print\nHEADER=END\n";
    let dump = format!("{head} b\n 1\n c\n 2\n a\n 3\n c\n 4\nDATA=END\n");
    succeeded(run_with_input(&["load", &store], dump.as_bytes()));
    assert_eq!(text(&["scan", &store]), "a\t3\nb\t1\nc\t4\n");
    let dump = format!("{head} b\n 5\n d\n 6\nDATA=END\n");
    succeeded(run_with_input(&["load", &store], dump.as_bytes()));
    assert_eq!(text(&["scan", &store]), "a\t3\nb\t5\nc\t4\nd\t6\n");
}

#[test]
fn a_bad_line_is_named_and_its_tree_is_removed() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let head = "VERSION=3\nformat=print\ndatabase=t\nHEADER=END\n";
    let bad = format!("{head} a\n 1\n b\nno blank\nDATA=END\n");
    let error = support::failed(run_with_input(&["load", &store], bad.as_bytes()));
    assert!(error.contains("line 8") && error.contains("nothing of tree 't' was kept"), "{error}");
    assert_eq!(text(&["trees", &store]), "");
    // If the tree existed before, the message says how many entries it got.
    ok(&["put", &store, "old", "0", "--tree", "t"]);
    let error = support::failed(run_with_input(&["load", &store], bad.as_bytes()));
    assert!(error.contains("line 8") && error.contains("got 1 entries"), "{error}");
    assert_eq!(text(&["scan", &store]), "a\t1\nold\t0\n");
    ok(&["check", &store]);
}

#[test]
fn a_file_that_is_no_dump_creates_no_store() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    for input in [&b"hello\n"[..], b"", b"VERSION=2\n", b"VERSION=3\nformat=xml\n"] {
        support::failed(run_with_input(&["load", &store], input));
        assert!(!folder.path("a.vellum").exists());
    }
    let error = fails(&["load", &store, &folder.name("none")]);
    assert!(error.contains("opening"), "{error}");
}

#[test]
fn a_key_that_is_too_long_is_refused_with_its_line() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let key = "k".repeat(5000);
    let dump = format!("VERSION=3\nformat=print\nHEADER=END\n a\n 1\n {key}\n 2\nDATA=END\n");
    let error = support::failed(run_with_input(&["load", &store], dump.as_bytes()));
    assert!(error.contains("line 7"), "{error}");
    assert_eq!(text(&["trees", &store]), "");
}

/// Berkeley DB's and LMDB's tools read our dumps, and `load` reads theirs, where they are
/// installed.
#[test]
fn other_programs_read_and_write_the_same_format() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let mut dump = String::from("VERSION=3\nformat=print\nHEADER=END\n");
    for number in 0..500 {
        dump.push_str(&format!(" {number:04}\\00\\ff\n value\\0a{number}\n"));
    }
    dump.push_str("DATA=END\n");
    succeeded(run_with_input(&["load", &store], dump.as_bytes()));
    for (load, dump, flag) in [("mdb_load", "mdb_dump", Some("-n")), ("db_load", "db_dump", None)] {
        if Command::new(load).arg("-V").output().is_err() {
            println!("{load} is not installed: not compared");
            continue;
        }
        let database = folder.name(&format!("{load}.db"));
        let mut child =
            Command::new(load).args(flag).arg(&database).stdin(Stdio::piped()).spawn().unwrap();
        let mut section = text(&["dump", &store, "--tree", "main"]);
        // The dump has no name, so the other program loads it into its one unnamed database.
        section = section.replace("database=main\n", "");
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), section.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        let back = Command::new(dump).args(flag).arg(&database).output().unwrap().stdout;
        let copy = folder.name(&format!("{load}.vellum"));
        succeeded(run_with_input(&["load", &copy], &back));
        assert!(ok(&["dump", &copy]) == ok(&["dump", &store]), "{load}");
    }
}

#[test]
fn a_dump_that_is_interrupted_leaves_no_file() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    fill(&store);
    let whole = ok(&["dump", &store]);
    let (mut complete, mut interrupted) = (0, 0);
    // How far a dump gets before the signal depends on the machine. The test repeats until both a
    // complete and an interrupted dump were seen.
    for round in 0..200 {
        if complete > 0 && interrupted > 0 {
            break;
        }
        let file = folder.name("dump");
        let mut dump = support::command(&["dump", &store, "-o", &file]);
        let mut child = dump.stderr(Stdio::null()).spawn().unwrap();
        // Once the file exists, under any name, the dump is under way.
        let files = || std::fs::read_dir(folder.path("")).unwrap().count();
        while files() == 1 && child.try_wait().unwrap().is_none() {}
        // Every other signal comes at once, each further one later until a dump was complete.
        let later = if round % 2 == 0 || complete > 0 { 0 } else { 1 << (round / 2).min(14) };
        std::thread::sleep(std::time::Duration::from_millis(later));
        let number = child.id().to_string();
        Command::new("kill").arg(number).stderr(Stdio::null()).status().unwrap();
        let ended = child.wait().unwrap();
        if folder.path("dump").exists() {
            assert!(std::fs::read(&file).unwrap() == whole);
            std::fs::remove_file(&file).unwrap();
            complete += 1;
        } else {
            interrupted += usize::from(ended.code() == Some(130));
        }
        assert_eq!(files(), 1, "the dump has left a file");
    }
    assert!(complete > 0 && interrupted > 0, "{complete} and {interrupted}");
}

#[test]
fn a_hyphen_is_standard_input_and_output() {
    let folder = Folder::new();
    let (store, copy) = (folder.name("a.vellum"), folder.name("b.vellum"));
    succeeded(run_with_input(&["put", &store, "k", "--file", "-"], b"value"));
    let dump = ok(&["dump", &store, "-o", "-"]);
    succeeded(run_with_input(&["load", &copy, "-"], &dump));
    assert_eq!(ok(&["get", &copy, "k"]), b"value");
}

#[test]
fn a_tree_with_a_line_break_in_its_name_survives() {
    let folder = Folder::new();
    let (store, copy) = (folder.name("a.vellum"), folder.name("b.vellum"));
    ok(&["put", &store, "k", "v", "--tree", "two\nlines\\"]);
    let dump = ok(&["dump", &store]);
    succeeded(run_with_input(&["load", &copy], &dump));
    assert_eq!(ok(&["get", &copy, "k", "--tree", "two\nlines\\"]), b"v");
    assert!(ok(&["dump", &copy]) == dump);
}

#[test]
fn ignored_settings_of_another_program_s_dump_are_reported() {
    let folder = Folder::new();
    let head = "VERSION=3\nformat=print\nintegerkey=1\nreversekey=1\nHEADER=END\n";
    let dump = format!("{head} a\n 1\nDATA=END\n");
    let output = run_with_input(&["load", &folder.name("a.vellum")], dump.as_bytes());
    let said = String::from_utf8(output.stderr).unwrap();
    let why = "is ignored: the store orders keys by their bytes";
    let lines = format!(
        "standard input: line 3: integerkey=1 {why}\nstandard input: line 4: reversekey=1 {why}\n"
    );
    assert!(said.starts_with(&lines), "{said}");
}
