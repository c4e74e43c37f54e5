//! The lock of the cache: while one lab adds a part of the cache, other labs wait.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use anyhow::{Context as _, Result};

/// Locks the folder for this process until the result is dropped. Creates the folder if it does not
/// exist.
///
/// # Errors
/// If the folder cannot be written to.
pub fn lock(folder: &Path) -> Result<File> {
    let context = || format!("taking {}", folder.display());
    fs::create_dir_all(folder).with_context(context)?;
    let file = File::create(folder.join("lock")).with_context(context)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            println!("waiting for another lab in {}", folder.display());
            file.lock().with_context(context)?;
            Ok(file)
        }
        Err(TryLockError::Error(error)) => Err(error).with_context(context),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_second_waits_for_the_first() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("folder");
        let first = lock(&folder).unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                let _second = lock(&folder).unwrap();
                assert!(is_over.load(Ordering::SeqCst));
            });
            thread::sleep(Duration::from_millis(50));
            is_over.store(true, Ordering::SeqCst);
            drop(first);
            second.join().unwrap();
        });
    }
}
