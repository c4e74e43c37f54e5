//! One run of a machine: putting it together, and watching it until it is off.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::cleaner::Cleaner;
use crate::disk::{Disk, Served};
use crate::guest::{self, Equipment, Work};
use crate::kernel::Kernel;
use crate::machine::{Files, Machine};
use crate::monitor;
use crate::packages::finish;
use crate::verdict::{Verdict, first_trouble};

/// Bytes of the guest's disk.
const DISK: u64 = 4 << 30;

/// Bytes of the disk whose controller is for user space.
const LENT: u64 = 64 << 20;

/// A machine that can be started, with its folder.
#[derive(Debug)]
pub struct Run<'a> {
    kernel: &'a Kernel,
    cleaner: Cleaner,
    pmem: Option<PathBuf>,
    /// Whether the lab serves a disk to it.
    is_served: bool,
}

/// When the lab stops waiting for a machine.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time for the start, for each program, and for the end.
    pub patience: Duration,
    /// If set, the lab kills the machine this long after a program has printed `lab: ready`, which
    /// is no failure. Until then the usual limit applies, because the time of a start depends on
    /// the host's load.
    pub kill_after: Option<Duration>,
}

/// What outlives a machine, besides what it has said.
#[derive(Debug, Default)]
pub struct Kept<'a> {
    /// The file with its persistent memory.
    pub pmem: Option<&'a Path>,
    /// Its virtio disk.
    pub disk: Option<&'a mut Option<Disk>>,
}

impl<'a> Kept<'a> {
    /// Persistent memory alone, if any.
    pub fn memory(pmem: Option<&'a Path>) -> Kept<'a> {
        Kept { pmem, disk: None }
    }
}

/// Puts a machine together and watches it.
///
/// # Errors
/// As for [`Run::prepare`] and [`Run::watch`].
pub fn perform(
    kernel: &Kernel,
    work: &Work,
    equipment: &Equipment,
    kept: Kept<'_>,
    (machine, limits): (&Machine, Limits),
) -> Result<Verdict> {
    let mut run = Run::prepare(kernel, work, equipment, kept.pmem)?;
    let Some(place) = kept.disk else { return run.watch(machine, limits) };
    let served = place.take().map(Served::start).transpose()?;
    run.is_served = served.is_some();
    let verdict = run.watch(machine, limits);
    *place = served.map(Served::end).transpose()?;
    verdict
}

impl<'a> Run<'a> {
    /// Puts together the parts of the machine. The file that `kept` names holds the persistent
    /// memory and outlives the run.
    ///
    /// # Errors
    /// If something is missing, or a module does not build.
    pub fn prepare(
        kernel: &'a Kernel,
        work: &Work,
        equipment: &Equipment,
        kept: Option<&Path>,
    ) -> Result<Run<'a>> {
        let archive = guest::archive(kernel, work, equipment)?;
        let cleaner = Cleaner::new(&kernel.folder)?;
        let file = |name: &str| cleaner.folder().join(name);
        fs::write(file("archive"), archive)?;
        fs::File::create(file("disk"))?.set_len(DISK)?;
        fs::File::create(file("lent"))?.set_len(LENT)?;
        let mut format = Command::new("/sbin/mke2fs");
        finish(format.args(["-q", "-F", "-t", "ext4"]).arg(file("disk")))
            .context("formatting the disk")?;
        let mut pmem = None;
        if let Some(bytes) = equipment.pmem {
            let path = kept.map_or(file("pmem"), Path::to_path_buf);
            if !path.exists() {
                fs::File::create(&path)
                    .and_then(|file| file.set_len(bytes))
                    .with_context(|| format!("creating {}", path.display()))?;
            }
            pmem = Some(path);
        }
        Ok(Run { kernel, cleaner, pmem, is_served: false })
    }

    /// Hands the machine to the user at the terminal until it is off.
    ///
    /// # Errors
    /// If the emulator does not start.
    pub fn attend(mut self, machine: &Machine) -> Result<ExitStatus> {
        let status = self.start(machine, true)?.wait()?;
        self.cleaner.release()?;
        let (_, kept) = self.keep_messages(machine)?;
        println!("the kernel's messages are in {}", kept.display());
        Ok(status)
    }

    /// Shows the guest's output until it is off or a limit is reached.
    ///
    /// # Errors
    /// If the emulator does not start.
    pub fn watch(mut self, machine: &Machine, limits: Limits) -> Result<Verdict> {
        let mut child = self.start(machine, false)?;
        let (lines, reader) = lines_of(&mut child)?;
        let mut verdict = Verdict::default();
        if follow(&lines, limits, &mut verdict) == Watch::Hung {
            show_processors();
        }
        // The machine is off already, unless it has reached a limit.
        child.kill()?;
        child.wait()?;
        self.cleaner.release()?;
        // What it has said before it was killed counts.
        for line in lines.iter().filter(|line| is_note(line)) {
            verdict.line(&line);
        }
        drop(lines);
        if reader.join().is_err() {
            bail!("reading the emulator's output failed");
        }
        let (messages, kept) = self.keep_messages(machine)?;
        verdict.end(&messages);
        for line in first_trouble(&messages) {
            println!("    kernel: {}", line.trim_end());
        }
        if !verdict.troubles.is_empty() {
            println!("the kernel's messages are in {}", kept.display());
        }
        Ok(verdict)
    }

