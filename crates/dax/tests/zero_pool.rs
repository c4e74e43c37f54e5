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

use tempfile::TempDir;
use vellum_dax::{Access, Durability, Errno, Error, Options, ZeroPool, ZeroPoolOptions};
use vellum_testing::patience::{PATIENCE, eventually};
use vellum_testing::small_disk::SmallDisk;

const MIB: u64 = 1 << 20;

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
    assert!(pool.wait_until_full(Duration::ZERO).unwrap());
}

#[test]
fn files_have_the_mode_of_new_files() {
    let folder = folder();
    let pool = full(&folder, &[(5_000, 1)]);
    let new = folder.path().join("new");
    fs::write(&new, b"").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode();
    for name in ["ready", "missed"] {
        let path = folder.path().join(name);
        drop(pool.create(&path, 5_000, &Options::default()).unwrap());
        assert_eq!(mode(&path), mode(&new), "{name}");
    }
}

#[test]
fn files_of_earlier_boots_are_removed() {
    let folder = folder();
    let path = folder.path().join("pool");
    drop(ZeroPool::open(&path).unwrap());
    let earlier = path.join("ready-12345678-0000-0000-0000-000000000000");
    make_private(&earlier);
    for name in ["1048576-1-1-0", "1048576-1-1-1", "4096-1-1-2"] {
        fs::write(earlier.join(name), vec![7; MIB as usize]).unwrap();
    }
    // And what a killed process was making.
    fs::write(path.join("new/file-1-1-3"), vec![8; 3 * MIB as usize]).unwrap();
    let pool = ZeroPool::open(&path).unwrap();
    assert_eq!(pool.stat().unwrap().ready_files, 0);
    drop(pool);
    let pool = full(&folder, &[(MIB, 4)]);
    assert!(!earlier.exists() && names(&path.join("new")).is_empty());
    assert_eq!(pool.stat().unwrap().zeroed_files, 4, "{:?}", pool.stat());
    for number in 0..4 {
        let file = folder.path().join(format!("{number}"));
        pool.create(&file, MIB, &Options::default()).unwrap();
        assert!(is_zeros(&file, MIB));
    }
}

#[test]
fn a_full_pool_gets_no_more_files() {
    let folder = folder();
    let path = folder.path().join("pool");
    for round in 1..=300 {
        let pool = ZeroPool::fill(&path, &options(&[(4096, round)])).unwrap();
        // Looks all the time, also when the filler adds the last file.
        while pool.stat().unwrap().ready_files < u64::from(round) {}
        drop(pool);
        assert_eq!(names(&ready_folder(&path)).len(), round as usize);
    }
}

fn make_private(folder: &Path) {
    fs::create_dir(folder).unwrap();
    fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
}

