//! The progress of an experiment: a bar on a terminal, nothing elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The progress of one experiment.
#[derive(Debug)]
pub struct Progress(ProgressBar);

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
        Progress(bar)
    }

    /// Shows nothing.
    pub fn hidden() -> Progress {
        Progress(ProgressBar::hidden())
    }

    /// Shows that the experiment is at `step` of `steps`, and that the step is `what`.
    pub fn at(&self, step: usize, steps: usize, what: &str) {
        self.0.set_length(steps.max(1) as u64);
        self.0.set_position(step as u64);
        self.0.set_message(what.to_owned());
    }

    /// Shows work of unknown length.
    pub fn doing(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.0.finish_and_clear();
    }
}
