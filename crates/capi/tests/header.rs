//! The headers agree with the library, and C programs that use them behave as the headers say.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

const WARNINGS: [&str; 4] = ["-std=c11", "-Wall", "-Wextra", "-Werror"];

/// The libraries for this test. `cargo test` does not build libraries of kinds that Rust cannot
/// link.
static LIBRARIES: LazyLock<PathBuf> = LazyLock::new(|| {
    if let Some(built) = std::env::var_os("VELLUM_BUILT") {
        return built.into();
    }
    let test = std::env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap().to_path_buf();
    let mut build = Command::new(env!("CARGO"));
    build.current_dir(crate_folder()).args(["build", "--package", "vellum-capi", "--quiet"]);
    build.arg("--target-dir").arg(profile.parent().unwrap());
    if profile.ends_with("release") {
        build.arg("--release");
    }
    run(&mut build);
    profile
});

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    output
}

/// The compiler, with the folder of the header.
fn compiler(name: &str) -> Command {
    let mut compiler = Command::new(name);
    compiler.arg("-I").arg(crate_folder().join("include"));
    compiler
}

fn text(output: Output) -> String {
    String::from_utf8(output.stdout).unwrap()
}

/// The programs. Together they call every function of every header.
const PROGRAMS: [&str; 8] =
    ["aquila", "bulk", "commits", "dax", "everything", "maintenance", "store", "views"];
const HEADERS: [&str; 4] = ["vellum.h", "vellum_aquila.h", "vellum_dax.h", "vellum_morsel.h"];

/// Compiles programs and runs them.
fn run_with(programs: &[&str], libraries: &[OsString]) {
    for name in programs {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(name);
        let mut compiler = compiler("cc");
        compiler.args(WARNINGS).args(["-D_GNU_SOURCE", "-pthread", "-o"]).arg(&program);
        let source = crate_folder().join(format!("tests/{name}.c"));
        run(compiler.arg(source).args(libraries));
        // Running programs look for the name with the number of the interface.
        let named = folder.path().join("libvellum.so.0");
        std::os::unix::fs::symlink(LIBRARIES.join("libvellum.so"), named).unwrap();
        let mut command = Command::new(program);
        command.current_dir(&folder).env("LD_LIBRARY_PATH", folder.path());
        assert_eq!(text(run(&mut command)), "ok\n");
    }
}

fn shared() -> Vec<OsString> {
    vec!["-L".into(), LIBRARIES.clone().into(), "-lvellum".into()]
}

#[test]
fn programs_run_with_the_shared_library() {
    run_with(&PROGRAMS, &shared());
}

#[test]
fn programs_run_with_the_static_library() {
    let library = LIBRARIES.join("libvellum.a");
    run_with(&PROGRAMS, &[library.into(), "-lpthread".into(), "-lm".into(), "-ldl".into()]);
}

/// The address sanitizer finds memory that the program or the library frees twice or never. The
/// program with Morsels maps at addresses that the sanitizer uses.
#[test]
fn programs_run_under_sanitizers() {
    let sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    run_with(
        &["aquila", "bulk", "commits", "dax", "maintenance", "store", "views"],
        &[&sanitizers.map(OsString::from)[..], &shared()].concat(),
    );
}

#[test]
fn the_headers_are_ones_of_cpp_too() {
    for header in HEADERS {
        let header = crate_folder().join("include").join(header);
        let flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"];
        run(compiler("c++").args(flags).arg(header));
    }
}

/// The shared library exports the functions that the headers declare.
#[test]
fn names_are_the_same_in_both() {
    let library = LIBRARIES.join("libvellum.so");
    let listing = text(run(Command::new("nm").args(["-D", "--defined-only"]).arg(library)));
    let exported: BTreeSet<&str> = listing
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| !name.starts_with('_'))
        .collect();
    // The preprocessor removes the comments, which also name functions.
    let includes = HEADERS.map(|header| crate_folder().join("include").join(header));
    let code = text(run(compiler("cc").args(["-E", "-P"]).args(includes)));
    let words = code.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    let followed: Vec<(usize, &str)> =
        words.map(|word| (word.as_ptr() as usize - code.as_ptr() as usize, word)).collect();
    let declared: BTreeSet<&str> = followed
        .into_iter()
        .filter(|(at, word)| code[at + word.len()..].starts_with('('))
        .map(|(_, word)| word)
        .filter(|word| word.starts_with("vellum_"))
        .collect();
    assert_eq!(declared, exported);
}

/// C accepts two declarations of a function only if their types are compatible. So the declarations
/// from the Rust source follow those of the header.
#[test]
fn types_are_the_same_in_both() {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        no_includes: true,
        cpp_compat: false,
        ..cbindgen::Config::default()
    };
    config.export.item_types = vec![cbindgen::ItemType::Functions];
    for (rust, c) in [
        ("Handle", "vellum_morsel"),
        ("MappingHandle", "vellum_morsel_mapping"),
        ("CShape", "vellum_morsel_shape"),
        ("CStat", "vellum_morsel_stat"),
        ("StoreHandle", "vellum_store"),
        ("TreeHandle", "vellum_tree"),
        ("ReaderHandle", "vellum_reader"),
        ("WriterHandle", "vellum_writer"),
        ("LoadHandle", "vellum_load"),
        ("TransactionHandle", "vellum_transaction"),
        ("CommitHandle", "vellum_commit"),
        ("SnapshotHandle", "vellum_snapshot"),
        ("CursorHandle", "vellum_cursor"),
        ("ValuesHandle", "vellum_values"),
        ("ControlSocketHandle", "vellum_control_socket"),
        ("CStoreOptions", "vellum_store_options"),
        ("CRange", "vellum_range"),
        ("CEntry", "vellum_entry"),
        ("CBackupOptions", "vellum_backup_options"),
        ("CCheck", "vellum_check"),
        ("CacheHandle", "vellum_aquila"),
        ("CachedHandle", "vellum_aquila_mapping"),
        ("PinHandle", "vellum_aquila_pin"),
        ("CCacheOptions", "vellum_aquila_options"),
        ("CCacheStatistics", "vellum_aquila_statistics"),
        ("DaxHandle", "vellum_dax"),
        ("DaxMappingHandle", "vellum_dax_mapping"),
        ("HeapHandle", "vellum_dax_heap"),
        ("EphemeralHandle", "vellum_dax_ephemeral"),
        ("PoolHandle", "vellum_dax_pool"),
        ("CDaxOptions", "vellum_dax_options"),
        ("CDaxStat", "vellum_dax_stat"),
    ] {
        config.export.rename.insert(rust.into(), c.into());
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("both.c");
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = builder.with_src(crate_folder().join("src/lib.rs"));
    let mut declarations = Vec::new();
    builder.generate().unwrap().write(&mut declarations);
    let declarations = String::from_utf8(declarations).unwrap();
    assert!(declarations.matches("vellum_").count() >= 120, "{declarations}");
    let includes = HEADERS.map(|header| format!("#include \"{header}\"\n")).concat();
    std::fs::write(&source, includes + &declarations).unwrap();
    run(compiler("cc").args(WARNINGS).arg("-fsyntax-only").arg(source));
}
