//! A file, the model of its bytes, and the operations on it.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, copy_file_range, fallocate, syncfs};
use vellum_uapi::dax::{DURABLE, NOSYNC, UNIT};

use super::Around;
use super::views::{Heaps, View};
use crate::dax::Table;
use crate::fuzz::session::Session;
use crate::random::Random;
use crate::sys::{self, READ_WRITE};
use crate::{Errno, PAGE};

/// Bytes of a page.
const BYTES: u64 = PAGE as u64;
/// Bytes of an access, at most.
const ACCESS: u64 = 5_000;
/// Bytes of a range that is punched, reserved or moved, at most.
const RANGE: u64 = 150_000;
/// Bytes that are compared at a time.
const PART: u64 = 16 * BYTES;
/// Views of a file at the same time, at most.
const VIEWS: usize = 4;
/// Names of a file, at most.
const NAMES: usize = 3;
/// `FICLONE` of linux/fs.h.
const FICLONE: u32 = 0x4004_9409;

/// A file that is open.
pub(super) struct Subject {
    number: u64,
    /// Its names; none: it was removed.
    paths: Vec<PathBuf>,
    names: u64,
    file: File,
    /// What it has, up to its end.
    bytes: Vec<u8>,
    table: Option<Table>,
    is_durable: bool,
    views: Vec<View>,
}

/// A file that this process does not have open.
pub(super) struct Closed {
    number: u64,
    paths: Vec<PathBuf>,
    names: u64,
    bytes: Vec<u8>,
}

impl Closed {
    pub(super) fn open(self) -> Subject {
        let Self { number, paths, names, bytes } = self;
        let file = open(&paths[0]);
        let (table, views) = (None, Vec::new());
        Subject { number, paths, names, file, bytes, table, is_durable: false, views }
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("the file")
}

/// A part of what lies between `from` and `end`, often at the ends of pages and tables.
fn range(random: &mut Random, from: u64, end: u64, most: u64) -> (u64, u64) {
    let near = random.pick(&[from, BYTES, 512 * BYTES, 1024 * BYTES, end]);
    let at = match random.below(4) {
        0 => (near + random.below(200)).saturating_sub(100),
        1 => random.below(end) / BYTES * BYTES,
        _ => from + random.below(end - from),
    };
    let at = at.clamp(from, end - 1);
    let count = match random.one_in(4) {
        true => (1 + random.below(most.div_ceil(BYTES))) * BYTES,
        false => 1 + random.below(most),
    };
    (at, count.min(end - at))
}

/// Bytes of which none is zero.
fn fresh(random: &mut Random, count: u64) -> Vec<u8> {
    let (first, step) = (random.number(), random.number() | 1);
    let word = |at: u64| first.wrapping_add(at.wrapping_mul(step)) | 0x0101_0101_0101_0101;
    let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|at| word(at).to_le_bytes()).collect();
    bytes.truncate(count as usize);
    bytes
}

fn overlap(first: u64, second: u64, count: u64) -> bool {
    first < second + count && second < first + count
}

#[track_caller]
fn compare(seen: &[u8], wanted: &[u8], from: u64, how: &str) {
    if seen == wanted {
        return;
    }
    assert_eq!(seen.len(), wanted.len(), "{how}: the length from {from:#x} on");
    let wrong = |at: &usize| seen[*at] != wanted[*at];
    let first = (0..seen.len()).find(wrong).unwrap_or_default();
    let count = (0..seen.len()).filter(wrong).count();
    let at = from + first as u64;
    panic!("{how}: {at:#x} is {}, not {}; {count} are wrong", seen[first], wanted[first]);
}

impl Subject {
    /// A new one.
    pub(super) fn new(path: PathBuf, number: u64) -> Self {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path).expect("a file");
        let closed = Closed { number, paths: vec![path], names: 0, bytes: Vec::new() };
        let Closed { number, paths, names, bytes } = closed;
        let (table, views) = (Table::open(&file, 0).ok(), Vec::new());
        Self { number, paths, names, file, bytes, table, is_durable: false, views }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Nothing of this process uses it any more.
    pub(super) fn close(mut self, heaps: &Heaps) -> Closed {
        self.views.drain(..).for_each(|view| view.end(heaps));
        let Self { number, paths, names, bytes, .. } = self;
        Closed { number, paths, names, bytes }
    }

