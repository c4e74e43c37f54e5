//! The page-state array against the exported page tables: figure 9 of the second paper.

use anyhow::{Context as _, Result};
use vellum_vm::BackendKind;

use super::contest::{Entrant, add_point, add_ratio, add_rows, compete};
use super::device::Tables;
use super::pattern::{Pattern, StateArray};
use super::threads::{Plan, Strategy};
use super::{Size, device, without_module};
use crate::{Context, Experiment, count};
use vellum_bench::machine::kib;
use vellum_bench::report::{Axis, Chart, Outcome, Row};

/// The experiment.
pub const TABLES: Experiment = Experiment {
    name: "exmap-tables",
    shows: "which pages are there, by an array of states or by the page tables: time and memory",
    source: "IEEE Access 2023, figure 9",
    run,
};

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    let size = Size::of(context);
    context.progress.doing("making surfaces");
    let madvise = size.kernel_ground(BackendKind::Madvise)?;
    let memory = size.memory(0)?;
    let mut outcome = Outcome::default();
    outcome.notes.push(size.note());
    let (states, of_array) = added(&["RssAnon", "VmPTE"], || Ok(StateArray::new(size.pages)))?;
    let (tables, of_tables) = added(&["RssAnon", "VmPTE"], || {
        let tables = memory.exmap().tables()?;
        look_everywhere(&tables, size.pages);
        Ok(tables)
    })?;
    outcome.rows.extend(memory_rows(size.pages, of_array, of_tables));
    let pages = size.pages;
    let (mut lines, mut refused, mut asked) = (Vec::new(), 0, 0);
    for threads in size.thread_counts() {
        for pattern in Pattern::ALL {
            for strategy in Strategy::ALL {
                let label = format!("{}, {}", pattern.name(), strategy.name());
                let threads_named = count(threads, "thread");
                let plan = Plan::new(threads, pattern, strategy, size.frames).lasting(size.time);
                let by_page = plan.page_by_page();
                let name = |way: &str| format!("{way}, {label}, {threads_named}");
                let entrants = [
                    Entrant::new(name("madvise, array"), &madvise, &states, pages, by_page),
                    Entrant::new(name("state array"), &memory, &states, pages, plan),
                    Entrant::new(name("page tables"), &memory, &tables, pages, plan),
                ];
                let found = compete(context, &entrants)?;
                add_rows(&mut outcome, &found);
                let label_of_both = format!("{label}, {threads_named}");
                let (better, worse) = (("page tables", &found[2]), ("state array", &found[1]));
                let ratio = add_ratio(&mut outcome, better, worse, &label_of_both);
                add_point(&mut lines, &label, (threads as f64, ratio));
                refused += found[2].total.refused;
                asked += found[2].total.pages + found[2].total.refused;
            }
        }
    }
    let share = 100.0 * refused as f64 / asked as f64;
    outcome.rows.push(Row::count("conflicts with page tables, of all pages asked for", share, "%"));
    outcome.charts.push(Chart {
        title: "Page tables in place of the state array".to_owned(),
        x: Axis::linear("threads that allocate"),
        y: Axis::linear("pages/s, by those with the array"),
        lines,
    });
    Ok(outcome)
}

/// Reads an entry in each page of the mapping, so that the page is mapped.
fn look_everywhere(tables: &Tables, pages: u64) {
    let there = (0..pages).step_by(512).filter(|page| tables.has(*page)).count();
    std::hint::black_box(there);
}

/// The result of `make`, and by how many bytes these counters of the process grow.
fn added<T>(names: &[&str], make: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let sum = || -> Result<u64> {
        let read =
            |name: &&str| kib("/proc/self/status", name).with_context(|| format!("no {name}"));
        names.iter().map(read).sum()
    };
    let before = sum()?;
    let made = make()?;
    Ok((made, sum()?.saturating_sub(before) << 10))
}

fn memory_rows(pages: u64, of_array: u64, of_tables: u64) -> Vec<Row> {
    let row = |name: &str, bytes: u64| {
        Row::count(format!("memory, {name}"), bytes as f64 / pages as f64, "bytes per page")
    };
    let array = row("state array", of_array);
    let ratio = of_tables as f64 / of_array as f64;
    let tables = row("page tables, mapping", of_tables).with_ratio(ratio, array.name.clone());
    vec![array, tables]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_written_is_counted() {
        // Runs alone, because other tests of the process would allocate and free memory meanwhile.
        let test = "exmap::tables::tests::memory_that_was_written_is_counted";
        if !vellum_testing::own_process::entered(test) {
            return;
        }
        let (made, bytes) = added(&["RssAnon", "VmPTE"], || Ok(vec![1u8; 64 << 20])).unwrap();
        assert!((60 << 20..80 << 20).contains(&bytes), "{bytes}");
        drop(made);
    }
}
