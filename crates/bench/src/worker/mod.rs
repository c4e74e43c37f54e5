//! Child processes that each run one engine under a memory limit.
//!
//! A worker is this program again, started with a hidden command. It reads [`Request`]s and writes
//! [`Response`]s, one JSON text a line, through standard input and output. It is in its memory
//! cgroup before it opens anything, and the kernel kills it when its parent ends. The parent keeps
//! several workers and lets them run alternately ([`Team`]).

mod cache_size;
mod cleaner;
mod contest;
mod handle;
mod launcher;
mod message;
mod model_file;
mod pipeline;
mod serve;
mod setup;
mod team;
mod web_client;
mod whole_file;

pub use cache_size::{cache_bytes, limit_for, limit_for_data};
pub use cleaner::Cleaner;
pub use contest::{Contest, Series, named, scaled, times};
pub use handle::{Moment, Worker};
pub use launcher::Launcher;
pub use message::{GREETING, Request, Response, Usage};
pub use model_file::make as make_model;
pub use pipeline::{Head, Stage, Step, connect, sum_of};
pub use serve::main;
pub use setup::Setup;
pub use team::{Member, Team, Terms};
pub use web_client::{Page, Site};
pub use whole_file::{
    FileMapping, LoadMethod, Weight, make as make_file, sum as sum_of_pages, warm as warm_file,
};

/// The hidden command by which a worker is started.
pub const NAME: &str = "bench-worker";
