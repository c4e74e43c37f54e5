//! The operations on a Morsel.

use std::fs::File;
use std::os::fd::AsFd as _;

use rustix::io::Errno;
use vellum_uapi::morsel::{self, INHERIT, PINNABLE};

use super::files::Disk;
use super::holds::Hold;
use super::marks::{Content, page_of, words_of};
use super::morsels::{Subject, View};
use super::session::Session;
use super::walks;
use crate::child::{Child, End};
use crate::{PAGE, access, sys};

/// An operation on a Morsel.
pub(super) type Operation = fn(&mut Subject, &mut Session);

/// The weight, the name and the function of each operation.
pub(super) const OPERATIONS: [(u64, &str, Operation); 18] = [
    (60, "touch", Subject::touch),
    (8, "map", Subject::map),
    (5, "unmap", Subject::unmap),
    (8, "protect", Subject::protect),
    (8, "pwrite", Subject::pwrite),
    (6, "pread", Subject::pread),
    (6, "populate", Subject::populate),
    (16, "punch", Subject::punch),
    (4, "fill", Subject::fill),
    (5, "disturb", Subject::disturb),
    (4, "key", Subject::key),
    (4, "fork", Subject::fork),
    (5, "hold", Subject::hold),
    (5, "let go", Subject::let_go),
    (3, "direct", Subject::direct),
    (3, "debug", Subject::debug),
    (3, "stat", Subject::stat),
    (1, "seal", Subject::seal),
];

/// The most views of a Morsel at a time.
const VIEWS: usize = 4;

fn offset(page: u64) -> u64 {
    page * PAGE as u64
}

/// The result of a call, retried if the kernel's work for the thread, such as io_uring's, has
/// interrupted it.
fn undisturbed<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

impl Subject {
    /// A view with the rights, if there is one.
    fn view(&self, session: &mut Session, rights: i32) -> Option<usize> {
        let has = |index: &usize| self.views[*index].rights & rights == rights;
        let those: Vec<usize> = (0..self.views.len()).filter(has).collect();
        (!those.is_empty()).then(|| session.random.pick(&those))
    }

    fn map(&mut self, session: &mut Session) {
        let (is_for_reading, rights) =
            (session.random.one_in(3), session.random.pick(&[libc::PROT_READ, sys::READ_WRITE]));
        session.note(format!("map, rights {rights}, by a descriptor for reading {is_for_reading}"));
        if self.views.len() == VIEWS {
            return;
        }
        let writes = rights & libc::PROT_WRITE != 0;
        let mapped = match is_for_reading {
            true => self.morsel().for_reading().map(rights),
            false => self.morsel().map(rights),
        };
        let expected = if self.is_revoked {
            Some(Errno::IO)
        } else if is_for_reading && writes {
            Some(Errno::ACCESS)
        } else if self.is_sealed() && writes {
            Some(Errno::PERM)
        } else {
            None
        };
        match (mapped, expected) {
            (Ok(mapping), None) => {
                let may_write = !is_for_reading && !self.is_sealed();
                let is_inherited = self.has(INHERIT);
                self.views.push(View { mapping, rights, may_write, is_inherited });
            }
            (Err(error), Some(expected)) => {
                // The error depends on which operation notices the revocation.
                assert!(error == expected || self.is_revoked, "{error}, expected {expected}");
            }
            (other, expected) => panic!("mmap: {other:?}, expected {expected:?}"),
        }
    }

    fn unmap(&mut self, session: &mut Session) {
        let Some(index) = self.view(session, 0) else { return };
        session.note(format!("unmap {index}"));
        self.views.remove(index).mapping.unmap().expect("munmap");
    }

    fn protect(&mut self, session: &mut Session) {
        let Some(index) = self.view(session, 0) else { return };
        let rights = session.random.pick(&[
            libc::PROT_NONE,
            libc::PROT_READ,
            libc::PROT_READ,
            sys::READ_WRITE,
        ]);
        session.note(format!("protect {index}, rights {rights}"));
        let view = &mut self.views[index];
        let (start, length) = (view.mapping.start(), view.mapping.length());
        let done = sys::mprotect(start, length, rights);
        if rights & libc::PROT_WRITE != 0 && !view.may_write {
            assert_eq!(done, Err(Errno::ACCESS), "more rights than the descriptor has");
        } else {
            assert_eq!(done, Ok(()), "mprotect");
            view.rights = rights;
        }
        let page = self.some_page(session);
        self.check(index, page);
    }

