//! The steps of a seed in words, for a person who looks for a bug.

use std::cell::RefCell;

thread_local! {
    static STORY: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Adds a line, if the steps are wanted.
pub(crate) fn tell(line: impl FnOnce() -> String) {
    STORY.with_borrow_mut(|story| {
        if let Some(lines) = story {
            lines.push(line());
        }
    });
}

/// Runs something, and returns the steps that it told.
pub(crate) fn with_story<T>(run: impl FnOnce() -> T) -> (T, Vec<String>) {
    STORY.set(Some(Vec::new()));
    let result = run();
    (result, STORY.take().unwrap_or_default())
}
