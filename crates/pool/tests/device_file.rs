//! Devices on files: opening, locks, direct I/O, real space, block devices, signals.

#![cfg(not(feature = "model"))]
#![allow(unsafe_code, clippy::unwrap_used)]

mod device_support;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use device_support::{
    Buffer, Mounted, PATIENCE, Reads, assert_holds, range, surface, surface_with_frames, write_all,
};
use vellum_pool::device::{
    Device, DeviceError, Direct, FileDevice, FileOptions, IoEngineChoice, Write,
};
use vellum_testing::patience::SetWhenDropped;
use vellum_vm::PAGE_SIZE;

const RW: FileOptions = FileOptions {
    read_only: false,
    direct: Direct::Auto,
    engine: IoEngineChoice::Auto,
    lock: true,
};
const RO: FileOptions = FileOptions { read_only: true, ..RW };

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn by_default_a_file_is_locked_and_writable() {
    assert_eq!(FileOptions::default(), RW);
}

#[test]
fn errors_of_creating_and_opening_name_the_cause() {
    let directory = directory();
    let path = directory.path().join("pages");
    assert!(matches!(FileDevice::open(&path, RW), Err(DeviceError::NotFound { .. })));
    assert!(matches!(FileDevice::open(&path, RO), Err(DeviceError::NotFound { .. })));
    drop(FileDevice::create(&path, RW).unwrap());
    assert!(matches!(FileDevice::create(&path, RW), Err(DeviceError::AlreadyExists { .. })));
    for create in [false, true] {
        let open = |path: &Path| match create {
            true => FileDevice::create(path, RW),
            false => FileDevice::open(path, RW),
        };
        let error = open(directory.path()).unwrap_err();
        assert!(matches!(error, DeviceError::WrongKind { kind: "directory", .. }), "{error}");
        let error = open(Path::new("/dev/null")).unwrap_err();
        assert!(error.to_string().contains("character device"), "{error}");
        let error = open(Path::new("/dev/null/pages")).unwrap_err();
        assert!(matches!(error, DeviceError::Io { .. }), "{error}");
        let error = open(&directory.path().join("missing/pages")).unwrap_err();
        match create {
            true => assert!(matches!(error, DeviceError::NoFolder { .. }), "{error}"),
            false => assert!(matches!(error, DeviceError::NotFound { .. }), "{error}"),
        }
    }
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = FileDevice::open(&pipe, RO).unwrap_err();
    assert!(matches!(error, DeviceError::WrongKind { kind: "pipe", .. }), "{error}");
}

#[test]
fn a_file_has_one_writer_or_several_readers() {
    let directory = directory();
    let path = directory.path().join("pages");
    let in_use = |result: Result<FileDevice, DeviceError>| match result {
        Err(DeviceError::InUse { path: said, holder }) => {
            assert_eq!(said, path);
            assert!(holder.is_none_or(|pid| pid == std::process::id()), "{holder:?}");
        }
        other => panic!("{other:?}"),
    };
    let writer = FileDevice::create(&path, RW).unwrap();
    in_use(FileDevice::open(&path, RW));
    in_use(FileDevice::open(&path, RO));
    drop(FileDevice::open(&path, FileOptions { lock: false, ..RW }).unwrap());
    in_use(FileDevice::open(&path, RW));
    drop(writer);
    let readers = [FileDevice::open(&path, RO).unwrap(), FileDevice::open(&path, RO).unwrap()];
    in_use(FileDevice::open(&path, RW));
    drop(readers);
    FileDevice::open(&path, RW).unwrap();
}

#[test]
fn dropping_the_device_releases_the_lock() {
    // io_uring may hold the file for a moment after its operations have ended.
    for directory in device_support::directories() {
        for direct in [Direct::Auto, Direct::Never] {
            let path = directory.path().join(format!("{direct:?}"));
            let options = FileOptions { direct, ..RW };
            drop(FileDevice::create(&path, options).unwrap());
            for round in 0..100 {
                let device = FileDevice::open(&path, options).unwrap();
                let ranges: Vec<_> = (0..64).map(|n| range(64 * round + n, 1)).collect();
                write_all(&device, &ranges, round);
                let surface = surface_with_frames(64 * 100, 64);
                let mut reads = Reads::new();
                reads.start(&device, &surface, &ranges);
                drop(device);
                assert_eq!(reads.done(), 64);
            }
        }
    }
}

/// Tells a child process of a test its role, and the file to use.
const ROLE: &str = "VELLUM_TEST_CHILD";

fn child(test: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(ROLE, path);
    command
}

