//! The places where `unsafe` is allowed, and the comment that it needs.

use super::finding::Finding;
use super::rust_text::{find_words, line_of};
use super::tree::{File, Tree};

/// The files and folders (with a `/` at the end) that may use `unsafe`, and the reason. The list
/// contains the project's `unsafe`: a new entry is a decision, and an unused entry must be removed.
const CONTAINMENT: &[(&str, &str)] = &[
    ("crates/vm/src/sys.rs", "the system calls"),
    ("crates/vm/src/mapping.rs", "mapping and unmapping address space"),
    ("crates/vm/src/backend/", "the ways of populating and releasing"),
    ("crates/vm/src/surface.rs", "addresses of pages, and releasing them"),
    ("crates/vm/src/scratch.rs", "memory for the probe's trials"),
    ("crates/vm/tests/", "tests release pages and look at memory"),
    ("crates/pool/src/at_exit.rs", "a call of the C library"),
    ("crates/pool/src/page/states.rs", "state words in lazily backed memory"),
    ("crates/pool/src/core.rs", "bytes of pages that are held"),
    (
        "crates/pool/src/pool/fix.rs",
        "slices under a latch; asking the processor for lines of its caches",
    ),
    ("crates/pool/src/page/bytes.rs", "optimistic reads of bytes that others may change"),
    ("crates/pool/src/page/frame_states.rs", "words in a reservation, and pages that are claimed"),
    ("crates/pool/src/page/frame_tables.rs", "entries of page tables, unchecked"),
    ("crates/pool/src/page/page_bits.rs", "words in a reservation"),
    ("crates/pool/src/residence/", "memory of pages that come and go under their lock"),
    ("crates/pool/src/slots.rs", "releasing the memory of free slots"),
    ("crates/pool/src/eviction/write_back.rs", "sealing a copy of a page's head"),
    ("crates/pool/src/device/", "the kernel and other threads fill and read pages"),
    ("crates/pool/tests/", "tests are the holders of pages"),
    ("crates/log/src/opening_process.rs", "the kernel zeroes a page in the children of a process"),
    ("crates/log/src/ring.rs", "threads copy into blocks that others wait for"),
    ("crates/log/tests/fork.rs", "tests fork, and a child has its parent's log"),
    ("crates/morsel/src/sys.rs", "the system calls, and the commands of the module's files"),
    ("crates/morsel/src/huge.rs", "a window on a file, for as long as its pages are collapsed"),
    ("crates/morsel/src/mapping.rs", "views of memory that other processes may have, too"),
    ("crates/morsel/tests/morsel/fork.rs", "tests fork, and a child makes accesses that end it"),
    ("crates/dax/src/sys.rs", "the system calls, and the commands of the module's descriptors"),
    ("crates/dax/src/mapping.rs", "memory that other processes may change"),
    ("crates/dax/src/heap.rs", "memory that other processes may change"),
    ("crates/dax/src/persist.rs", "instructions that write caches back"),
    ("crates/dax/tests/dax.rs", "a view of a file that nothing changes"),
    ("crates/dax/tests/zero_pool.rs", "a test forks"),
    ("crates/aquila/src/sys.rs", "the system calls, and userfaultfd"),
    ("crates/aquila/src/anonymous.rs", "frames where the program has its mapping"),
    ("crates/aquila/src/fault.rs", "the cache of a mapping, by an address of it"),
    ("crates/aquila/src/host.rs", "descriptors by number; unmapping what is mapped from files"),
    ("crates/aquila/src/live_counters.rs", "counters in a mapped memory file"),
    ("crates/aquila/src/signal.rs", "the handler of SIGBUS, and the one that was there before"),
    ("crates/aquila/src/kernel.rs", "advice for mappings of files"),
    ("crates/aquila/tests/", "tests load from and store to mappings, fork, and end processes"),
    ("crates/aquila-ring0/src/entry.rs", "the instructions between the rings"),
    ("crates/aquila-ring0/src/memory.rs", "page tables, and memory that guests see"),
    ("crates/aquila-ring0/src/processor.rs", "what KVM and the kernel share with the process"),
    ("crates/aquila-ring0/src/guest.rs", "blocks and managed ranges by their addresses"),
    ("crates/aquila-ring0/src/pages.rs", "frames and files of a cache, in both rings"),
    ("crates/aquila-ring0/src/current_processor.rs", "the block of the thread"),
    ("crates/aquila-ring0/src/message.rs", "a system call that prints"),
    ("crates/aquila-ring0/src/file.rs", "frames and views of files, which calls and copies fill"),
    ("crates/aquila-ring0/src/ring.rs", "the memory that an io_uring shares with the kernel"),
    ("crates/aquila-ring0/src/running.rs", "a signal for another thread, and KVM's flag"),
    ("crates/aquila-ring0/src/shootdown.rs", "processors by their addresses, and CR3"),
    ("crates/aquila-ring0/src/sys.rs", "system calls as the program makes them"),
    ("crates/aquila-ring0/src/native.rs", "the handler of SIGTRAP; registers of the program"),
    ("crates/aquila-ring0/src/exits.rs", "the program's system calls, and frames on its stacks"),
    ("crates/aquila-ring0/src/self_test.rs", "what KVM says of a guest that has stopped"),
    ("crates/aquila-ring0/src/machine.rs", "entering ring 0 and leaving it"),
    ("crates/aquila-ring0/tests/", "tests make accesses that no sound program makes, and fork"),
    ("crates/engine/src/peer.rs", "a system call about the other side of a socket"),
    ("crates/engine/tests/exit.rs", "tests fork, and end processes"),
    ("crates/sim/tests/power_loss/mark.rs", "a message to the kernel's device mapper"),
    ("crates/capi/src/call.rs", "its tests read strings as C does"),
    ("crates/capi/src/raw.rs", "strings and descriptors that C gives"),
    ("crates/preload/src/calls.rs", "calls of C, in the place of the C library's"),
    ("crates/preload/src/system.rs", "the system calls that they make"),
    ("crates/preload/src/substitute.rs", "descriptors and error numbers of the program"),
    ("crates/preload/src/list.rs", "nodes that threads hand over by address"),
    ("crates/preload/src/owner.rs", "mappings by number"),
    ("crates/preload/src/cached.rs", "functions that run at fork and exit"),
    ("crates/preload/src/anchor.rs", "addresses that it reserves"),
    ("crates/preload/src/load.rs", "a function that runs at load"),
    ("crates/preload/src/mounts.rs", "unmapping what the program has given up"),
    ("crates/preload/tests/preload.rs", "LMDB, whose files are mapped"),
    ("crates/python/src/mapping.rs", "memory that Python sees as buffers"),
    ("crates/python/src/morsel.rs", "the same, handed on"),
    ("crates/python/src/source.rs", "descriptors that Python has duplicated"),
    ("crates/bench/src/machine/device_rate/", "the kernel fills fixed buffers"),
    ("crates/bench/src/worker/pipeline.rs", "packets, whose memory one process has at a time"),
    ("crates/bench/src/worker/whole_file.rs", "mapping a file as other programs do"),
    ("crates/experiments/src/page_access/", "plain reads to compare optimistic ones with"),
    ("crates/experiments/src/fig4.rs", "touching and releasing pages without a pool"),
    ("crates/experiments/src/dax/", "reading files that nothing changes"),
    ("crates/experiments/src/exmap/", "the device without a pool"),
    ("crates/bench-peers/src/", "what other engines' interfaces ask for"),
    ("crates/testing/src/allocations.rs", "an allocator that counts"),
    ("crates/testing/src/system_calls.rs", "filters of system calls"),
    ("kernel/tests/", "tests make calls that no sound program makes"),
];

