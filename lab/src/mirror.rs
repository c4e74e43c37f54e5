//! Keeps a copy of a folder up to date. Unchanged files keep their times, so a build in the copy
//! rebuilds only changed files, and the folder itself stays clean.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// The copy's list of the files that came from the folder. Its other files were built in it.
const LIST: &str = ".mirrored";

/// Updates `copy` to the files of `folder`: copies changed files, and removes files that `folder`
/// no longer has. Skips hidden files, and folders with Rust packages.
///
/// # Errors
/// If a file cannot be read or written.
pub fn follow(folder: &Path, copy: &Path) -> Result<()> {
    fs::create_dir_all(copy).with_context(|| format!("creating {}", copy.display()))?;
    let mut names = BTreeSet::new();
    collect(folder, Path::new(""), &mut names)?;
    let list = copy.join(LIST);
    for before in fs::read_to_string(&list).unwrap_or_default().lines() {
        if !names.contains(Path::new(before)) {
            fs::remove_file(copy.join(before)).ok();
        }
    }
    for name in &names {
        let (from, to) = (folder.join(name), copy.join(name));
        refresh(&from, &to).with_context(|| format!("copying {}", from.display()))?;
    }
    let lines = names.iter().map(|name| format!("{}\n", name.display()));
    fs::write(list, lines.collect::<String>())?;
    Ok(())
}

fn collect(folder: &Path, inside: &Path, names: &mut BTreeSet<PathBuf>) -> Result<()> {
    let path = folder.join(inside);
    let entries = fs::read_dir(&path).with_context(|| format!("reading {}", path.display()))?;
    for entry in entries {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let name = inside.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true if entry.path().join("Cargo.toml").exists() => {}
            true => collect(folder, &name, names)?,
            false => {
                names.insert(name);
            }
        }
    }
    Ok(())
}

/// Copies a file with its time unless the copy has the same length and time.
fn refresh(from: &Path, to: &Path) -> Result<()> {
    let now = fs::metadata(from)?;
    let time = now.modified()?;
    let same =
        |old: fs::Metadata| old.len() == now.len() && old.modified().is_ok_and(|t| t == time);
    if fs::metadata(to).is_ok_and(same) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::copy(from, to)?;
    fs::File::options().write(true).open(to)?.set_modified(time)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_follows_and_keeps_what_was_built() {
        let place = tempfile::tempdir().unwrap();
        let (folder, copy) = (place.path().join("folder"), place.path().join("copy"));
        fs::create_dir_all(folder.join("core")).unwrap();
        fs::create_dir_all(folder.join("tests")).unwrap();
        fs::write(folder.join("Kbuild"), "obj-m := a.o\n").unwrap();
        fs::write(folder.join("core/a.c"), "int a;\n").unwrap();
        fs::write(folder.join("b.c"), "int b;\n").unwrap();
        fs::write(folder.join("tests/Cargo.toml"), "").unwrap();
        follow(&folder, &copy).unwrap();
        assert!(!copy.join("tests").exists());
        let time = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(time(&copy.join("core/a.c")), time(&folder.join("core/a.c")));
        fs::write(copy.join("a.ko"), "built").unwrap();
        fs::remove_file(folder.join("b.c")).unwrap();
        fs::write(folder.join("core/a.c"), "long a;\n").unwrap();
        follow(&folder, &copy).unwrap();
        assert_eq!(fs::read_to_string(copy.join("core/a.c")).unwrap(), "long a;\n");
        assert!(copy.join("a.ko").exists() && !copy.join("b.c").exists());
        // The file gets an older time than the copy. It is still copied, because its time has
        // changed.
        let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000);
        fs::write(folder.join("core/a.c"), "char a;").unwrap();
        fs::File::options().write(true).open(folder.join("core/a.c")).unwrap();
        fs::File::open(folder.join("core/a.c")).unwrap().set_modified(old).unwrap();
        follow(&folder, &copy).unwrap();
        assert_eq!(fs::read_to_string(copy.join("core/a.c")).unwrap(), "char a;");
    }
}
