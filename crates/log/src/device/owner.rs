//! Whose log a folder has: the name of an empty file says it.
//!
//! A program that needs the log after a crash is its owner. A new log must not take the place of
//! the one that another owner needs. So a log that is made over an older one wants to know whose
//! that is, and asks that owner whether it still needs the older one. A mark without an owner says
//! that no program needs the log yet.

use std::io;
use std::path::Path;

use super::discovery::number;
use super::folder::Folder;
use crate::error::LogError;

/// What the names of the marks begin with; the owner follows, in 32 hexadecimal digits.
const NAME: &str = "owner-";

/// The name of an owner's mark. The owner 0 is none.
fn name(owner: u128) -> String {
    format!("{NAME}{owner:032x}")
}

/// The owners that the marks in a folder name.
fn owners(names: &[String]) -> Vec<u128> {
    let owner = |text: &String| {
        let owner = u128::from_str_radix(text.strip_prefix(NAME)?, 16).ok()?;
        (name(owner) == *text).then_some(owner)
    };
    names.iter().filter_map(owner).collect()
}

/// Whether a folder has the mark of this owner, or the mark without an owner.
pub(super) fn is_left(folder: &Path, owner: u128) -> bool {
    [owner, 0].iter().any(|owner| folder.join(name(*owner)).exists())
}

/// Takes a folder for a new log of an owner: afterwards no program needs what is in it. `is_over`
/// says whether the owner needs its own log no more.
///
/// # Errors
/// `Unfit` if an owner needs it, or if there is a log without a mark; what `is_over` returns.
pub(super) fn take_over(
    folder: &Path,
    locked: &dyn Folder,
    owner: u128,
    is_over: impl FnOnce() -> Result<bool, LogError>,
) -> Result<(), LogError> {
    let doing = || format!("making a log in {}", folder.display());
    let unfit = |what: String| Err(LogError::Unfit { path: folder.into(), what });
    let names = locked.names().map_err(LogError::io(doing()))?;
    let marks = owners(&names);
    if let Some(other) = marks.iter().find(|other| ![0, owner].contains(other)) {
        return unfit(format!(
            "it has the log of another store, {other:032x}, which that one may need to recover: \
             move it away, or choose another folder"
        ));
    }
    let has_segments = names.iter().any(|name| number(name).is_some());
    if marks.is_empty() && has_segments {
        return unfit("it has a log of another program: choose another folder".into());
    }
    if marks == [owner] && has_segments && !is_over()? {
        return unfit(
            "it has records of another copy of this store, which that copy may need to recover: \
             open that copy instead, or move the folder to where it lies, or choose another \
             folder; if that copy is gone, remove the folder"
                .into(),
        );
    }
    disown(locked).map_err(LogError::io(doing()))
}

/// Takes the owner from a log, durably.
pub(super) fn disown(locked: &dyn Folder) -> io::Result<()> {
    let marks = owners(&locked.names()?);
    if !marks.contains(&0) {
        drop(locked.open(&name(0), false, true)?);
    }
    for owner in marks.into_iter().filter(|owner| *owner != 0) {
        locked.remove(&name(owner))?;
    }
    locked.sync()
}

/// Marks a log that has no owner yet, or this one.
pub(super) fn own(locked: &dyn Folder, owner: u128) -> io::Result<()> {
    let marks = owners(&locked.names()?);
    if marks.contains(&owner) {
        return Ok(());
    }
    match marks.contains(&0) {
        true => locked.rename(&name(0), &name(owner))?,
        false => drop(locked.open(&name(owner), false, true)?),
    }
    locked.sync()
}

/// Removes all marks.
pub(super) fn remove(locked: &dyn Folder) -> io::Result<()> {
    for owner in owners(&locked.names()?) {
        locked.remove(&name(owner))?;
    }
    Ok(())
}
