//! Stored tables: where the blocks of a file are, written down in a folder of root's on the same
//! file system. After a restart the kernel makes the file's table from it, and asks the file system
//! once for each piece of the file instead of once for each page. `vellum/dax.h` has the format.
//!
//! The kernel believes nothing in a stored table. So a file may change at any time, and nothing has
//! to be kept in step: at worst a stored table is refused.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, major, minor, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;
use vellum_uapi::dax::{
    Run, STORED_FOLDER, STORED_MAGIC, STORED_RUNS, STORED_VERSION, Stored, checksum,
};

use crate::PAGE_SIZE;
use crate::error::{Error, Result};
use crate::sys::{self, EXTENT_LAST, Extent};

/// A piece of fewer pages is not stored: to confirm it takes the kernel as long as to ask for it.
const LEAST: u32 = 4;

/// The name of a table while it is written, which no inode's number is.
const NEW: &str = "new";

/// What was stored of a file: its pieces of four pages and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredTable {
    /// Pieces of the file, pages in a row in blocks in a row.
    pub runs: u64,
    /// Pages in them.
    pub pages: u64,
    /// Bytes that the file system has taken for it.
    pub bytes: u64,
}

/// Stores where the blocks of a file are, in place of what was stored before. Only root may do
/// that. The kernel looks for stored tables of files of 32 KiB and more (`dax_stored_kib`).
///
/// What is stored is durable before it has the name by which the kernel finds it.
///
/// # Errors
/// [`Error::NoTable`] if the file is in more than a million pieces, or its file system is not
/// mounted from its root; [`Error::UnfitFolder`]; [`Error::NoSpace`], after which what was stored
/// before is still there; what the system said, as for files of other file systems than ext4.
pub fn store_table(file: &File) -> Result<StoredTable> {
    let said = |errno| Error::of("asking the file system for a file's blocks", errno);
    let meta = file.metadata().map_err(failed)?;
    let extents = |start| sys::extents(file.as_fd(), start).map_err(said);
    let runs = runs(meta.len(), extents)?;
    let uuid = sys::file_system_uuid(file.as_fd()).map_err(said)?;
    let header = Stored {
        magic: STORED_MAGIC,
        version: STORED_VERSION,
        runs: runs.len() as u32,
        inode: meta.ino(),
        generation: sys::generation(file.as_fd()).map_err(said)?,
        length: meta.len(),
        uuid_first: uuid[0],
        uuid_last: uuid[1],
        ..Stored::default()
    };
    let folder = folder_of(meta.dev())?;
    let bytes = publish(&folder, meta.dev(), meta.ino(), &encode(header, &runs))?;
    let pages = runs.iter().map(|run| u64::from(run.pages)).sum();
    Ok(StoredTable { runs: runs.len() as u64, pages, bytes })
}

/// Removes the stored table of a file. Returns whether there was one.
///
/// # Errors
/// As [`store_table`].
pub fn forget_table(file: &File) -> Result<bool> {
    let meta = file.metadata().map_err(failed)?;
    remove(&folder_of(meta.dev())?, meta.dev(), meta.ino())
}

/// A file that only root may write is not one "for reading only".
fn failed(error: io::Error) -> Error {
    const DOING: &str = "storing a table, which only root may do";
    match Errno::from_io_error(&error) {
        Some(errno @ (Errno::ACCESS | Errno::PERM)) => Error::System { doing: DOING, errno },
        _ => Error::of_io(DOING, &error),
    }
}

fn refused(errno: Errno) -> Error {
    failed(errno.into())
}

