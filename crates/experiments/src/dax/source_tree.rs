//! A tree of small files like that of a large program's source: made from a seed, and searched by
//! threads that share its folders.

use std::collections::VecDeque;
use std::f64::consts::TAU;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use memchr::memmem::Finder;
use vellum_bench::progress::Progress;
use vellum_bench::workload::values::Random;

use super::read_method::Way;

/// The text that is searched for. Its words are among the text's, the whole is not.
const WANTED: &[u8] = b"queue_mutex_unlock2";

/// Half of the files have fewer bytes. Sizes are distributed log-normally.
const MEDIAN: f64 = 6.0 * 1024.0;

/// The deviation of the logarithm of a size: a file in a hundred has more than 98 KiB.
const SIGMA: f64 = 1.2;

/// The shortest file and the longest one.
const SIZES: [usize; 2] = [256, 256 << 10];

/// Files of a folder, and folders of a folder above.
const FILES: usize = 16;
const FOLDERS: usize = 40;

/// The text from which files are cut, and the different words in it.
const TEXT: usize = 2 << 20;
const WORDS: usize = 3_000;

/// One file in so many has what is searched for.
const RARE: u64 = 20;

/// What was found, or what there is to be found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Files that were searched.
    pub(super) files: usize,
    /// Their bytes.
    pub(super) bytes: usize,
    /// The places of the text.
    pub(super) places: usize,
}

impl Found {
    fn add(&mut self, other: Found) {
        self.files += other.files;
        self.bytes += other.bytes;
        self.places += other.places;
    }
}

/// A tree of files.
#[derive(Debug)]
pub(super) struct SourceTree {
    root: PathBuf,
    /// What a search must find.
    pub(super) holds: Found,
}

impl SourceTree {
    /// Makes a tree below a folder.
    pub(super) fn make(root: &Path, files: usize, seed: u64, progress: &Progress) -> Result<Self> {
        let mut random = Random::new(seed);
        let text = text(&mut random);
        let mut holds = Found { files, ..Found::default() };
        for number in 0..files {
            let folder = number / FILES;
            let place = root.join(format!("part{}/folder{folder}", folder / FOLDERS));
            if number % FILES == 0 {
                progress.at(number, files, "making the tree");
                fs::create_dir_all(&place)
                    .with_context(|| format!("making {}", place.display()))?;
            }
            let size = size(&mut random);
            let from = random.below((TEXT - size) as u64) as usize;
            let mut bytes = text[from..from + size].to_vec();
            let places = match random.below(RARE) {
                0 => 1 + random.below(3) as usize,
                _ => 0,
            };
            plant(&mut bytes, places);
            let path = place.join(format!("file{number}.c"));
            fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))?;
            holds.bytes += size;
            holds.places += places;
        }
        // Blocks that are reserved and not yet written have no leaf in a table.
        rustix::fs::sync();
        Ok(Self { root: root.to_owned(), holds })
    }

    /// All files.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>> {
        let (mut folders, mut files) = (vec![self.root.clone()], Vec::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder)? {
                let entry = entry?;
                let list = if entry.file_type()?.is_dir() { &mut folders } else { &mut files };
                list.push(entry.path());
            }
        }
        Ok(files)
    }

    /// Writes all files anew, with the same contents.
    pub(super) fn renew(&self) -> Result<()> {
        for path in self.files()? {
            let bytes = fs::read(&path)?;
            fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }

    /// Searches all files, by threads that take one folder after the other.
    pub(super) fn search(&self, way: Way<'_>, threads: usize) -> Result<Found> {
        let folders = Folders::new(self.root.clone());
        let finder = Finder::new(WANTED);
        std::thread::scope(|scope| {
            let search = || search(&folders, way, &finder);
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(search)).collect();
            let mut found = Found::default();
            for thread in all {
                found.add(thread.join().expect("a thread does not panic")?);
            }
            Ok(found)
        })
    }
}

/// Bytes of a file.
fn size(random: &mut Random) -> usize {
    // Two numbers that are spread evenly make one that is distributed normally (Box and Muller).
    let (one, other) = (1.0 - random.fraction(), random.fraction());
    let normal = (-2.0 * one.ln()).sqrt() * (TAU * other).cos();
    ((MEDIAN * (SIGMA * normal).exp()) as usize).clamp(SIZES[0], SIZES[1])
}

/// Words of letters, digits between them and the signs of a program.
fn text(random: &mut Random) -> Vec<u8> {
    let wanted = WANTED.split(|byte| *byte == b'_' || byte.is_ascii_digit());
    let mut words: Vec<Vec<u8>> = wanted.map(<[u8]>::to_vec).collect();
    while words.len() < WORDS {
        let letters = 2 + random.below(9);
        words.push((0..letters).map(|_| b'a' + random.below(26) as u8).collect());
    }
    let between: [&[u8]; 8] = [b" ", b"_", b" ", b"(", b"2 ", b", ", b";\n\t", b" = "];
    let mut text = Vec::with_capacity(TEXT + 16);
    while text.len() < TEXT {
        text.extend(&words[random.below(words.len() as u64) as usize]);
        text.extend(between[random.below(between.len() as u64) as usize]);
    }
    text
}

