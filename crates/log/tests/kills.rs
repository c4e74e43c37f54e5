//! A process that is killed while it appends, hundreds of times: what it has acknowledged is there.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tempfile::tempdir;
use vellum_log::{
    FileLog, FileLogOptions, Log, LogDevice as _, LogError, LogOptions, Lsn, SyncMethod,
};
use vellum_testing::random::Random;

/// Where the child finds the log, and how many times it was killed before.
const FOLDER: &str = "VELLUM_LOG_FOLDER";
const ROUND: &str = "VELLUM_LOG_ROUND";

/// The name of a file that is not ready.
const NEW: &str = "vellum-log-new.tmp";

const THREADS: u64 = 3;

/// The bytes of the log, at most.
const MOST_BYTES: u64 = 1 << 20;

/// Opens the log, and checks that each thread's records are there in order, without a gap. Returns
/// each thread's last one, and where that is.
fn open(
    folder: &Path,
    sync_method: SyncMethod,
    in_flight: usize,
) -> (Log, BTreeMap<u64, (u64, Lsn)>) {
    let mut files = FileLogOptions::default();
    (files.segment_bytes, files.most_bytes, files.sync_method) =
        (64 << 10, MOST_BYTES, Some(sync_method));
    let device = Arc::new(FileLog::open(folder, &files).unwrap());
    let mut last = BTreeMap::new();
    let mut options = LogOptions::default();
    (options.ring_bytes, options.in_flight) = (64 << 10, Some(in_flight));
    let opened = Log::open(device, &options, None, |record| {
        let [thread, number] =
            [0, 8].map(|at| u64::from_le_bytes(record.bytes[at..at + 8].try_into().unwrap()));
        assert_eq!(record.bytes[16..], content(thread, number));
        if let Some((before, _)) = last.insert(thread, (number, record.lsn)) {
            assert_eq!(number, before + 1, "thread {thread}");
        }
        Ok::<_, LogError>(())
    });
    (opened.unwrap().0, last)
}

fn content(thread: u64, number: u64) -> Vec<u8> {
    let len = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50;
    vec![(thread + number) as u8; if number.is_multiple_of(7) { len as usize } else { 40 }]
}

/// Runs in the child, which ends by being killed.
#[test]
fn child() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let round: usize = env::var(ROUND).unwrap().parse().unwrap();
    let (log, last) = open(Path::new(&folder), sync_method(round), 1 + round % 3);
    // A thread that has to wait for long still finds its newest record in the next life.
    let newest = |thread| AtomicU64::new(last.get(&thread).map_or(0, |(_, lsn)| lsn.0));
    let newest: Vec<_> = (0..THREADS).map(newest).collect();
    let newest_of = |thread: u64| newest[thread as usize].load(Ordering::SeqCst);
    let oldest = || (0..THREADS).map(newest_of).min().unwrap();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (log, newest) = (&log, &newest);
            let first = last.get(&thread).map_or(0, |(last, _)| last + 1);
            scope.spawn(move || {
                for number in first.. {
                    // A thread that gets no processor keeps its newest record. The others leave
                    // room for its next one, without which no trim would make any.
                    while newest_of(thread) > oldest() + MOST_BYTES / 2 {
                        thread::yield_now();
                    }
                    let head = [thread, number].map(u64::to_le_bytes);
                    let parts = [head.as_flattened(), &content(thread, number)];
                    let lsn = loop {
                        match log.append_parts(&parts) {
                            Err(LogError::Full { .. }) => thread::yield_now(),
                            appended => break appended.unwrap(),
                        }
                    };
                    log.wait_durable(lsn).unwrap();
                    let text = format!("\nack {thread} {number}\n");
                    std::io::stdout().lock().write_all(text.as_bytes()).unwrap();
                    newest[thread as usize].store(lsn.0, Ordering::SeqCst);
                    log.trim(Lsn(oldest())).unwrap();
                }
            });
        }
    });
}

/// Runs in the child, which makes new files until it is killed.
#[test]
fn child_that_makes_room() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let round: usize = env::var(ROUND).unwrap().parse().unwrap();
    let device = FileLog::open(folder, &room_options(sync_method(round))).unwrap();
    loop {
        // In steps, or at once.
        while round.is_multiple_of(3) && device.prepare().unwrap() {}
        let text = format!("\nmade {}\n", device.extend().unwrap());
        std::io::stdout().lock().write_all(text.as_bytes()).unwrap();
    }
}

