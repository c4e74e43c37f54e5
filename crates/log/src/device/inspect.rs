//! The files of a log, looked at: nothing is locked, synced or changed, and no file is refused.
//!
//! What does not belong to the log, or is not whole, is said of the file that it is about. The
//! rest is in *runs*, each of blocks that follow each other: where a file is missing, or too short,
//! another run begins.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use super::discovery::{Stated, check_inferred, first_of_log, number};
use super::segment::{Segment, SegmentHead};
use super::{LogDevice, Written};
use crate::block::{BLOCK_BYTES, Block};
use crate::error::LogError;

/// A file with a name of the log's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSeen {
    /// Its name in the folder.
    pub name: String,
    /// The number of its segment, if that is known.
    pub segment: Option<u64>,
    /// Whether its blocks are those of the log, and not spare room.
    pub is_live: bool,
    /// What is wrong with it.
    pub fault: Option<String>,
}

/// The files of a log.
pub(crate) struct Seen {
    pub(crate) log: u64,
    /// Blocks of a segment.
    pub(crate) blocks: u64,
    pub(crate) files: Vec<FileSeen>,
    /// What is wrong with all of them together: a segment is missing, or may be another.
    pub(crate) faults: Vec<LogError>,
    /// The first block of the log, whether or not it is there.
    pub(crate) begin: u64,
    pub(crate) runs: Vec<Run>,
}

/// Blocks that follow each other: a device to read from.
#[derive(Debug)]
pub(crate) struct Run {
    log: u64,
    blocks: u64,
    pub(crate) range: Range<u64>,
    segments: Arc<BTreeMap<u64, Stated>>,
    taken: AtomicBool,
}

/// Looks at the files of a folder.
pub(crate) fn look(folder: &Path) -> Result<Seen, LogError> {
    let doing = || format!("listing {}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(LogError::io(doing()))? {
        let name = entry.map_err(LogError::io(doing()))?.file_name();
        names.extend(name.into_string().ok().filter(|name| number(name).is_some()));
    }
    names.sort();
    let read: Vec<_> = names.iter().map(|name| read_head(&folder.join(name))).collect();
    let heads = read.iter().filter_map(|read| read.as_ref().ok()?.1);
    let Some((log, blocks)) = most_of(heads).or_else(|| infer_log(&read)) else {
        let what = match names.is_empty() {
            true => "it has no file of a log".into(),
            false => format!("no file of a log can be read: {}", faults_of(&names, &read)),
        };
        return Err(LogError::Unfit { path: folder.into(), what });
    };
    let mut files = Vec::new();
    let mut by_number = BTreeMap::new();
    for (name, read) in names.into_iter().zip(read) {
        let (segment, fault) = match read {
            Ok((segment, head)) => place(segment, head, log, blocks, &mut by_number),
            Err(error) => (None, Some(error.to_string())),
        };
        files.push(FileSeen { name, segment, is_live: false, fault });
    }
    let mut faults = Vec::new();
    let stated = by_number.values().rev().find_map(|(_, head): &Stated| *head);
    let first = first_of_log(&by_number, blocks).unwrap_or_else(|fault| {
        faults.push(fault);
        stated.map_or(0, |head| head.oldest)
    });
    faults.extend(check_inferred(folder, &by_number, first, log, blocks).err());
    for file in &mut files {
        file.is_live = file.segment.is_some_and(|number| number >= first);
    }
    let segments = Arc::new(by_number);
    let runs = runs(&segments, first, blocks).into_iter().map(|range| {
        let segments = Arc::clone(&segments);
        Run { log, blocks, range, segments, taken: AtomicBool::new(false) }
    });
    let runs = runs.collect();
    Ok(Seen { log, blocks, files, faults, begin: first * blocks, runs })
}

/// Opens a file to read it, and reads its head.
fn read_head(path: &Path) -> io::Result<Stated> {
    // A pipe of that name does not hold the reader up.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(openat(CWD, path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let segment = Segment::to_read(Box::new(file));
    let head = segment.head()?;
    Ok((segment, head))
}

