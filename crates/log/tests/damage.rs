//! Files of a log that are gone, changed or foreign: the opening says so and touches nothing.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use tempfile::{TempDir, tempdir};
use vellum_log::{FileLog, FileLogOptions, Log, LogError, LogOptions, Lsn, SyncMethod};

/// Blocks of a segment.
const BLOCKS: u64 = 3;

fn open(folder: &Path) -> Result<(Log, Vec<Vec<u8>>), LogError> {
    let mut files = FileLogOptions::default();
    (files.segment_bytes, files.most_bytes) = ((BLOCKS + 1) * 4096, 8 * 16384);
    files.sync_method = Some(SyncMethod::BufferedSync);
    let mut found = Vec::new();
    let mut options = LogOptions::default();
    options.ring_bytes = 4 * 4096;
    let device = Arc::new(FileLog::open(folder, &files)?);
    let (log, _) = Log::open(device, &options, None, |record| {
        found.push(record.bytes.to_vec());
        Ok::<_, LogError>(())
    })?;
    Ok((log, found))
}

/// A log of records of a block each, of which the last ones are kept.
fn log_of(records: u8, kept: u64) -> TempDir {
    let folder = tempdir().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    for number in 0..records {
        let lsn = log.append(&[number; 3000]).unwrap();
        log.wait_durable(lsn).unwrap();
        log.trim(Lsn(lsn.0.saturating_sub(kept * 4096))).unwrap();
    }
    log.close().unwrap();
    folder
}

/// The files of the log. The one that was being made ahead when the log was closed is none yet.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|file| {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    });
    files.filter(|(name, _)| !name.ends_with(".tmp")).collect()
}

/// The number of the segment that a file says to be, and the oldest one when it was made.
fn numbers(file: &[u8]) -> [u64; 2] {
    [24, 40].map(|at| u64::from_le_bytes(file[at..at + 8].try_into().unwrap()))
}

#[test]
fn a_missing_file_is_damage_and_nothing_is_touched() {
    for (records, kept) in [(11, 100), (60, 6)] {
        let folder = log_of(records, kept);
        let folder = folder.path();
        let all = contents(folder);
        let [newest, oldest] = all.values().map(|file| numbers(file)).max().unwrap();
        assert_eq!(oldest > 0, records == 60);
        for (name, file) in &all {
            let [number, _] = numbers(file);
            if number < oldest || number == newest {
                // It was trimmed; or the last one, and that is not known.
                continue;
            }
            fs::remove_file(folder.join(name)).unwrap();
            let without = contents(folder);
            let error = open(folder).unwrap_err();
            let LogError::Damaged { lsn, .. } = error else { panic!("{error}") };
            assert_eq!(lsn, Lsn(number * BLOCKS * 4096));
            let text = error.to_string();
            assert!(text.contains(&format!("segment {number} ")), "{text}");
            assert!(contents(folder) == without, "something was changed");
            fs::write(folder.join(name), file).unwrap();
            let (log, found) = open(folder).unwrap();
            assert_eq!(found.last().unwrap(), &[records - 1; 3000]);
            // It has nothing to note.
            log.close().unwrap();
        }
    }
}

/// The head of the newest segment is lost: it may have taken the file of one that is missing.
#[test]
fn a_gap_that_the_lost_head_may_explain_is_none() {
    let folder = log_of(60, 6);
    let folder = folder.path();
    let all = contents(folder);
    let mut by_number: Vec<_> = all.iter().map(|(name, file)| (numbers(file), name)).collect();
    by_number.sort();
    let (_, newest) = by_number.pop().unwrap();
    let mut file = all[newest].clone();
    file[..512].fill(3);
    fs::write(folder.join(newest), &file).unwrap();
    let (_, found) = open(folder).unwrap();
    assert_eq!(found.last().unwrap(), &[59; 3000]);
    let ([_, oldest], _) = by_number.last().unwrap();
    let gone: Vec<_> = by_number.iter().filter(|([number, _], _)| number >= oldest).collect();
    fs::write(folder.join(newest), &file).unwrap();
    gone[..2].iter().for_each(|(_, name)| fs::remove_file(folder.join(name)).unwrap());
    assert!(matches!(open(folder), Err(LogError::Damaged { .. })));
}

#[test]
fn a_file_with_a_name_of_the_log_and_other_contents_is_refused() {
    let notes: [&[u8]; 4] = [b"", b"my notes", &[7; 16384], &[0; 16384]];
    for (number, notes) in notes.into_iter().enumerate() {
        let folder = if number % 2 == 0 { log_of(11, 100) } else { tempdir().unwrap() };
        let folder = folder.path();
        fs::write(folder.join("segment-0042"), notes).unwrap();
        // What a crash leaves of a file that was being made is no reason to refuse anything.
        fs::write(folder.join("vellum-log-new.tmp"), notes).unwrap();
        let before = contents(folder);
        let error = open(folder).unwrap_err();
        assert!(matches!(error, LogError::Unfit { .. }), "{error}");
        assert!(error.to_string().contains("segment-0042"), "{error}");
        assert!(contents(folder) == before, "something was changed");
        fs::remove_file(folder.join("segment-0042")).unwrap();
        let (log, found) = open(folder).unwrap();
        assert_eq!(found.len(), if number % 2 == 0 { 11 } else { 0 });
        assert!(!folder.join("vellum-log-new.tmp").exists());
        // One that comes later keeps its contents, too.
        let free = (0..99).map(|number| format!("segment-{number:04}"));
        let free: Vec<_> = free.filter(|name| !folder.join(name).exists()).collect();
        free.iter().for_each(|name| fs::write(folder.join(name), b"mine").unwrap());
        for _ in 0..16 {
            let lsn = log.append(&[5; 3000]).unwrap();
            log.wait_durable(lsn).unwrap();
            log.trim(lsn).unwrap();
        }
        free.iter().for_each(|name| assert_eq!(fs::read(folder.join(name)).unwrap(), b"mine"));
    }
}