    /// The kernel's messages, and the file that keeps them.
    fn keep_messages(&self, machine: &Machine) -> Result<(String, PathBuf)> {
        let messages = fs::read(self.cleaner.folder().join("messages")).unwrap_or_default();
        let mut name = format!("messages-{}", self.kernel.name);
        if let Some(machine) = &machine.name {
            name = format!("{name}-{machine}");
        }
        let kept = self.kernel.folder.with_file_name(name);
        fs::write(&kept, &messages)?;
        Ok((String::from_utf8_lossy(&messages).into_owned(), kept))
    }

    fn start(&mut self, machine: &Machine, interactive: bool) -> Result<Child> {
        let file = |name: &str| self.cleaner.folder().join(name);
        let (archive, messages) = (file("archive"), file("messages"));
        let (disk, lent) = (file("disk"), file("lent"));
        let pmem = self.pmem.as_deref();
        let (is_served, messages) = (self.is_served, &messages);
        let files =
            Files { archive: &archive, disk: &disk, lent: &lent, pmem, is_served, messages };
        let child = machine.start(self.kernel, files, interactive)?;
        self.cleaner.watch_over(child.id())?;
        Ok(child)
    }
}

/// The lines that the guest prints, until the machine is off.
fn lines_of(child: &mut Child) -> Result<(Receiver<String>, JoinHandle<()>)> {
    let output = child.stdout.take().context("the emulator has no output")?;
    let (sender, lines) = mpsc::channel();
    let reader = thread::spawn(move || {
        let (mut output, mut line) = (BufReader::new(output), Vec::new());
        while output.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            let text = String::from_utf8_lossy(&line);
            // A machine that dies in the midst of a note has not noted it.
            let is_torn = is_note(&text) && !text.ends_with('\n');
            if is_torn || sender.send(text.into_owned()).is_err() {
                break;
            }
            line.clear();
        }
    });
    Ok((lines, reader))
}

/// Whether a program notes something for the guests after its own.
fn is_note(line: &str) -> bool {
    line.starts_with("lab: note ")
}

/// Looks at the processors, and the time between the looks.
const LOOKS: (u32, Duration) = (3, Duration::from_secs(1));

/// Shows where the processors of a machine that hangs are, several times, because one that runs in
/// a circle is at a different place each time.
fn show_processors() {
    for _ in 0..LOOKS.0 {
        match monitor::processors() {
            Ok(lines) => lines.iter().for_each(|line| println!("    hangs: {line}")),
            Err(error) => return println!("    hangs: the emulator does not answer: {error}"),
        }
        thread::sleep(LOOKS.1);
    }
}

/// Why the lab watches no longer.
#[derive(Debug, PartialEq, Eq)]
enum Watch {
    /// The machine is off, or dies as planned.
    Over,
    /// A program takes too long.
    Hung,
}

/// Reads and shows lines until there are no more or a limit is reached.
fn follow(lines: &Receiver<String>, limits: Limits, verdict: &mut Verdict) -> Watch {
    let mut deadline = Instant::now() + limits.patience;
    let mut death = None;
    loop {
        if death.is_some_and(|death| death <= Instant::now()) {
            verdict.killed();
            return Watch::Over;
        }
        let until = death.map_or(deadline, |death| deadline.min(death));
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if !is_note(&line) {
                    println!("    {}", line.trim_end());
                }
                if verdict.line(&line) {
                    deadline = Instant::now() + limits.patience;
                } else if line.trim_end() == "lab: ready" {
                    death = limits.kill_after.map(|after| Instant::now() + after);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Watch::Over,
            Err(RecvTimeoutError::Timeout) if death.is_some_and(|death| death <= deadline) => {}
            Err(RecvTimeoutError::Timeout) => {
                verdict.hung(limits.patience);
                return Watch::Hung;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(lines: &[&'static str], limits: Limits) -> (Verdict, Duration) {
        let (sender, receiver) = mpsc::channel();
        lines.iter().for_each(|line| sender.send((*line).to_owned()).unwrap());
        let start = Instant::now();
        let mut verdict = Verdict::default();
        follow(&receiver, limits, &mut verdict);
        // The machine would be off only now.
        drop(sender);
        (verdict, start.elapsed())
    }

    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn patience_ends() {
        let limits = Limits { patience: SHORT, kill_after: None };
        let (mut verdict, time) = said(&["lab: begin a"], limits);
        verdict.end("");
        assert!(time >= SHORT);
        assert!(verdict.troubles[0].starts_with("a: nothing new"), "{:?}", verdict.troubles);
    }

    #[test]
    fn a_machine_is_killed_after_its_program_is_ready() {
        let patience = Duration::from_secs(600);
        let limits = Limits { patience, kill_after: Some(SHORT) };
        let lines = ["lab: running 6.1", "lab: begin a", "lab: ready"];
        let (mut verdict, time) = said(&lines, limits);
        verdict.end("");
        assert!(time >= SHORT && verdict.was_killed());
        assert_eq!(verdict.failed, 0, "{:?}", verdict.troubles);
    }

    #[test]
    fn a_machine_is_not_killed_before_its_program_is_ready() {
        let limits = Limits { patience: 4 * SHORT, kill_after: Some(SHORT) };
        let (verdict, time) = said(&["lab: running 6.1", "lab: begin a"], limits);
        assert!(time >= 4 * SHORT && !verdict.was_killed());
        assert!(verdict.troubles[0].contains("nothing new"), "{:?}", verdict.troubles);
    }
}
