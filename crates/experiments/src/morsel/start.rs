//! Processes that start one after the other and get the same model: how long the n-th of them waits
//! for it, and how much memory all of them take then.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use vellum_morsel::BackendKind;

use super::daemons::{Running, Source, start_daemons, start_workers, weigh};
use crate::{Context, Experiment};
use vellum_bench::machine::memory_available;
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};
use vellum_bench::worker::{LoadMethod, Worker, make_model, sum_of_pages, warm_file};

/// The experiment.
pub const MORSEL_START: Experiment = Experiment {
    name: "morsel-start",
    shows: "a model for 16 processes, one after the other: time of the n-th, memory of all",
    source: "DIMES'23, section 3.1",
    run,
};

/// The processes that have rows.
const NTH: [usize; 3] = [1, 4, 16];

/// All of them.
const PROCESSES: usize = NTH[NTH.len() - 1];

/// The file that the user has named, or one like those of language models.
fn model_for(context: &Context<'_>, directory: &Path) -> Result<Source> {
    if let Some(path) = &context.model {
        let path =
            fs::canonicalize(path).with_context(|| format!("the model {}", path.display()))?;
        let contents = fs::read(&path)?;
        let (bytes, sum) = (contents.len() as u64, sum_of_pages(&contents));
        return Ok(Source { path, bytes, sum });
    }
    let (path, bytes) = (directory.join("model.gguf"), context.pick(256 << 20, 2 << 30));
    let sum = make_model(&path, bytes)?;
    let bytes = fs::metadata(&path)?.len();
    Ok(Source { path, bytes, sum })
}

/// A way to get the model.
struct Contender<'a> {
    name: &'static str,
    method: LoadMethod,
    daemon: Option<&'a Running>,
    /// For each of [`NTH`]: seconds until it has the model, and bytes that all have by then.
    times: RefCell<Vec<Samples>>,
    memory: RefCell<Vec<u64>>,
}

impl<'a> Contender<'a> {
    fn new(name: &'static str, method: LoadMethod, daemon: Option<&'a Running>) -> Self {
        let times = NTH.map(|nth| Samples::new(format!("process {nth}, {name}"))).to_vec();
        let memory = RefCell::new(vec![0; NTH.len()]);
        Contender { name, method, daemon, times: RefCell::new(times), memory }
    }

    fn of(daemon: &'a Running) -> Self {
        let name = match daemon.backend {
            BackendKind::Kernel => "from the daemon (Morsel)",
            _ => "from the daemon (memfd)",
        };
        Self::new(name, LoadMethod::Daemon(daemon.socket.clone()), Some(daemon))
    }

    /// One process after the other gets the model and keeps it; seconds that the last one takes.
    fn measure(&self, workers: &mut [Worker], model: &Source) -> Result<f64> {
        if let Some(daemon) = self.daemon {
            daemon.forget(&model.path)?;
        }
        warm_file(&model.path)?;
        let mut last = 0.0;
        for number in 1..=workers.len() {
            let start = Instant::now();
            let worker = &mut workers[number - 1];
            worker.begin_hold(&self.method, &model.path)?;
            ensure!(worker.held()? == model.sum, "the bytes are not those of the file");
            last = start.elapsed().as_secs_f64();
            if let Some(index) = NTH.iter().position(|nth| *nth == number) {
                self.times.borrow_mut()[index].values.push(last);
                self.memory.borrow_mut()[index] = self.weight(&mut workers[..number], model)?;
            }
        }
        for worker in workers.iter_mut() {
            worker.let_go()?;
        }
        Ok(last)
    }

    /// The memory of the processes, page tables included.
    fn weight(&self, workers: &mut [Worker], model: &Source) -> Result<u64> {
        let all = weigh(workers, self.daemon, model)?;
        Ok(all.memory + all.tables)
    }

    fn rows(&self, reference: &Contender<'_>, model: &Source, outcome: &mut Outcome) {
        for (of_nth, before) in self.times.borrow().iter().zip(&*reference.times.borrow()) {
            // How many times faster, not which part of the time.
            let ratio = before.median() / of_nth.median();
            let against = format!("as fast as {}", before.name);
            outcome.rows.push(Row::of(&milliseconds(of_nth), "ms").with_ratio(ratio, against));
        }
        for (nth, bytes) in NTH.iter().zip(&*self.memory.borrow()) {
            let name = format!("memory of {nth}, {}", self.name);
            let ratio = *bytes as f64 / model.bytes as f64;
            let row = Row::count(name, *bytes as f64 / f64::from(1 << 20), "MiB");
            outcome.rows.push(row.with_ratio(ratio, "the file"));
        }
    }

    fn line(&self) -> Line {
        let times = self.times.borrow();
        let points = NTH.iter().zip(&*times).map(|(nth, of)| (*nth as f64, of.median() * 1e3));
        Line { name: self.name.to_owned(), points: points.collect() }
    }
}

fn milliseconds(seconds: &Samples) -> Samples {
    let values = seconds.values.iter().map(|value| value * 1e3).collect();
    Samples { name: seconds.name.clone(), values }
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let directory = context.make_directory("morsel-start")?;
    let model = model_for(context, &directory)?;
    let mut outcome = Outcome::default();
    let daemons = start_daemons(&directory, model.bytes, &mut outcome)?;
    let mut contenders = vec![Contender::new("each maps the file", LoadMethod::Map, None)];
    let mib = model.bytes >> 20;
    // Copies for all processes, with that of the page cache and other memory.
    if model.bytes * (PROCESSES as u64 + 2) < memory_available() {
        contenders.insert(0, Contender::new("each reads the file", LoadMethod::Read, None));
    } else {
        let note = format!("Not read by each: {PROCESSES} copies of {mib} MiB do not fit.");
        outcome.notes.push(note);
    }
    contenders.extend(daemons.iter().map(Contender::of));
    let workers = RefCell::new(start_workers(PROCESSES)?);
    let contestants = contenders.iter().map(|contender| {
        Contestant::new(contender.name, || contender.measure(&mut workers.borrow_mut(), &model))
    });
    alternate(context.rounds(), &context.progress, contestants.collect())?;
    for contender in &contenders {
        // The first round does not count.
        for times in contender.times.borrow_mut().iter_mut() {
            times.values.remove(0);
        }
    }
    for contender in &contenders {
        contender.rows(&contenders[0], &model, &mut outcome);
    }
    outcome.charts.push(Chart {
        title: "until the n-th process has the model".to_owned(),
        x: Axis::linear("processes"),
        y: Axis::logarithmic("milliseconds"),
        lines: contenders.iter().map(Contender::line).collect(),
    });
    outcome.notes.push(format!(
        "{PROCESSES} processes, each after the one before it, {mib} MiB in the page cache. A \
         process has the model when it has read a word of each page; the daemon's first one waits \
         for the load. Memory is that of all so far, shared pages counted once, with page tables."
    ));
    Ok(outcome)
}