fn role() -> Option<PathBuf> {
    std::env::var_os(ROLE).map(PathBuf::from)
}

#[test]
fn the_process_with_the_lock_is_named() {
    if let Some(path) = role() {
        let _device = FileDevice::open(path, RW).unwrap();
        println!("\nlocked");
        io::stdin().read_line(&mut String::new()).unwrap();
        return;
    }
    let directory = directory();
    let path = directory.path().join("pages");
    drop(FileDevice::create(&path, RW).unwrap());
    let mut child = child("the_process_with_the_lock_is_named", &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while lines.next().unwrap().unwrap() != "locked" {}
    match FileDevice::open(&path, RW) {
        Err(error @ DeviceError::InUse { holder, .. }) => {
            // Some containers do not show all locks.
            assert!(holder.is_none_or(|pid| pid == child.id()), "{error}");
            println!("{error}");
        }
        other => panic!("{other:?}"),
    }
    // The kernel releases the lock, however the process ends.
    child.kill().unwrap();
    child.wait().unwrap();
    FileDevice::open(&path, RW).unwrap();
}

#[test]
fn read_only_files_are_read_but_never_changed() {
    let directory = directory();
    let path = directory.path().join("pages");
    let device = FileDevice::create(&path, RW).unwrap();
    device.resize(4).unwrap();
    write_all(&device, &[range(0, 4)], 1);
    drop(device);
    let device = FileDevice::open(&path, RO).unwrap();
    let surface = surface(4);
    device.read(&surface, range(0, 4).into()).unwrap();
    assert_holds(&surface, range(0, 4), 1);
    let buffer = Buffer::zeroed(1);
    let mut writes = [Write::new(0, [buffer.bytes(), &[]])];
    device.write(&mut writes);
    let error = writes[0].result.as_ref().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(device.resize(2).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    device.sync().unwrap();
    assert_eq!(device.pages().unwrap(), 4);
}

#[test]
fn an_incomplete_last_page_is_not_counted_and_cannot_be_read() {
    for engine in [IoEngineChoice::Auto, IoEngineChoice::Threads] {
        for direct in [Direct::Auto, Direct::Never] {
            let directory = directory();
            let path = directory.path().join("pages");
            fs::write(&path, vec![7; 3 * PAGE_SIZE + 700]).unwrap();
            let options = FileOptions { engine, direct, ..RW };
            let device = FileDevice::open(&path, options).unwrap();
            assert_eq!(device.pages().unwrap(), 3);
            let surface = surface(5);
            let mut reads = Reads::new();
            reads.start(&device, &surface, &[range(0, 3), range(2, 2), range(3, 1), range(4, 1)]);
            let results = reads.wait();
            assert!(results[0].is_ok(), "{results:?}");
            for (result, asked) in results
                .into_iter()
                .zip([range(0, 3), range(2, 2), range(3, 1), range(4, 1)])
                .skip(1)
            {
                assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
                let error = device.read(&surface, asked.into()).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            }
            device.resize(3).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().len(), 3 * PAGE_SIZE as u64);
        }
    }
}

#[test]
fn growing_allocates_space_and_shrinking_frees_it() {
    let directory = directory();
    let path = directory.path().join("pages");
    let device = FileDevice::create(&path, RW).unwrap();
    let allocated = || fs::metadata(&path).unwrap().blocks() * 512;
    device.resize(1000).unwrap();
    assert!(allocated() >= 1000 * PAGE_SIZE as u64);
    device.resize(1000).unwrap();
    device.resize(10).unwrap();
    assert!(allocated() < 100 * PAGE_SIZE as u64);
    assert_eq!(device.pages().unwrap(), 10);
    device.resize(u64::MAX).unwrap_err();
    device.resize((i64::MAX as u64) / PAGE_SIZE as u64).unwrap_err();
    assert_eq!((device.pages().unwrap(), fs::metadata(&path).unwrap().len()), (10, 40960));
}

/// Growing fails on a full disk and changes nothing. It succeeds again once there is space.
fn fill_up(directory: &Path, disk_pages: u64, engine: IoEngineChoice) {
    let path = directory.join("pages");
    let device = FileDevice::create(&path, FileOptions { engine, ..RW }).unwrap();
    device.resize(disk_pages / 4).unwrap();
    write_all(&device, &[range(0, disk_pages / 4)], 5);
    let length = fs::metadata(&path).unwrap();
    let error = device.resize(2 * disk_pages).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    let after = fs::metadata(&path).unwrap();
    assert_eq!((after.len(), after.blocks()), (length.len(), length.blocks()));
    device.resize(disk_pages / 2).unwrap();
    let surface = surface(disk_pages / 2);
    device.read(&surface, range(0, disk_pages / 4).into()).unwrap();
    assert_holds(&surface, range(0, disk_pages / 4), 5);
}

#[test]
fn a_full_disk_is_found_when_growing() {
    for engine in [IoEngineChoice::Auto, IoEngineChoice::Threads] {
        let Some(mounted) = Mounted::new("tmpfs", "size=4m") else { return };
        fill_up(mounted.path(), 1024, engine);
    }
}

/// An image with a file system in it, mounted through a loop device.
struct Loop {
    device: PathBuf,
    directory: tempfile::TempDir,
}

impl Loop {
    fn new(bytes: u64) -> Option<Self> {
        let directory = directory();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        // With options that every losetup has. Another test may have taken the device meanwhile.
        for _ in 0..10 {
            let free = Command::new("losetup").arg("-f").output();
            let Some(free) = free.ok().filter(|output| output.status.success()) else { break };
            let device = PathBuf::from(String::from_utf8(free.stdout).unwrap().trim());
            let attached = Command::new("losetup").arg(&device).arg(&image).output();
            if attached.is_ok_and(|output| output.status.success()) {
                return Some(Self { device, directory });
            }
        }
        println!("skipped: losetup failed");
        None
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(self.directory.path().join("mounted")).output());
        drop(Command::new("losetup").arg("-d").arg(&self.device).status());
    }
}

