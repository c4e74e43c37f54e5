//! Table 2 of SIGMOD'23: the cost of one access to a cached page, step by step, against a read of
//! plain memory and the hash table of a classical buffer manager.
//!
//! All rows of a group read the same memory: the pool's own pages, of 4 KiB. The reference does so
//! through a pointer. Everything else is the pool's public interface.

use anyhow::Result;
use vellum_pool::PoolError;

use super::page_access::rows;
use super::page_access::size::{self, CACHED_BITS, LARGE_BITS, show_pages};
use super::page_access::textbook_pages::{self, TextbookPages, in_textbook};
use super::page_access::walk::Walk;
use super::page_access::ways::{self, Ways};
use super::page_access::{Chain, HashTable, Resident, textbook};
use super::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const TABLE2: Experiment = Experiment {
    name: "table2",
    shows: "one access to a cached page: a plain read, the optimistic read, locks, hash tables",
    source: "SIGMOD'23, table 2 and section 5.4",
    run,
};

/// Rows are called those of huge pages if so large a share of the pages is in some.
const HUGE_ENOUGH: f64 = 0.9;
/// The paper spreads 128 GiB over 1 TiB.
const SPREAD: u32 = 3;
/// Two pools have the same pages, one at their own places, one in slots.
const COPIES: u64 = 2;
/// And a textbook's buffer manager.
const COPIES_WITH_TEXTBOOK: u64 = 3;

/// The pages of a group.
struct Pages {
    /// At their own places: found by the MMU.
    own: Resident,
    /// The same pages, found by a table.
    in_slots: Option<Resident>,
    /// The same pages, found by a textbook's buffer manager.
    textbook: Option<TextbookPages>,
}

impl Pages {
    fn own(own: Resident) -> Pages {
        Pages { own, in_slots: None, textbook: None }
    }

    fn both(chain: Chain) -> Result<Pages> {
        let in_slots = Some(Resident::by_table(chain)?);
        Ok(Pages { in_slots, ..Pages::own(Resident::new(chain)?) })
    }

    fn all(chain: Chain) -> Result<Pages> {
        Ok(Pages { textbook: Some(in_textbook(chain)?), ..Pages::both(chain)? })
    }
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let wanted = context.pick(17, LARGE_BITS);
    let large = size::affordable(wanted, COPIES)?;
    let beside = size::affordable(wanted, COPIES_WITH_TEXTBOOK)?;
    let mut outcome = Outcome::default();
    let mut group = |pages: &Pages, label: &str, dense: Option<&Samples>| {
        let all = measure(context, pages, label)?;
        outcome.rows.extend(rows_beside(&all, dense));
        Ok::<_, anyhow::Error>(all.into_iter().next())
    };

    let cached = show_pages(CACHED_BITS);
    group(&Pages::all(Chain::new(CACHED_BITS, 0))?, &cached, None)?;

    let (size, range) = (show_pages(large), show_pages(large + SPREAD));
    let dense = if beside == large {
        context.progress.doing(&format!("bringing in {size}, three times"));
        group(&Pages::all(Chain::new(large, 0))?, &size, None)?
    } else {
        let smaller = show_pages(beside);
        context.progress.doing(&format!("bringing in {smaller}, three times"));
        group(&Pages::all(Chain::new(beside, 0))?, &smaller, None)?;
        context.progress.doing(&format!("bringing in {size}, twice"));
        group(&Pages::both(Chain::new(large, 0))?, &size, None)?
    };

    context.progress.doing(&format!("bringing in {size} in a range of {range}"));
    let sparse = Pages::own(Resident::new(Chain::new(large, SPREAD))?);
    group(&sparse, &format!("{size} in a range of {range}"), dense.as_ref())?;
    drop(sparse);

    context.progress.doing(&format!("bringing in {size} in huge pages"));
    let (huge, share) = Resident::in_huge_pages(Chain::new(large, 0))?;
    if share >= HUGE_ENOUGH {
        group(&Pages::own(huge), &format!("{size} in huge pages"), dense.as_ref())?;
    }
    let percent = share * 100.0;
    outcome.notes.push(format!("The pool put {percent:.0} % of {size} into huge pages."));
    outcome.notes.extend(notes(large, beside));
    Ok(outcome)
}

/// One of the ways to read pages of a pool.
type Way = fn(&mut Walk, u64, &Ways<'_>) -> Result<f64, PoolError>;
/// One of the ways to read pages of a textbook's buffer manager.
type TextbookWay = fn(&mut Walk, u64, &TextbookPages) -> Result<f64, textbook::Error>;

/// The contestants of a group.
struct Group<'a> {
    label: &'a str,
    /// Accesses of a sample.
    reads: u64,
    starts: Box<dyn Iterator<Item = u64>>,
    contestants: Vec<Contestant<'a>>,
}

