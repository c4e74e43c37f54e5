//! Processes: which mappings a child has, and the state of a Morsel after a process has ended in
//! any way.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::io::{Read as _, Write as _, pipe};
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd};
use std::time::Duration;

use vellum_kernel_tests::child::{Child, End, execute, in_child, interrupt_constantly};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::{highest_order, kinds};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, access, morsel_turn, sys};
use vellum_uapi::morsel::{self, extent};

const MIB: u64 = 1 << 20;

/// A Morsel with its first and last page, and a mapping of it.
fn populated(order: u32, flags: u64) -> (Morsel, Mapping) {
    let morsel = Morsel::of((order, flags));
    let mapping = morsel.mapped();
    ends(order).iter().for_each(|page| mapping.stamp(*page, *page + 7));
    (morsel, mapping)
}

/// Its first and last page.
fn ends(order: u32) -> [u64; 2] {
    [0, extent(order) / PAGE as u64 - 1]
}

#[track_caller]
fn assert_unchanged(morsel: &Morsel, mapping: &Mapping) {
    for page in ends(morsel.stat().order) {
        mapping.assert_stamped(page, page + 7);
        morsel.assert_stamped(page, page + 7);
    }
}

#[track_caller]
fn assert_nothing_is_at(mapping: &Mapping, order: u32) {
    for page in ends(order) {
        let address = mapping.page(page);
        let fault = access::Fault { signal: libc::SIGSEGV, address };
        assert_eq!(access::load(address), Err(fault));
        assert_eq!(access::store(address, 1), Err(fault));
        assert_eq!(access::kernel_load(address, 1), Err(Errno::FAULT));
        assert_eq!(access::kernel_store(address, &[1]), Err(Errno::FAULT));
    }
}

#[test]
fn a_child_has_no_mapping() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let (morsel, mapping) = populated(order, flags);
        in_child(|| {
            assert_nothing_is_at(&mapping, order);
            assert_eq!(morsel.stat().mounts, 1, "the parent's");
        });
        assert_unchanged(&morsel, &mapping);
        assert_morsels_are_sound();
    }
}

#[test]
fn a_child_may_inherit_it() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let (morsel, mapping) = populated(order, flags | morsel::INHERIT);
        let [first, last] = ends(order);
        in_child(|| {
            assert_unchanged(&morsel, &mapping);
            assert_eq!(morsel.stat().mounts, 2);
            in_child(|| {
                assert_unchanged(&morsel, &mapping);
                assert_eq!(morsel.stat().mounts, 3);
                mapping.stamp(last, 99);
                assert_morsels_are_sound();
            });
            mapping.assert_stamped(last, 99);
            mapping.stamp(first, 100);
        });
        mapping.assert_stamped(last, if order == 0 { 100 } else { 99 });
        mapping.assert_stamped(first, 100);
        assert_eq!(morsel.stat().mounts, 1);
        assert_morsels_are_sound();
    }
}

/// A child cannot write to an inherited mapping for reading.
#[test]
fn a_child_inherits_no_more_rights() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let morsel = Morsel::of((order, flags | morsel::INHERIT));
        morsel.stamp(0, 7);
        let mapping = morsel.map(libc::PROT_READ).unwrap();
        let nothing = morsel.map(libc::PROT_NONE).unwrap();
        in_child(|| {
            let address = mapping.start();
            let fault = access::Fault { signal: libc::SIGSEGV, address };
            assert_eq!(access::store(address, 1), Err(fault), "before it is attached");
            mapping.assert_stamped(0, 7);
            assert_eq!(access::store(address, 1), Err(fault));
            assert!(access::load(nothing.start()).is_err());
        });
        morsel.assert_stamped(0, 7);
    }
}

