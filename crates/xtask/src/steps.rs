//! Runs a list of steps one after the other, each with a progress line and its time. While a step
//! runs that leaves processors idle, others may use them ([`Step::meanwhile`]).
//!
//! If a step fails, this module shows the important part of its output, and keeps all of it in a
//! file; on demand it shows the whole output of every step. It sums the results of libtest over all
//! steps. A step that fails without a failed test (a lint, a compile error, a test binary killed by
//! a signal) counts as one failure, so that the closing line never claims a false success. The end
//! names all failures once more, for readers who see only that.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::excerpt;
use crate::workspace::Outcome;

/// How often a program is killed with all that it has started, before the rest is left alone.
const KILLS: u32 = 1000;
/// The time between two kills, in which processes may end.
const KILL_PAUSE: Duration = Duration::from_millis(10);
/// So many passes in a row find nothing to kill before the last kill counts as done. The kernel
/// shows no variables of a process while that becomes another program, so one pass may miss it.
const QUIET_PASSES: u32 = 10;

/// Named work of one step.
pub struct Step {
    name: &'static str,
    action: Action,
    /// What runs while it runs, one after the other.
    meanwhile: Vec<(&'static str, Command)>,
}

enum Action {
    Program(Command),
    Function(Box<dyn FnOnce() -> Outcome>),
}

impl Step {
    /// A step that runs a program and succeeds when that does.
    pub fn program(name: &'static str, command: Command) -> Self {
        Self { name, action: Action::Program(command), meanwhile: Vec::new() }
    }

    /// A step that calls a function of this program.
    pub fn function(name: &'static str, work: impl FnOnce() -> Outcome + 'static) -> Self {
        Self { name, action: Action::Function(Box::new(work)), meanwhile: Vec::new() }
    }

    /// Adds a step that runs a program while this one runs, with what this one leaves idle of the
    /// processors.
    pub fn meanwhile(mut self, name: &'static str, command: &Command) -> Self {
        self.meanwhile.push((name, idle(command)));
        self
    }
}

/// The same command, which runs only where no other program wants to.
fn idle(command: &Command) -> Command {
    let mut idle = Command::new("chrt");
    idle.args(["--idle", "0"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => idle.env(name, value),
            None => idle.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        idle.current_dir(folder);
    }
    idle
}

/// When a step has ended, the program that runs meanwhile is made as others after these pauses.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Lets a program, and all that it has started, run as others do.
fn hurry(program: u32) {
    for process in family(program) {
        let mut chrt = Command::new("chrt");
        chrt.args(["--all-tasks", "--other", "--pid", "0", &process.to_string()]);
        chrt.stdout(Stdio::null()).stderr(Stdio::null()).status().ok();
    }
}

/// Locks a value, also after a panic of another thread that held it.
pub fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tests counted over all steps.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Tally {
    passed: u64,
    failed: u64,
}

/// A step that has ended.
struct Done {
    ok: bool,
    lines: Vec<String>,
    seconds: f64,
}

/// How to run the steps.
#[derive(Clone, Copy)]
pub struct How<'a> {
    /// Shows the whole output.
    pub verbose: bool,
    /// The time that the program of a step may take; then it is killed, and the step has failed.
    pub limit: Duration,
    /// The folder that keeps the output of failed steps.
    pub kept: &'a Path,
}

/// What is known of the steps so far.
struct Report<'a> {
    count: usize,
    begun: usize,
    how: How<'a>,
    tally: Tally,
    failures: Vec<&'static str>,
    reasons: Vec<String>,
}

/// Runs all steps, even after one has failed, and prints `N passed, N failed` as the last line.
///
/// # Errors
/// Names the steps that failed.
pub fn run(steps: Vec<Step>, how: How<'_>) -> Outcome {
    let count = steps.iter().map(|step| 1 + step.meanwhile.len()).sum();
    let (tally, failures, reasons) = (Tally::default(), Vec::new(), Vec::new());
    let mut report = Report { count, begun: 0, how, tally, failures, reasons };
    let start = Instant::now();
    for Step { name, action, meanwhile } in steps {
        report.begin(name)?;
        let running = Mutex::new(None);
        let (done, others) = thread::scope(|scope| {
            let perform_idle =
                |(name, command)| (name, timed(|| perform_idle(command, how, &running)));
            let others =
                scope.spawn(move || meanwhile.into_iter().map(perform_idle).collect::<Vec<_>>());
            let done = timed(|| perform(action, how));
            // They hardly ran if other programs of this machine wanted its processors. Again and
            // again, because a program takes its idle priority only after it has begun, and leaves
            // it to what it starts.
            let mut pause = FIRST_PAUSE;
            while !others.is_finished() {
                let program = *lock(&running);
                program.into_iter().for_each(hurry);
                thread::sleep(pause);
                pause = LONGEST_PAUSE.min(2 * pause);
            }
            (done, others.join())
        });
        report.end(name, &done);
        for (name, done) in others.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            report.begin(name)?;
            report.end(name, &done);
        }
    }
    for reason in &report.reasons {
        println!("{reason}");
    }
    let (seconds, failures) = (start.elapsed().as_secs_f64(), report.failures);
    println!("{} of {count} steps ok, {seconds:.1} s", count - failures.len());
    // The error goes to standard error first, because the tally must be the last line of standard
    // output.
    let outcome = if failures.is_empty() { Ok(()) } else { Err(failures.join(", ")) };
    println!("{} passed, {} failed", report.tally.passed, report.tally.failed);
    outcome.map_err(|names| format!("failed: {names}"))
}

