//! What an opening finds in the folder of a log: which files are the log, which are spare, and
//! which are missing.
//!
//! Nothing is changed before all files are known to belong together.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::Arc;

use super::folder::Folder;
use super::segment::{Segment, SegmentHead};
use super::sync_method::SyncMethod;
use crate::block::Lsn;
use crate::block::Unsound::{Empty, Number};
use crate::error::LogError;

/// What the names of the files begin with; a number follows, which means nothing.
const NAME: &str = "segment-";

/// A file that is being made. It gets a name of the log's when it is allocated, zeroed, and has a
/// head, all durably: what has such a name and is no segment is none of the log's.
pub(super) const NEW: &str = "vellum-log-new.tmp";

/// The name of a file.
pub(super) fn name(number: u64) -> String {
    format!("{NAME}{number:04}")
}

/// The number in a name that the log gives.
pub(super) fn number(text: &str) -> Option<u64> {
    let number = text.strip_prefix(NAME)?.parse().ok()?;
    (number < u64::MAX && name(number) == text).then_some(number)
}

/// What the files of a folder are together.
pub(super) struct Found {
    /// The identity of the log.
    pub(super) log: u64,
    /// Blocks of each segment.
    pub(super) blocks: u64,
    /// The number of the oldest segment.
    pub(super) first: u64,
    pub(super) live: VecDeque<Arc<Segment>>,
    pub(super) spare: Vec<Arc<Segment>>,
    /// The number in the name of the next file.
    pub(super) name: u64,
}

/// A file, and what its head says.
pub(super) type Stated = (Segment, Option<SegmentHead>);

/// The files of a folder, by name, and the greatest number in their names.
type Listed = (Vec<(String, Stated)>, Option<u64>);

/// Looks at the files of a folder, which is locked; `new_blocks` are those of a segment if the log
/// is new.
pub(super) fn find(
    folder: &Path,
    locked: &dyn Folder,
    sync_method: SyncMethod,
    new_blocks: u64,
) -> Result<Found, LogError> {
    let doing = || format!("opening the log in {}", folder.display());
    let unfit = |what: String| LogError::Unfit { path: folder.into(), what };
    let (files, last) = list(folder, locked, sync_method)?;
    let mut known = files.iter().filter_map(|(_, (_, head))| *head);
    let first = known.next();
    let mut log = first.map(|head| head.log);
    let blocks = first.map_or(new_blocks, |head| head.blocks);
    if known.any(|head| (Some(head.log), head.blocks) != (log, blocks)) {
        return Err(unfit("its segments are those of several logs: move one of them away".into()));
    }
    let mut by_number = BTreeMap::new();
    let mut spare = Vec::new();
    for (name, (segment, stated)) in files {
        let path = folder.join(name);
        let doing = || format!("reading {}", path.display());
        let is_whole = segment.has_length(blocks).map_err(LogError::io(doing()))?;
        let is = match stated {
            Some(stated) if is_whole => Some((stated.log, stated.number)),
            Some(stated) => {
                return Err(unfit(format!("segment {} has lost its tail", stated.number)));
            }
            None if is_whole => segment.infer(log, blocks).map_err(LogError::io(doing()))?,
            None => None,
        };
        let Some((of, number)) = is else {
            let what = "it has a name of the log's, but is no segment: move it away, or bring back \
                        what it was";
            return Err(LogError::Unfit { path, what: what.into() });
        };
        log = Some(of);
        if by_number.insert(number, (segment, stated)).is_some() {
            return Err(unfit(format!("segment {number} is there twice")));
        }
    }
    let first = first_of_log(&by_number, blocks)?;
    let log = log.unwrap_or_else(|| RandomState::new().hash_one(std::process::id()) | 1);
    check_inferred(folder, &by_number, first, log, blocks)?;
    let mut live = VecDeque::new();
    for (number, (segment, stated)) in by_number {
        if number < first {
            spare.push(Arc::new(segment));
            continue;
        }
        if stated.is_none() {
            tracing::warn!(number, "a segment of the log has lost its head: writing it anew");
            let head = SegmentHead { log, number, blocks, oldest: first };
            segment.write_head(head).map_err(LogError::io(doing()))?;
        }
        live.push_back(Arc::new(segment));
    }
    locked.remove(NEW).map_err(LogError::io(doing()))?;
    Ok(Found { log, blocks, first, live, spare, name: last.map_or(0, |last| last + 1) })
}

