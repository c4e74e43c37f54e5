//! The mappings that a forked child has of its parent's.
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

/// Has a child do something, which may neither allocate nor take locks: other threads of its parent
/// may have been in the midst of that.
fn in_child(work: impl FnOnce() -> bool) -> End {
    // SAFETY: the child calls what `work` calls, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let ok = work();
        // SAFETY: ends the child without anything that its parent would do at its end.
        unsafe { libc::_exit(i32::from(!ok)) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: the number is the caller's own.
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
fn a_child_reads_and_writes_what_it_inherits() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(LENGTH).inherit()).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        mapping.write_at(0, &[1]).unwrap();
        let work = || {
            // The last page has no memory before the child asks for it.
            let sees = reads(&mapping, 0, 1) && reads(&mapping, LENGTH - 1, 0);
            let writes =
                mapping.write_at(1, &[2]).and_then(|()| mapping.write_at(LENGTH - 1, &[3]));
            sees && writes.is_ok() && reads(&mapping, 1, 2)
        };
        assert_eq!(in_child(work), End::Exit(0));
        // The memory is the same, not a copy.
        assert!(reads(&mapping, 1, 2) && reads(&mapping, LENGTH - 1, 3));
        // A grandchild has it, too.
        let deep = || in_child(|| reads(&mapping, 1, 2)) == End::Exit(0);
        assert_eq!(in_child(deep), End::Exit(0));
        // Children of other tests inherit it, too, for as long as they live.
        let mounts = || morsel.stat().unwrap().mounts;
        eventually("children are gone", || mounts().is_none_or(|mounts| mounts == 1));
    });
}

#[test]
fn a_child_inherits_no_more_rights_than_there_are() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(LENGTH).inherit()).unwrap();
        morsel.populate(0..LENGTH).unwrap();
        let mapping = morsel.map(Access::Read).unwrap();
        assert_eq!(in_child(|| reads(&mapping, 0, 0)), End::Exit(0));
        let address = mapping.base().as_ptr();
        let write = || {
            // SAFETY: the memory is the child's until it ends, which it does by this.
            unsafe { address.write_volatile(1) };
            true
        };
        assert_eq!(in_child(write), End::Signal(libc::SIGSEGV));
        assert!(reads(&mapping, 0, 0));
    });
}

#[test]
fn a_child_has_nothing_of_what_it_does_not_inherit() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(LENGTH)).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        mapping.write_at(0, &[1]).unwrap();
        assert_eq!(in_child(|| reads(&mapping, 0, 1)), End::Signal(libc::SIGSEGV));
        // A descriptor is inherited all the same, and maps it.
        let own = || morsel.map(Access::Read).is_ok_and(|mapping| reads(&mapping, 0, 1));
        assert_eq!(in_child(own), End::Exit(0));
        assert!(reads(&mapping, 0, 1));
    });
}
