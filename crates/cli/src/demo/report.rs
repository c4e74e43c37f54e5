//! The table at the end.

use super::figures::Phase;
use super::kills::Seen;
use super::memory_watch::MemoryWatch;
use crate::error::Outcome;
use crate::files::listing::LeftOut;
use crate::output::{Output, columns};
use crate::size::show;

/// Everything that the table shows.
pub struct Report {
    pub files: u64,
    pub links: u64,
    pub bytes: u64,
    pub left_out: LeftOut,
    pub unreadable: u64,
    /// Files that changed while the demonstration ran, so that it could not compare them.
    pub changed: u64,
    pub file_bytes: u64,
    pub pool_bytes: u64,
    pub backend: String,
    pub translation: &'static str,
    pub device: String,
    pub watch: MemoryWatch,
    pub kills: Seen,
    pub phases: Vec<Phase>,
    pub compared: u64,
    pub pages_checked: u64,
}

/// Prints the table to standard output.
///
/// # Errors
/// When standard output cannot be written.
pub fn print(report: &Report) -> Outcome {
    let mut output = Output::new();
    for (name, value) in summary(report) {
        output.line(&format!("{name:<15} {value}"))?;
    }
    output.line("")?;
    for line in columns(&phase_rows(&report.phases)) {
        output.line(&line)?;
    }
    output.line("")?;
    output.line(&format!(
        "every byte right: {} compared with the file system, {} pages checked",
        show(report.compared),
        report.pages_checked
    ))?;
    output.finish()
}

fn summary(report: &Report) -> Vec<(&'static str, String)> {
    let watch = &report.watch;
    let by_kernel = match watch.surface_peak {
        Some(bytes) => format!("{} by the kernel's", show(bytes)),
        None => "the kernel has no count".to_string(),
    };
    let process = watch.process_peak.load(std::sync::atomic::Ordering::Relaxed);
    let outside = process.saturating_sub(watch.process_before).saturating_sub(watch.pool_peak);
    let total = |of: fn(&Phase) -> u64| report.phases.iter().map(of).sum::<u64>();
    let (hits, misses) = (total(|phase| phase.hits), total(|phase| phase.misses));
    let share = report.bytes as f64 / report.pool_bytes as f64;
    let mut rows = vec![
        (
            "data",
            format!("{} in {} files, {} links", show(report.bytes), report.files, report.links),
        ),
        ("store", format!("{} on the disk", show(report.file_bytes))),
        ("pool", format!("{} (the data is {share:.1} times as large)", show(report.pool_bytes))),
        ("resident peak", format!("{} by the pool's count, {by_kernel}", show(watch.pool_peak))),
        (
            "process peak",
            format!("{} of private memory, {} outside of the pool", show(process), show(outside)),
        ),
        ("hit rate", format!("{:.1} %", hits as f64 * 100.0 / (hits + misses).max(1) as f64)),
        ("evictions", total(|phase| phase.evictions).to_string()),
        ("write-backs", total(|phase| phase.write_backs).to_string()),
        ("kill -9", kills(&report.kills)),
        ("backend", report.backend.clone()),
        ("found by", report.translation.to_owned()),
        ("device", report.device.clone()),
    ];
    let left_out = left_out(report);
    if !left_out.is_empty() {
        rows.push(("left out", left_out.join(", ")));
    }
    rows
}

fn kills(seen: &Seen) -> String {
    let recovery = seen.recovery.as_secs_f64();
    let Seen { kills, acknowledged, unacknowledged, .. } = seen;
    format!(
        "{kills} times amid updates: all {acknowledged} acknowledged commits are there, and \
         {unacknowledged} more as a whole; recovery took {recovery:.2} s at most"
    )
}

fn left_out(report: &Report) -> Vec<String> {
    let left_out = &report.left_out;
    let rest = [
        (report.changed, "changed during the run"),
        (report.unreadable + left_out.unreadable, "unreadable"),
        (left_out.special, "sockets, devices, pipes"),
        (left_out.elsewhere, "folders on other file systems"),
        (left_out.over_limit, "over the limit"),
    ];
    let mut texts: Vec<String> = rest
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, why)| format!("{count} {why}"))
        .collect();
    if left_out.ended_early {
        texts.push("all files after the limit".into());
    }
    texts
}

fn phase_rows(phases: &[Phase]) -> Vec<Vec<String>> {
    let headings =
        ["phase", "seconds", "ops/s", "data/s", "hits", "reads/s", "evictions", "write-backs"];
    let mut rows = vec![headings.iter().map(|heading| (*heading).to_string()).collect()];
    for phase in phases {
        let hits = phase.hit_rate().map_or("-".into(), |rate| format!("{:.1} %", rate * 100.0));
        rows.push(vec![
            phase.name.to_string(),
            format!("{:.1}", phase.time.as_secs_f64()),
            format!("{:.0}", phase.rate(phase.operations)),
            show(phase.rate(phase.bytes) as u64),
            hits,
            format!("{:.0}", phase.rate(phase.reads)),
            phase.evictions.to_string(),
            phase.write_backs.to_string(),
        ]);
    }
    rows
}
