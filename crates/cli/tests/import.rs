//! Import of a directory, and reading it back.

mod support;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use support::{Folder, fails, make_files, noise, ok, text};

#[test]
fn a_directory_is_stored_and_read_back() {
    let folder = Folder::new();
    let (store, files) = (folder.name("a.vellum"), folder.path("files"));
    make_files(&files);
    let files_name = files.to_str().unwrap();
    let report = text(&["import", &store, files_name, "--pool", "1MiB"]);
    assert!(report.starts_with("171 files stored\n"), "{report}");
    for path in ["large", "folder0/inner/file0", "folder7/inner/file2", "new\nline"] {
        let content = std::fs::read(files.join(path)).unwrap();
        assert!(ok(&["get", &store, path, "--pool", "1MiB"]) == content, "{path}");
    }
    let odd = OsStr::from_bytes(b"not-utf8-\xff");
    assert_eq!(ok(&[OsStr::new("get"), OsStr::new(&store), odd]), b"odd");
    let meta = text(&["get", &store, "large", "--meta"]);
    assert!(meta.starts_with("file 0") && meta.contains(" 2500000 bytes"), "{meta}");
    let meta = text(&["get", &store, "folder1/link", "--meta"]);
    assert!(meta.contains("-> inner/file1"), "{meta}");
    let listing = text(&["scan", &store, "folder3/"]);
    assert_eq!(listing.lines().count(), 21, "{listing}");
    assert!(listing.contains("folder3/inner/file1\tfile 0"), "{listing}");
    ok(&["check", &store]);
}

#[test]
fn a_second_import_stores_what_changed() {
    let folder = Folder::new();
    let (store, files) = (folder.name("a.vellum"), folder.path("files"));
    make_files(&files);
    let files_name = files.to_str().unwrap();
    ok(&["import", &store, files_name, "--pool", "1MiB"]);
    // Shorter than before: the import must remove chunks.
    std::fs::write(files.join("large"), noise(100_000, 5)).unwrap();
    std::fs::write(files.join("added"), b"added").unwrap();
    let report = text(&["import", &store, files_name, "--pool", "1MiB"]);
    assert!(report.starts_with("2 files stored\n170 unchanged"), "{report}");
    assert!(ok(&["get", &store, "large"]) == noise(100_000, 5));
    let chunks = text(&["scan", &store, "large", "--tree", "content", "--keys"]);
    assert_eq!(chunks.lines().count(), 2, "{chunks}");
    ok(&["check", &store]);
}

#[test]
fn a_limit_leaves_files_out_and_bad_directories_are_errors() {
    let folder = Folder::new();
    let (store, files) = (folder.name("a.vellum"), folder.path("files"));
    let error = fails(&["import", &store, &folder.name("none")]);
    assert!(error.contains("none"), "{error}");
    assert!(!folder.path("a.vellum").exists());
    make_files(&files);
    let report = text(&["import", &store, files.to_str().unwrap(), "--limit", "1MiB"]);
    assert!(report.contains("do not fit the limit"), "{report}");
    let error = fails(&["get", &store, "large"]);
    assert!(error.contains("there is no 'large'"), "{error}");
}

#[test]
fn the_store_is_not_stored_in_itself() {
    let folder = Folder::new();
    let files = folder.path("files");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("a"), b"a").unwrap();
    let store = files.join("own.vellum");
    let (store, files) = (store.to_str().unwrap(), files.to_str().unwrap());
    ok(&["import", store, files]);
    ok(&["import", store, files]);
    assert_eq!(text(&["scan", store, "--keys"]), "a\n");
}

#[test]
fn exported_files_equal_the_imported_ones() {
    let folder = Folder::new();
    let (store, files, copy) = (folder.name("a.vellum"), folder.name("files"), folder.name("copy"));
    make_files(files.as_ref());
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o640);
    std::fs::set_permissions(folder.path("files/large"), mode).unwrap();
    ok(&["import", &store, &files]);
    assert_eq!(text(&["export", &store, &copy]), "171 files written\n");
    let mut same = std::process::Command::new("diff");
    let same = same.args(["-r", "--no-dereference", &files, &copy]).output().unwrap();
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stdout));
    // Sizes, permissions and times are equal too, so a second import stores nothing.
    let again = text(&["import", &store, &copy]);
    assert!(again.starts_with("0 files stored\n171 unchanged"), "{again}");
    let part = folder.name("part");
    ok(&["export", &store, &part, "folder3/"]);
    assert_eq!(std::fs::read_dir(&part).unwrap().count(), 1);
    let error = fails(&["export", &store, &part]);
    assert!(error.ends_with("part is not empty"), "{error}");
}

#[test]
fn names_that_lead_out_of_the_directory_are_not_exported() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let record = [0; 36];
    ok(&["put", &store, "x", "", "--tree", "content"]);
    let put = ["put", &store, "../evil", "--tree", "meta"];
    support::succeeded(support::run_with_input(&put, &record));
    let error = fails(&["export", &store, &folder.name("out")]);
    assert!(error.ends_with("'../evil' is not an entry of 'import'"), "{error}");
    assert!(!folder.path("evil").exists());
}