    /// Removes all of its names, and returns the first one.
    pub(super) fn unlink(&mut self) -> PathBuf {
        self.paths.iter().for_each(|path| fs::remove_file(path).expect("unlink"));
        self.paths.drain(..).next().expect("a name")
    }

    /// Another file takes its name, and it has none any more.
    pub(super) fn be_replaced(&mut self, other: &mut Self) {
        fs::rename(&other.paths[0], &self.paths[0]).expect("rename");
        other.paths[0] = self.paths.remove(0);
        self.paths.drain(..).for_each(|path| fs::remove_file(path).expect("unlink"));
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The end of its last page.
    fn shown(&self) -> u64 {
        self.size().next_multiple_of(BYTES)
    }

    fn grow(&mut self, size: u64) {
        if size > self.size() {
            self.bytes.resize(size as usize, 0);
        }
    }

    /// The bytes of a range have a value from now on. The file is as long as that, at least.
    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.grow(at + bytes.len() as u64);
        self.bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// What a mapping has to show.
    fn wanted(&self, from: u64, count: u64) -> Vec<u8> {
        let end = (from + count).min(self.size()).max(from);
        let there = self.size().min(from) as usize;
        let mut bytes = self.bytes[there..end.min(self.size()) as usize].to_vec();
        bytes.resize(count as usize, 0);
        bytes
    }

    /// One of the views by its number, that shows a part of the file, and the end of that part.
    fn view(&self, random: &mut Random, writes: bool, end: u64) -> Option<(usize, u64)> {
        let fits = |view: &View| (view.writes() || !writes) && view.offset() < end;
        let views = self.views.iter().enumerate().filter(|(_, view)| fits(view));
        let fitting: Vec<usize> = views.map(|(at, _)| at).collect();
        let at = (!fitting.is_empty()).then(|| random.pick(&fitting))?;
        Some((at, end.min(self.views[at].end_offset())))
    }

    // The file's own calls.

    pub(super) fn write(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let (mut from, mut count) = range(&mut session.random, 0, around.most, ACCESS);
        let way = session.random.below(3);
        if way == 0 {
            from = self.size();
            count = count.min(around.most - from);
        }
        session.note(format!("write {from:#x}+{count:#x}, way {way}"));
        let bytes = fresh(&mut session.random, count);
        if way == 1 {
            self.file.seek(SeekFrom::Start(from)).expect("seek");
            self.file.write_all(&bytes).expect("write");
        } else {
            self.file.write_all_at(&bytes, from).expect("pwrite");
        }
        if count > 0 {
            self.put(from, &bytes);
        }
    }

    pub(super) fn read(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let (from, count) = range(&mut session.random, 0, around.most, 2 * ACCESS);
        session.note(format!("read {from:#x}+{count:#x}"));
        let mut seen = vec![0; count as usize];
        let read = self.file.read_at(&mut seen, from).expect("pread");
        let there = self.size().saturating_sub(from).min(count);
        assert_eq!(read as u64, there, "bytes read from {from:#x} on");
        compare(&seen[..read], &self.wanted(from, there), from, "read");
    }

    pub(super) fn resize(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let random = &mut session.random;
        let size = match random.below(4) {
            0 => (self.size() + random.below(2 * ACCESS)).saturating_sub(ACCESS).min(around.most),
            1 => random.below(around.most / BYTES + 1) * BYTES,
            2 => random.below(self.size() + 1),
            _ => random.below(around.most),
        };
        session.note(format!("truncate {:#x} to {size:#x}", self.size()));
        self.file.set_len(size).expect("ftruncate");
        self.bytes.resize(size as usize, 0);
    }

    pub(super) fn allocate(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let (from, count) = range(&mut session.random, 0, around.most, RANGE);
        let keeps = session.random.one_in(2);
        session.note(format!("allocate {from:#x}+{count:#x}, keep size: {keeps}"));
        let how = if keeps { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        fallocate(&self.file, how, from, count).expect("fallocate");
        if !keeps {
            self.grow(from + count);
        }
    }

    /// What is there of a range is zeros now.
    fn clear(&mut self, from: u64, count: u64) {
        let (from, end) = (from.min(self.size()), (from + count).min(self.size()));
        self.bytes[from as usize..end as usize].fill(0);
    }

    pub(super) fn punch(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let (from, count) = range(&mut session.random, 0, around.most, RANGE);
        session.note(format!("punch {from:#x}+{count:#x}"));
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, how, from, count).expect("PUNCH_HOLE");
        self.clear(from, count);
    }

    pub(super) fn zero(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let (from, count) = range(&mut session.random, 0, around.most, RANGE);
        let keeps = session.random.one_in(2);
        session.note(format!("zero {from:#x}+{count:#x}, keep size: {keeps}"));
        let keep = if keeps { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        fallocate(&self.file, FallocateFlags::ZERO_RANGE | keep, from, count).expect("ZERO_RANGE");
        self.clear(from, count);
        if !keeps {
            self.grow(from + count);
        }
    }

    /// Some pages at a page.
    fn pages(&self, random: &mut Random) -> (u64, u64) {
        let (from, count) = range(random, 0, self.shown().max(BYTES), RANGE);
        (from / BYTES * BYTES, count.next_multiple_of(BYTES))
    }

    pub(super) fn collapse(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let (from, count) = self.pages(&mut session.random);
        session.note(format!("collapse {from:#x}+{count:#x}"));
        let done = fallocate(&self.file, FallocateFlags::COLLAPSE_RANGE, from, count);
        if from + count >= self.size() {
            assert_eq!(done, Err(Errno::INVAL), "COLLAPSE_RANGE up to the end");
            around.tally.refused += 1;
            return;
        }
        done.expect("COLLAPSE_RANGE");
        self.bytes.drain(from as usize..(from + count) as usize);
    }

    pub(super) fn insert(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let (from, count) = self.pages(&mut session.random);
        if self.size() + count > around.most {
            return;
        }
        session.note(format!("insert {from:#x}+{count:#x}"));
        let done = fallocate(&self.file, FallocateFlags::INSERT_RANGE, from, count);
        if from >= self.size() {
            assert_eq!(done, Err(Errno::INVAL), "INSERT_RANGE at the end");
            around.tally.refused += 1;
            return;
        }
        done.expect("INSERT_RANGE");
        let from = from as usize;
        self.bytes.splice(from..from, std::iter::repeat_n(0, count as usize));
    }

    /// What ext4 or the module refuses changes nothing.
    pub(super) fn refused(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let kind = session.random.below(7);
        session.note(format!("refused, kind {kind}"));
        let file = &self.file;
        let outcome = match kind {
            0 => fallocate(file, FallocateFlags::COLLAPSE_RANGE, 100, BYTES),
            1 => fallocate(file, FallocateFlags::INSERT_RANGE, 0, BYTES + 1),
            2 => fallocate(file, FallocateFlags::UNSHARE_RANGE, 0, BYTES),
            3 => sys::ioctl(file.as_fd(), FICLONE, file.as_raw_fd() as u64).map(drop),
            4 if self.size() > 1 => {
                copy_file_range(file, Some(&mut 0), file, Some(&mut 1), 2).map(drop)
            }
            5 => {
                let Some(table) = &self.table else { return };
                let mut request = table.request(2 * UNIT, READ_WRITE);
                request.offset = UNIT;
                sys::mmap(request).map(drop)
            }
            6 => {
                let Some(table) = &self.table else { return };
                sys::mmap(table.request(UNIT, libc::PROT_READ)).map(drop)
            }
            _ => return,
        };
        let expected = if matches!(kind, 2 | 3) { Errno::OPNOTSUPP } else { Errno::INVAL };
        assert_eq!(outcome, Err(expected), "kind {kind}");
        around.tally.refused += 1;
    }

    /// From one part of the file to another.
    pub(super) fn copy(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let Some((from, to, count)) = self.apart(session, 0, self.size(), 0, around.most) else {
            return;
        };
        session.note(format!("copy {from:#x}+{count:#x} to {to:#x}"));
        let (mut source, mut target) = (from, to);
        while source < from + count {
            let left = (from + count - source) as usize;
            let file = &self.file;
            let done = copy_file_range(file, Some(&mut source), file, Some(&mut target), left);
            assert!(done.expect("copy_file_range") > 0, "copied nothing at {source:#x}");
        }
        let bytes = self.wanted(from, count);
        self.put(to, &bytes);
    }

    /// Two places for as many bytes, which do not overlap: one in each range.
    fn apart(
        &self,
        session: &mut Session,
        first: u64,
        first_end: u64,
        second: u64,
        second_end: u64,
    ) -> Option<(u64, u64, u64)> {
        if first >= first_end || second >= second_end {
            return None;
        }
        let (from, count) = range(&mut session.random, first, first_end, ACCESS);
        let (to, count) = range(&mut session.random, second, second_end, count);
        (!overlap(from, to, count) && from + count <= first_end).then_some((from, to, count))
    }

    pub(super) fn sync(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let kind = session.random.below(7);
        session.note(format!("sync, kind {kind}"));
        match kind {
            0 => self.file.sync_all().expect("fsync"),
            1 => self.file.sync_data().expect("fdatasync"),
            2 => syncfs(&self.file).expect("syncfs"),
            3 | 4 => self.table.iter().for_each(|table| table.sync().expect("fsync of a table")),
            5 => around.heaps.sync(session.random.below(2) as usize),
            _ => {
                let shown = self.shown();
                let Some((at, end)) = self.view(&mut session.random, false, shown) else { return };
                let view = &self.views[at];
                let (from, count) = range(&mut session.random, view.offset(), end, RANGE);
                view.sync(from, count);
            }
        }
    }

    // Its table, its mappings and attachments.

    pub(super) fn refresh(&mut self, session: &mut Session, _around: &mut Around<'_>) {
        session.note("refresh".to_owned());
        let Some(table) = &self.table else { return };
        table.refresh().expect("REFRESH");
        let stat = table.stat();
        assert_eq!((stat.stale, stat.barred), (0, 0), "{stat:?}");
        assert_eq!(stat.pages, self.shown() / BYTES, "{stat:?}");
    }

    pub(super) fn change_table(&mut self, session: &mut Session, _around: &mut Around<'_>) {
        if self.table.take_if(|_| session.random.one_in(3)).is_some() {
            return session.note("close the table".to_owned());
        }
        let flags = session.random.pick(&[0, 0, DURABLE, DURABLE | NOSYNC]);
        session.note(format!("open the table, flags {flags}"));
        self.table = Some(Table::open(&self.file, flags).expect("OPEN"));
        self.is_durable = flags != 0;
    }

    pub(super) fn show(&mut self, session: &mut Session, around: &mut Around<'_>) {
        if self.views.len() >= VIEWS {
            return self.hide(session, around);
        }
        let (most, heaps) = (around.most, around.heaps);
        let kind = session.random.below(8);
        let view = match &self.table {
            Some(table) if kind < 3 => View::of_table(session, table, self.is_durable, most),
            Some(table) if kind < 5 => View::in_heap(session, heaps, table, most),
            _ if kind < 6 => View::in_heap(session, heaps, &self.file, most),
            _ => View::plain(session, &self.file, most),
        };
        session.note(format!("show by {}", view.name()));
        self.views.push(view);
    }

    pub(super) fn hide(&mut self, session: &mut Session, around: &mut Around<'_>) {
        if self.views.is_empty() {
            return;
        }
        let view = self.views.swap_remove(session.random.below(self.views.len() as u64) as usize);
        session.note(format!("hide {}", view.name()));
        view.end(around.heaps);
    }

    /// Often brings the table up to date, so that not only the file system serves accesses.
    fn before_access(&self, session: &mut Session, view: &View, around: &mut Around<'_>) {
        if let Some(table) = self.table.as_ref().filter(|_| session.random.one_in(3)) {
            table.refresh().expect("REFRESH");
        }
        if session.random.one_in(8) {
            view.count(around, self.table.as_ref());
        }
    }

    pub(super) fn load(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let shown = self.shown();
        self.touch_behind(session, around, false);
        let Some((at, end)) = self.view(&mut session.random, false, shown) else { return };
        let view = &self.views[at];
        let (from, count) = range(&mut session.random, view.offset(), end, ACCESS);
        session.note(format!("load {from:#x}+{count:#x} by {}", view.name()));
        self.before_access(session, view, around);
        let seen = view.load(&mut session.random, from, count);
        compare(&seen, &self.wanted(from, count), from, "load");
    }

    /// Sometimes accesses what lies behind the last page.
    fn touch_behind(&self, session: &mut Session, around: &mut Around<'_>, stores: bool) {
        if !session.random.one_in(8) {
            return;
        }
        let Some((at, end)) = self.view(&mut session.random, stores, u64::MAX) else { return };
        let view = &self.views[at];
        let from = view.offset().max(self.shown());
        if from >= end {
            return;
        }
        let from = from + session.random.below((end - from).min(3 * UNIT));
        session.note(format!("touch {from:#x} behind {:#x} by {}", self.size(), view.name()));
        view.expect_signal(&mut session.random, from, libc::SIGBUS, stores);
        around.tally.signals += 1;
    }

    pub(super) fn store(&mut self, session: &mut Session, around: &mut Around<'_>) {
        self.touch_behind(session, around, true);
        let Some((at, end)) = self.view(&mut session.random, true, self.size()) else { return };
        let view = &self.views[at];
        let (from, count) = range(&mut session.random, view.offset(), end, ACCESS);
        session.note(format!("store {from:#x}+{count:#x} by {}", view.name()));
        self.before_access(session, view, around);
        let page = from / BYTES;
        if session.random.one_in(3) && page * BYTES >= view.offset() && (page + 1) * BYTES <= end {
            let word = session.random.number();
            view.store_page(page, word);
            return self.put(page * BYTES, &word.to_le_bytes().repeat(PAGE / 8));
        }
        let bytes = fresh(&mut session.random, count);
        view.store(&mut session.random, from, &bytes);
        self.put(from, &bytes);
    }

    /// What a program stores behind the end in the last page is there for all that map it, and is
    /// not in the file. Then it is zero again: what ext4 makes of it when the file grows is its own
    /// affair, also without a table.
    pub(super) fn store_past_end(&mut self, session: &mut Session, _around: &mut Around<'_>) {
        let (size, shown) = (self.size(), self.shown());
        let Some((first, end)) = self.view(&mut session.random, true, shown) else { return };
        let Some((second, other)) = self.view(&mut session.random, false, shown) else { return };
        let (first, second) = (&self.views[first], &self.views[second]);
        if size == shown || end < shown || other < shown {
            return;
        }
        let at = size + session.random.below(shown - size);
        session.note(format!("store {at:#x} behind {size:#x} by {}", first.name()));
        compare(&second.load(&mut session.random, at, 1), &[0], at, "before");
        first.store(&mut session.random, at, &[0xa5]);
        compare(&second.load(&mut session.random, at, 1), &[0xa5], at, "stored");
        assert_eq!(self.file.read_at(&mut [0], at).expect("pread"), 0);
        first.store(&mut session.random, at, &[0]);
        compare(&second.load(&mut session.random, at, 1), &[0], at, "after");
    }

    /// `write` from a mapping of the same file, which may fault while the file is locked.
    pub(super) fn write_from_view(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let Some((at, end)) = self.view(&mut session.random, false, self.size()) else { return };
        let first = self.views[at].offset();
        let Some((from, to, count)) = self.apart(session, first, end, 0, around.most) else {
            return;
        };
        let view = &self.views[at];
        session.note(format!("write {from:#x}+{count:#x} of {} to {to:#x}", view.name()));
        let mut done = 0;
        while done < count {
            let address = view.address(from + done);
            let left = (count - done) as usize;
            let written = sys::pwrite(self.file.as_fd(), address, left, to + done);
            assert!(*written.as_ref().expect("pwrite") > 0, "wrote nothing at {done:#x}");
            done += written.unwrap_or_default();
        }
        let bytes = self.wanted(from, count);
        self.put(to, &bytes);
    }

    /// `read` into a mapping of the same file.
    pub(super) fn read_into_view(&mut self, session: &mut Session, _around: &mut Around<'_>) {
        let size = self.size();
        let Some((at, end)) = self.view(&mut session.random, true, size) else { return };
        let first = self.views[at].offset();
        let Some((from, to, count)) = self.apart(session, 0, size, first, end) else { return };
        let view = &self.views[at];
        session.note(format!("read {from:#x}+{count:#x} to {to:#x} of {}", view.name()));
        let mut done = 0;
        while done < count {
            let address = view.address(to + done);
            let left = (count - done) as usize;
            let read = sys::pread(self.file.as_fd(), address, left, from + done);
            assert!(*read.as_ref().expect("pread") > 0, "read nothing at {done:#x}");
            done += read.unwrap_or_default();
        }
        let bytes = self.wanted(from, count);
        self.put(to, &bytes);
    }

    pub(super) fn disturb(&mut self, session: &mut Session, around: &mut Around<'_>) {
        let size = self.size();
        let Some(at) = (!self.views.is_empty()).then(|| session.random.below(VIEWS as u64)) else {
            return;
        };
        let Some(view) = self.views.get(at as usize) else { return };
        if session.random.one_in(2) {
            session.note(format!("MADV_DONTNEED of {}", view.name()));
            return view.forget();
        }
        session.note(format!("mprotect of {}", view.name()));
        let at = (size > 0).then(|| session.random.below(size));
        view.lose_right(session, at, around);
    }

    // Its names.

    fn next_name(&mut self) -> PathBuf {
        self.names += 1;
        self.paths[0].with_file_name(format!("file-{}-{}", self.number, self.names))
    }

    pub(super) fn rename(&mut self, session: &mut Session, _around: &mut Around<'_>) {
        if self.paths.is_empty() {
            return;
        }
        session.note("rename".to_owned());
        let name = self.next_name();
        fs::rename(&self.paths[0], &name).expect("rename");
        self.paths[0] = name;
    }

    pub(super) fn link(&mut self, session: &mut Session, _around: &mut Around<'_>) {
        if self.paths.is_empty() {
            return;
        }
        if self.paths.len() >= NAMES {
            session.note("unlink one name".to_owned());
            let at = session.random.below(self.paths.len() as u64) as usize;
            return fs::remove_file(self.paths.swap_remove(at)).expect("unlink");
        }
        session.note("link".to_owned());
        let name = self.next_name();
        fs::hard_link(&self.paths[0], &name).expect("link");
        self.paths.push(name);
    }

    /// By any name, or without one.
    pub(super) fn reopen(&mut self, session: &mut Session, _around: &mut Around<'_>) {
        session.note("open again".to_owned());
        let at = session.random.below(NAMES as u64) as usize;
        let nameless = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        self.file = open(self.paths.get(at).unwrap_or(&nameless));
    }

    /// Compares all bytes: by `read`, and by one of the views.
    pub(super) fn check(&mut self, session: &mut Session) {
        session.note(format!("check of file {}", self.number));
        let (size, shown) = (self.size(), self.shown());
        assert_eq!(self.file.metadata().expect("fstat").len(), size, "the length");
        let mut seen = vec![0; PART as usize];
        for from in (0..size).step_by(PART as usize) {
            let count = PART.min(size - from);
            let seen = &mut seen[..count as usize];
            self.file.read_exact_at(seen, from).expect("pread");
            compare(seen, &self.wanted(from, count), from, "read");
        }
        let Some((at, end)) = self.view(&mut session.random, false, shown) else { return };
        let view = &self.views[at];
        for from in (view.offset()..end).step_by(PART as usize) {
            let count = PART.min(end - from);
            let seen = view.load(&mut session.random, from, count);
            compare(&seen, &self.wanted(from, count), from, &view.name());
        }
    }
}
