//! Morsels: memory objects that processes mount as a whole.
//!
//! A [`Morsel`] is memory that has a descriptor (Halbuer et al., "Morsels: Explicit Virtual Memory
//! Objects", DIMES '23). One process makes it and fills it; others receive the descriptor, or open
//! it by name, and map all of it. Once its content is sealed no process can change it any more, and
//! only then does a [`Mapping`] give a `&[u8]`.
//!
//! Two backends have one interface ([`BackendKind`]). With Vellum's kernel module a mapping costs
//! one entry of the process' own page tables, however large the Morsel is, and all mappings share
//! the tables below it. Without the module a Morsel is a sealed memfd: processes share the memory
//! but not the page tables, and a request that a memfd cannot serve fails with an error that says
//! so.
//!
//! It is for large objects that many processes only read, such as the weights of a model. One
//! process fills and seals it, and passes its descriptor on:
//!
//! ```
//! use std::os::unix::net::UnixStream;
//! use vellum_morsel::{Access, BackendChoice, Morsel, Provider, Seals, Shape};
//!
//! let provider = Provider::new(BackendChoice::Auto)?;
//! let morsel = provider.create(&Shape::of_length(10_000))?;
//! morsel.map(Access::ReadWrite)?.write_at(5_000, b"hello")?;
//! morsel.seal(Seals::CONTENT)?; // from now on no process can change it
//!
//! let (here, there) = UnixStream::pair()?; // to another process, as a rule
//! morsel.send(&here)?;
//! let received = Morsel::receive(&there)?;
//! let mapping = received.map(Access::Read)?;
//! assert_eq!(&mapping.view()?[5_000..5_005], b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where to go next: the cache daemon of the paper's section 3.1 is a [`Daemon`]. It reads a file
//! once and hands it to every [`Client`] that may read it, as a Morsel. [`Shape`] has the
//! properties that are fixed when a Morsel is made: its length, its address, huge pages; [`probe`]
//! says which backends this machine has.
//!
//! Runs on Linux 5.10 and later with 4 KiB pages, on x86-64 and aarch64.

mod backend;
mod client;
mod daemon;
mod descriptor;
mod errno;
mod error;
mod huge;
mod mapping;
mod morsel;
mod protocol;
mod provider;
mod range;
mod scm_rights;
mod seals;
mod shape;
mod stat;
mod sys;

pub use backend::{BackendChoice, BackendKind, Probe, probe};
pub use client::{Client, ClientError, Loaded, Progress};
pub use daemon::{Daemon, DaemonError, DaemonOptions};
pub use descriptor::open_source;
pub use error::{Error, Result};
pub use mapping::{Access, Mapping};
pub use morsel::Morsel;
pub use protocol::{DaemonStat, Object, Refusal, SOCKET_VARIABLE, USUAL_SOCKET, usual_socket};
pub use provider::Provider;
pub use rustix::io::Errno;
pub use seals::Seals;
pub use shape::Shape;
pub use stat::Stat;

/// Bytes of a page.
pub const PAGE_SIZE: u64 = 4096;
