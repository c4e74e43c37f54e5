//! Four processes that pass packets on: one provides the memory, one fills it, one computes a sum,
//! and one sends the packet, which is simulated by overwriting it.

use std::collections::VecDeque;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use vellum_morsel::{BackendChoice, BackendKind, Morsel, Provider, Shape};

use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Axis, Chart, Line as Curve, Outcome, Row};
use vellum_bench::worker::{Head, Launcher, Stage, Step, Worker, connect, sum_of};
use vellum_bench::workload::values::Random;

/// The experiment.
pub const MORSEL_PIPELINE: Experiment = Experiment {
    name: "morsel-pipeline",
    shows: "packets through four processes: memfd against Morsel, round trips and page faults",
    source: "DIMES'23, figures 4 and 5",
    run,
};

/// The work of the three processes after this one.
const STEPS: [Step; 3] = [Step::Fill, Step::Sum, Step::Overwrite];

/// The points of the curve. Each has the same number of packets.
const CLASSES: usize = 12;

/// The most packets in flight: one for each step and one for this process.
const AT_A_TIME: usize = 4;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let longest: u64 = context.pick(16 << 20, 256 << 20);
    let packets = 1000;
    let directory = context.make_directory("morsel-pipeline")?;
    let mut outcome = Outcome::default();
    let mut line = Line::start(&directory)?;
    let mut providers = Vec::new();
    for kind in [BackendKind::Memfd, BackendKind::Kernel] {
        match Provider::new(BackendChoice::Only(kind)) {
            Ok(provider) => providers.push((kind, provider)),
            Err(error) => outcome.notes.push(format!("Left out: {error}.")),
        }
    }
    let line = std::cell::RefCell::new(&mut line);
    let tallies = std::cell::RefCell::new(vec![Tally::default(); providers.len()]);
    let contestants = providers.iter().enumerate().map(|(index, (kind, provider))| {
        let (line, tallies) = (&line, &tallies);
        Contestant::new(name(*kind), move || {
            let tally = line.borrow_mut().run(provider, packets, longest)?;
            tallies.borrow_mut()[index].add(&tally);
            Ok(tally.packets as f64 / tally.seconds())
        })
    });
    let samples = alternate(context.rounds(), &context.progress, contestants.collect())?;
    for (of_way, tally) in samples.iter().zip(tallies.borrow().iter()) {
        rows(of_way, tally, &samples[0], &mut outcome);
    }
    outcome.charts.push(Chart {
        title: "mean round trip of packets by their length".to_owned(),
        x: Axis::linear("MiB"),
        y: Axis::linear("milliseconds"),
        lines: samples.iter().zip(&*tallies.borrow()).map(|(of, tally)| curve(of, tally)).collect(),
    });
    outcome.notes.push(format!(
        "{packets} packets a sample, of up to {} MiB at random, the same for both; {AT_A_TIME} on \
         their way at most. A round trip lasts from when this process begins to send a packet \
         until it has it back. Faults and time in user space are those of the other three steps.",
        longest >> 20
    ));
    Ok(outcome)
}

fn name(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Kernel => "Morsel",
        _ => "memfd",
    }
}

fn rows(samples: &Samples, tally: &Tally, reference: &Samples, outcome: &mut Outcome) {
    let name = &samples.name;
    let each = |total: f64| total / tally.packets as f64;
    outcome.rows.push(Row::of(samples, "round trips/s of waiting").against(samples, reference));
    outcome.rows.push(Row::count(
        format!("mean round trip, {name}"),
        each(tally.seconds()) * 1e3,
        "ms",
    ));
    let user = each(tally.ticks as f64) * 10.0;
    outcome.rows.push(Row::count(format!("time in user space, {name}"), user, "ms/packet"));
    let faults = each(tally.faults as f64);
    outcome.rows.push(Row::count(format!("page faults, {name}"), faults, "per packet"));
}

