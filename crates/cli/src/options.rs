//! Options that several commands share, and functions that open a store with them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use vellum::{BackendChoice, BackendKind, Error, Options, Store, Tree};
use vellum_vm::{memory_limit, probe};

use crate::error::{AtStore, Failure, Outcome};
use crate::{interrupt, recovery, size};

/// The tree that commands use when the user names none and the store does not have exactly one.
pub const DEFAULT_TREE: &str = "main";

/// The backend that populates and releases pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Backend {
    /// The fastest that works here: exmap (only if --pool is given), then process_madvise
    Auto,
    /// One call per range, on every kernel
    Madvise,
    /// Many ranges per call, from Linux 6.13 on
    ProcessMadvise,
    /// Vellum's kernel module: takes all memory of the pool at once, and locks it
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

/// The options of the buffer pool.
#[derive(Args, Clone, Debug)]
pub struct PoolArguments {
    /// Memory of the buffer pool [default: as much as the command needs, at most half of the
    /// memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub pool: Option<u64>,

    /// Backend that populates and releases pages
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Backend,
}

/// What a command needs the pool for. This decides the pool's size unless --pool gives it.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// Some pages of trees, one after the other.
    Pages,
    /// Every value of the file: each must fit the pool as a whole.
    Values,
    /// A value of this many bytes, to be stored.
    OneValue(u64),
    /// As much memory as possible: the engine's default.
    Default,
}

impl Need {
    /// The pool of a command that needs only some pages.
    const SMALL: u64 = 64 << 20;

    /// The size of the pool for the store at `path`; `None` for the engine's default.
    pub fn bytes(self, path: &Path) -> Option<u64> {
        let bytes = match self {
            Self::Pages => Self::SMALL,
            Self::Values => match path.metadata() {
                Ok(file) if file.is_file() => file.len(),
                // A block device, whose metadata has no length, or a file that cannot be opened.
                _ => return None,
            },
            // A value is at most a quarter of the pool; its page begins with a header.
            Self::OneValue(bytes) => bytes.saturating_add(1 << 20).saturating_mul(4),
            Self::Default => return None,
        };
        let half = memory_limit::effective().ok()?.bytes / 2;
        Some(bytes.max(Self::SMALL).min(half))
    }
}

impl PoolArguments {
    /// The options of a store. `default` is the size of the pool without --pool; `None` is the
    /// engine's default.
    pub fn options(&self, default: Option<u64>) -> Options {
        let options = Options::new().backend(self.backend.choice());
        match (self.pool, default) {
            (Some(bytes), _) => options.pool_bytes(bytes),
            (None, None) => options,
            // With a size, the engine may choose exmap, which takes all of the memory at once.
            (None, Some(bytes)) if self.backend == Backend::Auto => {
                let backend = probe::choice_without_exmap().backend;
                options.pool_bytes(bytes).backend(BackendChoice::Only(backend))
            }
            (None, Some(bytes)) => options.pool_bytes(bytes),
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

    /// Have no log while the command changes the store. The command then writes less; but if it is
    /// killed, the store may not open again
    #[arg(long)]
    no_log: bool,

    /// The folder of the log [default: STORE.log]. A store that was not closed needs its log
    #[arg(long, value_name = "FOLDER")]
    log_folder: Option<PathBuf>,

    /// How long to wait while another process has the store open
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "5")]
    wait: Duration,
}

/// Reads a time in seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "write a number of seconds: 0, 2.5, 60".into())
}

/// Options for creating a store.
#[derive(Args, Clone, Debug)]
pub struct CreateArguments {
    /// Page size of the trees of a new store: a multiple of 4KiB up to 64KiB [default: 4KiB]. An
    /// existing store must have this page size
    #[arg(long, value_name = "SIZE", value_parser = page_frames)]
    pub page_size: Option<u32>,
}

fn page_frames(text: &str) -> Result<u32, String> {
    let bytes = size::parse(text)?;
    match u32::try_from(bytes / 4096) {
        Ok(frames @ 1..=16) if bytes.is_multiple_of(4096) => Ok(frames),
        _ => Err("a page size is a multiple of 4KiB, from 4KiB to 64KiB".into()),
    }
}

impl StoreArguments {
    /// The options to open the store, for a command with this need.
    pub fn options(&self, need: Need) -> Options {
        let options = recovery::shown(self.pool.options(need.bytes(&self.path)));
        let options = match &self.log_folder {
            Some(folder) => options.log_folder(folder),
            None => options,
        };
        if self.no_log { options.log(false) } else { options }
    }

