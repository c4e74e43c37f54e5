//! Seals, which forbid changes, and revocation, which takes the Morsel from all processes.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _, pipe};

use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::child::{Child, End, become_user, in_child};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::{ends, kinds, stamped};
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, morsel_turn, sys};
use vellum_uapi::morsel::{self, SEAL_CONTENT, SEAL_POPULATION, extent};

const MIB: u64 = 1 << 20;

#[track_caller]
fn assert_content_is_sealed(morsel: &Morsel, source: &Backing) {
    assert_eq!(rustix::io::pwrite(morsel, &[1], 0), Err(Errno::PERM));
    assert_eq!(morsel.punch(0, 4096), Err(Errno::PERM));
    assert_eq!(morsel.fill(&source.file, 0, 0, 4096), (0, Err(Errno::PERM)));
    assert_eq!(morsel.map(sys::READ_WRITE).unwrap_err(), Errno::PERM);
    assert_eq!(morsel.map(libc::PROT_WRITE).unwrap_err(), Errno::PERM);
    let mapping = morsel.map(libc::PROT_READ).unwrap();
    let (start, length) = (mapping.start(), mapping.length());
    for protection in [sys::READ_WRITE, libc::PROT_WRITE] {
        assert_eq!(sys::mprotect(start, length, protection), Err(Errno::ACCESS));
    }
    let removed = sys::madvise(start, PAGE, libc::MADV_REMOVE);
    assert!(matches!(removed, Err(Errno::ACCESS | Errno::PERM)), "{removed:?}");
    let fault = Fault { signal: libc::SIGSEGV, address: start };
    assert_eq!(access::store(start, 1), Err(fault));
    mapping.assert_stamped(0, 7);
}

#[test]
fn sealed_content_does_not_change() {
    let Some(_turn) = morsel_turn() else { return };
    let source = Backing::cached(1);
    for kind in kinds() {
        let morsel = stamped(kind);
        assert_eq!(morsel.stat().seals, 0);
        morsel.seal(SEAL_CONTENT).unwrap();
        assert_eq!(morsel.stat().seals, SEAL_CONTENT);
        assert_content_is_sealed(&morsel, &source);
        // Through a new descriptor, as another process with the right to open it has one.
        assert_content_is_sealed(&morsel.reopened(true).unwrap(), &source);
        in_child(|| assert_content_is_sealed(&morsel, &source));
        assert_eq!(morsel.seal(0), Ok(()));
        assert_eq!(morsel.seal(SEAL_CONTENT), Ok(()));
        assert_eq!(morsel.stat().seals, SEAL_CONTENT, "a seal cannot be undone");
        // Populating a hole does not change the content.
        morsel.populate(0, extent(kind.0).min(8 * MIB)).unwrap();
        morsel.assert_stamped(0, 7);
        assert_morsels_are_sound();
    }
}

#[test]
fn a_wrong_seal_is_refused() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = stamped((1, 0));
    for seals in [4, 1 << 63, u64::MAX, 4 | SEAL_CONTENT] {
        assert_eq!(morsel.seal(seals), Err(Errno::INVAL));
    }
    assert_eq!(morsel.for_reading().seal(SEAL_CONTENT), Err(Errno::BADF));
    assert_eq!(morsel.for_reading().seal(SEAL_POPULATION), Err(Errno::BADF));
    assert_eq!(morsel.stat().seals, 0);
    morsel.mapped().stamp(0, 8);
}

/// Every possible writer prevents sealing the content.
#[test]
fn content_cannot_be_sealed_while_a_process_may_write() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let morsel = stamped((order, flags | morsel::INHERIT));
        for protection in [sys::READ_WRITE, libc::PROT_READ, libc::PROT_NONE] {
            let mapping = morsel.map(protection).unwrap();
            assert_eq!(morsel.seal(SEAL_CONTENT), Err(Errno::BUSY));
            sys::mprotect(mapping.start(), mapping.length(), libc::PROT_READ).unwrap();
            assert_eq!(
                morsel.seal(SEAL_CONTENT),
                Err(Errno::BUSY),
                "the process may get the right back"
            );
            sys::mprotect(mapping.start(), mapping.length(), sys::READ_WRITE).unwrap();
            mapping.stamp(0, 7);
            // A child counts, whether it accesses the mapping or not.
            let (mut wait, mut go) = pipe().unwrap();
            let child = Child::start(|| {
                wait.read_exact(&mut [0]).unwrap();
                mapping.stamp(0, 7);
                wait.read_exact(&mut [0]).unwrap();
                0
            });
            drop(mapping);
            assert_eq!(morsel.seal(SEAL_CONTENT), Err(Errno::BUSY), "the child");
            go.write_all(b"!").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(morsel.seal(SEAL_CONTENT | SEAL_POPULATION), Err(Errno::BUSY));
            assert_eq!(morsel.stat().seals, 0, "not even a part of it");
            go.write_all(b"!").unwrap();
            assert_eq!(child.wait(), End::Status(0));
        }
        // Other seals and readers do not matter.
        let reader = morsel.for_reading().map(libc::PROT_READ).unwrap();
        reader.assert_stamped(0, 7);
        let writer = morsel.mapped();
        morsel.seal(SEAL_POPULATION).unwrap();
        drop(writer);
        morsel.seal(SEAL_CONTENT).unwrap();
        reader.assert_stamped(0, 7);
        assert_eq!(morsel.stat().seals, SEAL_CONTENT | SEAL_POPULATION);
    }
}