impl Report<'_> {
    fn begin(&mut self, name: &str) -> Outcome {
        self.begun += 1;
        print!("[{}/{}] {name:<24}", self.begun, self.count);
        if self.how.verbose {
            println!();
        }
        std::io::stdout().flush().map_err(|error| error.to_string())
    }

    fn end(&mut self, name: &'static str, done: &Done) {
        let Done { ok, ref lines, seconds } = *done;
        if !ok && !self.how.verbose {
            show(name, lines, self.how.kept);
        }
        println!("{} {seconds:7.1} s", if ok { "ok    " } else { "FAILED" });
        if !self.how.verbose {
            for line in lines.iter().filter(|line| line.starts_with(excerpt::LONGEST)) {
                println!("    {line}");
            }
        }
        let counted = count_tests(lines);
        self.tally.passed += counted.passed;
        self.tally.failed += counted.failed;
        if !ok {
            self.failures.push(name);
            self.tally.failed += u64::from(counted.failed == 0);
            self.reasons.extend(excerpt::causes(lines).map(|line| format!("{name}: {line}")));
        }
    }
}

fn timed(perform: impl FnOnce() -> (bool, Vec<String>)) -> Done {
    let start = Instant::now();
    let (ok, lines) = perform();
    Done { ok, lines, seconds: start.elapsed().as_secs_f64() }
}

fn perform(action: Action, how: How<'_>) -> (bool, Vec<String>) {
    match action {
        Action::Program(command) => perform_program(command, how, |_| ()),
        Action::Function(work) => match work() {
            Ok(()) => (true, Vec::new()),
            Err(reason) => (false, vec![reason]),
        },
    }
}

/// Runs a program while another step runs, and notes it while it runs.
fn perform_idle(
    command: Command,
    how: How<'_>,
    running: &Mutex<Option<u32>>,
) -> (bool, Vec<String>) {
    let begun = |program| *lock(running) = Some(program);
    let done = perform_program(command, How { verbose: false, ..how }, begun);
    *lock(running) = None;
    done
}

fn perform_program(command: Command, how: How<'_>, begun: impl FnOnce(u32)) -> (bool, Vec<String>) {
    program(command, how, begun).unwrap_or_else(|reason| (false, vec![reason]))
}

/// The important part of a failed step's output, and the file that has all of it.
fn show(name: &str, lines: &[String], kept: &Path) {
    println!();
    for line in excerpt::of(lines) {
        println!("    {line}");
    }
    let file = kept.join(format!("{}.txt", name.replace(' ', "-")));
    let written = fs::create_dir_all(kept).and_then(|()| fs::write(&file, lines.join("\n")));
    match written {
        Ok(()) => println!("    all of it: {}", file.display()),
        Err(error) => println!("    all of it could not be kept, {}: {error}", file.display()),
    }
}

/// Runs a program; returns its success and its lines.
fn program(
    command: Command,
    how: How<'_>,
    begun: impl FnOnce(u32),
) -> Outcome<(bool, Vec<String>)> {
    let mut lines = Vec::new();
    let is_success = pipe(command, how.limit, begun, |line| {
        if how.verbose {
            println!("    {line}");
        }
        lines.push(line);
    })?;
    Ok((is_success, lines))
}

