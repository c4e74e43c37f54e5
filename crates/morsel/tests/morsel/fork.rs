//! Which of its parent's mappings a forked child has.
#![allow(unsafe_code)]

use vellum_morsel::{Access, Mapping, Shape};
use vellum_testing::patience::eventually;

use crate::common::on_each;

/// A length whose last page is not the first.
const LENGTH: u64 = 3 << 20;

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

/// Runs `work` in a forked child. `work` may neither allocate nor take locks, because other threads
/// of the parent may have been doing so during the fork.
fn in_child(work: impl FnOnce() -> bool) -> End {
    // SAFETY: the child only calls `work`, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let ok = work();
        // SAFETY: ends the child without running its parent's exit handlers.
        unsafe { libc::_exit(i32::from(!ok)) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: `status` belongs to the caller.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    match libc::WIFSIGNALED(status) {
        true => End::Signal(libc::WTERMSIG(status)),
        false => End::Exit(libc::WEXITSTATUS(status)),
    }
}

fn reads(mapping: &Mapping, offset: u64, expected: u8) -> bool {
    let mut byte = [0];
    mapping.read_at(offset, &mut byte).is_ok() && byte == [expected]
}

#[test]
fn a_child_reads_and_writes_inherited_mappings() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(LENGTH).inherit()).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        mapping.write_at(0, &[1]).unwrap();
        let work = || {
            // The last page has no memory before the child accesses it.
            let sees = reads(&mapping, 0, 1) && reads(&mapping, LENGTH - 1, 0);
            let writes =
                mapping.write_at(1, &[2]).and_then(|()| mapping.write_at(LENGTH - 1, &[3]));
            sees && writes.is_ok() && reads(&mapping, 1, 2)
        };
        assert_eq!(in_child(work), End::Exit(0));
        // The memory is the same, not a copy.
        assert!(reads(&mapping, 1, 2) && reads(&mapping, LENGTH - 1, 3));
        // A grandchild has the mapping, too.
        let deep = || in_child(|| reads(&mapping, 1, 2)) == End::Exit(0);
        assert_eq!(in_child(deep), End::Exit(0));
        // Children of other tests inherit the mapping, too, as long as they live.
        let mounts = || morsel.stat().unwrap().mounts;
        eventually("children are gone", || mounts().is_none_or(|mounts| mounts == 1));
    });
}

#[test]
fn a_child_inherits_no_more_rights_than_the_mapping_has() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(LENGTH).inherit()).unwrap();
        morsel.populate(0..LENGTH).unwrap();
        let mapping = morsel.map(Access::Read).unwrap();
        assert_eq!(in_child(|| reads(&mapping, 0, 0)), End::Exit(0));
        let address = mapping.base().as_ptr();
        let write = || {
            // SAFETY: the store ends the child by a signal.
            unsafe { address.write_volatile(1) };
            true
        };
        assert_eq!(in_child(write), End::Signal(libc::SIGSEGV));
        assert!(reads(&mapping, 0, 0));
    });
}

#[test]
fn a_child_does_not_have_mappings_that_it_does_not_inherit() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(LENGTH)).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        mapping.write_at(0, &[1]).unwrap();
        assert_eq!(in_child(|| reads(&mapping, 0, 1)), End::Signal(libc::SIGSEGV));
        // The child still inherits the descriptor, and can map it.
        let own = || morsel.map(Access::Read).is_ok_and(|mapping| reads(&mapping, 0, 1));
        assert_eq!(in_child(own), End::Exit(0));
        assert!(reads(&mapping, 0, 1));
    });
}
