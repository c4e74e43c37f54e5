//! `backup` and `restore`: chains of increments, what is refused, signals, full disks.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::process::{Child, Command, Stdio};

use support::{Folder, fails, noise, ok, text};
use vellum_testing::patience::eventually;
use vellum_testing::small_disk::SmallDisk;

/// A store with some entries and some long values.
fn store(folder: &Folder) -> String {
    let store = folder.name("a.vellum");
    for number in 0..20 {
        std::fs::write(folder.path("value"), noise(60_000, number)).unwrap();
        let key = format!("value {number}");
        ok(&["put", &store, &key, "--file", &folder.name("value")]);
    }
    std::fs::remove_file(folder.path("value")).unwrap();
    ok(&["put", &store, "greeting", "hello"]);
    store
}

fn names(folder: &Folder) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path("")).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_process_that_has_the_store_open_makes_the_backup() {
    let folder = Folder::new();
    let path = store(&folder);
    let to = folder.name("full");
    let open = vellum::Store::open(&path, &vellum::Options::new()).unwrap();
    let error = fails(&["backup", &path, &to]);
    assert!(error.contains("in use") && error.contains("Store::control_socket"), "{error}");
    let control = open.control_socket(&path).unwrap();
    let said = text(&["backup", &path, &to]);
    assert!(said.contains("of which the store uses") && said.ends_with("; checked\n"), "{said}");
    let error = fails(&["backup", &path, &to]);
    assert!(error.contains("the process that has the store open says") && error.contains("exists"));
    open.tree("main").unwrap().upsert(b"greeting", b"good day").unwrap();
    // A path of the command's own folder.
    let mut command = support::command(&["backup", &path, "one", "--since", "full", "--json"]);
    let said = command.current_dir(folder.path("")).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert!(report["read_bytes"].as_u64().unwrap() < 200_000, "{report}");
    drop(control);
    open.close().unwrap();
    ok(&["restore", "--to", &folder.name("new"), &to, &folder.name("one")]);
    assert_eq!(text(&["dump", &folder.name("new")]), text(&["dump", &path]));
}

#[test]
fn a_process_that_has_the_store_open_compacts_it() {
    let folder = Folder::new();
    let path = store(&folder);
    let open = vellum::Store::open(&path, &vellum::Options::new()).unwrap();
    open.tree("main").unwrap().remove_range(&b"value"[..]..).unwrap();
    open.sync().unwrap();
    let error = fails(&["compact", &path]);
    assert!(error.contains("compacts it itself"), "{error}");
    let _control = open.control_socket(&path).unwrap();
    let report: serde_json::Value =
        serde_json::from_str(&text(&["compact", &path, "--json"])).unwrap();
    assert_eq!(report["complete"], true, "{report}");
    let [before, after] = ["bytes_before", "bytes_after"].map(|name| report[name].as_u64());
    assert!(before > Some(1_000_000) && after < Some(100_000), "{report}");
    assert_eq!(open.tree("main").unwrap().get(b"greeting").unwrap().unwrap().as_ref(), b"hello");
}

/// Containers have namespaces of processes: the owner's number is 0 in that of the command.
#[test]
fn a_process_in_another_container_is_asked() {
    let folder = Folder::new();
    let path = store(&folder);
    let open = vellum::Store::open(&path, &vellum::Options::new()).unwrap();
    let _control = open.control_socket(&path).unwrap();
    let unshare = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork"]).args(arguments);
        command.output().unwrap()
    };
    if !unshare(&["true"]).status.success() {
        return eprintln!("left out: this user may not make namespaces");
    }
    let vellum = env!("CARGO_BIN_EXE_vellum");
    let contained = |arguments: &[&str]| {
        let said = unshare(&[&[vellum], arguments].concat());
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).unwrap()
    };
    let said = contained(&["backup", &path, &folder.name("full")]);
    assert!(said.ends_with("; checked\n"), "{said}");
    let said = contained(&["stat", &path]);
    assert!(said.contains("one of another container"), "{said}");
}

