//! The experiments of `vellum bench`: the tables and figures of the papers, and comparisons.
//!
//! One file each, by name. An [`Experiment`] gets a [`Context`], measures with the harness
//! ([`vellum_bench`]) and returns an [`Outcome`](vellum_bench::report::Outcome); it prints nothing.
//! [`command`] chooses experiments, runs them and keeps their outcomes.

pub mod command;
pub mod trace;

mod aquila;
mod backups;
mod blob;
mod bulk_readers;
mod bulk_work;
mod commits;
mod context;
mod data_sizes;
mod dax;
mod disk;
mod durable;
mod exmap;
mod fig10;
mod fig4;
mod fig8;
mod graph;
mod in_memory;
mod in_memory_scaling;
mod log;
mod memory;
mod morsel;
mod out_of_memory;
mod page_access;
mod page_reads;
mod policy;
mod recovery;
mod resize;
mod snapshots;
mod states;
mod table2;
mod tpcc;
mod writers;
mod ycsb;

pub(crate) use context::count;
pub use context::{Context, Experiment};

/// All experiments, in the order of `vellum bench list`.
pub const ALL: &[Experiment] = &[
    table2::TABLE2,
    states::STATES,
    page_reads::PAGE_READS,
    fig4::FIG4,
    fig10::FIG10,
    graph::GRAPH,
    ycsb::YCSB,
    ycsb::YCSB_BUFFERED,
    blob::BLOB,
    memory::MEMORY,
    policy::POLICY,
    in_memory_scaling::FIG7,
    fig8::FIG8,
    in_memory::IN_MEMORY,
    out_of_memory::OUT_OF_MEMORY,
    disk::DISK,
    writers::WRITERS,
    commits::COMMITS,
    log::LOG,
    recovery::RECOVERY,
    snapshots::SNAPSHOTS,
    bulk_work::BULK_WORK,
    bulk_readers::BULK_READERS,
    backups::BACKUPS,
    tpcc::TPCC,
    tpcc::TPCC_TRANSACTIONS,
    data_sizes::DATA_SIZES,
    resize::RESIZE,
    exmap::ALLOCATION,
    exmap::INTERFACES,
    exmap::TABLES,
    exmap::POOL,
    exmap::ABLATION,
    exmap::READ,
    exmap::LOOKUP,
    exmap::COST,
    morsel::MORSEL_LOAD,
    morsel::MORSEL_START,
    morsel::MORSEL_MAP,
    morsel::MORSEL_PIPELINE,
    dax::DAX_MAP,
    dax::DAX_REPEAT,
    dax::DAX_SYNC,
    dax::DAX_APPEND,
    dax::DAX_ONCE,
    dax::DAX_ONCE_AGED,
    dax::DAX_SEARCH,
    dax::DAX_SEARCH_AGED,
    dax::DAX_SERVE,
    dax::DAX_START,
    dax::DAX_SPACE,
    aquila::AQUILA_PREFAULT,
    aquila::AQUILA_RANDOM,
];
