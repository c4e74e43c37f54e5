//! Options that several commands share, and opening a store by them.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use vellum::{BackendChoice, BackendKind, Options, Store, Tree};

use crate::error::{AtStore, Failure, Outcome};
use crate::{interrupt, size};

/// The tree that `put` and `load` use when none is named.
pub const DEFAULT_TREE: &str = "main";

/// Which way of populating and releasing pages to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Backend {
    /// The fastest that works here: exmap, but only if --pool is given, then process_madvise
    Auto,
    /// One call per range, on every kernel
    Madvise,
    /// Many ranges per call, from Linux 6.13 on
    ProcessMadvise,
    /// Vellum's kernel module: all memory of the pool is taken at once, and locked
    Exmap,
}

impl Backend {
    fn choice(self) -> BackendChoice {
        match self {
            Self::Auto => BackendChoice::Auto,
            Self::Madvise => BackendChoice::Only(BackendKind::Madvise),
            Self::ProcessMadvise => BackendChoice::Only(BackendKind::ProcessMadvise),
            Self::Exmap => BackendChoice::Only(BackendKind::Exmap),
        }
    }
}

/// How the buffer pool is set up.
#[derive(Args, Clone, Debug)]
pub struct PoolArguments {
    /// Memory of the buffer pool [default: follows the memory limit of the process]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub pool: Option<u64>,

    /// Way of populating and releasing pages
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Backend,
}

impl PoolArguments {
    /// The options of the store that these stand for.
    pub fn options(&self) -> Options {
        let options = Options::new().backend(self.backend.choice());
        match self.pool {
            Some(bytes) => options.pool_bytes(bytes),
            None => options,
        }
    }
}

/// Reads a number of threads.
///
/// # Errors
/// Says how many there may be.
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=64) => Ok(threads),
        _ => Err("write a number of threads, from 1 to 64".into()),
    }
}

/// A store file and how to open it.
#[derive(Args, Clone, Debug)]
pub struct StoreArguments {
    /// The store file
    #[arg(value_name = "STORE")]
    pub path: PathBuf,

    #[command(flatten)]
    pub pool: PoolArguments,
}

/// How a store that is not there yet is created.
#[derive(Args, Clone, Debug)]
pub struct CreateArguments {
    /// Page size of the trees if the store is created: a multiple of 4KiB up to 64KiB
    #[arg(long, value_name = "SIZE", value_parser = page_frames, default_value = "4KiB")]
    pub page_size: u32,
}

fn page_frames(text: &str) -> Result<u32, String> {
    let bytes = size::parse(text)?;
    match u32::try_from(bytes / 4096) {
        Ok(frames @ 1..=16) if bytes.is_multiple_of(4096) => Ok(frames),
        _ => Err("a page size is a multiple of 4KiB, from 4KiB to 64KiB".into()),
    }
}

impl StoreArguments {
    /// Opens the store to be read and hands it to `work`.
    ///
    /// # Errors
    /// When it cannot be opened, or with the error of `work`.
    pub fn read<T>(&self, work: impl FnOnce(&Store) -> Outcome<T>) -> Outcome<T> {
        let store = Store::open(&self.path, &self.pool.options().read_only(true)).at(&self.path)?;
        using(store, &self.path, work)
    }

    /// Opens the store to be changed and hands it to `work`, which asks
    /// [`check`](interrupt::check) before each record.
    ///
    /// # Errors
    /// When it cannot be opened or closed, or with the error of `work`.
    pub fn write<T>(&self, work: impl FnOnce(&Store) -> Outcome<T>) -> Outcome<T> {
        interrupt::watch()?;
        let store = Store::open(&self.path, &self.pool.options()).at(&self.path)?;
        using(store, &self.path, work)
    }

    /// Opens the store to be changed, created if need be, and hands it to `work`.
    ///
    /// # Errors
    /// As [`StoreArguments::write`].
    pub fn write_or_create<T>(
        &self,
        create: &CreateArguments,
        work: impl FnOnce(&Store) -> Outcome<T>,
    ) -> Outcome<T> {
        interrupt::watch()?;
        let options = self.pool.options().page_frames(create.page_size);
        let store = Store::open_or_create(&self.path, &options).at(&self.path)?;
        using(store, &self.path, work)
    }
}

/// Runs `work` and closes the store afterwards, also when that failed: what was done until then is
/// in the file, and the file is clean.
///
/// # Errors
/// The error of `work`, or else that of closing.
pub fn using<T>(store: Store, path: &Path, work: impl FnOnce(&Store) -> Outcome<T>) -> Outcome<T> {
    let result = work(&store);
    let closed = store.close().at(path);
    let value = result?;
    closed?;
    Ok(value)
}

/// The tree to work on.
#[derive(Args, Clone, Debug)]
pub struct TreeArguments {
    /// The tree [default: the only one, or 'main']
    #[arg(long, value_name = "NAME")]
    pub tree: Option<String>,
}

impl TreeArguments {
    /// The tree that is meant, which must be there.
    ///
    /// # Errors
    /// When it is not there; the message names those that are.
    pub fn find(&self, store: &Store, path: &Path) -> Outcome<Tree> {
        let names = store.trees().at(path)?;
        let name = match (&self.tree, &names[..]) {
            (Some(name), _) => name.as_str(),
            (None, [only]) => only.as_str(),
            (None, _) => DEFAULT_TREE,
        };
        if !names.iter().any(|known| known == name) {
            let shown = path.display();
            return Err(Failure::message(match names.is_empty() {
                true => format!("{shown}: there is no tree '{name}': the store is empty"),
                false => format!(
                    "{shown}: there is no tree '{name}'; choose with --tree from: {}",
                    names.join(", ")
                ),
            }));
        }
        store.tree(name).at(path)
    }

    /// The tree that is meant, created if need be.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn find_or_create(&self, store: &Store, path: &Path) -> Outcome<Tree> {
        let names = store.trees().at(path)?;
        let name = match (&self.tree, &names[..]) {
            (Some(name), _) => name.as_str(),
            (None, [only]) => only.as_str(),
            (None, _) => DEFAULT_TREE,
        };
        store.tree_or_create(name).at(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sizes_are_multiples_of_a_frame() {
        assert_eq!(page_frames("4KiB"), Ok(1));
        assert_eq!(page_frames("64KiB"), Ok(16));
        for text in ["0", "4095", "6KiB", "68KiB", "1TiB", "x"] {
            assert!(page_frames(text).is_err(), "{text}");
        }
    }
}
