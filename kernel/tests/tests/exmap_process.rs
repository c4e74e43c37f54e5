//! Processes: a surface belongs to one process, and ends with it, however the process ends.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::io::{Read as _, Write as _, pipe};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use vellum_kernel_tests::child::{Child, End, execute, in_child, interrupt_constantly};
use vellum_kernel_tests::counters::Memory;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Exmap, Plan, Surface, access, turn};
use vellum_uapi::exmap::{self, Entry};

fn populated() -> Surface {
    let surface = Plan::new(2000, 256).make();
    assert_eq!(surface.alloc(0, &[(0, 1), (511, 2)]), [(0, 1), (0, 2)]);
    [0, 511, 512].iter().for_each(|page| surface.stamp(*page, *page));
    surface
}

#[track_caller]
fn assert_unchanged(surface: &Surface) {
    [0, 511, 512].iter().for_each(|page| surface.assert_stamped(*page, *page));
    surface.assert_works();
}

/// Signals could prevent the mapping of the first surface in a process.
#[test]
fn signals_do_not_prevent_mapping_a_surface() {
    let Some(_turn) = turn() else { return };
    for _ in 0..8 {
        let child = Child::start(|| {
            interrupt_constantly();
            let surface = Plan::new(1 << 24, 64).make();
            assert_eq!(surface.alloc(0, &[(1 << 23, 1)]), [(0, 1)]);
            0
        });
        assert_eq!(child.wait(), End::Status(0));
    }
}

#[test]
fn a_child_has_no_surface() {
    let Some(_turn) = turn() else { return };
    let surface = populated();
    in_child(|| {
        for page in [0, 1, 511, 1999] {
            let address = surface.mapping.page(page);
            assert!(access::load(address).is_err());
            assert!(access::store(address, 1).is_err());
            assert!(access::kernel_load(address, 1).is_err());
        }
    });
    assert_unchanged(&surface);
}

#[test]
fn commands_of_another_process_are_refused() {
    let Some(_turn) = turn() else { return };
    let surface = populated();
    surface.vectors[0].set(0, Entry::new(0, 1));
    in_child(|| {
        for command in [exmap::ALLOC, exmap::FREE] {
            assert_eq!(surface.exmap.command(command, exmap::vector(0, 1)), Err(Errno::PERM));
            assert_eq!(surface.exmap.command(command, exmap::vector(0, 512)), Err(Errno::PERM));
        }
        assert!(surface.exmap.map(2000).is_err(), "the surface belongs to another process");
        // The child may query, and it may use the vector, which is only memory.
        println!("STAT in another process: {:?}", surface.exmap.stat());
        println!("a vector in another process: {:?}", surface.exmap.vector(0));
        let private = surface.exmap.private();
        if let Ok(private) = &private {
            assert_eq!(private.command(exmap::FREE, exmap::vector(0, 1)), Err(Errno::PERM));
        }
    });
    assert_unchanged(&surface);
}

/// The process that has mapped the surface ends, while another process still has the descriptor.
#[test]
fn a_descriptor_may_outlive_the_process() {
    let Some(_turn) = turn() else { return };
    let before = Memory::now();
    let exmap = Exmap::with(4096, 1, 0);
    let child = Child::start(|| {
        let (mapping, vector) = (exmap.map(5000).unwrap(), exmap.vector(0).unwrap());
        vector.set(0, Entry::new(0, 4000));
        assert_eq!(vector.run(&exmap, exmap::ALLOC, 1), Ok(0));
        mapping.leave();
        0
    });
    assert_eq!(child.wait(), End::Status(0));
    let refused = exmap.command(exmap::ALLOC, exmap::vector(0, 1)).unwrap_err();
    assert!([Errno::PERM, Errno::NODEV].contains(&refused), "{refused}");
    println!("STAT afterwards: {:?}", exmap.stat());
    let mapped = exmap.map(5000).map(drop);
    println!("its surface, mapped by another process: {mapped:?}");
    drop(exmap);
    before.assert_back();
}