#[test]
fn a_child_may_have_it_longer_than_the_parent() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let before = Memory::now();
        let (morsel, mapping) = populated(order, flags | morsel::INHERIT);
        let (mut wait, mut go) = pipe().unwrap();
        // The child goes on after this process has dropped the descriptor and the mapping, and so
        // does its own child.
        let (start, length) = (mapping.start(), mapping.length());
        let child = Child::start(|| {
            drop(morsel.reopened(true));
            wait.read_exact(&mut [0]).unwrap();
            in_child(|| {
                ends(order).iter().for_each(|page| mapping.assert_stamped(*page, page + 7));
            });
            sys::munmap(start, length).unwrap();
            0
        });
        drop((mapping, morsel));
        go.write_all(b"!").unwrap();
        assert_eq!(child.wait(), End::Status(0));
        before.assert_back();
    }
}

/// Children that inherit it and never access it.
#[test]
fn a_child_need_not_access_it() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let (morsel, mapping) = populated(order, flags | morsel::INHERIT);
        in_child(|| ());
        in_child(|| {
            // Changes for all processes affect the child, too.
            morsel.punch(0, PAGE as u64).unwrap();
            in_child(|| drop(morsel.mapped()));
            sys::mprotect(mapping.start(), mapping.length(), libc::PROT_READ).unwrap();
            assert!(access::store(mapping.start(), 1).is_err());
        });
        in_child(|| sys::munmap(mapping.start(), mapping.length()).unwrap());
        Child::start(|| execute(c"/bin/true")).wait();
        assert_eq!(morsel.stat().mounts, 1);
        assert_eq!(access::load(mapping.start()), Ok(0), "it was punched");
        assert_morsels_are_sound();
    }
}

/// Contents and rights are right after all kinds of advice about fork.
#[test]
fn advice_about_fork_does_no_harm() {
    let Some(_turn) = morsel_turn() else { return };
    let advice =
        [libc::MADV_DOFORK, libc::MADV_DONTFORK, libc::MADV_WIPEONFORK, libc::MADV_KEEPONFORK];
    for (order, flags) in kinds() {
        for flags in [flags, flags | morsel::INHERIT] {
            let (morsel, mapping) = populated(order, flags);
            for first in advice {
                for second in advice {
                    let (start, length) = (mapping.start(), mapping.length());
                    let given = sys::madvise(start, length, first);
                    let given = (given, sys::madvise(start, length, second));
                    let child = Child::start(|| {
                        let all = access::kernel_load(mapping.page(ends(order)[1]), PAGE);
                        let expected = access::stamped(ends(order)[1] + 7);
                        assert!(all == Err(Errno::FAULT) || all == Ok(expected), "{given:?}");
                        assert_morsels_are_sound();
                        0
                    });
                    assert_eq!(child.wait(), End::Status(0), "{order} {flags:#x} {given:?}");
                    assert_unchanged(&morsel, &mapping);
                }
            }
            assert_morsels_are_sound();
        }
    }
}

/// After MADV_DONTFORK, a child has no mapping.
#[test]
fn a_child_does_not_inherit_it_after_dontfork() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let (morsel, mapping) = populated(order, flags | morsel::INHERIT);
        sys::madvise(mapping.start(), mapping.length(), libc::MADV_DONTFORK).unwrap();
        in_child(|| assert_nothing_is_at(&mapping, order));
        assert_unchanged(&morsel, &mapping);
    }
}

#[test]
fn a_process_may_become_another_program() {
    let Some(_turn) = morsel_turn() else { return };
    let start = |order: u32, flags: u64| {
        Child::start(|| {
            let (morsel, mapping) = populated(order, flags);
            // The duplicate is not closed on exec, so the new program has it.
            let kept: OwnedFd = rustix::io::dup(&morsel).unwrap();
            std::mem::forget((morsel, mapping, kept));
            execute(c"/bin/true")
        })
    };
    assert_eq!(start(2, 0).wait(), End::Status(0));
    let before = Memory::now();
    for (order, flags) in kinds() {
        assert_eq!(start(order, flags).wait(), End::Status(0));
        assert_eq!(start(order, flags | morsel::INHERIT).wait(), End::Status(0));
    }
    before.assert_back();
}

/// A child that shares the parent's memory until it ends inherits nothing.
#[test]
fn vfork_changes_nothing() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let (morsel, mapping) = populated(order, flags);
        for _ in 0..5 {
            let done = std::process::Command::new("/bin/true").status().unwrap();
            assert!(done.success());
            assert_unchanged(&morsel, &mapping);
        }
        assert_eq!(morsel.stat().mounts, 1);
    }
}