/// How many lines above an `unsafe` its comment may start if the statement takes several lines.
const REACH: usize = 12;

/// Only the files of the containment list use `unsafe`, and each of them does.
pub fn containment(tree: &Tree) -> Vec<Finding> {
    contained(tree, CONTAINMENT)
}

fn contained(tree: &Tree, list: &[(&str, &str)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut used = vec![false; list.len()];
    for file in tree.rust_files() {
        let places = places(file);
        let Some(first) = places.first() else {
            continue;
        };
        match list.iter().position(|(path, _)| covers(path, &file.path)) {
            Some(entry) => used[entry] = true,
            None => {
                let allowed: Vec<&str> = list.iter().map(|(path, _)| *path).collect();
                let message = format!(
                    "unsafe outside the containment list (unsafety.rs of xtask): {}",
                    allowed.join(", ")
                );
                findings.push(Finding::new(&file.path, *first, message));
            }
        }
    }
    for ((path, reason), used) in list.iter().zip(used) {
        if !used {
            let message = format!("no longer unsafe ({reason}): take it off the containment list");
            findings.push(Finding::new(path, 0, message));
        }
    }
    findings
}

fn covers(entry: &str, path: &str) -> bool {
    if entry.ends_with('/') { path.starts_with(entry) } else { path == entry }
}

/// A `// SAFETY:` comment precedes every `unsafe` block and implementation.
pub fn safety_comments(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        let text = file.rust();
        let code: Vec<&str> = text.code.split('\n').collect();
        let comments: Vec<&str> = text.comments.split('\n').collect();
        for number in places(file) {
            let line = code[number - 1];
            let needs_one = ["unsafe {", "unsafe impl"].iter().any(|start| line.contains(start))
                || line.trim_end().ends_with("unsafe");
            if needs_one && !is_explained(&code, &comments, number - 1) {
                findings.push(Finding::new(
                    &file.path,
                    number,
                    "no '// SAFETY:' comment before it",
                ));
            }
        }
    }
    findings
}