/// The files of a log with their heads, and the greatest number in their names.
///
/// What an earlier process left in the page cache is made durable, or found not to be there, before
/// any of it is believed.
fn list(folder: &Path, locked: &dyn Folder, sync_method: SyncMethod) -> Result<Listed, LogError> {
    let (mut files, mut last) = (Vec::new(), None);
    let doing = || format!("listing {}", folder.display());
    for name in locked.names().map_err(LogError::io(doing()))? {
        let Some(number) = number(&name) else { continue };
        last = last.max(Some(number));
        let read = || {
            let segment = Segment::open(locked, &name, sync_method, false)?;
            segment.settle()?;
            let head = segment.head()?;
            Ok((segment, head))
        };
        let doing = || format!("opening {}", folder.join(&name).display());
        let read = read().map_err(LogError::io(doing()))?;
        files.push((name, read));
    }
    Ok((files, last))
}

/// The oldest segment of the log.
///
/// The newest head names it. A trim since then made it older than it has to be: those files are
/// there all the same, because only a newer segment takes one of them. A newest segment that lost
/// its head may have taken one file of a segment that its predecessor's head still counts.
///
/// # Errors
/// `Damaged` if more are missing than that.
pub(super) fn first_of_log(
    by_number: &BTreeMap<u64, Stated>,
    blocks: u64,
) -> Result<u64, LogError> {
    let Some((&newest, _)) = by_number.last_key_value() else { return Ok(0) };
    let head_of = |(number, (_, stated)): (&u64, &Stated)| Some((*number, (*stated)?.oldest));
    let eldest = by_number.keys().next().copied().unwrap_or(newest);
    let (witness, oldest) = by_number.iter().rev().find_map(head_of).unwrap_or((eldest, eldest));
    let there = by_number.range(oldest..).count() as u64;
    let missing = newest - oldest + 1 - there;
    if missing > newest - witness {
        let is_missing = |number: &u64| !by_number.contains_key(number);
        let number = (oldest..newest).find(is_missing).unwrap_or(oldest);
        return Err(LogError::Damaged {
            lsn: Lsn::of_block(number * blocks),
            what: format!("no file has segment {number} of the log"),
            witness: format!("segment {witness} was made when the log had it"),
        });
    }
    let mut first = newest;
    while first > oldest && by_number.contains_key(&(first - 1)) {
        first -= 1;
    }
    Ok(first)
}

/// A file that lost its head may be a newer segment than its blocks say: one that took the file of
/// that one, and whose first blocks a crash has torn. They would look like the end of the log, in
/// the midst of it. So if a segment that is known by its blocks has a torn one, no later segment
/// has any. (One that is empty, or older, was not written since: the file is what it seems.)
///
/// # Errors
/// `Damaged` if a later segment has blocks.
pub(super) fn check_inferred(
    folder: &Path,
    by_number: &BTreeMap<u64, Stated>,
    first: u64,
    log: u64,
    blocks: u64,
) -> Result<(), LogError> {
    let doing = || format!("reading the log in {}", folder.display());
    let heads = |number: u64, segment: &Segment| {
        let heads = segment.heads(log, number, blocks);
        heads.map_err(LogError::io(doing()))
    };
    for (&number, (segment, stated)) in by_number.range(first..) {
        if stated.is_some() {
            continue;
        }
        let heads_here = heads(number, segment)?;
        let is_torn = |head: &Result<_, _>| !matches!(head, Ok(_) | Err(Empty | Number(_)));
        let Some(torn) = heads_here.iter().position(is_torn) else { continue };
        for (&later, (segment, _)) in by_number.range(number + 1..) {
            if heads(later, segment)?.iter().any(Result::is_ok) {
                return Err(LogError::Damaged {
                    lsn: Lsn::of_block(number * blocks + torn as u64),
                    what: format!(
                        "there is no sound block, in a file that lost its head and seems to be \
                         segment {number}"
                    ),
                    witness: format!("segment {later} has some"),
                });
            }
        }
    }
    Ok(())
}