/// The work of a child until it is killed.
fn busy(morsel: &Morsel, what: u64) {
    let size = 64 * MIB;
    let mapping = morsel.mapped();
    let mut random = Random::new(what);
    loop {
        match what {
            0 => drop(morsel.populate(0, size)),
            1 => drop(morsel.punch(0, size)),
            2 => {
                let _ = access::store(mapping.page(random.below(size / PAGE as u64)), 1);
            }
            3 => drop(morsel.mapped()),
            4 => drop(sys::mprotect(
                mapping.start(),
                mapping.length(),
                random.pick(&[libc::PROT_READ, sys::READ_WRITE, libc::PROT_NONE]),
            )),
            _ => {
                let bytes = vec![1; MIB as usize];
                let _ = rustix::io::pwrite(morsel, &bytes, random.below(size - MIB));
            }
        }
    }
}

#[test]
fn a_process_may_be_killed_at_any_time() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    let before = Memory::now();
    for (order, flags) in kinds().into_iter().filter(|(order, _)| *order > 1) {
        let morsel = Morsel::new(order, 64 * MIB, flags);
        for what in 0..6 {
            let start = |what| {
                Child::start(|| -> i32 {
                    loop {
                        busy(&morsel, what);
                    }
                })
            };
            let children = [start(what), start(0), start(1)];
            std::thread::sleep(Duration::from_millis(5 + random.below(60)));
            children.into_iter().for_each(Child::kill);
        }
        assert_eq!(morsel.stat().mounts, 0);
        assert_morsels_are_sound();
        morsel.seal(morsel::SEAL_CONTENT).expect("no writer is left");
    }
    before.assert_back();
}

/// All processes access all pages at once. Each page is populated once, and is the same for all.
#[test]
fn a_page_is_populated_once() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds().into_iter().filter(|(order, _)| *order > 0) {
        let length = extent(order).min(24 * MIB);
        let pages = length / PAGE as u64;
        let before = Memory::now();
        let morsel = Morsel::new(order, length, flags);
        let (wait, mut go) = pipe().unwrap();
        let start = |number: u64| {
            Child::start(|| {
                let mapping = morsel.mapped();
                (&wait).read_exact(&mut [0]).unwrap();
                for page in 0..pages {
                    // From both ends, so that some meet.
                    let page = if number.is_multiple_of(2) { page } else { pages - 1 - page };
                    // Each process has one byte in each page.
                    let address = mapping.page(page) + number as usize;
                    access::store(address, 0x40 + number as u8).unwrap();
                }
                morsel.populate(0, length).unwrap();
                0
            })
        };
        let children: Vec<Child> = (0..6).map(start).collect();
        go.write_all(&[0; 6]).unwrap();
        children.into_iter().for_each(|child| assert_eq!(child.wait(), End::Status(0)));
        let stat = morsel.stat();
        assert_eq!(stat.pages, pages);
        assert_morsels_are_sound();
        let mapping = morsel.mapped();
        for page in 0..pages {
            let found = access::kernel_load(mapping.page(page), 7).unwrap();
            assert_eq!(found, [0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0], "page {page}");
        }
        drop((mapping, morsel));
        before.assert_back();
    }
}

/// Sends a descriptor to the other end of a socket.
fn send(socket: &OwnedFd, sent: &impl AsRawFd) {
    let mut byte = 1_u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = [0_u64; 3];
    // SAFETY: all zeros is a valid value of this structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: there is room for one header and one descriptor.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(sent.as_raw_fd());
        message.msg_controllen = (*header).cmsg_len;
        let done = libc::sendmsg(socket.as_raw_fd(), &raw const message, 0);
        assert_eq!(done, 1, "sendmsg: {}", sys::last_error());
    }
}

/// Receives a descriptor.
fn receive(socket: &OwnedFd) -> OwnedFd {
    let mut byte = 0_u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = [0_u64; 3];
    // SAFETY: all zeros is a valid value of this structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the kernel writes no more than fits; the descriptor is new.
    unsafe {
        let done = libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0);
        assert_eq!(done, 1, "recvmsg: {}", sys::last_error());
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let number = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
        OwnedFd::from_raw_fd(number)
    }
}