/// Numbers of the lines that use the keyword `unsafe` for a block, function or implementation.
fn places(file: &File) -> Vec<usize> {
    let code = file.rust().code;
    // The rule does not concern `#[unsafe(no_mangle)]` and the lints' names.
    let attribute = |at: &usize| code[at + "unsafe".len()..].starts_with('(');
    find_words(&code, "unsafe").filter(|at| !attribute(at)).map(|at| line_of(&code, at)).collect()
}

/// Whether line `index` has a comment with `SAFETY:`, or such a comment is right above the
/// statement of that line: attributes and unfinished lines of the statement may lie between.
fn is_explained(code: &[&str], comments: &[&str], index: usize) -> bool {
    if comments[index].contains("SAFETY:") {
        return true;
    }
    for above in (index.saturating_sub(REACH)..index).rev() {
        let is_comment = !comments[above].trim().is_empty() && code[above].trim().is_empty();
        if is_comment {
            let block = comments[..=above].iter().zip(&code[..=above]).rev();
            return block
                .take_while(|(comment, code)| !comment.trim().is_empty() && code.trim().is_empty())
                .any(|(comment, _)| comment.contains("SAFETY:"));
        }
        if code[above].trim_end().ends_with([';', '}']) {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/x/src/lib.rs";

    fn lines(findings: &[Finding]) -> Vec<usize> {
        findings.iter().map(|finding| finding.line).collect()
    }

    fn uncommented(text: &str) -> Vec<usize> {
        lines(&safety_comments(&Tree::of(&[(PATH, text)])))
    }

    #[test]
    fn unsafe_without_a_reason_is_found() {
        assert_eq!(uncommented("fn f() {\n    unsafe { g() }\n}\n"), [2]);
        assert_eq!(uncommented("// Sent to others.\nunsafe impl Send for A {}\n"), [2]);
        assert_eq!(uncommented("// SAFETY: old.\nlet a = 1;\nunsafe { g() }\n"), [3]);
        let two = "// SAFETY: one.\nunsafe impl Send for A {}\nunsafe impl Sync for A {}\n";
        assert_eq!(uncommented(two), [3]);
    }

    #[test]
    fn unsafe_with_a_reason_passes() {
        assert!(uncommented("// SAFETY: because\n// of this.\nunsafe { g() }\n").is_empty());
        assert!(uncommented("// SAFETY: because.\nlet a =\n    unsafe { g() };\n").is_empty());
        assert!(uncommented("// SAFETY: because.\n#[x]\nunsafe impl Send for A {}\n").is_empty());
        assert!(uncommented("unsafe { g() } // SAFETY: because.\n").is_empty());
        // A function's contract is in its documentation; the lints ask for it.
        assert!(uncommented("unsafe fn f() {}\n#![allow(unsafe_code)]\n\"unsafe {\"").is_empty());
    }

    #[test]
    fn unsafe_outside_the_list_is_found() {
        let tree = Tree::of(&[
            ("crates/x/src/a.rs", "//! A.\nunsafe fn f() {}\n"),
            ("crates/x/tests/b.rs", "unsafe { f() }\n"),
            ("crates/x/src/c.rs", "#![deny(unsafe_code)] // unsafe\n"),
        ]);
        let list = |entries: &[&'static str]| -> Vec<(&str, &str)> {
            entries.iter().map(|path| (*path, "reason")).collect()
        };
        let found = contained(&tree, &list(&["crates/x/tests/"]));
        assert_eq!((found.len(), found[0].path.as_str()), (1, "crates/x/src/a.rs"));
        assert!(contained(&tree, &list(&["crates/x/tests/", "crates/x/src/a.rs"])).is_empty());
    }

    #[test]
    fn entries_that_are_no_longer_needed_are_found() {
        let tree = Tree::of(&[(PATH, "fn f() {}\n")]);
        assert_eq!(contained(&tree, &[(PATH, "reason")]).len(), 1);
        assert!(contained(&tree, &[]).is_empty());
    }
}
