//! Rights: no call writes memory that a process may not write. For memory that it may write, all
//! calls work that the kind of Morsel allows.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{Write as _, pipe};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::backing::{Backing, scratch};
use vellum_kernel_tests::child::{Child, End, in_child};
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::{ends, kinds, stamped};
use vellum_kernel_tests::threads::{Deadline, Stop};
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, Plan, morsel_turn, sys};
use vellum_uapi::morsel;

fn own() -> i32 {
    std::process::id() as i32
}

/// Writes memory as debuggers do, and reads it.
fn own_memory() -> File {
    OpenOptions::new().read(true).write(true).open("/proc/self/mem").unwrap()
}

fn ptrace(request: u32, process: i32, address: usize, data: u64) -> Result<u64, Errno> {
    let mut word = 0_u64;
    let data = if request == libc::PTRACE_PEEKDATA { (&raw mut word) as u64 } else { data };
    // SAFETY: the process is a traced child with its own memory, and the address for a word is
    // valid.
    let done = unsafe { libc::syscall(libc::SYS_ptrace, request, process, address, data) };
    sys::checked(done).map(|_| word)
}

/// Tries all calls that write there. Each is refused.
#[track_caller]
fn assert_not_written(address: usize, direct: &File) {
    let fault = Fault { signal: libc::SIGSEGV, address };
    assert_eq!(access::store(address, 0xee), Err(fault), "an instruction");
    assert_eq!(access::kernel_store(address, &[0xee; 64]), Err(Errno::FAULT), "read");
    let read = sys::pread(direct.as_fd(), address, PAGE, 0);
    assert_eq!(read, Err(Errno::FAULT), "direct I/O");
    let parts = [(address, PAGE)];
    assert_eq!(sys::preadv(direct.as_fd(), &parts, 0), Err(Errno::FAULT), "direct I/O of parts");
    let written = sys::process_vm_writev(own(), address, &[0xee; 64]);
    assert_eq!(written, Err(Errno::FAULT), "process_vm_writev");
    assert!(own_memory().write_at(&[0xee; 64], address as u64).is_err(), "/proc/self/mem");
}

/// The same by a debugger, for a stopped child.
#[track_caller]
fn assert_no_debugger_writes(process: i32, address: usize) {
    assert!(ptrace(libc::PTRACE_POKEDATA, process, address, 0xee).is_err(), "a debugger");
    let written = sys::process_vm_writev(process, address, &[0xee; 64]);
    assert_eq!(written, Err(Errno::FAULT), "process_vm_writev");
    let memory = OpenOptions::new().write(true).open(format!("/proc/{process}/mem")).unwrap();
    assert!(memory.write_at(&[0xee; 64], address as u64).is_err(), "its memory");
}

/// A stopped child, to be traced.
fn traced(work: impl FnOnce()) -> Child {
    let child = Child::start(|| {
        work();
        ptrace(libc::PTRACE_TRACEME, 0, 0, 0).unwrap();
        // SAFETY: it stops this process.
        unsafe { libc::raise(libc::SIGSTOP) };
        0
    });
    let mut status = 0;
    // SAFETY: `status` is this function's.
    unsafe { libc::waitpid(child.process(), &raw mut status, libc::WUNTRACED) };
    assert!(libc::WIFSTOPPED(status), "{status:#x}");
    child
}

fn go_on(child: Child) {
    ptrace(libc::PTRACE_DETACH, child.process(), 0, 0).unwrap();
    assert_eq!(child.wait(), End::Status(0));
}

/// All calls on a mapping for reading, before and after its pages are mapped.
#[test]
fn a_mapping_for_reading_is_never_written() {
    let Some(_turn) = morsel_turn() else { return };
    let source = Backing::direct(2);
    for kind in kinds() {
        let morsel = stamped(kind);
        // Another process may write.
        let other = morsel.mapped();
        let (reader, owner) = (morsel.for_reading(), &morsel);
        for descriptor in [&reader, owner] {
            let mapping = descriptor.map(libc::PROT_READ).unwrap();
            for page in ends(kind.0) {
                assert_not_written(mapping.page(page), &source.file);
                mapping.assert_stamped(page, page + 7);
                assert_not_written(mapping.page(page), &source.file);
                other.stamp(page, page + 7);
                assert_not_written(mapping.page(page), &source.file);
                mapping.assert_stamped(page, page + 7);
            }
            assert_morsels_are_sound();
        }
    }
}

