//! The progress of an experiment: a bar on a terminal, nothing elsewhere.

use std::cell::RefCell;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The progress of one experiment, and what was seen of the machine meanwhile.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// How far processors were from each other
    /// ([`processor_distance`](crate::machine::processor_distance)).
    distances: RefCell<Vec<f64>>,
}

impl Progress {
    /// A bar on the standard error stream, if that is a terminal.
    pub fn shown(experiment: &str) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        let template = "{prefix:>10} [{bar:30}] {percent:>3} %  {elapsed}  {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(experiment.to_owned());
        bar.enable_steady_tick(std::time::Duration::from_millis(250));
        Progress { bar, distances: RefCell::default() }
    }

    /// Shows nothing.
    pub fn hidden() -> Progress {
        Progress { bar: ProgressBar::hidden(), distances: RefCell::default() }
    }

    /// Shows that the experiment is at `step` of `steps`, and that the step is `what`.
    pub fn at(&self, step: usize, steps: usize, what: &str) {
        self.bar.set_length(steps.max(1) as u64);
        self.bar.set_position(step as u64);
        self.bar.set_message(what.to_owned());
    }

    /// Shows work of unknown length.
    pub fn doing(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }

    /// Measures how far processors are from each other, between two samples.
    pub fn note_distance(&self) {
        self.distances.borrow_mut().extend(crate::machine::processor_distance());
    }

    /// The lowest, the median and the highest of these distances, in nanoseconds.
    pub fn distances(&self) -> Option<[f64; 3]> {
        let mut distances = self.distances.borrow().clone();
        distances.sort_by(f64::total_cmp);
        Some([*distances.first()?, distances[distances.len() / 2], *distances.last()?])
    }
}
