//! Logs in folders, each way of becoming durable.
#![allow(clippy::unwrap_used)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use tempfile::tempdir;
use vellum_log::{
    End, EndReason, FileLog, FileLogOptions, Log, LogDevice as _, LogError, LogOptions, Lsn,
    RecordRef, SyncMethod,
};
use vellum_testing::own_process;
use vellum_testing::patience::{PATIENCE, eventually};
use vellum_testing::system_calls::forbid;

/// Small segments, of three blocks each after the head.
fn options(sync_method: Option<SyncMethod>) -> FileLogOptions {
    let mut options = FileLogOptions::default();
    (options.segment_bytes, options.most_bytes, options.sync_method) =
        (16384, 8 * 16384, sync_method);
    options
}

fn open(
    folder: &Path,
    sync_method: Option<SyncMethod>,
) -> Result<(Log, End, Vec<Vec<u8>>), LogError> {
    open_with(folder, &options(sync_method), None)
}

fn open_with(
    folder: &Path,
    files: &FileLogOptions,
    in_flight: Option<usize>,
) -> Result<(Log, End, Vec<Vec<u8>>), LogError> {
    let mut found = Vec::new();
    let mut options = LogOptions::default();
    (options.ring_bytes, options.in_flight) = (8 * 4096, in_flight);
    let device = Arc::new(FileLog::open(folder, files)?);
    let (log, end) = Log::open(device, &options, None, |record| {
        found.push(record.bytes.to_vec());
        Ok::<_, LogError>(())
    })?;
    Ok((log, end, found))
}

/// The methods that work on the file system of the tests.
fn methods() -> Vec<SyncMethod> {
    let works = |sync_method: &SyncMethod| {
        let folder = tempdir().unwrap();
        let works = open(folder.path(), Some(*sync_method)).and_then(|(log, ..)| {
            let lsn = log.append(b"x")?;
            log.wait_durable(lsn)
        });
        works.is_ok()
    };
    let methods: Vec<_> = SyncMethod::ALL.into_iter().filter(works).collect();
    assert!(methods.contains(&SyncMethod::BufferedSync));
    methods
}

/// The first segment of a log is ready in part at first, so that a store that is opened for one
/// change does not wait for the rest.
#[test]
fn a_new_log_has_little_room_and_gets_more_as_it_is_used() {
    let folder = tempdir().unwrap();
    let mut options = FileLogOptions::default();
    options.segment_bytes = 4 << 20;
    let blocks = options.segment_bytes / 4096 - 1;
    let made = folder.path().join("made");
    let files = FileLog::open(&made, &options).unwrap();
    let mut end = files.extend().unwrap();
    // A file system that reserves no room gets the whole file.
    assert!(end == 127 || end == blocks, "{end}");
    while end < blocks {
        assert_eq!(files.scan(), 0..end);
        let more = files.extend().unwrap();
        assert!(more > end && more <= blocks, "{end}, {more}");
        end = more;
    }
    assert_eq!(files.extend().unwrap(), 2 * blocks);

    let used = folder.path().join("used");
    let (log, ..) = open_with(&used, &options, None).unwrap();
    let record = vec![7; 10_000];
    let mut last = Lsn(0);
    for number in 0..600 {
        last = log.append(&record).unwrap();
        if number % 30 == 0 {
            log.wait_durable(last).unwrap();
        }
    }
    log.wait_durable(last).unwrap();
    drop(log);
    let files = FileLog::open(&used, &options).unwrap();
    assert_eq!(files.scan(), 0..2 * blocks, "all of a file is ready when it is found");
    drop(files);
    assert_eq!(open_with(&used, &options, None).unwrap().2, vec![record; 600]);
}