/// A write in progress, whose source is a pipe, or memory that is populated late.
#[test]
fn content_cannot_be_sealed_during_a_write() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::new(2, 256 * MIB, 0);
    let bytes = vec![3_u8; 64 << 20];
    let (mut sealed, mut busy) = (false, 0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = 0;
            loop {
                match rustix::io::pwrite(&morsel, &bytes, 0) {
                    Ok(count) => written += count,
                    Err(error) => return (written, error),
                }
            }
        });
        while !sealed {
            match morsel.seal(SEAL_CONTENT) {
                Ok(()) => sealed = true,
                Err(error) => {
                    assert_eq!(error, Errno::BUSY);
                    busy += 1;
                }
            }
        }
        let pages = morsel.stat().pages;
        let mut first = vec![0; 64 << 20];
        let _ = rustix::io::pread(&morsel, &mut first[..], 0);
        let (written, error) = writer.join().unwrap();
        assert_eq!(error, Errno::PERM);
        assert_eq!(morsel.stat().pages, pages, "after {written} bytes, {busy} times busy");
        let mut second = vec![0; 64 << 20];
        let _ = rustix::io::pread(&morsel, &mut second[..], 0);
        assert!(first == second, "it was written after it was sealed");
    });
}

#[test]
fn sealed_holes_stay_holes() {
    let Some(_turn) = morsel_turn() else { return };
    let source = Backing::cached(8);
    for kind in kinds().into_iter().filter(|(order, _)| *order > 0) {
        let morsel = Morsel::new(kind.0, extent(kind.0), kind.1);
        let mapping = morsel.mapped();
        let reader = morsel.map(libc::PROT_READ).unwrap();
        let huge = if kind.1 == morsel::HUGE { 512 } else { 1 };
        morsel.stamp(0, 7);
        let pages = morsel.stat().pages;
        assert_eq!(pages, huge);
        morsel.seal(SEAL_POPULATION).unwrap();
        let page = ends(kind.0)[1];
        let check = |there: &Mapping| {
            let fault = Fault { signal: libc::SIGBUS, address: there.page(page) };
            assert_eq!(access::load(there.page(page)), Err(fault));
            assert_eq!(access::kernel_load(there.page(page), 8), Err(Errno::FAULT));
            there.assert_stamped(0, 7);
        };
        check(&mapping);
        check(&reader);
        let fault = Fault { signal: libc::SIGBUS, address: mapping.page(page) };
        assert_eq!(access::store(mapping.page(page), 1), Err(fault));
        check(&morsel.mapped());
        check(&morsel.for_reading().map(libc::PROT_READ).unwrap());
        let offset = page * PAGE as u64;
        assert_eq!(morsel.populate(offset, 4096), Err(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&morsel, &[1], offset), Err(Errno::PERM));
        assert_eq!(morsel.fill(&source.file, 0, offset, 4096), (0, Err(Errno::PERM)));
        // Present pages may be written, read and punched. Punched pages are gone.
        morsel.populate(0, huge * PAGE as u64).unwrap();
        morsel.stamp(0, 8);
        assert_eq!(morsel.fill(&source.file, 0, 0, 4096), (4096, Ok(())));
        mapping.assert_stamped(0, 0);
        let mut byte = [1];
        assert_eq!(rustix::io::pread(&morsel, &mut byte, offset), Ok(1));
        assert_eq!(byte, [0]);
        morsel.punch(0, 4096).unwrap();
        let fault = Fault { signal: libc::SIGBUS, address: mapping.start() };
        assert_eq!(access::load(mapping.start()), Err(fault));
        assert_eq!(access::load(reader.start()), Err(Fault { address: reader.start(), ..fault }));
        assert_eq!(morsel.stat().pages, huge - 1);
        if huge > 1 {
            assert_eq!(access::load(mapping.page(1)), Ok(0));
        }
        assert_morsels_are_sound();
    }
}