/// Runs a program with both of its output streams in one pipe, and hands on each line as it comes;
/// true if it succeeds. Tells `begun` its number first. When it has taken as long as the limit, it
/// is killed with all that it has started, and the last line says so.
///
/// # Errors
/// If it does not start.
pub fn pipe(
    mut command: Command,
    limit: Duration,
    begun: impl FnOnce(u32),
    mut each_line: impl FnMut(String),
) -> Outcome<bool> {
    let describe = |error: std::io::Error| format!("the program does not start: {error}");
    let (reader, writer) = std::io::pipe().map_err(describe)?;
    let mark = new_mark();
    command.stdin(Stdio::null()).env(MARK, &mark);
    command.stdout(writer.try_clone().map_err(describe)?).stderr(writer);
    let mut child = command.spawn().map_err(describe)?;
    // The command owns the writing ends of the pipe. While it exists, the pipe does not end.
    drop(command);
    begun(child.id());
    let (sender, lines) = mpsc::channel();
    // This thread is not joined: a program that escapes the kill may keep the pipe open.
    thread::spawn(move || {
        let lines = BufReader::new(reader).split(b'\n').map_while(Result::ok);
        for line in lines {
            let line = String::from_utf8_lossy(&line).into_owned();
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let start = Instant::now();
    loop {
        match lines.recv_timeout(limit.saturating_sub(start.elapsed())) {
            Ok(line) => each_line(line),
            Err(RecvTimeoutError::Disconnected) => {
                return Ok(child.wait().map_err(describe)?.success());
            }
            Err(RecvTimeoutError::Timeout) => break,
        }
    }
    kill(&mut child, &mark);
    lines.try_iter().for_each(&mut each_line);
    each_line(format!("failed: not at its end after {} s, so it was killed", limit.as_secs()));
    Ok(false)
}

/// The variable that tells which program a process belongs to, also if the parent of the process
/// has ended, or the process has a session of its own.
const MARK: &str = "XTASK_PROGRAM";

/// A value of [`MARK`] for a program that starts now: that of this process, and a part of its own.
fn new_mark() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let outer = std::env::var(MARK).unwrap_or_default();
    format!("{outer}/{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The processes with a mark, or with one that begins with it.
fn marked(mark: &str) -> Vec<u32> {
    let has_mark = |process: &u32| {
        let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        let mut values = variables.split(|byte| *byte == 0).filter_map(|variable| {
            variable
                .strip_prefix(MARK.as_bytes())?
                .strip_prefix(b"=")?
                .strip_prefix(mark.as_bytes())
        });
        values.any(|rest| matches!(rest, [] | [b'/', ..]))
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.filter(has_mark).collect()
}

/// Whether a process exists that has not ended. If it has ended, its parent may not know it yet.
fn runs(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
}

/// Kills a program and all that it has started.
fn kill(child: &mut Child, mark: &str) {
    let mut quiet = 0;
    // Several times, because a process may start another one before it is killed.
    for _ in 0..KILLS {
        let all = family(child.id()).into_iter().chain(marked(mark));
        let numbers: Vec<String> = all.filter(|it| runs(*it)).map(|it| it.to_string()).collect();
        if numbers.is_empty() {
            quiet += 1;
            if quiet == QUIET_PASSES {
                break;
            }
        } else {
            quiet = 0;
            let mut kill = Command::new("sh");
            kill.args(["-c", "kill -9 \"$@\"", "kill"]).args(numbers);
            kill.stderr(Stdio::null()).status().ok();
        }
        thread::sleep(KILL_PAUSE);
    }
    child.kill().ok();
    child.wait().ok();
}

/// A program and all that it has started, as far as their parents live.
fn family(program: u32) -> Vec<u32> {
    let mut family = vec![program];
    let mut at = 0;
    while let Some(&parent) = family.get(at) {
        family.extend(children(parent));
        at += 1;
    }
    family
}

/// The children of all threads of a process.
fn children(process: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let lists =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<_>>())
        .collect()
}

/// Sums libtest's closing lines: `test result: ok. 12 passed; 0 failed; 1 ignored; ...`.
fn count_tests(lines: &[String]) -> Tally {
    let mut sum = Tally::default();
    for line in lines {
        let Some(result) = line.trim_start().strip_prefix("test result: ") else {
            continue;
        };
        for part in result.split(&['.', ';'][..]) {
            let mut words = part.split_whitespace();
            let number = words.next().and_then(|word| word.parse::<u64>().ok());
            match (number, words.next()) {
                (Some(number), Some("passed")) => sum.passed += number,
                (Some(number), Some("failed")) => sum.failed += number,
                _ => {}
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long these tests wait for a process. The machine may be busy.
    const PATIENCE: Duration = Duration::from_secs(200);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn quiet() -> How<'static> {
        How { verbose: false, limit: Duration::from_secs(600), kept: Path::new("/nowhere") }
    }

    #[test]
    fn results_of_several_test_binaries_are_summed() {
        let lines = [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out",
            "the test result: ok. 99 passed",
        ];
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_string()).collect();
        assert_eq!(count_tests(&lines), Tally { passed: 13, failed: 2 });
    }

    #[test]
    fn both_streams_are_kept() {
        let (ok, mut lines) = program(shell("echo out; echo err >&2"), quiet(), |_| ()).unwrap();
        lines.sort();
        assert!(ok);
        assert_eq!(lines, ["err", "out"]);
    }

    #[test]
    fn a_failing_program_fails_its_step() {
        assert!(!program(shell("exit 3"), quiet(), |_| ()).unwrap().0);
        assert!(!program(shell("kill -9 $$"), quiet(), |_| ()).unwrap().0);
        assert!(program(Command::new("a-program-that-does-not-exist"), quiet(), |_| ()).is_err());
    }

    /// The lines of a script that does not end by itself, with that of its failure at the end. On a
    /// busy machine the script may be killed before it has said this many lines: then it runs again
    /// with twice the time.
    fn lines_until_the_limit(script: &str, limit: Duration, says: usize) -> Vec<String> {
        let start = Instant::now();
        let mut limit = limit;
        loop {
            let began = Instant::now();
            let (ok, lines) = program(shell(script), How { limit, ..quiet() }, |_| ()).unwrap();
            assert!(!ok && began.elapsed() < limit + PATIENCE, "{lines:?}");
            let last = lines.last().unwrap();
            assert!(last.starts_with("failed: not at its end after"), "{lines:?}");
            if lines.len() > says {
                return lines;
            }
            assert!(start.elapsed() < PATIENCE, "it says only {lines:?}");
            limit *= 2;
        }
    }

    #[test]
    fn a_program_over_its_limit_is_killed_with_all_that_it_started() {
        let script = "echo begun; sleep 1000 & echo $!; (sh -c 'sleep 1000; true'); true";
        let lines = lines_until_the_limit(script, Duration::from_millis(300), 2);
        assert!(lines.len() == 3 && lines[0] == "begun", "{lines:?}");
        assert!(!runs(lines[1].parse().unwrap()), "the sleeper lives");
    }

    /// Their parent has ended, and they have sessions of their own. One process starts more.
    #[test]
    fn what_an_ended_program_has_started_is_killed_at_the_limit() {
        let script = "echo $XTASK_PROGRAM; setsid sleep 500 & \
            (for i in 1 2 3 4 5; do setsid sleep 500 & sleep 0.3; done; sleep 500) & true";
        let lines = lines_until_the_limit(script, Duration::from_secs(1), 1);
        assert_eq!(lines.len(), 2, "{lines:?}");
        let left: Vec<u32> = marked(&lines[0]).into_iter().filter(|it| runs(*it)).collect();
        assert!(left.is_empty(), "{left:?} live");
    }

    #[test]
    fn a_mark_is_of_a_program_and_of_what_it_starts_by_this_program() {
        let outer = new_mark();
        let mark = |inner: &str| format!("{outer}{inner}");
        let mut one = Command::new("sleep").arg("1000").env(MARK, mark("/3-45")).spawn().unwrap();
        let is_of = |mark: &str| marked(mark).contains(&one.id());
        let start = Instant::now();
        // The child has its variables once it is the other program.
        while !is_of(&outer) {
            assert!(start.elapsed() < PATIENCE, "it has no mark");
        }
        assert!(is_of(&mark("/3-45")) && !is_of(&mark("/3-4")) && !is_of(&new_mark()));
        kill(&mut one, &outer);
        assert!(!runs(one.id()));
    }

    #[test]
    fn a_step_that_runs_meanwhile_is_the_same_at_idle_priority() {
        let mut command = shell("test $A = a && test -z \"$HOME\" && pwd && chrt --pid $$");
        command.env("A", "a").env_remove("HOME").current_dir("/usr");
        let (ok, lines) = program(idle(&command), quiet(), |_| ()).unwrap();
        assert!(ok, "{lines:?}");
        assert!(lines[0] == "/usr" && lines[1].ends_with("SCHED_IDLE"), "{lines:?}");
    }

    #[test]
    fn a_step_that_runs_meanwhile_is_as_others_once_the_main_one_has_ended() {
        let meanwhile = shell("while chrt --pid $$ | grep -q IDLE; do sleep 0.01; done");
        let steps = vec![Step::program("short", shell("true")).meanwhile("idle", &meanwhile)];
        let limit = Duration::from_secs(200);
        assert_eq!(run(steps, How { limit, ..quiet() }), Ok(()));
    }

    #[test]
    fn one_failed_step_fails_the_run() {
        let steps = |broken: bool| {
            vec![
                Step::program("good", shell("true")).meanwhile("idle", &shell("exit 0")),
                Step::function("function", move || if broken { Err("no".into()) } else { Ok(()) }),
            ]
        };
        let kept = std::env::temp_dir().join(format!("vellum-steps-{}", std::process::id()));
        let how = How { kept: &kept, ..quiet() };
        assert!(run(steps(false), how).is_ok());
        assert!(!kept.exists());
        assert_eq!(run(steps(true), how), Err("failed: function".into()));
        assert_eq!(fs::read_to_string(kept.join("function.txt")).unwrap(), "no");
        let idle = Step::program("good", shell("true")).meanwhile("idle", &shell("exit 1"));
        assert_eq!(run(vec![idle], how), Err("failed: idle".into()));
        fs::remove_dir_all(kept).unwrap();
    }
}
