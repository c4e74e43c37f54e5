//! An fsx for file tables: random operations from a seed on files of an ext4 for DAX, and a model
//! that has every byte of them.
//!
//! A round has a file that is read, written, made longer and shorter, punched, collapsed, renamed,
//! linked, and removed while it is mapped. It is mapped by its table, attached to heaps and mapped
//! without a table, all at the same time. Whatever was done, and by whichever way: every way shows
//! the bytes of the model, zeros behind the end in the last page, and SIGBUS behind that.
//!
//! | variable | meaning |
//! |---|---|
//! | `VELLUM_SOAK=1` | a million operations, or as many as 2,200 seconds have |
//! | `VELLUM_SECONDS` | how long |
//! | `VELLUM_SEED` | begins with this round |
//! | `VELLUM_STEPS` | one round, of so many operations |
//! | `VELLUM_WITHOUT` | operations to be left out, by name, with commas between them |

mod file;
mod views;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use file::Subject;
use views::Heaps;

use crate::counters::assert_file_tables_are_sound;
use crate::dax::{self, KeptBound};
use crate::fuzz::session::{Rounds, Session};
use crate::persistent;

/// Operations of a round.
const STEPS: u64 = 500;
/// Operations of all rounds, unless the time is over before.
const MOST: u64 = 30_000;
/// The same with `VELLUM_SOAK`...
const MOST_SOAKED: u64 = 1_000_000;
/// ...for which there is so much time. The lab ends a program after 2,400 seconds.
const SOAKED_SECONDS: u64 = 2_200;
/// Operations between two comparisons of all bytes, with the module's self-check.
const CHECK: u64 = 250;
/// The most bytes of a file: in one table of level 1, beyond one, and beyond two.
const SIZES: [u64; 5] = [20 * 4096, 20 * 4096, 20 * 4096, 530 * 4096, 1_100 * 4096];
/// Files that have lost their names and are still in use, at most.
const GHOSTS: usize = 2;
/// The file system is mounted again after one in so many rounds.
const MOUNTS: u64 = 4;

/// Runs rounds for so many seconds, or a part of them where `VELLUM_SHORT` is set, or until enough
/// operations were done. A slow machine does few in that time: the rounds go on until an access was
/// by a table.
pub fn sequences(seconds: u64) {
    let (most, seconds) = match std::env::var_os("VELLUM_SOAK") {
        Some(_) => (MOST_SOAKED, SOAKED_SECONDS),
        None => (MOST, seconds),
    };
    let folder = Path::new(persistent::FOLDER).join("fsx");
    let mut rounds = Rounds::new(seconds);
    let (begin, mut operations, mut tally) = (Instant::now(), 0, Tally::default());
    while operations < most {
        let next = match tally.by_table {
            0 => rounds.next_over_time(STEPS),
            _ => rounds.next(STEPS),
        };
        let Some(mut session) = next else { break };
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).expect("a folder");
        operations += session.steps();
        // Each mount begins with what ext4 does otherwise.
        let _none = Zeroing::none();
        Round::new(&mut session, &folder).run(&mut session, &mut tally);
    }
    fs::remove_dir_all(&folder).expect("the folder goes");
    let took = begin.elapsed().as_secs_f64();
    println!("{operations} operations in {took:.0} s; {tally:?}");
    assert!(operations < most || tally.by_table > 0, "no access was by a table");
}

/// What was done, so that a run shows that it has tested something.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    /// Accesses to a mapping by a table: those that the table could serve...
    by_table: u64,
    /// ...and those that the file system served.
    table_served: u64,
    /// Accesses to a heap, while the file system served no slot of it, and the others.
    by_heap: u64,
    heap_served: u64,
    /// Accesses to ordinary mappings.
    by_plain: u64,
    /// Accesses behind the end.
    signals: u64,
    /// Calls that were refused, as they must be.
    refused: u64,
}

/// An operation on one of the files.
type Operation = fn(&mut Subject, &mut Session, &mut Around<'_>);

/// What is beside the file of an operation.
struct Around<'a> {
    heaps: &'a Heaps,
    tally: &'a mut Tally,
    /// The most bytes of a file.
    most: u64,
}

/// The operations on a file, each with its weight and its name.
const OPERATIONS: [(u64, &str, Operation); 24] = [
    (8, "write", Subject::write),
    (5, "read", Subject::read),
    (24, "load", Subject::load),
    (16, "store", Subject::store),
    (2, "store-past-end", Subject::store_past_end),
    (3, "write-from-view", Subject::write_from_view),
    (2, "read-into-view", Subject::read_into_view),
    (4, "resize", Subject::resize),
    (3, "allocate", Subject::allocate),
    (4, "punch", Subject::punch),
    (3, "zero", Subject::zero),
    (2, "collapse", Subject::collapse),
    (2, "insert", Subject::insert),
    (1, "refused", Subject::refused),
    (3, "copy", Subject::copy),
    (2, "sync", Subject::sync),
    (4, "refresh", Subject::refresh),
    (10, "show", Subject::show),
    (5, "hide", Subject::hide),
    (3, "disturb", Subject::disturb),
    (3, "table", Subject::change_table),
    (1, "rename", Subject::rename),
    (1, "link", Subject::link),
    (1, "reopen", Subject::reopen),
];