#[test]
fn the_state_of_an_open_store_is_shown_and_its_pool_resized() {
    let folder = Folder::new();
    let path = store(&folder);
    let options = vellum::Options::new().pool_bytes(4 << 20).max_pool_bytes(16 << 20);
    let open = vellum::Store::open(&path, &options).unwrap();
    let error = fails(&["stat", &path, "--wait", "0"]);
    assert!(error.contains("in use") && error.contains("Store::control_socket"), "{error}");
    let error = fails(&["resize-pool", &path, "8MiB"]);
    assert!(error.contains("no process answers") && error.contains("control socket"), "{error}");
    let control = open.control_socket(&path).unwrap();
    let said = text(&["resize-pool", &path, "8MiB"]);
    assert!(said.ends_with("the pool has 8.0 MiB now\n"), "{said}");
    let said = text(&["resize-pool", &path, "12582913", "--json"]);
    assert_eq!(said, "{\"pool_bytes\":12582912}\n");
    let error = fails(&["resize-pool", &path, "1GiB"]);
    assert!(error.contains("the process that has the store open says"), "{error}");
    let view = open.snapshot().unwrap();
    let said = text(&["stat", &path]);
    let process = std::process::id().to_string();
    let is_process = |line: &str| line.starts_with("open in process") && line.ends_with(&process);
    assert!(said.lines().any(is_process) && said.contains("1, the oldest for"), "{said}");
    let told: serde_json::Value = serde_json::from_str(&text(&["stat", &path, "--json"])).unwrap();
    assert_eq!((&told["pool_bytes"], &told["views"]), (&(12 << 20).into(), &1.into()), "{told}");
    assert!(told["pool"]["misses"].as_u64() > Some(0) && told["oldest_view_seconds"].is_f64());
    let error = fails(&["stat", &path, "--full", "--wait", "0"]);
    assert!(error.contains("in use"), "{error}");
    // The socket alone is no owner.
    drop(view);
    open.close().unwrap();
    let said = text(&["stat", &path]);
    assert!(!said.contains("open in process"), "{said}");
    let error = fails(&["resize-pool", &path, "8MiB"]);
    assert!(error.contains("no process answers"), "{error}");
    drop(control);
    let error = fails(&["resize-pool", &folder.name("none"), "8MiB"]);
    assert!(error.contains("does not exist"), "{error}");
}

#[test]
fn a_backup_and_its_increments_become_the_store_again() {
    let folder = Folder::new();
    let store = store(&folder);
    let at = |name: &str| folder.name(name);
    let said = text(&["backup", &store, &at("full")]);
    assert!(said.contains("of which the store uses") && said.ends_with("; checked\n"), "{said}");
    assert!(text(&["check", &at("full")]).contains("sound"));
    ok(&["put", &store, "greeting", "good day"]);
    let said = text(&["backup", &store, &at("one"), "--since", &at("full")]);
    assert!(said.contains("changed since"), "{said}");
    ok(&["rm", &store, "value 3"]);
    ok(&["put", &store, "more", "and more", "--no-log"]);
    let said = text(&["backup", &store, &at("two"), "--since", &at("one"), "--json"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert!(report["file_bytes"].as_u64().unwrap() < 100_000, "{report}");
    let [used, read] = ["used_bytes", "read_bytes"].map(|name| report[name].as_u64().unwrap());
    assert!(used > 1_000_000 && read == used, "{report}");
    let restore = ["restore", "--to", &at("new"), &at("full"), &at("one"), &at("two")];
    let said = text(&restore);
    assert!(said.contains("sound"), "{said}");
    assert_eq!(text(&["dump", &at("new")]), text(&["dump", &store]));
    let error = fails(&restore);
    assert!(error.contains("exists already"), "{error}");
    let said = text(&[&restore[..], &["--force", "--json", "--no-check"]].concat());
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["increments"], &report["checked"]), (&2.into(), &false.into()));
    ok(&["restore", "--to", &at("older"), &at("full"), &at("one")]);
    assert_eq!(ok(&["get", &at("older"), "greeting"]), b"good day");
    assert_eq!(ok(&["get", &at("older"), "value 3"]), noise(60_000, 3));
    let error = fails(&["restore", "--to", &at("other"), &at("full"), &at("two")]);
    assert!(error.contains("two: it does not follow"), "{error}");
    let error = fails(&["restore", "--to", &at("other"), &at("one")]);
    assert!(error.contains("it is an increment"), "{error}");
    let error = fails(&["backup", &store, &at("two")]);
    assert!(error.contains("exists already"), "{error}");
    ok(&["backup", &store, &at("two"), "--force"]);
    assert_eq!(names(&folder), ["a.vellum", "full", "new", "older", "one", "two"]);
}

