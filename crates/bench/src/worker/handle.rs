//! The parent's handle of one worker.

use std::collections::VecDeque;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};

use super::Launcher;
use super::message::{GREETING, Request, Response, Usage};
use super::pipeline::Stage;
use super::web_client::Site;
use super::whole_file::{LoadMethod, Weight};
use crate::engine::Setting;
use crate::machine::MemoryCgroup;
use crate::machine::memory_cgroup::MemoryUse;
use crate::workload::{Measured, Plan, Workload};

/// How long a worker may take to start, and to open or close an engine.
const SHORT: Duration = Duration::from_secs(120);

/// How long it may load, settle or check. Engines that compact are slow under a limit.
const LONG: Duration = Duration::from_secs(1800);

/// How many lines of standard error this keeps.
const LAST_WORDS: usize = 5;

/// The progress of a worker at some moment of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moment {
    /// Since the request of the run.
    pub seconds: f64,
    /// The resources that the worker had used by then.
    pub usage: Usage,
}

/// A process that runs an engine. It is killed on drop.
pub struct Worker {
    name: String,
    child: Child,
    input: ChildStdin,
    output: Receiver<String>,
    last_words: Arc<Mutex<VecDeque<String>>>,
    /// The thread that reads them, to the end of the stream.
    hearer: thread::JoinHandle<()>,
    /// Dropped after the child: only a group without processes can be removed.
    group: Option<MemoryCgroup>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Worker({}, process {})", self.name, self.child.id())
    }
}

impl Worker {
    /// Starts a process, within `limit` bytes of memory if there is a limit. Errors call it `name`.
    /// It ends when the thread that has started it ends.
    ///
    /// # Errors
    /// If it does not come up, or the limit cannot be set.
    pub fn start(launcher: &Launcher, name: &str, limit: Option<u64>) -> Result<Worker> {
        Worker::of(launcher.command(), name, limit)
    }