/// A page that a reader populates, and an absent one, cannot be written, either.
#[test]
fn a_hole_that_is_mapped_for_reading_is_not_written() {
    let Some(_turn) = morsel_turn() else { return };
    let source = Backing::direct(2);
    for kind in kinds() {
        let morsel = Morsel::of(kind);
        let mapping = morsel.map(libc::PROT_READ).unwrap();
        for page in ends(kind.0) {
            assert_not_written(mapping.page(page), &source.file);
            assert_eq!(access::load(mapping.page(page)), Ok(0));
            assert_not_written(mapping.page(page), &source.file);
            morsel.stamp(page, page + 7);
            mapping.assert_stamped(page, page + 7);
            morsel.punch(page * PAGE as u64, PAGE as u64).unwrap();
            assert!(access::kernel_load(mapping.page(page), PAGE) == Ok(vec![0; PAGE]));
            assert_not_written(mapping.page(page), &source.file);
        }
        assert_morsels_are_sound();
    }
}

#[test]
fn a_debugger_writes_what_the_process_may_write() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let morsel = stamped(kind);
        let mut places = [0; 2];
        let (mut told, mut tell) = pipe().unwrap();
        let child = traced(|| {
            let (read, write) = (morsel.map(libc::PROT_READ).unwrap(), morsel.mapped());
            for mapping in [&read, &write] {
                mapping.assert_stamped(0, 7);
                tell.write_all(&mapping.start().to_le_bytes()).unwrap();
            }
            std::mem::forget((read, write));
        });
        for place in &mut places {
            let mut bytes = [0; 8];
            std::io::Read::read_exact(&mut told, &mut bytes).unwrap();
            *place = usize::from_le_bytes(bytes);
        }
        let [read, write] = places;
        let process = child.process();
        assert_no_debugger_writes(process, read);
        morsel.assert_stamped(0, 7);
        let first = u64::from_le_bytes(access::stamped(7)[..8].try_into().unwrap());
        for place in places {
            assert_eq!(ptrace(libc::PTRACE_PEEKDATA, process, place, 0), Ok(first));
            let memory = File::open(format!("/proc/{process}/mem")).unwrap();
            let mut bytes = vec![0; PAGE];
            memory.read_exact_at(&mut bytes, place as u64).unwrap();
            assert!(bytes == access::stamped(7));
        }
        assert_eq!(ptrace(libc::PTRACE_POKEDATA, process, write, !first), Ok(0));
        assert_eq!(ptrace(libc::PTRACE_PEEKDATA, process, read, 0), Ok(!first));
        let memory = OpenOptions::new().write(true).open(format!("/proc/{process}/mem")).unwrap();
        memory.write_all_at(&access::stamped(9), write as u64).unwrap();
        go_on(child);
        morsel.assert_stamped(0, 9);
    }
}

/// A mapping without rights cannot be accessed, from the beginning.
#[test]
fn a_mapping_without_rights_is_never_accessed() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let morsel = stamped(kind);
        let mapping = morsel.map(libc::PROT_NONE).unwrap();
        let (start, length) = (mapping.start(), mapping.length());
        for round in 0..2 {
            for page in ends(kind.0) {
                let address = mapping.page(page);
                let fault = Fault { signal: libc::SIGSEGV, address };
                assert_eq!(access::load(address), Err(fault), "{kind:x?}, round {round}");
                assert_eq!(access::store(address, 1), Err(fault));
                assert_eq!(access::kernel_load(address, 8), Err(Errno::FAULT));
                assert_eq!(access::kernel_store(address, &[1]), Err(Errno::FAULT));
            }
            sys::mprotect(start, length, sys::READ_WRITE).unwrap();
            mapping.assert_stamped(0, 7);
            sys::mprotect(start, length, libc::PROT_NONE).unwrap();
        }
        ends(kind.0).iter().for_each(|page| morsel.assert_stamped(*page, page + 7));
    }
}

/// Writable memory is readable, too, because processors have no other rights.
#[test]
fn a_mapping_for_writing_is_written() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let morsel = stamped(kind);
        let mapping = morsel.map(libc::PROT_WRITE).unwrap();
        mapping.stamp(0, 8);
        morsel.assert_stamped(0, 8);
    }
}

#[test]
fn a_descriptor_for_reading_gives_no_right_to_write() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let morsel = stamped(kind);
        let reader = morsel.for_reading();
        assert_eq!(reader.map(sys::READ_WRITE).unwrap_err(), Errno::ACCESS);
        let mapping = reader.map(libc::PROT_READ).unwrap();
        let (start, length) = (mapping.start(), mapping.length());
        for protection in [sys::READ_WRITE, libc::PROT_WRITE, 7, 5, libc::PROT_EXEC] {
            assert_eq!(sys::mprotect(start, length, protection), Err(Errno::ACCESS));
            mapping.assert_stamped(0, 7);
        }
        assert_eq!(reader.populate(0, 4096), Err(Errno::BADF));
        assert_eq!(reader.punch(0, 4096), Err(Errno::BADF));
        assert_eq!(reader.seal(morsel::SEAL_CONTENT), Err(Errno::BADF));
        let source = Backing::cached(1);
        assert_eq!(reader.fill(&source.file, 0, 0, 4096), (0, Err(Errno::BADF)));
        assert_eq!(rustix::io::pwrite(&reader, &[1], 0), Err(Errno::BADF));
        assert!(sys::madvise(start, length, libc::MADV_REMOVE).is_err());
        mapping.assert_stamped(0, 7);
    }
}