    /// The result of a change that the seals may forbid.
    fn may_change(&self) -> Result<(), Errno> {
        match (self.is_revoked, self.is_sealed()) {
            (true, _) => Err(Errno::IO),
            (_, true) => Err(Errno::PERM),
            _ => Ok(()),
        }
    }

    fn pwrite(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        session.note(format!("pwrite {page}"));
        let mark = self.owner.mark(page);
        let written = rustix::io::pwrite(self.morsel().file(), &page_of(mark), offset(page));
        let is_sealed_hole = self.holes_stay() && !self.model.contains_key(&page);
        let expected = match self.may_change() {
            Err(error) => Err(error),
            Ok(()) if page >= self.pages => Err(Errno::FBIG),
            // With entries of 2 MiB the page may be present.
            Ok(()) if self.may_fail(page) && written.is_ok() => Ok(PAGE),
            Ok(()) if is_sealed_hole => Err(Errno::PERM),
            Ok(()) => Ok(PAGE),
        };
        assert_eq!(written, expected, "page {page}");
        if written.is_ok() {
            self.model.insert(page, Content::Mark(mark));
        }
        self.check_all(page);
    }

    fn pread(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        session.note(format!("pread {page}"));
        let mut bytes = vec![0; PAGE];
        let read = rustix::io::pread(self.morsel().file(), &mut bytes[..], offset(page));
        if self.is_revoked {
            assert_eq!(read, Err(Errno::IO));
        } else {
            assert_eq!(read, Ok(if page < self.pages { PAGE } else { 0 }), "page {page}");
            self.owner.check(&words_of(&bytes), self.content(page), page);
        }
    }

    fn populate(&mut self, session: &mut Session) {
        let (page, count) = self.some_range(session);
        session.note(format!("populate {page}, {count}"));
        let done = undisturbed(|| self.morsel().populate(offset(page), offset(count)));
        match done {
            Ok(()) => {
                assert!(!self.is_revoked, "populated although it was revoked");
                if !self.holes_stay() {
                    (page..page + count).for_each(|page| self.came(page));
                }
            }
            Err(Errno::IO) if self.is_revoked => {}
            Err(Errno::PERM) if self.seals != 0 => {}
            Err(error) => panic!("fallocate: {error}"),
        }
        self.check_all(page);
    }

    /// Held pages keep their contents after they were punched.
    fn freeze(&mut self, page: u64, count: u64) {
        for hold in self.holds.iter_mut().filter(|hold| hold.is_within(page, count)) {
            let now = self.model.get(&hold.page).copied().unwrap_or(Content::Zeros);
            hold.content.get_or_insert(now);
        }
    }

    fn punch(&mut self, session: &mut Session) {
        let (page, count) = self.some_range(session);
        session.note(format!("punch {page}, {count}"));
        assert_eq!(self.morsel().punch(offset(page), offset(count)), self.may_change());
        if self.may_change().is_ok() {
            self.freeze(page, count);
            self.model.retain(|at, _| !(page..page + count).contains(at));
        }
        self.check_all(page);
        self.check_all(page + count - 1);
    }

    fn fill(&mut self, session: &mut Session) {
        let (page, _) = self.some_range(session);
        let count = (session.random.below(6) + 1).min(self.pages - page);
        let is_direct = session.random.one_in(2);
        session.note(format!("FILL {page}, {count}, direct {is_direct}"));
        if self.holes_stay() {
            return;
        }
        let disk = Disk::new(&mut self.owner, count, is_direct);
        let mut filled = 0;
        let done = undisturbed(|| {
            let begin = offset(page) + filled;
            let left = offset(count) - filled;
            let (more, done) = self.morsel().fill(&disk.file, filled, begin, left);
            filled += more;
            // FILL also stops at a signal, if it has read something by then.
            if done.is_ok() && more < left { Err(Errno::INTR) } else { done }
        });
        assert_eq!(done, self.may_change(), "FILL");
        if done.is_ok() {
            assert_eq!(filled, offset(count));
            for index in 0..count {
                self.model.insert(page + index, disk.pages[index as usize]);
                self.check_all(page + index);
            }
        }
    }

