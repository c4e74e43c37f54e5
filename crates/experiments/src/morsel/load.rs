//! How fast several processes get all of one large file, and how much memory that takes.
//!
//! This is figure 2 of the paper on Morsels, whose competitor is a file mapping that the kernel
//! populates at once. It also measures processes that read the file into memory of their own, as
//! many programs do. The file is always in the page cache, so the experiment measures the copying
//! and the sharing.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use anyhow::{Result, ensure};

use super::daemons::{Running, Source, start_daemons, start_workers, weigh};
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{LoadMethod, Weight, Worker, make_file, warm_file};

/// The experiment.
pub const MORSEL_LOAD: Experiment = Experiment {
    name: "morsel-load",
    shows: "one file for several processes: each reads it, each maps it, the daemon hands it out",
    source: "DIMES'23, figure 2",
    run,
};

/// The number of processes.
const PROCESSES: usize = 4;

/// A way to get the file.
struct Contender<'a> {
    name: String,
    method: LoadMethod,
    /// The daemon that serves it.
    daemon: Option<&'a Running>,
    /// Whether the daemon has to load the file, once for all processes.
    anew: bool,
    /// The memory of the processes once they have the file.
    weight: Cell<Weight>,
}

impl<'a> Contender<'a> {
    fn new(name: &str, method: LoadMethod) -> Contender<'a> {
        let (name, weight) = (name.to_owned(), Cell::default());
        Contender { name, method, daemon: None, anew: false, weight }
    }

    fn of(daemon: &'a Running, anew: bool) -> Contender<'a> {
        let what = if anew { "first load included" } else { "which has it" };
        let name = format!("from the daemon ({}), {what}", daemon.backend);
        let method = LoadMethod::Daemon(daemon.socket.clone());
        Contender { daemon: Some(daemon), anew, ..Contender::new(&name, method) }
    }

    /// Has all processes get the file at once; loads a second.
    fn measure(&self, workers: &mut [Worker], file: &Source) -> Result<f64> {
        if let (Some(daemon), true) = (self.daemon, self.anew) {
            daemon.forget(&file.path)?;
        }
        // A daemon that has loaded a file has the kernel drop its own copy.
        warm_file(&file.path)?;
        if let (Some(daemon), false) = (self.daemon, self.anew) {
            daemon.load(&file.path)?;
        }
        let start = Instant::now();
        for worker in workers.iter_mut() {
            worker.begin_hold(&self.method, &file.path)?;
        }
        for worker in workers.iter_mut() {
            ensure!(worker.held()? == file.sum, "the bytes are not those of the file");
        }
        let seconds = start.elapsed().as_secs_f64();
        self.weight.set(weigh(workers, self.daemon, file)?);
        for worker in workers.iter_mut() {
            worker.let_go()?;
        }
        Ok(PROCESSES as f64 / seconds)
    }

    /// Memory of all processes, and of their page tables.
    fn rows(&self, bytes: u64) -> [Row; 2] {
        let Weight { memory, tables } = self.weight.get();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let row = |what: &str, of| Row::count(format!("{what}, {}", self.name), mib(of), "MiB");
        let ratio = memory as f64 / bytes as f64;
        [row("memory", memory).with_ratio(ratio, "the file"), row("page tables", tables)]
    }
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let directory = context.make_directory("morsel-load")?;
    let (path, bytes) = (directory.join("file"), context.pick(128 << 20, 1 << 30));
    let sum = make_file(&path, bytes)?;
    let file = Source { path, bytes, sum };
    let mut outcome = Outcome::default();
    let daemons = start_daemons(&directory, bytes, &mut outcome)?;
    let workers = RefCell::new(start_workers(PROCESSES)?);
    let mut contenders = vec![
        Contender::new("each reads the file", LoadMethod::Read),
        Contender::new("each maps the file", LoadMethod::Map),
    ];
    for daemon in &daemons {
        contenders.extend([false, true].map(|anew| Contender::of(daemon, anew)));
    }
    let contestants = contenders.iter().map(|contender| {
        let measure = || contender.measure(&mut workers.borrow_mut(), &file);
        Contestant::new(&contender.name, measure)
    });
    let samples = alternate(context.rounds(), &context.progress, contestants.collect())?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "loads/s").against(of_way, &samples[0]));
    }
    for contender in contenders.iter().filter(|contender| !contender.anew) {
        outcome.rows.extend(contender.rows(file.bytes));
    }
    outcome.notes.push(format!(
        "{PROCESSES} processes at once, a file of {} MiB in the page cache. A load ends when a \
         word of each page has been read. Memory is that of all processes, shared pages counted \
         once; processes that read also cause the page cache's copy of the file.",
        bytes >> 20
    ));
    Ok(outcome)
}
