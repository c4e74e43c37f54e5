//! The child that `vellum demo` kills: it updates chunks of files in transactions, and says what
//! was committed.
//!
//! Standard input has a line for each chunk: the number of its group, its generation, the
//! fingerprint of the file's own content, and its key in hexadecimal. A transaction gives all
//! chunks of one group their next generation. Once it is durable, the child writes a line with the
//! number of the group and its new generation. A thread has one transaction under way at a time,
//! and each group belongs to one thread. So a group has the last acknowledged generation, or the
//! next one.

use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum::{Store, Transaction, Tree};

use super::fingerprint::fingerprint;
use super::updates;
use crate::error::{AtStore, Doing, Failure, Outcome};
use crate::files::file_store::FileStore;
use crate::files::workers;
use crate::key_text::{from_hex, printable, push_hex};
use crate::options::PoolArguments;
use crate::random::Random;

/// The command's name, which no help shows.
pub const NAME: &str = "demo-victim";

/// Bytes of the log. Few, because a demonstration takes little of the disk.
const LOG_BYTES: u64 = 64 << 20;

/// Run as the process that the demonstration kills
#[derive(clap::Args)]
pub struct Arguments {
    store: PathBuf,
    #[arg(long)]
    log_folder: Option<PathBuf>,
    #[command(flatten)]
    pool: PoolArguments,
    #[arg(long)]
    threads: usize,
    #[arg(long)]
    seed: u64,
}

/// A chunk that is updated.
pub struct Chunk {
    pub key: Vec<u8>,
    pub generation: u64,
    /// Of the file's own content.
    pub print: u64,
}

/// Chunks that always change together.
pub type Group = Vec<Chunk>;

/// The lines of standard input for these groups.
pub fn request(groups: &[Group]) -> Vec<u8> {
    let mut text = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        for chunk in group {
            text.extend_from_slice(
                format!("{number} {} {} ", chunk.generation, chunk.print).as_bytes(),
            );
            push_hex(&chunk.key, &mut text);
            text.push(b'\n');
        }
    }
    text
}

/// Reads a line of standard output: the number of a group, and its generation. `None` for a line
/// that the kill has torn.
pub fn acknowledgement(line: &str) -> Option<(usize, u64)> {
    let (number, generation) = line.strip_suffix('.')?.split_once(' ')?;
    Some((number.parse().ok()?, generation.parse().ok()?))
}

/// Updates until a signal ends the process.
///
/// # Errors
/// When the store fails, or a chunk is not what it should be.
pub fn run(arguments: &Arguments) -> Outcome {
    // A demonstration that ends leaves no child behind.
    let death =
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    death.map_err(io::Error::from).doing(|| "asking to end with the demonstration".into())?;
    let groups = read_request()?;
    let name = &arguments.store;
    let mut options = arguments.pool.options(None);
    if let Some(folder) = &arguments.log_folder {
        options = options.log_folder(folder);
    }
    let store = Store::open(name, &options.log(true).log_bytes(LOG_BYTES)).at(name)?;
    let files = FileStore::find(&store).at(name)?;
    let files = files.ok_or_else(|| Failure::message("MISMATCH: the trees are gone"))?;
    workers::each_thread(arguments.threads, |thread, stop: &AtomicBool| {
        let own: Vec<usize> = (thread..groups.len()).step_by(arguments.threads).collect();
        if own.is_empty() {
            return Ok(());
        }
        let mut random = Random::new(arguments.seed, thread as u64);
        let mut done = vec![0; groups.len()];
        while !stop.load(Ordering::Relaxed) {
            let number = own[random.below(own.len())];
            store
                .transact(|transaction| {
                    update(transaction, &files.content, &groups[number], done[number])
                })
                .at(name)??;
            done[number] += 1;
            let generation = groups[number][0].generation + done[number];
            let line = format!("{number} {generation}.\n");
            let written = io::stdout().lock().write_all(line.as_bytes());
            written.doing(|| "writing to the demonstration".into())?;
        }
        Ok(())
    })
}

fn read_request() -> Outcome<Vec<Group>> {
    let mut groups: Vec<Group> = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line.doing(|| "reading from the demonstration".into())?;
        let (number, chunk) = parse(&line)
            .ok_or_else(|| Failure::message(format!("'{line}' is no chunk to update")))?;
        if number >= groups.len() {
            groups.resize_with(number + 1, Group::new);
        }
        groups[number].push(chunk);
    }
    Ok(groups)
}

fn parse(line: &str) -> Option<(usize, Chunk)> {
    let mut words = line.split(' ');
    let number = words.next()?.parse().ok()?;
    let generation = words.next()?.parse().ok()?;
    let print = words.next()?.parse().ok()?;
    let key = from_hex(words.next()?.as_bytes())?;
    Some((number, Chunk { key, generation, print }))
}

/// Gives all chunks of a group their next generation. `done` is how often this process has done so
/// before.
fn update(
    transaction: &mut Transaction,
    content: &Tree,
    group: &Group,
    done: u64,
) -> vellum::Result<Outcome> {
    for chunk in group {
        let before = chunk.generation + done;
        let value = transaction.get(content, &chunk.key)?.map(|value| value.to_vec());
        let mut bytes = value.unwrap_or_default();
        if !updates::undo(&mut bytes, before) || fingerprint(&bytes) != chunk.print {
            let key = printable(&chunk.key);
            let what = format!("MISMATCH: {key} is not what update {before} left");
            return Ok(Err(Failure::message(what)));
        }
        updates::apply(&mut bytes, before + 1);
        transaction.put(content, &chunk.key, &bytes)?;
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_were_written() {
        let chunk = |key: &[u8], generation, print| Chunk { key: key.to_vec(), generation, print };
        let groups =
            [vec![chunk(b"a\0\n", 0, u64::MAX)], vec![chunk(b"b", 7, 1), chunk(b"c", 8, 2)]];
        let text = String::from_utf8(request(&groups)).unwrap();
        let read: Vec<_> = text.lines().map(|line| parse(line).unwrap()).collect();
        let told =
            |number: usize| (read[number].0, &read[number].1.key[..], read[number].1.generation);
        assert_eq!(
            (0..3).map(told).collect::<Vec<_>>(),
            [(0, &b"a\0\n"[..], 0), (1, b"b", 7), (1, b"c", 8)]
        );
        assert!(parse("1 2 3").is_none() && parse("1 2 3 0g").is_none());
    }

    #[test]
    fn torn_acknowledgements_count_for_nothing() {
        assert_eq!(acknowledgement("12 345."), Some((12, 345)));
        for torn in ["", "12", "12 3", "12 34", "12 345"] {
            assert_eq!(acknowledgement(torn), None, "{torn}");
        }
    }
}
