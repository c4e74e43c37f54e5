//! The other operations on an exmap: every command but ALLOC and FREE, and the kernel's calls on a
//! mapping and its pages.

use std::os::fd::AsFd as _;

use kvm_ioctls::Error;
use rustix::io::Errno;
use vellum_uapi::exmap::{self, Harvest, Move};
use vellum_uapi::exmap_published as published;

use super::exmaps::{Held, Subject};
use super::files::Disk;
use super::holds::Hold;
use super::marks::{Content, some_range, words_of};
use super::ring::Ring;
use super::session::Session;
use super::walks;
use crate::child::{Child, End};
use crate::machine::Machine;
use crate::{Mapping, PAGE, access, sys};

/// An operation on an exmap.
pub(super) type Operation = fn(&mut Subject, &mut Session);

/// The weight, the name and the function of each operation.
pub(super) const OPERATIONS: [(u64, &str, Operation); 22] = [
    (60, "touch", Subject::touch),
    (30, "alloc", Subject::alloc),
    (24, "free", Subject::free),
    (6, "read", Subject::read),
    (6, "write", Subject::write),
    (6, "move", Subject::move_some),
    (3, "harvest", Subject::harvest),
    (3, "resize", Subject::resize),
    (1, "clone", Subject::clone_descriptor),
    (3, "stat", Subject::stat),
    (4, "disturb", Subject::disturb),
    (3, "remap", Subject::remap),
    (2, "fork", Subject::fork),
    (4, "hold", Subject::hold),
    (4, "let go", Subject::let_go),
    (4, "direct", Subject::direct),
    (3, "peek", Subject::peek),
    (5, "pread", Subject::pread),
    (3, "pwrite", Subject::pwrite),
    (4, "uring", Subject::uring),
    (3, "register", Subject::register),
    (4, "machine", Subject::machine),
];

fn pass<T>(subject: &Subject, command: u32, argument: &T) -> Result<u64, Errno> {
    subject.exmap.pass(command, std::ptr::from_ref(argument).expose_provenance())
}

impl Subject {
    fn content(&self, page: u64) -> Option<Content> {
        self.model[page as usize].map(|held| held.content)
    }

    fn read(&mut self, session: &mut Session) {
        let range = some_range(&mut session.random, self.pages);
        session.note(format!("READ {range:?}"));
        if self.disk.is_none() {
            return;
        }
        let outcome = self.vector(exmap::READ, &[range])[0];
        self.came(range, outcome, true);
        self.check_some(session, range);
    }

    fn write(&mut self, session: &mut Session) {
        let (page, count) = some_range(&mut session.random, self.pages);
        session.note(format!("WRITE {page}, {count}"));
        if self.disk.is_none() {
            return;
        }
        let outcome = self.vector(exmap::WRITE, &[(page, count)])[0];
        let all = self.absent((page, count)).is_empty();
        let expected = if all { (0, count as u16) } else { (-libc::ENOENT, 0) };
        assert_eq!(outcome, expected, "WRITE {page}, {count}");
        if all {
            self.is_stored(page, count);
        }
    }

    /// The backing has the contents of these pages now.
    fn is_stored(&mut self, page: u64, count: u64) {
        let contents: Vec<Content> =
            (page..page + count).filter_map(|at| self.content(at)).collect();
        let Some(disk) = &mut self.disk else { return };
        let start = page as usize;
        disk.pages[start..start + contents.len()].copy_from_slice(&contents);
        disk.check(&self.owner, page);
        disk.check(&self.owner, page + count - 1);
    }

