//! A Morsel with the model of its pages, and the views of this process.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use vellum_uapi::morsel::{self, INHERIT};

use super::holds::Hold;
use super::marks::{Content, Owner, page_of, words_of};
use super::session::Session;
use crate::access::{self, Fault};
use crate::{Mapping, Morsel, PAGE, persistent, sys};

/// A mapping of it.
#[derive(Debug)]
pub(super) struct View {
    pub(super) mapping: Mapping,
    /// `PROT_*`.
    pub(super) rights: i32,
    /// It was made through a descriptor for writing while the Morsel was not sealed.
    pub(super) may_write: bool,
    /// A child inherits it: the Morsel has the property, and `MADV_DONTFORK` was not given.
    pub(super) is_inherited: bool,
}

/// A Morsel.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) holds: Vec<Hold>,
    pub(super) views: Vec<View>,
    pub(super) owner: Owner,
    pub(super) order: u32,
    pub(super) flags: u64,
    pub(super) pages: u64,
    /// The present pages. With entries of 2 MiB other pages may be present, too.
    pub(super) model: BTreeMap<u64, Content>,
    pub(super) seals: u64,
    pub(super) is_revoked: bool,
    /// Its name, on persistent memory.
    name: Option<PathBuf>,
    /// `None` while the device is not mounted.
    pub(super) morsel: Option<Morsel>,
}

/// The result of an access.
pub(super) type Expected = Result<Content, i32>;

impl Subject {
    /// A new one: of a random kind in memory, or on the device.
    pub(super) fn new(session: &mut Session, number: u64, is_on_device: bool) -> Self {
        let random = &mut session.random;
        let highest = if is_on_device { 3 } else { crate::morsel::highest_order() };
        let order = random.below(u64::from(highest) + 1) as u32;
        let mut flags = match random.below(3) {
            _ if is_on_device => 0,
            1 => morsel::PINNABLE,
            2 if order >= 2 => morsel::HUGE,
            _ => 0,
        };
        if random.one_in(2) {
            flags |= INHERIT;
        }
        let all = morsel::extent(order) / PAGE as u64;
        let pages = if random.one_in(3) { random.below(all) + 1 } else { all };
        let name = is_on_device.then(|| Path::new(persistent::FOLDER).join(number.to_string()));
        session.note(format!(
            "Morsel {number}: order {order}, flags {flags:#x}, {pages} pages, {name:?}"
        ));
        let morsel = match &name {
            None => Morsel::nameless(),
            Some(name) => {
                let mut options = OpenOptions::new();
                let file = options.read(true).write(true).create_new(true).open(name);
                Morsel::from_file(file.expect("a new name"))
            }
        };
        let plan = crate::morsel::plan(order, pages * PAGE as u64, flags);
        morsel.create(&plan).expect("CREATE");
        Self {
            holds: Vec::new(),
            views: Vec::new(),
            owner: Owner::new(number),
            order,
            flags,
            pages,
            model: BTreeMap::new(),
            seals: 0,
            is_revoked: false,
            name,
            morsel: Some(morsel),
        }
    }

    pub(super) fn morsel(&self) -> &Morsel {
        self.morsel.as_ref().expect("a descriptor")
    }

    pub(super) fn has(&self, flags: u64) -> bool {
        self.flags & flags != 0
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.seals & morsel::SEAL_CONTENT != 0
    }

    pub(super) fn holes_stay(&self) -> bool {
        self.seals & morsel::SEAL_POPULATION != 0
    }

    /// A page, sometimes one past the end.
    pub(super) fn some_page(&self, session: &mut Session) -> u64 {
        let random = &mut session.random;
        let all = morsel::extent(self.order) / PAGE as u64;
        let bases = [0, 0, 508, 1020, (1 << 18) - 2, (1 << 27) - 2, self.pages - self.pages.min(3)];
        let page = random.pick(&bases) + random.below(5);
        if random.one_in(10) { page % all } else { page % self.pages }
    }

    /// A page and a number of pages, within the Morsel.
    pub(super) fn some_range(&self, session: &mut Session) -> (u64, u64) {
        let page = self.some_page(session) % self.pages;
        match session.random.pick(&[1, 1, 2, 5, 40, 512, 1100]) {
            512 => (page / 512 * 512, 512.min(self.pages - page / 512 * 512)),
            count => (page, count.min(self.pages - page)),
        }
    }

    /// The contents of a page: a hole counts as zeros.
    pub(super) fn content(&self, page: u64) -> Content {
        self.model.get(&page).copied().unwrap_or(Content::Zeros)
    }

