//! The page states in other forms: SIGMOD'23, section 3.6, and the effect of huge pages.
//!
//! The paper names two ways to save the eight bytes that a page of storage costs: two bits instead
//! of a word, and a state inside the page. This experiment measures both as the check that a reader
//! makes ([`forms`](super::page_access::forms)), and compares them with the pool, in time and in
//! memory.

use anyhow::Result;
use vellum_pool::{PAGE_SIZE, PoolError};

use super::page_access::forms::{FullWords, TwoBits};
use super::page_access::memory::Memory;
use super::page_access::rows::rows;
use super::page_access::size::{self, CACHED_BITS, LARGE_BITS, show_pages};
use super::page_access::walk::Walk;
use super::page_access::ways::{self, Form, Ways};
use super::page_access::{Chain, Resident, sparse};
use super::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const STATES: Experiment = Experiment {
    name: "states",
    shows: "page states as words, on huge pages, as two bits, inside the page: time and memory",
    source: "SIGMOD'23, section 3.6",
    run,
};

/// How many times larger the range is over which cached pages are spread, to measure the memory
/// that this costs.
const SPREAD: u32 = 3;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let large = size::affordable(context.pick(17, LARGE_BITS), 1)?;
    let mut outcome = Outcome::default();
    for bits in [CACHED_BITS, large] {
        let size = show_pages(bits);
        context.progress.doing(&format!("bringing in {size}"));
        let before = Memory::now()?;
        let pages = Resident::new(Chain::new(bits, 0))?;
        if bits == large {
            let added = Memory::now()?.since(before);
            outcome.rows.extend(memory_rows(added, pages.chain(), &size));
        }
        let all = measure(context, &pages, &size, &mut outcome.notes)?;
        outcome.rows.extend(rows(&all));
    }
    outcome.rows.extend(sparse_rows(large.min(19))?);
    outcome.rows.extend(computed_rows());
    outcome.notes.extend(CONCLUSIONS.iter().map(|text| (*text).to_owned()));
    Ok(outcome)
}

fn measure(
    context: &Context<'_>,
    pages: &Resident,
    size: &str,
    notes: &mut Vec<String>,
) -> Result<Vec<Samples>> {
    let chain = pages.chain();
    let reads = size::accesses(chain.pages().trailing_zeros(), context.quick);
    let words = FullWords::new(chain.range(), false)?;
    let before = Memory::now()?;
    let on_huge = FullWords::new(chain.range(), true)?;
    let huge = Memory::now()?.since(before).huge;
    notes.push(format!("The states of {size}: {} KiB of them came in huge pages.", huge >> 10));
    let bits = TwoBits::new(chain.range())?;
    let forms = [
        ("words of 8 bytes", Form::Words(&words)),
        ("words of 8 bytes on huge pages", Form::Words(&on_huge)),
        ("two bits, version in the page", Form::TwoBits(&bits)),
        ("state in the page", Form::InPage),
    ];
    let mut starts = chain.starts().map(Walk::new);
    let ways = Ways { pages, table: None };
    let mut all = Vec::new();
    type Way = fn(&mut Walk, u64, &Ways<'_>) -> Result<f64, PoolError>;
    type FormWay = fn(Form<'_>, &mut Walk, u64, &Resident) -> f64;
    let dependent: (Way, Way, FormWay) = (ways::read, ways::version_check, ways::read_by);
    let overlapped: (Way, Way, FormWay) =
        (ways::scattered_read, ways::scattered_version_check, ways::scattered_read_by);
    for (label, (read, check, by_form)) in [("", dependent), (", overlapped", overlapped)] {
        for (name, way) in [("read", read), ("the pool", check)] {
            let mut walk = starts.next().unwrap_or(Walk::new(0));
            let name = format!("{name}{label}, {size}");
            all.push(Contestant::new(name, move || Ok(way(&mut walk, reads, &ways)?)));
        }
        for (name, form) in forms {
            let mut walk = starts.next().unwrap_or(Walk::new(0));
            let name = format!("{name}{label}, {size}");
            all.push(Contestant::new(name, move || Ok(by_form(form, &mut walk, reads, pages))));
        }
    }
    alternate(context.rounds(), &context.progress, all)
}

/// The memory of a pool without its pages.
fn memory_rows(added: Memory, chain: Chain, size: &str) -> Vec<Row> {
    let each = |bytes: u64| bytes as f64 / chain.pages() as f64;
    let data = chain.pages() * PAGE_SIZE as u64;
    let row = |name: String, value: f64| Row::count(name, value, "bytes");
    vec![
        row(
            format!("pool, states and resident set, per cached page of {size}"),
            each(added.anonymous.saturating_sub(data)),
        ),
        row(format!("pool, page tables, per cached page of {size}"), each(added.tables)),
    ]
}

/// The page tables of sparse pages, and how much of them is left after the pages were evicted.
fn sparse_rows(bits: u32) -> Result<Vec<Row>> {
    let tables = sparse::page_tables(1 << bits, 1 << SPREAD)?;
    let (size, every) = (show_pages(bits), 1 << SPREAD);
    let row = |name: String, bytes: f64| Row::count(name, bytes, "bytes");
    Ok(vec![
        row(format!("page tables, per page, every {every}th of {size} cached"), tables.full),
        row("page tables, per page, after these pages left".to_owned(), tables.empty),
    ])
}

/// The cost of each form by its definition, for the pages of the file that were ever used.
fn computed_rows() -> Vec<Row> {
    let row = |name: &str, bytes: f64| Row::count(name, bytes, "bytes");
    vec![
        row("words of 8 bytes, per stored page", 8.0),
        row("two bits, version in the page, per stored page", 0.25),
        row("state in the page, per stored page", 0.0),
    ]
}

/// The conclusions from the figures; docs/hit-path.md gives the reasons.
const CONCLUSIONS: &[&str] = &[
    "Vellum offers words of 8 bytes: nothing else is faster, and the page table's 8 bytes a page \
     stay in any case.",
    "Two bits cost instructions, and the version then has to be in the page and in the file. A \
     state in the page is as fast as a word, but to see that a page is not in memory one has to \
     touch it, which is a page fault.",
    "Pages that were ever cached take memory, in blocks of 512 (2 MiB of the file); pages that \
     were never cached cost nothing.",
];