#[test]
fn a_full_ext4_is_found_when_growing() {
    let Some(disk) = Loop::new(16 << 20) else { return };
    let mount_point = disk.directory.path().join("mounted");
    fs::create_dir(&mount_point).unwrap();
    for step in [
        Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&disk.device),
        Command::new("mount").args(["-t", "ext4"]).arg(&disk.device).arg(&mount_point),
    ] {
        if !step.status().is_ok_and(|status| status.success()) {
            println!("skipped: {step:?} failed");
            return;
        }
    }
    fill_up(&mount_point, 3000, IoEngineChoice::Auto);
}

#[test]
fn a_block_device_is_used_with_its_size() {
    let Some(disk) = Loop::new(4 << 20) else { return };
    let device = FileDevice::create(&disk.device, RW).unwrap();
    assert_eq!(device.pages().unwrap(), 1024);
    device.resize(1024).unwrap();
    device.resize(5).unwrap();
    assert_eq!(device.resize(1025).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(device.pages().unwrap(), 1024);
    write_all(&device, &[range(0, 64), range(1000, 24)], 3);
    device.sync().unwrap();
    // Both the lock and the kernel's own claim refuse another writer.
    assert!(matches!(FileDevice::open(&disk.device, RW), Err(DeviceError::InUse { .. })));
    drop(device);
    let device = FileDevice::open(&disk.device, RO).unwrap();
    assert_eq!(device.info().direct, Ok(()));
    let surface = surface(1025);
    let mut reads = Reads::new();
    reads.start(&device, &surface, &[range(0, 64), range(1000, 24), range(1024, 1)]);
    let results = reads.wait();
    assert!(results[0].is_ok() && results[1].is_ok(), "{results:?}");
    assert_eq!(results[2].as_ref().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_holds(&surface, range(1000, 24), 3);
}

#[test]
fn a_full_disk_under_a_sparse_file_fails_some_writes_alone() {
    for engine in [IoEngineChoice::Auto, IoEngineChoice::Threads] {
        let Some(mounted) = Mounted::new("tmpfs", "size=1m") else { return };
        let path = mounted.path().join("pages");
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        let device = FileDevice::open(&path, FileOptions { engine, ..RW }).unwrap();
        let buffers: Vec<_> = (0..1024).map(|page| Buffer::of(range(page, 1), 1)).collect();
        let mut writes: Vec<_> = (0..)
            .zip(&buffers)
            .map(|(page, buffer)| Write::new(page, [buffer.bytes(), &[]]))
            .collect();
        device.write(&mut writes);
        let surface = surface(1024);
        let mut full = 0;
        for (page, write) in (0..).zip(writes) {
            match write.result {
                Ok(()) => {
                    device.read(&surface, range(page, 1).into()).unwrap();
                    assert_holds(&surface, range(page, 1), 1);
                }
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "page {page}");
                    full += 1;
                }
            }
        }
        assert!((700..1024).contains(&full), "{full} writes found the disk full");
    }
}