#[test]
fn segments_are_recycled_and_all_is_found_by_each_way() {
    for sync_method in methods() {
        let folder = tempdir().unwrap();
        let (mut next, mut trimmed) = (0_u64, 0_u64);
        for round in 0..4 {
            let (log, end, found) = open(folder.path(), Some(sync_method)).unwrap();
            let numbers =
                found.iter().map(|bytes| u64::from_le_bytes(bytes[..8].try_into().unwrap()));
            let numbers: Vec<_> = numbers.collect();
            let first = numbers.first().copied().unwrap_or(next);
            assert!(first <= trimmed, "{sync_method}: {first}");
            assert!(
                numbers.iter().copied().eq(first..next),
                "{sync_method}, round {round}: {numbers:?}"
            );
            assert_eq!(end.why == EndReason::Closed, round > 0 && round % 2 == 0, "{}", end.why);
            for _ in 0..20 {
                let mut record = vec![7; 1 + (next as usize * 977) % 9000];
                record.splice(..1, next.to_le_bytes());
                let lsn = log.append(&record).unwrap();
                log.wait_durable(lsn).unwrap();
                assert_eq!(log.read(lsn).unwrap(), record);
                log.trim(lsn).unwrap();
                (trimmed, next) = (next, next + 1);
            }
            let files = fs::read_dir(folder.path()).unwrap().count();
            assert!(files <= 8, "{files} files");
            if round % 2 == 1 {
                log.close().unwrap();
            }
        }
    }
}

#[test]
fn many_threads_append_and_wait_by_each_way() {
    for sync_method in methods() {
        let folder = tempdir().unwrap();
        let mut options = options(Some(sync_method));
        options.most_bytes = 512 * 16384;
        let (log, _, _) = open_with(folder.path(), &options, Some(3)).unwrap();
        thread::scope(|scope| {
            for thread in 0..6_u64 {
                let log = &log;
                scope.spawn(move || {
                    let mut last = Lsn(0);
                    for number in 0..30_u64 {
                        let [thread, number] = [thread, number].map(u64::to_le_bytes);
                        let fill = vec![thread[0]; usize::from(number[0]) * 50];
                        let lsn = log.append_parts(&[&thread, &number, &fill]).unwrap();
                        assert!(lsn > last);
                        log.wait_durable(lsn).unwrap();
                        assert!(log.durable() > lsn);
                        last = lsn;
                    }
                });
            }
        });
        drop(log);
        let (_, _, found) = open_with(folder.path(), &options, None).unwrap();
        for thread in 0..6_u64 {
            let of = found.iter().filter(|bytes| bytes[..8] == thread.to_le_bytes());
            assert!(of.map(|bytes| bytes[8]).eq(0..30), "{sync_method}, thread {thread}");
        }
    }
}

#[test]
fn one_thread_has_thousands_under_way() {
    let folder = tempdir().unwrap();
    let mut files = options(None);
    files.most_bytes = 512 * 16384;
    let (log, _, _) = open_with(folder.path(), &files, None).unwrap();
    let called = Arc::new(AtomicU64::new(0));
    for number in 0..5000_u64 {
        let lsn = log.append(&number.to_le_bytes()).unwrap();
        let called = Arc::clone(&called);
        let durable = move |result: Result<(), LogError>| {
            result.unwrap();
            called.fetch_add(1, Ordering::SeqCst);
        };
        log.on_durable(lsn, Box::new(durable));
    }
    eventually("all are durable", || called.load(Ordering::SeqCst) == 5000);
    let lsn = log.append(b"more").unwrap();
    log.request_flush(lsn);
    eventually("a flush that was asked for", || log.durable() > lsn);
}

#[test]
fn a_folder_is_opened_once() {
    let folder = tempdir().unwrap();
    let first = open(folder.path(), None).unwrap();
    assert!(matches!(open(folder.path(), None), Err(LogError::InUse { .. })));
    drop(first);
    open(folder.path(), None).unwrap();
    let nowhere = folder.path().join("a/b");
    let error = open(&nowhere, None).unwrap_err();
    assert!(error.to_string().contains("a/b"), "{error}");
}

