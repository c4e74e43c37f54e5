//! Progress of long work on standard error: a bar on a terminal, otherwise a line every five
//! seconds.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::size;

/// [`DelayedProgress`] shows nothing of work that takes less time.
const SHOW_AFTER: Duration = Duration::from_secs(2);

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Shown as a size.
    Bytes,
    /// Shown as a number.
    Items,
}

/// The progress of work of known size. Any thread may advance it.
pub struct Progress {
    label: &'static str,
    unit: Unit,
    total: u64,
    done: AtomicU64,
    start: Instant,
    shown: Shown,
}

enum Shown {
    Bar(ProgressBar),
    /// When the next line is due.
    Lines(Mutex<Instant>),
}

impl Progress {
    /// Starts at 0 of `total`.
    pub fn new(label: &'static str, unit: Unit, total: u64) -> Self {
        let start = Instant::now();
        // A bar needs an end.
        let shown = if total > 0 && std::io::stderr().is_terminal() {
            Shown::Bar(bar(label, unit, total))
        } else {
            Shown::Lines(Mutex::new(start + LINE_EVERY))
        };
        Self { label, unit, total, done: AtomicU64::new(0), start, shown }
    }

    /// Counts `by` more as done.
    pub fn advance(&self, by: u64) {
        let done = self.done.fetch_add(by, Ordering::Relaxed) + by;
        match &self.shown {
            Shown::Bar(bar) => bar.inc(by),
            Shown::Lines(due) => {
                // If another thread has the lock, that thread prints the line.
                if let Ok(mut due) = due.try_lock()
                    && Instant::now() >= *due
                {
                    *due = Instant::now() + LINE_EVERY;
                    self.print(done);
                }
            }
        }
    }

    /// Sets what is done so far.
    pub fn set(&self, done: u64) {
        let before = self.done.load(Ordering::Relaxed);
        self.advance(done.saturating_sub(before));
    }

    /// Removes the bar and prints the last line.
    pub fn finish(self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
        self.print(self.done.load(Ordering::Relaxed));
    }

    fn print(&self, done: u64) {
        let seconds = self.start.elapsed().as_secs_f64();
        let label = self.label;
        let line = match self.unit {
            Unit::Bytes => {
                let rate = size::show((done as f64 / seconds.max(1e-3)) as u64);
                let of = match self.total {
                    0 => String::new(),
                    total => format!(" of {}", size::show(total)),
                };
                format!("{label}: {}{of}, {rate}/s, {seconds:.1} s", size::show(done))
            }
            Unit::Items => format!("{label}: {done} of {}, {seconds:.1} s", self.total),
        };
        say(&line);
    }
}

/// Progress in bytes, shown only if the work takes more than two seconds.
pub struct DelayedProgress {
    label: &'static str,
    total: u64,
    done: u64,
    start: Instant,
    shown: Option<Progress>,
}

impl DelayedProgress {
    /// Starts at 0 of `total`, which is 0 if the caller does not know it.
    pub fn new(label: &'static str, total: u64) -> Self {
        Self { label, total, done: 0, start: Instant::now(), shown: None }
    }

    /// Counts `by` more bytes as done.
    pub fn advance(&mut self, by: u64) {
        self.done = self.done.saturating_add(by);
        if self.shown.is_none() && self.start.elapsed() >= SHOW_AFTER {
            self.shown = Some(Progress::new(self.label, Unit::Bytes, self.total));
        }
        if let Some(shown) = &self.shown {
            shown.set(self.done);
        }
    }

    /// Removes the bar, if there is one, and prints the last line.
    pub fn finish(self) {
        if let Some(shown) = self.shown {
            shown.finish();
        }
    }
}

/// Prints a line on standard error. Ignores a closed standard error.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn bar(label: &'static str, unit: Unit, total: u64) -> ProgressBar {
    let template = match unit {
        Unit::Bytes => {
            "{msg:<22} [{bar:30}] {binary_bytes} of {binary_total_bytes}, \
                        {binary_bytes_per_sec}, {eta} left"
        }
        Unit::Items => "{msg:<22} [{bar:30}] {pos} of {len}, {eta} left",
    };
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ");
    ProgressBar::new(total).with_style(style).with_message(label)
}
