//! The demonstration on small trees of files, with a pool of an eighth of the data.

mod support;

use support::{Folder, checked, command, failed, fails, make_files, ok, run, text};

#[test]
fn a_small_tree_is_stored_and_verified() {
    let folder = Folder::new();
    let files = folder.path("files");
    make_files(&files);
    let store = folder.name("kept.vellum");
    let arguments =
        ["demo", "--dir", files.to_str().unwrap(), "--seconds", "0.3", "--store", &store];
    let output = run(&arguments);
    let (table, progress) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{progress}");
    assert!(table.contains("every byte right"), "{table}");
    assert!(table.contains("(the data is 8.0 times as large)"), "{table}");
    for row in [
        "resident peak",
        "hit rate",
        "backend",
        "found by",
        "device",
        "update chunks",
        "compare again",
    ] {
        assert!(table.contains(row), "{row}: {table}");
    }
    let kills = table.lines().find(|line| line.starts_with("kill -9")).unwrap();
    assert!(kills.contains(" 3 times amid updates: all "), "{kills}");
    assert!(!kills.contains("all 0 acknowledged"), "{kills}");
    assert_eq!(progress.matches("it was not closed; recovered").count(), 3, "{progress}");
    let row = |name: &str| {
        let line = table.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().last().unwrap().parse::<u64>().unwrap()
    };
    assert!(row("evictions") > 0 && row("write-backs") > 0, "{table}");
    // The demonstration leaves a complete store under its name.
    assert!(!folder.path("kept.vellum.partial").exists());
    assert!(!folder.path("kept.vellum.partial.log").exists());
    ok(&["check", &store]);
    let meta = text(&["get", &store, "large", "--meta"]);
    assert!(meta.contains("2500000 bytes"), "{meta}");
    let error = fails(&arguments);
    assert!(error.contains("exists already"), "{error}");
}

#[test]
fn a_temporary_store_leaves_nothing() {
    let folder = Folder::new();
    let (files, temporary) = (folder.path("files"), folder.path("temporary"));
    make_files(&files);
    std::fs::create_dir(&temporary).unwrap();
    let mut demo = command(&["demo", "--seconds", "0.1", "--threads", "3", "--backend", "madvise"]);
    demo.args(["--pool", "1MiB", "--dir"]).arg(&files).env("TMPDIR", &temporary);
    let output = checked(demo.output().unwrap());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
}

#[test]
fn a_killed_demonstration_leaves_nothing() {
    let folder = Folder::new();
    let (files, temporary) = (folder.path("files"), folder.path("temporary"));
    make_files(&files);
    std::fs::create_dir(&temporary).unwrap();
    let mut demo = command(&["demo", "--seconds", "60", "--dir"]);
    demo.arg(&files).env("TMPDIR", &temporary);
    demo.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
    let mut child = demo.spawn().unwrap();
    // Once it reports progress of the import, the store exists.
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    lines.find(|line| line.as_ref().unwrap().starts_with("import")).unwrap().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
}

/// What the process that is to be killed finds is verified: an update that an earlier one did not
/// leave ends the demonstration.
#[test]
fn a_process_to_be_killed_verifies_what_it_updates() {
    let folder = Folder::new();
    let (files, store) = (folder.path("files"), folder.name("a.vellum"));
    make_files(&files);
    ok(&["import", &store, files.to_str().unwrap()]);
    // The key of the first chunk of the file 'large', of a generation that no update has written.
    let key = "6c61726765".to_owned() + "00" + "00000000";
    let mut victim = command(&["demo-victim", &store, "--pool", "4MiB", "--threads", "1"]);
    victim.args(["--seed", "1"]).stdin(std::process::Stdio::piped());
    victim.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = victim.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, format!("0 7 1 {key}\n").as_bytes()).unwrap();
    drop(input);
    let error = failed(checked(child.wait_with_output().unwrap()));
    assert!(error.contains("is not what update 7 left"), "{error}");
}

#[test]
fn impossible_requests_are_errors() {
    let folder = Folder::new();
    let error = fails(&["demo", "--dir", &folder.name("none")]);
    assert!(error.contains("none"), "{error}");
    std::fs::create_dir(folder.path("empty")).unwrap();
    let error = fails(&["demo", "--dir", &folder.name("empty")]);
    assert!(error.contains("no files"), "{error}");
    let files = folder.path("files");
    make_files(&files);
    let mut demo = command(&["demo", "--pool", "8KiB", "--dir"]);
    let error = failed(checked(demo.arg(&files).output().unwrap()));
    assert!(error.contains("pool"), "{error}");
    assert!(!error.contains("MISMATCH"), "{error}");
}
