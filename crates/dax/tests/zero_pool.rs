//! Pools of zeroed files: on the file system of the temporary folder, and in a guest of the lab on
//! persistent memory with file tables.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{IFlags, XattrFlags};
use tempfile::TempDir;
use vellum_dax::{
    Access, DaxFile, Durability, Errno, Error, Heap, HeapOptions, Options, ZeroPool,
    ZeroPoolOptions,
};
use vellum_testing::small_disk::SmallDisk;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder on persistent memory where there is some, else any.
fn folder() -> TempDir {
    let pmem = Path::new("/pmem/lost+found").exists().then(|| TempDir::new_in("/pmem").unwrap());
    pmem.unwrap_or_else(|| tempfile::tempdir().unwrap())
}

fn options(files: &[(u64, u32)]) -> ZeroPoolOptions {
    ZeroPoolOptions { files: files.to_vec(), rate: u64::MAX }
}

/// A pool with so many files ready.
fn full(folder: &TempDir, files: &[(u64, u32)]) -> ZeroPool {
    let pool = ZeroPool::fill(folder.path().join("pool"), &options(files)).unwrap();
    fill_again(&pool);
    pool
}

fn fill_again(pool: &ZeroPool) {
    assert!(pool.wait_until_full(PATIENCE).unwrap());
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

fn is_zeros(path: &Path, length: u64) -> bool {
    fs::read(path).unwrap() == vec![0; length as usize]
}

fn ready_folder(pool: &Path) -> PathBuf {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    pool.join(format!("ready-{}", boot.trim()))
}

/// A process that is killed when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a test of this program in a process of its own.
fn start(test: &str, input: Stdio, folder: &Path) -> Killed {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let command = command.args(["--ignored", "--exact", test]).env("VELLUM_FOLDER", folder);
    Killed(command.stdin(input).stdout(Stdio::null()).spawn().unwrap())
}

#[test]
#[ignore = "a process that a test starts"]
fn wait_to_be_killed() {
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn files_have_zeros_their_length_and_what_is_written() {
    let folder = folder();
    let pool = full(&folder, &[(64 << 10, 1), (MIB, 2)]);
    let stat = pool.stat().unwrap();
    assert_eq!((stat.ready_files, stat.ready_bytes), (3, 2 * MIB + (64 << 10)));
    assert!(stat.is_filler && stat.failure.is_none());
    for durability in [Durability::Synced, Durability::Flushed] {
        let options = Options { durability, ..Options::default() };
        // The shortest that is long enough; one that is too long; one that is too short; none.
        for length in [10_000, MIB - 1, 3 * MIB + 5, 0] {
            fill_again(&pool);
            let before = pool.stat().unwrap();
            let path = folder.path().join(format!("{length}-{durability:?}"));
            let file = pool.create(&path, length, &options).unwrap();
            let after = pool.stat().unwrap();
            assert_eq!(after.taken - before.taken, u64::from(length > 0));
            assert_eq!(file.length().unwrap(), length);
            assert!(is_zeros(&path, length));
            if length > 0 {
                let mapping = file.map(Access::ReadWrite).unwrap();
                mapping.write_durably(length - 5, b"hello").unwrap();
                file.sync().unwrap();
                assert!(fs::read(&path).unwrap().ends_with(b"\0\0hello"));
            }
            // The pool locks what it hands out no longer.
            File::open(&path).unwrap().try_lock().unwrap();
        }
    }
}

#[test]
fn a_file_is_zeroed_at_once_where_none_is_ready() {
    let folder = folder();
    // This handle fills nothing.
    let pool = ZeroPool::open(folder.path().join("pool")).unwrap();
    let path = folder.path().join("file");
    let file = pool.create(&path, 100_000, &Options::default()).unwrap();
    assert!(is_zeros(&path, 100_000));
    file.file().write_all_at(b"data", 7).unwrap();
    let stat = pool.stat().unwrap();
    assert_eq!((stat.taken, stat.missed, stat.is_filler), (0, 1, false));
    // Without a process that zeroes a file is removed, and not kept.
    drop(file);
    pool.remove(&path).unwrap();
    assert_eq!((path.exists(), pool.stat().unwrap().waiting_files), (false, 0));
    assert!(pool.wait_until_full(Duration::ZERO).unwrap());
}

#[test]
fn a_removed_file_comes_back_as_zeros() {
    let folder = folder();
    let pool = full(&folder, &[(MIB, 1)]);
    let path = folder.path().join("file");
    let mut inodes = BTreeSet::new();
    for round in 0..5_u8 {
        let file = pool.create(&path, MIB, &Options::default()).unwrap();
        assert!(is_zeros(&path, MIB), "round {round}");
        inodes.insert(inode(&path));
        file.file().write_all_at(&vec![round + 1; MIB as usize + 5_000], 0).unwrap();
        // Another one is made ready meanwhile, so the pool wants one only after the next is taken.
        fill_again(&pool);
        let next = pool.create(folder.path().join("next"), MIB, &Options::default()).unwrap();
        drop((file, next));
        fs::set_permissions(&path, Permissions::from_mode(0o4777)).unwrap();
        pool.remove(&path).unwrap();
        fs::remove_file(folder.path().join("next")).unwrap();
        fill_again(&pool);
    }
    let stat = pool.stat().unwrap();
    assert!(stat.recycled > 0 && inodes.len() < 10, "{stat:?} {inodes:?}");
    pool.create(&path, MIB, &Options::default()).unwrap();
    let lock = fs::metadata(folder.path().join("pool/lock")).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode(), lock.mode());
}

/// Removes a file while a process holds the pool's lock, and then fills the pool with one file.
/// Returns whether that is the removed one.
fn is_recycled(folder: &TempDir, path: &Path) -> bool {
    let place = folder.path().join("pool");
    let _ = fs::remove_dir_all(&place);
    let pool = ZeroPool::open(&place).unwrap();
    let lock = File::open(place.join("lock")).unwrap();
    lock.lock().unwrap();
    pool.remove(path).unwrap();
    assert!(!path.exists());
    drop(lock);
    let filler = full(folder, &[(MIB, 1)]);
    let ready = fs::read_dir(ready_folder(&place)).unwrap().next().unwrap().unwrap();
    assert!(is_zeros(&ready.path(), MIB));
    let stat = filler.stat().unwrap();
    assert_eq!(stat.recycled + stat.made, 1);
    stat.recycled == 1
}

#[test]
fn what_a_process_still_uses_is_not_zeroed() {
    let folder = folder();
    let bytes = vec![7; MIB as usize];
    let path = folder.path().join("file");
    let make = || fs::write(&path, &bytes).unwrap();
    let mut seen = vec![0; MIB as usize];
    make();
    assert!(is_recycled(&folder, &path));

    make();
    let mut open = File::open(&path).unwrap();
    assert!(!is_recycled(&folder, &path));
    open.read_exact(&mut seen).unwrap();
    assert!(seen == bytes, "a descriptor");

    make();
    let file = DaxFile::open_to_write(&path, &Options::default()).unwrap();
    let mapping = file.map(Access::ReadWrite).unwrap();
    drop(file);
    assert!(!is_recycled(&folder, &path));
    mapping.read_at(0, &mut seen).unwrap();
    assert!(seen == bytes, "a mapping");

    make();
    let heap = Heap::new(&HeapOptions::new(Access::Read)).unwrap();
    let attached = heap.map(&File::open(&path).unwrap()).unwrap();
    assert!(!is_recycled(&folder, &path));
    attached.read_at(0, &mut seen).unwrap();
    assert!(seen == bytes, "an attachment");

    make();
    let other = start("wait_to_be_killed", File::open(&path).unwrap().into(), folder.path());
    assert!(!is_recycled(&folder, &path));
    let through = fs::read(format!("/proc/{}/fd/0", other.0.id())).unwrap();
    assert!(through == bytes, "another process");

    make();
    let link = folder.path().join("link");
    fs::hard_link(&path, &link).unwrap();
    assert!(!is_recycled(&folder, &path));
    assert!(fs::read(&link).unwrap() == bytes, "another name");

    // Too short for the one that is wanted.
    fs::write(&path, &bytes[1..]).unwrap();
    assert!(!is_recycled(&folder, &path));
    make();
    if rustix::fs::setxattr(&path, "user.a", b"b", XattrFlags::empty()).is_ok() {
        assert!(!is_recycled(&folder, &path), "an attribute");
        make();
    }
    let file = File::open(&path).unwrap();
    if rustix::fs::ioctl_setflags(&file, IFlags::NODUMP).is_ok() {
        drop(file);
        assert!(!is_recycled(&folder, &path), "a flag");
    }
}

#[test]
fn files_of_earlier_boots_are_not_trusted() {
    let folder = folder();
    let path = folder.path().join("pool");
    drop(ZeroPool::open(&path).unwrap());
    let earlier = path.join("ready-12345678-0000-0000-0000-000000000000");
    fs::create_dir(&earlier).unwrap();
    for name in ["1048576-1-1-0", "1048576-1-1-1", "4096-1-1-2"] {
        fs::write(earlier.join(name), vec![7; MIB as usize]).unwrap();
    }
    fs::write(path.join("used/1-1-3"), vec![8; 3 * MIB as usize]).unwrap();
    let pool = ZeroPool::open(&path).unwrap();
    assert_eq!(pool.stat().unwrap().ready_files, 0);
    drop(pool);
    let pool = full(&folder, &[(MIB, 4)]);
    assert!(!earlier.exists());
    assert_eq!(pool.stat().unwrap().recycled, 4, "{:?}", pool.stat());
    for number in 0..4 {
        let file = folder.path().join(format!("{number}"));
        pool.create(&file, MIB, &Options::default()).unwrap();
        assert!(is_zeros(&file, MIB));
    }
}

#[test]
fn a_ready_file_of_another_length_is_not_handed_out() {
    let folder = folder();
    let path = folder.path().join("pool");
    let pool = ZeroPool::open(&path).unwrap();
    let ready = ready_folder(&path);
    fs::write(ready.join("1048576-1-1-0"), b"what a taker that was killed has left").unwrap();
    fs::write(ready.join("not a length"), b"stays").unwrap();
    let file = folder.path().join("file");
    pool.create(&file, MIB, &Options::default()).unwrap();
    assert!(is_zeros(&file, MIB));
    assert_eq!(pool.stat().unwrap().missed, 1);
}

#[test]
fn paths_that_are_in_use_are_refused_or_replaced() {
    let folder = folder();
    let pool = full(&folder, &[(MIB, 2)]);
    let (path, plain) = (folder.path().join("file"), Options::default());
    fs::write(&path, b"old").unwrap();
    let error = pool.create(&path, MIB, &plain).unwrap_err();
    assert!(matches!(error, Error::System { errno: Errno::EXIST, .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(pool.stat().unwrap().ready_files, 2);

    let mut old = File::open(&path).unwrap();
    pool.replace(&path, MIB, &plain).unwrap();
    assert!(is_zeros(&path, MIB));
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!(text, "old");
    pool.replace(folder.path().join("new"), 5, &plain).unwrap();
    assert!(is_zeros(&folder.path().join("new"), 5));

    let link = folder.path().join("link");
    symlink(&path, &link).unwrap();
    assert!(pool.create(&link, 5, &plain).is_err());
    pool.remove(&link).unwrap();
    assert!(is_zeros(&path, MIB) && fs::symlink_metadata(&link).is_err());
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    assert!(pool.remove(&inner).is_err() && pool.replace(&inner, 5, &plain).is_err());
    assert!(pool.remove(folder.path().join("nothing")).is_err());
    assert!(pool.create(folder.path().join("no/folder"), 5, &plain).is_err());
    assert!(inner.is_dir());
    fill_again(&pool);
    let error = pool.create("/proc/vellum", 5, &plain).unwrap_err();
    assert!(matches!(error, Error::OtherFileSystem { .. }), "{error}");
}

#[test]
fn folders_of_others_and_empty_options_are_refused() {
    let folder = folder();
    let open = folder.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
    let error = ZeroPool::open(&open).unwrap_err();
    assert!(matches!(error, Error::NotAPool { .. }), "{error}");
    fs::write(folder.path().join("file"), b"").unwrap();
    assert!(ZeroPool::open(folder.path().join("file")).is_err());
    assert!(ZeroPool::open(folder.path().join("a/b")).is_err());
    for wrong in [options(&[(0, 1)]), ZeroPoolOptions { rate: 0, ..options(&[]) }] {
        let error = ZeroPool::fill(folder.path().join("pool"), &wrong).unwrap_err();
        assert!(matches!(error, Error::NotAPool { .. }), "{error}");
    }
}

#[test]
fn handles_never_share_a_file_and_take_over_from_each_other() {
    let folder = folder();
    let first = full(&folder, &[(64 << 10, 20)]);
    let other = ZeroPool::fill(folder.path().join("pool"), &options(&[(64 << 10, 20)])).unwrap();
    assert!(!other.stat().unwrap().is_filler);
    let inodes = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let (pool, folder) = ([&first, &other][thread % 2], &folder);
                scope.spawn(move || {
                    let mut inodes = Vec::new();
                    for number in 0..50 {
                        let path = folder.path().join(format!("{thread}-{number}"));
                        let file = pool.create(&path, 64 << 10, &Options::default()).unwrap();
                        assert!(is_zeros(&path, 64 << 10));
                        file.file().write_all_at(&[1; 64 << 10], 0).unwrap();
                        drop(file);
                        match number % 3 {
                            0 => pool.remove(&path).unwrap(),
                            _ => inodes.push(inode(&path)),
                        }
                    }
                    inodes
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(inodes.iter().collect::<BTreeSet<_>>().len(), inodes.len());
    for (thread, number) in (0..4).flat_map(|thread| (0..50).map(move |number| (thread, number))) {
        let bytes = fs::read(folder.path().join(format!("{thread}-{number}")));
        assert!(number % 3 == 0 || bytes.unwrap() == [1; 64 << 10], "{thread}-{number}");
    }
    drop(first);
    fill_again(&other);
    let path = folder.path().join("after");
    fs::write(&path, b"other").unwrap();
    other.remove(&path).unwrap();
    fill_again(&other);
    assert!(other.stat().unwrap().is_filler);
}

/// Fills a pool and takes files of it until it is killed.
#[test]
#[ignore = "a process that the next test starts"]
fn take_and_give() {
    let folder = PathBuf::from(std::env::var_os("VELLUM_FOLDER").unwrap());
    let pool = ZeroPool::fill(folder.join("pool"), &options(&[(64 << 10, 8)])).unwrap();
    let name = format!("of-{}", std::process::id());
    for number in 0_u64.. {
        let path = folder.join(format!("{name}-{}", number % 3));
        let file = pool.replace(&path, 64 << 10, &Options::default()).unwrap();
        assert!(is_zeros(&path, 64 << 10));
        file.file().write_all_at(&[1; 64 << 10], 0).unwrap();
        drop(file);
        if number % 2 == 0 {
            pool.remove(&path).unwrap();
        }
        std::thread::sleep(Duration::from_millis(number % 5 * 5));
    }
}

#[test]
fn processes_that_are_killed_leave_no_bytes_in_the_pool() {
    let folder = folder();
    let pool = ZeroPool::open(folder.path().join("pool")).unwrap();
    for round in 0..15_u64 {
        let both = [(); 2].map(|()| start("take_and_give", Stdio::null(), folder.path()));
        let ready = || pool.stat().unwrap().ready_files;
        while ready() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(13 * round % 100));
        drop(both);
        // What is ready is zeros, whenever they died.
        for number in 0..ready() {
            let path = folder.path().join(format!("{round}-{number}"));
            pool.create(&path, 64 << 10, &Options::default()).unwrap();
            assert!(is_zeros(&path, 64 << 10), "round {round}");
            fs::remove_file(path).unwrap();
        }
    }
    assert!(pool.stat().unwrap().taken > 0, "{:?}", pool.stat());
    drop(pool);
    let pool = full(&folder, &[(64 << 10, 4)]);
    assert_eq!(pool.stat().unwrap().waiting_files, 0);
}

#[test]
fn a_handle_that_ends_does_not_wait_for_the_rest() {
    let folder = folder();
    let slow = ZeroPoolOptions { rate: 1, ..options(&[(4 * MIB, 100)]) };
    let pool = ZeroPool::fill(folder.path().join("pool"), &slow).unwrap();
    while pool.stat().unwrap().zeroed_bytes == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!pool.wait_until_full(Duration::from_millis(1)).unwrap());
    // At that rate the first file is ready in weeks.
    drop(pool);
    let pool = full(&folder, &[(MIB, 1)]);
    assert_eq!(pool.stat().unwrap().ready_files, 1);
}

#[test]
fn a_full_disk_is_not_filled_by_the_pool() {
    let folder = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(folder.path(), 64 << 10) else { return };
    let path = disk.path().join("pool");
    let files = options(&[(MIB, 1_000)]);
    let pool = ZeroPool::fill(&path, &files).unwrap();
    assert!(!pool.wait_until_full(Duration::from_secs(2)).unwrap());
    let stat = pool.stat().unwrap();
    assert!(stat.ready_files > 5 && stat.failure.is_none(), "{stat:?}");
    // A file that needs more than is left gets what the pool has kept.
    let bytes = (stat.ready_files - 2) * MIB;
    let large = pool.create(disk.path().join("large"), bytes, &Options::default()).unwrap();
    assert_eq!(large.length().unwrap(), bytes);
    let error = pool.create(disk.path().join("more"), 64 * MIB, &Options::default()).unwrap_err();
    assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    assert!(!disk.path().join("more").exists());
}
