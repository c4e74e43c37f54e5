//! `vellum export`: writes the files that were imported into a directory.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_OMIT, utimensat};

use crate::error::{AtStore, Doing, Failure, Outcome};
use crate::files::file_store::FileStore;
use crate::files::record::{FileRecord, Kind};
use crate::options::{Need, StoreArguments};
use crate::output::Output;
use crate::{interrupt, key_text};

const HELP: &str = "\
Examples:
  vellum export photos.vellum photos           the reverse of 'vellum import photos.vellum photos'
  vellum export usr.vellum bin bin/            only the files whose path starts with 'bin/'

Restores contents, permissions, times and the targets of symbolic links, but not the bits setuid,
setgid and sticky. DIR must be empty, or must not exist.";

/// Write the files that were imported into a directory
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The directory
    dir: PathBuf,

    /// Only files whose path starts with this
    prefix: Option<OsString>,
}

/// Runs the command.
///
/// # Errors
/// When nothing was imported into the store, it cannot be read, or the directory cannot be written.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    interrupt::watch()?;
    arguments.store.read(Need::Pages, |store| {
        let Some(files) = FileStore::find(store).at(path)? else {
            let store = path.display();
            return Err(Failure::message(format!("{store}: no files were imported here")));
        };
        let prefix = arguments.prefix.as_deref().unwrap_or_default();
        let prefix = key_text::from_argument(prefix, false)?;
        make_empty(&arguments.dir)?;
        let (mut written, mut links) = (0, Vec::new());
        for entry in files.meta.prefix(&prefix) {
            interrupt::check()?;
            let (name, value) = entry.at(path)?;
            let (place, record) = place_of(&arguments.dir, &name)
                .zip(FileRecord::decode(&value))
                .ok_or_else(|| {
                let (store, name) = (path.display(), key_text::printable(&name));
                Failure::message(format!("{store}: '{name}' is not an entry of 'import'"))
            })?;
            match record.kind {
                // The links come last, so that no file is written through a link.
                Kind::Link => links.push((place, record)),
                Kind::File => write_file(&files, &name, &record, &place, path)?,
            }
            written += 1;
        }
        for (place, record) in links {
            make_parent(&place)
                .and_then(|()| symlink(OsStr::from_bytes(&record.target), &place))
                .and_then(|()| set_time(&place, &record))
                .doing(|| format!("linking {}", place.display()))?;
        }
        let mut output = Output::new();
        output.line(&format!("{written} files written"))?;
        output.finish()
    })
}

/// Creates the directory, or checks that it is empty.
fn make_empty(dir: &Path) -> Outcome {
    fs::create_dir_all(dir).doing(|| format!("creating {}", dir.display()))?;
    let mut entries = fs::read_dir(dir).doing(|| format!("listing {}", dir.display()))?;
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(Failure::message(format!("{} is not empty", dir.display()))),
    }
}

/// The path of a file in `dir`; `None` for a name that leads out of it.
fn place_of(dir: &Path, name: &[u8]) -> Option<PathBuf> {
    let mut place = dir.to_path_buf();
    for part in name.split(|byte| *byte == b'/') {
        if matches!(part, b"" | b"." | b"..") || part.contains(&0) {
            return None;
        }
        place.push(OsStr::from_bytes(part));
    }
    Some(place)
}

fn make_parent(place: &Path) -> io::Result<()> {
    place.parent().map_or(Ok(()), fs::create_dir_all)
}

fn write_file(
    files: &FileStore,
    name: &[u8],
    record: &FileRecord,
    place: &Path,
    store: &Path,
) -> Outcome {
    let doing = || format!("writing {}", place.display());
    let mut file = make_parent(place).and_then(|()| create_private(place)).doing(doing)?;
    let mut length = 0;
    files.read(name, record, store, &mut |bytes| {
        length += bytes.len() as u64;
        file.write_all(bytes).doing(doing)
    })?;
    if length != record.stamp.size {
        let (store, name, size) = (store.display(), key_text::printable(name), record.stamp.size);
        let text = format!("{store}: '{name}' has {length} bytes, but its record says {size}");
        return Err(Failure::message(text));
    }
    file.set_permissions(Permissions::from_mode(record.mode & 0o777))
        .and_then(|()| set_time(place, record))
        .doing(doing)
}

/// A new file that only its owner may read, until it has its permissions.
fn create_private(place: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(place)
}

/// Sets the time of the last change of a file, or of a link itself.
fn set_time(place: &Path, record: &FileRecord) -> io::Result<()> {
    let (tv_sec, nanoseconds) = record.stamp.modified;
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec, tv_nsec: nanoseconds.into() },
    };
    Ok(utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_have_no_place() {
        let dir = Path::new("dir");
        assert_eq!(place_of(dir, b"a/b c"), Some(PathBuf::from("dir/a/b c")));
        for name in ["", "/etc/passwd", "..", "a/../../b", "a//b", "a/", "./a", "a\0b"] {
            assert_eq!(place_of(dir, name.as_bytes()), None, "{name:?}");
        }
    }
}
