//! `vellum probe`: the facilities of this machine, Vellum's choice, and the cost of a page.

use std::path::PathBuf;

use serde_json::{Value, json};
use vellum_pool::device::{DeviceInfo, FileDevice, FileOptions, registrable_memory};
use vellum_vm::memory_limit::{self, MemoryLimit};
use vellum_vm::probe::cost::{self, Cost, Setting};
use vellum_vm::probe::{self, Facilities};
use vellum_vm::{BackendKind, PAGE_SIZE};

use crate::error::{Failure, Outcome};
use crate::output::{Output, columns};
use crate::size;

const HELP: &str = "\
Examples:
  vellum probe
  vellum probe --dir /data         does direct I/O work on that file system?
  vellum probe --json | jq .costs

The command tries every facility, and guesses none from the kernel's version. The costs are the
medians of rounds in which the backends take turns; the smallest and largest are in parentheses. To
release a page, the kernel flushes it from the TLBs of other CPUs, so a release costs more when
several threads of the process run. Populating a page includes zeroing it, except on exmap, where
the program writes the zeros that it needs.

Slots are memory for pages that a store finds by a table, once its file is longer than its memory.
Reads of several pages into slots cost less if io_uring can register that memory. For a user who may
not lock memory, the limit (ulimit -l) must be as large as the pool, for each thread that reads.";

/// The most memory that the command tries to register.
const REGISTERED_MAX: u64 = 64 << 20;

/// Show what this kernel offers, what Vellum chooses and why, and what a page costs
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The directory whose file system the command tries
    #[arg(long, default_value = ".")]
    dir: PathBuf,

    /// Machine-readable output
    #[arg(long)]
    json: bool,

    /// Pages that each thread populates and releases in a round
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count)]
    pages: u32,

    /// Pages per call
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    batch: u32,

    /// Rounds that are counted
    #[arg(long, value_name = "N", default_value = "9", value_parser = count)]
    rounds: u32,
}

fn count(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(count @ 1..=1_000_000) => Ok(count),
        _ => Err("write a number from 1 to 1000000".into()),
    }
}

/// The backends that are compared with the plainest.
const OTHERS: [BackendKind; 2] = [BackendKind::ProcessMadvise, BackendKind::Exmap];

/// The results of the probe.
struct Findings {
    facilities: Facilities,
    memory: Result<MemoryLimit, String>,
    /// How files in the directory are read and written.
    device: Result<DeviceInfo, String>,
    /// Whether slots are in huge pages.
    huge_slots: Result<(), String>,
    /// Bytes that io_uring registers, of up to [`REGISTERED_MAX`].
    registered: Result<u64, String>,
    /// One entry per backend of Morsels.
    morsels: Vec<vellum_morsel::Probe>,
    /// One entry per backend, for one and for two threads.
    costs: Vec<Cost>,
}

impl Findings {
    /// The cost on `madvise` divided by the cost on another backend, to populate and to release.
    fn ratio(&self, threads: usize, other: BackendKind) -> Option<(f64, f64)> {
        let cost = |backend: BackendKind| {
            let mut costs = self.costs.iter();
            costs.find(|cost| cost.backend == backend && cost.setting.threads == threads)
        };
        let (slow, fast) = (cost(BackendKind::Madvise)?, cost(other)?);
        Some((
            slow.populate_ns.median / fast.populate_ns.median,
            slow.release_ns.median / fast.release_ns.median,
        ))
    }

    /// The findings for programs.
    fn json(&self) -> Value {
        let facilities = &self.facilities;
        let choice = &facilities.choice;
        let list = facilities.list.iter();
        let list = list.map(|it| json!({"name": it.name, "found": it.found, "reason": it.reason}));
        let morsels = self.morsels.iter().map(|probe| {
            let (Ok(reason) | Err(reason)) = &probe.found;
            json!({"name": probe.backend.name(), "found": probe.found.is_ok(), "reason": reason})
        });
        let mut json = json!({
            "kernel": facilities.kernel_release,
            "memory": match &self.memory {
                Ok(limit) => json!({"bytes": limit.bytes, "source": limit.source}),
                Err(why) => json!({"error": why}),
            },
            "files": match &self.device {
                Ok(info) => json!({
                    "engine": info.engine,
                    "direct": info.direct.is_ok(),
                    "reason": info.direct.as_ref().err(),
                }),
                Err(why) => json!({"error": why}),
            },
            "slots": {
                "huge_pages": self.huge_slots.is_ok(),
                "reason": self.huge_slots.as_ref().err(),
                "registered_bytes": self.registered.as_ref().ok(),
                "registered_limited": self.registered != Ok(REGISTERED_MAX),
                "registered_error": self.registered.as_ref().err(),
            },
            "backend": {"name": choice.backend.name(), "reason": choice.reason},
            "morsels": morsels.collect::<Value>(),
            "facilities": list.collect::<Value>(),
            "costs": self.costs.iter().map(cost_json).collect::<Value>(),
        });
        for other in OTHERS {
            let ratios = [1, 2].into_iter().filter_map(|threads| {
                let (populate, release) = self.ratio(threads, other)?;
                Some(json!({"threads": threads, "populate": populate, "release": release}))
            });
            json[format!("madvise_over_{other}")] = ratios.collect();
        }
        json
    }
}

