//! Looking at a log: what is there is shown, whatever else is wrong, and nothing is changed.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use tempfile::{TempDir, tempdir};
use vellum_log::{
    End, EndReason, FileLog, FileLogOptions, Log, LogError, LogOptions, LogView, Lsn, RecordRef,
    Shown, SyncMethod,
};
use vellum_testing::random::Random;

/// Blocks of a segment.
const BLOCKS: u64 = 3;

fn open(folder: &Path) -> Log {
    let mut files = FileLogOptions::default();
    (files.segment_bytes, files.most_bytes) = ((BLOCKS + 1) * 4096, 16 * 16384);
    files.sync_method = Some(SyncMethod::BufferedSync);
    let device = Arc::new(FileLog::open(folder, &files).unwrap());
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    Log::open(device, &LogOptions::default(), None, visit).unwrap().0
}

fn append(log: &Log, record: &[u8]) -> Lsn {
    let lsn = log.append(record).unwrap();
    log.wait_durable(lsn).unwrap();
    lsn
}

/// A log of so many records, a block each.
fn log_of(records: u8) -> TempDir {
    let folder = tempdir().unwrap();
    let log = open(folder.path());
    for number in 0..records {
        append(&log, &[number; 3000]);
    }
    log.close().unwrap();
    folder
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|file| {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    });
    files.collect()
}

/// The first byte of each record, the places that are damaged, the end.
type Contents = (Vec<u8>, Vec<u64>, Option<(End, u64)>);

/// What a view shows of a log that is not in use. The view changes no file.
fn seen(folder: &Path, from: Option<Lsn>) -> Contents {
    let before = contents(folder);
    let shown = shown(folder, from);
    assert!(contents(folder) == before, "something was changed");
    shown
}

/// What a view shows of a log that may be in use. The thread of such a log may be making a file.
fn shown(folder: &Path, from: Option<Lsn>) -> Contents {
    let view = LogView::open(folder).unwrap();
    let (mut found, mut damaged, mut ended) = (Vec::new(), Vec::new(), None);
    for shown in view.records(from).unwrap() {
        match shown {
            Shown::Record { record, .. } => found.push(record.bytes[0]),
            Shown::Damage(LogError::Damaged { lsn, .. }) => damaged.push(lsn.0 / 4096),
            Shown::Damage(error) => panic!("{error}"),
            Shown::End(end, left) => ended = Some((end, left)),
            _ => unreachable!(),
        }
    }
    (found, damaged, ended)
}

/// The faults of the files that have any.
fn faults(folder: &Path) -> BTreeMap<String, String> {
    let view = LogView::open(folder).unwrap();
    let files = view.files().iter();
    files.filter_map(|file| Some((file.name.clone(), file.fault.clone()?))).collect()
}

