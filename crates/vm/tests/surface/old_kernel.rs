//! Kernels that lack the newer calls, simulated by a seccomp filter. The tests of the madvise
//! backend run again in a process without `process_madvise`, `MADV_POPULATE_WRITE` and
//! `MADV_COLLAPSE`, as on Linux 5.10 in a strict sandbox.

use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::common::{Own, entries};
use vellum_testing::system_calls::{answer, compare, install, load};
use vellum_vm::{
    Asked, BackendChoice, BackendKind, HUGE_PAGES, PageRange, Surface, SurfaceError, probe,
};

/// Some versions of libc have no name for it.
const MADV_COLLAPSE: u32 = 25;

/// Refuses the newer calls to this process from now on.
fn become_old() -> std::io::Result<()> {
    let filter = [
        load(0),
        compare(libc::SYS_process_madvise as u32, 4, 0),
        compare(libc::SYS_madvise as u32, 0, 5),
        load(16 + 8 * 2),
        compare(MADV_COLLAPSE, 2, 0),
        compare(libc::MADV_POPULATE_WRITE as u32, 1, 2),
        answer(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        answer(libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    install(&filter, 0)
}

#[test]
fn everything_holds_on_an_old_kernel() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["madvise::", "with_a_filter", "--include-ignored"]);
    // SAFETY: the child only makes two system calls before it runs the new program.
    unsafe { command.pre_exec(become_old) };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    for test in ["with_a_filter_the_choice_is_madvise", "batches::madvise::bad_entries_fail_alone"]
    {
        assert!(text.lines().any(|line| line.contains(test) && line.ends_with("ok")), "{text}");
    }
}

#[test]
#[ignore = "needs a filter; run by everything_holds_on_an_old_kernel"]
fn with_a_filter_the_choice_is_madvise() {
    let choice = probe::choice_without_exmap();
    assert_eq!(choice.backend, BackendKind::Madvise);
    assert!(choice.reason.contains("process_madvise does not work here"), "{choice:?}");
    let facilities = probe::facilities();
    for name in [
        "MADV_POPULATE_WRITE",
        "MADV_COLLAPSE",
        "process_madvise DONTNEED",
        "process_madvise POPULATE_WRITE",
    ] {
        assert!(!facilities.get(name).unwrap().found, "{name}");
    }
    assert!(probe::works(BackendKind::ProcessMadvise).is_err());
}

#[test]
#[ignore = "needs a filter; run by everything_holds_on_an_old_kernel"]
fn with_a_filter_there_are_no_huge_pages() {
    let own = Own::new(HUGE_PAGES, BackendKind::Madvise);
    (0..HUGE_PAGES).for_each(|page| own.fill(page, 5));
    assert!(!own.surface.can_collapse());
    let asked = own.surface.collapse(PageRange::new(0, HUGE_PAGES)).unwrap();
    assert_eq!(asked, Asked::NotNow(vellum_vm::Errno::INVAL));
    assert!((0..HUGE_PAGES).all(|page| own.holds(page, 5)));
}

#[test]
#[ignore = "needs a filter; run by everything_holds_on_an_old_kernel"]
fn with_a_filter_forcing_is_an_error_with_a_reason() {
    let forced = BackendChoice::Only(BackendKind::ProcessMadvise);
    let error = Surface::reserve(1, forced).unwrap_err();
    let SurfaceError::BackendUnavailable { backend: BackendKind::ProcessMadvise, reason } = &error
    else {
        panic!("{error:?}");
    };
    assert!(reason.contains("not implemented"), "{reason}");
}

#[test]
#[ignore = "needs a filter; run by everything_holds_on_an_old_kernel"]
fn with_a_filter_pages_are_populated_by_touching() {
    let own = Own::new(64, BackendKind::Madvise);
    own.fill(3, 8);
    assert_eq!(own.surface.populate(&mut entries([(0, 8), (20, 1), (64, 1)])), 1);
    assert_eq!(own.resident(), 9);
    assert!(own.holds(3, 8) && own.holds(2, 0));
    assert_eq!(own.release(&mut entries([(0, 8)])), 0);
    assert_eq!(own.surface.resident_pages(PageRange::new(0, 64)), Ok(1));
}