/// Writes what is searched for to so many places of a file, far from each other.
fn plant(bytes: &mut [u8], places: usize) {
    for place in 0..places {
        let at = place * (bytes.len() / places);
        bytes[at..at + WANTED.len()].copy_from_slice(WANTED);
    }
}

/// The folders that threads have not searched yet.
struct Folders {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    waiting: VecDeque<PathBuf>,
    /// Folders that are being searched, and may have others in them.
    taken: usize,
}

impl Folders {
    fn new(root: PathBuf) -> Self {
        let state = State { waiting: VecDeque::from([root]), taken: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, folder: PathBuf) {
        self.state().waiting.push_back(folder);
        self.changed.notify_one();
    }

    /// The next folder, until there are none and there will be none.
    fn take(&self) -> Option<PathBuf> {
        let mut state = self.state();
        loop {
            if let Some(folder) = state.waiting.pop_front() {
                state.taken += 1;
                return Some(folder);
            }
            if state.taken == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A folder that was taken is done.
    fn done(&self) {
        let mut state = self.state();
        state.taken -= 1;
        if state.taken == 0 {
            self.changed.notify_all();
        }
    }
}

/// The work of a thread.
fn search(folders: &Folders, way: Way<'_>, finder: &Finder<'_>) -> Result<Found> {
    let (mut found, mut buffer) = (Found::default(), Vec::new());
    while let Some(folder) = folders.take() {
        let result = search_folder(&folder, folders, way, finder, &mut buffer);
        // Also after an error: other threads wait for it.
        folders.done();
        found.add(result.with_context(|| format!("searching {}", folder.display()))?);
    }
    Ok(found)
}

fn search_folder(
    folder: &Path,
    folders: &Folders,
    way: Way<'_>,
    finder: &Finder<'_>,
    buffer: &mut Vec<u8>,
) -> Result<Found> {
    let mut found = Found::default();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.add(entry.path());
            continue;
        }
        let file = File::open(entry.path())?;
        found.add(way.use_once(file, buffer, |bytes| Found {
            files: 1,
            bytes: bytes.len(),
            places: finder.find_iter(bytes).count(),
        })?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use vellum_dax::Backend;

    use super::super::read_method::heap;
    use super::*;

    #[test]
    fn every_way_finds_what_the_tree_holds() {
        let folder = tempfile::tempdir().unwrap();
        let tree = SourceTree::make(folder.path(), 1_500, 1, &Progress::hidden()).unwrap();
        assert!(tree.holds.places > 60, "{:?}", tree.holds);
        assert_eq!(tree.files().unwrap().len(), 1_500);
        tree.renew().unwrap();
        let by_mmap = heap(Backend::Mmap, None).unwrap();
        for way in [Way::Read, Way::Populated, Way::Heap(&by_mmap)] {
            for threads in [1, 3] {
                assert_eq!(tree.search(way, threads).unwrap(), tree.holds, "{way:?}");
            }
        }
        let lost = folder.path().join("part0/folder3/file50.c");
        let bytes = fs::read(&lost).unwrap();
        fs::remove_file(lost).unwrap();
        let found = tree.search(Way::Read, 2).unwrap();
        assert_eq!((found.files, found.bytes), (1_499, tree.holds.bytes - bytes.len()));
    }

    #[test]
    fn a_seed_makes_the_same_tree() {
        let make = |seed| {
            let folder = tempfile::tempdir().unwrap();
            SourceTree::make(folder.path(), 100, seed, &Progress::hidden()).unwrap().holds
        };
        assert_eq!(make(1), make(1));
        assert_ne!(make(1), make(2));
    }

    #[test]
    fn sizes_are_those_of_source_files() {
        let mut random = Random::new(1);
        let mut sizes: Vec<usize> = (0..10_000).map(|_| size(&mut random)).collect();
        sizes.sort_unstable();
        assert!((5_700..6_600).contains(&sizes[5_000]), "{}", sizes[5_000]);
        assert!((80 << 10..120 << 10).contains(&sizes[9_900]), "{}", sizes[9_900]);
    }

    #[test]
    fn an_error_ends_the_search_of_all_threads() {
        let folder = tempfile::tempdir().unwrap();
        let tree = SourceTree::make(folder.path(), 64, 1, &Progress::hidden()).unwrap();
        // An entry that cannot be opened.
        std::os::unix::fs::symlink("nowhere", folder.path().join("part0/folder1/broken")).unwrap();
        let error = tree.search(Way::Read, 2).unwrap_err();
        assert!(format!("{error:#}").contains("folder1"), "{error:#}");
    }
}