    /// Operations that are refused, or change nothing.
    fn disturb(&mut self, session: &mut Session) {
        let Some(index) = self.view(session, 0) else { return };
        let (page, count) = self.some_range(session);
        let way = session.random.below(6);
        session.note(format!("disturb {index}, {page}, {count}, way {way}"));
        let mapping = &self.views[index].mapping;
        let (at, length) = (mapping.page(page), count as usize * PAGE);
        let is_all = length == mapping.length();
        match way {
            0 if !is_all => {
                assert_eq!(sys::mprotect(at, length, libc::PROT_NONE), Err(Errno::INVAL));
            }
            1 if !is_all => assert_eq!(sys::munmap(at, length), Err(Errno::INVAL)),
            2 => assert!(sys::mremap(at, length, length + PAGE, libc::MREMAP_MAYMOVE).is_err()),
            3 => {
                let advice = session.random.pick(&walks::ADVICE);
                // The call is refused, or has no effect on memory.
                let done = sys::madvise(at, length, advice);
                if done.is_ok() && advice == libc::MADV_DONTFORK {
                    self.views[index].is_inherited = false;
                }
                if done.is_ok() && advice == libc::MADV_POPULATE_READ {
                    (page..page + count).for_each(|page| self.came(page));
                }
            }
            _ => walks::look(&mut session.random, at, length),
        }
        self.check(index, page);
    }

    /// A protection key is refused, or works.
    fn key(&mut self, session: &mut Session) {
        let Some(index) = self.view(session, sys::READ_WRITE) else { return };
        let page = self.some_page(session);
        session.note(format!("key {index}, page {page}"));
        let mapping = &self.views[index].mapping;
        let (start, length) = (mapping.start(), mapping.length());
        if let Ok(key) = walks::protect_by_key(start, length) {
            // First accesses the page while the key allows it, which faults the page in.
            let _ = access::load(mapping.page(page));
            let found = key.denying(|| access::load(mapping.page(page)));
            let signal = found.map_err(|fault| fault.signal);
            assert_eq!(signal, Err(libc::SIGSEGV), "page {page}: a key denies the access");
            key.end(start, length);
        }
        self.check(index, page);
    }

    /// A child has the mappings that it inherits and those that it makes.
    fn fork(&mut self, session: &mut Session) {
        let (page, is_killed) = (self.some_page(session), session.random.one_in(3));
        let index = self.view(session, sys::READ_WRITE);
        session.note(format!("fork, page {page}, view {index:?}, killed {is_killed}"));
        let Some(index) = index else { return };
        let mark = self.owner.mark(page);
        let inherits = self.views[index].is_inherited;
        if self.may_fail(page) {
            // No page can be populated any more, so a hole is also a hole for the child.
            self.check(index, page);
        }
        let expected = match inherits {
            true if self.may_fail(page) => Err(libc::SIGBUS),
            true => self.expected(sys::READ_WRITE, page, true),
            false => Err(libc::SIGSEGV),
        };
        let child = Child::start(|| {
            let at = self.views[index].mapping.page(page);
            if expected.is_ok() {
                self.check(index, page);
            }
            let stored = access::store_page(at, mark);
            let outcome = stored.map_err(|fault| fault.signal);
            assert_eq!(outcome, expected.map(|_| ()), "page {page}");
            if !self.is_revoked {
                let own = self.morsel().mapped();
                if page < self.pages && stored.is_ok() {
                    let found = access::load_page(own.page(page)).expect("a page");
                    self.owner.check(&found[..], Content::Mark(mark), page);
                }
            }
            #[allow(clippy::while_immutable_condition)]
            while is_killed {
                std::thread::yield_now();
            }
            0
        });
        if is_killed {
            // The kill comes at any time.
            child.kill();
        } else {
            assert_eq!(child.wait(), End::Status(0));
        }
        if expected.is_ok() {
            let content = if is_killed { Content::Own } else { Content::Mark(mark) };
            self.model.insert(page, content);
        }
        self.check_all(page);
    }