/// The rights of a whole mapping change in any order. Present pages stay.
#[test]
fn rights_change_in_any_order() {
    let Some(_turn) = morsel_turn() else { return };
    let (none, read, write) = (libc::PROT_NONE, libc::PROT_READ, sys::READ_WRITE);
    let source = Backing::direct(2);
    for kind in kinds() {
        let morsel = stamped(kind);
        let (mapping, other) = (morsel.mapped(), morsel.mapped());
        let (start, length) = (mapping.start(), mapping.length());
        let mut stamp = 7;
        for protection in [read, write, none, read, none, write, read, read, write, write, none] {
            sys::mprotect(start, length, protection).unwrap();
            if protection != none {
                mapping.assert_stamped(0, stamp);
            } else {
                assert!(access::load(start).is_err());
            }
            if protection == write {
                stamp += 1;
                mapping.stamp(0, stamp);
            } else {
                assert_not_written(start, &source.file);
            }
            // Other processes are not affected.
            other.assert_stamped(0, stamp);
            in_child(|| assert!(access::load(start).is_err()));
            stamp += 1;
            other.stamp(0, stamp);
            assert_morsels_are_sound();
        }
    }
}

/// A fault begins while there are rights, and ends after they are gone. The fault takes long,
/// because it populates the page, and other threads wait for it, too.
#[test]
fn no_fault_undoes_mprotect() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in [(2, 0), (3, 0), (2, morsel::HUGE), (3, morsel::HUGE)] {
        let morsel = Morsel::of((order, flags));
        let mapping = morsel.mapped();
        let (start, length) = (mapping.start(), mapping.length());
        let stop = Stop::default();
        let load = || {
            while !stop.is_said() {
                // With a present page, and with an absent one.
                let _ = access::load(start);
            }
        };
        std::thread::scope(|scope| {
            let _at_end = stop.at_end();
            (0..3).for_each(|_| drop(scope.spawn(load)));
            let deadline = Deadline::after_ms(1000);
            for _ in deadline.rounds() {
                morsel.punch(0, 2 << 20).unwrap();
                sys::mprotect(start, length, sys::READ_WRITE).unwrap();
                std::thread::yield_now();
                sys::mprotect(start, length, libc::PROT_NONE).unwrap();
                for _ in 0..2 {
                    let loaded = access::kernel_load(start, 1);
                    assert_eq!(loaded, Err(Errno::FAULT), "order {order}, flags {flags:#x}");
                    std::thread::yield_now();
                }
            }
        });
        assert_morsels_are_sound();
    }
}

/// The mapping of another process does not change.
#[test]
fn rights_belong_to_a_process() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let morsel = stamped((order, flags | morsel::INHERIT));
        let mapping = morsel.mapped();
        in_child(|| {
            mapping.assert_stamped(0, 7);
            sys::mprotect(mapping.start(), mapping.length(), libc::PROT_READ).unwrap();
            assert!(access::store(mapping.start(), 1).is_err());
            in_child(|| assert!(access::store(mapping.start(), 1).is_err()));
        });
        mapping.stamp(0, 8);
        sys::mprotect(mapping.start(), mapping.length(), libc::PROT_READ).unwrap();
        in_child(|| {
            assert!(access::store(mapping.start(), 1).is_err());
            sys::mprotect(mapping.start(), mapping.length(), sys::READ_WRITE).unwrap();
            mapping.stamp(0, 9);
        });
        mapping.assert_stamped(0, 9);
        assert!(access::store(mapping.start(), 1).is_err());
    }
}

/// Direct I/O, and other calls that pin pages, in a mapping for writing.
#[test]
fn only_pages_of_pinnable_morsels_can_be_pinned() {
    let Some(_turn) = morsel_turn() else { return };
    let source = Backing::direct(2);
    let path = scratch().join("morsel-rights");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let file = options.open(&path).unwrap();
    for (order, flags) in kinds() {
        let morsel = stamped((order, flags));
        let mapping = morsel.mapped();
        let address = mapping.page(ends(order)[1]);
        let stamp = ends(order)[1] + 7;
        let outcomes = |mapping: &Mapping| {
            let (_reader, writer) = pipe().unwrap();
            let mut bytes = vec![0; 64];
            [
                sys::pwrite(file.as_fd(), address, PAGE, 0).map(|_| ()),
                sys::process_vm_readv(own(), address, &mut bytes).map(|_| ()),
                sys::process_vm_writev(own(), address, &access::stamped(stamp)).map(|_| ()),
                sys::vmsplice(writer.as_fd(), address, PAGE).map(|_| ()),
                sys::pread(source.file.as_fd(), mapping.start(), PAGE, 4096).map(|_| ()),
            ]
        };
        let expected = if flags == morsel::PINNABLE { Ok(()) } else { Err(Errno::FAULT) };
        assert_eq!(outcomes(&mapping), [expected; 5], "order {order}, flags {flags:#x}");
        if expected.is_ok() {
            mapping.assert_stamped(0, 1);
        }
        if order > 0 {
            mapping.assert_stamped(ends(order)[1], stamp);
        }
        // Also before any page is present, and after mapping it again.
        let fresh = Morsel::of((order, flags));
        let mapping = fresh.mapped();
        let read = sys::pread(source.file.as_fd(), mapping.start(), PAGE, 0).map(|_| ());
        assert_eq!(read, expected);
    }
    std::fs::remove_file(path).unwrap();
}