fn names(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_ready_file_of_another_length_is_not_handed_out() {
    let folder = folder();
    let path = folder.path().join("pool");
    let pool = ZeroPool::open(&path).unwrap();
    let ready = ready_folder(&path);
    fs::write(ready.join("1048576-1-1-0"), b"what a taker that was killed has left").unwrap();
    fs::write(ready.join("not a length"), b"stays").unwrap();
    symlink("/etc/hostname", ready.join("1048576-1-1-1")).unwrap();
    fs::create_dir(ready.join("1048576-1-1-2")).unwrap();
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
    pool.replace(&link, 5, &plain).unwrap();
    assert!(is_zeros(&path, MIB) && fs::symlink_metadata(&link).unwrap().is_file());
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    assert!(pool.replace(&inner, 5, &plain).is_err());
    assert!(pool.create(folder.path().join("no/folder"), 5, &plain).is_err());
    assert!(inner.is_dir());
    for (length, errno) in [(u64::MAX, Errno::FBIG), (1 << 63, Errno::FBIG)] {
        let error = pool.create(folder.path().join("long"), length, &plain).unwrap_err();
        assert!(matches!(error, Error::System { errno: found, .. } if found == errno), "{error}");
    }
    let error = pool.create(folder.path().join("long"), 1 << 62, &plain).unwrap_err();
    assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    fill_again(&pool);
    assert_eq!(pool.stat().unwrap().ready_files, 2);
    let error = pool.create("/proc/vellum", 5, &plain).unwrap_err();
    assert!(matches!(error, Error::OtherFileSystem { .. }), "{error}");
}

#[test]
fn other_folders_and_empty_options_are_refused() {
    let folder = folder();
    let refused = |name: &str, why: &str| {
        let error = ZeroPool::fill(folder.path().join(name), &options(&[(5, 1)])).unwrap_err();
        let is_named = matches!(&error, Error::NotAPool { reason, .. } if reason.contains(why));
        assert!(is_named, "{name}: {error}");
    };
    let place = |name: &str| folder.path().join(name);
    fs::create_dir(place("open")).unwrap();
    fs::set_permissions(place("open"), Permissions::from_mode(0o755)).unwrap();
    refused("open", "chmod 700");
    fs::write(place("file"), b"").unwrap();
    refused("file", "is not a folder");
    // A user's own files, with the names of a pool's.
    make_private(&place("own"));
    for inner in ["new", "used", "ready-for-print"] {
        make_private(&place("own").join(inner));
        fs::write(place("own").join(inner).join("thesis"), b"years of work").unwrap();
    }
    refused("own", "has other files");
    fs::write(place("own/lock"), b"of another program").unwrap();
    refused("own", "is not that of a pool");
    assert_eq!(fs::read(place("own/ready-for-print/thesis")).unwrap(), b"years of work");
    assert_eq!(fs::read(place("own/new/thesis")).unwrap(), b"years of work");
    // A pool whose inner folder leads elsewhere.
    drop(ZeroPool::open(place("pool")).unwrap());
    fs::remove_dir(place("pool/new")).unwrap();
    symlink(place("own"), place("pool/new")).unwrap();
    refused("pool", "is not a folder");
    assert!(ZeroPool::open(place("a/b")).is_err());
    for wrong in
        [options(&[(0, 1)]), options(&[(u64::MAX, 1)]), ZeroPoolOptions { rate: 0, ..options(&[]) }]
    {
        let error = ZeroPool::fill(place("new pool"), &wrong).unwrap_err();
        assert!(matches!(error, Error::NotAPool { .. }), "{error}");
    }
    // Counts of a length add up.
    let sum = tempfile::tempdir().unwrap();
    let pool = full(&sum, &[(5, 1), (5, 2)]);
    assert_eq!(pool.stat().unwrap().ready_files, 3);
}

/// A child has its parent's handle, and makes files of its own with it.
#[test]
fn a_forked_child_makes_other_files() {
    let folder = folder();
    let filler = full(&folder, &[(4_096, 20)]);
    let pool = ZeroPool::open(folder.path().join("pool")).unwrap();
    let make = |who: &str| {
        (0..100_u8).all(|number| {
            let path = folder.path().join(format!("{who}-{number}"));
            let Ok(file) = pool.create(&path, 4_096, &Options::default()) else { return false };
            is_zeros(&path, 4_096) && file.file().write_all_at(&[number | 1; 4_096], 0).is_ok()
        })
    };
    // SAFETY: the child calls what it would call in a thread of its own, and ends without handlers.
    // No other thread uses this handle.
    #[allow(unsafe_code)]
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(i32::from(!make("child")));
        }
        child
    };
    assert!(make("parent"));
    let child = rustix::process::Pid::from_raw(child);
    let ended = rustix::process::waitpid(child, rustix::process::WaitOptions::empty()).unwrap();
    assert_eq!(ended.unwrap().1.exit_status(), Some(0));
    for (who, number) in
        ["child", "parent"].iter().flat_map(|who| (0..100_u8).map(move |n| (who, n)))
    {
        let path = folder.path().join(format!("{who}-{number}"));
        assert!(fs::read(path).unwrap() == [number | 1; 4_096], "{who}-{number}");
    }
    drop(filler);
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
                            0 => fs::remove_file(&path).unwrap(),
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
    eventually("the other handle fills the pool", || other.stat().unwrap().is_filler);
}

/// Fills a pool and takes files of it until it is killed.
#[test]
#[ignore = "a process that the next test starts"]
fn take_until_killed() {
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
            fs::remove_file(&path).unwrap();
        }
        std::thread::sleep(Duration::from_millis(number % 5 * 5));
    }
}

#[test]
fn processes_that_are_killed_leave_no_bytes_in_the_pool() {
    let folder = folder();
    let pool = ZeroPool::open(folder.path().join("pool")).unwrap();
    for round in 0..15_u64 {
        let both = [(); 2].map(|()| start("take_until_killed", Stdio::null(), folder.path()));
        let ready = || pool.stat().unwrap().ready_files;
        eventually("a file is ready", || ready() > 0);
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
    let _pool = full(&folder, &[(64 << 10, 8)]);
    assert!(names(&folder.path().join("pool/new")).is_empty());
}

#[test]
fn a_handle_that_ends_does_not_wait_for_the_rest() {
    let folder = folder();
    let slow = ZeroPoolOptions { rate: 1, ..options(&[(4 * MIB, 100)]) };
    let pool = ZeroPool::fill(folder.path().join("pool"), &slow).unwrap();
    eventually("the pool fills", || pool.stat().unwrap().zeroed_bytes > 0);
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
    // It leaves a sixteenth of the space to others, and less than one of its files more.
    eventually("the pool has taken the rest", || {
        let about = rustix::fs::statvfs(disk.path()).unwrap();
        about.f_bavail * about.f_frsize < about.f_blocks * about.f_frsize / 16 + MIB
    });
    assert!(!pool.wait_until_full(Duration::from_millis(100)).unwrap());
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
