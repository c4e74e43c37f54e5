//! Tests the lab's promises to its callers, from outside. Each test starts a machine, so only `make
//! lab` runs them, before all other tests, and `make lab-debug` those about the debug kernel.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_testing::patience::eventually;

/// The newest stock kernel.
const KERNEL: &str = "6.12";

fn cache() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/lab")
}

fn lab(arguments: &[&str]) -> Command {
    lab_with(KERNEL, arguments)
}

fn lab_with(kernel: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    // Other machines run at the same time.
    command.args(["--kernel", kernel, "--in-turn", "--cache"]).arg(cache()).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// A folder with the source of a module of this name, which runs `init` when it is loaded.
fn module(name: &str, init: &str, exit: &str) -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
    let kbuild = format!("obj-m := {name}.o\n");
    fs::write(folder.path().join("Kbuild"), kbuild).unwrap();
    let source = format!(
        "#include <linux/module.h>\n\
         #include <linux/slab.h>\n\
         static int level;\n\
         module_param(level, int, 0444);\n\
         static int __init start(void)\n{{\n{init}\nreturn 0;\n}}\n\
         module_init(start);\n\
         {exit}\n\
         MODULE_DESCRIPTION(\"A test of the lab\");\n\
         MODULE_LICENSE(\"GPL\");\n"
    );
    fs::write(folder.path().join(format!("{name}.c")), source).unwrap();
    folder
}

const EXIT: &str = "static void __exit stop(void)\n{\n}\nmodule_exit(stop);";

/// A program that prints the output of `line`, and that one test has passed.
fn script(folder: &Path, line: &str) -> String {
    let path = folder.join("script");
    let text = format!("#!/bin/sh\n{line}\necho 'test result: ok. 1 passed; 0 failed'\n");
    fs::write(&path, text).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&path, mode).unwrap();
    format!("script={}", path.display())
}

/// Runs that program with the module; returns whether the lab reports success, and its output.
fn run(folder: &Path, line: &str) -> (bool, String) {
    run_on(KERNEL, folder, line)
}

fn run_on(kernel: &str, folder: &Path, line: &str) -> (bool, String) {
    let script = script(folder, line);
    let build = folder.display().to_string();
    let arguments = ["--build", &build, "--module-parameters", "level=7", "run", &script];
    let output = lab_with(kernel, &arguments).output().unwrap();
    (output.status.success(), text(&output))
}

/// The folder that the cleaner of a lab removes. Other labs run at the same time.
fn folder_of(lab: &Child) -> PathBuf {
    let text = |path: String| fs::read_to_string(path).unwrap_or_default();
    let threads = fs::read_dir(format!("/proc/{}/task", lab.id())).unwrap().flatten();
    let children = threads.map(|thread| text(format!("{}/children", thread.path().display())));
    let children: Vec<String> =
        children.flat_map(|list| list.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect();
    let commands = children.iter().map(|child| text(format!("/proc/{child}/cmdline")));
    let last = |words: String| words.trim_end_matches('\0').rsplit('\0').next().map(PathBuf::from);
    let mut folders = commands.filter_map(last).filter(|path| path.is_dir());
    folders.next().unwrap()
}

#[test]
#[ignore = "starts a machine"]
fn a_module_is_loaded_with_its_parameters_and_unloaded_afterwards() {
    let folder = module("labgood", "pr_info(\"level %d\\n\", level);", EXIT);
    let (is_well, said) = run(folder.path(), "cat /sys/module/labgood/parameters/level");
    assert!(is_well, "{said}");
    assert!(said.lines().any(|line| line.trim() == "7"), "{said}");
    assert!(said.ends_with("1 passed, 0 failed\n"), "{said}");
}

#[test]
#[ignore = "starts a machine"]
fn a_program_that_hangs_is_named_and_the_processors_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let script = script(folder.path(), "sleep 1000");
    let output = lab(&["run", "--patience", "200", &script]).output().unwrap();
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("script: nothing new for 200 s"), "{said}");
    assert!(said.contains("hangs: CPU#0: RIP="), "{said}");
}

#[test]
#[ignore = "starts a machine"]
fn a_module_that_cannot_be_unloaded_is_a_failure() {
    let folder = module("labstays", "", "");
    let (is_well, said) = run(folder.path(), "true");
    assert!(!is_well && said.contains("failed to unload labstays"), "{said}");
}

#[test]
#[ignore = "starts a machine"]
fn a_warning_of_the_kernel_is_a_failure() {
    let folder = module("labwarns", "WARN_ON(level == 7);", EXIT);
    let (is_well, said) = run(folder.path(), "true");
    assert!(!is_well && said.contains("the kernel said: "), "{said}");
    assert!(said.ends_with("1 passed, 1 failed\n"), "{said}");
}

#[test]
#[ignore = "starts a machine with the debug kernel"]
fn the_debug_kernel_finds_leaks_and_uses_after_free() {
    let init = "u8 *leaked = kmalloc(100, GFP_KERNEL), *freed = kmalloc(100, GFP_KERNEL);\n\
                OPTIMIZER_HIDE_VAR(leaked);\n\
                kfree(freed);\n\
                OPTIMIZER_HIDE_VAR(freed);\n\
                level += READ_ONCE(freed[10]);\n";
    let folder = module("lableaks", init, EXIT);
    let (is_well, said) = run_on("debug", folder.path(), "true");
    assert!(!is_well && said.contains("BUG: KASAN: slab-use-after-free"), "{said}");
    assert!(said.contains("unreferenced object"), "{said}");
    assert!(said.contains("failed to free all memory"), "{said}");
}