fn cost_json(cost: &Cost) -> Value {
    let spread = |it: cost::Spread| json!({"median": it.median, "min": it.min, "max": it.max});
    json!({
        "backend": cost.backend.name(),
        "threads": cost.setting.threads,
        "pages": cost.setting.pages,
        "batch": cost.setting.batch,
        "rounds": cost.setting.rounds,
        "populate_ns": spread(cost.populate_ns),
        "release_ns": spread(cost.release_ns),
    })
}

/// Runs the command.
///
/// # Errors
/// When the costs cannot be measured, or the output fails.
pub fn run(arguments: &Arguments) -> Outcome {
    let findings = find(arguments)?;
    let mut output = Output::new();
    if arguments.json {
        output.line(&format!("{:#}", findings.json()))?;
    } else {
        for line in text(arguments, &findings) {
            output.line(&line)?;
        }
    }
    output.finish()
}

fn find(arguments: &Arguments) -> Outcome<Findings> {
    let facilities = probe::facilities();
    let backends = probe::backends();
    let mut costs = Vec::new();
    for threads in [1, 2] {
        let setting = Setting {
            threads,
            pages: arguments.pages.into(),
            batch: arguments.batch as usize,
            rounds: arguments.rounds as usize,
        };
        let measured = cost::measure(&backends, setting)
            .map_err(|error| Failure::message(format!("cannot measure the costs: {error}")))?;
        costs.extend(measured);
    }
    Ok(Findings {
        facilities,
        memory: memory_limit::effective().map_err(|error| error.to_string()),
        device: device(arguments),
        huge_slots: probe::huge_pages().map(drop),
        registered: registrable_memory(REGISTERED_MAX).map_err(|error| error.to_string()),
        morsels: vellum_morsel::probe(),
        costs,
    })
}

/// Creates a file in the directory, to find out how the device reads and writes it.
fn device(arguments: &Arguments) -> Result<DeviceInfo, String> {
    use vellum_pool::device::Device;
    let path = arguments.dir.join(format!(".vellum-probe-{}", std::process::id()));
    let device = FileDevice::create(&path, FileOptions::default());
    let info = device.map(|device| device.info()).map_err(|error| error.to_string());
    let _ = std::fs::remove_file(&path);
    info
}

fn text(arguments: &Arguments, findings: &Findings) -> Vec<String> {
    let facilities = &findings.facilities;
    let mut lines = vec![format!("kernel   {}", facilities.kernel_release)];
    lines.push(match &findings.memory {
        Ok(limit) => format!("memory   {} ({})", size::show(limit.bytes), limit.source.display()),
        Err(why) => format!("memory   unknown: {why}"),
    });
    let dir = arguments.dir.display();
    lines.push(match &findings.device {
        Ok(info) => match &info.direct {
            Ok(()) => format!("files    {dir}: {}, direct I/O (O_DIRECT)", info.engine),
            Err(why) => format!("files    {dir}: {}, through the page cache: {why}", info.engine),
        },
        Err(why) => format!("files    {dir}: {why}"),
    });
    lines.push(match &findings.huge_slots {
        Ok(()) => "slots    in huge pages".to_owned(),
        Err(why) => format!("slots    in pages of {PAGE_SIZE} bytes: {why}"),
    });
    lines.push(match &findings.registered {
        Ok(REGISTERED_MAX) => "         io_uring can register their memory".to_owned(),
        Ok(bytes) => format!(
            "         io_uring can register {} of their memory in all: raise the limit, ulimit -l",
            size::show(*bytes)
        ),
        Err(why) => format!("         io_uring can register none of their memory: {why}"),
    });
    lines.push(format!("backend  {}: {}", facilities.choice.backend, facilities.choice.reason));
    for morsels in &findings.morsels {
        lines.push(match &morsels.found {
            Ok(about) => format!("morsels  {}: {about}", morsels.backend),
            Err(why) => format!("morsels  {}, not here: {why}", morsels.backend),
        });
    }
    lines.push(String::new());
    for facility in &facilities.list {
        let found = if facility.found { "yes" } else { "no" };
        lines.push(format!("{:<32} {found:<4} {}", facility.name, facility.reason));
    }
    lines.push(String::new());
    lines.push(format!(
        "nanoseconds per page of {PAGE_SIZE} bytes, {} pages per call: median (least to most)",
        arguments.batch
    ));
    lines.extend(columns(&cost_rows(findings)));
    lines
}

fn cost_rows(findings: &Findings) -> Vec<Vec<String>> {
    let row = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_string()).collect();
    let mut rows: Vec<Vec<String>> = vec![row(&["backend", "threads", "populate", "release"])];
    for threads in [1, 2] {
        for cost in findings.costs.iter().filter(|cost| cost.setting.threads == threads) {
            let spread = |spread: cost::Spread| {
                format!("{:.0} ({:.0} to {:.0})", spread.median, spread.min, spread.max)
            };
            rows.push(vec![
                cost.backend.to_string(),
                threads.to_string(),
                spread(cost.populate_ns),
                spread(cost.release_ns),
            ]);
        }
        for other in OTHERS {
            let Some((populate, release)) = findings.ratio(threads, other) else { continue };
            let name = format!("{} / {other}", BackendKind::Madvise);
            let (populate, release) = (format!("{populate:.1} x"), format!("{release:.1} x"));
            rows.push(row(&[&name, &threads.to_string(), &populate, &release]));
        }
    }
    rows
}