    /// The result of an access to a page. With entries of 2 MiB a hole may be populated.
    pub(super) fn expected(&self, rights: i32, page: u64, stores: bool) -> Expected {
        let needed = if stores { libc::PROT_WRITE } else { libc::PROT_READ };
        if rights & needed == 0 {
            return Err(libc::SIGSEGV);
        }
        let is_hole = !self.model.contains_key(&page);
        let stays = self.holes_stay() && is_hole && !self.has(morsel::HUGE);
        if self.is_revoked || page >= self.pages || stays {
            return Err(libc::SIGBUS);
        }
        Ok(self.content(page))
    }

    /// Whether an access may fail although it is expected to succeed.
    pub(super) fn may_fail(&self, page: u64) -> bool {
        self.has(morsel::HUGE) && self.holes_stay() && !self.model.contains_key(&page)
    }

    /// Notes that an access has populated a page.
    pub(super) fn came(&mut self, page: u64) {
        self.model.entry(page).or_insert(Content::Zeros);
    }

    /// Loads a page by a view and checks its contents.
    #[track_caller]
    pub(super) fn check(&mut self, view: usize, page: u64) {
        let view = &self.views[view];
        let at = view.mapping.page(page);
        let found = access::load_page(at);
        match self.expected(view.rights, page, false) {
            Ok(content) => match found {
                Ok(words) => {
                    self.owner.check(&words[..], content, page);
                    self.came(page);
                }
                Err(fault) => {
                    assert!(self.may_fail(page), "page {page}: {fault:?}");
                    assert_eq!(fault, Fault { signal: libc::SIGBUS, address: at }, "page {page}");
                }
            },
            Err(signal) => {
                let fault = Fault { signal, address: at };
                assert_eq!(found.map(|words| words[0]), Err(fault), "page {page}");
            }
        }
    }

    /// Loads it by every view.
    #[track_caller]
    pub(super) fn check_all(&mut self, page: u64) {
        (0..self.views.len()).for_each(|view| self.check(view, page));
    }

    /// Accesses a page by a view, by an instruction or by the kernel.
    pub(super) fn touch(&mut self, session: &mut Session) {
        if self.views.is_empty() {
            return;
        }
        let index = session.random.below(self.views.len() as u64) as usize;
        let (page, how) = (self.some_page(session), session.random.below(4));
        session.note(format!("touch {page} by view {index} way {how}"));
        let (at, rights) = (self.views[index].mapping.page(page), self.views[index].rights);
        let expected = self.expected(rights, page, how >= 2);
        let mark = self.owner.mark(page);
        let done = match how {
            0 => return self.check(index, page),
            1 => access::kernel_load(at, PAGE).map(|bytes| {
                self.owner.check(&words_of(&bytes), self.content(page), page);
                self.content(page)
            }),
            2 => access::store_page(at, mark).map(|()| Content::Mark(mark)).map_err(|fault| {
                assert_eq!(fault.address, at);
                assert!(self.may_fail(page) || expected == Err(fault.signal), "{fault:?}");
                Errno::FAULT
            }),
            _ => access::kernel_store(at, &page_of(mark)).map(|()| Content::Mark(mark)),
        };
        match done {
            Ok(content) => {
                assert!(expected.is_ok(), "page {page}: expected {expected:?}");
                self.model.insert(page, content);
            }
            Err(error) => {
                assert_eq!(error, Errno::FAULT, "page {page}");
                assert!(self.may_fail(page) || expected.is_err(), "page {page}: {expected:?}");
            }
        }
        if how >= 2 {
            self.check_all(page);
        }
    }

    /// Drops every view and the descriptor; held pages live on.
    pub(super) fn leave(&mut self) {
        self.views.clear();
        self.holds.clear();
        self.morsel = None;
    }

    /// Opens it by its name again.
    pub(super) fn return_to(&mut self) {
        let Some(name) = &self.name else { return };
        let file = OpenOptions::new().read(true).write(true).open(name);
        self.morsel = Some(Morsel::from_file(file.expect("a name that was there before")));
        // Revocation does not survive a restart: the Morsel exists again, and is empty.
        self.is_revoked = false;
        let rights = if self.is_sealed() { libc::PROT_READ } else { sys::READ_WRITE };
        let mapping = self.morsel().map(rights).expect("mmap");
        let (may_write, is_inherited) = (!self.is_sealed(), self.has(INHERIT));
        self.views.push(View { mapping, rights, may_write, is_inherited });
        let pages: Vec<u64> = self.model.keys().copied().collect();
        pages.into_iter().for_each(|page| self.check(0, page));
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let removed = fs::remove_file(name);
            assert!(removed.is_ok() || std::thread::panicking(), "{name:?}: {removed:?}");
        }
    }
}
