//! A log as a reader sees it who changes nothing: its files, its records, where it is damaged, and
//! where it ends.

use std::path::Path;

use crate::block::{Block, Head, Lsn};
use crate::device::{FileSeen, LogDevice as _, Seen, look};
use crate::error::LogError;
use crate::scan::{End, EndReason, Record, Scan};

/// A log in a folder, to look at.
///
/// It takes no lock, syncs nothing, writes nothing, and refuses nothing that it can show. So it
/// shows what the page cache has, which a loss of power may still take, and a log that is in use
/// may change meanwhile: a file that is recycled under the reader looks like damage.
pub struct LogView(Seen);

/// What a [`LogView`] shows, in the order of the log.
#[derive(Debug)]
#[non_exhaustive]
pub enum Shown {
    /// A record.
    Record {
        /// The record.
        record: Record,
        /// The opening of the log that wrote it.
        incarnation: u64,
    },
    /// What is missing, or cannot be known. The log goes on with what comes next.
    Damage(LogError),
    /// The end, and how many sound blocks stand after it, left from flushes that did not finish.
    End(End, u64),
}

/// See [`LogView::records`].
#[derive(Debug)]
pub struct Records<'a> {
    view: &'a LogView,
    from: Option<Lsn>,
    /// The run that is read, and the next block of the log.
    run: usize,
    next: u64,
    scan: Option<Scan<'a>>,
    incarnation: u64,
    is_over: bool,
}

impl LogView {
    /// Looks at the files of a folder.
    ///
    /// # Errors
    /// `Unfit` if no file in it is one of a log's; what the system said.
    pub fn open(folder: impl AsRef<Path>) -> Result<LogView, LogError> {
        look(folder.as_ref()).map(LogView)
    }

    /// The identity of the log.
    pub fn identity(&self) -> u64 {
        self.0.log
    }

    /// Bytes of each file.
    pub fn segment_bytes(&self) -> u64 {
        self.0.segment_bytes()
    }

    /// The files with names of the log's, by name.
    pub fn files(&self) -> &[FileSeen] {
        &self.0.files
    }

    /// What is wrong with the files as a whole.
    pub fn faults(&self) -> &[LogError] {
        &self.0.faults
    }

    /// Where the log begins.
    pub fn begin(&self) -> Lsn {
        Lsn::of_block(self.0.begin)
    }

    /// The records from one on, or from the oldest one, with the damage between them, and the end.
    /// An end is missing only after damage.
    ///
    /// # Errors
    /// `Trimmed` if the log begins later; `NotAppended` if its files end before.
    pub fn records(&self, from: Option<Lsn>) -> Result<Records<'_>, LogError> {
        let (begin, end) = (self.0.begin, self.0.runs.last().map_or(0, |run| run.range.end));
        let block = from.map_or(begin, Lsn::block);
        match from {
            Some(lsn) if block < begin => {
                return Err(LogError::Trimmed { lsn, begin: Lsn::of_block(begin) });
            }
            Some(lsn) if block > end => {
                return Err(LogError::NotAppended { lsn, end: Lsn::of_block(end) });
            }
            _ => {}
        }
        let run = self.0.runs.iter().take_while(|run| run.range.end < block).count();
        let (scan, is_over) = (None, self.0.runs.is_empty());
        Ok(Records { view: self, from, run, next: block, scan, incarnation: 0, is_over })
    }
}

impl std::fmt::Debug for LogView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogView").field("files", &self.0.files).finish_non_exhaustive()
    }
}

impl<'a> Records<'a> {
    /// Begins to read where the run has the next block, or says what is missing before it.
    fn begin(&mut self) -> Result<Scan<'a>, LogError> {
        let run = &self.view.0.runs[self.run];
        let missing = self.next..run.range.start;
        if !missing.is_empty() {
            self.next = missing.end;
            return Err(LogError::Damaged {
                lsn: Lsn::of_block(missing.start),
                what: format!("no file has the blocks {} to {}", missing.start, missing.end - 1),
                witness: format!("a later file has block {}", missing.end),
            });
        }
        let is_first = self.from.is_some_and(|from| from.block() == self.next);
        let at = Lsn::of_block(self.next);
        let from = if is_first { self.from } else { (self.next > run.range.start).then_some(at) };
        Scan::new(run, from, None, None)
    }

    /// The run has nothing more, and has ended there.
    fn end(&mut self, end: End) -> Option<Shown> {
        let run = &self.view.0.runs[self.run];
        let Some(later) = self.view.0.runs.get(self.run + 1) else {
            self.is_over = true;
            let left = (end.lsn.block()..run.range.end).filter(|block| self.head(*block).is_some());
            return Some(Shown::End(end, left.count() as u64));
        };
        (self.next, self.scan) = (run.range.end, None);
        self.run += 1;
        if end.why == EndReason::Room {
            return None;
        }
        let witness = format!("a later file has block {}", later.range.start);
        let what = end.why.to_string();
        Some(Shown::Damage(LogError::Damaged { lsn: end.lsn, what, witness }))
    }

    /// Goes on after damage, with the next block that the same opening may have written, or a later
    /// one.
    fn pass(&mut self, damaged: u64) {
        let run = &self.view.0.runs[self.run];
        self.scan = None;
        let may_follow = |block: &u64| self.head(*block).is_some_and(|at| at >= self.incarnation);
        match (damaged + 1..run.range.end).find(may_follow) {
            Some(block) => self.next = block,
            None => {
                (self.next, self.run) = (run.range.end, self.run + 1);
                self.is_over = self.run == self.view.0.runs.len();
            }
        }
    }

    /// The opening that wrote a block of this run, if the block is sound.
    fn head(&self, block: u64) -> Option<u64> {
        let run = &self.view.0.runs[self.run];
        let mut read = [Block::ZERO];
        run.read(block, &mut read).ok()?;
        Some(Head::expect(&read[0], run.identity(), block).ok()?.incarnation)
    }
}

impl Iterator for Records<'_> {
    type Item = Shown;

    fn next(&mut self) -> Option<Shown> {
        while !self.is_over {
            let Some(scan) = &mut self.scan else {
                match self.begin() {
                    Ok(scan) => self.scan = Some(scan),
                    Err(damage) => return Some(Shown::Damage(damage)),
                }
                continue;
            };
            match scan.next_record() {
                Ok(Some(record)) => {
                    self.incarnation = scan.incarnation();
                    return Some(Shown::Record { record, incarnation: self.incarnation });
                }
                Ok(None) => {
                    let end = scan.end();
                    if let Some(shown) = end.and_then(|end| self.end(end)) {
                        return Some(shown);
                    }
                }
                Err(LogError::Damaged { lsn, what, mut witness }) => {
                    let begin = self.view.0.runs[self.run].range.start;
                    if lsn.block() == begin && begin > self.view.0.begin {
                        witness = "it follows blocks that are missing".into();
                    }
                    self.pass(lsn.block());
                    return Some(Shown::Damage(LogError::Damaged { lsn, what, witness }));
                }
                Err(unknown) => {
                    self.is_over = true;
                    return Some(Shown::Damage(unknown));
                }
            }
        }
        None
    }
}
