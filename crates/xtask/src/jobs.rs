//! Runs several programs at a time, because they do not only wait for the processor.

use std::collections::VecDeque;
use std::num::NonZero;
use std::process::Command;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::excerpt;
use crate::steps::{self, lock};
use crate::workspace::Outcome;

/// The most programs at a time, because a program that runs a machine takes some GiB of memory.
const MOST: usize = 4;

/// After this time without a line, the jobs that run are named: if one of them never ends, a reader
/// of the output knows which.
const SILENCE: Duration = Duration::from_secs(300);

/// Jobs that are named with their times at the end.
const LONGEST: usize = 8;

/// A program that is to run.
pub struct Job {
    name: String,
    command: Command,
}

impl Job {
    /// A job; its name is shown when it begins and when it ends.
    pub fn new(name: impl Into<String>, command: Command) -> Self {
        Self { name: name.into(), command }
    }
}

/// The number of jobs that keeps all processors busy: one for each, and `more`, because a job may
/// wait for something else than the processor.
pub fn for_each_processor(more: usize) -> usize {
    thread::available_parallelism().map_or(1, NonZero::get) + more
}

/// Runs all jobs, `at_once` at a time. It shows the output of the first unfinished job as it comes,
/// and that of the others afterwards, so that lines of different machines do not mix. The last line
/// names the jobs that took longest.
///
/// # Errors
/// Names the jobs that failed; the others ran all the same.
pub fn run(jobs: Vec<Job>, at_once: usize) -> Outcome {
    let at_once = at_once.min(MOST);
    let (shown, queue): (Vec<_>, VecDeque<_>) = jobs.into_iter().map(with_lines).unzip();
    let queue = Mutex::new(queue);
    let failed = Mutex::new(Vec::new());
    let running = Mutex::new(Vec::new());
    let times = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some((job, lines)) = next(&queue) {
                    let name = job.name.clone();
                    let start = Instant::now();
                    add(&running, (start, name.clone()));
                    if !perform(job, &lines) {
                        add(&failed, name.clone());
                    }
                    lock(&running).retain(|(_, other)| *other != name);
                    add(&times, (start.elapsed(), name));
                }
            });
        }
        for lines in shown {
            show(&lines, SILENCE, || still_running(&lock(&running)));
        }
    });
    println!("{}", longest(times.into_inner().unwrap_or_else(PoisonError::into_inner)));
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if failed.is_empty() { Ok(()) } else { Err(failed.join(", ")) }
}

fn with_lines(job: Job) -> (Receiver<String>, (Job, Sender<String>)) {
    let (sender, receiver) = mpsc::channel();
    (receiver, (job, sender))
}

fn next<T>(queue: &Mutex<VecDeque<T>>) -> Option<T> {
    lock(queue).pop_front()
}

fn add<T>(list: &Mutex<Vec<T>>, value: T) {
    lock(list).push(value);
}

/// Shows the lines of a job, and `otherwise` whenever there was none for the time.
fn show(lines: &Receiver<String>, time: Duration, otherwise: impl Fn() -> String) {
    loop {
        match lines.recv_timeout(time) {
            Ok(line) => println!("{line}"),
            Err(RecvTimeoutError::Timeout) => println!("{}", otherwise()),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
}

/// The line that names the jobs that have not ended.
fn still_running(jobs: &[(Instant, String)]) -> String {
    let word =
        |(start, name): &(Instant, String)| format!("{name} {} s", start.elapsed().as_secs());
    format!("still running: {}", jobs.iter().map(word).collect::<Vec<_>>().join(", "))
}

/// The line that names the jobs that took longest.
fn longest(mut times: Vec<(Duration, String)>) -> String {
    times.sort_by(|a, b| b.cmp(a));
    let word = |(time, name): &(Duration, String)| format!("{name} {} s", time.as_secs());
    let words: Vec<String> = times.iter().take(LONGEST).map(word).collect();
    format!("{}{}", excerpt::LONGEST, words.join(", "))
}

/// Runs one job; true if it went well.
fn perform(job: Job, lines: &Sender<String>) -> bool {
    let start = Instant::now();
    // The receiver lives until all jobs have ended.
    let say = |line: String| drop(lines.send(line));
    say(format!("begins: {}", job.name));
    let outcome = steps::pipe(job.command, Duration::MAX, |_| (), say);
    let seconds = start.elapsed().as_secs_f64();
    match outcome {
        Ok(true) => say(format!("succeeded after {seconds:.0} s: {}", job.name)),
        Ok(false) => say(format!("failed: {} after {seconds:.0} s", job.name)),
        Err(ref error) => say(format!("failed: {}: {error}", job.name)),
    }
    outcome == Ok(true)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn shell(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job::new(name, command)
    }

    #[test]
    fn every_job_runs_and_those_that_fail_are_named() {
        let folder = std::env::temp_dir().join(format!("vellum-jobs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let touch = |name: &str, end: &str| {
            shell(name, &format!("touch {}/{name}; exit {end}", folder.display()))
        };
        let names = ["a", "b", "c", "d", "e", "f"];
        let jobs = names.map(|name| touch(name, if "be".contains(name) { "1" } else { "0" }));
        let error = run(jobs.into(), 2).unwrap_err();
        assert!(error == "b, e" || error == "e, b", "{error}");
        assert!(names.iter().all(|name| folder.join(name).exists()));
        std::fs::remove_dir_all(folder).unwrap();
        assert_eq!(run(Vec::new(), 1), Ok(()));
    }

    #[test]
    fn the_longest_jobs_are_named() {
        let time = |number: u64| (Duration::from_secs(number), format!("job {number}"));
        let named = longest((1..100).map(time).collect());
        assert!(named.starts_with("longest: job 99 99 s, job 98 98 s, "), "{named}");
        assert!(named.ends_with(", job 92 92 s"), "{named}");
    }

    #[test]
    fn a_silent_job_is_named() {
        let (sender, lines) = mpsc::channel();
        // The channel ends after the second time.
        let times = Cell::new(0);
        let sender = Cell::new(Some(sender));
        show(&lines, Duration::from_millis(1), || {
            times.set(times.get() + 1);
            sender.set(sender.take().filter(|_| times.get() < 2));
            String::new()
        });
        assert_eq!(times.get(), 2);
        assert_eq!(still_running(&[(Instant::now(), "a".to_owned())]), "still running: a 0 s");
    }

    #[test]
    fn lines_of_a_job_stay_together() {
        let (sender, lines) = mpsc::channel();
        assert!(perform(shell("a", "echo 1; echo 2 >&2; echo 3"), &sender));
        drop(sender);
        let lines: Vec<String> = lines.into_iter().collect();
        assert_eq!(lines[..4], ["begins: a", "1", "2", "3"]);
        let last = &lines[4];
        assert!(last.starts_with("succeeded after ") && last.ends_with(" s: a"), "{lines:?}");
    }
}