    /// Opens the store for reading and passes it to `work`. Recovers the store first if it was not
    /// closed.
    ///
    /// # Errors
    /// When it cannot be opened, or with the error of `work`.
    pub fn read<T>(&self, need: Need, work: impl FnOnce(&Store) -> Outcome<T>) -> Outcome<T> {
        let options = self.options(need);
        let to_read = options.clone().read_only(true);
        let open = || match Store::open(&self.path, &to_read) {
            Err(Error::NeedsRecovery) => {
                let recovered = Store::open(&self.path, &options)?;
                recovery::report(&recovered, &self.path);
                recovered.close()?;
                Store::open(&self.path, &to_read)
            }
            opened => opened,
        };
        close_after(self.open(open)?, &self.path, work)
    }

    /// Opens the store for changes and passes it to `work`, which calls [`check`](interrupt::check)
    /// before each record.
    ///
    /// # Errors
    /// When it cannot be opened or closed, or with the error of `work`.
    pub fn write<T>(&self, need: Need, work: impl FnOnce(&Store) -> Outcome<T>) -> Outcome<T> {
        interrupt::watch()?;
        let options = self.options(need);
        close_after(self.open(|| Store::open(&self.path, &options))?, &self.path, work)
    }

    /// Opens the store for changes, or creates it, and passes it to `work`.
    ///
    /// # Errors
    /// As [`StoreArguments::write`].
    pub fn write_or_create<T>(
        &self,
        need: Need,
        create: &CreateArguments,
        work: impl FnOnce(&Store) -> Outcome<T>,
    ) -> Outcome<T> {
        interrupt::watch()?;
        let mut options = self.options(need);
        if let Some(frames) = create.page_size {
            options = options.page_frames(frames);
        }
        close_after(self.open(|| Store::open_or_create(&self.path, &options))?, &self.path, work)
    }

    /// Calls `open` until it succeeds, as long as another process has the store open or is creating
    /// it.
    ///
    /// # Errors
    /// The error of the last call.
    pub fn open(&self, open: impl Fn() -> vellum::Result<Store>) -> Outcome<Store> {
        const LONGEST_PAUSE: Duration = Duration::from_millis(50);
        let end = Instant::now().checked_add(self.wait);
        let mut pause = Duration::from_millis(2);
        loop {
            let left = match end {
                Some(end) => end.saturating_duration_since(Instant::now()),
                None => LONGEST_PAUSE,
            };
            match open() {
                Err(Error::InUse(_) | Error::Exists(_)) if !left.is_zero() => {}
                opened => {
                    return opened
                        .inspect(|store| recovery::report(store, &self.path))
                        .at(&self.path);
                }
            }
            interrupt::check()?;
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// Runs `work` and closes the store, after a failure too: then the changes until the failure are in
/// the file, and the file is clean.
///
/// # Errors
/// The error of `work`, or else the error of closing.
pub fn close_after<T>(
    store: Store,
    path: &Path,
    work: impl FnOnce(&Store) -> Outcome<T>,
) -> Outcome<T> {
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
    /// The tree that the user means, which must exist.
    ///
    /// # Errors
    /// When it does not exist. The message names the trees that do.
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

    /// The tree that the user means, created if it does not exist.
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
    fn pools_follow_what_is_needed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let half = memory_limit::effective().unwrap().bytes / 2;
        std::fs::File::create(&path).unwrap().set_len(half * 2).unwrap();
        let small = half.min(64 << 20);
        assert_eq!(Need::Pages.bytes(&path), Some(small));
        assert_eq!(Need::Values.bytes(&path), Some(half));
        assert_eq!(Need::OneValue(u64::MAX).bytes(&path), Some(half));
        assert_eq!(Need::OneValue(10).bytes(&path), Some(small));
        assert_eq!(Need::Default.bytes(&path), None);
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        assert_eq!(Need::Values.bytes(&path), Some(small));
    }

    #[test]
    fn page_sizes_are_multiples_of_a_frame() {
        assert_eq!(page_frames("4KiB"), Ok(1));
        assert_eq!(page_frames("64KiB"), Ok(16));
        for text in ["0", "4095", "6KiB", "68KiB", "1TiB", "x"] {
            assert!(page_frames(text).is_err(), "{text}");
        }
    }
}
