//! The arguments that CREATE and the other commands with structures accept, and how much memory a
//! user gets.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::AsRawFd as _;

use rustix::io::Errno;
use vellum_kernel_tests::child::{become_user, in_child};
use vellum_kernel_tests::counters::{Memory, field};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::threads::wait_until;
use vellum_kernel_tests::{Exmap, turn};
use vellum_uapi::exmap::{self, Create, Query, Stat};

#[test]
fn the_module_reports_its_features() {
    let Some(_turn) = turn() else { return };
    let query = Exmap::open().query();
    println!("{query:?}");
    assert_eq!((query.size, query.version), (size_of::<Query>() as u32, 1));
    assert_eq!(query.max_interfaces, exmap::MAX_INTERFACES);
    assert_eq!(query.vector_entries, exmap::VECTOR_ENTRIES);
    let known = exmap::CAN_READ | exmap::CAN_WRITE | exmap::CAN_SHOW_TABLES;
    assert_eq!(query.features & !known, 0, "features that the header does not name");
    for bit in 0..64 {
        let flag = 1 << bit;
        let created = Exmap::open().create(&plan(16, 1, flag));
        match query.flags & flag {
            0 => assert_eq!(created, Err(Errno::INVAL), "flag {flag:#x}"),
            _ => assert_eq!(created, Ok(()), "flag {flag:#x}"),
        }
    }
}

/// A newer program may know more fields of a structure, and an older one fewer.
#[test]
fn the_answer_is_as_long_as_the_caller_s_structure() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::with(10, 1, 0);
    for (command, known) in [(exmap::QUERY, size_of::<Query>()), (exmap::STAT, size_of::<Stat>())] {
        for size in [
            0_u32,
            1,
            4,
            8,
            12,
            16,
            24,
            31,
            32,
            64,
            119,
            120,
            121,
            151,
            152,
            153,
            200,
            4096,
            u32::MAX,
        ] {
            let mut memory = vec![0xee_u8; 8192];
            memory[..4].copy_from_slice(&size.to_le_bytes());
            let address = memory.as_mut_ptr().expose_provenance();
            let answer = exmap.pass(command, address);
            println!("{command:#x} with a size of {size}: {answer:?}");
            let touched = memory.iter().rposition(|byte| *byte != 0xee).map_or(0, |at| at + 1);
            let may = usize::min(size as usize, known).max(4);
            assert!(touched <= may, "{command:#x}: {touched} bytes for {size}");
            assert!(answer.is_ok() || touched <= 4, "{command:#x}: {answer:?} and an answer");
            assert!(answer.is_ok() || size as usize != known, "{command:#x}: {answer:?}");
        }
    }
}

#[test]
fn fields_out_of_bounds_are_refused() {
    let Some(_turn) = turn() else { return };
    let right = plan(16, 2, 0);
    let refuse = |create: Create, errors: &[Errno]| {
        let exmap = Exmap::open();
        let Err(error) = exmap.create(&create) else { panic!("{create:?} was accepted") };
        assert!(errors.contains(&error), "{error} for {create:?}");
        // A valid argument is accepted afterwards.
        exmap.create(&right).unwrap();
        let surface = exmap.map(100).unwrap();
        assert_eq!(exmap.stat().unwrap().frames, 16);
        drop(surface);
    };
    let invalid = &[Errno::INVAL][..];
    for interfaces in [0, 257, 1 << 16, 1 << 31, u32::MAX] {
        refuse(Create { interfaces, ..right }, invalid);
    }
    refuse(Create { frames: 0, ..right }, invalid);
    for frames in [u64::MAX, 1 << 63, 1 << 52, 1 << 51, 1 << 40, (1 << 52) + 1] {
        refuse(Create { frames, ..right }, &[Errno::INVAL, Errno::NOMEM, Errno::PERM]);
    }
    for blocks in [1, 1 << 31, u32::MAX] {
        refuse(Create { blocks, ..right }, invalid);
    }
    for size in [0, 4, 31] {
        refuse(Create { size, ..right }, invalid);
    }
    for size in [4096, u32::MAX] {
        refuse(Create { size, ..right }, &[Errno::INVAL, Errno::TOOBIG, Errno::FAULT]);
    }
    let pool = exmap::NO_POOL;
    for flags in [1 << 63, 1 << 32, pool << 10, u64::MAX] {
        refuse(Create { flags, ..right }, invalid);
    }
    for backing in [12_345, i32::MAX, -2, i32::MIN] {
        refuse(Create { backing, ..right }, &[Errno::BADF, Errno::INVAL]);
    }
    let unreadable = File::options().write(true).open("/dev/null").unwrap();
    let backing = unreadable.as_raw_fd();
    refuse(Create { backing, ..right }, &[Errno::BADF, Errno::INVAL]);
}

/// More memory than the machine has is an error at once, and nothing stays allocated.
#[test]
fn a_pool_larger_than_memory_is_an_error() {
    let Some(_turn) = turn() else { return };
    let before = Memory::now();
    let kib = field("/proc/meminfo", "MemTotal");
    for frames in [kib, kib / 4 + 1] {
        let created = Exmap::open().create(&plan(frames, 1, 0));
        let error = created.expect_err("more memory than there is");
        assert!([Errno::NOMEM, Errno::INVAL].contains(&error), "{error}");
        before.assert_back();
    }
}

/// One limit holds for all exmaps of a user. Closing an exmap returns its charge.
#[test]
fn a_user_gets_as_much_memory_as_may_be_locked() {
    let Some(_turn) = turn() else { return };
    let mut fresh: Vec<Exmap> = (0..100).map(|_| Exmap::open()).collect();
    in_child(move || {
        become_user(1 << 20);
        let refused = |exmap: &Exmap, frames| {
            let error = exmap.create(&plan(frames, 1, 0)).expect_err("more than the limit");
            assert!([Errno::PERM, Errno::NOMEM].contains(&error), "{error}");
        };
        let large = fresh.pop().unwrap();
        refused(&large, 1024);
        refused(&large, u64::MAX);
        let small = fresh.pop().unwrap();
        small.create(&plan(128, 1, 0)).unwrap();
        // The memory of the first counts for the next. A refused exmap does not count.
        refused(&large, 192);
        large.create(&plan(96, 1, 0)).unwrap();
        // Interfaces count, too. There is room for two more, not for the maximum.
        let many = fresh.pop().unwrap();
        assert_eq!(many.create(&plan(1, 256, 0)), Err(Errno::PERM));
        many.create(&plan(1, 2, 0)).unwrap();
        drop(many);
        let (surface, vector) = (large.map(1000).unwrap(), large.vector(0).unwrap());
        vector.set(0, exmap::Entry::new(0, 97));
        assert_eq!(vector.run(&large, exmap::ALLOC, 1), Ok(1));
        assert_eq!(vector.get(0).pages(), 96, "it works as for every user");
        // The frames live as long as the surface does.
        drop((vector, large));
        let last = fresh.pop().unwrap();
        refused(&last, 128);
        drop((small, surface));
        // No charge stays. The parent has the descriptors, too, until it closes them.
        wait_until(|| last.create(&plan(192, 1, 0)).is_ok());
    });
}