/// A store that remembers its backup is read in part, and repaired.
#[test]
fn a_store_that_remembers_its_backup_is_repaired_from_it() {
    let folder = Folder::new();
    let store = store(&folder);
    let at = |name: &str| folder.name(name);
    ok(&["backup", &store, &at("full"), "--remember"]);
    ok(&["put", &store, "greeting", "good day"]);
    let increment = ["backup", &store, &at("one"), "--since", &at("full"), "--json"];
    let read_bytes = |arguments: &[&str]| {
        let report: serde_json::Value = serde_json::from_str(&text(arguments)).unwrap();
        report["read_bytes"].as_u64().unwrap()
    };
    let all = read_bytes(&[&increment[..], &["--read-all", "--force"]].concat());
    let some = read_bytes(&[&increment[..], &["--remember", "--force"]].concat());
    assert!(all > 1_000_000 && some < all / 4, "{all}, {some}");
    ok(&["put", &store, "greeting", "good evening"]);

    // A byte of each long value.
    let mut bytes = std::fs::read(&store).unwrap();
    let mut damaged = 0;
    for number in 0..20 {
        let value = noise(60_000, number);
        let place = bytes.windows(64).position(|found| found == &value[30_000..30_064]).unwrap();
        bytes[place] ^= 1;
        damaged += 1;
    }
    std::fs::write(&store, bytes).unwrap();
    assert!(fails(&["check", &store]).contains("damaged in"));
    let error = fails(&["check", &store, "--repair-from", &at("full")]);
    assert!(error.contains("does not know what was written since"), "{error}");
    let said = text(&["check", &store, "--repair-from", &at("full"), &at("one")]);
    assert!(said.contains(" pages were damaged, and are repaired") && damaged == 20, "{said}");
    let said = text(&["check", &store, "--json"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["sound"], &report["repaired_pages"]), (&true.into(), &0.into()));
    assert_eq!(ok(&["get", &store, "value 3"]), noise(60_000, 3));
    assert_eq!(ok(&["get", &store, "greeting"]), b"good evening");
}

/// A `load` that has the store open until its input ends.
fn loading(store: &str) -> Child {
    let mut load = support::command(&["load", store]);
    let mut child = load.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let head = b"VERSION=3\nformat=print\ndatabase=b\nHEADER=END\n 1\n one\n";
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), head).unwrap();
    child
}

#[test]
fn a_store_that_another_process_has_open_is_refused_with_what_to_do() {
    let folder = Folder::new();
    let store = store(&folder);
    let mut load = loading(&store);
    let log = folder.path("a.vellum.log");
    eventually("the store is open", || log.exists());
    let error = fails(&["backup", &store, &folder.name("full"), "--wait", "0"]);
    assert!(error.contains("Store::backup") && error.contains("--wait"), "{error}");
    // The process is killed: now the command recovers the store.
    load.kill().unwrap();
    load.wait().unwrap();
    ok(&["backup", &store, &folder.name("full")]);
    assert_eq!(ok(&["get", &folder.name("full"), "--tree", "main", "greeting"]), b"hello");
    let mut left = names(&folder);
    // A log that the store has never begun to use stays until it is opened for writing.
    left.retain(|name| name != "a.vellum.log");
    assert_eq!(left, ["a.vellum", "full"]);
}

/// A backup that takes longer than the test, after it has begun to write.
fn slow(folder: &Folder, store: &str) -> Child {
    let mut backup = Command::new("env");
    backup.args(["--default-signal=INT,TERM,HUP", env!("CARGO_BIN_EXE_vellum"), "backup", store]);
    backup.args([&folder.name("full"), "--rate", "1KiB"]);
    let child = backup.stderr(Stdio::piped()).spawn().unwrap();
    let is_new = |name: &String| name.starts_with(".full.");
    eventually("the backup has begun", || names(folder).iter().any(is_new));
    child
}

#[test]
fn a_backup_that_is_ended_leaves_no_file_of_its_name() {
    let folder = Folder::new();
    let store = store(&folder);
    let child = slow(&folder, &store);
    Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "vellum: interrupted by a signal\n");
    assert_eq!(names(&folder), ["a.vellum"]);

    let mut child = slow(&folder, &store);
    child.kill().unwrap();
    child.wait().unwrap();
    let left = names(&folder);
    assert!(left.len() == 2 && left[0].starts_with(".full.") && left[1] == "a.vellum", "{left:?}");
    // Another one does not mind.
    ok(&["backup", &store, &folder.name("full")]);
}

#[test]
fn a_full_disk_leaves_nothing() {
    let folder = Folder::new();
    let store = store(&folder);
    ok(&["backup", &store, &folder.name("full")]);
    for key in 0..10 {
        ok(&["put", &store, &format!("value {key}"), &"x".repeat(60_000)]);
    }
    let Some(disk) = SmallDisk::mount(folder.path("disk"), 512) else { return };
    let target = format!("{}/new", disk.path().display());
    for arguments in [
        vec!["backup", &store, &target],
        vec!["backup", &store, &target, "--since", &folder.name("full")],
        vec!["restore", "--to", &target, &folder.name("full")],
    ] {
        let error = fails(&arguments);
        assert!(error.contains(&target) && error.contains("No space left"), "{error}");
        assert!(disk.is_empty(), "{arguments:?}");
    }
    ok(&["check", &store]);
}
