//! A thread that reads the blocks of a log before a scan asks for them, so that the storage works
//! while the records of earlier blocks are redone.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use crate::block::Block;
use crate::device::LogDevice;

/// Blocks that are read at once. Storage gives larger parts faster.
const CHUNK: usize = 256;
/// So many chunks wait for the scan.
const CHUNKS_AHEAD: usize = 2;

/// The thread, until this is dropped.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    /// Chunks in their order, each with the number of its first block. `None` while it is dropped.
    chunks: Option<Receiver<(u64, Vec<Block>)>>,
    /// Takes back chunks that were used.
    used: Sender<Vec<Block>>,
    thread: Option<JoinHandle<()>>,
}

impl ReadAhead {
    /// Reads from block `first` on, to before block `end`. None if the system starts no thread.
    pub(crate) fn start(device: Arc<dyn LogDevice>, first: u64, end: u64) -> Option<ReadAhead> {
        let (sender, chunks) = sync_channel(CHUNKS_AHEAD);
        let (used, unused) = channel::<Vec<Block>>();
        let work = move || {
            let mut at = first;
            while at < end {
                let mut blocks = unused.try_recv().unwrap_or_default();
                blocks.resize((end - at).min(CHUNK as u64) as usize, Block::ZERO);
                // What cannot be read here the scan reads itself, and learns why.
                if device.read(at, &mut blocks).is_err() {
                    return;
                }
                let next = at + blocks.len() as u64;
                if sender.send((at, blocks)).is_err() {
                    return;
                }
                at = next;
            }
        };
        let thread = Builder::new().name("vellum-read-log".into()).spawn(work).ok();
        thread.map(|thread| ReadAhead { chunks: Some(chunks), used, thread: Some(thread) })
    }

    /// Puts the chunk that begins with block `first` into `chunk`. False if that is not the next
    /// chunk, or the thread could not read it.
    pub(crate) fn take(&self, first: u64, chunk: &mut Vec<Block>) -> bool {
        match self.chunks.as_ref().map(Receiver::recv) {
            Some(Ok((number, blocks))) if number == first => {
                // The thread may have ended.
                let _ = self.used.send(std::mem::replace(chunk, blocks));
                true
            }
            _ => false,
        }
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        drop(self.chunks.take());
        // It has nothing to report but a panic of the device, which the scan would meet, too.
        drop(self.thread.take().map(JoinHandle::join));
    }
}
