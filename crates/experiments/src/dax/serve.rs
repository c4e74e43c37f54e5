//! A web server for files on persistent memory: each request opens a file, sends it and closes it.

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::Path;

use anyhow::Result;
use vellum_dax::{Backend, Heap};

use super::kernel::{KeptBound, shootdowns};
use super::read_method::{Way, heap, heaps_by_table};
use super::server::{Delivery, Server};
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{Launcher, Page, Site, Worker};
use vellum_bench::workload::Plan;
use vellum_bench::workload::values::fill;

/// The experiment.
pub const DAX_SERVE: Experiment = Experiment {
    name: "dax-serve",
    shows: "a web server: read, mmap and sendfile against ephemeral mappings, file tables",
    source: "MICRO'22, section V.C, figures 8a and 8b",
    run,
};

/// Bytes of a page.
const SIZES: [usize; 4] = [4 << 10, 32 << 10, 128 << 10, 1 << 20];

/// Bytes of all pages of a size: more than caches hold.
const BYTES: usize = 64 << 20;

/// The size and the threads for which TLB shootdowns are told.
const SHOOTDOWNS: (usize, usize) = (32 << 10, 2);

/// The client's connections. Each has a thread, and always one request under way.
const CONNECTIONS: usize = 4;

struct Contest<'a> {
    name: &'static str,
    delivery: Delivery<'a>,
    /// Whether the module keeps tables from one request to the next.
    keeps: bool,
    /// Requests, and TLB shootdowns meanwhile.
    seen: Cell<(u64, u64)>,
}

impl<'a> Contest<'a> {
    fn new(name: &'static str, delivery: Delivery<'a>) -> Self {
        Self { name, delivery, keeps: true, seen: Cell::default() }
    }

    fn mapped(name: &'static str, way: Way<'a>) -> Self {
        Self::new(name, Delivery::Whole(way))
    }
}

/// The server, and the client, which is a process of its own.
struct Network {
    server: Server,
    client: RefCell<Worker>,
    site: Site,
    seconds: f64,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let by_mmap = heap(Backend::Mmap, None)?;
    let heaps = heaps_by_table([None, Some(512)], &mut outcome);
    let folder = context.make_directory("dax-serve")?;
    let server = Server::new(folder.clone())?;
    let site = Site { address: server.address()?, pages: Vec::new() };
    let client = Worker::start(&Launcher::this_program()?, "client", None)?;
    let seconds = context.pick(0.15, 0.5);
    let mut network = Network { server, client: RefCell::new(client), site, seconds };
    for size in SIZES {
        context.progress.doing("making pages");
        network.site.pages = make_pages(&folder, size, context.pick(200, 2_000))?;
        for threads in [1, 2] {
            // Each counts its own shootdowns.
            let contests = contests(&by_mmap, heaps.as_ref());
            measure(context, &mut outcome, &network, size, threads, &contests)?;
        }
        for page in &network.site.pages {
            fs::remove_file(folder.join(&page.name))?;
        }
    }
    outcome.notes.push(format!(
        "HTTP/1.1 over the machine's own network, {CONNECTIONS} connections that are kept alive, \
         each with a thread of another process, which checks the length of each page and a word \
         of each 4 KiB. The server's threads share the processors with them. `read` reads pieces \
         of 128 KiB. Tables are kept by the module, unless the row says otherwise. Ratios are to \
         mmap."
    ));
    Ok(outcome)
}

fn contests<'a>(by_mmap: &'a Heap, heaps: Option<&'a [Heap; 2]>) -> Vec<Contest<'a>> {
    let mut contests = vec![
        Contest::mapped("mmap", Way::Heap(by_mmap)),
        Contest::mapped("mmap, populated", Way::Populated),
        Contest::new("read", Delivery::Pieces),
        Contest::new("sendfile", Delivery::Sendfile),
    ];
    if let Some([batched, large]) = heaps {
        contests.extend([
            Contest::mapped("ephemeral", Way::Heap(batched)),
            Contest::mapped("ephemeral, batches of 512", Way::Heap(large)),
            Contest {
                keeps: false,
                ..Contest::mapped("ephemeral, table made each time", Way::Heap(batched))
            },
            Contest::mapped("file table", Way::Table),
        ]);
    }
    contests
}

/// Pages of a size, all different.
fn make_pages(folder: &Path, size: usize, most: usize) -> Result<Vec<Page>> {
    let count = (BYTES / size).clamp(4, most);
    let mut bytes = vec![0; size];
    let make = |number| -> Result<Page> {
        fill((size + number) as u64, &mut bytes);
        let name = format!("page-{number}");
        fs::write(folder.join(&name), &bytes)?;
        Ok(Page::new(name, &bytes))
    };
    let pages = (0..count).map(make).collect::<Result<_>>()?;
    // Blocks that are reserved and not yet written have no leaf in a table.
    rustix::fs::sync();
    Ok(pages)
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    network: &Network,
    size: usize,
    threads: usize,
    contests: &[Contest<'_>],
) -> Result<()> {
    let what = format!("{} KiB, {}", size >> 10, crate::context::count(threads, "thread"));
    let contestants = contests
        .iter()
        .map(|contest| {
            let name = format!("{}, {what}", contest.name);
            Contestant::new(name, move || rate(network, contest, threads))
        })
        .collect();
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "requests/s").against(of_way, &samples[0]));
    }
    if (size, threads) != SHOOTDOWNS {
        return Ok(());
    }
    for contest in contests.iter().filter(|contest| matches!(contest.delivery, Delivery::Whole(_)))
    {
        let (requests, flushes) = contest.seen.get();
        let name = format!("{}, {what}", contest.name);
        let each = flushes as f64 * 1e3 / requests as f64;
        outcome.rows.push(Row::count(name, each, "TLB shootdowns/1000 requests"));
    }
    Ok(())
}

/// Requests a second.
fn rate(network: &Network, contest: &Contest<'_>, threads: usize) -> Result<f64> {
    let Network { server, client, site, seconds } = network;
    let mut client = client.borrow_mut();
    let _bound = (!contest.keeps).then(|| KeptBound::of(0)).transpose()?;
    let plan = Plan { threads: CONNECTIONS, seconds: *seconds, seed: 1 };
    let before = shootdowns()?;
    client.begin_fetch(site, &plan)?;
    server.serve(CONNECTIONS, threads, contest.delivery)?;
    let fetched = client.fetched(&plan)?;
    let (requests, flushes) = contest.seen.get();
    contest.seen.set((requests + fetched.operations, flushes + shootdowns()? - before));
    Ok(fetched.rate())
}