/// The pieces of a file that were written. `extents` tells some from an offset on.
fn runs(length: u64, mut extents: impl FnMut(u64) -> Result<Vec<Extent>>) -> Result<Vec<Run>> {
    let (mut runs, mut start) = (Vec::new(), 0);
    while start < length {
        let extents = extents(start)?;
        let Some(last) = extents.last() else { break };
        let end = last.start.saturating_add(last.length);
        // Not reserved ones, nor what is in no block of its own.
        let is_plain = |flags| flags & !EXTENT_LAST == 0;
        for extent in extents.iter().filter(|extent| is_plain(extent.flags)) {
            let end = extent.start.saturating_add(extent.length);
            let end = end.min(length.next_multiple_of(PAGE_SIZE));
            let pages = end.saturating_sub(extent.start) / PAGE_SIZE;
            let page = extent.start / PAGE_SIZE;
            // A table has 2^27 pages at most.
            if let (Ok(page), Ok(pages @ LEAST..)) = (u32::try_from(page), u32::try_from(pages)) {
                runs.push(Run { block: extent.place / PAGE_SIZE, page, pages });
            }
        }
        // Not after the loop: the memory for more is not taken.
        if runs.len() > STORED_RUNS as usize {
            let reason = format!("it is in more pieces than the {STORED_RUNS} that can be stored");
            return Err(Error::NoTable { reason });
        }
        if last.flags & EXTENT_LAST != 0 {
            break;
        }
        // The question would be the same again, and so would the answer.
        if end <= start {
            return Err(Error::of("asking the file system for a file's blocks", Errno::IO));
        }
        start = end;
    }
    Ok(runs)
}

fn words_of(header: &Stored, runs: &[Run]) -> Vec<u64> {
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let mut words = vec![
        header.magic,
        pair(header.version, header.runs),
        header.inode,
        pair(header.generation, header.reserved),
        header.length,
        header.uuid_first,
        header.uuid_last,
        header.checksum,
    ];
    words.extend(runs.iter().flat_map(|run| [run.block, pair(run.page, run.pages)]));
    words
}

fn encode(header: Stored, runs: &[Run]) -> Vec<u8> {
    let sum = checksum(words_of(&Stored { checksum: 0, ..header }, runs));
    let words = words_of(&Stored { checksum: sum, ..header }, runs);
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// The folder of stored tables of the file system of this number.
fn folder_of(device: u64) -> Result<PathBuf> {
    let mounts = fs::read("/proc/self/mountinfo").map_err(failed)?;
    // Another file system may be mounted over it.
    let has_device = |root: &PathBuf| fs::metadata(root).is_ok_and(|meta| meta.dev() == device);
    let root = roots_of(&mounts, device).into_iter().find(has_device);
    root.map(|root| root.join(STORED_FOLDER)).ok_or_else(|| {
        let reason = "its file system is not mounted from its root; mount all of it".to_owned();
        Error::NoTable { reason }
    })
}

/// Where `mountinfo` says that all of a file system is mounted, and first where it can be written.
/// The path of another one must not be looked at: its server may not answer, or it is mounted then.
fn roots_of(mounts: &[u8], device: u64) -> Vec<PathBuf> {
    let number = format!("{}:{}", major(device), minor(device));
    let lines = mounts.split(|byte| *byte == b'\n');
    let mut roots: Vec<_> = lines.filter_map(|line| root_of_line(line, &number)).collect();
    roots.sort_by_key(|(_, writes)| !writes);
    roots.into_iter().map(|(root, _)| root).collect()
}

/// Where a line of `mountinfo` says that all of the file system of a number is mounted, and whether
/// it can be written there.
fn root_of_line(line: &[u8], number: &str) -> Option<(PathBuf, bool)> {
    let mut words = line.split(|byte| *byte == b' ').skip(2);
    if words.next()? != number.as_bytes() || words.next()? != b"/" {
        return None;
    }
    let (word, mut path) = (words.next()?, Vec::new());
    let mut at = 0;
    while let Some(byte) = word.get(at) {
        // A space is \040, in octal digits.
        let octal = (*byte == b'\\').then(|| word.get(at + 1..at + 4)).flatten();
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => (path.push(escaped), at += 4).1,
            None => (path.push(*byte), at += 1).1,
        }
    }
    let mut options = words.next()?.split(|byte| *byte == b',');
    Some((PathBuf::from(std::ffi::OsString::from_vec(path)), options.any(|option| option == b"rw")))
}