#[track_caller]
fn assert_revoked(morsel: &Morsel) {
    let source = Backing::cached(1);
    assert_eq!(rustix::io::pread(morsel, &mut [0], 0), Err(Errno::IO));
    assert_eq!(rustix::io::pwrite(morsel, &[0], 0), Err(Errno::IO));
    assert_eq!(morsel.populate(0, 4096), Err(Errno::IO));
    assert_eq!(morsel.punch(0, 4096), Err(Errno::IO));
    assert_eq!(morsel.fill(&source.file, 0, 0, 4096), (0, Err(Errno::IO)));
    assert_eq!(morsel.seal(SEAL_POPULATION), Err(Errno::IO));
    assert_eq!(morsel.map(sys::READ_WRITE).unwrap_err(), Errno::IO);
    assert_eq!(morsel.map(libc::PROT_READ).unwrap_err(), Errno::IO);
    assert_eq!(morsel.for_reading().map(libc::PROT_READ).unwrap_err(), Errno::IO);
    assert_eq!(morsel.pages_by_fstat(), 0);
    assert_eq!(morsel.revoke(), Ok(()), "once more");
}

#[track_caller]
fn assert_lost(mapping: &Mapping, order: u32) {
    for page in ends(order) {
        let fault = Fault { signal: libc::SIGBUS, address: mapping.page(page) };
        assert_eq!(access::load(mapping.page(page)), Err(fault));
        assert_eq!(access::kernel_load(mapping.page(page), 8), Err(Errno::FAULT));
    }
}

#[test]
fn all_processes_lose_a_revoked_morsel() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let before = Memory::now();
        let morsel = stamped((order, flags | morsel::INHERIT));
        let (mapping, reader) = (morsel.mapped(), morsel.map(libc::PROT_READ).unwrap());
        let (wait, mut go) = pipe().unwrap();
        let (mut ready, readies) = pipe().unwrap();
        let start = |accesses: bool| {
            Child::start(|| {
                if accesses {
                    mapping.assert_stamped(0, 7);
                    reader.assert_stamped(0, 7);
                }
                let own = morsel.mapped();
                own.assert_stamped(0, 7);
                (&readies).write_all(b"!").unwrap();
                (&wait).read_exact(&mut [0]).unwrap();
                assert_lost(&own, order);
                assert_lost(&mapping, order);
                assert_lost(&reader, order);
                assert_revoked(&morsel);
                0
            })
        };
        let children = [start(true), start(false), start(true)];
        ready.read_exact(&mut [0; 3]).unwrap();
        morsel.revoke().unwrap();
        assert_eq!(morsel.pages_by_fstat(), 0);
        assert_lost(&mapping, order);
        assert_lost(&reader, order);
        assert_revoked(&morsel);
        go.write_all(b"!!!").unwrap();
        children.into_iter().for_each(|child| assert_eq!(child.wait(), End::Status(0)));
        // Changing rights does not restore access.
        sys::mprotect(mapping.start(), mapping.length(), libc::PROT_READ).unwrap();
        assert_lost(&mapping, order);
        assert_morsels_are_sound();
        drop((mapping, reader, morsel));
        before.assert_back();
    }
}

/// A child forked later has the parent's mapping.
#[test]
fn a_later_child_has_no_access_to_a_revoked_morsel() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let morsel = stamped((order, flags | morsel::INHERIT));
        let (mapping, reader) = (morsel.mapped(), morsel.for_reading());
        let reader = reader.map(libc::PROT_READ).unwrap();
        morsel.revoke().unwrap();
        in_child(|| {
            assert_lost(&reader, order);
            assert_lost(&mapping, order);
        });
    }
}

#[test]
fn revoked_memory_is_free_at_once() {
    let Some(_turn) = morsel_turn() else { return };
    for flags in [0, morsel::PINNABLE, morsel::HUGE] {
        let before = Memory::now();
        let morsel = Morsel::new(2, 256 * MIB, flags);
        let mapping = morsel.mapped();
        morsel.populate(0, 256 * MIB).unwrap();
        morsel.revoke().unwrap();
        // The few tables stay.
        assert_eq!(morsel.pages_by_fstat(), 0);
        assert_lost(&mapping, 2);
        drop((mapping, morsel));
        before.assert_back();
    }
}