    fn hold(&mut self, session: &mut Session) {
        let Some(index) = self.view(session, 0) else { return };
        let page = self.some_page(session);
        session.note(format!("hold {page} by view {index}"));
        let (at, rights) = (self.views[index].mapping.page(page), self.views[index].rights);
        let hold = Hold::take(page, at);
        if self.has(PINNABLE) && self.expected(rights, page, false).is_ok() {
            self.came(page);
            self.holds.push(hold.expect("a page that may be held"));
        } else {
            assert_eq!(hold.err(), Some(Errno::FAULT), "page {page}");
        }
    }

    fn let_go(&mut self, session: &mut Session) {
        if self.holds.is_empty() {
            return;
        }
        let index = session.random.below(self.holds.len() as u64) as usize;
        let hold = self.holds.swap_remove(index);
        session.note(format!("let go {}", hold.page));
        let now = self.content(hold.page);
        hold.end(&self.owner, now);
    }

    /// Direct I/O to a page, and from it.
    fn direct(&mut self, session: &mut Session) {
        let Some(index) = self.view(session, sys::READ_WRITE) else { return };
        let (page, writes) = (self.some_page(session), session.random.one_in(2));
        session.note(format!("direct {page} by view {index}, writes {writes}"));
        let mut disk = Disk::new(&mut self.owner, 1, true);
        let at = self.views[index].mapping.page(page);
        let done = match writes {
            true => sys::pwrite(disk.file.as_fd(), at, PAGE, 0),
            false => sys::pread(disk.file.as_fd(), at, PAGE, 0),
        };
        if !self.has(PINNABLE) || self.expected(sys::READ_WRITE, page, true).is_err() {
            assert_eq!(done, Err(Errno::FAULT), "page {page}");
            return;
        }
        assert_eq!(done, Ok(PAGE as u64), "page {page}");
        self.came(page);
        if writes {
            disk.pages[0] = self.content(page);
            disk.check(&self.owner, 0);
        } else {
            self.model.insert(page, disk.pages[0]);
        }
        self.check_all(page);
    }

    /// Reads and writes it as a debugger does.
    fn debug(&mut self, session: &mut Session) {
        let Some(index) = self.view(session, libc::PROT_READ) else { return };
        let page = self.some_page(session);
        session.note(format!("debug {page} by view {index}"));
        if self.is_revoked || !self.model.contains_key(&page) {
            return;
        }
        let memory = File::open("/proc/self/mem").expect("/proc/self/mem");
        let at = self.views[index].mapping.page(page);
        let mut bytes = vec![0; PAGE];
        assert_eq!(rustix::io::pread(&memory, &mut bytes[..], at as u64), Ok(PAGE));
        self.owner.check(&words_of(&bytes), self.content(page), page);
    }

    fn stat(&mut self, session: &mut Session) {
        session.note("STAT".to_owned());
        let stat = self.morsel().try_stat();
        if self.is_revoked {
            assert_eq!(stat, Err(Errno::IO));
            return;
        }
        let stat = stat.expect("STAT");
        assert_eq!((stat.mounts, stat.seals), (self.views.len() as u64, self.seals), "{stat:?}");
        if !self.has(morsel::HUGE) {
            assert_eq!(stat.pages, self.model.len() as u64, "{stat:?}");
        }
    }

    /// Seals it, or revokes it from all processes.
    fn seal(&mut self, session: &mut Session) {
        let what = session.random.below(3);
        session.note(format!("seal or revoke {what}"));
        match what {
            0 if !self.is_revoked => {
                assert_eq!(self.morsel().seal(morsel::SEAL_POPULATION), Ok(()));
                self.seals |= morsel::SEAL_POPULATION;
            }
            1 if !self.is_revoked => {
                let is_held = self.holds.iter().any(|hold| hold.content.is_none());
                let is_used = self.views.iter().any(|view| view.may_write) || is_held;
                let expected = if is_used && !self.is_sealed() { Err(Errno::BUSY) } else { Ok(()) };
                assert_eq!(self.morsel().seal(morsel::SEAL_CONTENT), expected);
                if expected.is_ok() {
                    self.seals |= morsel::SEAL_CONTENT;
                }
            }
            _ => {
                self.freeze(0, self.pages);
                assert_eq!(self.morsel().revoke(), Ok(()));
                self.model.clear();
                self.is_revoked = true;
            }
        }
        let page = self.some_page(session);
        self.check_all(page);
    }
}