/// Round trips by the packets' lengths.
fn curve(samples: &Samples, tally: &Tally) -> Curve {
    let mean = |class: &[(u64, f64)]| {
        let count = class.len() as f64;
        let bytes: u64 = class.iter().map(|(length, _)| length).sum();
        let seconds: f64 = class.iter().map(|(_, seconds)| seconds).sum();
        (bytes as f64 / count / f64::from(1 << 20), seconds / count * 1e3)
    };
    let mut trips = tally.trips.clone();
    trips.sort_by_key(|(length, _)| *length);
    let points = trips.chunks(trips.len().div_ceil(CLASSES).max(1)).map(mean).collect();
    Curve { name: samples.name.clone(), points }
}

/// The cost of the packets.
#[derive(Clone, Debug, Default)]
struct Tally {
    packets: u64,
    /// Each packet's length in bytes, and the seconds of its round trip.
    trips: Vec<(u64, f64)>,
    faults: u64,
    ticks: u64,
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.packets += other.packets;
        self.trips.extend(&other.trips);
        self.faults += other.faults;
        self.ticks += other.ticks;
    }

    /// The sum of all round trips.
    fn seconds(&self) -> f64 {
        self.trips.iter().map(|(_, seconds)| seconds).sum()
    }
}

/// The processes, and the sockets at both ends.
struct Line {
    first: UnixStream,
    last: UnixStream,
    steps: Vec<Worker>,
    next: u64,
}

impl Line {
    fn start(directory: &Path) -> Result<Line> {
        let place = |step: usize| directory.join(format!("{step}.sock"));
        let listener = UnixListener::bind(place(STEPS.len()))?;
        let mut steps = Vec::new();
        for (index, step) in STEPS.into_iter().enumerate() {
            let mut worker =
                Worker::start(&Launcher::this_program()?, &format!("step {}", index + 2), None)?;
            let stage = Stage { step, from: place(index), to: place(index + 1) };
            worker.begin_stage(&stage)?;
            steps.push(worker);
        }
        let first = connect(&place(0))?;
        let (last, _) = listener.accept().context("the last step")?;
        Ok(Line { first, last, steps, next: 1 })
    }

    /// Sends this many packets through, and checks one of them.
    fn run(&mut self, provider: &Provider, packets: u64, longest: u64) -> Result<Tally> {
        let before = self.spent()?;
        let mut lengths = Random::new(longest);
        let mut free: Vec<Morsel> = Vec::new();
        let mut under_way: VecDeque<(u64, Instant)> = VecDeque::new();
        let mut tally = Tally { packets, ..Tally::default() };
        let mut sent = 0;
        while sent < packets || !under_way.is_empty() {
            if sent < packets && under_way.len() < AT_A_TIME {
                let morsel = match free.pop() {
                    Some(morsel) => morsel,
                    None => populated(provider, longest)?,
                };
                let length = 1 + lengths.below(longest);
                under_way.push_back((length, Instant::now()));
                Head { number: self.next, length, ..Head::default() }.write(&mut self.first)?;
                morsel.send(&self.first)?;
                (self.next, sent) = (self.next + 1, sent + 1);
                continue;
            }
            let head = Head::read(&mut self.last)?.context("a step has ended")?;
            free.push(Morsel::receive(&self.last)?);
            let (length, start) = under_way.pop_front().context("a packet too many")?;
            tally.trips.push((length, start.elapsed().as_secs_f64()));
            if under_way.is_empty() {
                ensure!(head.sum == sum_of(head.number, head.length)?, "a packet was changed");
            }
        }
        let after = self.spent()?;
        tally.faults = after.faults - before.faults;
        tally.ticks = after.ticks - before.ticks;
        Ok(tally)
    }

    /// The cost of the steps since they began.
    fn spent(&mut self) -> Result<Head> {
        Head::default().write(&mut self.first)?;
        Head::read(&mut self.last)?.context("a step has ended")
    }
}

/// Memory for packets, all of it populated, so that no step waits for page faults.
fn populated(provider: &Provider, longest: u64) -> Result<Morsel> {
    let morsel = provider.create(&Shape::of_length(longest))?;
    morsel.populate(0..longest)?;
    Ok(morsel)
}

impl Drop for Line {
    fn drop(&mut self) {
        // The steps end one after the other when no more packets can come; the drop kills one that
        // hangs.
        let _ = self.first.shutdown(std::net::Shutdown::Both);
        for worker in &mut self.steps {
            let _ = worker.staged();
        }
    }
}