/// Opens the folder of stored tables. Where users may write to the root of the file system, they
/// can have made it, with links in it to files of root's. So it has to be root's alone, and all use
/// of it goes through the descriptor: what its path names may be another folder a moment later.
fn open_folder(folder: &Path, device: u64) -> Result<File> {
    let unfit = |reason: String| Error::UnfitFolder { folder: folder.to_owned(), reason };
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match rustix::fs::open(folder, flags, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return Err(unfit("it is a link or a file; see who made it, and remove it".to_owned()));
        }
        opened => File::from(opened.map_err(refused)?),
    };
    let meta = opened.metadata().map_err(failed)?;
    if meta.dev() != device {
        let reason = "it is on another file system than the file; unmount what is mounted there";
        return Err(unfit(reason.to_owned()));
    }
    if meta.uid() != 0 {
        return Err(unfit(format!("user {} made it, and not root; remove it", meta.uid())));
    }
    if meta.mode() & 0o022 != 0 {
        let reason = "other users may write to it; remove it, or take that right from them (chmod \
                      go-w)";
        return Err(unfit(reason.to_owned()));
    }
    Ok(opened)
}

/// Writes the table, makes it durable, and then gives it its name. Returns the space that it takes.
fn publish(folder: &Path, device: u64, inode: u64, bytes: &[u8]) -> Result<u64> {
    // The folder of another user would be in root's way.
    if !geteuid().is_root() {
        return Err(refused(Errno::PERM));
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        done => done.map_err(failed)?,
    }
    let opened = open_folder(folder, device)?;
    // One process at a time uses the name.
    rustix::fs::flock(&opened, FlockOperation::LockExclusive).map_err(refused)?;
    // What a killed one has left.
    unlink(opened.as_fd(), NEW).map_err(refused)?;
    let named = write(opened.as_fd(), bytes).and_then(|taken| {
        renameat(&opened, NEW, &opened, inode.to_string())?;
        opened.sync_all()?;
        Ok(taken)
    });
    if named.is_err() {
        let _ = unlink(opened.as_fd(), NEW);
    }
    named.map_err(failed)
}