/// A direct read into a page continues after the page was punched, and reaches no other user of
/// memory.
#[test]
fn a_held_page_has_no_other_user() {
    let Some(_turn) = morsel_turn() else { return };
    for order in 0..=3 {
        let morsel = stamped((order, morsel::PINNABLE));
        let mapping = morsel.mapped();
        let (mut reader, writer) = pipe().unwrap();
        assert_eq!(sys::vmsplice(writer.as_fd(), mapping.start(), PAGE), Ok(PAGE as u64));
        morsel.punch(0, PAGE as u64).unwrap();
        assert_eq!(access::load(mapping.start()), Ok(0));
        let other = Morsel::whole(2);
        for page in 0..2048 {
            other.stamp(page, 99);
        }
        let mut bytes = vec![0; PAGE];
        std::io::Read::read_exact(&mut reader, &mut bytes).unwrap();
        assert!(bytes == access::stamped(7), "the held page has changed");
    }
}

/// Futexes, by which processes wait for each other.
#[test]
fn futexes_between_processes() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let morsel = stamped((order, flags));
        let mapping = morsel.mapped();
        // SAFETY: waking touches no memory.
        let woken = sys::checked(unsafe {
            libc::syscall(libc::SYS_futex, mapping.start(), libc::FUTEX_WAKE, 1)
        });
        assert_eq!(woken, Err(Errno::FAULT), "order {order}, flags {flags:#x}");
    }
}

/// A protection key, which belongs to this process until the key is dropped.
struct Key(i64);

impl Key {
    /// `None`, and a printed line, if the processor has no keys.
    fn new() -> Option<Self> {
        // SAFETY: no memory has the key.
        let key = sys::checked(unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) });
        if let Err(error) = key {
            eprintln!("skipped: no protection keys: {error}");
        }
        key.ok().map(|key| Self(key.cast_signed()))
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: no memory has the key.
        unsafe { libc::syscall(libc::SYS_pkey_free, self.0) };
    }
}

fn protect_with(key: i64, mapping: &Mapping, protection: i32) -> Result<u64, Errno> {
    let (start, length) = (mapping.start(), mapping.length());
    // SAFETY: the mapping is the test's.
    let done = unsafe { libc::syscall(libc::SYS_pkey_mprotect, start, length, protection, key) };
    sys::checked(done)
}

/// The key is a part of each leaf, and leaves are shared, so a process cannot have its own key.
#[test]
fn protection_keys_are_refused() {
    let Some(_turn) = morsel_turn() else { return };
    let Some(key) = Key::new() else { return };
    for kind in kinds() {
        let morsel = stamped(kind);
        for protection in [sys::READ_WRITE, libc::PROT_READ] {
            let mapping = morsel.map(protection).unwrap();
            for asked in [sys::READ_WRITE, libc::PROT_READ, libc::PROT_NONE] {
                assert_eq!(protect_with(key.0, &mapping, asked), Err(Errno::OPNOTSUPP), "{kind:?}");
                mapping.assert_stamped(0, 7);
            }
            // The kernel uses a key for execute-only memory.
            assert_eq!(protect_with(-1, &mapping, libc::PROT_EXEC), Err(Errno::ACCESS));
            assert_eq!(access::store(mapping.start(), 1).is_ok(), protection == sys::READ_WRITE);
            morsel.stamp(0, 7);
            // The default key is accepted.
            for none in [0, -1] {
                assert_eq!(protect_with(none, &mapping, libc::PROT_READ), Ok(0));
                mapping.assert_stamped(0, 7);
            }
        }
        assert_morsels_are_sound();
    }
    let surface = Plan::new(1000, 8).make();
    surface.alloc(0, &[(1, 1)]);
    surface.stamp(1, 7);
    let refused = protect_with(key.0, &surface.mapping, sys::READ_WRITE);
    assert_eq!(refused, Err(Errno::ACCESS));
    surface.assert_stamped(1, 7);
}