/// Two connected sockets.
fn sockets() -> [OwnedFd; 2] {
    let mut pair = [0; 2];
    // SAFETY: there is room for two; they are new.
    unsafe {
        let made = libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr());
        assert_eq!(made, 0, "socketpair: {}", sys::last_error());
        pair.map(|number| OwnedFd::from_raw_fd(number))
    }
}

#[test]
fn a_descriptor_may_be_passed_to_another_process() {
    let Some(_turn) = morsel_turn() else { return };
    let before = Memory::now();
    for (order, flags) in kinds() {
        let [here, there] = sockets();
        let child = Child::start(|| {
            let morsel = Morsel::new(order, extent(order), flags);
            morsel.stamp(0, 42);
            send(&there, morsel.file());
            send(&there, morsel.for_reading().file());
            0
        });
        let (write, read) = (Morsel::from(receive(&here)), Morsel::from(receive(&here)));
        // The process that made it has ended.
        assert_eq!(child.wait(), End::Status(0));
        write.mapped().assert_stamped(0, 42);
        read.map(libc::PROT_READ).unwrap().assert_stamped(0, 42);
        assert_eq!(read.map(sys::READ_WRITE).unwrap_err(), Errno::ACCESS);
    }
    before.assert_back();
}

/// Descriptors in flight in sockets that no process can reach.
#[test]
fn a_descriptor_may_be_lost_in_flight() {
    let Some(_turn) = morsel_turn() else { return };
    let before = Memory::now();
    for round in 0..20 {
        let [one, other] = sockets();
        let morsel = Morsel::whole(2);
        morsel.populate(0, 2 * MIB).unwrap();
        let mapping = morsel.mapped();
        send(&one, morsel.file());
        // The sockets hold each other.
        if round % 2 == 0 {
            send(&one, &one);
            send(&other, &other);
        }
        drop((one, other, morsel));
        assert_eq!(access::load(mapping.start()), Ok(0));
    }
    // The kernel searches for such loops when another such socket is closed.
    let [one, other] = sockets();
    send(&one, &other);
    drop((one, other));
    before.assert_back();
}

/// Signals could prevent the first mapping in a process.
#[test]
fn signals_do_not_prevent_mapping_it() {
    let Some(_turn) = morsel_turn() else { return };
    for order in 0..=highest_order() {
        let (morsel, mapping) = populated(order, morsel::INHERIT);
        for round in 0..12 {
            in_child(|| {
                interrupt_constantly();
                match round % 3 {
                    0 => assert_unchanged(&morsel, &mapping),
                    1 => assert_eq!(access::load(mapping.start()), Ok(access::stamped(7)[0])),
                    _ => drop(morsel.mapped()),
                }
            });
        }
    }
}

/// The file system stays as long as a process uses it, and the module as long as the file system.
#[test]
fn the_file_system_is_not_unmounted_while_in_use() {
    let Some(_turn) = morsel_turn() else { return };
    let unmount = || {
        // SAFETY: a path, and flags.
        sys::checked(unsafe { libc::umount2(c"/run/vellum/morsels".as_ptr(), 0) }.into())
    };
    let remove = || {
        // SAFETY: a name, and flags.
        sys::checked(unsafe { libc::syscall(libc::SYS_delete_module, c"vellum".as_ptr(), 0) })
    };
    let (morsel, mapping) = populated(2, 0);
    assert_eq!(unmount(), Err(Errno::BUSY));
    assert!(matches!(remove(), Err(Errno::AGAIN | Errno::BUSY)));
    let file = morsel;
    drop(mapping);
    assert_eq!(unmount(), Err(Errno::BUSY), "there is a descriptor");
    let mapping = file.mapped();
    drop(file);
    assert_eq!(unmount(), Err(Errno::BUSY), "there is a mapping");
    mapping.assert_stamped(0, 7);
    drop(mapping);
    assert!(matches!(remove(), Err(Errno::AGAIN | Errno::BUSY)), "it is mounted");
}