/// Segments that several writes zero.
fn room_options(sync_method: SyncMethod) -> FileLogOptions {
    let mut files = FileLogOptions::default();
    (files.segment_bytes, files.most_bytes, files.sync_method) =
        (SEGMENT, 1 << 40, Some(sync_method));
    files
}

const SEGMENT: u64 = 1 << 20;

#[test]
fn a_process_that_was_killed_while_it_made_room_leaves_whole_segments() {
    let rounds = if env::var_os("VELLUM_SOAK").is_some() { 500 } else { 24 };
    let (mut begun, mut done, mut random) = (0, 0, Random(7));
    // More rounds, if no kill falls in the midst of a file.
    for round in 0..20 * rounds {
        if round >= rounds && begun > 0 {
            break;
        }
        done += 1;
        let folder = tempdir().unwrap();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["child_that_makes_room", "--exact", "--nocapture"])
            .env(FOLDER, folder.path())
            .env(ROUND, round.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Without direct I/O, a way may not work here: then the child ends.
        let end_in = |line: String| line.strip_prefix("made ")?.parse::<u64>().ok();
        let first = lines.find_map(|line| end_in(line.unwrap()));
        thread::sleep(Duration::from_micros(random.below(20_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let made = lines.filter_map(|line| end_in(line.unwrap())).last().or(first).unwrap_or(0);
        let names = || {
            let entries = std::fs::read_dir(folder.path()).unwrap();
            entries.map(|entry| entry.unwrap()).collect::<Vec<_>>()
        };
        begun += usize::from(names().iter().any(|entry| entry.file_name() == NEW));
        let device = FileLog::open(folder.path(), &room_options(SyncMethod::BufferedSync)).unwrap();
        for entry in names() {
            assert_eq!(entry.metadata().unwrap().len(), SEGMENT, "{entry:?}");
        }
        let blocks = SEGMENT / 4096 - 1;
        let room = device.scan();
        assert_eq!(room.start, 0);
        assert!(room.end >= made, "round {round}: {room:?}, but it was {made} before");
        assert_eq!(device.extend().unwrap(), room.end + blocks);
    }
    println!("{done} kills, {begun} of them in the midst of a file");
    assert!(begun > 0, "no kill of {done} was in the midst of a file");
}

fn sync_method(round: usize) -> SyncMethod {
    SyncMethod::ALL[round % SyncMethod::ALL.len()]
}

#[test]
fn what_a_killed_process_acknowledged_is_there() {
    let folder = tempdir().unwrap();
    let direct = {
        let files = FileLog::open(folder.path(), &FileLogOptions::default()).unwrap();
        files.sync_method().is_direct()
    };
    let rounds = if env::var_os("VELLUM_SOAK").is_some() { 5000 } else { 300 };
    let mut acknowledged = BTreeMap::new();
    let mut random = Random(1);
    for round in 0..rounds {
        // Without direct I/O, the ways through the page cache alone.
        let round = if direct { round } else { round * 4 + 2 + round % 2 };
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env(FOLDER, folder.path())
            .env(ROUND, round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let patience = Duration::from_micros(random.below(30_000));
        let mut killer = None;
        let mut lives = Some(child);
        for line in lines {
            // The last line may be torn, too.
            let line = line.unwrap();
            let words: Vec<_> = line.split(' ').collect();
            let ["ack", thread, number] = words[..] else { continue };
            let (Ok(thread), Ok(number)) = (thread.parse::<u64>(), number.parse::<u64>()) else {
                panic!("{line}");
            };
            let before = acknowledged.insert(thread, number);
            assert!(before.is_none_or(|before| before < number), "{line}");
            // It is killed some time after its first acknowledgement.
            if let Some(mut child) = lives.take() {
                killer = Some(thread::spawn(move || {
                    thread::sleep(patience);
                    child.kill().unwrap();
                    child.wait().unwrap()
                }));
            }
        }
        let ended = killer.expect("the child has acknowledged nothing").join().unwrap();
        assert!(!ended.success() && ended.code().is_none(), "{ended}");
        let (log, last) = open(folder.path(), SyncMethod::BufferedSync, 1);
        for (thread, number) in &acknowledged {
            let last = last.get(thread).map(|(last, _)| last);
            assert!(last >= Some(number), "round {round}: {thread} {number} is lost");
        }
        drop(log);
    }
    println!("{rounds} kills, {acknowledged:?} acknowledged");
}