#[test]
fn a_segment_that_lost_its_head_is_known_by_its_blocks() {
    for lost in 0..3 {
        let folder = tempdir().unwrap();
        let (log, _, _) = open(folder.path(), None).unwrap();
        for number in 0..8_u64 {
            let lsn = log.append(&number.to_le_bytes()).unwrap();
            log.wait_durable(lsn).unwrap();
        }
        drop(log);
        let path = folder.path().join(format!("segment-000{lost}"));
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[3; 512], 0).unwrap();
        for _ in 0..2 {
            let (log, _, found) = open(folder.path(), None).unwrap();
            assert_eq!(found.len(), 8, "segment {lost}");
            drop(log);
        }
    }
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let folders = [tempdir().unwrap(), tempdir().unwrap()];
    for folder in &folders {
        let (log, _, _) = open(folder.path(), None).unwrap();
        log.wait_durable(log.append(b"x").unwrap()).unwrap();
    }
    let [one, other] = folders.each_ref().map(|folder| folder.path().join("segment-0000"));
    fs::copy(&one, other.with_file_name("segment-0009")).unwrap();
    let error = open(folders[1].path(), None).unwrap_err();
    assert!(error.to_string().contains("several logs"), "{error}");
    fs::copy(&one, one.with_file_name("segment-0009")).unwrap();
    let error = open(folders[0].path(), None).unwrap_err();
    assert!(error.to_string().contains("there twice"), "{error}");
    fs::remove_file(one.with_file_name("segment-0009")).unwrap();
    OpenOptions::new().write(true).open(&one).unwrap().set_len(8192).unwrap();
    let error = open(folders[0].path(), None).unwrap_err();
    assert!(error.to_string().contains("lost its tail"), "{error}");
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let folder = tempdir().unwrap();
    for (segment, most) in [(0, 1 << 20), (5000, 1 << 20), (8192, 1 << 20), (16384, 16384)] {
        let mut options = FileLogOptions::default();
        (options.segment_bytes, options.most_bytes) = (segment, most);
        let opened = FileLog::open(folder.path(), &options);
        assert!(matches!(opened, Err(LogError::Unfit { .. })), "{segment} {most}");
    }
}

/// Runs the rest of a test in a process of its own, whose system calls the test may forbid, and
/// then opens the folder of that process without the ban.
fn alone(test: &str, sync_method: SyncMethod) -> Option<std::path::PathBuf> {
    // Tests of this program run at once, so each has a folder of its own.
    let folder = |process| std::env::temp_dir().join(format!("vellum-log-{test}-{process}"));
    let Some(output) = own_process::run(test) else { return Some(folder(parent_id())) };
    let folder = folder(std::process::id());
    let opened = open(&folder, Some(sync_method));
    fs::remove_dir_all(&folder).unwrap();
    assert!(output.status.success(), "{output:?}");
    opened.unwrap();
    None
}

/// A segment gets its head, but perhaps not durably: no other file may get that number, and the
/// same device takes nothing more.
#[test]
fn a_failed_extension_ends_the_device() {
    let sync_method = SyncMethod::BufferedDsync;
    let Some(folder) = alone("a_failed_extension_ends_the_device", sync_method) else { return };
    let device = FileLog::open(&folder, &options(Some(sync_method))).unwrap();
    assert_eq!([device.extend().unwrap(), device.extend().unwrap()], [3, 6]);
    if !forbid(libc::SYS_fdatasync) {
        return;
    }
    device.extend().unwrap_err();
    device.trim(3).unwrap();
    for error in [
        device.extend().unwrap_err(),
        device.append(0, [&[vellum_log::Block::ZERO], &[]]).unwrap_err(),
        device.sync().unwrap_err(),
    ] {
        assert!(error.to_string().contains("open its folder again"), "{error}");
    }
}