    /// Waits until I/O that has just ended no longer holds pages.
    fn settle(&mut self) {
        if std::mem::take(&mut self.had_io) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn move_some(&mut self, session: &mut Session) {
        self.settle();
        let (from, count) = some_range(&mut session.random, self.pages);
        let to = some_range(&mut session.random, self.pages).0.min(self.pages - count);
        session.note(format!("MOVE {from} to {to}, {count}"));
        let request = Move { size: size_of::<Move>() as u32, interface: 0, from, to, count };
        let moved = pass(self, exmap::MOVE, &request);
        if from < to + count && to < from + count {
            assert_eq!(moved, Err(Errno::INVAL), "ranges that overlap");
            return;
        }
        let goes = |index: &u64| {
            let (from, to) = (from + index, to + index);
            self.is_there(from) && !self.is_there(to) && !self.is_pinned((from, 1))
        };
        let going: Vec<u64> = (0..count).filter(goes).collect();
        assert_eq!(moved, Ok(going.len() as u64));
        for index in going {
            // With its contents, and with what is noted about it.
            let held = self.model[(from + index) as usize].take();
            self.model[(to + index) as usize] = held;
        }
        self.check_some(session, (from, count));
        self.check_some(session, (to, count));
    }

    /// The pages of a range that HARVEST calls accessed, and those that it calls written.
    #[track_caller]
    fn noted(&self, (page, count): (u64, u64), flags: u32) -> (Vec<bool>, Vec<bool>) {
        let words = (count as usize).div_ceil(64);
        let (mut accessed, mut written) = (vec![0_u64; words + 1], vec![0_u64; words + 1]);
        let request = Harvest {
            size: size_of::<Harvest>() as u32,
            flags,
            page,
            count,
            accessed: accessed.as_mut_ptr().expose_provenance() as u64,
            written: written.as_mut_ptr().expose_provenance() as u64,
        };
        let there = count - self.absent((page, count)).len() as u64;
        assert_eq!(pass(self, exmap::HARVEST, &request), Ok(there));
        let rest = 64 * (words as u64 + 1);
        let bits = |words: &[u64]| -> Vec<bool> {
            (0..rest).map(|index| words[index as usize / 64] >> (index % 64) & 1 == 1).collect()
        };
        let (accessed, written) = (bits(&accessed), bits(&written));
        for index in 0..rest {
            let bits = (accessed[index as usize], written[index as usize]);
            let held = self.model.get((page + index) as usize).filter(|_| index < count);
            match held.copied().flatten() {
                None => assert_eq!(bits, (false, false), "page {} is absent", page + index),
                // The kernel may have found the page idle (`clear_refs`), but not clean.
                Some(_) if !self.has(exmap::TRACKS) => assert!(bits.1, "page {}", page + index),
                Some(held) => {
                    assert!(bits.1 || !held.is_written, "a write to {} is lost", page + index);
                    assert!(!bits.1 || held.may_be_written, "{} was not written", page + index);
                }
            }
        }
        (accessed, written)
    }

    fn harvest(&mut self, session: &mut Session) {
        let range = some_range(&mut session.random, self.pages);
        let all = exmap::CLEAR_WRITTEN | exmap::CLEAR_ACCESSED;
        let flags = session.random.pick(&[0, 0, exmap::CLEAR_WRITTEN, exmap::CLEAR_ACCESSED, all]);
        session.note(format!("HARVEST {range:?}, flags {flags}"));
        self.noted(range, flags);
        if !self.has(exmap::TRACKS) {
            return;
        }
        let pages = range.0..range.0 + range.1;
        if flags & exmap::CLEAR_WRITTEN != 0 {
            for held in self.model[pages.start as usize..pages.end as usize].iter_mut().flatten() {
                (held.is_written, held.may_be_written) = (false, false);
            }
        }
        if flags & exmap::CLEAR_ACCESSED != 0 {
            let (accessed, _) = self.noted(range, 0);
            assert!(accessed.iter().all(|bit| !bit), "nothing was accessed since then");
            // The CPUs note accesses again.
            let there = pages.clone().find(|page| self.is_there(*page));
            there.into_iter().for_each(|page| self.check(page));
            let (accessed, _) = self.noted(range, 0);
            let expected = pages.map(|page| there == Some(page));
            assert!(expected.eq(accessed[..range.1 as usize].iter().copied()), "{there:?} was");
        }
    }

    fn resize(&mut self, session: &mut Session) {
        let frames = session.random.below(800) + 1;
        session.note(format!("RESIZE {frames}"));
        let outcome = self.exmap.command(exmap::RESIZE, frames);
        let now = self.exmap.stat().expect("STAT").frames;
        if self.counts_frames() && self.holds.is_empty() && !self.had_io {
            let resident = self.resident();
            let expected = if frames < resident { Err(Errno::BUSY) } else { Ok(0) };
            assert_eq!((outcome, now), (expected, frames.max(resident)), "RESIZE {frames}");
        }
        assert!(outcome != Ok(0) || now == frames, "{now} frames after RESIZE {frames}");
        self.frames = now;
    }

    fn clone_descriptor(&mut self, session: &mut Session) {
        session.note("CLONE".to_owned());
        self.private = Some(self.exmap.private().expect("CLONE"));
    }

    fn stat(&mut self, session: &mut Session) {
        session.note("STAT".to_owned());
        let stat = self.exmap.stat().expect("STAT");
        assert_eq!((stat.resident, stat.surface), (self.resident(), self.pages), "{stat:?}");
        assert_eq!(stat.allocated - stat.freed, stat.resident, "{stat:?}");
    }

    /// Operations that are refused, or change nothing.
    fn disturb(&mut self, session: &mut Session) {
        let (page, count) = some_range(&mut session.random, self.pages);
        let (at, length) = (self.at(page), count as usize * PAGE);
        let is_all = count == self.pages;
        let way = session.random.below(8);
        session.note(format!("disturb {page}, {count}, way {way}"));
        match way {
            0 => {
                let rights = session.random.pick(&[libc::PROT_NONE, libc::PROT_READ]);
                assert!(sys::mprotect(at, length, rights).is_err());
            }
            1 if !is_all => assert_eq!(sys::munmap(at, length), Err(Errno::INVAL)),
            2 => assert!(sys::mremap(at, length, length + PAGE, libc::MREMAP_MAYMOVE).is_err()),
            3 => {
                let advice = session.random.pick(&walks::ADVICE);
                // The call is refused, or has no effect.
                let _ = sys::madvise(at, length, advice);
            }
            4 => {
                let again = self.exmap.map(self.pages);
                assert_eq!(again.err(), Some(Errno::BUSY));
            }
            5 => assert!(walks::protect_by_key(at, length).is_err(), "keys are not for surfaces"),
            _ => walks::look(&mut session.random, at, length),
        }
        self.check_some(session, (page, count));
    }

    /// Unmaps the surface, or puts another mapping in its place, and maps it again.
    fn remap(&mut self, session: &mut Session) {
        if self.ring.is_some() {
            return;
        }
        let replaces = session.random.one_in(2);
        session.note(format!("remap, replaces {replaces}"));
        self.machine = None;
        let mapping = self.mapping.take().expect("a mapping");
        if replaces {
            let (address, length) = (mapping.start(), mapping.length());
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let protection = sys::READ_WRITE;
            let request = sys::Request { address, length, protection, flags, fd: None, offset: 0 };
            let other = Mapping::new(request).expect("something else");
            mapping.leave();
            assert_eq!(access::load(other.start()), Ok(0));
        } else {
            mapping.unmap().expect("munmap");
        }
        let refused = self.vectors[0].run(&self.exmap, exmap::ALLOC, 1);
        assert_eq!(refused, Err(Errno::NODEV), "a command without a surface");
        self.mapping = Some(self.exmap.map(self.pages).expect("the surface again"));
        self.check_some(session, (0, self.pages));
    }

    /// A child has no surface, however the child ends.
    fn fork(&mut self, session: &mut Session) {
        let (page, is_killed) = (self.some_page(session), session.random.one_in(2));
        session.note(format!("fork, page {page}, killed {is_killed}"));
        let child = Child::start(|| {
            assert_eq!(access::load(self.at(page)), Err(self.fault(page)));
            let refused = self.exmap.command(exmap::ALLOC, exmap::vector(0, 0));
            assert_eq!(refused, Err(Errno::PERM), "a child's command");
            assert_eq!(self.exmap.map(self.pages).err(), Some(Errno::BUSY));
            #[allow(clippy::while_immutable_condition)]
            while is_killed {
                std::thread::yield_now();
            }
            0
        });
        if is_killed {
            child.kill();
        } else {
            assert_eq!(child.wait(), End::Status(0));
        }
        self.check(page);
    }

    /// Whether a pipe may hold a page. `None` for the page of zeros, for which both are correct.
    fn may_be_held(&self, page: u64) -> Option<bool> {
        let is_zeros = !self.is_there(page) && self.has(exmap::READS_ZEROS);
        (!is_zeros).then(|| self.is_there(page) && self.has(exmap::PINNABLE))
    }

    fn hold(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        session.note(format!("hold {page}"));
        let hold = Hold::take(page, self.at(page));
        match self.may_be_held(page) {
            Some(true) => self.holds.push(hold.expect("a page that may be held")),
            Some(false) => assert_eq!(hold.err(), Some(Errno::FAULT), "page {page}"),
            None => drop(hold),
        }
    }

    fn let_go(&mut self, session: &mut Session) {
        if self.holds.is_empty() {
            return;
        }
        let index = session.random.below(self.holds.len() as u64) as usize;
        let hold = self.holds.swap_remove(index);
        session.note(format!("let go {}", hold.page));
        let content = self.content(hold.page).expect("a held page stays");
        hold.end(&self.owner, content);
    }

    /// Direct I/O to the pages, and from them.
    fn direct(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        let count = (session.random.below(4) + 1).min(self.pages - page);
        let writes = session.random.one_in(2);
        session.note(format!("direct {page}, {count}, writes {writes}"));
        let mut disk = Disk::new(&mut self.owner, count, true);
        let (at, length) = (self.at(page), count as usize * PAGE);
        let done = match writes {
            true => sys::pwrite(disk.file.as_fd(), at, length, 0),
            false => sys::pread(disk.file.as_fd(), at, length, 0),
        };
        self.had_io = true;
        self.was_transferred((page, count), done, writes, &mut disk);
    }

    /// The result of direct I/O from and to pages.
    #[track_caller]
    fn was_transferred(
        &mut self,
        (page, count): (u64, u64),
        done: Result<u64, Errno>,
        writes: bool,
        disk: &mut Disk,
    ) {
        let all = self.absent((page, count)).is_empty() && self.has(exmap::PINNABLE);
        if all {
            assert_eq!(done, Ok(count * PAGE as u64), "all is there");
        } else if !self.has(exmap::READS_ZEROS) {
            let some = self.has(exmap::PINNABLE) && self.is_there(page);
            assert!(some || done == Err(Errno::FAULT), "{done:?} for page {page}");
        }
        for index in 0..count {
            let (disk_page, held) = (index as usize, &mut self.model[(page + index) as usize]);
            let Some(held) = held else { continue };
            if all && writes {
                disk.pages[disk_page] = held.content;
                disk.check(&self.owner, index);
            } else if !writes {
                // HARVEST reports the bits that CPUs set, so it does not report a device's writes.
                held.content = if all { disk.pages[disk_page] } else { Content::Own };
                // It may, if the kernel has found the page by a fault.
                held.may_be_written = true;
            }
        }
        (page..page + count).for_each(|page| self.check(page));
    }

    /// Access by the calls for other processes' memory.
    fn peek(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        session.note(format!("peek {page}"));
        let (own, mut bytes) = (std::process::id() as i32, vec![0; PAGE]);
        let read = sys::process_vm_readv(own, self.at(page), &mut bytes);
        match self.may_be_held(page) {
            Some(true) => {
                assert_eq!(read, Ok(PAGE as u64), "page {page}");
                let content = self.content(page).expect("a page");
                self.owner.check(&words_of(&bytes), content, page);
            }
            Some(false) => assert_eq!(read, Err(Errno::FAULT), "page {page}"),
            None => self.owner.check(&words_of(&bytes), Content::Zeros, page),
        }
        self.had_io = true;
    }

    /// Something asks the kernel for pages that it could write to.
    fn may_be_written(&mut self, (page, count): (u64, u64)) {
        let range = page as usize..(page + count) as usize;
        self.model[range].iter_mut().flatten().for_each(|held| held.may_be_written = true);
    }

    /// The descriptor as a proxy of the backing: a present page keeps its contents.
    fn pread(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        let opcode = session.random.pick(&[published::OP_READ, published::OP_ALLOC]);
        let reads = opcode == published::OP_READ;
        session.note(format!("pread {page}, opcode {opcode}"));
        if reads && (self.disk.is_none() || (!self.is_published && self.is_there(page))) {
            return;
        }
        let offset = u64::from(opcode) << 8;
        let read = sys::pread(self.exmap.as_fd(), self.at(page), PAGE, offset);
        if self.is_there(page) {
            assert!(matches!(read, Ok(0 | 4096)), "{read:?}");
        } else {
            let outcome = match read {
                Ok(_) => (0, 1),
                Err(error) => (-error.raw_os_error(), 0),
            };
            self.came((page, 1), outcome, reads);
        }
        self.check(page);
    }

    fn pwrite(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        session.note(format!("pwrite {page}"));
        if self.disk.is_none() {
            return;
        }
        let opcode = u64::from(published::OP_WRITE) << 8;
        let written = sys::pwrite(self.exmap.as_fd(), self.at(page), PAGE, opcode);
        if self.is_there(page) {
            assert_eq!(written, Ok(PAGE as u64));
            self.is_stored(page, 1);
        } else {
            assert_eq!(written, Err(Errno::NOENT));
        }
    }

    /// Commands of io_uring.
    fn uring(&mut self, session: &mut Session) {
        let (page, count) = some_range(&mut session.random, self.pages);
        let frees = session.random.one_in(2);
        let by_a_worker = session.random.one_in(2);
        session.note(format!("uring {page}, {count}, frees {frees}, by a worker {by_a_worker}"));
        self.settle();
        let opcode = if frees { published::OP_FREE } else { published::OP_ALLOC };
        let part = (self.at(page), count as usize * PAGE);
        let mut ring = self.ring.take().unwrap_or_else(Ring::new);
        let done = ring.command(self.exmap.as_fd(), (1, opcode), part, by_a_worker);
        let there = count - self.absent((page, count)).len() as u64;
        if frees {
            let expected = if self.is_pinned((page, count)) { Err(Errno::BUSY) } else { Ok(there) };
            let done = done.map(|done| in_pages(done, there));
            assert_eq!(done, expected, "FREE {page}, {count}");
            if done.is_ok() {
                self.went((page, count), (0, there as u16));
            }
        } else {
            let now = self.exmap.stat().expect("STAT").resident - self.resident();
            let error = done.err().map_or(0, |error| -error.raw_os_error());
            assert!(done.is_err() || done.map(|done| in_pages(done, now)) == Ok(now));
            self.came((page, count), (error, now as u16), false);
        }
        self.check_some(session, (page, count));
    }

    /// Registers pages as a buffer of io_uring. They cannot be freed meanwhile.
    fn register(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        let count = (session.random.below(4) + 1).min(self.pages - page);
        let writes = session.random.one_in(2);
        session.note(format!("register {page}, {count}, writes {writes}"));
        let all = self.absent((page, count)).is_empty() && self.has(exmap::PINNABLE);
        if self.has(exmap::READS_ZEROS) {
            return;
        }
        let mut ring = Ring::new();
        let registered = ring.register(self.at(page), count);
        // Before 6.5 io_uring registers no mappings of files, except of shmem (EOPNOTSUPP).
        if !all || registered == Err(Errno::OPNOTSUPP) {
            assert!(matches!(registered, Err(Errno::FAULT | Errno::OPNOTSUPP)), "{registered:?}");
            self.had_io = true;
            return;
        }
        assert_eq!(registered, Ok(()), "pages that can be pinned");
        self.may_be_written((page, count));
        assert_eq!(self.vector(exmap::FREE, &[(page, count)]), [(-libc::EBUSY, 0)]);
        let mut disk = Disk::new(&mut self.owner, count, true);
        let part = (self.at(page), count as usize * PAGE);
        let done = ring.transfer(disk.file.as_fd(), part, writes);
        self.was_transferred((page, count), done, writes, &mut disk);
        ring.unregister();
        self.had_io = true;
    }

    /// A virtual machine has some of the pages.
    fn machine(&mut self, session: &mut Session) {
        let page = session.random.below(16.min(self.pages));
        let stores = session.random.one_in(2);
        session.note(format!("machine {page}, stores {stores}"));
        if self.machine.is_none() && session.random.one_in(4) {
            let mapping = self.mapping.as_ref().expect("a mapping");
            self.machine = Machine::new(mapping);
        }
        if self.machine.is_some() {
            self.may_be_written((page, 1));
        }
        let Some(machine) = &mut self.machine else { return };
        let (content, at) =
            (self.model[page as usize].map(|held| held.content), self.mapping.as_ref());
        let at = at.expect("a mapping").page(page);
        if content.is_none() && self.flags & exmap::READS_ZEROS == 0 {
            assert!(
                undisturbed(|| machine.load(page as usize)).is_err(),
                "page {page} is not there"
            );
            return;
        }
        let found = undisturbed(|| machine.load(page as usize));
        match content {
            Some(Content::Mark(mark)) => assert_eq!(found.ok(), Some(mark as u16), "page {page}"),
            Some(Content::Own) => assert!(found.is_ok(), "page {page}"),
            _ => assert!(matches!(found, Ok(0) | Err(_)), "page {page} reads as zeros"),
        }
        if stores && content.is_some() {
            let mark = self.owner.mark(page);
            access::store_page(at, mark).expect("a page");
            undisturbed(|| machine.store(page as usize, mark as u16)).expect("a page");
            self.model[page as usize] = Some(Held::marked(mark));
            self.check(page);
        } else if content.is_some() && !self.is_pinned((page, 1)) {
            self.take_from_machine(page);
        }
    }
}

/// An operation of a machine, retried if the kernel's work for the thread has interrupted it.
pub(super) fn undisturbed<T>(mut run: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match run() {
            Err(error) if error.errno() == libc::EINTR => {}
            other => return other,
        }
    }
}

/// Converts a result to pages, if it is a number of bytes.
fn in_pages(done: u64, expected: u64) -> u64 {
    if done == expected * PAGE as u64 { expected } else { done }
}