#[test]
#[ignore = "builds a module"]
fn a_warning_of_the_compiler_is_an_error_with_its_place() {
    let folder = module("labunclean", "int unused;", EXIT);
    let output = lab(&["build", &folder.path().display().to_string()]).output().unwrap();
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    let place = folder.path().canonicalize().unwrap().join("labunclean.c");
    assert!(said.contains(&format!("{}:", place.display())), "{said}");
    assert!(!folder.path().join("labunclean.o").exists(), "the folder stays as it is");
}

#[test]
#[ignore = "builds a module"]
fn violations_of_the_kernel_s_style_are_findings() {
    let folder = tempfile::Builder::new().prefix("labstyle").tempdir().unwrap();
    let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let source = "// SPDX-License-Identifier: GPL-2.0\n\
         #include <linux/module.h>\n\n\
         static int labstyle_level;\n\
         module_param_named(level, labstyle_level, int, 0444);\n\
         MODULE_DESCRIPTION(\"A test of the lab\");\n\
         MODULE_LICENSE(\"GPL\");\n";
    put("Kbuild", "obj-m := labstyle.o\n");
    put("labstyle.c", source);
    let style = || {
        let output = lab(&["style", folder.path().to_str().unwrap()]).output().unwrap();
        (output.status.success(), text(&output))
    };
    let (is_well, said) = style();
    assert!(is_well && said.ends_with(": 0 findings\n"), "{said}");

    // A finding of checkpatch, one of sparse, and an unused exception.
    put("labstyle.c", &format!("{source}\nint labstyle_number;\n\nint * labstyle_pointer;\n"));
    put("checkpatch.exceptions", "# A comment.\n.c | some message | some reason\n");
    let (is_well, said) = style();
    assert!(!is_well && said.contains("labstyle.c:11: ERROR: \"foo * bar\""), "{said}");
    assert!(said.contains("labstyle.c:9:5: warning: symbol 'labstyle_number'"), "{said}");
    assert!(said.contains("nothing needs '.c | some message | some reason' any more"), "{said}");

    put("checkpatch.exceptions", ".c | \"foo * bar\" | as it is said to be in C++\n");
    let (is_well, said) = style();
    assert!(!is_well && !said.contains("foo * bar") && !said.contains("nothing needs"), "{said}");
}

#[test]
#[ignore = "starts a machine"]
fn a_shell_answers_and_has_the_given_programs() {
    let messages = cache().join(format!("messages-{KERNEL}-shell"));
    fs::remove_file(&messages).ok();
    let arguments = ["--name", "shell", "--file", "cat42=/bin/cat", "shell"];
    // The lab waits as long as a user wants.
    let lab = lab(&arguments);
    let mut bounded = Command::new("timeout");
    bounded.arg("600").arg(lab.get_program()).args(lab.get_args());
    let mut child = bounded.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let has_answered = Arc::new(AtomicBool::new(false));
    let is_enough = Arc::clone(&has_answered);
    // Input before the shell reads is lost, so the test repeats it.
    let asker = std::thread::spawn(move || {
        loop {
            let question: &[u8] = match is_enough.load(Ordering::SeqCst) {
                true => b"exit\n",
                false => b"echo answer=$((40 + 2)) | cat42\n",
            };
            if input.write_all(question).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    let mut lines = lines(&mut child);
    assert!(lines.any(|line| line.trim() == "answer=42"));
    has_answered.store(true, Ordering::SeqCst);
    assert!(lines.any(|line| line.trim() == "lab: done"));
    assert!(child.wait().unwrap().success());
    asker.join().unwrap();
    assert!(fs::read_to_string(messages).unwrap().contains("Linux version"));
}

/// Kills a machine that counts on a disk, and has another one look. The seed is one with which a
/// crash takes all that was not flushed.
fn kill_over_a_disk(more: &[&str]) -> (bool, String) {
    let program = std::env::current_exe().unwrap();
    // The crate's other test program is built beside this one.
    let built =
        fs::read_dir(program.parent().unwrap()).unwrap().flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("crash-") && !name.contains('.')
    };
    let age = |path: &PathBuf| fs::metadata(path).and_then(|found| found.modified()).ok();
    let path = built.filter(is_it).max_by_key(age).unwrap().display().to_string();
    let look = format!("look={path} --ignored disk_look");
    let count = format!("count={path} --ignored disk_count");
    let disk = ["crash", "--disk", "8", "--seed", SEED_OF_ALL, "--then", &look];
    let output = lab(&[&disk, more, &[&count]].concat()).output().unwrap();
    (output.status.success(), text(&output))
}

/// With this seed a crash takes all that was not flushed: `disk.rs` tests that.
const SEED_OF_ALL: &str = "1";

#[test]
#[ignore = "starts machines"]
fn a_killed_machine_leaves_what_it_has_flushed_on_its_disk() {
    let (is_well, said) = kill_over_a_disk(&[]);
    assert!(is_well && said.ends_with("1 passed, 0 failed\n"), "{said}");
}

#[test]
#[ignore = "starts machines"]
fn a_disk_that_lies_is_found_out() {
    let (is_well, said) = kill_over_a_disk(&["--lies"]);
    assert!(!is_well && said.contains("0 passed, 1 failed\n"), "{said}");
}

#[test]
#[ignore = "starts a machine"]
fn a_killed_lab_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let script = script(folder.path(), "sleep 600");
    let mut child = lab(&["run", &script]).spawn().unwrap();
    lines(&mut child).find(|line| line.contains("lab: begin"));
    let ours = folder_of(&child);
    assert!(ours.to_string_lossy().contains("/run-"), "{ours:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("its folder goes", || !ours.exists());
}

fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    let output = child.stdout.take().unwrap();
    BufReader::new(output).split(b'\n').map_while(Result::ok).map(|line| {
        let line = String::from_utf8_lossy(&line).into_owned();
        println!("{line}");
        line
    })
}
