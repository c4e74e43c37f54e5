//! Reading a file into a Morsel, several pieces at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::daemon::source::Source;
use crate::error::Error;
use crate::morsel::Morsel;
use crate::protocol::Refusal;
use crate::provider::Provider;
use crate::seals::Seals;
use crate::shape::Shape;

/// Bytes of a piece: many huge pages, because each piece has a cost of its own.
const PIECE: u64 = 32 << 20;

/// The progress of a load, and whether any client still waits for it.
#[derive(Debug, Default)]
pub(super) struct Course {
    pub(super) done: AtomicU64,
    pub(super) given_up: AtomicBool,
}

/// The file as a sealed Morsel, with a descriptor that cannot write.
pub(super) fn load(
    provider: &Provider,
    source: &Source,
    threads: usize,
    course: &Course,
) -> Result<Morsel, Refusal> {
    let morsel = provider.create(&shape(source.version.length)).map_err(failed)?;
    fill(&morsel, source, threads, course)?;
    if !source.is_unchanged() {
        return Err(Refusal::Changed);
    }
    morsel.seal(Seals::CONTENT).map_err(failed)?;
    source.leave_page_cache();
    morsel.read_only().map_err(failed)
}

/// In huge pages wherever the shape allows them. A forked child keeps it, as it keeps a mapped
/// file.
fn shape(length: u64) -> Shape {
    let shape = Shape::of_length(length).inherit();
    if shape.order() >= 2 { shape.huge() } else { shape }
}

fn fill(morsel: &Morsel, source: &Source, threads: usize, course: &Course) -> Result<(), Refusal> {
    let pieces = source.version.length.div_ceil(PIECE);
    let threads = threads.clamp(1, usize::try_from(pieces).unwrap_or(usize::MAX));
    let next = AtomicU64::new(0);
    let failed_one = AtomicBool::new(false);
    let read_pieces = || {
        let mut result = Ok(());
        while result.is_ok() && !failed_one.load(Ordering::Relaxed) {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                break;
            }
            result = read_piece(morsel, source, piece, course);
        }
        failed_one.fetch_or(result.is_err(), Ordering::Relaxed);
        result
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads)
            // With fewer threads the load only takes longer.
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, read_pieces).ok())
            .collect();
        let mut result = read_pieces();
        for other in others {
            let panicked = || Refusal::Failed { reason: "a thread of the load panicked".into() };
            result = result.and(other.join().unwrap_or_else(|_| Err(panicked())));
        }
        result
    })
}

fn read_piece(
    morsel: &Morsel,
    source: &Source,
    piece: u64,
    course: &Course,
) -> Result<(), Refusal> {
    if course.given_up.load(Ordering::Relaxed) {
        return Err(Refusal::GivenUp);
    }
    // The check at the end decides; this one saves the rest of the work.
    if !source.is_unchanged() {
        return Err(Refusal::Changed);
    }
    let start = piece * PIECE;
    let bytes = PIECE.min(source.version.length - start);
    match morsel.fill(source, start, start, bytes) {
        Ok(filled) if filled == bytes => {
            course.done.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        }
        Ok(_) | Err(Error::SourceEnded { .. }) => Err(Refusal::Changed),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: Error) -> Refusal {
    Refusal::Failed { reason: error.to_string() }
}