#[test]
fn a_morsel_without_a_shape_may_be_sealed_or_revoked() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::nameless();
    morsel.revoke().unwrap();
    let create = vellum_kernel_tests::morsel::plan(1, 4096, 0);
    assert_eq!(morsel.create(&create), Err(Errno::IO));
    let morsel = Morsel::nameless();
    let sealed = morsel.seal(SEAL_CONTENT);
    println!("sealed without a shape: {sealed:?}");
    let created = morsel.create(&create);
    println!("created when sealed: {created:?}");
    assert_morsels_are_sound();
}

/// Only the owner may revoke it, whichever processes have a descriptor.
#[test]
fn only_the_owner_revokes() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = stamped((2, 0));
    in_child(|| {
        become_user(1 << 30);
        assert_eq!(morsel.revoke(), Err(Errno::PERM));
        // The owner may, by any descriptor.
        let own = stamped((2, 0));
        let mapping = own.mapped();
        own.for_reading().revoke().unwrap();
        assert_lost(&mapping, 2);
    });
    morsel.assert_stamped(0, 7);
    assert!(morsel.command(morsel::REVOKE, 1).is_err());
    morsel.assert_stamped(0, 7);
    // Root may revoke a user's Morsel.
    let users = stamped((2, 0));
    rustix::fs::fchown(&users, Some(rustix::fs::Uid::from_raw(65534)), None).unwrap();
    in_child(|| {
        become_user(1 << 30);
        users.assert_stamped(0, 7);
    });
    users.revoke().unwrap();
    assert_revoked(&users);
}

/// Processes populate pages while it is revoked.
#[test]
fn no_page_is_populated_after_revocation() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let length = extent(kind.0).min(64 * MIB);
        for round in 0..4 {
            let morsel = Morsel::new(kind.0, length, kind.1);
            let (mut ready, ready_now) = pipe().unwrap();
            let (wait, mut go) = pipe().unwrap();
            let start = |what: u64| {
                Child::start(|| {
                    let mapping = morsel.mapped();
                    (&ready_now).write_all(b"!").unwrap();
                    let pages = length / PAGE as u64;
                    for page in (0..pages).cycle() {
                        let lost = match what {
                            0 => access::store(mapping.page(page), 1).is_err(),
                            1 => morsel.populate(0, length) == Err(Errno::IO),
                            _ => rustix::io::pwrite(&morsel, &[1; 9000], 0) == Err(Errno::IO),
                        };
                        if lost {
                            break;
                        }
                    }
                    // Revocation has begun; now it is done.
                    (&wait).read_exact(&mut [0]).unwrap();
                    assert_lost(&mapping, kind.0);
                    0
                })
            };
            let children = [start(0), start(1), start(2)];
            ready.read_exact(&mut [0; 3]).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(2 * round));
            morsel.revoke().unwrap();
            go.write_all(b"!!!").unwrap();
            children.into_iter().for_each(|child| assert_eq!(child.wait(), End::Status(0)));
            assert_eq!(morsel.pages_by_fstat(), 0);
            assert_morsels_are_sound();
        }
    }
}

/// Children that populate all of the Morsel again and again until it is refused.
fn populating(morsel: &Morsel, length: u64) -> [Child; 2] {
    let refused = [Err(Errno::IO), Err(Errno::PERM)];
    [(); 2].map(|()| {
        Child::start(|| {
            while !refused.contains(&morsel.populate(0, length)) {
                if morsel.punch(0, length).is_err() {
                    break;
                }
            }
            0
        })
    })
}

/// A thread that populates a page may have looked for seals and revocation before, and put the page
/// after. Then it takes long, as with 2 MiB of zeros.
#[test]
fn no_page_comes_for_a_moment_after_a_revocation_or_a_seal() {
    let Some(_turn) = morsel_turn() else { return };
    let length = 64 * MIB;
    for round in 0..60 {
        let morsel = Morsel::new(2, length, morsel::HUGE);
        let mapping = morsel.mapped();
        let children = populating(&morsel, length);
        std::thread::sleep(std::time::Duration::from_micros(500 * (round % 7)));
        let is_sealed = round % 2 == 0;
        match is_sealed {
            true => morsel.seal(SEAL_POPULATION).unwrap(),
            false => morsel.revoke().unwrap(),
        }
        // The children may still take pages off after a seal, until they end.
        let mut least = morsel.pages_by_fstat();
        for _ in 0..200 {
            let pages = morsel.pages_by_fstat();
            assert!(pages <= least, "{} pages came", pages - least);
            least = pages;
            let lost = access::load(mapping.page(0)).is_err();
            assert!(is_sealed || lost, "a revoked Morsel shows a page");
        }
        children.into_iter().for_each(|child| assert_eq!(child.wait(), End::Status(0)));
        assert!(morsel.pages_by_fstat() <= if is_sealed { least } else { 0 });
        assert_morsels_are_sound();
    }
}