impl<'a> Group<'a> {
    fn add(&mut self, what: &str, way: Way, ways: Ways<'a>) {
        let (mut walk, reads) = (self.walk(), self.reads);
        let measure = move || Ok(way(&mut walk, reads, &ways)?);
        self.contestants.push(Contestant::new(format!("{what}, {}", self.label), measure));
    }

    fn add_textbook(&mut self, what: &str, way: TextbookWay, pages: Option<&'a TextbookPages>) {
        let Some(pages) = pages else { return };
        let (mut walk, reads) = (self.walk(), self.reads);
        let measure = move || Ok(way(&mut walk, reads, pages)?);
        self.contestants.push(Contestant::new(format!("{what}, {}", self.label), measure));
    }

    fn walk(&mut self) -> Walk {
        Walk::new(self.starts.next().unwrap_or_default())
    }
}

fn measure(context: &Context<'_>, pages: &Pages, label: &str) -> Result<Vec<Samples>> {
    let chain = pages.own.chain();
    let table = chain.is_dense().then(|| HashTable::of(chain));
    let own = Ways { pages: &pages.own, table: table.as_ref() };
    let in_slots = pages.in_slots.as_ref().map(|pages| Ways { pages, table: None });
    let textbook = pages.textbook.as_ref();
    let reads = size::accesses(chain.pages().trailing_zeros(), context.quick);
    let starts = Box::new(chain.starts());
    let mut group = Group { label, reads, starts, contestants: Vec::new() };
    group.add("read", ways::read, own);
    group.add("page state", ways::page_state, own);
    group.add("version check", ways::version_check, own);
    if let Some(in_slots) = in_slots {
        group.add("version check in slots", ways::version_check, in_slots);
    }
    group.add_textbook("textbook, version check", textbook_pages::optimistic_read, textbook);
    group.add("shared fix", ways::shared_fix, own);
    group.add_textbook("textbook, pin", textbook_pages::pinned_read, textbook);
    group.add("exclusive fix", ways::exclusive_fix, own);
    if table.is_some() {
        group.add("hash table", ways::hash_table_read, own);
        group.add("read, overlapped", ways::scattered_read, own);
        group.add("version check, overlapped", ways::scattered_version_check, own);
        if let Some(in_slots) = in_slots {
            let way = ways::scattered_version_check;
            group.add("version check in slots, overlapped", way, in_slots);
        }
        let way = textbook_pages::scattered_read;
        group.add_textbook("textbook, version check, overlapped", way, textbook);
        group.add("hash table, overlapped", ways::scattered_hash_table, own);
    }
    alternate(context.rounds(), &context.progress, group.contestants)
}

/// The rows of a group. Its plain read is compared with `dense`, that of another group.
fn rows_beside(all: &[Samples], dense: Option<&Samples>) -> Vec<Row> {
    let mut rows = rows::rows(all);
    if let (Some(first), Some(dense)) = (rows.first_mut(), dense) {
        // Measured one after the other, so the ratio is that of the medians.
        let ratio = first.value / dense.median();
        *first = first.clone().with_ratio(ratio, &dense.name);
    }
    rows
}

fn notes(large: u32, beside: u32) -> Vec<String> {
    let mut notes = vec![
        "Reads are dependent, as the paper's are: each word read is the next page's number, so a \
         row is the latency of one access. Rows named overlapped read at random instead, without \
         waiting for one another: there every instruction counts."
            .to_owned(),
        "All rows of a group read the same memory, the pool's pages of 4 KiB; 'read' through a \
         pointer, 'page state' without the validation, 'version check' is the whole optimistic \
         read. The hash table is not synchronised."
            .to_owned(),
        "Textbook: a buffer manager with a hash table has the same pages, in frames in huge pages, \
         in an order that has nothing to do with that of the file. The version is that of a \
         frame's latch; a pin is taken and given back for each access."
            .to_owned(),
        "In slots: another pool has the same pages, found by its table of page states \
         (docs/translation.md), in an order that has nothing to do with that of the file."
            .to_owned(),
        "In a range: the pages lie scattered over addresses eight times as many, as the paper's \
         128 GiB lie in 1 TiB. In huge pages: a pool that has collapsed them, and its states."
            .to_owned(),
    ];
    if beside < large {
        notes.push(format!(
            "There is memory for {} in three copies, so the textbook has these.",
            show_pages(beside)
        ));
    }
    if large < LARGE_BITS {
        notes.push(format!(
            "The large size is {}, not {}: the short form, or as much as memory allows.",
            show_pages(large),
            show_pages(LARGE_BITS)
        ));
    }
    notes
}