/// Whatever the way: a write has failed, and the same device is not opened again as if it had not.
#[test]
fn a_failed_write_ends_the_device() {
    let test = "a_failed_write_ends_the_device";
    let Some(folder) = alone(test, SyncMethod::BufferedSync) else { return };
    fs::create_dir(&folder).unwrap();
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let devices = methods().into_iter().map(|sync_method| {
        let folder = folder.join(sync_method.to_string());
        let device = Arc::new(FileLog::open(&folder, &options(Some(sync_method))).unwrap());
        let (log, _) = Log::open(device.clone(), &LogOptions::default(), None, visit).unwrap();
        log.wait_durable(log.append(b"kept").unwrap()).unwrap();
        (folder, device, log)
    });
    let devices: Vec<_> = devices.collect();
    if !forbid(libc::SYS_pwritev2) {
        return;
    }
    for (folder, device, log) in devices {
        let lsn = log.append(b"lost").unwrap();
        assert!(matches!(log.wait_durable(lsn), Err(LogError::Poisoned { .. })));
        drop(log);
        let again = Log::open(device, &LogOptions::default(), None, visit).unwrap_err();
        assert!(again.to_string().contains("open its folder again"), "{again}");
        assert_eq!(open(&folder, Some(SyncMethod::BufferedSync)).unwrap().2, [b"kept"]);
    }
}

#[test]
fn a_folder_that_is_renamed_is_still_the_log() {
    let parent = tempdir().unwrap();
    let (before, after) = (parent.path().join("before"), parent.path().join("after"));
    let (log, ..) = open(&before, None).unwrap();
    fs::rename(&before, &after).unwrap();
    // Another log of that name, whose files this one must not touch.
    drop(open(&before, None).unwrap());
    for _ in 0..6 {
        let lsn = log.append(&[1; 4000]).unwrap();
        log.wait_durable(lsn).unwrap();
    }
    drop(log);
    assert_eq!(open(&after, None).unwrap().2.len(), 6);
    assert_eq!(open(&before, None).unwrap().2.len(), 0);
}

#[test]
fn files_of_others_in_the_folder_are_left_alone() {
    let folder = tempdir().unwrap();
    let names = ["probe", "segment-7", "segment-18446744073709551615", "segment-x"];
    names.iter().for_each(|name| fs::write(folder.path().join(name), name).unwrap());
    for round in 0..4 {
        let (log, _, found) = open(folder.path(), None).unwrap();
        assert_eq!(found.len(), round);
        let lsn = log.append(&[2; 4000]).unwrap();
        log.wait_durable(lsn).unwrap();
    }
    for name in names {
        assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), name);
    }
}

/// A number up to which the log never became durable: to go on there would leave a hole.
#[test]
fn an_opening_beyond_the_durable_end_is_refused() {
    let folder = tempdir().unwrap();
    let device = || Arc::new(FileLog::open(folder.path(), &options(None)).unwrap());
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let (log, _) = Log::open(device(), &LogOptions::default(), None, visit).unwrap();
    let kept = log.append(b"kept").unwrap();
    log.wait_durable(kept).unwrap();
    let durable = log.end();
    for _ in 0..3 {
        log.append(&[3; 3000]).unwrap();
    }
    let end = log.end();
    drop(log);
    let refused = Log::open(device(), &LogOptions::default(), Some(end), visit).unwrap_err();
    assert!(matches!(refused, LogError::NotAppended { .. }), "{refused}");
    for from in [None, Some(kept), Some(durable)] {
        let (log, _) = Log::open(device(), &LogOptions::default(), from, visit).unwrap();
        assert_eq!(log.read(kept).unwrap(), b"kept");
    }
}