fn damage(folder: &Path, segment: u64, offset: u64, bytes: &[u8]) {
    let path = folder.join(format!("segment-{segment:04}"));
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

#[test]
fn records_and_the_end_are_shown_and_nothing_is_changed() {
    let folder = log_of(8);
    let (found, damaged, end) = seen(folder.path(), None);
    assert!(found.into_iter().eq(0..8) && damaged.is_empty());
    let (end, left) = end.unwrap();
    assert_eq!((end.lsn, end.why, left), (Lsn(9 * 4096), EndReason::Closed, 0));
    assert!(faults(folder.path()).is_empty());
    let (found, ..) = seen(folder.path(), Some(Lsn(5 * 4096 + 48)));
    assert_eq!(found, [5, 6, 7]);
    assert_eq!(seen(folder.path(), Some(end.lsn)).0, []);
    let view = LogView::open(folder.path()).unwrap();
    let beyond = view.records(Some(Lsn(1 << 30))).unwrap_err();
    assert!(matches!(beyond, LogError::NotAppended { .. }), "{beyond}");
}

#[test]
fn a_log_in_use_is_shown_and_its_openings_count() {
    let folder = tempdir().unwrap();
    for opening in 1..4 {
        let log = open(folder.path());
        append(&log, &[opening; 10]);
        let view = LogView::open(folder.path()).unwrap();
        let incarnations = view.records(None).unwrap().filter_map(|shown| match shown {
            Shown::Record { record, incarnation } => Some((record.bytes[0], incarnation)),
            _ => None,
        });
        let all = (1..=opening).map(|opening| (opening, u64::from(opening)));
        assert!(incarnations.eq(all));
    }
    // What was trimmed is not the log's, though its file is there.
    let log = open(folder.path());
    for number in 4..20 {
        let lsn = append(&log, &[number; 3000]);
        log.trim(lsn).unwrap();
    }
    let view = LogView::open(folder.path()).unwrap();
    assert!(view.begin() > Lsn(0));
    let trimmed = view.records(Some(Lsn(48))).unwrap_err();
    assert!(matches!(trimmed, LogError::Trimmed { .. }), "{trimmed}");
    let segments = view.files().iter().map(|file| (file.segment.unwrap(), file.is_live));
    let begin = view.begin().0 / 4096 / BLOCKS;
    assert!(segments.into_iter().all(|(number, is_live)| is_live == (number >= begin)));
    assert_eq!(*shown(folder.path(), None).0.last().unwrap(), 19);
}

#[test]
fn damaged_blocks_are_named_and_the_records_after_them_shown() {
    for block in 0..8 {
        let folder = log_of(8);
        damage(folder.path(), block / BLOCKS, (block % BLOCKS + 1) * 4096 + 700, b"damage");
        let (found, damaged, end) = seen(folder.path(), None);
        assert!(found.into_iter().eq((0..8).filter(|number| u64::from(*number) != block)));
        assert_eq!((damaged, end.unwrap().0.lsn), (vec![block], Lsn(9 * 4096)));
    }
    // Two of them, and one after the other.
    let folder = log_of(8);
    for block in [1, 3, 4] {
        damage(folder.path(), block / BLOCKS, (block % BLOCKS + 1) * 4096 + 700, b"damage");
    }
    let (found, damaged, end) = seen(folder.path(), None);
    assert_eq!((found, damaged), (vec![0, 2, 5, 6, 7], vec![1, 3]));
    assert!(end.is_some());
}

#[test]
fn missing_short_and_foreign_files_are_named_and_the_rest_shown() {
    let folder = log_of(8);
    let folder = folder.path();
    let gone = folder.join("segment-0001");
    let file = fs::read(&gone).unwrap();
    fs::remove_file(&gone).unwrap();
    let view = LogView::open(folder).unwrap();
    assert!(matches!(view.faults(), [LogError::Damaged { lsn: Lsn(12288), .. }]));
    let (found, damaged, end) = seen(folder, None);
    assert_eq!((found, damaged), (vec![0, 1, 2, 6, 7], vec![3]));
    assert_eq!(end.unwrap().0.why, EndReason::Closed);
    // It has lost its tail.
    fs::write(&gone, &file[..8192]).unwrap();
    assert!(faults(folder)["segment-0001"].contains("1 of 3 blocks"));
    let (found, damaged, _) = seen(folder, None);
    assert_eq!((found, damaged), (vec![0, 1, 2, 3, 6, 7], vec![4]));
    // Its head.
    fs::write(&gone, &file).unwrap();
    damage(folder, 1, 0, &[9; 512]);
    assert!(faults(folder)["segment-0001"].contains("head is lost"));
    assert!(seen(folder, None).0.into_iter().eq(0..8));
    // Others, of which one is no file, and would hold a reader up.
    let other = log_of(1);
    fs::copy(other.path().join("segment-0000"), folder.join("segment-0007")).unwrap();
    fs::copy(folder.join("segment-0002"), folder.join("segment-0008")).unwrap();
    fs::write(folder.join("segment-0009"), b"my notes").unwrap();
    let piped = Command::new("mkfifo").arg(folder.join("segment-0010")).status();
    assert!(piped.unwrap().success());
    let faults = faults(folder);
    for (name, fault) in [(7, "another log"), (8, "too"), (9, "no segment"), (10, "no file")] {
        let name = format!("segment-{name:04}");
        assert!(faults[&name].contains(fault), "{name}: {}", faults[&name]);
    }
    fs::remove_file(folder.join("segment-0010")).unwrap();
    assert!(seen(folder, None).0.into_iter().eq(0..8));
}

#[test]
fn a_folder_without_a_log_is_refused_and_stays_empty() {
    let folder = tempdir().unwrap();
    for (notes, wants) in [(None, "no file of a log"), (Some("my notes"), "segment-0000")] {
        if let Some(notes) = notes {
            fs::write(folder.path().join("segment-0000"), notes).unwrap();
        }
        let before = contents(folder.path());
        let error = LogView::open(folder.path()).unwrap_err();
        assert!(matches!(error, LogError::Unfit { .. }), "{error}");
        assert!(error.to_string().contains(wants), "{error}");
        assert!(contents(folder.path()) == before);
    }
    assert!(LogView::open(folder.path().join("nowhere")).is_err());
    assert!(!folder.path().join("nowhere").exists());
}

/// Whatever the files hold, a look ends, and shows no record that was never there.
#[test]
fn hostile_files_are_looked_at_in_bounded_time() {
    let folder = log_of(12);
    let mut sound = contents(folder.path());
    // The log's thread may have begun a file when the log was closed.
    sound.entry("vellum-log-new.tmp".into()).or_default();
    let mut random = Random(1);
    let mut below = |limit: u64| random.below(limit);
    for _ in 0..300 {
        for (name, file) in &sound {
            let mut file = file.clone();
            for _ in 0..below(4) {
                let at = below(file.len() as u64) as usize;
                let bit = below(8);
                file.get_mut(at).into_iter().for_each(|byte| *byte ^= 1 << bit);
            }
            if below(6) == 0 {
                file.truncate(below(file.len() as u64) as usize);
            }
            if below(6) == 0 {
                // A head that is whole, with numbers from anywhere.
                let head = [24, 32, 40][below(3) as usize];
                let number = 1_u64 << below(40);
                if file.len() >= 4096 {
                    file[head..head + 8].copy_from_slice(&number.to_le_bytes());
                    let sum = crc_32c(&file[4..4096]);
                    file[..4].copy_from_slice(&sum.to_le_bytes());
                }
            }
            fs::write(folder.path().join(name), file).unwrap();
        }
        let Ok(view) = LogView::open(folder.path()) else { continue };
        for shown in view.records(None).unwrap() {
            if let Shown::Record { record, .. } = shown {
                assert!(record.bytes.len() == 3000 && record.bytes[0] < 12);
            }
        }
    }
}

fn crc_32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        let mut crc = crc ^ u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
        crc
    };
    !bytes.iter().fold(!0, step)
}
