//! A write-ahead log: many threads append records at once, and learn when they are durable.
//!
//! [`Log::append`] copies a record into a ring in memory, with no lock held, and returns its
//! number. [`Log::wait_durable`] waits until the record survives a loss of power; all records that
//! were appended until then go to the device together. [`Log::open`] gives back every record that
//! was acknowledged, and goes on behind the last one. The blocks are kept by a [`LogDevice`]: a
//! folder of files, or memory that fails by plan.
//!
//! ```
//! use std::sync::Arc;
//! use vellum_log::{Log, LogError, LogOptions, SimulatedDevice, SimulatedOptions};
//!
//! let device = Arc::new(SimulatedDevice::new(SimulatedOptions::default()));
//! let (log, _) = Log::open(device.clone(), &LogOptions::default(), None, |_| Ok::<_,
//! LogError>(()))?;
//! let lsn = log.append(b"a record")?;
//! log.wait_durable(lsn)?;
//!
//! // The power fails.
//! let device = Arc::new(device.crash());
//! let mut found = Vec::new();
//! let (_log, end) = Log::open(device, &LogOptions::default(), None, |record| {
//!     found.push(record.bytes.to_vec());
//!     Ok::<_, LogError>(())
//! })?;
//! assert_eq!(found, [b"a record"]);
//! println!("the log ends at {}: {}", end.lsn, end.why);
//! # Ok::<(), LogError>(())
//! ```
//!
//! The format, what is durable when, and what each failure does: `docs/log.md`.

mod block;
mod calls;
mod device;
mod error;
#[cfg(all(test, not(feature = "model")))]
mod file_cases;
#[cfg(feature = "testing")]
mod flight_control;
mod flights;
mod log;
mod opening_process;
mod planted;
mod read_ahead;
#[cfg(all(test, not(feature = "model")))]
mod reference;
mod ring;
mod scan;
#[cfg(all(test, not(feature = "model")))]
mod simulated_cases;
#[cfg(all(test, not(feature = "model")))]
mod simulation;
mod slow_flights;
mod sync;
mod view;

pub use block::{BLOCK_BYTES, Block, Lsn, Unsound};
pub use calls::Durable;
#[cfg(feature = "testing")]
pub use device::choose_sync_method;
pub use device::{
    FileLog, FileLogOptions, FileSeen, LogDevice, SimulatedDevice, SimulatedFault,
    SimulatedOptions, SyncMethod, Written,
};
pub use error::LogError;
#[cfg(feature = "testing")]
pub use flight_control::Pilot;
pub use log::{Log, LogOptions};
pub use opening_process::OpeningProcess;
#[cfg(feature = "testing")]
pub use planted::{LogBug, plant};
pub use scan::{End, EndReason, Record, RecordRef, Scan};
#[cfg(feature = "testing")]
pub use slow_flights::Choose;
pub use view::{LogView, Records, Shown};