#[test]
fn a_flush_of_nothing_hides_no_later_wish() {
    let folder = tempdir().unwrap();
    let (log, ..) = open(folder.path(), None).unwrap();
    log.request_flush(log.end());
    log.request_flush(Lsn(1 << 50));
    let called = Arc::new(AtomicU64::new(0));
    for round in 1..4 {
        let lsn = log.append(b"record").unwrap();
        let called_now = Arc::clone(&called);
        log.on_durable(
            lsn,
            Box::new(move |result| {
                result.unwrap();
                called_now.fetch_add(1, Ordering::SeqCst);
            }),
        );
        eventually("the callback is called", || called.load(Ordering::SeqCst) == round);
    }
}

/// The last handle goes in a callback, on the thread that calls: the others are told.
#[test]
fn a_callback_may_drop_the_log() {
    let folder = tempdir().unwrap();
    let log = Arc::new(open(folder.path(), None).unwrap().0);
    let (told, held) = (Arc::new(AtomicU64::new(0)), Arc::new(std::sync::Mutex::new(())));
    let waits = held.lock().unwrap();
    let (handle, until) = (Arc::clone(&log), Arc::clone(&held));
    let drops = move |_| {
        drop(until.lock().unwrap());
        drop(handle);
    };
    log.on_durable(log.append(b"first").unwrap(), Box::new(drops));
    eventually("the first one is durable", || {
        log.durable() > Lsn(0) && log.begin() < log.durable()
    });
    let closed = Arc::clone(&told);
    let second = move |result: Result<(), LogError>| {
        assert!(matches!(result, Ok(()) | Err(LogError::Closed)));
        closed.fetch_add(1, Ordering::SeqCst);
    };
    log.on_durable(log.append(b"second").unwrap(), Box::new(second));
    drop(log);
    drop(waits);
    eventually("the second one is told", || told.load(Ordering::SeqCst) == 1);
}

/// No thread that waits for the log runs them, nor does the one that flushes.
#[test]
fn one_thread_calls_back_and_a_slow_callback_delays_no_flush() {
    let folder = tempdir().unwrap();
    let mut files = options(None);
    files.most_bytes = 64 * 16384;
    let log = open_with(folder.path(), &files, None).unwrap().0;
    let (begins, begun) = std::sync::mpsc::channel();
    let (ends, until) = std::sync::mpsc::channel::<()>();
    let slow = move |_| {
        begins.send(thread::current().id()).unwrap();
        let _ = until.recv();
    };
    log.on_durable(log.append(b"slow").unwrap(), Box::new(slow));
    let caller = begun.recv_timeout(PATIENCE).unwrap();
    let callers = Arc::new(std::sync::Mutex::new(Vec::new()));
    for _ in 0..50 {
        let lsn = log.append(b"record").unwrap();
        let notes = Arc::clone(&callers);
        let note = move |_| notes.lock().unwrap().push(thread::current().id());
        log.on_durable(lsn, Box::new(note.clone()));
        log.wait_durable(lsn).unwrap();
        log.on_durable(lsn, Box::new(note));
    }
    let lsn = log.append(b"soon").unwrap();
    log.request_flush(lsn);
    eventually("the flush that was asked for", || log.durable() > lsn);
    assert!(callers.lock().unwrap().is_empty());
    drop(ends);
    log.wait_callers();
    assert_eq!(*callers.lock().unwrap(), [caller; 100]);
}

struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

#[test]
fn a_callback_that_panics_twice_keeps_no_other_from_its_call() {
    let folder = tempdir().unwrap();
    let log = open(folder.path(), None).unwrap().0;
    let lsn = log.append(b"record").unwrap();
    log.on_durable(lsn, Box::new(|_| std::panic::panic_any(PanicsWhenDropped)));
    let called = Arc::new(AtomicU64::new(0));
    let calls = Arc::clone(&called);
    log.on_durable(lsn, Box::new(move |_| _ = calls.fetch_add(1, Ordering::SeqCst)));
    log.wait_durable(lsn).unwrap();
    log.wait_callers();
    assert_eq!(called.load(Ordering::SeqCst), 1);
}