#[test]
fn without_direct_io_the_device_buffers_and_says_so() {
    let Some(mounted) = Mounted::new("ramfs", "") else { return };
    let path = mounted.path().join("pages");
    let device = FileDevice::create(&path, RW).unwrap();
    let reason = device.info().direct.unwrap_err();
    assert!(reason.contains("direct"), "{reason}");
    // ramfs has no fallocate, either.
    device.resize(100).unwrap();
    write_all(&device, &[range(3, 97)], 1);
    let surface = surface(100);
    let mut reads = Reads::new();
    reads.start(&device, &surface, &[range(3, 97)]);
    assert!(reads.wait()[0].is_ok());
    assert_holds(&surface, range(3, 97), 1);
}

#[test]
fn the_file_size_limit_is_an_error_and_does_not_kill() {
    if let Some(path) = role() {
        let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
        // SAFETY: a valid struct.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        let device = FileDevice::open(path, RW).unwrap();
        device.resize(256).unwrap();
        let error = device.resize(257).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge, "{error}");
        assert_eq!(device.pages().unwrap(), 256);
        write_all(&device, &[range(0, 256)], 1);
        return;
    }
    let directory = directory();
    let path = directory.path().join("pages");
    drop(FileDevice::create(&path, RW).unwrap());
    let output =
        child("the_file_size_limit_is_an_error_and_does_not_kill", &path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Signals that interrupt system calls.
fn interrupt(thread: libc::pthread_t, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        // SAFETY: the thread lives until `stop` is set.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

extern "C" fn ignore(_signal: libc::c_int) {}

#[test]
fn signals_do_not_fail_operations() {
    // SAFETY: a handler that does nothing, and without SA_RESTART.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    for engine in [IoEngineChoice::Auto, IoEngineChoice::Threads] {
        let directory = directory();
        let options = FileOptions { engine, ..RW };
        let device = FileDevice::create(directory.path().join("pages"), options).unwrap();
        let stop = AtomicBool::new(false);
        // SAFETY: no preconditions.
        let me = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            let _stopping = SetWhenDropped(&stop);
            scope.spawn(|| interrupt(me, &stop));
            let surface = surface(512);
            let ranges: Vec<_> = (0..256).map(|n| range(2 * n, 2)).collect();
            for generation in 0..20 {
                device.resize(0).unwrap();
                device.resize(512).unwrap();
                write_all(&device, &ranges, generation);
                let mut reads = Reads::new();
                reads.start(&device, &surface, &ranges);
                assert!(reads.wait().iter().all(Result::is_ok));
                assert_holds(&surface, range(0, 512), generation);
                device.read(&surface, range(0, 512).into()).unwrap();
                device.sync().unwrap();
            }
        });
    }
}

fn open_descriptors_of(path: &Path) -> usize {
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .filter(|target| target == path)
        .count()
}

/// The names of this process's threads, without those that the kernel has created for io_uring.
/// Such a thread stays as long as the thread that it works for.
fn own_threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with("iou-wrk")).collect();
    names.sort_unstable();
    names
}

#[test]
fn dropping_a_device_leaves_no_descriptors_and_threads() {
    // In its own process, because all tests of a process share its descriptors.
    let Some(path) = role() else {
        let directory = directory();
        let path = directory.path().join("pages");
        let output =
            child("dropping_a_device_leaves_no_descriptors_and_threads", &path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    };
    let now = || (fs::read_dir("/proc/self/fd").unwrap().count(), own_threads());
    drop(FileDevice::create(&path, RW).unwrap());
    // The kernel may show a joined thread for another moment.
    let moment = || std::thread::sleep(std::time::Duration::from_millis(10));
    let counts = (0..100).map(|_| (moment(), now()).1);
    let before = counts.min_by_key(|(descriptors, threads)| (*descriptors, threads.len())).unwrap();
    for round in 0..200 {
        let engine = [IoEngineChoice::Auto, IoEngineChoice::Threads][round % 2];
        let device = FileDevice::open(&path, FileOptions { engine, ..RW }).unwrap();
        assert_eq!(open_descriptors_of(&path), 1);
        device.resize(16).unwrap();
        write_all(&device, &[range(0, 16)], 1);
        let surface = surface(16);
        let mut reads = Reads::new();
        reads.start(&device, &surface, &[range(0, 16)]);
        drop(device);
        assert_eq!(reads.done(), 1);
    }
    let deadline = Instant::now() + PATIENCE;
    while now() != before && Instant::now() < deadline {
        moment();
    }
    assert_eq!(now(), before);
}