/// The log that most of the files belong to, and the blocks of its segments.
fn most_of(heads: impl Iterator<Item = SegmentHead>) -> Option<(u64, u64)> {
    let mut counts = BTreeMap::new();
    for head in heads {
        *counts.entry((head.log, head.blocks)).or_insert(0_u64) += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(log, _)| log)
}

/// The same, if all heads are lost.
fn infer_log(read: &[io::Result<Stated>]) -> Option<(u64, u64)> {
    let infer = |read: &io::Result<Stated>| {
        let (segment, _) = read.as_ref().ok()?;
        let blocks = segment.blocks().ok()?;
        let (log, _) = segment.infer(None, blocks).ok()??;
        Some((log, blocks))
    };
    read.iter().find_map(infer)
}

fn faults_of(names: &[String], read: &[io::Result<Stated>]) -> String {
    let fault = |(name, read): (&String, &io::Result<Stated>)| match read {
        Ok(_) => format!("{name} is no segment"),
        Err(error) => format!("{name}: {error}"),
    };
    names.iter().zip(read).map(fault).collect::<Vec<_>>().join("; ")
}

/// Which segment a file is; adds it to the others. Says what is wrong with it.
fn place(
    segment: Segment,
    head: Option<SegmentHead>,
    log: u64,
    blocks: u64,
    by_number: &mut BTreeMap<u64, Stated>,
) -> (Option<u64>, Option<String>) {
    let there = segment.blocks().unwrap_or(0);
    let (number, fault) = match head {
        Some(head) if head.log != log => {
            return (None, Some(format!("it belongs to another log ({:#018x})", head.log)));
        }
        Some(head) if head.blocks != blocks => {
            return (None, Some(format!("its segments have {} blocks", head.blocks)));
        }
        Some(head) if there != blocks => {
            (head.number, Some(format!("it has {there} of {blocks} blocks")))
        }
        Some(head) => (head.number, None),
        None if there != blocks => return (None, Some("it is no segment of the log".into())),
        None => match segment.infer(Some(log), blocks) {
            Ok(Some((_, number))) => {
                (number, Some("its head is lost: its blocks say which segment it is".into()))
            }
            Ok(None) => return (None, Some("it is no segment of the log".into())),
            Err(error) => return (None, Some(error.to_string())),
        },
    };
    if by_number.contains_key(&number) {
        return (None, Some(format!("another file has segment {number}, too")));
    }
    by_number.insert(number, (segment, head));
    (Some(number), fault)
}

/// The blocks that are there, from the first segment on.
fn runs(segments: &BTreeMap<u64, Stated>, first: u64, blocks: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (number, (segment, _)) in segments.range(first..) {
        let begin = number * blocks;
        let end = begin + segment.blocks().unwrap_or(0).min(blocks);
        match runs.last_mut() {
            Some(run) if run.end == begin => run.end = end,
            _ => runs.push(begin..end),
        }
    }
    runs.retain(|run| !run.is_empty());
    runs
}

/// For reading alone.
impl LogDevice for Run {
    fn identity(&self) -> u64 {
        self.log
    }

    fn scan(&self) -> Range<u64> {
        self.range.clone()
    }

    fn extend(&self) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn append(&self, _: u64, _: [&[Block]; 2]) -> io::Result<Written> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()> {
        let mut done = 0;
        while done < blocks.len() {
            let (number, inside) = ((first + done as u64) / self.blocks, first + done as u64);
            let inside = inside % self.blocks;
            let count = ((self.blocks - inside) as usize).min(blocks.len() - done);
            // A file that has become shorter is as one that cannot be read.
            let (segment, _) = self.segments.get(&number).ok_or(Errno::IO)?;
            segment.read(inside, &mut blocks[done..done + count]).map_err(|_| Errno::IO)?;
            done += count;
        }
        Ok(())
    }

    fn trim(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn taken(&self) -> &AtomicBool {
        &self.taken
    }
}

impl Seen {
    /// Bytes of each file.
    pub(crate) fn segment_bytes(&self) -> u64 {
        (self.blocks + 1) * BLOCK_BYTES as u64
    }
}