fn write(folder: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<u64> {
    // The name is free, and what takes it meanwhile is not followed.
    let new = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | new;
    let mut file = File::from(openat(folder, NEW, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(file.metadata()?.blocks() * 512)
}

/// Removes the stored table of an inode. Returns whether there was one.
fn remove(folder: &Path, device: u64, inode: u64) -> Result<bool> {
    match open_folder(folder, device) {
        Err(Error::System { errno: Errno::NOENT, .. }) => Ok(false),
        opened => unlink(opened?.as_fd(), &inode.to_string()).map_err(refused),
    }
}

/// Removes a name from a folder. Returns whether it was there.
fn unlink(folder: BorrowedFd<'_>, name: &str) -> rustix::io::Result<bool> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(false),
        done => done.map(|()| true),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use rustix::fs::{CWD, FileType};

    use super::*;

    const NODE: u64 = 77;

    /// A folder of stored tables that root has made, in a folder where users may write.
    struct Root {
        temporary: tempfile::TempDir,
        folder: PathBuf,
        device: u64,
    }

    impl Root {
        /// None where the tests run for another user.
        fn new() -> Option<Self> {
            if !geteuid().is_root() {
                println!("skipped: only root can store tables");
                return None;
            }
            let temporary = tempfile::tempdir().unwrap();
            let folder = temporary.path().join(STORED_FOLDER);
            let device = fs::metadata(temporary.path()).unwrap().dev();
            Some(Self { temporary, folder, device })
        }

        /// A file that the user wants written or removed by root.
        fn victim(&self, name: &str) -> PathBuf {
            let path = self.temporary.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "victim").unwrap();
            path
        }

        fn publish(&self) -> Result<u64> {
            publish(&self.folder, self.device, NODE, b"a table")
        }

        /// Nothing is stored there nor removed, for this reason.
        #[track_caller]
        fn assert_unfit(&self, why: &str) {
            let removed = remove(&self.folder, self.device, NODE).map(u64::from);
            for done in [self.publish(), removed] {
                let error = done.unwrap_err();
                let shown = error.to_string();
                assert!(matches!(error, Error::UnfitFolder { .. }), "{shown}");
                let path = self.folder.to_str().unwrap();
                assert!(shown.contains(why) && shown.contains(path), "{shown}");
            }
        }
    }

    #[test]
    fn a_table_is_stored_and_removed() {
        let Some(root) = Root::new() else { return };
        assert_eq!(remove(&root.folder, root.device, NODE), Ok(false));
        for _ in 0..2 {
            root.publish().unwrap();
            assert_eq!(fs::read(root.folder.join("77")).unwrap(), b"a table");
            assert_eq!(fs::read_dir(&root.folder).unwrap().count(), 1);
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!((mode(&root.folder), mode(&root.folder.join("77"))), (0o700, 0o600));
        assert_eq!(remove(&root.folder, root.device, NODE), Ok(true));
        assert_eq!(remove(&root.folder, root.device, NODE), Ok(false));
    }

    #[test]
    fn a_folder_that_is_not_roots_alone_is_refused() {
        let Some(mut root) = Root::new() else { return };
        let victims = [root.victim(".vellum-tables/77"), root.victim(".vellum-tables/new")];
        chown(&root.folder, Some(12345), None).unwrap();
        root.assert_unfit("user 12345 made it");
        chown(&root.folder, Some(0), None).unwrap();
        for mode in [0o720, 0o702, 0o1777] {
            fs::set_permissions(&root.folder, fs::Permissions::from_mode(mode)).unwrap();
            root.assert_unfit("other users may write to it");
        }
        fs::set_permissions(&root.folder, fs::Permissions::from_mode(0o755)).unwrap();
        root.device += 1;
        root.assert_unfit("on another file system");
        for victim in victims {
            assert_eq!(fs::read(victim).unwrap(), b"victim");
        }
    }

    #[test]
    fn a_link_or_a_file_is_not_taken_for_the_folder() {
        let Some(root) = Root::new() else { return };
        let victims = [root.victim("other/77"), root.victim("other/new")];
        symlink(victims[0].parent().unwrap(), &root.folder).unwrap();
        root.assert_unfit("a link or a file");
        fs::remove_file(&root.folder).unwrap();
        rustix::fs::mknodat(CWD, &root.folder, FileType::Fifo, Mode::RWXU, 0).unwrap();
        root.assert_unfit("a link or a file");
        for victim in victims {
            assert_eq!(fs::read(victim).unwrap(), b"victim");
        }
    }

    /// They may have been put there while the folder was a user's.
    #[test]
    fn what_has_the_names_in_the_folder_is_not_followed() {
        let Some(root) = Root::new() else { return };
        let victim = root.victim("victim");
        root.publish().unwrap();
        let new = root.folder.join(NEW);
        for name in [&new, &root.folder.join("77")] {
            for is_hard in [false, true] {
                let _ = fs::remove_file(name);
                match is_hard {
                    true => fs::hard_link(&victim, name).unwrap(),
                    false => symlink(&victim, name).unwrap(),
                }
                root.publish().unwrap();
                assert_eq!(fs::read(&victim).unwrap(), b"victim", "{}", name.display());
                assert_eq!(fs::read(root.folder.join("77")).unwrap(), b"a table");
            }
        }
        rustix::fs::mknodat(CWD, &new, FileType::Fifo, Mode::RWXU, 0).unwrap();
        root.publish().unwrap();
        symlink(&victim, &new).unwrap();
        let folder = File::open(&root.folder).unwrap();
        let taken = write(folder.as_fd(), b"a table").unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
    }

    #[test]
    fn roots_of_file_systems_are_found() {
        let of = |line: &str| root_of_line(line.as_bytes(), "98:0");
        let line = r"36 35 98:0 / /mnt/two\040words\134 rw,noatime - ext4 /dev/pmem0 rw";
        assert_eq!(of(line).unwrap(), (r"/mnt/two words\".into(), true));
        assert_eq!(of(r"36 35 98:0 /sub /mnt rw - ext4 /dev/pmem0 rw"), None);
        assert_eq!(of(r"36 35 98:1 / /mnt rw - ext4 /dev/pmem1 rw"), None);
        assert_eq!(of(r"1 2 98:0 / /odd\0 ro,rwx").unwrap(), (r"/odd\0".into(), false));
        assert_eq!(of(""), None);
        let root = fs::metadata("/proc").unwrap().dev();
        assert_eq!(folder_of(root).unwrap(), Path::new("/proc/.vellum-tables"));
        assert!(matches!(folder_of(u64::MAX), Err(Error::NoTable { .. })));
    }

    #[test]
    fn only_mounts_of_the_file_system_are_looked_at() {
        let mounts = b"\
            30 1 0:50 / /mnt/nfs rw - nfs4 server:/ rw\n\
            31 1 0:51 / /mnt/automount rw - autofs systemd-1 rw\n\
            32 1 98:0 / /mnt/seen ro,noatime - ext4 /dev/pmem0 rw\n\
            33 1 98:0 /part /mnt/part rw - ext4 /dev/pmem0 rw\n\
            34 1 98:0 / /mnt/written rw,noatime - ext4 /dev/pmem0 rw\n\
            35 1 98:0 / /mnt/also rw - ext4 /dev/pmem0 rw\n\
            36 1 98:01 / /mnt/other rw - ext4 /dev/pmem1 rw\n";
        let roots = roots_of(mounts, rustix::fs::makedev(98, 0));
        assert_eq!(roots, ["/mnt/written", "/mnt/also", "/mnt/seen"].map(PathBuf::from));
        assert_eq!(roots_of(mounts, rustix::fs::makedev(98, 2)), Vec::<PathBuf>::new());
    }

    fn extent(start: u64, length: u64) -> Extent {
        flagged(start, length, 0)
    }

    fn flagged(start: u64, length: u64, flags: u32) -> Extent {
        let mut extent = Extent::default();
        (extent.start, extent.length, extent.flags) = (start, length, flags);
        extent.place = PAGE_SIZE * 100 + start * 2;
        extent
    }

    #[test]
    fn pieces_of_a_file_are_found() {
        let piece = PAGE_SIZE * 4;
        let answers = [
            vec![extent(0, piece), extent(piece, PAGE_SIZE * 3)],
            vec![flagged(piece * 2, piece, 0x800), flagged(piece * 3, piece * 9, EXTENT_LAST)],
        ];
        let mut asked = Vec::new();
        let found = runs(piece * 5 - 1, |start| {
            asked.push(start);
            Ok(answers[asked.len() - 1].clone())
        });
        let expected =
            [Run { block: 100, page: 0, pages: 4 }, Run { block: 124, page: 12, pages: 8 }];
        assert_eq!(found.unwrap(), expected);
        assert_eq!(asked, [0, piece + PAGE_SIZE * 3]);
    }

    #[test]
    fn an_answer_that_leads_no_further_ends_the_questions() {
        for (start, length) in [(0, 0), (PAGE_SIZE, 0)] {
            let mut asked = 0;
            let found = runs(1 << 30, |_| {
                asked += 1;
                assert!(asked < 5, "the same question again");
                Ok(vec![extent(start, length)])
            });
            assert!(matches!(found, Err(Error::System { errno: Errno::IO, .. })), "{found:?}");
        }
        let found = runs(1 << 30, |_| Ok(vec![extent(0, u64::MAX), extent(PAGE_SIZE, u64::MAX)]));
        assert_eq!(found.unwrap().len(), 2);
    }

    #[test]
    fn a_file_in_too_many_pieces_is_given_up_early() {
        let (piece, mut asked) = (PAGE_SIZE * 4, 0);
        let found = runs(piece << 22, |start| {
            asked += 1;
            Ok((0..64).map(|at| extent(start + at * piece, piece)).collect())
        });
        assert!(matches!(found, Err(Error::NoTable { .. })));
        assert_eq!(asked, STORED_RUNS / 64 + 1);
        let found = runs(piece << 20, |start| {
            Ok((0..64).map(|at| extent(start + at * piece, piece)).collect())
        });
        assert_eq!(found.unwrap().len(), STORED_RUNS as usize);
    }

    #[test]
    fn any_bit_changes_the_checksum() {
        let runs = [Run { block: 7, page: 0, pages: 3 }, Run { block: 99, page: 5, pages: 1 }];
        let header = Stored { magic: STORED_MAGIC, runs: 2, length: 20_000, ..Stored::default() };
        let bytes = encode(header, &runs);
        assert_eq!(bytes.len(), 64 + 32);
        let sum = |bytes: &[u8]| {
            let words = bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            checksum(words.enumerate().map(|(at, word)| if at == 7 { 0 } else { word }))
        };
        let stored = u64::from_le_bytes(bytes[56..64].try_into().unwrap());
        assert_eq!(sum(&bytes), stored);
        for bit in (0..bytes.len() * 8).filter(|bit| !(56 * 8..64 * 8).contains(bit)) {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum(&other), stored, "bit {bit}");
        }
    }
}
