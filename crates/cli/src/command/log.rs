//! `vellum log`: the files and records of a write-ahead log, its damage, and its end.

use std::path::PathBuf;

use serde_json::{Value, json};
use vellum_log::{End, FileSeen, LogError, LogView, Lsn, Record, Shown};

use crate::error::{Failure, Outcome};
use crate::key_text::push_hex;
use crate::output::Output;
use crate::size::show;

/// Bytes of a record that are shown.
const SHOWN_MAX: usize = 16;

const HELP: &str = "\
Examples:
  vellum log wal                      the files, each record, and where the log ends
  vellum log wal --from 8240          from the record of that number on
  vellum log wal --json | jq 'select(.type == \"damage\")'

Changes nothing, takes no lock, and shows what it can of a damaged log. Each record has a line: its
number (the place of its first byte), its length, its block, the opening of the log that wrote it,
and its first 16 bytes. Damage has a line at its place, and the command goes on after it; the exit
code is then 1. The last line says where the log ends, and why it ends there.

The log may reuse a spare file. If another program writes to the log meanwhile, a file that it
reuses may look damaged: run the command again. The command also shows records that no sync has made
durable.

With --json, one object per line, by 'type': log, file, record, damage, end.";

/// Show the files and records of a write-ahead log
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The folder of the log
    folder: PathBuf,

    /// The number of the record to begin with
    #[arg(long, value_name = "N")]
    from: Option<u64>,

    /// Machine-readable output: one object per line
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the folder has no log, or the log is damaged, or the output fails.
pub fn run(arguments: &Arguments) -> Outcome {
    let view = LogView::open(&arguments.folder).map_err(failed)?;
    let records = view.records(arguments.from.map(Lsn)).map_err(failed)?;
    let mut output = Output::new();
    let mut line = |json: Value, text: String| {
        let line = if arguments.json { json.to_string() } else { text };
        output.line(&line)
    };
    let (json, text) = log(&view);
    line(json, text)?;
    for seen in view.files() {
        let (json, text) = file(seen);
        line(json, text)?;
    }
    let mut is_damaged = view.files().iter().any(|file| file.fault.is_some());
    for fault in view.faults() {
        is_damaged = true;
        let (json, text) = damage(fault);
        line(json, text)?;
    }
    let mut is_known = false;
    for shown in records {
        let (json, text) = match &shown {
            Shown::Record { record: one, incarnation } => record(one, *incarnation),
            Shown::Damage(error) => {
                is_damaged = true;
                damage(error)
            }
            Shown::End(at, left) => {
                is_known = true;
                end(at, *left)
            }
            _ => continue,
        };
        line(json, text)?;
    }
    if !is_known {
        line(json!({"type": "end", "lsn": null}), "the end of the log is unknown".into())?;
    }
    output.finish()?;
    let folder = arguments.folder.display();
    match is_damaged {
        false => Ok(()),
        true => Err(Failure::message(format!("{folder}: the log is damaged; see the lines above"))),
    }
}

fn failed(error: LogError) -> Failure {
    Failure::message(error.to_string())
}

fn log(view: &LogView) -> (Value, String) {
    let (identity, begin) = (format!("{:016x}", view.identity()), view.begin().0);
    let bytes = view.segment_bytes();
    let text = format!("log {identity}, begins at {begin}, files of {}", show(bytes));
    (json!({"type": "log", "log": identity, "begin": begin, "segment_bytes": bytes}), text)
}

fn file(file: &FileSeen) -> (Value, String) {
    let segment = match file.segment {
        Some(segment) if file.is_live => format!("segment {segment}"),
        Some(segment) => format!("spare, was segment {segment}"),
        None => "not of this log".into(),
    };
    let fault = file.fault.iter().map(|fault| format!("; {fault}")).collect::<String>();
    let json = json!({
        "type": "file",
        "name": file.name,
        "segment": file.segment,
        "live": file.is_live,
        "fault": file.fault,
    });
    (json, format!("{}: {segment}{fault}", file.name))
}

fn record(record: &Record, incarnation: u64) -> (Value, String) {
    let Record { lsn, bytes } = record;
    let (len, block) = (bytes.len(), lsn.0 / 4096);
    let shown = &bytes[..len.min(SHOWN_MAX)];
    let mut hex = Vec::new();
    push_hex(shown, &mut hex);
    let hex = String::from_utf8_lossy(&hex);
    let ascii: String = shown.iter().map(|byte| visible(*byte)).collect();
    let more = if len > SHOWN_MAX { "..." } else { "" };
    let text = format!(
        "{lsn:>12}  {len:>8} bytes  block {block:<8}  opening {incarnation:<4}  {hex:<32}  \
         {ascii}{more}"
    );
    let json = json!({
        "type": "record",
        "lsn": lsn.0,
        "len": len,
        "block": block,
        "opening": incarnation,
        "begins_hex": hex,
    });
    (json, text)
}

/// A byte as one letter; a dot for a byte that does not print.
fn visible(byte: u8) -> char {
    if byte.is_ascii_graphic() || byte == b' ' { byte.into() } else { '.' }
}

fn damage(error: &LogError) -> (Value, String) {
    let lsn = match error {
        LogError::Damaged { lsn, .. } => Some(lsn.0),
        _ => None,
    };
    let text = error.to_string();
    (json!({"type": "damage", "lsn": lsn, "what": text}), format!("damage: {text}"))
}

fn end(end: &End, left: u64) -> (Value, String) {
    let (lsn, why) = (end.lsn.0, end.why.to_string());
    let mut text = format!("ends at {lsn}: {why}");
    if let Some(unfinished) = end.unfinished {
        text += &format!("; the record at {unfinished} is incomplete, and was not acknowledged");
    }
    if left > 0 {
        text += &format!("; {left} blocks after it come from flushes that did not finish");
    }
    let json = json!({
        "type": "end",
        "lsn": lsn,
        "why": why,
        "unfinished": end.unfinished.map(|lsn| lsn.0),
        "blocks_left": left,
    });
    (json, text)
}