    pub(super) fn of(mut command: Command, name: &str, limit: Option<u64>) -> Result<Worker> {
        let group = limit.map(MemoryCgroup::create).transpose()?;
        let start = || format!("starting the worker '{name}'");
        let mut child = command.spawn().with_context(start)?;
        let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(errors)) = streams else {
            bail!("{}: no pipes", start());
        };
        let (lines, received) = channel();
        thread::spawn(move || each_line(output, |line| lines.send(line).is_ok()));
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        let (heard, speaker) = (Arc::clone(&last_words), name.to_owned());
        let hearer = thread::spawn(move || each_line(errors, |line| hear(&speaker, line, &heard)));
        let name = name.to_owned();
        let mut worker = Worker { name, child, input, output: received, last_words, hearer, group };
        if let Some(group) = &worker.group {
            group.add(worker.child.id())?;
        }
        let end = Instant::now() + SHORT;
        while !worker.receive("starting", end)?.ends_with(GREETING) {}
        Ok(worker)
    }

    /// Opens an engine.
    ///
    /// # Errors
    /// Errors of the engine. A worker that died or hangs, with its last output. This holds for all
    /// requests.
    pub fn open(&mut self, engine: &str, setting: &Setting) -> Result<()> {
        let request = Request::Open { engine: engine.to_owned(), setting: setting.clone() };
        self.do_it(&request, SHORT)
    }

    /// Fills the engine.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn load(&mut self, workload: &Workload) -> Result<()> {
        self.do_it(&Request::Load(workload.clone()), LONG)
    }

    /// Writes everything and finishes the engine's pending work.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn settle(&mut self) -> Result<()> {
        self.do_it(&Request::Settle, LONG)
    }

    /// Closes the engine.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn close(&mut self) -> Result<()> {
        self.do_it(&Request::Close, LONG)
    }

    /// Runs operations.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn run(&mut self, workload: &Workload, plan: &Plan) -> Result<Measured> {
        self.send(&Request::Run(workload.clone(), plan.clone()))?;
        let answer = self.receive("running", Instant::now() + allowed(plan))?;
        self.ran(&answer)
    }

    /// Accesses pages of the file that the worker holds, at random.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn access(&mut self, plan: &Plan) -> Result<Measured> {
        self.send(&Request::Access(plan.clone()))?;
        let answer = self.receive("accessing pages", Instant::now() + allowed(plan))?;
        self.ran(&answer)
    }

    /// Runs operations, and samples the resources of the process at the interval `every`.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn run_watched(
        &mut self,
        workload: &Workload,
        plan: &Plan,
        every: Duration,
    ) -> Result<(Measured, Vec<Moment>)> {
        let start = Instant::now();
        let mut moments = vec![Moment { seconds: 0.0, usage: self.seen() }];
        self.send(&Request::Run(workload.clone(), plan.clone()))?;
        let end = start + allowed(plan);
        loop {
            let next = start + every * u32::try_from(moments.len()).unwrap_or(u32::MAX);
            match self.output.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(answer) => return Ok((self.ran(&answer)?, moments)),
                Err(RecvTimeoutError::Timeout) if next < end => {
                    let seconds = start.elapsed().as_secs_f64();
                    moments.push(Moment { seconds, usage: self.seen() });
                }
                Err(error) => return Err(self.lost("running", error)),
            }
        }
    }

    /// Checks the conditions that must hold after runs; returns their names.
    ///
    /// # Errors
    /// As [`open`](Worker::open), and a condition that does not hold.
    pub fn check(&mut self, workload: &Workload) -> Result<Vec<String>> {
        match self.ask(&Request::Check(workload.clone()), LONG)? {
            Response::Checked(what) => Ok(what),
            other => Err(self.unexpected(&other)),
        }
    }

    /// The resources of the process, and of its group if it has a limit.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn usage(&mut self) -> Result<(Usage, Option<MemoryUse>)> {
        match self.ask(&Request::Usage, SHORT)? {
            Response::Used(usage) => {
                Ok((usage, self.group.as_ref().map(MemoryCgroup::usage).transpose()?))
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// Has it begin to get a file. [`held`](Worker::held) waits for the end.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn begin_hold(&mut self, method: &LoadMethod, path: &Path) -> Result<()> {
        self.send(&Request::Hold(method.clone(), path.to_owned()))
    }

    /// The sum of the file that it has.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn held(&mut self) -> Result<u64> {
        let answer = self.receive("getting a file", Instant::now() + LONG)?;
        match self.understand(&answer)? {
            Response::Held(sum) => Ok(sum),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Has it begin to fetch pages from a web server. [`fetched`](Worker::fetched) waits for the
    /// end.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn begin_fetch(&mut self, site: &Site, plan: &Plan) -> Result<()> {
        self.send(&Request::Fetch(site.clone(), plan.clone()))
    }

    /// How many pages it has fetched, as planned.
    ///
    /// # Errors
    /// As [`open`](Worker::open), and a page that is not as it should be.
    pub fn fetched(&mut self, plan: &Plan) -> Result<Measured> {
        let answer = self.receive("fetching pages", Instant::now() + allowed(plan))?;
        self.ran(&answer)
    }

    /// Makes it a step of a pipeline. [`staged`](Worker::staged) waits for the end.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn begin_stage(&mut self, stage: &Stage) -> Result<()> {
        self.send(&Request::Stage(stage.clone()))
    }

    /// Waits for the end of the pipeline.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn staged(&mut self) -> Result<()> {
        let answer = self.receive("being a step of a pipeline", Instant::now() + SHORT)?;
        match self.understand(&answer)? {
            Response::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Its memory.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn weigh(&mut self) -> Result<Weight> {
        match self.ask(&Request::Weigh, SHORT)? {
            Response::Weighs(weight) => Ok(weight),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Has it drop the file.
    ///
    /// # Errors
    /// As [`open`](Worker::open).
    pub fn let_go(&mut self) -> Result<()> {
        self.do_it(&Request::LetGo, SHORT)
    }

    /// Makes it a cleaner, which gets no further requests.
    pub(super) fn keep(&mut self) -> Result<()> {
        self.do_it(&Request::Keep, SHORT)
    }

    /// The present resources of the process, without a request.
    pub fn seen(&self) -> Usage {
        Usage::of(&self.child.id().to_string())
    }

    /// The number of its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    fn do_it(&mut self, request: &Request, patience: Duration) -> Result<()> {
        match self.ask(request, patience)? {
            Response::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    fn ask(&mut self, request: &Request, patience: Duration) -> Result<Response> {
        self.send(request)?;
        let answer = self.receive(verb(request), Instant::now() + patience)?;
        self.understand(&answer)
    }

    fn send(&mut self, request: &Request) -> Result<()> {
        let line = serde_json::to_string(request)? + "\n";
        // If the worker has died, the code below finds out why. The broken pipe does not tell.
        match self.input.write_all(line.as_bytes()) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.lost(verb(request), RecvTimeoutError::Disconnected)),
        }
    }

    fn receive(&mut self, doing: &str, end: Instant) -> Result<String> {
        let patience = end.saturating_duration_since(Instant::now());
        self.output.recv_timeout(patience).map_err(|error| self.lost(doing, error))
    }

    fn ran(&mut self, answer: &str) -> Result<Measured> {
        match self.understand(answer)? {
            Response::Ran(measured) => Ok(measured),
            other => Err(self.unexpected(&other)),
        }
    }

    fn understand(&mut self, answer: &str) -> Result<Response> {
        match serde_json::from_str(answer) {
            Ok(Response::Failed(why)) => {
                Err(anyhow!(why).context(format!("worker '{}'", self.name)))
            }
            Ok(response) => Ok(response),
            Err(error) => {
                Err(anyhow!(error).context(format!("the worker '{}' said '{answer}'", self.name)))
            }
        }
    }

    fn unexpected(&self, response: &Response) -> anyhow::Error {
        anyhow!("the worker '{}' answered something else: {response:?}", self.name)
    }

    /// The error for a worker that does not answer.
    fn lost(&mut self, doing: &str, error: RecvTimeoutError) -> anyhow::Error {
        let hangs = error == RecvTimeoutError::Timeout;
        let ended = if hangs { Ok(None) } else { self.wait() };
        // Kills it, because a late answer would be taken for the answer to another request.
        let _ = self.child.kill();
        let killed = self.group.as_ref().and_then(|group| group.usage().ok());
        let mut text = match ended {
            _ if hangs => format!("the worker '{}' hangs, {doing}", self.name),
            Ok(Some(status)) => format!("the worker '{}' died, {doing}: {status}", self.name),
            _ => format!("the worker '{}' is silent, {doing}", self.name),
        };
        if killed.is_some_and(|usage| usage.killed > 0) {
            text += "; killed by the kernel, because it needs more memory than its limit";
        }
        let words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        if !words.is_empty() {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            text += &format!("; its last words: {}", words.join(" | "));
        }
        anyhow!(text)
    }

    /// Waits for a worker that has closed its output, so that it is about to end.
    fn wait(&mut self) -> std::io::Result<Option<std::process::ExitStatus>> {
        let mut status = None;
        for _ in 0..500 {
            status = self.child.try_wait()?;
            // A child of the worker may have the other stream for longer.
            if status.is_some() && self.hearer.is_finished() {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(status)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The worker may have ended. Another error cannot be handled.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How long a run may take. Threads end between operations, which may be long.
fn allowed(plan: &Plan) -> Duration {
    Duration::from_secs_f64(plan.seconds * 4.0) + SHORT
}

fn verb(request: &Request) -> &'static str {
    match request {
        Request::Open { .. } => "opening",
        Request::Load(_) => "loading",
        Request::Settle => "settling",
        Request::Run(..) => "running",
        Request::Check(_) => "checking",
        Request::Usage => "reporting its usage",
        Request::Close => "closing",
        Request::Hold(..) => "getting a file",
        Request::Access(_) => "accessing pages",
        Request::Fetch(..) => "fetching pages",
        Request::Stage(_) => "being a step of a pipeline",
        Request::Weigh => "weighing",
        Request::LetGo => "letting go",
        Request::Keep => "keeping",
    }
}

/// Calls `take` with each line, until there are no more or it returns false.
fn each_line(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    while stream.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        line.clear();
        if !take(text) {
            return;
        }
    }
}

/// Passes on a line of standard error, and keeps it.
fn hear(speaker: &str, line: String, last_words: &Mutex<VecDeque<String>>) -> bool {
    eprintln!("{speaker}: {line}");
    let mut words = last_words.lock().unwrap_or_else(PoisonError::into_inner);
    if words.len() == LAST_WORDS {
        words.pop_front();
    }
    words.push_back(line);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Worker {
        let script = format!("echo noise; echo {GREETING}; {script}");
        Worker::start(&Launcher::new("sh".into(), &["-c", &script]), "shell", None).unwrap()
    }

    #[test]
    fn a_worker_that_hangs_is_an_error_and_is_killed() {
        let mut worker = shell("exec sleep 100");
        let error = worker.receive("dreaming", Instant::now() + Duration::from_millis(50));
        assert_eq!(error.unwrap_err().to_string(), "the worker 'shell' hangs, dreaming");
        assert!(!worker.child.wait().unwrap().success());
    }

    #[test]
    fn a_worker_that_dies_says_how_and_why() {
        let mut worker = shell("read request; echo one >&2; echo two words >&2; exit 3");
        let text = worker.settle().unwrap_err().to_string();
        assert!(text.contains("the worker 'shell' died, settling: exit status: 3"), "{text}");
        assert!(text.ends_with("its last words: one | two words"), "{text}");
        // The worker is still dead.
        assert!(worker.usage().unwrap_err().to_string().contains("died, reporting"));
    }

    #[test]
    fn an_answer_that_is_none_is_told() {
        let mut worker = shell("read request; echo hm; read request; echo '\"Done\"'");
        let error = worker.settle().unwrap_err().to_string();
        assert_eq!(error, "the worker 'shell' said 'hm'");
        let error = worker.usage().unwrap_err().to_string();
        assert_eq!(error, "the worker 'shell' answered something else: Done");
    }

    #[test]
    fn a_program_that_is_no_worker_is_told() {
        let launcher = Launcher::new("sh".into(), &["-c", "echo I am busy; echo go away >&2"]);
        let error = Worker::start(&launcher, "shell", None).unwrap_err().to_string();
        assert!(error.contains("died, starting: exit status: 0"), "{error}");
        let launcher = Launcher::new("no-such-program".into(), &[]);
        let error = Worker::start(&launcher, "shell", None).unwrap_err().to_string();
        assert_eq!(error, "starting the worker 'shell'");
    }
}