/// How much ext4 zeroes beside a block that is written for the first time; as before when this is
/// dropped. It does not unmap the zero page of a hole there: a later `write` to such a block is not
/// seen by a mapping that has read it before, with and without the module. So nothing is zeroed.
struct Zeroing(String);

impl Zeroing {
    const KIB: &str = "/sys/fs/ext4/pmem0/extent_max_zeroout_kb";

    fn none() -> Self {
        let before = fs::read_to_string(Self::KIB).expect(Self::KIB);
        fs::write(Self::KIB, "0").expect(Self::KIB);
        Self(before)
    }
}

impl Drop for Zeroing {
    fn drop(&mut self) {
        fs::write(Self::KIB, self.0.trim()).expect(Self::KIB);
    }
}

/// One file, with what is left of files that had its name before.
struct Round {
    folder: PathBuf,
    heaps: Heaps,
    most: u64,
    /// The last one has a name, the others have none any more.
    files: Vec<Subject>,
    /// Files so far.
    count: u64,
    /// No table is kept without a user.
    none_kept: Option<KeptBound>,
}

impl Round {
    fn new(session: &mut Session, folder: &Path) -> Self {
        let most = session.random.pick(&SIZES);
        let none_kept = session.random.one_in(4).then(KeptBound::none);
        let heaps = Heaps::new(session);
        let files = vec![Subject::new(folder.join("file"), 0)];
        Self { folder: folder.to_owned(), heaps, most, files, count: 1, none_kept }
    }

    fn run(mut self, session: &mut Session, tally: &mut Tally) {
        while session.step() {
            self.step(session, tally);
            if session.every(CHECK) {
                self.check(session);
            }
        }
        self.check(session);
        self.end(session);
    }

    fn step(&mut self, session: &mut Session, tally: &mut Tally) {
        match session.random.below(100) {
            0 => self.remove(session),
            1 => self.replace(session),
            2 => self.forget(session),
            3 => self.keep(session),
            4 => self.heaps.reap(),
            _ => self.operate(session, tally),
        }
        while self.files.len() > GHOSTS + 1 {
            let gone = self.files.remove(0);
            gone.close(&self.heaps);
        }
    }

    fn operate(&mut self, session: &mut Session, tally: &mut Tally) {
        let last = self.files.len() - 1;
        let at = match session.random.one_in(5) {
            true => session.random.below(last as u64 + 1) as usize,
            false => last,
        };
        let operation = session.choose(&OPERATIONS);
        let mut around = Around { heaps: &self.heaps, tally, most: self.most };
        session.subject = format!("file {}", self.files[at].number());
        operation(&mut self.files[at], session, &mut around);
    }

    /// The file loses its name, and another one gets it. The former stays as long as it is used.
    fn remove(&mut self, session: &mut Session) {
        session.note("unlink and create".to_owned());
        let path = self.named().unlink();
        self.files.push(Subject::new(path, self.count));
        self.count += 1;
    }

    /// Another file takes the name by `rename`.
    fn replace(&mut self, session: &mut Session) {
        session.note("rename another file to its name".to_owned());
        let mut other = Subject::new(self.folder.join("other"), self.count);
        self.count += 1;
        self.named().be_replaced(&mut other);
        self.files.push(other);
    }

    /// Nothing uses the files with a name any more, and the kernel drops its inode.
    fn forget(&mut self, session: &mut Session) {
        session.note("close, and drop caches".to_owned());
        let Some(file) = self.files.pop() else { return };
        let closed = file.close(&self.heaps);
        self.heaps.reap();
        fs::write("/proc/sys/vm/drop_caches", "2").expect("drop_caches");
        self.files.push(closed.open());
    }

    /// From now on tables without a user stay, or go.
    fn keep(&mut self, session: &mut Session) {
        let none = self.none_kept.is_none();
        session.note(format!("tables are kept: {}", !none));
        self.none_kept = None;
        self.none_kept = none.then(KeptBound::none);
    }

    fn named(&mut self) -> &mut Subject {
        self.files.last_mut().expect("a file with a name")
    }

    /// Compares all bytes of all files, by `read` and wherever they are shown.
    fn check(&mut self, session: &mut Session) {
        self.files.iter_mut().for_each(|file| file.check(session));
        assert_file_tables_are_sound();
    }

    /// Ends the round. Sometimes the file system is mounted again, and has the same bytes.
    fn end(mut self, session: &mut Session) {
        let named = self.files.pop().expect("a file with a name");
        for gone in self.files.drain(..) {
            gone.close(&self.heaps);
        }
        let closed = named.close(&self.heaps);
        self.heaps.reap();
        drop(self.heaps);
        if session.random.one_in(MOUNTS) {
            session.note("mount again".to_owned());
            persistent::unmount_when_unused();
            dax::mount();
        }
        closed.open().check(session);
    }
}