#[test]
fn a_private_descriptor_works_like_the_first() {
    let Some(_turn) = turn() else { return };
    let Surface { vectors, mapping, exmap } = Plan::new(2000, 256).interfaces(3).make();
    let private = exmap.private().unwrap();
    let second = private.private().unwrap();
    for (index, descriptor) in [&exmap, &private, &second].into_iter().enumerate() {
        vectors[index].set(0, Entry::new(index as u64 * 600, 1));
        assert_eq!(vectors[index].run(descriptor, exmap::ALLOC, 1), Ok(0));
        assert_eq!(descriptor.stat().unwrap().resident, index as u64 + 1);
        assert_eq!(descriptor.map(5).unwrap_err(), Errno::BUSY);
    }
    // Closing one of them does not affect the others.
    drop(exmap);
    let third = private.private().unwrap();
    drop(private);
    let surface = Surface { vectors, mapping, exmap: third };
    surface.assert_works();
    assert_eq!(surface.free(2, &[(0, 700)]), [(0, 2)]);
    drop(second);
    surface.assert_works();
    let flags = rustix::io::fcntl_getfd(surface.exmap.as_fd()).unwrap();
    assert_eq!(flags, rustix::io::FdFlags::CLOEXEC);
    assert_eq!(surface.exmap.command(exmap::CLONE, 1), Err(Errno::INVAL));
}

#[test]
fn a_private_descriptor_may_come_before_the_pool() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::open();
    // The module may refuse it then. If it does not, it is the same exmap.
    let Ok(private) = exmap.private() else { return };
    exmap.create(&vellum_kernel_tests::exmap::plan(10, 1, 0)).unwrap();
    assert_eq!(private.stat().unwrap().frames, 10);
    drop(exmap);
    assert!(private.map(100).is_ok());
}

#[test]
fn a_process_may_end_with_everything_mapped() {
    let Some(_turn) = turn() else { return };
    let end = || {
        let surface = Plan::new(1 << 20, 4096).interfaces(2).make();
        let ranges: Vec<(u64, u64)> = (0..400).map(|index| (index * 2600, 10)).collect();
        assert_eq!(surface.alloc(1, &ranges), vec![(0, 10); 400]);
        std::mem::forget(surface);
    };
    in_child(end);
    let before = Memory::now();
    (0..16).for_each(|_| in_child(end));
    before.assert_back();
}

#[test]
fn a_process_may_become_another_program() {
    let Some(_turn) = turn() else { return };
    let start = |keep: bool| {
        Child::start(|| {
            let surface = Plan::new(1 << 20, 4096).make();
            assert_eq!(surface.alloc(0, &[(0, 4000), (300_000, 96)]), [(0, 4000), (0, 96)]);
            // The duplicate is not closed on exec, so the new program has it, but no surface.
            let kept: Option<OwnedFd> = keep.then(|| rustix::io::dup(&surface.exmap).unwrap());
            std::mem::forget((surface, kept));
            execute(c"/bin/true")
        })
    };
    assert_eq!(start(false).wait(), End::Status(0));
    let before = Memory::now();
    for round in 0..16 {
        assert_eq!(start(round % 2 == 0).wait(), End::Status(0));
    }
    before.assert_back();
}

/// Threads of a child allocate and free until it is killed.
#[test]
fn a_process_may_be_killed_at_any_time() {
    let Some(_turn) = turn() else { return };
    let mut random = Random::of_this_run();
    let mut round = |flags: u64| {
        let (mut started, mut starts) = pipe().unwrap();
        let child = Child::start(|| {
            let surface = Plan::new(1 << 19, 4000).interfaces(4).flags(flags).make();
            std::thread::scope(|scope| {
                for interface in 0..4 {
                    let surface = &surface;
                    scope.spawn(move || allocate_and_free(surface, interface));
                }
                starts.write_all(b"!").unwrap();
            });
            0
        });
        drop(starts);
        started.read_exact(&mut [0]).unwrap();
        std::thread::sleep(Duration::from_millis(random.below(120)));
        child.kill();
    };
    (0..4).for_each(|_| round(0));
    let before = Memory::now();
    for flags in [0, exmap::READS_ZEROS, exmap::PINNABLE, 0] {
        (0..4).for_each(|_| round(flags));
    }
    before.assert_back();
}

fn allocate_and_free(surface: &Surface, interface: usize) {
    let mut random = Random::new(interface as u64);
    loop {
        let ranges: Vec<(u64, u64)> =
            (0..512).map(|_| (random.below((1 << 19) - 4), 1 + random.below(3))).collect();
        surface.alloc(interface, &ranges);
        for (page, _) in &ranges {
            // Other threads may have freed it.
            let _ = surface.store(*page, 1);
        }
        surface.free(interface, &ranges);
    }
}
